"""Figures of deviation: 4 (attention matrices), 6 (over the recompute ratio), 7 (by token), 8 (between layers).

The forward attention matrix [F, T] of a layer has the attention of the prompt's last F tokens to all T tokens, mean
over heads (the paper's section 4.1). Its deviation is the L2 norm of the difference from full prefill's matrix, here
divided by the norm of that matrix, mean over layers. The KV deviation of a token is the L2 norm of the difference of
its keys and values from full prefill's. Read `Study` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.causes import copy_kv
from benchmarks.figures.panels import Panel, Point
from benchmarks.figures.workload import (
    PAPER,
    Figure,
    Question,
    Workload,
    label_of,
    mean,
    open_engine,
    own_default,
    questions_of,
)
from ragblend.engine.fusion.attention import ProbeQueries, attention_mass
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.ingestion.contexts import chunk_variants
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.measures import FULL, REUSE, Configuration, timed_prefill
from ragblend.lab.tables import Facts
from ragblend.prompt.types import as_chunk

FORWARD_TOKENS = 8  # F: the last tokens of a prompt, which decide the first token of the answer
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.3, 0.5)
TOP_SHARE = 0.15  # of the tokens: those that the paper recomputes
_ATTENTION = "attention deviation, relative to full prefill"


class Study:
    """One question with full prefill's KV and the stored KV of its chunks."""

    def __init__(self, base: TransformersEngine, question: Question) -> None:
        case, prompt = question
        self.base, self.case, self.named = base, case, prompt
        self.engines: dict[str, TransformersEngine] = {}
        self.prompt = self._engine("none").request(prompt, mode="full", max_tokens=1).prompt
        self.full = self.prefill(FULL)
        self.stale = self.prefill(REUSE)
        rows = [row for run in self.prompt.runs for row in range(run.start, run.end)]
        self.chunk_rows = torch.tensor(rows)
        self.reference = self.forward_attention(self.full)

    def _engine(self, context: Any) -> TransformersEngine:
        if context not in self.engines:
            self.engines[context] = with_own_store(self.base, system=self.case.system, context=context)
            for variant in chunk_variants(map(as_chunk, self.named.chunks), context):
                self.engines[context].precompute(variant)
        return self.engines[context]

    def prefill(self, configuration: Configuration) -> FusedKV:
        """Return the prompt's KV in this configuration."""
        engine = self._engine(configuration.context)
        request = engine.request(self.named, mode="full", max_tokens=1)
        return timed_prefill(engine, request, configuration)[0].fused

    def forward_attention(self, fused: FusedKV) -> Tensor:
        """Return the forward attention matrices [L, F, T] over the KV of `fused`."""
        start = self.prompt.runs[-1].end
        rows = range(max(0, self.prompt.num_tokens - start - FORWARD_TOKENS), self.prompt.num_tokens - start)
        found: list[Tensor] = []

        def keep(queries: ProbeQueries, keys: Tensor) -> None:
            found.append(torch.stack([attention_mass(queries.slice_rows(slice(row, row + 1)), keys) for row in rows]))

        copied = copy_kv(fused, self.base, self.prompt.num_tokens)
        run_layers(self.base, self.prompt.token_ids[start:], start, copied, keep)
        return torch.stack(found)

    def attention_deviation(self, fused: FusedKV) -> float:
        """Return the relative attention deviation of `fused`, mean over layers."""
        difference = (self.forward_attention(fused) - self.reference).flatten(1).norm(dim=1)
        return float((difference / self.reference.flatten(1).norm(dim=1)).mean())

    def kv_deviation(self, fused: FusedKV) -> Tensor:
        """Return the KV deviation [L, C] of the C chunk tokens from full prefill."""
        layers = []
        for layer in range(fused.num_layers):
            squares = [
                (mine[:, self.chunk_rows] - theirs[:, self.chunk_rows]).float().square().sum(dim=(0, 2))
                for mine, theirs in (
                    (fused.keys(layer), self.full.keys(layer)),
                    (fused.values(layer), self.full.values(layer)),
                )
            ]
            layers.append((squares[0] + squares[1]).sqrt())
        return torch.stack(layers)

    def restored(self, scores: Tensor, ratio: float) -> FusedKV:
        """Return the stored KV with full prefill's KV of the share `ratio` of chunk tokens with the highest `scores`.

        scores: [L, C]; the tokens of each layer are chosen by its own row."""
        changed = copy_kv(self.stale, self.base, self.prompt.num_tokens)
        for layer in range(changed.num_layers):
            best = self.chunk_rows[scores[layer].topk(math.ceil(ratio * len(self.chunk_rows))).indices]
            for mine, theirs in (
                (changed.keys(layer), self.full.keys(layer)),
                (changed.values(layer), self.full.values(layer)),
            ):
                mine[:, best] = theirs[:, best]
        return changed


