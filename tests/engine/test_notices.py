"""One line instead of silence: what an engine says when nothing is reused, and when it says nothing."""

from __future__ import annotations

import logging
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragblend import SegmentedPrompt, load_engine
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.precompute import precompute_documents

TEXTS = [f"The lighthouse number {number} was built long ago." for number in range(12)]
PROMPT = SegmentedPrompt(TEXTS[:3], "Who built it?")
Make = Callable[..., TransformersEngine]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far."""
    caplog.set_level(logging.DEBUG, logger="ragblend")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def ask(engine: Any, prompt: SegmentedPrompt = PROMPT, **options: Any) -> Any:
    return engine.generate(prompt, max_tokens=1, **options)


@pytest.mark.parametrize("mode", ["blend", "reuse"])
def test_an_empty_store_is_said_once_with_the_call_that_fills_it(tiny_engine: Make, said: Any, mode: str) -> None:
    engine = tiny_engine()
    for _ in range(5):
        ask(engine, mode=mode)
    (line,) = said()
    assert "\n" not in line
    assert line.startswith("nothing was stored in memory yet: all 3 chunks of a prompt had to be prefilled")
    assert "on_miss='inline' stores nothing" in line
    assert line.endswith("ragblend.precompute.precompute_documents(documents, llm)")
    engine.close()
    assert len(said()) == 1


def test_a_store_that_is_filled_by_misses_is_told_as_such(tiny_engine: Make, said: Any) -> None:
    engine = tiny_engine(on_miss="store")
    ask(engine)
    (line,) = said()
    assert "are being stored for the next prompt that has them (on_miss='store')" in line
    engine.flush()
    assert ask(engine).report.num_chunk_hits == 3
    assert len(said()) == 1


def test_the_first_question_behind_another_system_text_names_the_command_that_mends_it(
    tmp_path: Path, said: Any
) -> None:
    with load_engine("demo", tmp_path / "kv") as plain:
        precompute_documents(TEXTS, plain)
    system = "Answer in one word; don't explain."
    with load_engine("demo", tmp_path / "kv", system=system, on_miss="inline") as engine:
        assert ask(engine, SegmentedPrompt(TEXTS[:3], "Who?", system)).report.num_chunk_hits == 0
        (line,) = said()
        assert f"3 of the 3 chunks of a prompt are stored in the store {tmp_path / 'kv'} behind another prefix" in line
        assert f"(no system text) and are not reused behind this one ({system!r})" in line
        command = shlex.split(line[line.index("ragblend precompute") : line.index(", or from Python")])
        assert command[2:] == ["--model", "demo", "--store", str(tmp_path / "kv"), "--system", system]
        precompute_documents(TEXTS, engine)  # the other way that it names
        assert ask(engine, SegmentedPrompt(TEXTS[3:6], "Who?", system)).report.num_chunk_hits == 3
        assert len(said()) == 1


def test_kv_behind_a_system_text_is_found_out_by_who_has_none(tiny_engine: Make, said: Any) -> None:
    store = MemoryStore(1 << 28)
    precompute_documents(TEXTS, tiny_engine(store=store, system="Be brief."))
    engine = tiny_engine(store=store)
    ask(engine)
    (line,) = said()
    assert "3 of the 3 chunks" in line
    assert "Be brief." in line
    assert "behind this one (no system text)" in line


def test_a_prompt_that_reuses_one_chunk_still_hears_of_the_others_prefix(tiny_engine: Make, said: Any) -> None:
    store = MemoryStore(1 << 28)
    precompute_documents(TEXTS, tiny_engine(store=store))
    engine = tiny_engine(store=store, system="Be brief.")
    engine.precompute(TEXTS[0])
    assert ask(engine, SegmentedPrompt(TEXTS[:3], "Who?", "Be brief.")).report.num_chunk_hits == 1
    (line,) = said()
    assert "2 of the 3 chunks" in line


@pytest.mark.parametrize("other", [{"namespace": "theirs"}, {"fingerprint": "another"}])
def test_a_store_that_holds_only_others_kv_is_said_without_their_names(
    tiny_engine: Make, said: Any, other: dict[str, str]
) -> None:
    store = MemoryStore(1 << 28)
    precompute_documents(TEXTS, tiny_engine(store=store, **other))
    ask(tiny_engine(store=store, namespace="mine"))
    (line,) = said()
    assert "holds KV of other models or namespaces, none of tiny llama in 'mine'" in line
    assert "theirs" not in line


def test_chunks_that_were_never_ingested_are_said_after_a_few_requests(tiny_engine: Make, said: Any) -> None:
    engine = tiny_engine()
    precompute_documents(TEXTS[6:], engine)
    for number in range(6):
        ask(engine)
        assert len(said()) == (number >= 2)
    assert said()[0].startswith("none of the 9 chunks in the first 3 prompts was stored in memory")


def test_a_script_that_asks_once_hears_it_when_it_ends(tiny_engine: Make, said: Any) -> None:
    engine = tiny_engine()
    precompute_documents(TEXTS[6:], engine)
    ask(engine)
    assert not said()
    engine.close()
    assert said()[0].startswith("none of the 3 chunks in a prompt was stored")
    engine.close()
    assert len(said()) == 1


def test_a_remote_tier_that_does_not_answer_is_one_line_that_names_the_next_command(
    tiny_engine: Make, said: Any
) -> None:
    with socket.socket() as taken:  # bound, not listening: nobody answers
        taken.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        engine = tiny_engine(store=TieredStore(MemoryStore(1 << 28), open_remote(url)))
        precompute_documents(TEXTS[6:], tiny_engine(store=engine.store.tiers[0]))
        for _ in range(4):
            ask(engine)
        engine.close()
    (line,) = said()
    assert "\n" not in line
    assert "answers go on without it" in line
    assert line.endswith(f"ragblend doctor --remote {url}")


def test_no_false_alarms(tiny_engine: Make, said: Any) -> None:
    engine = tiny_engine(on_miss="store")
    for _ in range(5):
        ask(engine, SegmentedPrompt(question="What is this? " * 20))  # no chunk: nothing to reuse
        ask(engine, mode="full")
        ask(engine, mode="prefix")  # both were asked to reuse nothing
    precompute_documents(TEXTS[:6], engine)
    ask(engine)
    for start in range(4):  # later misses are a store that fills
        ask(engine, SegmentedPrompt(TEXTS[start + 3 : start + 6], "Who?"))
    ask(engine, SegmentedPrompt(TEXTS[:3], "Who?", "Be brief."))  # a prompt's own system text: reused, approximately
    engine.close()
    assert not said()


def test_looking_for_the_cause_disturbs_neither_counters_nor_the_order_of_eviction(
    tiny_engine: Make, tmp_path: Path
) -> None:
    disk, memory = DiskStore(tmp_path, fsync=False), MemoryStore(1 << 28)
    store = TieredStore(memory, disk)
    precompute_documents(TEXTS[6:], tiny_engine(store=store))
    order = list(memory.keys())
    ask(tiny_engine(store=store))
    assert list(memory.keys()) == order
    assert (disk.counters.num_hits, disk.counters.num_misses) == (0, 3)


def test_a_cause_is_looked_for_in_a_few_entries_of_a_large_store(
    tiny_engine: Make, tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskStore(tmp_path, fsync=False)
    others = tiny_engine(store=disk)
    precompute_documents([f"Note number {number}." for number in range(200)], others)
    looked, header = [], DiskStore.header
    monkeypatch.setattr(DiskStore, "header", lambda self, key: (looked.append(key), header(self, key))[1])
    ask(tiny_engine(store=disk))
    assert 64 <= len(looked) < 80
    assert not said(), "as far as was looked, the store holds this model's KV"


def test_libraries_can_silence_it(tiny_engine: Make, said: Any) -> None:
    logger = logging.getLogger("ragblend.engine.notices")
    logger.setLevel(logging.ERROR)
    try:
        ask(tiny_engine())
        assert not said()
    finally:
        logger.setLevel(logging.NOTSET)
