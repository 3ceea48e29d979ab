"""Studies of KV dtypes: every store in every mode, the files' bytes, a KL that vanishes where nothing was rounded."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kv_dtypes as dtypes
from benchmarks.kv_dtypes import DtypesConfig, bench_dtypes, drop_page_cache, measure_demo, measure_shape
from benchmarks.kv_dtypes_answers import AnswersRun
from ragblend.errors import UsageError


def silent(_: str) -> None: ...


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str], Path]:
    lines: list[str] = []
    out = tmp_path_factory.mktemp("bench") / "deep" / "kv-dtypes.json"
    config = DtypesConfig(
        num_questions=0,
        shape="llama-1m",
        num_chunks=3,
        chunk_tokens=96,
        question_tokens=5,
        repeats=2,
        threads=1,
        dtypes=("float32", "bfloat16"),
    )
    return bench_dtypes(config, out, lines.append), lines, out


def test_every_store_is_timed_in_every_mode_and_dtype(result: Any) -> None:
    facts, lines, out = result
    assert json.loads(out.read_text()) == json.loads(json.dumps(facts))
    assert facts["command"] == "benchmarks.kv_dtypes"
    runs = facts["runs"]
    cases = [(run["dtype"], run["mode"], run["kv_dtype"]) for run in runs]
    stores = ("auto", "int8", "fp8")
    assert sorted(cases) == sorted(
        (dtype, mode, kv_dtype)
        for dtype in ("float32", "bfloat16")
        for mode in ("reuse", "blend")
        for kv_dtype in stores
    )
    for run in runs:
        assert run["num_samples"] == 2
        assert 0 < run["ttft_min_s"] <= run["ttft_s"] <= run["ttft_max_s"]
        assert run["ttft_increase_low_s"] <= run["ttft_increase_s"] <= run["ttft_increase_high_s"]
        assert (run["ttft_increase_s"] == 0) == (run["kv_dtype"] == "auto")
        assert run["cpu_s"] > 0
        assert run["load_s"] > 0, "read from disk, not left in memory"
    assert sum(" int8 " in line for line in lines) == 2 + 4, "a line per size and per run"


def test_bytes_are_those_of_the_files(result: Any) -> None:
    """2 KV heads of 32, 4 layers: 4 bytes, 2 bytes, or one byte and a scale per head and token."""
    runs = {(run["dtype"], run["kv_dtype"]): run for run in result[0]["runs"]}
    elements, heads = 4 * 2 * 2 * 32, 4 * 2
    for (dtype, kv_dtype), run in runs.items():
        item = 4 if dtype == "float32" else 2
        expected = elements * item if kv_dtype == "auto" else elements + 4 * heads
        assert expected < run["bytes_per_token"] < 1.25 * expected  # and headers, first tokens, scales of channels
        assert run["byte_share"] == pytest.approx(run["bytes_per_token"] / runs[dtype, "auto"]["bytes_per_token"])
    assert runs["float32", "int8"]["byte_share"] < 0.34
    sizes = {(size["dtype"], size["kv_dtype"]): size for size in result[0]["sizes"]}
    for case, run in runs.items():
        assert sizes[case]["bytes_per_token"] == pytest.approx(run["bytes_per_token"], rel=0.02)
        assert sizes[case]["share"] == pytest.approx(run["byte_share"], rel=0.02)
    assert sizes["bfloat16", "int4/32"]["share"] < sizes["bfloat16", "int8"]["share"]


def test_only_what_was_rounded_is_off(result: Any) -> None:
    found = {(run["dtype"], run["mode"], run["kv_dtype"]): run["kl_to_as_computed"] for run in result[0]["runs"]}
    for (_, _, kv_dtype), off in found.items():
        assert (off == 0) == (kv_dtype == "auto")
    assert 0 < found["float32", "reuse", "int8"] < found["float32", "reuse", "fp8"]


def check(runs: list[AnswersRun], num_samples: int, stored: tuple[str, ...]) -> dict[tuple[str, str, str], AnswersRun]:
    """Every store and bfloat16 in both modes, every figure within its interval."""
    by_case = {(run.mode, run.dtype, run.kv_dtype): run for run in runs}
    assert len(by_case) == len(runs) == 2 * (len(stored) + 1)
    for (mode, dtype, kv_dtype), run in by_case.items():
        plain = by_case[mode, "float32", "auto"]
        assert run.num_samples == num_samples
        assert run.first_token_kl - plain.first_token_kl == pytest.approx(run.kl_increase, abs=1e-12)
        assert run.noise_floor == plain.noise_floor > 0
        assert run.noise_floor_low <= run.noise_floor <= run.noise_floor_high
        assert run.kl_increase_low <= run.kl_increase <= run.kl_increase_high
        assert run.kl_to_as_computed_low <= run.kl_to_as_computed <= run.kl_to_as_computed_high
        for name in ("kl_increase", "kl_to_as_computed"):
            low, high = (getattr(run, f"{name}_over_floor_{end}") for end in ("low", "high"))
            assert low <= getattr(run, name) - run.noise_floor <= high
        if (dtype, kv_dtype) == ("float32", "auto"):
            assert (run.kl_increase, run.kl_to_as_computed, run.same_answer, run.byte_share) == (0, 0, 1, 1)
        else:
            assert run.kl_to_as_computed > 0
    return by_case


def test_answers_are_compared_with_those_from_kv_as_computed() -> None:
    runs = measure_demo(DtypesConfig(num_questions=14, kv_dtypes=("int8",)), silent)
    by_case = check(runs, 14, ("auto", "int8", "int4/32", "int4/64"))
    blend, reuse = by_case["blend", "float32", "int8"], by_case["reuse", "float32", "int8"]
    assert blend.exact_match is not None
    assert reuse.exact_match is not None
    assert blend.exact_match > reuse.exact_match
    assert blend.first_token_kl < reuse.first_token_kl
    for mode in ("blend", "reuse"):
        eight, four = by_case[mode, "float32", "int8"], by_case[mode, "float32", "int4/32"]
        assert four.byte_share < eight.byte_share < 1
        assert four.kl_to_as_computed > 10 * eight.kl_to_as_computed


def test_a_shape_of_random_weights_has_the_same_weights_in_both_dtypes() -> None:
    lines: list[str] = []
    config = DtypesConfig(
        num_prompts=3, shape="llama-1m", num_chunks=2, chunk_tokens=64, question_tokens=5, kv_dtypes=("int8",)
    )
    by_case = check(measure_shape(config, lines.append), 3, ("auto", "int8", "int4/32", "int4/64"))
    for (_, _, kv_dtype), run in by_case.items():
        assert (run.head_dim, run.chunk_tokens, run.exact_match) == (32, 64, None)
        assert 20 * run.noise_floor < by_case["reuse", "float32", "auto"].first_token_kl, "rounding, not other weights"
        assert sum(f" {kv_dtype} " in line for line in lines) >= 2


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
def test_dropping_the_page_cache_asks_for_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"x")
    told = []
    monkeypatch.setattr(
        dtypes.os, "posix_fadvise", lambda fd, *how: told.append((str(Path(f"/proc/self/fd/{fd}").readlink()), how))
    )
    drop_page_cache(paths)
    assert told == [(str(path), (0, 0, os.POSIX_FADV_DONTNEED)) for path in paths]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kv_dtypes": ("int4",)}, "kv_dtype is 'int4'; choose from int8, fp8"),
        ({"repeats": -1}, "repeats is -1"),
        ({"num_questions": -1}, "num_questions is -1"),
        ({"context_tokens": 0}, "context_tokens is 0"),
        ({"shape": "llama-3m"}, "shape is 'llama-3m'"),
        ({"dtypes": ("float64",)}, "dtype is 'float64'"),
        ({"ratio": math.nan}, "ratio"),
        ({"rule": "best"}, "best"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        DtypesConfig(**changes)
