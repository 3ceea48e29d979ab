"""Warnings of an engine that reuses nothing: four causes, each logged once; and no false alarms."""

from __future__ import annotations

import logging
import shlex
import socket
from typing import Any

import pytest
from tiny_prompts import CHUNKS

from ragblend import Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.precompute import precompute_documents

TEXTS = [f"The lighthouse number {number} was built long ago." for number in range(6)]
OTHERS = [chunk.text for chunk in CHUNKS]
PROMPT = Prompt(TEXTS[:3], "Who built it?")


@pytest.fixture
def said(caplog):
    """The warnings so far."""
    caplog.set_level(logging.DEBUG, logger="ragblend")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def ask(engine: Any, prompt: Prompt = PROMPT, **options: Any) -> Any:
    return engine.generate(prompt, max_tokens=1, **options)


@pytest.mark.parametrize("mode", ["blend", "reuse"])
def test_an_empty_store_is_reported_once_with_the_call_that_fills_it(tiny_engine, said, mode):
    engine = tiny_engine()
    for _ in range(5):
        ask(engine, mode=mode)
    engine.close()
    (line,) = said()
    assert "\n" not in line
    assert line.startswith("nothing was reused: nothing is stored yet")
    assert line.endswith("ragblend.precompute.precompute_documents(documents, llm)")


@pytest.mark.parametrize("other", [{"namespace": "theirs"}, {"fingerprint": "another"}])
def test_stores_of_other_models_or_namespaces_are_reported_once_without_names(tiny_engine, said, other):
    store = MemoryStore(1 << 28)
    precompute_documents(TEXTS, tiny_engine(store=store, **other))
    engine = tiny_engine(store=store, namespace="mine")
    for _ in range(5):
        ask(engine)
    (line,) = said()
    assert "holds KV of other models or namespaces, none of tiny llama in 'mine'" in line
    assert "theirs" not in line


def test_kv_after_another_prefix_is_reported_once_with_its_fix(tmp_path, said):
    with load_engine("demo", tmp_path / "kv") as plain:
        precompute_documents(TEXTS, plain)
    system = "Answer in one word; don't explain."
    with load_engine("demo", tmp_path / "kv", system=system, on_miss="inline") as engine:
        for _ in range(5):
            assert ask(engine, Prompt(TEXTS[:3], "Who?", system)).report.num_chunk_hits == 0
        (line,) = said()
        assert f"holds KV after other prefixes, none after this one ({system!r})" in line
        command = shlex.split(line[line.index("ragblend precompute") : line.index(", or from Python")])
        assert command[2:] == ["--model", "demo", "--store", str(tmp_path / "kv"), "--system", system]
        precompute_documents(TEXTS, engine)  # the other way that it names
        assert ask(engine, Prompt(TEXTS[3:6], "Who?", system)).report.num_chunk_hits == 3
        assert len(said()) == 1


@pytest.mark.parametrize("context", ["none", "neutral"])
def test_kv_after_a_system_text_is_reported_to_prompts_without_one(tiny_engine, said, context):
    store = MemoryStore(1 << 28)
    engine = tiny_engine(store=store, system="Be brief.", context=context)
    engine.neutral_ids = engine.neutral_ids[:50]
    precompute_documents(TEXTS, engine)
    ask(tiny_engine(store=store))
    (line,) = said()
    assert "holds KV after other prefixes, none after this one (no system text)" in line


def test_prompts_of_which_nothing_is_stored_are_reported_once_after_three(tiny_engine, said):
    engine = tiny_engine()
    precompute_documents(OTHERS, engine)
    for number in range(6):
        ask(engine)
        assert len(said()) == (number >= 2)
    assert said()[0].startswith("nothing was reused: 3 prompts contained no stored chunk")
    assert said()[0].endswith("; or compare a prompt with the store: ragblend explain --prompt FILE --store DIR")


def test_a_remote_tier_that_does_not_answer_is_the_only_warning(tiny_engine, said):
    with socket.socket() as taken:  # bound, not listening: no server answers
        taken.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        engine = tiny_engine(store=TieredStore(MemoryStore(1 << 28), open_remote(url)))
        precompute_documents(OTHERS, tiny_engine(store=engine.store.tiers[0]))
        for _ in range(4):
            ask(engine)
        engine.close()
    (line,) = said()
    assert "\n" not in line
    assert "answers go on without it" in line
    assert line.endswith(f"ragblend doctor --remote {url}")


def test_no_false_alarms(tiny_engine, said):
    engine = tiny_engine(on_miss="store")
    for _ in range(5):
        ask(engine, Prompt(question="What is this? " * 20))  # no chunk: nothing to reuse
        ask(engine, mode="full")
        ask(engine, mode="prefix")  # both were asked to reuse nothing
    precompute_documents(TEXTS[:6], engine)
    ask(engine)
    for other in OTHERS:  # later misses are a store that fills
        ask(engine, Prompt([other], "Who?"))
    ask(engine, Prompt(TEXTS[:3], "Who?", "Be brief."))  # a prompt's own system text: reused, approximately
    engine.close()
    assert not said()


def test_finding_the_cause_of_no_reuse_leaves_counters_and_eviction_unchanged(tiny_engine, tmp_path, monkeypatch):
    disk, memory = DiskStore(tmp_path, fsync=False), MemoryStore(1 << 28)
    store = TieredStore(memory, disk)
    precompute_documents([f"Remark {number} of many." for number in range(200)], tiny_engine(store=disk))
    precompute_documents(OTHERS, tiny_engine(store=store))
    order, looked, header = list(memory.keys()), [], DiskStore.header
    monkeypatch.setattr(DiskStore, "header", lambda self, key: (looked.append(key), header(self, key))[1])
    ask(tiny_engine(store=store))
    assert len(looked) < 80
    assert list(memory.keys()) == order
    assert (disk.counters.num_hits, disk.counters.num_misses) == (0, 3)
