"""A chunk's file: its bytes are pinned, any tool that reads safetensors reads it, and a reader holds on to its own."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save
from tier_support import as_bytes, assert_same, make_kv, make_random_kv, note_reads, run_threads

from ragblend.engine.store.format import chunk_file
from ragblend.engine.store.format.chunk_bytes import decode_chunk
from ragblend.engine.store.format.chunk_file import (
    DiskKV,
    IncompatibleEntryError,
    SharedFile,
    UnreadableEntryError,
    encode_chunk,
    header_nbytes,
    write_chunk,
)
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import DTYPES, KVHeader, LayerKV, MemoryKV, convert_kv_dtype
from ragblend.engine.store.format.quantize import CODE_DTYPES
from ragblend.errors import DamagedEntryError

GOLDEN_SHA256 = {
    "plain": "426ada46f056ce82c6886ed4ea4ff4d5bddb1a9deb19e72f640f09b311a863e2",
    "int8": "54eb1df2d70474782f64eda484ad81b9b2df31e53c7986a1ba8d42326a59253c",
    "fp8": "600b06be52105878dda5894d084c0ec95b472820a56e89f2b2852c6c04cead5b",
}
GOLDEN_KEY = "0" * 32


def golden_kv() -> MemoryKV:
    layers = tuple(
        LayerKV(torch.arange(12).view(2, 3, 2).float() + layer, -torch.arange(12).view(2, 3, 2).float() - layer)
        for layer in range(2)
    )
    return MemoryKV(KVHeader(GOLDEN_KEY, "f" * 32, (1, 2), (7, 8, 128_000), 2, "float32", "büro"), layers)


def golden_quantized_kv(kv_dtype: str) -> MemoryKV:
    whole = torch.arange(2 * 20 * 4).view(2, 20, 4).bfloat16()
    layers = tuple(LayerKV(whole + layer, -whole / 4 - layer) for layer in range(2))
    kv = convert_kv_dtype(
        MemoryKV(KVHeader(GOLDEN_KEY, "f" * 32, (1, 2), tuple(range(20)), 2, "bfloat16"), layers), kv_dtype
    )
    assert not kv.header.is_lossless
    return kv


def write(path: Path, kv: MemoryKV) -> Path:
    """Put the chunk's file at `path` in one step, as a store does."""
    temp = path.with_name(f"{path.name}.new")
    with temp.open("wb") as stream:
        write_chunk(stream, kv, header_nbytes(kv))
    return temp.replace(path)


def read(path: Path, kv: MemoryKV, reports: list[str] | None = None) -> DiskKV:
    """The file at `path` as the entry of the chunk's key; damage met later is appended to `reports`."""
    told = [] if reports is None else reports
    return DiskKV(kv.header.key, path, SharedFile(path), lambda key, path, file, reason: told.append(reason))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chunk.safetensors"


# --- the format ---


