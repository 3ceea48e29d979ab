"""A vLLM whose disk remembers nothing finds versions of chunks in a shared remote tier, because it is told of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ragblend import SegmentedPrompt, load_engine
from ragblend.engine.fusion.lookup import remembered_context
from ragblend.precompute import ingest

pytestmark = pytest.mark.timeout(600)
SMALL = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
TEXTS = ("the other chunk is in the answer", "question the other chunk", "what the answer is and the chunk")


@pytest.mark.parametrize("policy", ["similar", "fixed"])
def test_a_replica_with_an_empty_disk_finds_versions_by_its_configuration(
    policy: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model, url = str(checkpoint("llama")), f"file://{tmp_path}/shared"
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)
    options = {"dtype": "float32", "remote": url, "context": policy, "on_miss": "inline"}
    with load_engine(model, tmp_path / "first", **options) as ours:
        ingest(tmp_path / "docs", ours, tmp_path / "index", chunk_size=64, embedder="hashing")
        ours.store.flush()
    with load_engine(model, tmp_path / "second", backend="vllm", vllm_options=SMALL, **options) as replica:
        report = replica.generate(SegmentedPrompt(TEXTS, "what is the theory?"), mode="reuse", max_tokens=1).report
        first = "none" if policy == "similar" else policy
        assert [chunk.context for chunk in report.chunks] == [first, policy, policy]
        assert remembered_context(replica.store) is None
