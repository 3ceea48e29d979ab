"""When a running request is refined: after its first token, while no other request shares its blocks.

The workers refine (`worker_side.refine`). Depends on attributes of vLLM's requests and blocks; does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragblend.engine.vllm.jobs import RefineJob


def refine_job(request: Any, ratio: float, blocks: Sequence[Any], first: int) -> RefineJob | None:
    """Return the refinement of a vLLM request before the step that is being scheduled; None if it is not possible now.

    `ratio`: share of the chunk tokens. `blocks`: the request's blocks, which are written from index `first` on.

    The request must have sent its first token, and must not wait for its last one only. All its tokens but the newest
    have KV: a request that resumes after a preemption, or whose drafts may be rejected, has not. With asynchronous
    scheduling the newest token's id is not known here, and its KV is computed by this step, too. vLLM's prefix cache
    lets later prompts share the blocks. Then they are read by others, and are left as they are.
    """
    num_known, num_computed, num_answered = request.num_tokens, request.num_computed_tokens, request.num_output_tokens
    if not 0 < num_answered < request.max_tokens - 1 or num_computed not in (num_known - 1, num_known):
        return None
    if any(block.ref_cnt > 1 for block in blocks[first:]):
        return None
    answer_ids = tuple(request.output_token_ids)
    return RefineJob(request.request_id, ratio, answer_ids, num_computed, tuple(block.block_id for block in blocks))
