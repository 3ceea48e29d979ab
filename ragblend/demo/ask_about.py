"""Questions in the demo world's own forms about the names that texts mention: no answers, no gold, no story needed.

For `ragblend calibrate` with the embedded model, which understands no other questions. What a text does not tell about
a name is asked for as well: "not stated" is an answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from ragblend.demo import vocab
from ragblend.demo.corpus import RELATIONS_IN_USE
from ragblend.demo.questions import phrase
from ragblend.demo.world import RELATIONS, TWO_HOPS


def _names(*words: str | Sequence[str]) -> re.Pattern[str]:
    """A pattern of names, word by word: a word, or one of several."""
    options = [word if isinstance(word, str) else "|".join(word) for word in words]
    return re.compile(r"\b" + r"\s".join(f"(?:{option})" for option in options) + r"\b")


_PATTERNS = {
    "person": _names((*vocab.FEMALE_NAMES, *vocab.MALE_NAMES), vocab.LAST_NAMES),
    "company": _names(vocab.COMPANY_STEMS),
    "project": _names("Project", vocab.PROJECT_NAMES),
    "event": _names("[Tt]he", vocab.EVENT_TOPICS, vocab.EVENT_FORMS),
}


def questions_about(texts: Iterable[str], count: int, seed: int = 0) -> list[str]:
    """At most `count` questions about names in `texts`, in random order, with openings that training never used."""
    rng = random.Random(seed)
    asked = []
    for kind, name in sorted({found for text in texts for found in names_in(text)}):
        asked += [phrase(rng, template, "test", S=name) for template in _templates(kind)]
    return rng.sample(asked, min(count, len(asked)))


def names_in(text: str) -> set[tuple[str, str]]:
    """Kinds and names, as they stand inside a sentence.

    >>> sorted(names_in("The safety review ended. James Bell works at Zenco."))
    [('company', 'Zenco'), ('event', 'the safety review'), ('person', 'James Bell')]
    """
    found = ((kind, match) for kind, pattern in _PATTERNS.items() for match in pattern.findall(" ".join(text.split())))
    return {(kind, name[0].lower() + name[1:] if kind == "event" else name) for kind, name in found}


def _templates(kind: str) -> list[str]:
    """Every way to ask about something of the kind, in one step or two."""
    relations = [relation for relation in RELATIONS.values() if relation.subject == kind]
    told = [relation for relation in relations if relation.name in RELATIONS_IN_USE]
    direct = [template for relation in told for template in relation.questions]
    steps = {relation.name for relation in told}
    return direct + [text for (first, _), texts in TWO_HOPS.items() if first in steps for text in texts]
