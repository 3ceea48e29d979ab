"""A corpus end to end: what retrieval loses, what fusing loses, on questions whose gold spans are known.

The corpus is ingested into a temporary store and index as `ragblend ingest` does, and every question retrieves its
chunks as `ragblend ask` does. Loss by retrieval is full prefill of the gold chunks less full prefill of the
retrieved ones; loss by fusing is full prefill less blend, both of the retrieved chunks. Read `run_corpus` first.
"""

from __future__ import annotations

import json
import random
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.demo_quality.runs import (
    FULL,
    STORY_LAYERS,
    Configuration,
    Item,
    Record,
    Row,
    configurations,
    rows_of,
    run_item,
)
from benchmarks.demo_quality.tables import corpus_table
from ragblend.bench.common.hardware import card_lines, hardware_card
from ragblend.corpus.embedders import FloatArray
from ragblend.engine.fusion.rules import DEFAULT_RATIO, check_ratio, find_rule
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.load import load_engine
from ragblend.errors import CorruptError, NotFoundError, UsageError
from ragblend.index import ChunkIndex
from ragblend.intervals import wilson_interval
from ragblend.options import ContextPolicy
from ragblend.precompute import Progress, ingest, open_engine_index
from ragblend.prompt.prompt import Chunk, SegmentedPrompt

SCHEMA_VERSION = 1
QUESTIONS = "questions.jsonl"
RECALL_AT = (1, 2, 4, 6)
COUNTING = (
    "Questions without a gold span (not_stated) are left out of recall; with nothing to find, their oracle context is "
    "the retrieved one, so they count in exact match and cost nothing by retrieval."
)
GUESS = "guess: share of the most frequent answer among the questions of the kind"


class Span(NamedTuple):
    """Characters [start, end) of the file `source`."""

    source: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CorpusQuestion:
    """A line of questions.jsonl: the answer stands in the `gold` spans; none when it is nowhere."""

    question: str
    answer: str
    kind: str
    gold: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """What to measure. `k` hits and `neighbours` chunks on either side of each go into a prompt, in document order."""

    corpus: Path
    model: str = "demo"
    num_questions: int = 200
    k: int = 3
    neighbours: int = 1
    chunk_size: int = 112  # tokens: one paragraph of the sample corpus, with its title, and never two
    context: ContextPolicy | None = None  # what chunks are computed behind besides the prefix; None: nothing
    embedder: str | None = None  # None is what `ragblend ingest` takes
    rules: tuple[str, ...] = ("auto",)
    ratios: tuple[float, ...] = (DEFAULT_RATIO,)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_questions", "k", "chunk_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")
        if self.neighbours < 0:
            raise UsageError(f"neighbours is {self.neighbours}; choose 0 or more")
        for rule in self.rules:
            find_rule(rule)
        if not [ratio for ratio in self.ratios if check_ratio(ratio) > 0] or not self.rules:
            raise UsageError("no rule or no ratio above 0 given; end to end needs one to blend with")
        if not (self.corpus / QUESTIONS).is_file():
            raise NotFoundError(
                f"no {self.corpus / QUESTIONS}; write the sample corpus: "
                f"python -m tools.demo_model.corpus --out {self.corpus}"
            )

    @property
    def command_line(self) -> str:
        """The command that measures this again."""
        words = ["python", "-m", "benchmarks.demo_quality", "--model", self.model, "--corpus", str(self.corpus)]
        words += ["--num-questions", str(self.num_questions), "-k", str(self.k), "--neighbours", str(self.neighbours)]
        words += ["--chunk-size", str(self.chunk_size), *(["--embedder", self.embedder] if self.embedder else [])]
        words += ["--context", self.context] if self.context else []
        words += ["--rules", ",".join(self.rules), "--ratios", ",".join(f"{ratio:g}" for ratio in self.ratios)]
        return shlex.join([*words, "--seed", str(self.seed)])


class Recall(NamedTuple):
    """How often the gold was found by `k` hits with `neighbours` on either side: all spans, or any of them."""

    k: int
    neighbours: int
    all_gold: float
    all_gold_low: float
    all_gold_high: float
    any_gold: float
    num_questions: int
    num_chunks: float  # on average


class Loss(NamedTuple):
    """Exact match of one kind of question in three steps, and what each step lost."""

    kind: str
    num_questions: int
    oracle_full: float
    retrieved_full: float
    retrieved_blend: float
    retrieval_loss: float
    fusion_loss: float


