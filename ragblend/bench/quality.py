"""Answer quality on held-out stories: full prefill, full reuse, and blend by rule and ratio, with the real engine.

Every configuration answers the same questions, in float32, so that what differs is the reuse alone. Stories use only
names, pairs and phrasings that the demo model never saw in training; their chunks follow one another in mixed order.
Read `run_quality` first; `quality_runs` answers and averages, `retrieval_quality` measures a corpus end to end.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragblend.bench.hardware import card_lines, hardware_card
from ragblend.bench.quality_cases import make_items
from ragblend.bench.quality_runs import (
    FULL,
    Configuration,
    Engines,
    Item,
    Record,
    Row,
    configurations,
    request_for,
    rows_of,
    run_item,
    total_row,
)
from ragblend.bench.quality_tables import stories_table
from ragblend.bench.retrieval_quality import CorpusConfig, bench_corpus
from ragblend.demo.evaluate import Setting
from ragblend.demo.questions import KINDS
from ragblend.engine import load_engine
from ragblend.engine.selection import DEFAULT_RATIO, check_ratio, find_rule
from ragblend.errors import UsageError
from ragblend.precompute import Progress

SCHEMA_VERSION = 1
MIN_CHUNKS, MIN_CHUNK_TOKENS = 4, 16
RULES = ("cacheblend", "cacheblend_k", "cacheblend_gradual", "first_k", "random")
RATIOS = (0.0, 0.025, 0.05, 0.10, 0.15, 0.20, 0.30, 0.50, 1.0)
LENGTH_RULES = ("cacheblend", "cacheblend_k", "auto")
LENGTHS = tuple((num_tokens, num_chunks) for num_tokens in (256, 1024, 4096) for num_chunks in (4, 8, 16))
LENGTH_SHARE = {256: 1.0, 1024: 0.6, 4096: 0.3}  # of --length-questions: a long context takes that much longer

STORIES_OUT, CORPUS_OUT = Path("data/results/quality.json"), Path("data/results/quality-corpus.json")
PLOT = Path("docs/quality.png")


@dataclass(frozen=True, slots=True)
class QualityConfig:
    """What to measure. `system_share` of the stories have a system text before them; `off_share` of the questions
    are also answered from KV that was computed without the prompt's prefix."""

    model: str = "demo"
    num_questions: int = 150 * len(KINDS)  # equally many of every kind
    num_chunks: int = 6
    context_tokens: int = 256  # prefix and chunks, about
    rules: tuple[str, ...] = RULES
    ratios: tuple[float, ...] = RATIOS
    system_share: float = 0.5
    off_share: float = 0.2
    lengths: bool = True
    length_questions: int = 30 * len(KINDS)  # in the shortest context; see LENGTH_SHARE
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_questions", "length_questions"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")
        # Fewer or shorter chunks hold no story with a question of every kind.
        if self.num_chunks < MIN_CHUNKS or self.context_tokens < MIN_CHUNK_TOKENS * self.num_chunks:
            raise UsageError(
                f"{self.context_tokens} tokens in {self.num_chunks} chunks; choose --chunks of {MIN_CHUNKS} or more, "
                f"and --context-tokens of {MIN_CHUNK_TOKENS} per chunk or more"
            )
        for name in ("system_share", "off_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 0 to 1")
        if not self.rules or not self.ratios:
            raise UsageError("no rule or no ratio given; name at least one of each, or leave the option out")
        for rule in self.rules:
            find_rule(rule)
        for ratio in self.ratios:
            check_ratio(ratio)

    @property
    def command_line(self) -> str:
        """The command that measures this again."""
        words = ["ragblend", "bench", "quality", "--model", self.model, "--num-questions", str(self.num_questions)]
        words += ["--chunks", str(self.num_chunks), "--context-tokens", str(self.context_tokens)]
        words += ["--rules", ",".join(self.rules), "--ratios", ",".join(f"{ratio:g}" for ratio in self.ratios)]
        words += ["--system-share", f"{self.system_share:g}", "--off-share", f"{self.off_share:g}"]
        lengths = ["--lengths", "--length-questions", str(self.length_questions)] if self.lengths else ["--no-lengths"]
        return shlex.join([*words, *lengths, "--seed", str(self.seed)])


