"""Turns of a prompt, and the hashes of its blocks in vLLM's own prefix cache.

Every turn's chunks are fused with the turn's own question. So the KV of a turn depends on the prompt up to the end of
this turn, and not on later turns: a later prompt of the conversation finds it in vLLM's prefix cache, and a prompt that
finds nothing there computes the same. Depends on token ids and block hashes, not on vLLM.
"""

from __future__ import annotations

import hashlib
import uuid
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ragblend.engine.vllm.jobs import BlendTurn
from ragblend.prompt.types import ChunkRun


def split_by_turns(runs: Sequence[ChunkRun], ends: Sequence[int]) -> tuple[BlendTurn, ...]:
    """Return the turns that have stored chunks, each with its runs. `ends`: see `matching.turn_ends`."""
    turns = (
        BlendTurn(start, end, tuple(run for run in runs if start <= run.start < end))
        for start, end in pairwise([0, *ends])
    )
    return tuple(turn for turn in turns if turn.stored)


def with_runs(turns: Sequence[BlendTurn], runs: Sequence[ChunkRun]) -> tuple[BlendTurn, ...]:
    """Return the turns with the prompt's `runs`, of which some may have lost their variant. Turns without a stored
    chunk are left out."""
    changed = (turn._replace(runs=tuple(run for run in runs if turn.start <= run.start < turn.end)) for turn in turns)
    return tuple(turn for turn in changed if turn.stored)


def separate_blended_blocks(
    request: Any, turns: Sequence[BlendTurn], settings: tuple[object, ...], block_size: int
) -> None:
    """Change the hashes of a request's blocks so that only prompts whose blocks have the same KV share them.

    The KV of a turn, from its first stored chunk on, depends on all tokens up to the turn's end, on the stored chunks,
    and on `settings`, but vLLM hashes the tokens up to the end of a block. Blocks before the first chunk keep vLLM's
    own hashes, because their KV is exact.
    """
    digest, start = hashlib.sha256(repr(settings).encode(errors="surrogatepass")), 0
    for turn in turns:
        digest.update(array("Q", request.prompt_token_ids[start : turn.end]))
        variants = [(run.start, run.end, run.variant.key, run.variant.exact) for run in turn.runs if run.variant]
        digest.update(repr(variants).encode())
        start = turn.end
        _mix_into_hashes(request, turn.fused_start // block_size, digest.digest())


def hide_blocks(request: Any, num_seen: int) -> None:
    """Change the hashes of a request's blocks after the first `num_seen`, so that vLLM's prefix cache lacks them."""
    _mix_into_hashes(request, num_seen, uuid.uuid4().bytes)


def _mix_into_hashes(request: Any, index: int, secret: bytes) -> None:
    """Mix `secret` into the hash of the block at `index`, and so into the hashes of all later blocks.

    vLLM hashes a block once its last token is known. Without the block's hash, the hash before it is changed, or the
    salt of the first one.
    """
    hashes = request.block_hashes
    if hashes:
        index = min(index, len(hashes) - 1)
        hashes[index:] = [hashlib.sha256(secret + hashes[index]).digest()]
        request.update_block_hashes()  # of the later blocks; each is computed from the one before
    else:
        request.cache_salt = f"ragblend-{secret.hex()}{request.cache_salt or ''}"
