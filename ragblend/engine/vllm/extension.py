"""Extension of vLLM's workers (`--worker-extension-cls`) by a method that front ends call through `collective_rpc`.

A stop string ends a request in vLLM's front end, which then drops the connector's report; the workers still have it.
Imports neither torch nor vLLM when loaded, because vLLM adds the class to the bases of its worker class.
"""

from __future__ import annotations

from typing import Any


class BlendWorkerExtension:
    """Mixin that vLLM adds to its worker class."""

    def ragblend_report(self, request_id: str) -> dict[str, Any] | None:
        """Return the report on a request whose context this worker filled, as JSON values; None for other requests."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        connector: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
        return connector.report_for(request_id) if hasattr(connector, "report_for") else None
