"""Cases from files of questions: an own form, LongBench's, and the raw forms of the CacheBlend paper's data sets.

| form | fields of a record |
|---|---|
| own | `question`, `answers` (or `answer`) and `passages` or `ctxs`, texts or objects with `text` |
| own, one passage (NQ-open) | `question`, `answers`, and `text`, to which distractors from other records are added |
| LongBench (2WikiMQA, MuSiQue, SAMSum, MultiNews) | `input`, `context`, `answers` and `dataset` |
| 2WikiMultihopQA | `question`, `answer` and `context`, a list of [title, sentences] |
| MuSiQue | `question`, `answer`, `answer_aliases` and `paragraphs` with `title` and `paragraph_text` |
| SAMSum | `dialogue` and `summary`; the examples are drawn from the other records |
| MultiNews | `document`, articles separated by `|||||`, and `summary`; or a line each of `NAME.src` and `NAME.tgt` |

A file is a JSON array, JSON lines, CSV or Parquet. Read `read_cases` first.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ragblend.errors import CorruptError, UsageError
from ragblend.files.reading import read_text
from ragblend.lab.bench.common.configs import NAMED_DATASETS
from ragblend.lab.quality.tasks import TASKS, QaCase

NUM_DISTRACTORS = 9
NUM_EXAMPLES = 31  # dialogues with their summaries; LongBench's prompts have 1 to 100
MAX_BYTES = 1 << 30  # of a file of questions
_PASSAGE = re.compile(r"^\s*Passage \d+:\s*$|^Passage \d+:", re.MULTILINE)
_DIALOGUE = re.compile(r"^(?=Dialogue: )", re.MULTILINE)
_ARTICLE = re.compile(r"\|\|\|\|\|")
_WANTED = (
    "wanted: question, answers, passages; or a record of LongBench or of 2WikiMultihopQA, MuSiQue, SAMSum or MultiNews"
)

Record = Mapping[str, Any]


def read_cases(path: Path) -> list[QaCase]:
    """Return the questions and passages of a file, in its order. Questions that have no answer by design are left out.

    Raises CorruptError if the file contains something else, UsageError if it contains no question.
    """
    records = _read_records(path)
    if not records:
        raise UsageError(
            f"--data is {path}, which holds no question; write objects with question, answers and passages"
        )
    cases = []
    for number, record in enumerate(records, start=1):
        try:
            if record.get("answerable", True):  # MuSiQue's full version
                cases.append(_case_of(record, records))
        except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
            raise CorruptError(
                f"{path}, record {number}, is no question with answers and passages ({error!r}); {_WANTED}"
            ) from error
    return cases


def _read_records(path: Path) -> Sequence[Record]:
    if path.suffix == ".parquet":
        return _read_parquet(path)
    text = _read(path)
    if ".src" in path.suffixes:
        return _read_articles(path, text)
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines(keepends=True)))
    try:
        if text.lstrip().startswith("["):
            records: list[Record] = json.loads(text)
        else:
            # Not `splitlines`: the texts of data sets contain other line separators than \n.
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise CorruptError(f"{path} is neither a JSON array nor JSON lines: {error}") from error
    return records


def _read(path: Path) -> str:
    return read_text(path, "--data", f"give a JSON or JSONL file, or {', '.join(NAMED_DATASETS)}, demo", MAX_BYTES)


def _read_parquet(path: Path) -> list[Record]:
    try:
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ImportError("--data FILE.parquet needs pyarrow: pip install 'ragblend[parquet]'") from error
    rows: list[Record] = read_table(path).to_pylist()
    return rows


def _read_articles(path: Path, text: str) -> list[Record]:
    """Return MultiNews' records: a line of the .src file has the articles, the same line of the .tgt file the summary.

    The cleaned articles (`test.src.cleaned`) have their summaries in `test.tgt`.
    """
    places = [path.with_name(name) for name in (path.name.replace(".src", ".tgt"), path.name.split(".src")[0] + ".tgt")]
    summaries = next((place for place in places if place.is_file()), places[-1])
    articles, answers = text.split("\n"), _read(summaries).split("\n")
    if len(articles) != len(answers):
        raise CorruptError(
            f"{path} has {len(articles)} lines, but {summaries} has {len(answers)}; give files of one download"
        )
    pairs = zip(articles, answers, strict=True)
    return [{"document": article, "summary": answer} for article, answer in pairs if article.strip()]


def _case_of(record: Record, others: Sequence[Record]) -> QaCase:
    """Return the case of a record. Raises KeyError and others for a record of no known form."""
    for field, make in _FORMS.items():
        if field in record:
            case = make(record, others)
            next(answer for answer in case.answers if answer.strip())  # raises StopIteration if no answer has text
            return case
    raise KeyError("question")


def _longbench_case(record: Record, others: Sequence[Record]) -> QaCase:
    name = str(record["dataset"]).removesuffix("_e")  # LongBench-E
    if name not in TASKS:
        raise ValueError(f"dataset is {name!r}; known: {', '.join(TASKS)}")
    pattern = _DIALOGUE if name == "samsum" else _PASSAGE
    passages = tuple(text for piece in pattern.split(record["context"]) if (text := piece.strip()))
    return _task_case(name, record["input"], tuple(record["answers"]), passages)


def _question_case(record: Record, others: Sequence[Record]) -> QaCase:
    question, answers = record["question"], record["answers"] if "answers" in record else record["answer"]
    answers = (answers,) if isinstance(answers, str) else tuple(answers)
    if "paragraphs" in record:
        passages = tuple(f"{each['title']}\n{each['paragraph_text']}" for each in record["paragraphs"])
        return _task_case("musique", question, (*answers, *record.get("answer_aliases", ())), passages)
    if "context" in record:
        passages = tuple(f"{title}\n{' '.join(sentences)}" for title, sentences in record["context"])
        return _task_case("2wikimqa", question, answers, passages)
    if "text" in record:
        passages = _with_distractors(record, answers, others)
    else:
        raw_passages = record["passages"] if "passages" in record else record["ctxs"]
        passages = tuple(each if isinstance(each, str) else each["text"] for each in raw_passages)
    if not question.strip():
        raise ValueError("the question is empty")
    return QaCase(question, answers, passages, str(record.get("kind", "")), "score")


def _dialogue_case(record: Record, others: Sequence[Record]) -> QaCase:
    """Return a case of SAMSum, with examples as LongBench writes them, the same at every call."""
    draw = random.Random(record["dialogue"])
    drawn = draw.sample(others, min(NUM_EXAMPLES + 1, len(others)))
    examples = [_dialogue(each, each["summary"]) for each in drawn if each["dialogue"] != record["dialogue"]]
    return _task_case("samsum", _dialogue(record, ""), (record["summary"],), tuple(examples[:NUM_EXAMPLES]))


def _dialogue(record: Record, summary: str) -> str:
    return f"Dialogue: {record['dialogue']}\nSummary: {summary}"


def _news_case(record: Record, others: Sequence[Record]) -> QaCase:
    text = record["document"].replace("NEWLINE_CHAR", "\n")
    articles = tuple(article for piece in _ARTICLE.split(text) if (article := piece.strip()))
    return _task_case("multi_news", "", (record["summary"].strip(),), articles)


_FORMS: Mapping[str, Callable[[Record, Sequence[Record]], QaCase]] = {
    "input": _longbench_case,
    "question": _question_case,
    "dialogue": _dialogue_case,
    "document": _news_case,
}
"""Functions that make a case, by the field that only records of their form have."""


def _task_case(name: str, question: str, answers: tuple[str, ...], passages: tuple[str, ...]) -> QaCase:
    if not passages:
        raise ValueError("the record has no passage")
    by_score = TASKS[name].measure == "token_f1"
    return QaCase(question, answers, passages, name, "score" if by_score else "given", None, TASKS[name])


def _with_distractors(record: Record, answers: Sequence[str], others: Sequence[Record]) -> tuple[str, ...]:
    """Return the record's passage among passages of other records without the answers, the same at every call."""
    draw = random.Random(record["question"])
    texts = [each["text"] for each in draw.sample(others, len(others)) if each is not record]
    lacking = (text for text in texts if not any(answer.lower() in text.lower() for answer in answers))
    passages = [record["text"], *islice(lacking, NUM_DISTRACTORS)]
    draw.shuffle(passages)
    return tuple(passages)
