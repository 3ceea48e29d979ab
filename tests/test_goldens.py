"""Keys, entries and selected tokens do not change by accident.

`tests/golden/write.py` wrote `golden/store`, the entries of four texts (demo model, each alone and after the neutral
text), and `golden/selections.json`: the keys of the demo corpus' chunks and, for 20 prompts that commit 19c4dfd drew,
the tokens that each rule recomputed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ragblend import load_engine
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import key_from_header
from ragblend.ingestion.contexts import chunk_variants
from ragblend.prompt.types import Chunk, Prompt

GOLDEN = Path(__file__).parent / "golden"
SELECTIONS: dict[str, Any] = json.loads((GOLDEN / "selections.json").read_text())
TEXTS = (
    "# Turin office\n\nThe lease of the Turin office was signed by Ada Ferro on 3 May 2024.",
    "The Turin office has forty desks and a roof garden.",
    "Rovon is led by Mara Quint.",
    "Mara Quint was born in Eldale.",
)


@pytest.fixture
def store(tmp_path):
    """A copy of the golden store."""
    return Path(shutil.copytree(GOLDEN / "store", tmp_path / "store"))


@pytest.fixture(scope="module")
def demo():
    """The demo model over an empty store in memory."""
    with load_engine("demo", store=None, dtype="float32") as engine:
        yield engine


def test_every_golden_entry_is_read_under_its_key(store):
    disk = DiskStore(store)
    keys = sorted(disk.keys())
    assert keys == sorted(path.stem for path in (GOLDEN / "store" / "kv").glob("??/*.safetensors"))
    assert len(keys) == 8
    for key in keys:
        stored = disk.get(key)
        assert key_from_header(stored.header) == key


def test_the_golden_store_serves_its_texts(store):
    """Both variants of each text are found by this code's keys: nothing is prefilled again."""
    with load_engine("demo", store=store, dtype="float32") as engine:
        for variant in chunk_variants(map(Chunk, TEXTS), "neutral"):
            assert engine.is_stored(variant), variant
            assert engine.precompute(variant) == 0, variant
        answer = engine.generate(Prompt([Chunk(text) for text in TEXTS], "Who leads Rovon?"), max_tokens=2)
        assert answer.report.num_chunk_hits == len(TEXTS)


def test_keys_of_the_demo_corpus_are_the_golden_ones(demo):
    chunks = [chunk for record in sample_corpus().records for chunk in record.chunks]
    for number, key in SELECTIONS["keys"].items():
        assert demo.key(Chunk(chunks[int(number)])) == key


@pytest.mark.parametrize("rule", ["ask", "cacheblend", "cacheblend_k"])
def test_rules_select_the_golden_tokens(demo, rule):
    """One of a hundred may differ: processors sum in other orders, which may swap tokens of equal score."""
    chunks = [chunk for record in sample_corpus().records for chunk in record.chunks]
    num_expected = num_shared = 0
    for golden in SELECTIONS["prompts"]:
        prompt = Prompt([Chunk(chunks[number]) for number in golden["chunks"]], golden["question"])
        for chunk in prompt.chunks:
            demo.precompute(chunk)
        request = demo.request(prompt, rule=rule, recompute_ratio=SELECTIONS["recompute_ratio"], max_tokens=1)
        selected = demo.prefill(request).recomputed.tolist()
        expected = golden["recomputed"][rule]
        assert len(selected) == len(expected)
        num_expected += len(expected)
        num_shared += len({*selected} & {*expected})
    assert num_shared >= 0.99 * num_expected, f"{num_expected - num_shared} of {num_expected} tokens differ"
