"""What every vLLM worker can be asked beside its own work: `--worker-extension-cls`, through vLLM's `collective_rpc`.

A stop string ends a request in vLLM's front end, which then drops what the connector had to say about it; the workers
still know. Imports nothing: vLLM adds the class to its worker's bases.
"""

from __future__ import annotations

from typing import Any


class BlendWorkerExtension:
    """Mixed into vLLM's worker class, whichever that is."""

    def ragblend_report(self, request_id: str) -> dict[str, Any] | None:
        """The report on a request whose context was filled here, as plain JSON values; None for any other."""
        connector = _connector()
        found: dict[str, Any] | None = connector.report_for(request_id) if hasattr(connector, "report_for") else None
        return found


def _connector() -> Any:
    """This worker's half of the connector; None where there is none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None