def run_layers(
    engine: TransformersEngine,
    token_ids: Sequence[int],
    start: int,
    fused: FusedKV,
    keep: Callable[[ProbeQueries, Tensor], None],
) -> None:
    """Run the model over `token_ids` at position `start` of `fused`. `keep` receives each layer's queries and keys."""
    layers = engine.layers
    rows = torch.arange(start, start + len(token_ids), device=layers.device)
    hidden = layers.embed(torch.tensor(token_ids, device=layers.device))

    def hook(queries: ProbeQueries, keys: Tensor, values: Tensor | None) -> None:
        keep(queries, keys)

    for layer in range(layers.num_layers):
        hidden = layers.run_probe_layer(layer, hidden, rows, fused, hook)


def segment_attention(engine: TransformersEngine, token_ids: Sequence[int], cuts: Sequence[int]) -> Tensor:
    """Return the attention [S, S] of each segment's tokens to each segment, mean over tokens, heads and layers.

    cuts: the first token of each of the S segments of `token_ids`; the first one is 0."""
    ends = [*cuts[1:], len(token_ids)]
    spans = [slice(start, end) for start, end in zip(cuts, ends, strict=True)]
    total = torch.zeros(len(spans), len(spans))

    def keep(queries: ProbeQueries, keys: Tensor) -> None:
        for row, span in enumerate(spans):
            mass = attention_mass(queries.slice_rows(span), keys)
            total[row] += torch.stack([mass[other].sum() for other in spans])

    fused = FusedKV.allocate(engine.layers.kv_shapes, len(token_ids), engine.layers.like)
    run_layers(engine, token_ids, 0, fused, keep)
    return total / engine.layers.num_layers


def attention_matrices(study: Study) -> tuple[Tensor, Tensor]:
    """Return the attention [S, S] between prefix, chunks and question with full prefill and with full reuse."""
    prompt, engine = study.prompt, study.base
    cuts = [0, *(run.start for run in prompt.runs), prompt.runs[-1].end]
    full = segment_attention(engine, prompt.token_ids, cuts)
    reuse = torch.zeros_like(full)
    reuse[0] = full[0]
    prefix = study.engines["none"].ids_before("none")
    for number, run in enumerate(prompt.runs, start=1):
        alone = segment_attention(engine, [*prefix, *prompt.token_ids[run.start : run.end]], [0, len(prefix)])
        reuse[number, [0, number]] = alone[1]
    forward = study.forward_attention(study.stale).mean(dim=(0, 1))
    ends = [*cuts[1:], prompt.num_tokens]
    reuse[-1] = torch.stack([forward[start:end].sum() for start, end in zip(cuts, ends, strict=True)])
    full[-1] = torch.stack(
        [study.reference.mean(dim=(0, 1))[start:end].sum() for start, end in zip(cuts, ends, strict=True)]
    )
    return full, reuse


def figure_4(work: Workload) -> Facts:
    """Attention between the parts of a prompt, with and without cross-attention, and its deviation over the chunks."""
    with open_engine(work) as base:
        questions = questions_of(work, base)
        matrices = attention_matrices(Study(base, questions[0]))
        parts = ["prefix", *(f"chunk {n}" for n in range(1, len(questions[0].prompt.chunks) + 1)), "question"]
        panels = [
            Panel(
                title,
                "attended part",
                "attending part",
                {part: list(enumerate(row.tolist())) for part, row in zip(parts, matrix, strict=True)},
                "image",
            )
            for title, matrix in zip(("full prefill", "full reuse"), matrices, strict=True)
        ]
        counts = sorted({2, *range(3, work.num_chunks + 1, 3), work.num_chunks})
        chosen = [REUSE, PAPER, own_default(base)]
        series: dict[str, list[Point]] = {label_of(each): [] for each in chosen}
        for count in counts:
            found: dict[str, list[float]] = {label: [] for label in series}
            for number, (case, prompt) in enumerate(questions):
                work.on_progress(f"{count} chunks", number, len(questions))
                study = Study(base, Question(case, case.prompt(prompt.chunks[:count])))
                for each in chosen:
                    found[label_of(each)].append(study.attention_deviation(study.prefill(each)))
            for label, values in found.items():
                series[label].append((count, mean(values)))
        panels.append(Panel("", "chunks in the prompt", _ATTENTION, series))
        full = matrices[0]
        others = [float(full[row, 1:row].sum()) for row in range(2, len(parts) - 1)]
        last = {label: points[-1][1] for label, points in series.items()}
        reuse, paper, own = (last[label_of(each)] for each in chosen)
        return {
            "panels": panels,
            "findings": {
                "attention of chunk tokens to other chunks, full prefill": mean(others),
                **{f"deviation at {counts[-1]} chunks, {label}": value for label, value in last.items()},
                "full reuse over the paper's rule": reuse / paper,
                "the paper's rule over the default": paper / own,
            },
        }