@dataclass(frozen=True, slots=True)
class LengthResult:
    """One length of context: its rows, and what fails there (see `find_break`)."""

    context_tokens: int
    num_chunks: int
    rows: tuple[Row, ...]
    breaks: str

    def as_dict(self) -> dict[str, Any]:
        """The length as plain JSON values; `context_tokens` is what was asked for, the runs' what it came to."""
        facts = {"context_tokens": self.context_tokens, "num_chunks": self.num_chunks, "breaks": self.breaks}
        return {**facts, "runs": [row.as_dict() for row in self.rows]}


@dataclass(frozen=True, slots=True)
class QualityResult:
    """Everything that was found, and what it was run on."""

    config: QualityConfig
    name: str  # of the model
    fingerprint: str
    hardware: dict[str, Any]
    rows: tuple[Row, ...]
    lengths: tuple[LengthResult, ...]
    num_checked: int  # answers at ratio 1.0 ...
    num_different: int  # ... and those of them that full prefill does not give

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the command line."""
        config = asdict(self.config) | {"rules": [*self.config.rules], "ratios": [*self.config.ratios]}
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.config.command_line,
            "hardware": self.hardware,
            "config": config,
            "model": self.name,
            "fingerprint": self.fingerprint,
            "seed": self.config.seed,
            "auto": find_rule("auto").name,
            "ratio_one": {"num_checked": self.num_checked, "num_different": self.num_different},
            "runs": [row.as_dict() for row in self.rows],
            "lengths": [length.as_dict() for length in self.lengths],
        }


Records = dict[Configuration, list[Record]]


def run_quality(config: QualityConfig, progress: Progress | None = None) -> QualityResult:
    """Measure the curve over rules and ratios, then the lengths. The model is loaded here, in float32."""
    tell = progress or (lambda stage, done, total: None)
    base = load_engine(config.model, dtype="float32", on_miss="inline")
    with base:
        engines = Engines(base)
        setting = Setting(config.num_chunks, config.context_tokens)
        items = make_items(base, setting, config.num_questions, config.system_share, config.seed)
        records = run_items(engines, items, configurations(config.rules, config.ratios), config.off_share, tell)
        lengths = list(run_lengths(engines, config, tell)) if config.lengths else []
    at_one = [r for c, found in records.items() if c.mode == "blend" and c.ratio == 1.0 for r in found]
    return QualityResult(
        config,
        base.name,
        base.fingerprint,
        hardware_card(base.layers.device),
        tuple(row for configuration, found in records.items() for row in rows_of(configuration, found)),
        tuple(lengths),
        len(at_one),
        sum(not record.same_as_full for record in at_one),
    )


def run_items(
    engines: Engines, items: Sequence[Item], chosen: Sequence[Configuration], off_share: float, tell: Progress
) -> Records:
    """Records by configuration, question by question; a share of every kind's questions without the prefix too."""
    records: Records = {}
    asked: dict[str, int] = {}
    without_prefix = [c._replace(prefix_precompute=False) for c in chosen if c != FULL]
    for done, item in enumerate(items):
        tell("curve", done, len(items))
        number = asked[item.kind] = asked.get(item.kind, 0) + 1
        prefix_ids = request_for(engines.base, item.prompt).prompt.prefix_ids
        found, full = run_item(engines.behind(prefix_ids), item, chosen)
        if math.ceil(number * off_share) > math.ceil((number - 1) * off_share):
            found |= run_item(engines.behind(()), item, without_prefix, full)[0]
        for configuration, record in found.items():
            records.setdefault(configuration, []).append(record)
    tell("curve", len(items), len(items))
    # In the order they were asked for, whichever question came first.
    return {c: records[c] for c in (*chosen, *without_prefix) if c in records}


# -- lengths


def run_lengths(engines: Engines, config: QualityConfig, tell: Progress) -> Iterator[LengthResult]:
    """Full, reuse and blend at the default ratio in contexts from short to long, of few and of many chunks."""
    chosen = configurations(LENGTH_RULES, [DEFAULT_RATIO])
    shortest: list[Row] = []
    for place, (num_tokens, num_chunks) in enumerate(LENGTHS):
        tell("lengths", place, len(LENGTHS))
        num_questions = max(1, round(config.length_questions * LENGTH_SHARE[num_tokens]))
        setting = Setting(num_chunks, num_tokens)
        items = make_items(engines.base, setting, num_questions, config.system_share, config.seed)
        records = run_items(engines, items, chosen, 0.0, lambda stage, done, total: None)
        rows = [row for configuration, found in records.items() for row in rows_of(configuration, found)]
        shortest = shortest or rows
        yield LengthResult(num_tokens, num_chunks, tuple(rows), find_break(rows, shortest))
    tell("lengths", len(LENGTHS), len(LENGTHS))


