"""docs/tiers.md, taken at its word: its ten lines are enough to read a stored chunk. Nothing here but the store's
writer and the judge at the end is ragblend's.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_hexdigest

from ragblend import load_engine
from ragblend.engine.store.disk import DiskStore

PAGE = Path(__file__).parents[4] / "docs/tiers.md"
TEXT = "Zenco sells lamps. The company has its main office in Wesstad."


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The file of one chunk, as an engine stored it."""
    store = tmp_path_factory.mktemp("store")
    with load_engine("demo", store=store) as engine:
        engine.precompute(TEXT)
    found = [path for path in store.rglob("*.safetensors") if json.loads(facts_of(path)[0]["ragblend"])["prefix_ids"]]
    assert len(found) == 1, "one chunk; a prefix has a file of its own"
    return found[0]


def facts_of(path: Path) -> tuple[dict[str, str], dict[str, Any], int]:
    """Lines 2 to 4: metadata, tensors, and where their bytes begin."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    tensors = json.loads(raw[8 : 8 + length])
    return tensors.pop("__metadata__"), tensors, 8 + length


def part(content: bytes) -> bytes:
    """Line 10: each part behind its length."""
    return struct.pack("<Q", len(content)) + content


def test_a_file_is_read_by_the_page_alone(path):
    raw = path.read_bytes()
    metadata, tensors, start = facts_of(path)
    facts = json.loads(metadata["ragblend"])
    assert facts["format_version"] == 1
    assert (path.stem, path.parent.name) == (facts["key"], facts["key"][:2])  # line 1

    end, read = 0, []
    assert len(tensors) == 2 * facts["num_layers"]  # line 5
    for layer in range(facts["num_layers"]):
        begun = end
        for name in ("keys", "values"):
            tensor = tensors[f"layer.{layer:03d}.{name}"]
            first, last = tensor["data_offsets"]  # line 3
            assert (first, tensor["dtype"]) == (end, "F32")
            end = last
            read.append(np.frombuffer(raw[start + first : start + last], "<f4").reshape(tensor["shape"]))
            assert tensor["shape"][1] == len(facts["token_ids"])  # line 6
        assert xxh3_128_hexdigest(raw[start + begun : start + end]) == facts["layers_xxh3_128"][layer]  # line 8
    assert start + end == len(raw)

    digits = facts["header_xxh3_128"]  # line 9
    zeroed = raw[:start].replace(digits.encode(), b"0" * 32, 1)
    assert xxh3_128_hexdigest(zeroed) == digits

    ids = [struct.pack(f"<{len(facts[name])}I", *facts[name]) for name in ("prefix_ids", "token_ids")]  # line 10
    parts = [str(facts["layout_version"]).encode(), facts["fingerprint"].encode(), *ids, facts["namespace"].encode()]
    assert hashlib.blake2b(b"".join(map(part, parts)), digest_size=16).hexdigest() == facts["key"]

    kv = DiskStore(path.parents[2]).get(facts["key"])  # the judge
    assert kv is not None
    for layer in range(facts["num_layers"]):
        for ours, theirs in zip(kv.layer(layer), read[2 * layer : 2 * layer + 2], strict=True):
            assert torch.equal(ours, torch.from_numpy(theirs.copy()))


def test_it_is_ten_lines_and_names_every_field_that_a_file_has(path):
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^(\d+)\. ", page, re.MULTILINE) == [str(number) for number in range(1, 11)]
    facts = json.loads(facts_of(path)[0]["ragblend"])
    told = {name for name in facts if f"`{name}`" in page}
    assert set(facts) - told <= {"key", "dtype"}, "both are in words: line 1, line 3"
