"""The page in Debian's chromium, by its driver: drop a file, ask, move the slider, two tabs, one that disconnects."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from ui_site import QUESTION

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("no chromium or chromedriver; install them: apt-get install chromium chromium-driver",
                allow_module_level=True)  # fmt: skip

EVIL = "</p><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
EVIL_NAME = "<img src=x onerror=hacked=3>.md"
MODES = ("full", "prefix", "reuse", "blend")
DROP = """
const [name, text] = arguments, data = new DataTransfer();
data.items.add(new File([text], name));
const drop = new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true});
document.getElementById("drop").dispatchEvent(drop);
"""


class Page:
    """A tab of the browser, by the elements that a user works with."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def __getitem__(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, met: Callable[[], object], timeout_s: float = 90.0) -> None:
        WebDriverWait(self.driver, timeout_s, 0.05).until(lambda _: met(), f"the page: {self['about'].text}")

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.until(lambda: "answers from" in self["about"].text)

    def width(self, pixels: int) -> None:
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def drop(self, name: str, text: str) -> None:
        self.driver.execute_script(DROP, name, text)
        self.until(lambda: not self["taking"].is_displayed() and (self["taken-text"].text or self.problems))

    @property
    def problems(self) -> str:
        return self["document-problems"].text

    def ask(self, question: str) -> None:
        self["question"].clear()
        self["question"].send_keys(question, Keys.ENTER)

    @property
    def is_idle(self) -> bool:
        return self["go"].text == "Ask" and not self["progress"].is_displayed()

    def answers(self) -> dict[str, str]:
        return {mode: self[mode].find_element(By.CLASS_NAME, "answer").text for mode in MODES}

    def states(self) -> dict[str, int]:
        """Tokens of the prompt by state, as their marks say."""
        letters = {"e": "exact", "c": "computed", "k": "reused", "r": "recomputed"}
        return {name: len(self.all(f"#tokens .tokens .t.{letter}")) for letter, name in letters.items()}

    def slide(self, key: str) -> None:
        """Press a key on the slider, and wait until the page has followed."""
        self.driver.execute_script("document.querySelector('#tokens .tokens').id = 'before'")
        self["ratio"].send_keys(key)
        self.until(lambda: self.is_idle and not self.all("#before"))


@pytest.fixture(scope="module")
def driver():
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-proxy-server"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, Service(str(DRIVER))) as made:
        yield made


@pytest.fixture
def page(driver, site):
    made = Page(driver)
    made.width(1180)
    made.open(site.url)
    yield made
    severe = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert severe == []


def test_an_example_shows_all_modes_and_the_slider_changes_its_tokens(page):
    example = next(button for button in page.all("#examples button") if button.text == QUESTION)
    example.click()
    page.until(lambda: page.is_idle and page["answers"].is_displayed())
    assert page.answers() == {"full": "trainer", "prefix": "trainer", "reuse": "not stated", "blend": "trainer"}
    assert "wrong: it is trainer" in page["reuse"].text
    assert all(page[mode].find_element(By.CLASS_NAME, "time").text.endswith("s") for mode in MODES)
    first = page.states()
    assert all(first.values()), "tokens of all four states"
    assert str(first["recomputed"]) in page["counts"].text
    assert "the chunks\u2019 stored KV was computed alone" in page["blend"].text
    assert page["ratio-shown"].text == "15 %"
    assert len(page.all("#sources li")) >= 3

    page.slide(Keys.END)
    assert page["ratio-shown"].text == "100 %"
    everything = page.states()
    assert everything["reused"] == 0 < first["reused"]
    page.slide(Keys.HOME)
    assert page["ratio-shown"].text == "0 %"
    nothing = page.states()
    assert nothing["recomputed"] == 0
    assert page.answers()["blend"] == "not stated", "as full reuse"
    assert sum(first.values()) == sum(everything.values()) == sum(nothing.values())

    token = page.all("#tokens .t.k")[0]
    token.click()
    assert page["token-hint"].text.endswith(token.get_attribute("title") or "?")


