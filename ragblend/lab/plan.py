"""The cheapest storage that adds no delay (CacheBlend, section 5.1), the size of a corpus' KV, and where it fits.

Arithmetic on a MachineProfile, which was measured, or predicted from data sheets (`lab.hardware`). Read `plan` first.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ragblend.engine.fusion.rules import DEFAULT_RATIO
from ragblend.engine.store.format.sizes import parse_bytes
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.tuning.loading_controller import (
    SLIGHT,
    MachineProfile,
    check_speed,
    largest_hidden_ratio,
    machine_profile_from,
)
from ragblend.errors import UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_text
from ragblend.lab.hardware import READ_BYTES_PER_S, Hardware
from ragblend.lab.model_sizes import KV_DTYPES, ModelSizes
from ragblend.option_fields import default_of
from ragblend.options import TierOptions
from ragblend.redaction import has_secret, redact_url

GB = 10**9  # the unit in which devices are sold


REMOTE = ("remote", "redis", "rediss", "s3", "gs", "az")
"""Names of storages that are remote tiers. In vLLM their chunks arrive whole, before the first layer is used."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage for KV: its read speed, its price, and the seconds until a prompt's first byte arrives.

    The latency counts once for each prompt, because its chunks are read in parallel.
    """

    name: str
    bytes_per_s: float
    usd_per_gb_month: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_speed(self.name, self.bytes_per_s)
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UsageError(f"storage {self.name} has a latency of {self.latency_s} s; give 0 ms or more")
        if not (math.isfinite(self.usd_per_gb_month) and self.usd_per_gb_month >= 0):
            raise UsageError(f"storage {self.name} costs {self.usd_per_gb_month} USD per GB and month; give 0 or more")


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """The kind of prompt for which storages are compared: a number of chunks of equal length, and a question."""

    num_chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float = DEFAULT_RATIO
    probes_before_selection: bool = False  # the rule's query probe needs most layers, so little loading is hidden

    def __post_init__(self) -> None:
        for name in ("num_chunks", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")
        if not 0 <= self.ratio <= 1:
            raise UsageError(f"ratio is {self.ratio}; choose 0 to 1")
        if self.question_tokens < 0:
            raise UsageError(f"question_tokens is {self.question_tokens}; choose 0 or more")

    @property
    def num_chunk_tokens(self) -> int:
        """Number of tokens of all chunks of one prompt."""
        return self.num_chunks * self.chunk_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of one prompt."""
        return self.num_chunk_tokens + self.question_tokens


ProfileAt = Callable[[int], MachineProfile]
"""Returns the profile that holds for prompts of a number of tokens. A predicted profile holds at one length."""

LONGEST_TOKENS = 1 << 17  # up to which `plan` looks for the length from which blending pays


def plan(
    profile_at: ProfileAt,
    storages: Sequence[Storage],
    prompt: PromptSpec,
    longest_tokens: int = LONGEST_TOKENS,
    num_corpus_tokens: int = 0,
) -> dict[str, Any]:
    """Return the JSON object of a plan: which storage to use for the KV of prompts like `prompt`.

    "need": the fields of `prompt`. "full_s": seconds of full prefill. "ingested_tokens_per_s": of chunks alone.
    "memory": "ttft_s" of KV in the memory tier, and "pays_from_tokens". "options": the estimates of the storages,
    cheapest first. "chosen": the name of the cheapest storage that adds no delay and makes blending faster than full
    prefill; None if there is no such storage. `longest_tokens`: the longest prompt that is considered for
    "pays_from_tokens". `num_corpus_tokens`: tokens of all chunks, for "corpus_usd_month" of the options, one variant of
    each chunk. Raises UsageError for no storages, and for equal names.
    """
    names = [storage.name for storage in storages]
    if not storages or len(set(names)) < len(names):
        raise UsageError(f"storages are {', '.join(names) or 'none'}; name one or more, each once (--storage)")
    at_length = profile_at(prompt.num_tokens)
    ordered = sorted(storages, key=lambda storage: (storage.usd_per_gb_month, -storage.bytes_per_s, storage.name))
    corpus_gb = num_corpus_tokens * at_length.bytes_per_token / GB
    options = [
        {
            **estimate_storage(at_length, storage, prompt),
            "pays_from_tokens": pays_from_tokens(profile_at, storage, prompt, longest_tokens),
            "corpus_usd_month": corpus_gb * storage.usd_per_gb_month,
        }
        for storage in ordered
    ]
    chosen = next((option["storage"] for option in options if option["pays"] and not option["adds_delay"]), None)
    return {
        "need": asdict(prompt),
        "full_s": at_length.full_prefill_s(prompt.num_tokens),
        "ingested_tokens_per_s": prompt.chunk_tokens / at_length.full_prefill_s(prompt.chunk_tokens),
        "memory": {
            "ttft_s": blended_s(at_length, None, prompt),
            "pays_from_tokens": pays_from_tokens(profile_at, None, prompt, longest_tokens),
        },
        "options": options,
        "chosen": chosen,
    }


