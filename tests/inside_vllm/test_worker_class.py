"""How the connector learns of the model where its plugin is kept out: `--worker-cls`, or vLLM hands it over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import PREFIX, ask, engine, ingest, random_ids, report, tokens

from ragblend.engine.vllm import plugin as vllm_plugin
from ragblend.engine.vllm.connector import BlendConnector

CHUNK, QUESTION = random_ids(40, 2), random_ids(6, 3)
IDS = [*PREFIX, *CHUNK, *CHUNK, *QUESTION]

# Spawned worker processes: forked ones have imported the connector, and with it the plugin, in time.
WITHOUT_PLUGINS = {"VLLM_PLUGINS": "", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from harness import ask, engine, ingest, report, tokens
with engine(Path({model!r}), Path({store!r}), skip_tokenizer_init=True, **{options!r}) as llm:
    ingest(llm, {prefix!r}, {chunk!r})
    blended = ask(llm, {ids!r}, {{"mode": "blend", "ratio": 1.0}})
    print("hits", report(blended)["num_chunk_hits"], tokens(blended) == tokens(ask(llm, {ids!r})))
"""


def run_without_plugins(model: Path, store: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Asks a blended and a plain request in a new process, whose worker is yet another one."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    options["distributed_executor_backend"] = "mp"
    facts = {"path": path, "model": str(model), "store": str(store), "options": options}
    script = SCRIPT.format(**facts, prefix=PREFIX, chunk=CHUNK, ids=IDS)
    return subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **WITHOUT_PLUGINS}, capture_output=True, text=True
    )


@pytest.mark.timeout(600)
def test_without_the_plugin_the_worker_class_shows_the_model(checkpoint, tmp_path):
    refused = run_without_plugins(checkpoint("llama"), tmp_path / "a")
    assert refused.returncode != 0
    advice = re.search(r"has no access to the model .* --worker-cls ([\w.]+)", refused.stdout + refused.stderr)
    assert advice is not None, refused.stderr[-2000:]
    shown = run_without_plugins(checkpoint("llama"), tmp_path / "b", worker_cls=advice[1])
    assert "hits 2 True" in shown.stdout, shown.stderr[-2000:]


def test_a_model_that_vllm_hands_over_is_taken(checkpoint, tmp_path, monkeypatch):
    original = BlendConnector.register_kv_caches

    def handing_over(self: Any, kv_caches: Any) -> None:
        self.register_model(vllm_plugin._loaded.pop()())  # as vllm-project/vllm#37339 will; the plugin knows none now
        original(self, kv_caches)

    monkeypatch.setattr(BlendConnector, "register_kv_caches", handing_over)
    with engine(checkpoint("llama"), tmp_path, skip_tokenizer_init=True) as llm:
        assert vllm_plugin.loaded_model() is None
        ingest(llm, PREFIX, CHUNK)
        blended = ask(llm, IDS, {"mode": "blend", "ratio": 1.0})
        assert report(blended)["num_chunk_hits"] == 2
        assert tokens(blended) == tokens(ask(llm, IDS))
