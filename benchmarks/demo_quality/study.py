"""Answer quality on held-out stories: full prefill, full reuse, and blend by rule, ratio and budget, real engine.

Every configuration answers the same questions, in float32, so that what differs is the reuse alone. Stories use only
names, pairs and phrasings that the demo model never saw in training; their chunks follow one another in mixed order.
Read `run_quality` first; `runs` answers and averages, `pairs` compares rules question by question, `retrieval`
measures a corpus end to end.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.demo_quality.cases import PARTS, Part, make_items
from benchmarks.demo_quality.pairs import Difference, differences
from benchmarks.demo_quality.retrieval import CorpusConfig, bench_corpus
from benchmarks.demo_quality.runs import (
    FULL,
    MULTI_HOP_KINDS,
    NOISE,
    STORY_LAYERS,
    Configuration,
    Engines,
    Item,
    Record,
    Row,
    answer,
    configurations,
    request_for,
    rows_of,
    run_item,
    run_noise,
    total_row,
)
from benchmarks.demo_quality.tables import stories_table
from ragblend.bench.common.hardware import card_lines, hardware_card
from ragblend.bench.quality.budget import costs_of, floor_of
from ragblend.engine.fusion.rules import DEFAULT_RATIO, check_ratio, find_rule
from ragblend.engine.load import load_engine
from ragblend.errors import UsageError
from ragblend.intervals import wilson_interval
from ragblend.precompute import Progress
from tools.demo_model.cases import Setting
from tools.demo_model.questions import KINDS

SCHEMA_VERSION = 2
MIN_CHUNKS, MIN_CHUNK_TOKENS = 4, 16
RULES = ("auto", "cacheblend", "cacheblend_k")
CONTROLS = ("random",)
RATIOS = (0.05, 0.075, 0.10, 0.15)
BUDGETS = (0.025, 0.05, 0.10, 0.15, 0.20)
ORDER_RULES = ("auto", "cacheblend", "cacheblend_k")
LENGTH_RULES = ("cacheblend", "cacheblend_k", "auto")
LENGTHS = tuple((num_tokens, num_chunks) for num_tokens in (256, 1024, 4096) for num_chunks in (4, 8, 16))
LENGTH_SHARE = {256: 1.0, 1024: 0.6, 4096: 0.3}  # of --length-questions: a long context takes that much longer

STORIES_OUT, CORPUS_OUT = Path("data/results/quality.json"), Path("data/results/quality-corpus.json")
PLOT = Path("docs/quality.png")


@dataclass(frozen=True, slots=True)
class QualityConfig:
    """What to measure. `system_share` of the stories have a system text before them; `off_share` of the questions
    are also answered from KV that was computed without the prompt's prefix, `control_share` of them also by the rules
    `controls`, and at ratio 1.0. `noise_share` are also prefilled in bfloat16, `order_share` of those over several
    chunks are asked a second time with the chunks in another order."""

    model: str = "demo"
    num_questions: int = 30 * len(KINDS)  # equally many of every kind
    num_multi_hop: int = 1500  # and so many more over several chunks
    part: Part = "reported"  # "selection": for choosing rules
    num_chunks: int = 6
    context_tokens: int = 256  # prefix and chunks, about
    rules: tuple[str, ...] = RULES
    controls: tuple[str, ...] = CONTROLS
    ratios: tuple[float, ...] = RATIOS
    budgets: tuple[float, ...] = BUDGETS  # charged in a model of 32 layers
    system_share: float = 0.5
    off_share: float = 0.05
    control_share: float = 0.1
    noise_share: float = 0.1
    order_share: float = 0.1
    lengths: bool = False
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
        if self.num_multi_hop < 0:
            raise UsageError(f"num_multi_hop is {self.num_multi_hop}; choose 0 or more")
        if self.part not in PARTS:
            raise UsageError(f"part is {self.part!r}; choose one of {', '.join(PARTS)}")
        for name in ("system_share", "off_share", "control_share", "noise_share", "order_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 0 to 1")
        if not self.rules or not (self.ratios or self.budgets):
            raise UsageError("no rule, or no ratio and no budget given; name at least one, or leave the option out")
        for rule in (*self.rules, *self.controls):
            find_rule(rule)
        for ratio in self.ratios:
            check_ratio(ratio)
        for budget in self.budgets:
            if not 0 < budget < 1:
                raise UsageError(f"budget is {budget}; choose a share of the token-layers, such as 0.05")

    @property
    def command_line(self) -> str:
        """The command that measures this again."""
        words = [
            "python",
            "-m",
            "benchmarks.demo_quality",
            "--model",
            self.model,
            "--num-questions",
            str(self.num_questions),
        ]
        words += ["--multi-hop", str(self.num_multi_hop), "--part", self.part]
        words += ["--chunks", str(self.num_chunks), "--context-tokens", str(self.context_tokens)]
        for name, values in (("--rules", self.rules), ("--controls", self.controls)):
            words += [name, ",".join(values)]
        for name, shares in (("--ratios", self.ratios), ("--budgets", self.budgets)):
            words += [name, ",".join(f"{share:g}" for share in shares)]
        for name in ("system", "off", "control", "noise", "order"):
            words += [f"--{name}-share", f"{getattr(self, name + '_share'):g}"]
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
class OrderResult:
    """The same questions over the same chunks in two orders that say the same: how often the answer stays, with
    Wilson's 95 % interval, and how many are right."""

    mode: str
    rule: str
    ratio: float
    num_questions: int
    same_answer: float
    same_answer_low: float
    same_answer_high: float
    exact_match: float
    exact_match_reordered: float


