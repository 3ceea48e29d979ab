"""What vLLM's crash dumps show of our objects: their reprs, which hold no token ids and no text of prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from ragblend.engine.report import BlendReport
from ragblend.engine.store.format.kv import MemoryKV
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.engine.vllm.base_engine import OutputDelta, VllmRequest
from ragblend.engine.vllm.params import BlendParams
from ragblend.engine.vllm.scheduler_side.loading import MemoryTierDelta
from ragblend.engine.vllm.scheduler_side.lookup import LookupResult
from ragblend.engine.vllm.scheduler_side.scheduler import _RequestState
from ragblend.engine.vllm.worker_side.worker import BlendJob, BlendTurn, JobResult, _ActiveJob
from ragblend.prompt.types import ChunkRun, MatchedPrompt, Variant

# What vLLM's processes hold, and send to each other in `BlendMetadata` and `BlendReports`.
ROOTS: tuple[type[Any], ...] = (
    BlendJob, JobResult, _ActiveJob, LookupResult, _RequestState, BlendReport, MemoryTierDelta, VllmRequest,
    OutputDelta, MatchedPrompt, MemoryKV,
)  # fmt: skip
HIDDEN = re.compile(r"(^|_)(ids|texts?|parts|prompt|request|content|question|body)$")


def shown(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Names and types of the fields in the repr of a dataclass or NamedTuple; none of other classes."""
    names = [each.name for each in fields(kind) if each.repr] if is_dataclass(kind) else getattr(kind, "_fields", ())
    if names:
        types = get_type_hints(kind)
        yield from ((name, types[name]) for name in names)


def classes_in(hint: Any) -> Iterator[type[Any]]:
    """Classes of ragblend's that a type contains."""
    if isinstance(hint, type) and hint.__module__.startswith("ragblend."):
        yield hint
    for each in get_args(hint):
        yield from classes_in(each)


def reachable() -> list[type[Any]]:
    """ROOTS, and the classes of all objects in their reprs."""
    found = [*ROOTS]
    for kind in found:  # grows
        found += dict.fromkeys(each for _, hint in shown(kind) for each in classes_in(hint) if each not in found)
    return found


@pytest.mark.parametrize("kind", reachable(), ids=lambda kind: kind.__name__)
def test_no_repr_holds_ids_or_text(kind):
    assert [name for name, _ in shown(kind) if HIDDEN.search(name) and name != "block_ids"] == []


def test_a_job_shows_what_the_reader_of_a_crash_dump_needs():
    ids = tuple(range(90_000, 90_064))
    run = ChunkRun(ids[1:60], 0, 1, 60, variant=Variant("key", "exact", exact=True))
    params = BlendParams(namespace="acme")
    dumped = repr(
        [
            BlendJob(
                "one", params, RequestTuning("ask", 0.15), ids, (run,), 60, (BlendTurn(0, 64, (run,)),), (3, 4), "model"
            )
        ]
    )
    assert "9000" not in dumped
    for each in ("'one'", "acme", "'key'", "start=1, end=60", "block_ids=(3, 4)"):
        assert each in dumped