def figure_6(work: Workload) -> Facts:
    """Attention deviation over the recompute ratio: with the true KV deviation known, by rules, and at random."""
    with open_engine(work) as base:
        own = own_default(base).rule
        rules = dict.fromkeys(("cacheblend", own))
        known = "highest KV deviation, known"
        found: dict[str, dict[float, list[float]]] = {
            label: {ratio: [] for ratio in RATIOS} for label in (known, "random tokens", *rules)
        }
        questions = questions_of(work, base)
        for number, question in enumerate(questions):
            work.on_progress("questions", number, len(questions))
            study = Study(base, question)
            scores = study.kv_deviation(study.stale)
            chance = torch.rand(scores.shape[1], generator=torch.Generator().manual_seed(number)).expand_as(scores)
            for ratio in RATIOS:
                found[known][ratio].append(study.attention_deviation(study.restored(scores, ratio)))
                found["random tokens"][ratio].append(study.attention_deviation(study.restored(chance, ratio)))
                for rule in rules:
                    each = PAPER._replace(rule=rule, ratio=ratio) if ratio else REUSE
                    found[rule][ratio].append(study.attention_deviation(study.prefill(each)))
        series = {label: [(ratio, mean(values)) for ratio, values in each.items()] for label, each in found.items()}
        at = {label: dict(points) for label, points in series.items()}
        findings = {f"deviation that is left at 15 %, {label}": each[0.15] / each[0.0] for label, each in at.items()}
        findings |= {f"cacheblend over {own} at 15 %": at["cacheblend"][0.15] / at[own][0.15]}
        return {"panels": [Panel("", "recompute ratio", _ATTENTION, series)], "findings": findings}


def deviations(work: Workload, base: TransformersEngine) -> Iterable[Tensor]:
    """Yield the KV deviation [L, C] of the stored chunk tokens of each question."""
    questions = questions_of(work, base)
    for number, question in enumerate(questions):
        work.on_progress("questions", number, len(questions))
        study = Study(base, question)
        yield study.kv_deviation(study.stale)


def figure_7(work: Workload) -> Facts:
    """Distribution of the KV deviation over the tokens, on three layers."""
    with open_engine(work) as base:
        found = torch.cat(list(deviations(work, base)), dim=1)
        found /= found.mean(dim=1, keepdim=True).clamp_min(1e-12)
        num_layers = len(found)
        chosen = sorted({max(1, num_layers // 4), num_layers // 2, 3 * num_layers // 4})
        steps = torch.linspace(0, 1, 21)
        shares: dict[str, list[Point]] = {}
        sums: dict[str, list[Point]] = {}
        findings = {}
        for layer in chosen:
            ordered = found[layer].sort().values
            quantiles = torch.quantile(ordered, steps)
            shares[f"layer {layer}"] = list(zip(quantiles.tolist(), steps.tolist(), strict=True))
            squares = ordered.flip(0).square()
            places = (steps * (len(squares) - 1)).long()
            part = squares.cumsum(0)[places] / squares.sum()
            sums[f"layer {layer}"] = list(zip(steps.tolist(), part.tolist(), strict=True))
            top = math.ceil(TOP_SHARE * len(ordered))
            findings[f"mean deviation of the first 15 % over the rest's, layer {layer}"] = float(
                ordered[-top:].mean() / ordered[:-top].mean()
            )
        return {
            "panels": [
                Panel("", "KV deviation, 1 = mean of the layer", "share of tokens below", shares),
                Panel("", "share of tokens, highest first", "share of the squared deviation", sums),
            ],
            "findings": findings,
        }


def figure_8(work: Workload) -> Facts:
    """Spearman's rank correlation of the tokens' KV deviation between neighbouring layers.

    It begins with layers 1 and 2, because the stored KV of layer 0 is exact."""
    with open_engine(work) as base:
        pairs: dict[int, list[float]] = {}
        for found in deviations(work, base):
            for layer in range(1, len(found) - 1):
                pairs.setdefault(layer, []).append(float(spearmanr(found[layer], found[layer + 1]).statistic))
        series: Mapping[str, list[Point]] = {"Spearman's rho": [(layer, mean(each)) for layer, each in pairs.items()]}
        values = [value for _, value in series["Spearman's rho"]]
        panel = Panel("", "layer, compared with the next one", "rank correlation of the KV deviation", series)
        return {"panels": [panel], "findings": {"mean correlation": mean(values), "lowest correlation": min(values)}}


FIGURES: dict[str, Figure] = {
    "4": Figure(figure_4, {"num_questions": 8}),
    "6": Figure(figure_6, {"num_questions": 8}),
    "7": Figure(figure_7, {"num_questions": 8}),
    "8": Figure(figure_8, {"num_questions": 8}),
}