@dataclass(frozen=True, slots=True)
class Unmet:
    """A budget below what `rule` takes for recomputing a single token, in one of the prompts at least: `floor`."""

    rule: str
    budget: float
    floor: float


@dataclass(frozen=True, slots=True)
class QualityResult:
    """Everything that was found, and what it was run on."""

    config: QualityConfig
    name: str  # of the model
    fingerprint: str
    hardware: dict[str, Any]
    rows: tuple[Row, ...]
    lengths: tuple[LengthResult, ...]
    paired: tuple[Difference, ...]
    orders: tuple[OrderResult, ...]
    unmet: tuple[Unmet, ...]
    num_checked: int  # answers at ratio 1.0 ...
    num_different: int  # ... and those of them that full prefill does not give

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the command line."""
        config = {name: [*value] if isinstance(value, tuple) else value for name, value in asdict(self.config).items()}
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.config.command_line,
            "hardware": self.hardware,
            "config": config,
            "model": self.name,
            "fingerprint": self.fingerprint,
            "seed": self.config.seed,
            "auto": find_rule("auto", STORY_LAYERS).name,
            "ratio_one": {"num_checked": self.num_checked, "num_different": self.num_different},
            "runs": [row.as_dict() for row in self.rows],
            "paired": [difference.as_dict() for difference in self.paired],
            "orders": [asdict(order) for order in self.orders],
            "budgets_not_met": [asdict(unmet) for unmet in self.unmet],
            "lengths": [length.as_dict() for length in self.lengths],
        }


Records = dict[Configuration, list[Record]]


def run_quality(config: QualityConfig, progress: Progress | None = None) -> QualityResult:
    """Measure the curve over rules, ratios and budgets, the controls, then the lengths. Loads the model, in float32."""
    tell = progress or (lambda stage, done, total: None)
    base = load_engine(config.model, dtype="float32", on_miss="inline")
    with base:
        engines = Engines(base)
        setting = Setting(config.num_chunks, config.context_tokens)
        items = make_items(
            base, setting, config.num_questions, config.system_share, config.seed, config.num_multi_hop, config.part
        )
        unmet = unmet_budgets(engines, items, config)
        records = run_items(engines, items, _shares(config, unmet), tell)
        if config.noise_share:
            records[NOISE] = run_noise_floor(engines, items, config, tell)
        orders = run_orders(engines, items, config.order_share, tell)
        lengths = list(run_lengths(engines, config, tell)) if config.lengths else []
    at_one = [r for c, found in records.items() if c.mode == "blend" and c.ratio == 1.0 for r in found]
    auto = find_rule("auto", STORY_LAYERS).name
    return QualityResult(
        config,
        base.name,
        base.fingerprint,
        hardware_card(base.layers.device),
        tuple(row for configuration, found in records.items() for row in rows_of(configuration, found)),
        tuple(lengths),
        tuple(differences(records, auto, [rule for rule in config.rules if rule not in ("auto", auto)])),
        tuple(orders),
        tuple(unmet),
        len(at_one),
        sum(not record.same_as_full for record in at_one),
    )


def unmet_budgets(engines: Engines, items: Sequence[Item], config: QualityConfig) -> list[Unmet]:
    """The budgets that a rule cannot meet for each of the questions."""
    costs = []
    for item in items:
        prompt = request_for(engines.base, item.prompt).prompt
        costs.append(costs_of(engines.behind(prompt.prefix_ids), prompt))
    rules = [find_rule(name, STORY_LAYERS) for name in (*config.rules, *config.controls)]
    floors = {rule.name: max(floor_of(rule, cost) for cost in costs) for rule in rules}
    return [Unmet(name, budget, floor) for name, floor in floors.items() for budget in config.budgets if floor > budget]


class Asked(NamedTuple):
    """Configurations, and the share of every kind's questions that is asked in them."""

    chosen: list[Configuration]
    share: float
    behind_prefix: bool = True


