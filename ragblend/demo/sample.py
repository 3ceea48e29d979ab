"""A small corpus in the embedded model's language: company records whose paragraphs refer back to earlier ones.

Deterministic: the same seed writes the same files. Each document tells six paragraphs about a few people, companies
and cities; "the company", "she" or "the town" at the start of a paragraph means the last one named before it. Read
alone, such a paragraph says nothing about whom it is, which is what full KV reuse gets wrong.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from ragblend.demo.vocab import CITIES, COMPANY_STEMS, FEMALE_NAMES, LAST_NAMES, MALE_NAMES, PRODUCTS

STATEMENTS = {
    "work": ("{s} works for {o}.", "{s} has a job at {o}."),
    "home": ("{s} lives in {o}.", "{s} has a home in {o}."),
    "base": ("{s} is based in {o}.", "{s} has its main office in {o}."),
    "make": ("{s} makes {o}.", "{s} sells {o}."),
}
QUESTIONS = {
    "work": "Where does {s} work?",
    "home": "Where does {s} live?",
    "base": "Where is {s} based?",
    "make": "What does {s} sell?",
}
TWO_HOP = {"base": "Where is the employer of {s} based?", "make": "What does the employer of {s} sell?"}
BACK = ("The company", "The firm")


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its one-word answer, and whether the answer needs a paragraph before the one it stands in."""

    question: str
    answer: str
    kind: str  # one_hop, reference or two_hop_reference
    source: str


class _Story:
    """Six paragraphs of one document and the questions they answer."""

    def __init__(
        self, rng: random.Random, people: set[str], companies: list[str], cities: list[str], source: str
    ) -> None:
        self._rng = rng
        self._companies, self._cities = companies, cities
        self._people = people  # full names in use
        self._source = source
        self._products = rng.sample(PRODUCTS, 3)
        self.paragraphs: list[str] = []
        self.questions: list[Question] = []

    def tell(self) -> None:
        employee, employer = "", ""
        for number in range(6):
            sentences = []
            if number % 2 == 1:
                # An odd paragraph opens by speaking of the company that the one before it named last.
                city, product = self._cities.pop(), self._products.pop()
                back = self._rng.sample(BACK, 2)
                sentences += [self._say("base", back[0], city), self._say("make", back[1], product)]
                self._ask("reference", QUESTIONS["base"], employer, city)
                self._ask("reference", QUESTIONS["make"], employer, product)
                self._ask("two_hop_reference", TWO_HOP["base"], employee, city)
                self._ask("two_hop_reference", TWO_HOP["make"], employee, product)
            else:
                neighbour, home = self._person(), self._cities.pop()
                sentences.append(self._say("home", neighbour, home))
                self._ask("one_hop", QUESTIONS["home"], neighbour, home)
                employee, employer = self._person(), self._companies.pop()
                sentences.append(self._say("work", employee, employer))
                self._ask("one_hop", QUESTIONS["work"], employee, employer)
            self.paragraphs.append(" ".join(sentences))

    def _person(self) -> str:
        while True:
            name = f"{self._rng.choice(FEMALE_NAMES + MALE_NAMES)} {self._rng.choice(LAST_NAMES)}"
            if name not in self._people:
                self._people.add(name)
                return name

    def _say(self, relation: str, subject: str, value: str) -> str:
        return self._rng.choice(STATEMENTS[relation]).format(s=subject, o=value)

    def _ask(self, kind: str, template: str, subject: str, answer: str) -> None:
        self.questions.append(Question(template.format(s=subject), answer, kind, self._source))


def write_corpus(directory: Path, num_documents: int = 12, seed: int = 7) -> list[Question]:
    """Write `record-NN.md` files and `questions.jsonl`; the questions, in document order."""
    rng = random.Random(seed)
    companies, cities = rng.sample(COMPANY_STEMS, len(COMPANY_STEMS)), rng.sample(CITIES, len(CITIES))
    directory.mkdir(parents=True, exist_ok=True)
    people: set[str] = set()
    questions: list[Question] = []
    for number in range(num_documents):
        story = _Story(rng, people, companies, cities, f"record-{number:02}.md")
        story.tell()
        (directory / f"record-{number:02}.md").write_text("\n\n".join(story.paragraphs) + "\n")
        questions += story.questions
    lines = [json.dumps(asdict(question)) for question in questions]
    (directory / "questions.jsonl").write_text("\n".join(lines) + "\n")
    return questions
