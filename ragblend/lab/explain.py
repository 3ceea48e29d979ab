"""Explanation of one prompt: for each token its state (reused, recomputed, ...) and the deviation of its KV.

`explain` answers the prompt by blending and by full prefill and compares the KV of both; `Comparison` compares more
modes and other ratios. Works on engines that decode themselves. Does not depend on how an explanation is drawn
(`lab.explain_page`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from ragblend.corpus.citations import describe_chunk, describe_source, quote_beginning
from ragblend.engine.fusion.check_layers import measure_deviation
from ragblend.engine.fusion.plan import FusedKV, first_token_kl
from ragblend.engine.generation import EngineKeywords, EngineRequest, GenerationStream, PrefillResult
from ragblend.engine.matching import last_turn_end
from ragblend.engine.report import BlendReport, ChunkReport, Generation
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.options import Mode, RatioChoice
from ragblend.prompt.types import ChunkRun, Prompt

TokenState = Literal["exact", "computed", "recomputed", "reused"]
SegmentKind = Literal["prefix", "chunk", "text", "suffix"]
STATES: tuple[TokenState, ...] = ("exact", "computed", "recomputed", "reused")
"""exact: KV that was there and equals full prefill's: of a prefix in memory, or stored of the chunk directly after it.
computed: no KV was there, so it was computed in this prompt (the question, text around the chunks, missing chunks).
recomputed: stored KV that was replaced. reused: stored KV that was kept."""


@dataclass(frozen=True, slots=True)
class ExplainedToken:
    """One token of the prompt, and how far its KV is from full prefill's.

    `deviation` compares the stored KV with full prefill's, `remaining` the KV after blending. Each is the mean of
    `MeasuredDeviation.mean_relative` over the layers; 0 means equal KV.
    """

    id: int
    text: str  # "" if a later token completes the character
    state: TokenState
    deviation: float | None  # of the stored KV from full prefill's; None if no KV was stored
    remaining: float  # deviation of the KV that the answer was computed from
    attention: float | None  # share of the question's attention; None for a rule without a query probe


@dataclass(frozen=True, slots=True)
class ExplainedSegment:
    """A span of the prompt in reading order: text, or a run, which is a part of a chunk or the whole chunk.

    If the prompt interrupts a chunk with other text, the chunk has several runs. They have the same `number` and
    `chunk`, whose counts are those of all runs together.
    """

    kind: SegmentKind
    start: int  # position of its first token
    tokens: tuple[ExplainedToken, ...]
    number: int | None = None  # of the chunk in the prompt, from 1: `report.chunks[number - 1]`; None for text
    name: str = ""  # of the chunk, see `describe_chunk`; "" for text
    chunk: ChunkReport | None = None
    read_s: float | None = None  # seconds for reading its stored KV; None if none was read

    def count(self, state: TokenState) -> int:
        """Return the number of tokens in that state."""
        return sum(token.state == state for token in self.tokens)

    @property
    def deviation(self) -> float | None:
        """Mean deviation of the tokens whose KV was stored; None if there are none."""
        values = [token.deviation for token in self.tokens if token.deviation is not None]
        return sum(values) / len(values) if values else None

    @property
    def attention(self) -> float | None:
        """Share of the question's attention on this span; None for a rule without a query probe."""
        values = [token.attention for token in self.tokens if token.attention is not None]
        return sum(values) if values else None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prompt answered by blending and by full prefill, with the state of every token.

    Both modes read the same token ids: those of the model's own template and tokenizer.
    """

    model: str
    question: str  # the text of the last user turn after its chunks
    answer: str
    full_answer: str
    answers_identical: bool
    first_token_agrees: bool
    first_token_kl: float  # KL(full || blend) of the first token, nats
    report: BlendReport
    full_report: BlendReport
    segments: tuple[ExplainedSegment, ...]

    @property
    def tokens(self) -> tuple[ExplainedToken, ...]:
        """All tokens of the prompt, in order."""
        return tuple(token for segment in self.segments for token in segment.tokens)

    def count(self, state: TokenState) -> int:
        """Return the number of tokens in that state."""
        return sum(segment.count(state) for segment in self.segments)

    def attention_on(self, *states: TokenState) -> float | None:
        """Return the share of the question's attention on tokens in these states; None without a query probe."""
        values = [token.attention for token in self.tokens if token.attention is not None and token.state in states]
        return None if self.report.attention_stale is None else sum(values)


