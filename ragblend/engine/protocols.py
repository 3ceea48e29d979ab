"""The seams: what a store and a model must offer to the fusor and the engines, and who owns the memory.

Small Protocols, no inheritance. Implementations: `store`, `memory`, `disk`, `remote` (KVStore), `remote_redis`,
`remote_objects` (ByteStore), `loader` (LayerSource), `transformers_layers`, `vllm_layers` (LayerwiseModel),
`transformers_engine`, `vllm_engine`, `vllm_client` (Engine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from ragblend.engine.agreement import ShadowCounters
from ragblend.engine.attention import Queries
from ragblend.engine.kv import ChunkKV, LayerKV
from ragblend.engine.report import Generation, Mode, RatioChoice
from ragblend.segments import Part, SegmentedPrompt, Segmenter


@dataclass(slots=True)
class StoreCounters:
    """What a store has seen since it was opened. A damaged entry counts as a miss too."""

    num_hits: int = 0
    num_misses: int = 0
    num_puts: int = 0
    num_damaged: int = 0
    num_unsigned: int = 0  # of those, entries without the signature that this store's key makes
    num_evicted: int = 0
    num_failures: int = 0  # requests to a remote tier that failed or took too long; each get among them is a miss too
    num_dropped: int = 0  # background writes given up: refused, without room, or still owed when the store was closed


class VerifyResult(NamedTuple):
    """Whether every byte of one entry is what was written; `reason` is empty when it is."""

    key: str
    ok: bool
    reason: str


class KVStore(Protocol):
    """Chunk KV by key. Safe to share between threads; a DiskStore also between processes.

    `get` returns None for a miss and never raises for one; a damaged, truncated or foreign entry, or one whose
    token ids differ from `token_ids`, is a miss with a warning and a counter. The tensors it returns are
    read-only. `put` of a key that is already stored is harmless; it raises StoreFullError when there is no room.
    """

    @property
    def counters(self) -> StoreCounters: ...
    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None: ...
    def put(self, kv: ChunkKV) -> None: ...
    def contains(self, key: str) -> bool: ...
    def delete(self, key: str) -> bool: ...
    def keys(self) -> Iterator[str]: ...
    def nbytes(self) -> int: ...


class ByteStore(Protocol):
    """Named values somewhere else: what a remote tier needs of Redis or of an object store. Safe between threads.

    Every method raises BackendUnreachableError when the other side fails or takes longer than its time limit, and
    StoreFullError when it refuses a value for want of room. `put` appears in one step, or is noticed by checksums.
    What the other side announces is checked before it is read, and `sizes` ends whatever it says.
    """

    @property
    def url(self) -> str: ...  # without its password
    @property
    def max_value_bytes(self) -> int: ...
    def get(self, name: str) -> bytes | None: ...
    def put(self, name: str, data: bytes) -> None: ...
    def contains(self, name: str) -> bool: ...
    def delete(self, name: str) -> bool: ...
    def sizes(self) -> Iterator[tuple[str, int]]: ...  # every name with its bytes
    def clean(self) -> int: ...  # remove what killed writers left behind; how many
    def ping(self) -> None: ...
    def close(self) -> None: ...


class FusedLayers(Protocol):
    """Where a prompt's KV is put together: per layer, keys and values of all its tokens, in prompt order.

    `keys` and `values` are asked for at the layers where a plan probes or checks, the latest that was waited for.
    """

    length: int  # rows that are valid in every layer

    def keys(self, layer: int) -> Tensor: ...  # [H, capacity, D], rotated to their positions
    def values(self, layer: int) -> Tensor: ...  # [H, capacity, D]
    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None: ...


class LayerSource(Protocol):
    """Where the fusor waits for stored KV. `wait` returns when the layer is placed in the FusedLayers it was made for.

    Layers are waited for in ascending order; a layer waited for before is there at once. It raises DamagedEntryError
    when stored bytes turn out wrong: the request starts again with that chunk as a miss.
    """

    def wait(self, layer: int) -> None: ...


Watch = Callable[[Queries, Tensor], None]
"""Sees the queries of the rows that a layer runs and the keys [H, rows[-1] + 1, D] they meet, both rotated. Called
once; the queries may be kept, the keys may not."""


class LayerwiseModel(Protocol):
    """A decoder whose layers can be run one at a time, over any subset of the prompt's tokens.

    `rows` are prompt positions [R], ascending; `hidden` is [R, hidden size]. Each row attends to every row of
    `fused` at or before its own position. `place_keys` may be called from a second thread; the rest runs one
    request at a time. Nothing here keeps a reference to what it returns.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def kv_share(self) -> float: ...  # share of one layer's parameters that makes K and V, for charged budgets
    def embed(self, token_ids: Tensor) -> Tensor: ...
    def project_kv(self, layer: int, hidden: Tensor) -> LayerKV: ...  # pre-RoPE keys, values [H, R, D]; no attention
    def place_keys(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor: ...  # [H, R, D] rotated to rows
    def run_layer(self, layer: int, hidden: Tensor, rows: Tensor, fused: FusedLayers) -> Tensor: ...
    def run_layer_ahead(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: FusedLayers, watch: Watch | None
    ) -> Tensor: ...  # `run_layer` for rows that may be asked only; `watch` sees their queries and the keys
    def run_layer_keeping_kv(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: FusedLayers
    ) -> tuple[Tensor, LayerKV]: ...  # the same, and the rows' pre-RoPE keys and values [H, R, D]
    def logits(self, hidden: Tensor) -> Tensor: ...  # [R, vocabulary], float32


class PackingModel(LayerwiseModel, Protocol):
    """A LayerwiseModel that also runs several chunks in one pass, each behind the same prefix."""

    def run_packed_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, spans: tuple[slice, ...], prefix: FusedLayers
    ) -> tuple[Tensor, LayerKV]: ...  # hidden [R, hidden size] of chunks at `spans`, their pre-RoPE keys and values


class CheckableModel(PackingModel, Protocol):
    """A PackingModel that also offers its own, untouched full prefill to be compared with."""

    @property
    def like(self) -> Tensor: ...  # an empty tensor of the KV's dtype and device
    @property
    def kv_shapes(self) -> Sequence[tuple[int, int, int]]: ...  # per layer: H, D of keys, D of values
    def full_prefill(
        self, token_ids: Tensor
    ) -> tuple[Tensor, list[LayerKV]]: ...  # last logits [vocabulary], rotated KV


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
