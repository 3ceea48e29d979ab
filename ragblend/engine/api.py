"""Protocols of an engine and of its streamed answers, implemented by `transformers.engine`, `vllm.engine` and
`vllm.client`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, Unpack, runtime_checkable

from ragblend.engine.report import Generation, ShadowCounters
from ragblend.engine.store.base import KVStore
from ragblend.engine.tuning.calibration import CalibrationCache
from ragblend.option_keywords import GenerationKeywords
from ragblend.options import ContextPolicy
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import MatchedPrompt, Part, Prompt


class Stream(Protocol):
    """Answer in progress. Iterating yields its text; `result` is complete once the iteration has ended."""

    result: Generation

    def __iter__(self) -> Iterator[str]: ...
    def __next__(self) -> str: ...
    def close(self) -> None: ...


class DocumentEngine(Protocol):
    """Engine that can find and remove documents.

    It has a store and a tokenizer, and computes the keys of a model's KV in the store. It need not load the model.
    """

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...  # namespace of its chunks; prompts of other namespaces do not match them
    @property
    def renderer(self) -> Renderer: ...
    @property
    def store(self) -> KVStore: ...
    @property
    def calibrations(self) -> CalibrationCache | None: ...  # None: another process has them
    @property
    def context(self) -> ContextPolicy: ...  # context policy: text after which chunks are prefilled, see `keys`
    def key(self, chunk: Part) -> str: ...
    def is_stored(self, chunk: Part) -> bool: ...
    @property
    def is_usable(self) -> bool: ...  # False once it is closed, and in a process that was forked from its own
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...


class Engine(DocumentEngine, Protocol):
    """Model with a store. It precomputes chunks, and answers prompts from their KV. Safe to share between threads.

    `generate` and `stream` take the fields of GenerationOptions as keywords. `precompute` returns the number of bytes
    that it stored, 0 if the chunk's KV was stored already. `forget` deletes the chunk's KV, and returns True if there
    was any.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def system(self) -> str | None: ...  # system text after which chunks are prefilled
    def set_context_policy(self, policy: ContextPolicy) -> None: ...
    @property
    def context_length(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def shadow(self) -> ShadowCounters: ...  # shadow comparisons, see `load_engine`
    def flush_shadow(self) -> None: ...
    def has_kv(self, chunk_ids: Sequence[int]) -> bool: ...
    def precompute(self, chunk: Part) -> int: ...
    def prefetch(self, chunks: Sequence[Part]) -> None: ...  # into the fastest tier, in the background; optional work
    def forget(self, chunk: Part) -> bool: ...
    def add_known_chunks(self, chunks: Iterable[Part]) -> None: ...  # chunks to match in later prompts
    def match(self, prompt: Prompt) -> MatchedPrompt: ...
    def generate(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Generation: ...
    def stream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Stream: ...
    @property
    def default_prefix_ids(self) -> tuple[int, ...]: ...  # ids before each stored chunk; none are known of a server's
    @property
    def neutral_ids(self) -> tuple[int, ...]: ...  # ids between prefix and chunk for neutral variants; as above
    def is_generating(self) -> bool: ...  # True while requests of clients run that ingestion should not delay
    def check_not_forked(self) -> None: ...  # raises RagblendError in a process that was forked from the engine's


@runtime_checkable
class BatchEngine(Protocol):
    """Engine that decodes several answers together, in this process, and keeps the KV of conversations.

    Its `stream` and `generate` take `conversation=`.
    """

    @property
    def max_num_seqs(self) -> int: ...  # the largest number of answers that are decoded together
    def run_to_end(
        self, streams: Sequence[Any], cancel_check: Callable[[Any], bool] | None = None
    ) -> list[BaseException | None]: ...


@runtime_checkable
class IngestingEngine(Protocol):
    """Engine that prefills and stores several chunks in one call."""

    def precompute_all(self, chunks: Sequence[Part]) -> Iterable[int]: ...  # bytes stored for each chunk


@runtime_checkable
class MeasurableEngine(Engine, Protocol):
    """Engine in this process whose prefill shows the logits, so that blends can be compared with full prefill.

    `request` takes the fields of GenerationOptions as keywords and returns an EngineRequest, `prefill` a PrefillResult.
    """

    @property
    def num_layers(self) -> int: ...
    def request(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Any: ...
    def prefill(self, request: Any) -> Any: ...


@runtime_checkable
class RemoteEngine(Protocol):
    """Client of a server, which ingests the documents that it is sent."""

    def send_documents(
        self,
        collection: str,
        documents: Sequence[Mapping[str, Any]],
        on_progress: Callable[[str, int, int | None], None] = ...,
    ) -> tuple[Mapping[str, int], list[dict[str, Any]]]: ...  # counts, and documents with a reason
    def remove_documents(self, collection: str, ids: Sequence[str]) -> int: ...  # number of deleted entries