def _shares(config: QualityConfig, unmet: Sequence[Unmet]) -> list[Asked]:
    """What is asked of all questions, and what of some."""
    missing = {(found.rule, found.budget) for found in unmet}
    main = configurations(config.rules, config.ratios, config.budgets)
    others = configurations(config.controls, config.ratios, config.budgets)
    ones = configurations((*config.rules, *config.controls), [1.0])
    off = configurations(config.rules, config.ratios)

    def met(chosen: Sequence[Configuration]) -> list[Configuration]:
        return [c for c in chosen if (c.rule, c.budget) not in missing]

    controls = [c for c in dict.fromkeys([*others, *ones]) if c not in main]
    without = [c._replace(prefix_precompute=False) for c in off if c != FULL]
    return [
        Asked(met(main), 1.0),
        Asked(met(controls), config.control_share),
        Asked(without, config.off_share, behind_prefix=False),
    ]


def run_items(engines: Engines, items: Sequence[Item], asked: Sequence[Asked], tell: Progress) -> Records:
    """Records by configuration, question by question; the same share of every kind's questions."""
    records: Records = {}
    for done, (item, number) in enumerate(_numbered(items)):
        tell("curve", done, len(items))
        prefix_ids = request_for(engines.base, item.prompt).prompt.prefix_ids
        full = None
        for chosen, share, behind_prefix in asked:
            if chosen and _is_in_share(number, share):
                engine = engines.behind(prefix_ids if behind_prefix else ())
                found, full = run_item(engine, item, chosen, full)
                for configuration, record in found.items():
                    records.setdefault(configuration, []).append(record)
    tell("curve", len(items), len(items))
    # In the order they were asked for, whichever question came first.
    return {c: records[c] for chosen, _, _ in asked for c in chosen if c in records}


def _numbered(items: Sequence[Item]) -> Iterator[tuple[Item, int]]:
    """Items with their number, from 1, among those of their kind."""
    counts: dict[str, int] = {}
    for item in items:
        counts[item.kind] = counts.get(item.kind, 0) + 1
        yield item, counts[item.kind]


def _is_in_share(number: int, share: float) -> bool:
    """Whether the question of that number is one of a share, evenly spread.

    >>> [number for number in range(1, 9) if _is_in_share(number, 0.25)]
    [1, 5]
    """
    return math.ceil(number * share) > math.ceil((number - 1) * share)


