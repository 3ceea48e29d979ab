"""No identifier, and no sentence of finished files, has a word that means nothing to a reader of the field.

`python tests/tools/test_identifiers.py` prints each such identifier and how often it occurs, then each such sentence.
"""

from __future__ import annotations

import keyword
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ragblend", "benchmarks", "tools")
WORDS = (
    "told", "tell", "tells", "telling", "teller", "tellers", "heed", "heeds", "heeded", "doom", "doomed", "pardon",
    "whoever", "whom", "nobody", "somebody", "somebody else", "anybody", "everybody", "whatever", "wherever",
    "whichever", "at hand", "of its own", "of their own", "by itself", "what of", "nothing of", "to be had", "let go",
    "lets go", "hears", "speaks", "believe", "believed", "promise", "promised", "mend", "mends", "mended", "remedy",
    "way out", "at birth", "came of", "came about", "became of", "becomes of", "what came", "what became", "anew",
    "afresh", "from here on", "from now on", "from then on", "so many", "so much", "alike", "owed", "lying", "foreign",
    "house", "wings", "floors", "is to go", "are to go", "to go", "is said", "and said", "all the same",
    "one after the other", "for people", "as people", "meanwhile", "besides", "by then", "by now", "maybe", "wishes",
    "once more",
)  # fmt: skip
OTHERS = {
    "is_cuda_alike",  # vLLM's
}
MAX_TEST_WORDS = 12
"""Most words of a test's name after `test_`: a name says one law, and fits into a line of a list of failures."""
UNFINISHED = (
    "tests/engine/store/",
    *(f"tests/faults/test_{name}.py" for name in ("full_disk", "ingest_faults", "kills", "planted_entries")),
    *(f"tests/faults/test_{name}.py" for name in ("request_bounds", "tier_faults")),
    "tests/tools/test_identifiers.py",  # it lists the words
)
"""Files whose docstrings, comments and messages still have such words. Delete an entry when its files have none."""
SENTENCES = (
    "ragblend/**/*.py",
    "tools/**/*.py",
    "benchmarks/**/*.py",
    "notebooks/src/*.py",
    "docs/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "tests/**/*.py",
)
ALLOWED = {
    ("ragblend/catalog/former_files.py", "doomed"),  # the table of an earlier version
    ("ragblend/cli/app.py", "remedy"),  # a key of a JSON object
    ("ragblend/corpus/embedders.py", "whom"),  # a stop word of the embedder
    ("notebooks/src/07_your_own_pdf.py", "whatever"),  # in the sample document
    ("notebooks/src/07_your_own_pdf.py", "Whoever"),
    ("tests/operations/test_signing.py", "remedy"),  # a key of a JSON object
}


def unwanted(identifier: str) -> str:
    """The word of WORDS that `identifier` holds, or ""."""
    parts = " ".join(part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier))
    return next((word for word in WORDS if f" {word} " in f" {parts} "), "")


def identifiers(path: Path) -> Iterator[str]:
    """Every name in a Python file that is no keyword."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                yield token.string


def count(folder: str) -> Counter[str]:
    """How often each unwanted identifier occurs in the Python files of `folder`."""
    names = Counter(name for path in (ROOT / folder).rglob("*.py") for name in identifiers(path))
    return Counter({name: num for name, num in names.items() if name not in OTHERS and unwanted(name)})


def unwanted_sentences(pattern: str) -> list[str]:
    """The places of unwanted words in the finished files of `pattern`, as "path:line: word"."""
    either = "|".join(WORDS).replace(" ", r"\s+")
    words = re.compile(rf"(?<!\w)(?:{either})(?!\w)", re.IGNORECASE)
    found = []
    for path in sorted(ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        text = "" if name.startswith(UNFINISHED) else path.read_text(encoding="utf-8")
        hits = (hit for hit in words.finditer(text) if (name, hit[0]) not in ALLOWED)
        found += [f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}" for hit in hits]
    return found


def long_test_names(source: str) -> list[str]:
    """The names of tests in `source` that have more than MAX_TEST_WORDS words."""
    names = re.findall(r"^ *(?:async )?def test_(\w+)", source, re.MULTILINE)
    return [name for name in names if len(name.split("_")) > MAX_TEST_WORDS]


def test_names_of_tests_have_at_most_twelve_words():
    found = {
        path.relative_to(ROOT).as_posix(): long_test_names(path.read_text()) for path in ROOT.glob("tests/**/*.py")
    }
    assert {path: names for path, names in found.items() if names} == {}
    assert long_test_names(f"def test_{'_'.join(['word'] * 12)}():\nasync def test_{'_'.join(['word'] * 13)}():") != []


@pytest.mark.parametrize("pattern", SENTENCES)
def test_no_sentence_of_finished_files_holds_an_unwanted_word(pattern):
    assert unwanted_sentences(pattern) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_identifier_holds_an_unwanted_word(folder):
    assert count(folder) == {}


@pytest.mark.parametrize(
    ("identifier", "word"), [("num_heeded", "heeded"), ("DoomedRow", "doomed"), ("_at_hand", "at hand"), ("untold", "")]
)
def test_words_are_found_inside_identifiers(identifier, word):
    assert unwanted(identifier) == word


if __name__ == "__main__":
    found = sum((count(folder) for folder in FOLDERS), Counter())
    for name, number in found.most_common():
        print(number, name)
    print(sum(found.values()), "occurrences")
    print(*(place for pattern in SENTENCES for place in unwanted_sentences(pattern)), sep="\n")