def explain(engine: TransformersEngine, prompt: Prompt, **options: Unpack[EngineKeywords]) -> Explanation:
    """Answer `prompt` by blending and by full prefill, and return how both answers and the KV of all tokens compare.

    `options`: arguments of the engine's `request`. The function runs three prefills and two answers, and holds the KV
    of two prompts. Raises UsageError for a mode other than "blend", and for a conversation, because the KV of its
    earlier turns is not computed from the prompt.
    """
    if options.get("mode", "blend") != "blend" or options.get("conversation") is not None:
        raise UsageError("explain shows how one prompt is blended; leave mode and conversation out")
    compared = Comparison(engine, prompt, **options)
    for mode in ("blend", "full"):
        for _ in compared.stream(mode):
            pass
    return compared.explanation()


class Comparison:
    """Answers to one prompt in several modes, compared with the answer of full prefill.

    Holds the KV of full prefill. Blending with another ratio therefore needs no further full prefill. `options`:
    arguments of the engine's `request`. Only one thread at a time may use the object.
    """

    def __init__(self, engine: TransformersEngine, prompt: Prompt, **options: Unpack[EngineKeywords]) -> None:
        self._engine, self._prompt, self._options = engine, prompt, options
        self._request = engine.request(prompt, **options)
        self._kept: dict[Mode, tuple[PrefillResult, Generation]] = {}
        self._stored: tuple[set[int], list[float]] | None = None  # numbers of stored chunks, deviation of every token

    def stream(self, mode: Mode, recompute_ratio: RatioChoice = None) -> GenerationStream:
        """Return the stream of an answer in `mode`. In mode "blend", `recompute_ratio` replaces the options' ratio.

        Comparisons use the latest answer of each mode.
        """
        request = self._request
        if mode != "full" and recompute_ratio is not None:
            options = self._options.copy()
            options["recompute_ratio"] = recompute_ratio
            request = self._engine.request(self._prompt, **options)

        def keep(prefilled: PrefillResult, answer: Generation) -> None:
            self._kept[mode] = (prefilled, answer)

        return GenerationStream(self._engine, replace(request, mode=mode), keep)

    def agreement(self, mode: Mode) -> dict[str, Any]:
        """Return how close the answer of `mode` is to full prefill's.

        The keys are `answers_identical`, `first_token_agrees` and `first_token_kl`, as in Explanation. The prompt must
        have been answered in `mode` and in the mode "full".
        """
        (reference, full_answer), (other, answer) = self._kept["full"], self._kept[mode]
        return {
            "answers_identical": answer.token_ids == full_answer.token_ids,
            "first_token_agrees": int(reference.logits.argmax()) == int(other.logits.argmax()),
            "first_token_kl": first_token_kl(reference.logits, other.logits),
        }

    def explanation(self) -> Explanation:
        """Return the state of every token. The prompt must have been answered in the modes "blend" and "full".

        Releases the KV of other modes; their `agreement` is not available afterwards.
        """
        (blended, answer), (full, full_answer) = self._kept["blend"], self._kept["full"]
        request = self._request
        hits, deviations = self._stored or self._keep_stored(full)
        remaining = _deviations(full.fused, blended.fused, request.prompt.num_tokens)
        self._kept = {mode: kept for mode, kept in self._kept.items() if mode in ("full", "blend")}
        return Explanation(
            model=self._engine.name,
            question=_question(self._engine, request),
            answer=answer.text,
            full_answer=full_answer.text,
            **self.agreement("blend"),
            report=answer.report,
            full_report=full_answer.report,
            segments=tuple(_segments(self._engine, request, blended, hits, deviations, remaining)),
        )

    def _keep_stored(self, full: PrefillResult) -> tuple[set[int], list[float]]:
        """Return the numbers of the prompt's stored chunks, and the deviation of every token before any recompute."""
        # Full reuse keeps all stored KV as it was placed, which is the state before recompute.
        request = self._request
        kept = self._kept.get("reuse")
        stored = kept[0] if kept is not None else self._engine.prefill(replace(request, mode="reuse"))
        # A tier may have evicted a chunk since.
        hits = {number for number, chunk in enumerate(stored.report.chunks) if chunk.hit}
        self._stored = hits, _deviations(full.fused, stored.fused, request.prompt.num_tokens)
        return self._stored


