"""The cheapest storage that adds no delay (CacheBlend, section 5.1). Arithmetic on a measured MachineProfile. Read
`plan` first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragblend.engine.tuning.loading_controller import (
    MachineProfile,
    check_speed,
    largest_hidden_ratio,
    machine_profile_from,
)
from ragblend.errors import UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_text

GB = 10**9  # the unit in which devices are sold


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage for KV: its read speed and its price."""

    name: str
    bytes_per_s: float
    usd_per_gb_month: float

    def __post_init__(self) -> None:
        check_speed(self.name, self.bytes_per_s)
        if not (math.isfinite(self.usd_per_gb_month) and self.usd_per_gb_month >= 0):
            raise UsageError(f"storage {self.name} costs {self.usd_per_gb_month} USD per GB and month; give 0 or more")


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """The kind of prompt for which storages are compared: a number of chunks of equal length, and a question."""

    num_chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float = 0.15
    usd_per_hour: float | None = None  # price of the machine that prefills
    probes_before_selection: bool = False  # the rule's query probe needs most layers, so little loading is hidden

    def __post_init__(self) -> None:
        for name in ("num_chunks", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")
        if not 0 <= self.ratio <= 1:
            raise UsageError(f"ratio is {self.ratio}; choose 0 to 1")
        if self.question_tokens < 0 or (self.usd_per_hour is not None and self.usd_per_hour <= 0):
            raise UsageError("a question has 0 tokens or more, and an hour of the machine costs more than 0 USD")

    @property
    def num_chunk_tokens(self) -> int:
        """Number of tokens of all chunks of one prompt."""
        return self.num_chunks * self.chunk_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of one prompt."""
        return self.num_chunk_tokens + self.question_tokens


SLIGHT = 0.1
"""Share of T_recompute from which loading counts as a delay if recompute does not hide it (docs/performance.md)."""


def plan(profile: MachineProfile, storages: Sequence[Storage], prompt: PromptSpec) -> dict[str, Any]:
    """Return the JSON object of a plan: which storage to use for the KV of prompts like `prompt`.

    "need": the fields of `prompt`. "full_s": seconds of full prefill. "options": the estimates of the storages,
    cheapest first. "chosen": the name of the cheapest storage that adds no delay and makes blending faster than full
    prefill; None if there is no such storage. Raises UsageError for no storages, and for equal names.
    """
    names = [storage.name for storage in storages]
    if not storages or len(set(names)) < len(names):
        raise UsageError(f"storages are {', '.join(names) or 'none'}; name one or more, each once (--storage)")
    ordered = sorted(storages, key=lambda storage: (storage.usd_per_gb_month, -storage.bytes_per_s, storage.name))
    options = [estimate_storage(profile, storage, prompt) for storage in ordered]
    chosen = next((option["storage"] for option in options if option["pays"] and not option["adds_delay"]), None)
    full_s = profile.full_prefill_s(prompt.num_tokens)
    return {"need": asdict(prompt), "full_s": full_s, "options": options, "chosen": chosen}


def estimate_storage(profile: MachineProfile, storage: Storage, prompt: PromptSpec) -> dict[str, Any]:
    """Return the cost of one storage, and its effect in seconds on the time to first token of prompts like `prompt`."""
    full_s = profile.full_prefill_s(prompt.num_tokens)
    load_s = profile.load_s(storage.bytes_per_s, prompt.num_chunk_tokens)
    recompute_s = profile.prompt_compute_s(prompt.ratio, prompt.num_tokens, prompt.num_chunk_tokens)
    saved_s = full_s - profile.blend_s(load_s, recompute_s, prompt.probes_before_selection)
    chunk_gb = prompt.chunk_tokens * profile.bytes_per_token / GB
    saved_per_chunk_s = saved_s / prompt.num_chunks
    pays = saved_s > 0
    month_usd = chunk_gb * storage.usd_per_gb_month
    return {
        "storage": storage.name,
        "load_s": load_s,  # T_load of one prompt's chunks
        "recompute_s": recompute_s,  # T_recompute at the requested ratio
        "ttft_s": full_s - saved_s,  # both, in the pipeline
        "adds_delay": load_s > recompute_s * (SLIGHT if prompt.probes_before_selection else 1.0)
        or not profile.overlaps,
        # The largest ratio that hides behind loading, at least the requested one.
        "hidden_ratio": largest_hidden_ratio(
            prompt.ratio, profile.hidden_compute_s(load_s, prompt.probes_before_selection), full_s, profile.shares
        ),
        "pays": pays,  # blending is faster than full prefill
        "gb_per_1000_chunks": 1000 * chunk_gb,
        "usd_per_1000_chunks_month": 1000 * month_usd,
        "saved_s": saved_s,  # per prompt, compared with full prefill
        # Uses of a chunk that save the time of precomputing it, and uses per month that pay its storage; None: never.
        "reuses_to_repay": math.ceil(profile.full_prefill_s(prompt.chunk_tokens) / saved_per_chunk_s) if pays else None,
        "reuses_per_month": month_usd / (saved_per_chunk_s / 3600 * prompt.usd_per_hour)
        if pays and prompt.usd_per_hour
        else None,
    }


def parse_storage(text: str, measured: Mapping[str, float]) -> Storage:
    """Return the storage that `text` describes: `NAME:GB_PER_S:USD_PER_GB_MONTH`. Raises UsageError for another form.

    If GB_PER_S is empty, the speed is that of the tier NAME in `measured`, which has bytes per second by tier.

    >>> parse_storage("ssd:2.5:0.08", {}), parse_storage("disk::0.1", {"disk": 5e8}).bytes_per_s
    (Storage(name='ssd', bytes_per_s=2500000000.0, usd_per_gb_month=0.08), 500000000.0)
    """
    name, *numbers = text.split(":")
    try:
        speed_text, price_text = numbers
        if not speed_text and name not in measured:
            known = ", ".join(measured) or "none"
            raise UsageError(
                f"storage {name!r} has no speed, and no tier of that name was measured (measured: {known})"
            )
        speed = float(speed_text) * GB if speed_text else measured[name]
        return Storage(name, speed, float(price_text))
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{text!r} is not a storage; write NAME:GB_PER_S:USD_PER_GB_MONTH, such as ssd:2.5:0.08, or disk::0.08 for "
            "the speed that was measured"
        ) from error


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
