"""Blending inside vLLM by Triton's kernels, run in its interpreter, against the same blend by torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import PREFIX, ask, assert_same_answer, connector_worker, engine, ingest, recorded_selections, report
from refined import kv_in_blocks
from test_blend import CHUNKS, TOLERANCE, blend_params, patchy_prompt, plain_prompt

from ragblend.engine.fusion import attention
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.vllm.worker_side import worker as vllm_worker

CASES = {
    "reuse": {"mode": "reuse"},
    "ask": blend_params(0.15, "ask"),
    "cacheblend": blend_params(0.15),
    "all": blend_params(1.0),
}
PROMPTS = {"plain": plain_prompt().ids, "patchy": patchy_prompt().ids}


@contextmanager
def recorded_kv() -> Iterator[list[list[LayerKV]]]:
    """The KV in the blocks of each request, right after it was fused."""
    found: list[list[LayerKV]] = []
    note_fused = vllm_worker.merge_fusions

    def recording(fused: Any) -> Any:
        (job,) = connector_worker()._jobs
        found.append(kv_in_blocks(connector_worker().layers, job.job.block_ids, fused[-1][0].end))
        return note_fused(fused)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_worker, "merge_fusions", recording)
        yield found


def run_all(model: Path, store: Path, *, by_kernels: bool) -> dict[tuple[str, str], Any]:
    """Return the answer, the recomputed tokens and the KV of each prompt and case."""
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        if by_kernels:
            patch.setattr(attention, "KERNEL_DEVICES", {"cpu"})
        with engine(model, store) as llm:
            assert connector_worker().layers.uses_kernels == by_kernels
            for chunk in CHUNKS:
                assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
            for prompt, ids in PROMPTS.items():
                results[prompt, "full"] = ask(llm, ids, None, 2)
                for name, params in CASES.items():
                    with recorded_selections() as selections, recorded_kv() as kvs:
                        answer = ask(llm, ids, params, 2)
                    assert report(answer)["num_chunk_hits"] == 3
                    results[prompt, name] = answer, selections[-1], kvs[-1]
    return results


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_blend_by_kernels_equals_the_blend_by_torch(family, checkpoint, tmp_path):
    pytest.importorskip("triton")
    expected = run_all(checkpoint(family), tmp_path / "torch", by_kernels=False)
    found = run_all(checkpoint(family), tmp_path / "kernels", by_kernels=True)
    for prompt in PROMPTS:
        for name in CASES:
            (answer, selected, kv), (wanted, theirs, their_kv) = found[prompt, name], expected[prompt, name]
            assert selected == theirs, name
            for mine, other in zip(kv, their_kv, strict=True):
                for tensor, reference in zip(mine, other, strict=True):
                    assert (tensor - reference).abs().max() <= 1e-5 * reference.abs().max(), name
            assert_same_answer(answer, wanted, TOLERANCE)
        assert_same_answer(found[prompt, "all"][0], found[prompt, "full"], TOLERANCE)
