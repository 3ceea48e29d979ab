"""Triton's kernels against the torch functions that they replace, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ragblend.engine.fusion.attention import (
    PLAIN,
    AttentionExtras,
    ProbeQueries,
    Rotation,
    attend_rows,
    attention_mass,
    inverse_tables,
    rotate,
)
from ragblend.engine.fusion.rules import DriftCorrection
from ragblend.engine.store.format.kv import LayerKV, StoredLayer, dequantized
from ragblend.engine.store.format.quantize import quantize

kernels = pytest.importorskip("ragblend.engine.fusion.kernels", exc_type=ImportError)
interpreted = pytest.mark.skipif(not kernels.INTERPRETS, reason="needs TRITON_INTERPRET=1, and no GPU")

HEADS, LENGTH = 2, 75
GROUPS_AND_PAGES = [(1, 16), (2, 32), (3, 64), (4, 16), (5, 32), (6, 64), (7, 16), (8, 32)]
EXTRAS = [PLAIN, AttentionExtras(window=20), AttentionExtras(softcap=5.0, sinks=torch.randn(2 * HEADS))]
# Of the largest number. In bfloat16 dequantised numbers are rounded, and rotated ones; the interpreter truncates both.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6}


class Paged:
    """One layer of random KV of LENGTH tokens in permuted pages, and `kv`, the same KV in the prompt's order.

    In pages of 32 tokens each dimension of the keys is contiguous, as in vLLM's cache on a CPU.
    """

    def __init__(self, dim: int, page: int, dtype: torch.dtype = torch.float32) -> None:
        num_pages = -(-LENGTH // page)
        table = torch.randperm(num_pages + 2)[:num_pages].to(torch.int32)
        keys, values = (torch.randn(num_pages + 2, page, HEADS, dim).to(dtype) for _ in range(2))
        if page == 32:
            keys = keys.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        self.layer = kernels.PagedLayer(keys, values, table)
        positions = torch.arange(LENGTH)
        self._slots = table.long()[positions // page] * page + positions % page

    @property
    def kv(self) -> LayerKV:
        """The KV [H, T, D]."""
        return LayerKV(*(each.flatten(0, 1)[self._slots].transpose(0, 1) for each in self.layer[:2]))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rotation(width: int, adjacent: bool = False, weight: Tensor | None = None, scaling: float = 1.2) -> Rotation:
    angles = torch.arange(LENGTH)[:, None] * 0.01 ** (torch.arange(width // 2) / max(1, width // 2))
    angles = angles.repeat_interleave(2, dim=1) if adjacent else torch.cat((angles, angles), dim=1)
    return Rotation(scaling * angles.cos(), scaling * angles.sin(), adjacent, weight)


def rotated(keys: Tensor, rotation: Rotation, rows: Tensor) -> Tensor:
    """Return keys [H, R, D] rotated to positions `rows` [R]."""
    found = rotate(keys, rotation.cos[rows], rotation.sin[rows], rotation.adjacent)
    return found if rotation.weight is None else found * rotation.weight


def assert_same_but_for_rounding(found: LayerKV, expected: LayerKV) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert float((mine.float() - other.float()).abs().max()) <= ROUNDING[mine.dtype] * float(other.abs().max())


@interpreted
@pytest.mark.parametrize(("groups", "page"), GROUPS_AND_PAGES)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_attention_over_pages_equals_the_reference(dim, groups, page):
    paged, rows = Paged(dim, page), torch.randperm(LENGTH)[:11].sort().values
    query = torch.randn(1, HEADS * groups, len(rows), dim)
    found = kernels.attend(query, paged.layer, rows, num_splits=1 + groups % 3)
    keys, values = (each[None] for each in paged.kv)
    torch.testing.assert_close(
        found.transpose(1, 2), attend_rows(query, keys, values, rows, None), atol=1e-5, rtol=1e-5
    )


@interpreted
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("params", EXTRAS, ids=["plain", "window", "softcap and sinks"])
def test_attention_and_the_mass_of_a_question_equal_the_references(params, num_splits):
    paged, rows = Paged(16, 16), torch.cat((torch.arange(3, 40), torch.arange(55, LENGTH)))  # several tiles
    query, mass = torch.randn(1, 2 * HEADS, len(rows), 16), torch.full((LENGTH,), torch.nan)
    found = kernels.attend(query, paged.layer, rows, 0.3, params, mass=mass, num_question_rows=9, num_splits=num_splits)
    keys, values = (each[None] for each in paged.kv)
    expected = attend_rows(query, keys, values, rows, 0.3, params)
    torch.testing.assert_close(found.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
    question = ProbeQueries(query[0], rows, 0.3, params).slice_rows(slice(-9, None))
    torch.testing.assert_close(mass, attention_mass(question, paged.kv.keys), atol=1e-6, rtol=1e-5)


@interpreted
def test_attention_in_bfloat16_is_within_one_rounding():
    paged, rows = Paged(64, 16, torch.bfloat16), torch.arange(40, LENGTH)
    query = torch.randn(1, 2 * HEADS, len(rows), 64).bfloat16()
    keys, values = (each[None].float() for each in paged.kv)
    expected = attend_rows(query.float(), keys, values, rows, None)
    found = kernels.attend(query, paged.layer, rows).transpose(1, 2)
    torch.testing.assert_close(found.float(), expected, rtol=2.0**-7, atol=2e-3)


def stored_chunks(dim: int, dtype: torch.dtype) -> tuple[list[int], list[StoredLayer]]:
    """Return starts and layers of four chunks: as computed, int8, fp8, and some rows of a chunk."""
    kvs = [LayerKV(*torch.randn(2, HEADS, count, dim).to(dtype)) for count in (21, 15, 11, 30)]
    slices = LayerKV(*(each[:, 4:17] for each in kvs[3]))
    return [3, 24, 41, 55], [kvs[0], quantize(*kvs[1], "int8"), quantize(*kvs[2], "fp8"), slices]


def rotations(dim: int) -> Iterator[Rotation]:
    yield rotation(dim)
    yield rotation(dim // 2)
    yield rotation(dim, adjacent=True)
    yield rotation(0)
    yield rotation(dim, weight=torch.randn(dim))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 96])
def test_one_launch_places_chunks_of_every_dtype_as_torch_does(dim, dtype, monkeypatch):
    launches = []
    run = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *args, **options: launches.append(run(*args, **options)))
    for turn in rotations(dim):
        paged, (starts, parts) = Paged(dim, 16, dtype), stored_chunks(dim, dtype)
        turn = turn._replace(weight=turn.weight if turn.weight is None else turn.weight.to(dtype))
        before = paged.kv
        pieces = kernels.Pieces(starts)
        kernels.place(paged.layer, parts, pieces, turn)
        found, others = paged.kv, torch.ones(LENGTH, dtype=torch.bool)
        for start, part in zip(starts, parts, strict=True):
            keys, values = dequantized(part)
            rows = torch.arange(start, start + keys.shape[1])
            others[rows] = False
            expected = LayerKV(rotated(keys, turn, rows), values)
            assert_same_but_for_rounding(LayerKV(*(each[:, rows] for each in found)), expected)
        for mine, other in zip(found, before, strict=True):
            assert torch.equal(mine[:, others], other[:, others])
    assert len(launches) == 5


@interpreted
def test_chunks_that_lie_alike_in_memory_need_one_table_of_addresses():
    first, second = torch.randn(2, 2, HEADS, 20, 16), torch.randn(2, 2, HEADS, 20, 16)
    pieces, target = (
        kernels.Pieces([0, 20]),
        kernels.PagedLayer.from_contiguous(LayerKV(*torch.zeros(2, HEADS, 40, 16))),
    )
    tables = []
    for block in (first, second):
        kernels.place(target, [LayerKV(*each) for each in block], pieces, rotation(0))
        tables.append(pieces.table)
        assert torch.equal(target.values[0, :20].transpose(0, 1), block[0, 1])
        assert torch.equal(target.values[0, 20:].transpose(0, 1), block[1, 1])
    assert tables[0] is tables[1]


def drawn_correction(rows: Tensor, indices: Tensor) -> DriftCorrection:
    """Return a correction of the tokens that are not in `rows`, from those at `indices` of it."""
    sources, shares = torch.full((LENGTH,), -1, dtype=torch.int32), torch.rand(LENGTH, 7)
    sources[rows], shares[rows] = torch.arange(len(rows), dtype=torch.int32), 0.0
    return DriftCorrection(rows[indices], torch.randn(7, len(indices)), shares, sources)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_recomputed", [1, 2, 5, 40])
def test_drift_is_fitted_and_applied_as_the_correction_does(num_recomputed, dtype):
    for dim, turn in ((16, rotation(16)), (24, rotation(12)), (16, rotation(16, weight=torch.rand(16) + 0.5))):
        paged, rows = Paged(dim, 32, dtype), torch.randperm(LENGTH)[:45].sort().values
        fresh = LayerKV(*torch.randn(2, HEADS, len(rows), dim).to(dtype))
        fresh.keys[:, 3] *= 50  # a change that is limited
        indices = torch.arange(45)[-num_recomputed:]
        correction = drawn_correction(rows, indices)
        stored = paged.kv
        inverse = inverse_tables(turn.cos[correction.rows], turn.sin[correction.rows])

        def unrotated(keys: Tensor, turn: Rotation = turn, inverse: tuple[Tensor, Tensor] = inverse) -> Tensor:
            keys = keys.float() if turn.weight is None else keys.float() / turn.weight
            return rotate(keys, *inverse, turn.adjacent)

        drift = correction.estimate_drift(
            LayerKV(
                unrotated(fresh.keys[:, indices]) - unrotated(stored.keys[:, correction.rows]),
                fresh.values[:, indices].float() - stored.values[:, correction.rows].float(),
            )
        )
        found = kernels.fit_drift(paged.layer, fresh, indices, correction, turn)
        for mine, other in zip(found, drift, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-5)
        kernels.write_rows(paged.layer, rows, fresh, turn, correction, found)
        everything = torch.arange(LENGTH)
        moved = rotated(correction.shares @ drift.keys, turn, everything), correction.shares @ drift.values
        expected = LayerKV(*((old.float() + more).to(dtype) for old, more in zip(stored, moved, strict=True)))
        for target, new in zip(expected, fresh, strict=True):
            target[:, rows] = new
        for mine, other in zip(paged.kv, expected, strict=True):
            torch.testing.assert_close(
                mine.float(), other.float(), atol=2e-4, rtol=1e-5 if dtype == torch.float32 else 2.0**-7
            )
            assert torch.equal(mine[:, rows], other[:, rows])


@interpreted
def test_drift_is_added_to_rows_with_a_share_alone():
    paged, turn, rows = Paged(16, 32), rotation(16), torch.arange(5, 45)
    before, shares = paged.kv, torch.zeros(LENGTH, 7)
    shares[rows] = torch.rand(len(rows), 7)
    drift = LayerKV(*torch.randn(2, HEADS, 7, 16))
    kernels.add_drift(paged.layer, drift, shares, turn)
    changes = rotated(shares[rows] @ drift.keys, turn, rows), shares[rows] @ drift.values
    for mine, old, change in zip(paged.kv, before, changes, strict=True):
        torch.testing.assert_close(mine[:, rows], old[:, rows] + change, atol=1e-5, rtol=1e-5)
        old[:, rows] = mine[:, rows]
        assert torch.equal(mine, old)


@interpreted
def test_a_page_may_be_elsewhere_in_memory():
    """As the pages of the question are in vLLM, for which the cache has no blocks."""
    block = torch.randn(9, 16, HEADS, 2, 24)
    pages, others = block[:4], block[5:]  # at a distance of whole pages
    table, rows = torch.tensor([2, 0, 7, 5]), torch.arange(40, 60)
    layer, whole = (kernels.PagedLayer(each[..., 0, :], each[..., 1, :], table) for each in (pages, block))
    query, fresh = torch.randn(1, HEADS, len(rows), 24), LayerKV(*torch.randn(2, HEADS, len(rows), 24))
    kernels.write_rows(layer, rows, fresh)
    assert torch.equal(others[2, 8:, :, 0], fresh.keys.transpose(0, 1)[:8])
    assert torch.equal(kernels.attend(query, layer, rows), kernels.attend(query, whole, rows))


@interpreted
def test_stored_chunks_are_placed_with_their_drift():
    paged, turn = Paged(16, 16), rotation(16)
    kv, rows = LayerKV(*torch.randn(2, HEADS, 40, 16)), torch.arange(5, 45)
    shares, drift = torch.rand(LENGTH, 7), LayerKV(*torch.randn(2, HEADS, 7, 16))
    kernels.place(paged.layer, [kv], kernels.Pieces([5]), turn, drift, shares)
    expected = rotated(kv.keys + shares[rows] @ drift.keys, turn, rows), kv.values + shares[rows] @ drift.values
    for mine, other in zip(paged.kv, expected, strict=True):
        torch.testing.assert_close(mine[:, rows], other, atol=1e-5, rtol=1e-5)


@interpreted
def test_fresh_rows_are_written_bit_for_bit():
    paged, rows = Paged(24, 32), torch.randperm(LENGTH)[:40].sort().values
    before, fresh = paged.kv, LayerKV(*torch.randn(2, HEADS, len(rows), 24))
    kernels.write_rows(paged.layer, rows, fresh)
    for mine, old, new in zip(paged.kv, before, fresh, strict=True):
        old[:, rows] = new
        assert torch.equal(mine, old)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(capability):
    """In a separate process, without the interpreter. 80 is an A100, 90 an H100."""
    script = Path(__file__).parent / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == {"attend", "change_lengths", "finish", "fit_drift", "place", "write_rows"}