@dataclass(frozen=True, slots=True)
class CorpusResult:
    """Everything that was found, and what it was run on."""

    config: CorpusConfig
    name: str  # of the model
    fingerprint: str
    embedder: str
    num_chunks: int  # of the corpus
    hardware: dict[str, Any]
    rows: tuple[Row, ...]
    recall: tuple[Recall, ...]
    losses: tuple[Loss, ...]  # blend at the first rule and ratio
    notes: tuple[str, ...] = (GUESS, COUNTING)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the command line."""
        config = asdict(self.config) | {"rules": [*self.config.rules], "ratios": [*self.config.ratios]}
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.config.command_line,
            "hardware": self.hardware,
            "config": config | {"corpus": str(self.config.corpus)},
            "model": self.name,
            "fingerprint": self.fingerprint,
            "seed": self.config.seed,
            "embedder": self.embedder,
            "auto": find_rule("auto", STORY_LAYERS).name,
            "num_corpus_chunks": self.num_chunks,
            "notes": [*self.notes],
            "runs": [row.as_dict() for row in self.rows],
            "recall": [recall._asdict() for recall in self.recall],
            "losses": [loss._asdict() for loss in self.losses],
        }


def run_corpus(config: CorpusConfig, progress: Progress | None = None) -> CorpusResult:
    """Ingest, retrieve, answer. The model is loaded here, in float32; nothing is left behind on the disk."""
    tell = progress or (lambda stage, done, total: None)
    questions = choose_questions(read_questions(config.corpus / QUESTIONS), config.num_questions, config.seed)
    with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as directory:
        folder = Path(directory)
        with (
            load_engine(config.model, folder / "kv", dtype="float32", on_miss="inline", new_model=True) as engine,
            open_engine_index(folder / "index", engine, config.embedder, config.chunk_size) as index,
        ):
            ingest(
                config.corpus,
                engine,
                index,
                chunk_size=config.chunk_size,
                glob="*.md",
                context=config.context,
                progress=progress,
            )
            chosen = configurations(config.rules, config.ratios)
            records = _answer_all(engine, index, questions, chosen, config, tell)
            rows = [row for (where, c), found in records.items() for row in rows_of(c, found, where)]
            return CorpusResult(
                config,
                engine.name,
                engine.fingerprint,
                index.manifest.embedder,
                index.num_chunks,
                hardware_card(engine.layers.device),
                tuple(rows),
                tuple(measure_recall(index, questions, config, tell)),
                tuple(losses(rows)),
            )


# -- questions and gold spans


def read_questions(path: Path) -> list[CorpusQuestion]:
    """The questions of a corpus; raises CorruptError for a line that is not one."""
    questions = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            facts = json.loads(line)
            gold = tuple(Span(span["source"], span["start"], span["end"]) for span in facts["gold"])
            questions.append(CorpusQuestion(facts["question"], facts["answer"], facts["kind"], gold))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{path}, line {number}, is not a question with gold spans: {error!r}") from error
    return questions


def choose_questions(questions: Sequence[CorpusQuestion], count: int, seed: int) -> list[CorpusQuestion]:
    """At most `count` of them, any, in the file's order."""
    picked = random.Random(seed).sample(range(len(questions)), min(count, len(questions)))
    return [questions[place] for place in sorted(picked)]


def covered(span: Span, chunks: Iterable[Chunk]) -> bool:
    """Whether the chunks together hold every character of the span."""
    reached = span.start
    for chunk in sorted((c for c in chunks if is_from(c, span.source)), key=lambda c: c.start):
        if chunk.start <= reached:
            reached = max(reached, chunk.end)
    return reached >= span.end


def touches(span: Span, chunk: Chunk) -> bool:
    """Whether the chunk holds a part of the span."""
    return is_from(chunk, span.source) and chunk.start < span.end and span.start < chunk.end


def is_from(chunk: Chunk, source: str) -> bool:
    """Whether the chunk is of the file that a gold span calls `source`, wherever the corpus lies."""
    return chunk.source == source or Path(chunk.source).as_posix().endswith(f"/{source}")


# -- retrieval


def measure_recall(
    index: ChunkIndex, questions: Sequence[CorpusQuestion], config: CorpusConfig, tell: Progress
) -> list[Recall]:
    """Recall at several k, of the hits alone and with the neighbours that prompts get."""
    asked = [question for question in questions if question.gold]
    depths = [
        (k, around)
        for around in dict.fromkeys((0, config.neighbours))
        for k in dict.fromkeys(sorted((*RECALL_AT, config.k)))
    ]
    found: dict[tuple[int, int], list[list[Chunk]]] = {depth: [] for depth in depths}
    for done, question in enumerate(asked, start=1):
        vector = question_vector(index, question.question)
        for k, around in depths:
            found[k, around].append([hit.chunk for hit in index.search(vector, k, neighbours=around)])
        tell("recall", done, len(asked))
    return [recall(asked, found[depth], *depth) for depth in depths] if asked else []


def question_vector(index: ChunkIndex, text: str) -> FloatArray:
    """The question embedded [dim], once for all depths, the way `ChunkIndex.search` does."""
    embed_query = getattr(index.embedder, "embed_query", None)
    vector: FloatArray = embed_query(text) if embed_query else index.embedder.embed([text])[0]
    return vector