def find_break(rows: Sequence[Row], shortest: Sequence[Row]) -> str:
    """What fails in a context: "model" (full prefill is worse than in the shortest one), "blend", both, or nothing.

    Worse means that the 95 % intervals of exact match over all questions do not touch; blend, at its best rule, is
    held against full prefill of the same prompts."""
    full, reference = total_row(rows, "full"), total_row(shortest, "full")
    best = max((row for row in rows if row.mode == "blend" and row.kind == "all"), key=lambda row: row.exact_match)
    broken = ["model"] if full.exact_match_high < reference.exact_match_low else []
    broken += ["blend"] if best.exact_match_high < full.exact_match_low else []
    return ", ".join(broken)


# -- the command

NOWHERE = Path("-")
"""As `out` or `plot`: write no file."""


def bench_quality(
    model: str | None,
    num_questions: int | None,
    chunks: int,
    context_tokens: int,
    rules: Sequence[str] | None,
    ratios: Sequence[float] | None,
    system_share: float,
    off_share: float,
    lengths: bool,
    length_questions: int,
    corpus: Path | None,
    k: int | None,
    neighbours: int | None,
    chunk_size: int,
    neighbour_kv: bool,
    embedder: str | None,
    out: Path | None,
    plot: Path | None,
    seed: int,
    echo: Callable[[str], None],
    progress: Progress | None,
) -> dict[str, Any]:
    """`ragblend bench quality`: card and tables to `echo`, JSON to `out`, a picture to `plot`; returns the JSON.

    With `corpus` that is measured end to end, in place of the stories. None is the default of the configuration.
    """
    shared: dict[str, Any] = {
        "model": model,
        "num_questions": num_questions,
        "rules": rules and tuple(rules),
        "ratios": ratios and tuple(ratios),
        "seed": seed,
    }
    if corpus is not None:
        if plot not in (None, NOWHERE):
            raise UsageError("--plot draws the curve over ratios; leave it out with --corpus")
        given: dict[str, Any] = {
            "corpus": corpus,
            "k": k,
            "neighbours": neighbours,
            "chunk_size": chunk_size,
            "neighbour_kv": neighbour_kv,
            "embedder": embedder,
        }
        facts = bench_corpus(CorpusConfig(**_not_none(shared | given)), echo, progress)
        _write_json(facts, out or CORPUS_OUT, echo)
        return facts
    given = {"num_chunks": chunks, "context_tokens": context_tokens, "system_share": system_share}
    given |= {"off_share": off_share, "lengths": lengths, "length_questions": length_questions}
    return bench_stories(QualityConfig(**_not_none(shared | given)), out or STORIES_OUT, plot, echo, progress)


def bench_stories(
    config: QualityConfig, out: Path, plot: Path | None, echo: Callable[[str], None], progress: Progress | None
) -> dict[str, Any]:
    """Measure `config`, print, write and draw it. `plot` None is the default picture, if matplotlib is there."""
    picture = _picture(plot)
    result = run_quality(config, progress)
    for line in (*card_lines(result.hardware), "", *stories_table(result)):
        echo(line)
    facts = result.as_dict()
    _write_json(facts, out, echo)
    if picture is not None:
        from ragblend.bench.plots import plot_quality

        plot_quality(facts, picture)
        echo(f"plot in {picture}")
    return facts


def _picture(plot: Path | None) -> Path | None:
    """Where to draw, found out now and not after minutes of measuring."""
    from ragblend.bench.plots import require_matplotlib

    if plot == NOWHERE:
        return None
    try:
        require_matplotlib()
    except ImportError:
        if plot is not None:
            raise
        return None
    return plot or PLOT


def _write_json(facts: dict[str, Any], out: Path, echo: Callable[[str], None]) -> None:
    if out != NOWHERE:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(facts) + "\n")
        echo(f"result in {out}")


def _not_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