@pytest.mark.slow
def test_a_dropped_file_is_ingested_and_its_markup_stays_text(driver, empty):
    page = Page(driver)
    page.width(1180)
    page.open(empty.url)
    assert "No documents yet" in page["taken-text"].text
    page.ask("Who is there?")
    page.until(lambda: "drop some" in page["ask-problem"].text)
    page.drop("bad.pdf", "%PDF-1.7 and nothing")
    assert "bad.pdf" in page.problems
    assert "repair it" in page.problems
    page.drop(EVIL_NAME, f"James Bell has a job at Velora. {EVIL}")
    assert page["taken-text"].text.startswith("1 document ingested: 1 chunk, 1 KV cache prefilled")
    page.until(lambda: page["documents"].is_displayed())
    page["documents"].click()
    assert page["documents"].find_element(By.CSS_SELECTOR, "li").text == EVIL_NAME

    page.ask(f"Where has James Bell a job? {EVIL}")
    page.until(lambda: page.is_idle and page["prompt"].is_displayed())
    page.all("#sources summary")[0].click()
    assert EVIL in page.all("#sources blockquote")[0].text
    assert "<script>" in page["tokens"].text.replace(" ", "")
    assert EVIL in page["asked"].text
    assert page.all("main script, main img, main iframe") == []
    assert page.driver.execute_script("return window.hacked") is None
    driver.get_log("browser")  # this site's only


@pytest.mark.slow
def test_two_tabs_take_turns_and_closing_one_does_not_block_the_other(page, site):
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.open(site.url)
    second = page.driver.current_window_handle
    page.ask("Which company was founded first, Mavdyne or Paxtech?")
    page.driver.switch_to.window(first)
    page.ask(QUESTION)
    page.until(lambda: page.is_idle and page["prompt"].is_displayed())
    assert page.answers()["blend"] == "trainer"
    page.driver.switch_to.window(second)
    page.until(lambda: page.is_idle and page["prompt"].is_displayed())
    assert all(page.answers().values())

    page.ask(QUESTION)
    page.driver.close()  # hangs up
    page.driver.switch_to.window(first)
    page.ask(QUESTION)
    page.until(lambda: page.is_idle and page["prompt"].is_displayed())
    assert page.answers()["full"] == "trainer"


@pytest.mark.slow
def test_an_answer_can_be_stopped(page):
    for _ in range(5):  # an answer of the embedded model may end before the click
        page.ask(QUESTION)
        page.until(lambda: page["go"].text == "Stop")
        page["go"].click()
        page.until(lambda: page.is_idle)
        if page["ask-problem"].text:
            break
    assert page["ask-problem"].text == "Stopped."
    page.ask(QUESTION)
    page.until(lambda: page.is_idle and page["prompt"].is_displayed())
    assert not page["ask-problem"].is_displayed()


@pytest.mark.slow
def test_it_fits_a_phone_loads_nothing_from_elsewhere_and_names_its_fields(page, site):
    page.ask(QUESTION)
    page.until(lambda: page.is_idle and page["prompt"].is_displayed())
    for width in (360, 768, 1180):
        page.width(width)
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    names = {name: page[name].accessible_name for name in ("question", "files", "ratio", "go")}
    assert all(names.values()), names
    loaded = page.driver.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded
    assert all(name.startswith(site.url) for name in loaded)
    page["question"].send_keys(Keys.TAB)
    assert page.driver.switch_to.active_element == page["go"], "by the keyboard from the question on"


CONTRAST = """
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (rgb) => rgb.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.unshift(numbers(getComputedStyle(at).backgroundColor));
  const over = (under, [r, g, b, a = 1]) => [r, g, b].map((v, i) => v * a + under[i] * (1 - a));
  return layers.reduce(over, [255, 255, 255]);
};
const has_text = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
return [...document.querySelectorAll("p, span, li, button, label, h1, h2, h3, summary, dd, dt, code, output")]
  .filter((each) => each.checkVisibility() && has_text(each))
  .map((each) => {
    const [a, b] = [light(numbers(getComputedStyle(each).color)), light(behind(each))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), each.textContent.trim().slice(0, 40)];
  });
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_keeps_its_contrast(page, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.ask(QUESTION)
    page.until(lambda: page.is_idle and page["prompt"].is_displayed())
    found = page.driver.execute_script(CONTRAST)
    assert len(found) > 300, "tokens, too"
    assert [(ratio, text) for ratio, text in found if ratio < 4.5] == []
