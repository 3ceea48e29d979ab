# ruff: noqa: SIM905
"""The demo world's words: every name and value its documents can use. One word is one token of the demo model.

Made-up names (cities, companies, rivers) come from syllables, so that no real organisation is described.
"""

FEMALE_NAMES = tuple(
    """
    Alice Anna Betty Carla Clara Daisy Diana Edith Ella Emily Emma Erica Eva Fiona Flora Grace Greta Hanna Hazel
    Helen Ida Irene Jane Janet Julia June Karen Katie Laura Lena Linda Lisa Lucy Mabel Maria Martha Mary Megan
    Mia Molly Nancy Nina Nora Olga Paula Petra Rachel Rita Rosa Ruth Sally Sara Sophie Stella Susan Tara Tina
    Vera Wendy Zoe
    """.split()
)
MALE_NAMES = tuple(
    """
    Adam Alan Albert Alex Andrew Anton Arthur Ben Bob Bruno Carl Charles Daniel David Dennis Edgar Eric Ernest
    Felix Frank Fred George Gordon Harry Henry Hugo Ian Isaac Ivan Jack Jacob James Jim John Karl Kevin Leo
    Louis Luke Mark Martin Max Michael Nathan Neil Oliver Oscar Otto Paul Peter Philip Ralph Robert Roger Sam
    Simon Thomas Victor Walter William
    """.split()
)
LAST_NAMES = tuple(
    """
    Abbott Adler Archer Bailey Baker Barnes Becker Bell Bishop Blake Bowen Brandt Brooks Brown Burke Carter
    Clark Cole Cooper Cox Crane Curtis Dalton Dean Dixon Doyle Drake Duncan Ellis Evans Fisher Fletcher Foster
    Fox Freeman Gardner Gibson Grant Gray Green Hale Hardy Harper Hayes Hill Holmes Howard Hudson Hunt Jensen
    Jones Keller Kelly Kern King Knight Lambert Lane Larsen Lawson Logan Marsh Mason Meyer Miller Moore Morgan
    Murphy Nash Nelson Norton Olsen Owens Palmer Parker Pearce Perry Porter Quinn Reed Rhodes Ross Russell Shaw
    Sharp Stone Sutton Tate Taylor Turner Vance Wade Walker Walsh Ward Watson Webb West Wood Young
    """.split()
)
COMPANY_STEMS = tuple(
    """
    Falon Mavtron Tekara Paxex Quoara Korex Dexara Paxara Xanics Lumora Nexara Velora Quoex Orbara Tekdyne Rovon
    Mavtech Xanara Rovco Paxora Genon Zenics Velex Kortron Dexon Borco Quotron Zentech Tekium Cynium Orbtech
    Orbex Mavium Axtron Hextron Cynora Lumara Nexex Synex Axco Nexora Orbics Dexora Cynics Mavdyne Cyndyne
    Bordyne Genco Borics Tekon Hexara Rovara Zenco Mavara Synora Paxon Genex Faltech Zenon Velara Velco Xantron
    Rovtech Genora Quotech Synon Nexon Paxtron Lumon Cynco Orbco Lumdyne Paxtech Syndyne Hextech Zenium Hexex
    Hexco Cynara Xanco
    """.split()
)
CITIES = tuple(
    """
    Verwick Pelham Fendale Fenville Dorton Kinham Wesstad Ulwick Halwick Renport Halstad Lanville Kinstad
    Brenville Dorstad Aldburg Mirton Uldale Aldham Garville Dorburg Mirford Lanford Renmouth Elport Fenham
    Halburg Renford Tormouth Kinburg Selham Dorford Halford Renstad Ulstad Norford Elburg Mirport Calmouth
    Norville Oston Kinton Kinmouth Kinford Lanwick Elwick Norburg Verton Renwick Brenham Selville Garford
    Kinport Seldale Lanham Garwick Ulville Landale Ulton Halton Norwick Selmouth Torburg Torford Torstad
    Wesville Torham Pelstad Calport Fenburg Tordale Aldton Fenport Pelport Ulham Osburg Mirwick Calburg Wesham
    Norport Calville Dorham Eldale Garham Renburg Garport Selwick Selburg Osmouth Ulmouth
    """.split()
)
RIVERS = tuple(
    """
    Bela Neror Obisha Belen Munune Saven Belor Amira Drisha Loor Nerisha Amisha Dren Belisha Tamisha Savor Muna
    Ila Savune Oben Neren Drune Eskor Sava Amor Esken Loisha Tamira Ilen Kurisha Oba Tamen Kurira Kura Kuren
    Kuror
    """.split()
)
PRODUCTS = tuple(
    """
    bicycles boots candles carpets chairs clocks cranes drones engines glasses gloves guitars hats kettles
    knives lamps laptops lenses lifts locks magnets mirrors motors ovens paints pencils phones pumps radios
    ropes saddles sensors ships shoes skates soaps stoves tents tires toys trains trucks tunnels turbines
    umbrellas valves watches windows
    """.split()
)
FOODS = tuple(
    """
    apples bananas beans bread cabbage cake carrots cheese cherries chicken chocolate corn curry eggs figs
    grapes honey lemons lentils mango melons mushrooms noodles nuts olives onions pancakes pasta peaches pears
    pizza plums potatoes rice salad salmon soup spinach tofu tomatoes
    """.split()
)
INSTRUMENTS = tuple(
    """
    accordion banjo bass bassoon cello clarinet cornet drums fiddle flute guitar harp horn lute mandolin oboe
    organ piano recorder saxophone trombone trumpet tuba ukulele viola violin xylophone zither
    """.split()
)
SUBJECTS = tuple(
    """
    anatomy art astronomy biology botany chemistry dance design economics ethics genetics geography geology
    geometry history law linguistics logic mathematics mechanics medicine music nursing optics philosophy
    physics poetry politics psychology sociology statistics theology zoology
    """.split()
)
SIGHTS = tuple(
    """
    abbey arena aqueduct bakery bridge castle cathedral cave circus fountain fortress garden harbor library
    lighthouse market mill monastery museum observatory opera palace park pier prison pyramid stadium statue
    temple theater tower university waterfall windmill zoo
    """.split()
)
PROJECT_NAMES = tuple(
    """
    Amber Anchor Aurora Badger Basalt Beacon Birch Bobcat Cedar Cobalt Comet Condor Copper Coral Delta Ember
    Falcon Flint Garnet Glacier Granite Harrier Hazelnut Heron Indigo Ivory Jasper Juniper Kestrel Lagoon
    Lantern Lynx Magnet Maple Marble Meteor Nimbus Onyx Opal Orchid Osprey Otter Pebble Pelican Prairie Quartz
    Raven Ripple Saffron Sequoia Slate Sparrow Summit Thunder Topaz Tundra Velvet Walnut Willow Zephyr
    """.split()
)
ROLES = tuple(
    """
    accountant analyst architect auditor baker buyer chemist clerk controller cook courier director driver
    editor engineer foreman gardener inspector lawyer librarian manager mechanic nurse painter planner porter
    programmer secretary surveyor teacher technician trainer translator treasurer
    """.split()
)
EVENT_TOPICS = tuple(
    """
    audit budget contract customer delivery energy export hiring inventory logistics marketing patent planning
    pricing quality recycling research risk safety security staffing storage supplier travel warranty
    """.split()
)
EVENT_FORMS = tuple(
    """
    briefing conference hearing review seminar workshop
    """.split()
)
MONTHS = tuple(
    """
    January February March April May June July August September October November December
    """.split()
)
YEARS = tuple(str(year) for year in range(1900, 1990, 2))