@torch.inference_mode()
def _deviations(full: FusedKV, other: FusedKV, count: int) -> list[float]:
    """Return for each token the mean over the layers of the deviation of `other`'s KV from `full`'s."""
    per_layer = []
    for layer in range(full.num_layers):
        ours, theirs = (LayerKV(kv.keys(layer)[:, :count], kv.values(layer)[:, :count]) for kv in (other, full))
        per_layer.append(measure_deviation(theirs, ours).mean_relative)
    means: list[float] = torch.stack(per_layer).mean(0).tolist()
    return means


def _segments(
    engine: TransformersEngine,
    request: EngineRequest,
    blended: PrefillResult,
    hits: Container[int],
    deviations: Sequence[float],
    remaining: Sequence[float],
) -> Iterator[ExplainedSegment]:
    """Yield the spans of the prompt with their explained tokens."""
    recomputed = set(_plain(blended.recomputed))
    attention = _plain(blended.attention) or None
    prompt = request.prompt
    last, num_resident = prompt.num_tokens - 1, blended.report.num_prefix_tokens
    index_at = {prompt.runs[part].start: index for index, parts in enumerate(prompt.runs_by_chunk) for part in parts}
    for start, end, run in prompt.parts:
        index = None if run is None else index_at[start]
        chunk = None if index is None else blended.report.chunks[index]
        is_stored = chunk is not None and chunk.hit and index in hits
        tokens, token_ids = [], prompt.token_ids[start:end]
        for place, text in enumerate(engine.renderer.token_texts(token_ids)):
            row = start + place
            has_kv = row < num_resident or (chunk is not None and chunk.hit)
            tokens.append(
                ExplainedToken(
                    token_ids[place],
                    text,
                    # The last token's logits select the first token of the answer, so it is always computed.
                    _state(has_kv and row != last, row in recomputed, row < blended.num_exact),
                    deviations[row] if is_stored else None,
                    remaining[row],
                    attention[row] if attention is not None else None,
                )
            )
        kind: SegmentKind = "chunk" if run is not None else "text" if start else "prefix"
        if run is None and end == prompt.num_tokens:
            kind = "suffix"
        number, read_s = None if index is None else index + 1, blended.read_s.get(start)
        yield ExplainedSegment(kind, start, tuple(tokens), number, _name(run, tokens), chunk, read_s)


def _state(has_kv: bool, is_recomputed: bool, is_exact: bool) -> TokenState:
    if not has_kv:
        return "computed"
    if is_recomputed:
        return "recomputed"
    return "exact" if is_exact else "reused"


def _name(run: ChunkRun | None, tokens: Sequence[ExplainedToken]) -> str:
    if run is None:
        return ""
    if run.chunk is not None:
        return describe_chunk(run.chunk)
    if run.document:
        return describe_source(run.document, {})
    return quote_beginning("".join(token.text for token in tokens))


def _question(engine: TransformersEngine, request: EngineRequest) -> str:
    ids, tail = request.prompt.token_ids, engine.renderer.tail_ids
    end = last_turn_end(ids, tail)
    return engine.renderer.plain_text(ids[request.prompt.question_start or end : end]).strip()


def _plain(tensor: Tensor | None) -> list[Any]:
    return [] if tensor is None else tensor.tolist()
