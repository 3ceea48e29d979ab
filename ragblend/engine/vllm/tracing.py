"""What a request's span says of ragblend, where vLLM traces (`--otlp-traces-endpoint`): attributes of vLLM's own span.

vLLM makes one span per request, in its front end, as the request ends. The report has come there with the last token.
Knows reports as plain values, and vLLM's output processor by two names; where a release has others, spans stay vLLM's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from ragblend.engine.vllm.params import PARAMS_KEY

log = logging.getLogger(__name__)

ATTRIBUTES = (
    "mode", "rule", "recompute_ratio", "num_chunks", "num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens",
    "charged_budget", "load_s", "fuse_s", "stall_s", "num_damaged_entries", "refused_reason",
)  # fmt: skip
"""Fields of the report that a span has, each as `ragblend.NAME`; seconds end in `_s`."""

_report: ContextVar[Mapping[str, Any] | None] = ContextVar("ragblend_report", default=None)


def trace_reports() -> None:
    """Have the spans of vLLM's front end say what became of a request. Calling it again changes nothing."""
    from vllm.v1.engine import output_processor

    processor = output_processor.OutputProcessor
    make_span, end = getattr(output_processor, "instrument_manual", None), getattr(processor, "do_tracing", None)
    if make_span is None or end is None:
        log.debug("this release of vLLM makes its spans elsewhere; they say nothing of ragblend")
        return
    if getattr(end, "tells_reports", False):
        return

    @functools.wraps(end)
    def do_tracing(self: Any, engine_core_output: Any, *args: Any, **kwargs: Any) -> Any:
        params = getattr(engine_core_output, "kv_transfer_params", None) or {}
        token = _report.set(params.get(PARAMS_KEY))
        try:
            return end(self, engine_core_output, *args, **kwargs)
        finally:
            _report.reset(token)

    @functools.wraps(make_span)
    def instrument_manual(*args: Any, attributes: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        return make_span(*args, attributes={**(attributes or {}), **attributes_of(_report.get())}, **kwargs)

    do_tracing.tells_reports = True  # type: ignore[attr-defined]
    processor.do_tracing, output_processor.instrument_manual = do_tracing, instrument_manual


def attributes_of(report: Mapping[str, Any] | None) -> dict[str, Any]:
    """A report as attributes of a span; what it has nothing to say of is left out.

    >>> attributes_of({"mode": "blend", "num_chunk_hits": 2, "chunks": [], "refused_reason": ""})
    {'ragblend.mode': 'blend', 'ragblend.num_chunk_hits': 2}
    """
    found = {name: (report or {}).get(name) for name in ATTRIBUTES}
    return {f"ragblend.{name}": value for name, value in found.items() if value not in (None, "")}
