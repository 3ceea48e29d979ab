"""Keys are equal exactly when everything the KV depends on is equal; digests follow the bytes, not the cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.engine.store.format import keys
from ragblend.engine.store.format.keys import chunk_key, digest_files, fingerprint
from ragblend.engine.store.format.kv import LAYOUT_VERSION

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=6)
GOLDEN_KEY = "8a0f18a0f1ad8be2b3379fd8067bf715"
FEW_IDS = st.lists(st.integers(0, 1), max_size=2)  # so few that equal draws are common
PARTS = st.one_of(
    st.tuples(st.text(max_size=6), IDS, IDS, st.text(max_size=6)),
    st.tuples(st.text("a", max_size=1), FEW_IDS, FEW_IDS, st.text("a", max_size=1)),
)


@given(PARTS, PARTS)
def test_keys_are_equal_exactly_when_all_parts_are(first, second):
    assert (chunk_key(*first) == chunk_key(*second)) == (first == second)


@given(ids=IDS, cuts=st.tuples(st.integers(0, 6), st.integers(0, 6)))
def test_moving_tokens_between_prefix_and_chunk_changes_the_key(ids, cuts):
    one, other = (chunk_key("model", ids[:cut], ids[cut:]) for cut in cuts)
    same_split = min(cuts[0], len(ids)) == min(cuts[1], len(ids))
    assert (one == other) == same_split


def test_equal_integer_ids_have_equal_keys_and_fractions_are_rejected():
    assert re.fullmatch("[0-9a-f]{32}", chunk_key("model", (1,), range(5)))
    assert chunk_key("model", (1,), range(5)) == chunk_key("model", [1], [0, 1, 2, 3, 4])
    for dtype in (np.int32, np.uint32, np.int64):
        ids = np.array([3, 128_000], dtype=dtype)
        assert chunk_key("model", tuple(ids[:1]), list(ids)) == chunk_key("model", [3], [3, 128_000])
    with pytest.raises(TypeError):
        chunk_key("model", [], list(np.array([3.0])))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_that_does_not_fit_is_refused(token):
    with pytest.raises(OverflowError):
        chunk_key("model", [], [1, token])


def test_keys_are_stable_between_releases():
    # A change here orphans every stored chunk in the world: raise LAYOUT_VERSION and say so in the changelog.
    assert chunk_key("model", [1, 2], [3, 128_000], "team") == GOLDEN_KEY


def test_the_layout_version_is_part_of_the_key(monkeypatch):
    before = chunk_key("model", [1], [2])
    monkeypatch.setattr(keys, "LAYOUT_VERSION", LAYOUT_VERSION + 1)
    assert chunk_key("model", [1], [2]) != before


def test_a_fingerprint_follows_weights_config_and_dtype_but_not_key_order():
    base = fingerprint("w", {"rope_theta": 10_000.0, "layers": 2}, "float32")
    assert base == fingerprint("w", {"layers": 2, "rope_theta": 10_000.0}, "float32")
    others = [
        fingerprint("v", {"rope_theta": 10_000.0, "layers": 2}, "float32"),
        fingerprint("w", {"rope_theta": 500_000.0, "layers": 2}, "float32"),
        fingerprint("w", {"rope_theta": 10_000.0}, "float32"),
        fingerprint("w", {"rope_theta": 10_000.0, "layers": 2}, "bfloat16"),
    ]
    assert len({base, *others}) == 5


def write(path: Path, data: bytes, mtime_ns: int) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def test_a_file_digest_follows_names_and_bytes_not_directories(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    here = [write(tmp_path / "one" / name, name.encode(), 1) for name in ("a.bin", "b.bin")]
    there = [write(tmp_path / "two" / name, name.encode(), 2) for name in ("b.bin", "a.bin")]
    assert digest_files(here) == digest_files(there)
    write(here[0], b"changed", 1)
    assert digest_files(here) != digest_files(there)


def test_files_of_one_name_are_digested_in_any_order(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    paths = [write(tmp_path / name / "model.safetensors", name.encode(), 1) for name in ("one", "two")]
    assert digest_files(paths) == digest_files(reversed(paths)) != digest_files(paths[:1] * 2)


def test_unchanged_files_are_not_read_again(tmp_path, monkeypatch):
    path, cache = write(tmp_path / "weights.bin", b"weights", 1), tmp_path / "cache" / "weights.json"
    first = digest_files([path], cache)
    monkeypatch.setattr(keys, "_digest_file", lambda _: pytest.fail("read again"))
    assert digest_files([path], cache) == first


@pytest.mark.parametrize(("data", "mtime_ns"), [(b"WEIGHTS", 2), (b"longer weights", 1)])
def test_a_changed_time_or_size_is_read_again(tmp_path, data, mtime_ns):
    path, cache = write(tmp_path / "weights.bin", b"weights", 1), tmp_path / "weights.json"
    first = digest_files([path], cache)
    write(path, data, mtime_ns)
    assert digest_files([path], cache) == digest_files([path]) != first


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", "\udcff"])
def test_a_broken_cache_costs_one_read_only(tmp_path, content):
    path, cache = write(tmp_path / "weights.bin", b"weights", 1), tmp_path / "weights.json"
    cache.write_bytes(content.encode(errors="surrogateescape"))
    assert digest_files([path], cache) == digest_files([path])
    assert str(path.resolve()) in cache.read_text()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    path = write(tmp_path / "weights.bin", b"weights", 1)
    assert digest_files([path], path / "below-a-file" / "weights.json") == digest_files([path])


def test_the_default_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keys.default_digest_cache() == tmp_path / "ragblend" / "weights.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys.default_digest_cache() == tmp_path / ".cache" / "ragblend" / "weights.json"