# -- controls


def run_noise_floor(engines: Engines, items: Sequence[Item], config: QualityConfig, tell: Progress) -> list[Record]:
    """Full prefill in bfloat16 against float32: a distance that no rule can be held to."""
    asked = [item for item, number in _numbered(items) if _is_in_share(number, config.noise_share)]
    records = []
    with load_engine(config.model, dtype=NOISE.dtype, on_miss="inline") as other:
        for done, item in enumerate(asked):
            tell("bfloat16", done, len(asked))
            full = answer(engines.base, request_for(engines.base, item.prompt), FULL)
            records.append(run_noise(engines.base, other, item, full))
    tell("bfloat16", len(asked), len(asked))
    return records


def run_orders(engines: Engines, items: Sequence[Item], share: float, tell: Progress) -> list[OrderResult]:
    """Questions over several chunks, asked with the chunks in two orders."""
    chosen = configurations(ORDER_RULES, [DEFAULT_RATIO])
    pairs: dict[Configuration, list[tuple[Record, Record]]] = {c: [] for c in chosen}
    asked = [i for i, number in _numbered(items) if i.kind in MULTI_HOP_KINDS and _is_in_share(number, share)]
    for done, item in enumerate(asked):
        tell("orders", done, len(asked))
        if item.reordered is None:
            continue
        engine = engines.behind(request_for(engines.base, item.prompt).prompt.prefix_ids)
        first, second = (run_item(engine, i, chosen)[0] for i in (item, item._replace(prompt=item.reordered)))
        for configuration in chosen:
            pairs[configuration].append((first[configuration], second[configuration]))
    tell("orders", len(asked), len(asked))
    return [_order_result(configuration, found) for configuration, found in pairs.items() if found]


def _order_result(configuration: Configuration, pairs: Sequence[tuple[Record, Record]]) -> OrderResult:
    num = len(pairs)
    same = sum(first.text == second.text for first, second in pairs) / num
    low, high = wilson_interval(same, num)
    exact, reordered = (sum(record.exact for record in records) / num for records in zip(*pairs, strict=True))
    return OrderResult(
        configuration.mode, configuration.rule, configuration.ratio, num, same, max(0.0, low), min(1.0, high),
        exact, reordered,
    )  # fmt: skip


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
        records = run_items(engines, items, [Asked(chosen, 1.0)], lambda stage, done, total: None)
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
    stories: Mapping[str, Any],
    corpus: Mapping[str, Any],
    out: Path | None,
    plot: Path | None,
    echo: Callable[[str], None],
    progress: Progress | None,
) -> dict[str, Any]:
    """`python -m benchmarks.demo_quality`: card and tables to `echo`, JSON to `out`, a picture to `plot`; the JSON.

    `stories` are fields of QualityConfig, `corpus` of CorpusConfig: with a corpus named there, that is measured end to
    end, in place of the stories. None is the default of the configuration.
    """
    if corpus["corpus"] is not None:
        if plot not in (None, NOWHERE):
            raise UsageError("--plot draws the curve over budgets; leave it out with --corpus")
        shared = {name: stories[name] for name in ("model", "num_questions", "rules", "ratios", "seed")}
        facts = bench_corpus(CorpusConfig(**_not_none(shared | dict(corpus))), echo, progress)
        _write_json(facts, out or CORPUS_OUT, echo)
        return facts
    return bench_stories(QualityConfig(**_not_none(stories)), out or STORIES_OUT, plot, echo, progress)


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
        from benchmarks.demo_quality.plot import plot_quality

        plot_quality(facts, picture)
        echo(f"plot in {picture}")
    return facts


def _picture(plot: Path | None) -> Path | None:
    """Where to draw, found out now and not after minutes of measuring."""
    from ragblend.bench.common.plots import require_matplotlib

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


def _not_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