def always(profile: MachineProfile) -> ProfileAt:
    """Return a function that returns `profile` for every length, as a measured one is used."""
    return lambda num_tokens: profile


def limit_to_engine(storage: Storage) -> Storage:
    """Return the storage, read no faster than today's engine reads."""
    return replace(storage, bytes_per_s=min(storage.bytes_per_s, READ_BYTES_PER_S))


def blended_s(profile: MachineProfile, storage: Storage | None, prompt: PromptSpec) -> float:
    """Return the seconds to the first token of a blended prompt. `storage`: None for the memory tier."""
    recompute_s = profile.prompt_compute_s(prompt.ratio, prompt.num_tokens, prompt.num_chunk_tokens)
    if storage is None:
        return recompute_s
    load_s = profile.load_s(storage.bytes_per_s, prompt.num_chunk_tokens)
    return storage.latency_s + profile.blend_s(load_s, recompute_s, _waits_for_loading(profile, storage, prompt))


def _waits_for_loading(profile: MachineProfile, storage: Storage, prompt: PromptSpec) -> bool:
    """Return True if most KV from the storage is loaded before recompute starts, so that recompute hides little."""
    return prompt.probes_before_selection or (storage.name in REMOTE and profile.hardware.get("engine") == "vllm")


def pays_from_tokens(
    profile_at: ProfileAt, storage: Storage | None, prompt: PromptSpec, longest_tokens: int = LONGEST_TOKENS
) -> int | None:
    """Return the tokens of the shortest prompt of such chunks that is blended faster than prefilled in full.

    Returns None if full prefill is faster for the longest prompt that has at most `longest_tokens` tokens, too.
    """

    def with_chunks(num_chunks: int) -> PromptSpec:
        return replace(prompt, num_chunks=num_chunks)

    def pays(num_chunks: int) -> bool:
        spec = with_chunks(num_chunks)
        profile = profile_at(spec.num_tokens)
        return blended_s(profile, storage, spec) < profile.full_prefill_s(spec.num_tokens)

    most = max(1, (longest_tokens - prompt.question_tokens) // prompt.chunk_tokens)
    if not pays(most):
        return None
    # What blending costs for any prompt is repaid by each further chunk, so it pays from some number of chunks on.
    return with_chunks(bisect_left(range(1, most), True, key=pays) + 1).num_tokens


def estimate_storage(profile: MachineProfile, storage: Storage, prompt: PromptSpec) -> dict[str, Any]:
    """Return the cost of one storage, and its effect in seconds on the time to first token of prompts like `prompt`."""
    full_s = profile.full_prefill_s(prompt.num_tokens)
    load_s = storage.latency_s + profile.load_s(storage.bytes_per_s, prompt.num_chunk_tokens)
    recompute_s = profile.prompt_compute_s(prompt.ratio, prompt.num_tokens, prompt.num_chunk_tokens)
    saved_s = full_s - blended_s(profile, storage, prompt)
    waits = _waits_for_loading(profile, storage, prompt)
    chunk_gb = prompt.chunk_tokens * profile.bytes_per_token / GB
    saved_per_chunk_s = saved_s / prompt.num_chunks
    pays = saved_s > 0
    return {
        "storage": storage.name,
        "bytes_per_s": storage.bytes_per_s,
        "load_s": load_s,  # T_load of one prompt's chunks
        "recompute_s": recompute_s,  # T_recompute at the requested ratio
        "ttft_s": full_s - saved_s,  # both, in the pipeline
        "adds_delay": load_s > recompute_s * (SLIGHT if waits else 1.0) or not profile.overlaps,
        # The largest ratio that hides behind loading, at least the requested one.
        "hidden_ratio": largest_hidden_ratio(
            prompt.ratio, profile.hidden_compute_s(load_s, waits), full_s, profile.shares
        ),
        "pays": pays,  # blending is faster than full prefill
        "gb_per_1000_chunks": 1000 * chunk_gb,
        "usd_per_1000_chunks_month": 1000 * chunk_gb * storage.usd_per_gb_month,
        "saved_s": saved_s,  # per prompt, compared with full prefill
        # Uses of a chunk that save the time of precomputing it; None: never.
        "reuses_to_repay": math.ceil(profile.full_prefill_s(prompt.chunk_tokens) / saved_per_chunk_s) if pays else None,
    }


STORAGES = {
    storage.name: storage
    for storage in (
        Storage("nvme", 3.5e9, 0.1, 0.1e-3),
        Storage("redis", 1e9, 12.0, 0.5e-3),
        Storage("s3", 0.7e9, 0.023, 0.1),
    )
}
"""Storages that need no numbers; what an entry of `--storage` leaves out is taken from here.

nvme: a PCIe 3.0 x4 drive's data sheet, and a cloud's price of its SSD volumes. redis: a network of 10 Gbit/s at four
fifths, and a managed Redis by its memory. s3: Amazon's guideline of 85 to 90 MB/s for each request, of which the engine
sends 8 at a time, 100 ms to the first byte, and its standard price.
"""


def parse_storage(text: str, measured: Mapping[str, float]) -> Storage:
    """Return the storage that `text` describes: `NAME:GB_PER_S:USD_PER_GB_MONTH:LATENCY_MS`.

    A number that is empty or left out is that of `STORAGES`. The speed is then the one of the tier NAME in `measured`,
    which has bytes per second by tier, and the latency 0, if there is none. Raises UsageError for another form.

    >>> parse_storage("ssd:2.5:0.08", {}), parse_storage("disk::0.1", {"disk": 5e8}).bytes_per_s
    (Storage(name='ssd', bytes_per_s=2500000000.0, usd_per_gb_month=0.08, latency_s=0.0), 500000000.0)
    >>> parse_storage("s3::0.02", {})
    Storage(name='s3', bytes_per_s=700000000.0, usd_per_gb_month=0.02, latency_s=0.1)
    """
    name, *numbers = text.split(":")
    storage = STORAGES.get(name)
    if len(numbers) > 3:
        raise UsageError(f"{text!r} is not a storage; {_STORAGE_FORM}")
    speed, price, latency = (each.strip() for each in (*numbers, "", "", "")[:3])
    if not speed and name not in measured and storage is None:
        raise UsageError(
            f"storage {name!r} has no speed, and no tier of that name was measured (measured: "
            f"{', '.join(measured) or 'none'}; known: {', '.join(STORAGES)}); {_STORAGE_FORM}"
        )
    if not price and storage is None:
        raise UsageError(f"storage {name!r} has no price; {_STORAGE_FORM}")
    try:
        return Storage(
            name,
            float(speed) * GB if speed else measured.get(name) or storage.bytes_per_s,  # type: ignore[union-attr]
            float(price) if price else storage.usd_per_gb_month,  # type: ignore[union-attr]
            float(latency) / 1000 if latency else storage.latency_s if storage else 0.0,
        )
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{text!r} is not a storage; {_STORAGE_FORM}") from error


_STORAGE_FORM = (
    "write NAME:GB_PER_S:USD_PER_GB_MONTH:LATENCY_MS, such as ssd:2.5:0.08, disk::0.08 for the speed that was "
    "measured, or the name alone of nvme, redis or s3"
)


def parse_places(texts: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return by storage the setting of TierOptions that puts its KV there, and the setting's value.

    `texts`: NAME=PLACE, a folder or the URL of a remote tier, for each of the storages `names`. Raises UsageError for
    another form, a storage without a place, and a URL with a password.

    >>> parse_places(["nvme=/mnt/kv", "hdd=file:///slow/kv"], ["hdd", "nvme"])
    {'nvme': ('kv_dir', '/mnt/kv'), 'hdd': ('remote', 'file:///slow/kv')}
    """
    places = dict[str, tuple[str, str]]()
    for text in texts:
        name, _, place = text.partition("=")
        if not place or name not in names or name in places:
            raise UsageError(
                f"--place {redact_url(text)!r} is not the place of a storage; write NAME=FOLDER or NAME=URL, once for "
                f"each of {', '.join(names)}"
            )
        if has_secret(place):
            raise UsageError(
                f"the URL of {name} has a password, which is not written to a file; leave it out here, and set the "
                "whole URL as RAGBLEND_REMOTE"
            )
        if "://" in place:
            open_remote(place).close()
            places[name] = "remote", place
        else:
            places[name] = "kv_dir", str(expand_user_path(place, "--place").absolute())
    if left := [name for name in names if name not in places]:
        raise UsageError(f"{', '.join(left)} has no place; add --place {left[0]}=FOLDER or --place {left[0]}=URL")
    return places


# -- a corpus


BYTES_PER_TEXT_TOKEN = 4
"""Bytes of plain text in a token, as English prose has with the tokenizers of current models."""
NEUTRAL_VARIANTS, NEUTRAL_PREFILL = 2, 2.24
"""With ingestion context `neutral`: variants that are stored of a chunk, and prefill that they cost
(docs/fidelity.md)."""


def describe_store(
    sizes: ModelSizes | None,
    measured: MachineProfile | None,
    hardware: Hardware | None,
    kv_dtype: str = default_of(TierOptions, "kv_dtype"),
    corpus: str | None = None,
    memory: str | None = None,
) -> dict[str, Any]:
    """Return the size of the KV, and what fits where, as JSON values.

    "bytes_per_token": by the dtype of the KV; of a profile without `sizes`, what was measured. "corpus": the tokens of
    `corpus`, a number of bytes of plain text, and the bytes of their KV by dtype, alone and with neutral variants.
    "gpu": its memory, the model's weights, and the tokens whose KV fits beside them. "host": the tokens whose KV fits
    into `memory` in `kv_dtype`, and their share of the corpus. What is not known is None. Raises UsageError for weights
    that do not fit into the GPU.
    """
    if sizes is not None:
        per_token = {name: sizes.stored_bytes_per_token(name) for name in KV_DTYPES}
    else:
        assert measured is not None
        per_token = {"measured": measured.bytes_per_token}
    facts: dict[str, Any] = {"dtype": sizes and sizes.dtype, "bytes_per_token": per_token}
    facts |= {"corpus": None, "gpu": None, "host": None}
    if corpus is not None:
        num_tokens = parse_bytes(corpus) // BYTES_PER_TEXT_TOKEN
        facts["corpus"] = {
            "text_bytes": parse_bytes(corpus),
            "tokens": num_tokens,
            "kv_bytes": {name: nbytes * num_tokens for name, nbytes in per_token.items()},
            "kv_bytes_neutral": {name: NEUTRAL_VARIANTS * nbytes * num_tokens for name, nbytes in per_token.items()},
        }
    if sizes is not None and hardware is not None and hardware.nbytes is not None:
        weights = sizes.num_weights * sizes.itemsize
        if weights >= hardware.nbytes:
            raise UsageError(
                f"the weights have {weights / GB:.0f} GB in {sizes.dtype}, one {hardware.name} has "
                f"{hardware.nbytes / GB:.0f}; choose a larger one. Times of several GPUs are not predicted: measure "
                "them (ragblend profile), or leave --gpu out for the size of the store"
            )
        left = (hardware.nbytes - weights) / sizes.stored_bytes_per_token()
        facts["gpu"] = {"name": hardware.name, "bytes": hardware.nbytes, "weight_bytes": weights, "tokens": int(left)}
    if memory is not None:
        num_tokens = parse_bytes(memory) // per_token.get(kv_dtype, next(iter(per_token.values())))
        total = facts["corpus"] and facts["corpus"]["tokens"]
        facts["host"] = {
            "bytes": parse_bytes(memory),
            "tokens": num_tokens,
            "corpus_share": min(1.0, num_tokens / total) if total else None,
        }
    return facts


def read_profile(place: str | Path) -> MachineProfile:
    """Return the machine profile in a file that `ragblend profile --json` printed.

    Raises NotFoundError for a file that does not exist, UsageError for any other content.
    """
    path = expand_user_path(place, "--profile")
    how = f"write it: ragblend profile --model MODEL --json > {path}"
    try:
        facts = json.loads(read_text(path, "--profile", how))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no machine profile ({error}); {how}") from error
    if not isinstance(facts, dict):
        raise UsageError(f"{path} is no machine profile but a JSON {type(facts).__name__}; {how}")
    return machine_profile_from(facts)
