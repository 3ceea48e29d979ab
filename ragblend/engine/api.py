"""What every engine offers, as Protocols: implemented by `hf.engine`, `vllm.engine` and `vllm.client`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from ragblend.engine.agreement import ShadowCounters
from ragblend.engine.report import Generation, Mode, RatioChoice
from ragblend.engine.store.base import KVStore
from ragblend.prompt.prompt import Part, SegmentedPrompt
from ragblend.prompt.segmenter import Segmenter


class Stream(Protocol):
    """An answer as it is made: iterate for text; `result` is complete once the iteration has ended."""

    result: Generation

    def __iter__(self) -> Iterator[str]: ...
    def __next__(self) -> str: ...
    def close(self) -> None: ...


class Engine(Protocol):
    """A model with a store: precompute chunks, then answer prompts from their fused KV. Safe to share between threads.

    `precompute` returns the bytes stored, 0 when the chunk's KV was there already; `forget` drops it, if it was.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def segmenter(self) -> Segmenter: ...
    @property
    def store(self) -> KVStore: ...
    @property
    def context_length(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def shadow(self) -> ShadowCounters: ...  # full prefill beside a share of the requests, see `load_engine`
    def flush_shadow(self) -> None: ...
    def key(self, chunk: Part) -> str: ...
    def is_stored(self, chunk: Part) -> bool: ...
    def precompute(self, chunk: Part) -> int: ...
    def prefetch(self, chunks: Sequence[Part]) -> None: ...  # into the fastest tier, in the background; a hint
    def forget(self, chunk: Part) -> bool: ...
    def generate(
        self,
        prompt: SegmentedPrompt,
        *,
        mode: Mode = "blend",
        rule: str = "auto",
        recompute_ratio: RatioChoice = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Generation: ...
    def stream(
        self,
        prompt: SegmentedPrompt,
        *,
        mode: Mode = "blend",
        rule: str = "auto",
        recompute_ratio: RatioChoice = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Stream: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