@pytest.mark.parametrize("kind", GOLDEN_SHA256)
def test_the_format_of_each_version_is_stable(path, kind):
    """Version 1, and version 2 of each kind of code."""
    kv = golden_quantized_kv(kind) if kind in CODE_DTYPES else golden_kv()
    assert hashlib.sha256(write(path, kv).read_bytes()).hexdigest() == GOLDEN_SHA256[kind]
    assert encode_chunk(kv) == path.read_bytes()  # the value of a remote tier


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("QUANTIZED_FORMAT_VERSION", chunk_file.FORMAT_VERSION, r"format and layout versions \(2, 1\)"),
        ("CODE_DTYPES", {"int8": torch.int8}, "with fp8, this ragblend reads"),
    ],
)
def test_versions_and_codes_of_tomorrow_are_left_alone(path, monkeypatch, name, value, said):
    kv = golden_quantized_kv("fp8")
    write(path, kv)
    monkeypatch.setattr(chunk_file, name, value)  # the reader of yesterday
    with pytest.raises(IncompatibleEntryError, match=said):
        read(path, kv)


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), [(512, 64), (9, 8), (33, 3)])
def test_eight_bits_come_back_as_they_were_stored(path, dtype, kv_dtype, tokens, dim):
    kv = convert_kv_dtype(make_kv(tokens=tokens, dim=dim, dtype=dtype), kv_dtype)
    assert kv.header.stored_dtype == kv_dtype
    assert_same(read(write(path, kv), kv), kv)
    assert_same(decode_chunk(encode_chunk(kv), kv.header.key), kv)
    assert path.stat().st_size == header_nbytes(kv) + kv.nbytes
    with safetensors.safe_open(path, framework="pt") as opened:
        names = ("keys.scales", "values.scales", "keys.first", "values.first", "keys", "values")
        for name, tensor in zip(names, kv.stored_layer(1), strict=True):
            found = opened.get_tensor(f"layer.001.{name}")
            assert (found.dtype, as_bytes(found)) == (tensor.dtype, as_bytes(tensor))


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_every_byte_of_a_version_2_file_is_under_a_checksum(path, kv_dtype):
    data = write(path, kv := golden_quantized_kv(kv_dtype)).read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(UnreadableEntryError):
            decode_chunk(bytes(damaged), kv.header.key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_is_what_the_safetensors_library_writes(path, dtype):
    kv = make_random_kv(num_layers=12, dtype=dtype)
    assert write(path, kv).stat().st_size == header_nbytes(kv) + kv.nbytes
    with safetensors.safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        assert as_bytes(opened.get_tensor("layer.011.values")) == as_bytes(kv.layer(11).values)
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(kv.layers):
        tensors |= {f"layer.{index:03d}.values": layer.values, f"layer.{index:03d}.keys": layer.keys}
    assert path.read_bytes() == save(tensors, metadata)
    assert list(metadata) == ["ragblend"]
    assert json.loads(metadata["ragblend"])["token_ids"] == list(kv.header.token_ids)


def test_slices_and_transposed_tensors_are_stored_by_value(path):
    whole = torch.arange(2 * 9 * 4, dtype=torch.float32).view(2, 9, 4)
    layer = LayerKV(whole[:, 3:6], whole.transpose(1, 2).transpose(1, 2)[:, ::3])
    kv = MemoryKV(KVHeader(chunk_key("m", (), (1, 2, 3)), "m", (), (1, 2, 3), 1, "float32"), (layer,))
    assert_same(read(write(path, kv), kv), kv)


def test_reading_and_writing_work_under_inference_mode(path):
    with torch.inference_mode():
        kv = make_random_kv()
        found = read(write(path, kv), kv)
        assert_same(found, kv)
        assert not found.layer(0).keys.is_inference()


# --- layer by layer ---


def test_reading_one_layer_reads_that_layer_alone(path, monkeypatch):
    kv = make_random_kv(num_layers=4, tokens=64, dim=64)
    write(path, kv)
    reads = note_reads(monkeypatch)
    found = read(path, kv)
    assert sum(count for _, count in reads) == path.stat().st_size - kv.nbytes
    reads.clear()
    found.layer(2)
    assert reads == [(path.stat().st_size - kv.nbytes + 2 * kv.layer(0).nbytes, kv.layer(2).nbytes)]


def test_short_reads_are_continued(path, monkeypatch):
    kv = make_random_kv()
    write(path, kv)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    assert_same(read(path, kv), kv)


def test_a_file_cut_while_it_is_held_is_damage_not_an_answer(path):
    kv = make_random_kv()
    found = read(write(path, kv), kv)
    os.truncate(path, path.stat().st_size - 1)
    assert as_bytes(found.layer(0).keys) == as_bytes(kv.layer(0).keys)
    with pytest.raises(DamagedEntryError, match="the file ends at byte"):
        found.layer(1)


# --- readers that hold a file ---


def test_an_entry_that_cannot_stay_open_reopens_only_its_own_file(path, monkeypatch):
    kv = make_random_kv()
    reports: list[str] = []
    other = MemoryKV(kv.header, make_random_kv(9).layers)
    monkeypatch.setattr(SharedFile, "can_stay_open", False)
    held = read(write(path, kv), kv, reports)
    assert_same(held, kv)
    write(path, other)
    with pytest.raises(DamagedEntryError, match="replaced"):
        held.layer(0)
    path.unlink()
    with pytest.raises(DamagedEntryError, match="layer 0 cannot be read"):
        held.layer(0)
    assert reports == [], "a file that another writer replaced is not damaged"


def test_files_are_closed_when_entries_are_forgotten(path):
    kv = make_random_kv()
    write(path, kv)
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [read(path, kv) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 20
    held.clear()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_more_entries_than_descriptors_can_be_held(path):
    kv = make_random_kv()
    write(path, kv)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        held = [read(path, kv) for _ in range(400)]
        for found in held:
            assert_same(found, kv)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_threads_can_share_one_entry(path):
    kv = make_random_kv(num_layers=8)
    held = read(write(path, kv), kv)
    run_threads(8, lambda _: assert_same(held, kv))