def recall(questions: Sequence[CorpusQuestion], found: Sequence[Sequence[Chunk]], k: int, neighbours: int) -> Recall:
    """Over questions that have gold spans, `found[i]` being the chunks that question i retrieved."""
    hits = [[covered(s, chunks) for s in q.gold] for q, chunks in zip(questions, found, strict=True)]
    share = fmean(all(spans) for spans in hits)
    low, high = wilson_interval(share, len(hits))
    num_chunks = fmean(len(chunks) for chunks in found)
    any_gold = fmean(any(spans) for spans in hits)
    return Recall(k, neighbours, share, max(0.0, low), min(1.0, high), any_gold, len(hits), num_chunks)


def oracle_chunks(
    question: CorpusQuestion, chunks: Sequence[Chunk], count: int, draw: random.Random
) -> list[Chunk] | None:
    """The chunks that hold the gold, and others up to `count` in all; None for a question without gold.

    Documents come in random order, each document's chunks in reading order (`chunks` is in reading order)."""
    gold = [place for place, chunk in enumerate(chunks) if any(touches(span, chunk) for span in question.gold)]
    if not gold:
        return None
    others = sorted(set(range(len(chunks))) - set(gold))
    places = gold + draw.sample(others, min(len(others), max(0, count - len(gold))))
    documents = list(dict.fromkeys(chunks[place].source for place in sorted(places)))
    draw.shuffle(documents)
    turn = {source: number for number, source in enumerate(documents)}
    return [chunks[place] for place in sorted(places, key=lambda place: (turn[chunks[place].source], place))]


# -- answering


Found = dict[tuple[str, Configuration], list[Record]]


def _answer_all(
    engine: TransformersEngine,
    index: ChunkIndex,
    questions: Sequence[CorpusQuestion],
    chosen: Sequence[Configuration],
    config: CorpusConfig,
    tell: Progress,
) -> Found:
    """Records by context and configuration: gold chunks with full prefill, retrieved chunks in every configuration."""
    chunks, draw = list(index.chunks()), random.Random(config.seed)
    guesses = guess_rates(questions)
    keys = [("oracle", FULL), *(("retrieved", configuration) for configuration in chosen)]
    records: Found = {key: [] for key in keys}
    for done, question in enumerate(questions, start=1):
        hits = index.search(question.question, config.k, neighbours=config.neighbours, order="document")
        retrieved = [hit.chunk for hit in hits]
        oracle = oracle_chunks(question, chunks, len(retrieved), draw)

        def item(context: Sequence[Chunk], question: CorpusQuestion = question) -> Item:
            prompt = SegmentedPrompt(context, question.question)
            return Item(prompt, question.answer, question.kind, guesses[question.kind])

        found, _ = run_item(engine, item(retrieved), chosen)
        for configuration, record in found.items():
            records["retrieved", configuration].append(record)
        best = run_item(engine, item(oracle), [FULL])[0] if oracle else found
        records["oracle", FULL].append(best[FULL])
        tell("answer", done, len(questions))
    return records


def guess_rates(questions: Sequence[CorpusQuestion]) -> dict[str, float]:
    """By kind: how often the kind's most frequent answer would be right."""
    answers: dict[str, Counter[str]] = {}
    for question in questions:
        answers.setdefault(question.kind, Counter())[question.answer] += 1
    return {kind: max(counts.values()) / counts.total() for kind, counts in answers.items()}


def losses(rows: Sequence[Row]) -> list[Loss]:
    """By kind: oracle full - retrieved full, and retrieved full - retrieved blend (the first blend of the rows)."""
    blend = next(row for row in rows if row.mode == "blend")
    shares: Mapping[tuple[str, str, str], Row] = {
        (row.context, row.mode, row.kind): row
        for row in rows
        if row.mode != "blend" or (row.rule, row.ratio) == (blend.rule, blend.ratio)
    }
    found = []
    for kind in dict.fromkeys(row.kind for row in rows):
        oracle, full, fused = (
            shares[context, mode, kind].exact_match
            for context, mode in (("oracle", "full"), ("retrieved", "full"), ("retrieved", "blend"))
        )
        number = shares["retrieved", "full", kind].num_questions
        found.append(Loss(kind, number, oracle, full, fused, oracle - full, full - fused))
    return found


# -- the command


def bench_corpus(config: CorpusConfig, echo: Callable[[str], None], progress: Progress | None) -> dict[str, Any]:
    """`benchmarks.demo_quality --corpus`: card and tables to `echo`; returns the JSON object."""
    result = run_corpus(config, progress)
    for line in (*card_lines(result.hardware), "", *corpus_table(result)):
        echo(line)
    return result.as_dict()
