"""On traffic whose shares are known, the analysis finds them within one percentage point."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generated_traffic import KINDS, Generated

from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.lab.traffic.analysis import analyze
from ragblend.lab.traffic.cost_model import blending_verdict, mean_work_by_mode
from ragblend.lab.traffic.passages import LEAST
from ragblend.lab.traffic.tokens import EstimatingTokenizer, ModelTokenizer, Tokenizer

POINT = 0.01


def write(path: Path, entries: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def made(kind: str, tokenizer: Tokenizer, **changes: Any) -> Generated:
    return Generated(replace(KINDS[kind], **changes), lambda text: len(tokenizer.ids(text)))


def assert_close(found: dict[str, Any], truth: Generated) -> None:
    assert found["shares"] == pytest.approx(truth.shares, abs=POINT)
    assert found["num_tokens"] == truth.num_tokens


@pytest.mark.parametrize(
    ("kind", "words"),
    [("sessions", "worth it"), ("questions", "is worth it"), ("agents", "is not worth it: it would save")],
)
def test_shares_are_the_true_ones_and_the_verdict_follows(kind, words, tmp_path):
    truth = made(kind, EstimatingTokenizer())
    found = analyze([write(tmp_path / "log", truth)], EstimatingTokenizer())
    assert_close(found, truth)
    assert words in blending_verdict(found)
    assert ("because 8" in blending_verdict(found)) == (kind == "agents")


def test_a_models_tokens_give_the_same_shares(make_tokenizer, tmp_path):
    tokenizer = ModelTokenizer(make_tokenizer(), "tiny")
    truth = made("questions", tokenizer, num_sessions=100)
    found = analyze([write(tmp_path / "log", truth)], tokenizer)
    assert not found["tokens_are_estimated"]
    assert_close(found, truth)


def test_a_request_that_comes_again_and_again_is_all_prefix(tmp_path):
    entry = next(iter(made("questions", EstimatingTokenizer())))
    found = analyze([write(tmp_path / "log", [entry] * 2000)], EstimatingTokenizer())
    assert found["shares"]["prefix"] > 0.98
    assert found["shares"]["elsewhere"] == 0
    assert "not worth it" in blending_verdict(found)


def test_memory_is_that_of_the_text_that_differs(tmp_path):
    """A trace of the same requests twenty times as long takes under 100 bytes more per request."""
    entries = list(made("questions", EstimatingTokenizer(), num_sessions=50))

    def peak(times: int) -> int:
        path = tmp_path / f"log-{times}"
        with path.open("w") as file:
            for _ in range(times):
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
        tracemalloc.start()
        try:
            analyze([path], EstimatingTokenizer())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)  # what is imported and remembered once
    assert (peak(40) - peak(2)) / (38 * len(entries)) < 100


def test_chunks_are_named_and_shown_only_with_show_texts(tmp_path):
    path = write(tmp_path / "log", made("questions", EstimatingTokenizer()))
    plain = analyze([path], EstimatingTokenizer())["chunks"]
    shown = analyze([path], EstimatingTokenizer(), show_texts=True)["chunks"]
    assert [set(each) for each in plain] == [{"hash", "tokens", "requests"}] * len(plain)
    assert [each["hash"] for each in plain] == [each["hash"] for each in shown]
    assert plain[0]["requests"] >= plain[-1]["requests"] >= 2
    log = path.read_text()
    assert all(each["text"].strip()[:40] in log for each in shown)


@pytest.mark.parametrize("label", ["", "[{}] ", "Passage {}:\n"], ids=["bare", "numbered", "titled"])
def test_a_listed_chunk_is_at_least_a_passage_of_one_request(tmp_path, label):
    rng = random.Random(0)
    words = [f"{chr(97 + first)}{chr(97 + second)}o" for first in range(26) for second in range(26)]
    passages = [" ".join(rng.choices(words, k=rng.randint(40, 90))) for _ in range(12)]
    prompts = []
    for number in range(60):
        chosen = enumerate(rng.sample(passages, 4), start=1)
        parts = [label.format(place) + passage for place, passage in chosen]
        prompts.append("\n\n".join([*parts, f"Question: who signed {rng.choice(words)} {number}?"]))
    log = write(tmp_path / "log", [{"prompt": prompt} for prompt in prompts])
    found = analyze([log], EstimatingTokenizer(), show_texts=True)
    assert found["num_chunks"] >= len(found["chunks"]) == 10
    for chunk in found["chunks"]:
        assert chunk["tokens"] >= LEAST
        assert any(chunk["text"] in prompt for prompt in prompts), chunk["text"]


# -- what is saved

MODES = ("full", "prefix", "blend")
PROFILE = MachineProfile(
    "f", {"ranks": 1}, num_layers=10, bytes_per_token=1000, prefill_s=((1000.0, 1.0), (2000.0, 3.0)),
    bytes_per_s={"disk": 1e6},
)  # fmt: skip


def test_work_is_what_each_mode_computes():
    prompts = [(1000, 0, 0), (1000, 400, 500)]
    saving = mean_work_by_mode(prompts, 0.1)
    assert [saving[mode] for mode in MODES] == [1000, 800, pytest.approx((1000 + 100 + 50) / 2)]
    assert saving["blend_saves_beyond_prefix"] == pytest.approx(1 - 575 / 800)


def test_seconds_are_those_of_the_profile():
    prompts = [(2000, 1000, 1000)]
    slow = mean_work_by_mode(prompts, 0.15, profile=replace(PROFILE, bytes_per_s={"disk": 1e5}))
    assert [slow[name] for name in (*MODES, "num_slower")] == [3.0, 2.0, 2.0, 1], "KV that takes 10 s to load"
    fast = mean_work_by_mode(prompts, 0.15, profile=replace(PROFILE, bytes_per_s={"disk": 1e9}))
    compute_s = PROFILE.prompt_compute_s(0.15, 2000, 1000) - 1.0
    assert fast["blend"] == pytest.approx(PROFILE.blend_s(1000 * 1000 / 1e9, compute_s))
    asking = mean_work_by_mode(prompts, 0.15, probes_first=True, profile=PROFILE)
    assert asking["blend"] == pytest.approx(min(2.0, 1.0 + compute_s)), "it waits for the KV"
