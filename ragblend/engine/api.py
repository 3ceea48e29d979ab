"""What every engine offers, as Protocols: implemented by `transformers.engine`, `vllm.engine` and `vllm.client`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, Unpack

from ragblend.engine.agreement import ShadowCounters
from ragblend.engine.report import Generation
from ragblend.engine.store.base import KVStore
from ragblend.options import ContextPolicy, GenerationKeywords
from ragblend.prompt.match import MatchedPrompt
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Part, Prompt


class Stream(Protocol):
    """An answer as it is made: iterate for text; `result` is complete once the iteration has ended."""

    result: Generation

    def __iter__(self) -> Iterator[str]: ...
    def __next__(self) -> str: ...
    def close(self) -> None: ...


class Engine(Protocol):
    """A model with a store: precompute chunks, then answer prompts from their fused KV. Safe to share between threads.

    `generate` and `stream` take GenerationOptions by name. `precompute` returns the bytes stored, 0 when the chunk's KV
    was there already; `forget` drops it, if it was.
    """

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...  # of its chunks, which prompts of no other namespace find
    @property
    def fingerprint(self) -> str: ...
    @property
    def system(self) -> str | None: ...  # the text that chunks are computed behind
    @property
    def renderer(self) -> Renderer: ...
    @property
    def store(self) -> KVStore: ...
    @property
    def context(self) -> ContextPolicy: ...  # what chunks are computed behind besides the prefix, see `lookup`
    @property
    def default_context(self) -> ContextPolicy: ...  # the same where nobody said, and the store remembers nothing
    def set_context_policy(self, policy: ContextPolicy) -> None: ...
    @property
    def context_length(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def shadow(self) -> ShadowCounters: ...  # full prefill beside a share of the requests, see `load_engine`
    def flush_shadow(self) -> None: ...
    def key(self, chunk: Part) -> str: ...
    def has_kv(self, chunk_ids: Sequence[int]) -> bool: ...
    def is_stored(self, chunk: Part) -> bool: ...
    def precompute(self, chunk: Part) -> int: ...
    def prefetch(self, chunks: Sequence[Part]) -> None: ...  # into the fastest tier, in the background; a hint
    def forget(self, chunk: Part) -> bool: ...
    def add_known(self, chunks: Iterable[Part]) -> None: ...  # chunks that are to be found in prompts
    def match(self, prompt: Prompt) -> MatchedPrompt: ...
    def generate(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Generation: ...
    def stream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Stream: ...
    def check_process(self) -> None: ...  # raises RagblendError in a process that was forked from the engine's
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
