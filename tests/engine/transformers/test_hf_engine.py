"""The engine: right answers in every mode, reports whose numbers add up, and a store without any KV of a prompt."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

import pytest
import torch
from chat_templates import SPECIALS, TEMPLATES
from demo_texts import QUESTION, A, B
from tiny_models import LATENT, make_model
from tiny_prompts import CHUNKS, PROMPT
from transformers.utils import chat_template_utils

from ragblend import load_engine
from ragblend.engine import generation
from ragblend.engine.fusion.plan import FusePlan
from ragblend.engine.fusion.rules import DEFAULT_RULE, NO_PROBE_RULE
from ragblend.engine.generation import Conversation, PrefillResult
from ragblend.engine.report import BlendReport
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import ChunkKV, LayerKV, load_into_memory
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.errors import EngineClosedError, PromptTooLongError, StoreFullError, UsageError
from ragblend.lab.explain import explain
from ragblend.options import MODES, GenerationOptions
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Chunk, Prompt, common_prefix_length
from tests.tier_support import SlowValues, assert_same, flip, path_of

pytestmark = pytest.mark.timeout(120)  # a lock that is not given back would hang


def holding_chunks(engine: TransformersEngine) -> TransformersEngine:
    """Store CHUNKS, and return the engine."""
    for chunk in CHUNKS:
        assert engine.precompute(chunk) > 0
    return engine


@pytest.fixture
def engine(tiny_engine):
    """A tiny Llama whose store holds CHUNKS."""
    return holding_chunks(tiny_engine("llama"))


def greedy(model: Any, ids: list[int], max_tokens: int) -> list[int]:
    """The stock model's own answer, without the end token."""
    answer = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, num_beams=1)
    return [token for token in answer[0, len(ids) :].tolist() if token != 2]


def assert_full_prefill(found: PrefillResult, model: Any, ids: list[int]) -> None:
    """The first logits are the stock model's own."""
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(found.logits, expected, atol=1e-4, rtol=0)


def prefill(engine: TransformersEngine, prompt: Prompt, ratio: float = 0.15, **changes: Any) -> PrefillResult:
    """Fused KV and first logits, without decoding."""
    return engine.prefill(engine.request(prompt, recompute_ratio=ratio, **{"rule": "cacheblend", **changes}))


def facts(report: BlendReport) -> dict[str, Any]:
    """All but the durations."""
    return {name: value for name, value in report.as_dict().items() if not name.endswith("_s")}


# --- answers ---


@pytest.mark.parametrize("family", ["llama", "llama3_scaling", "yarn", "qwen3", "phi3", "gemma", "granite", *LATENT])
@pytest.mark.parametrize("known", [CHUNKS, (CHUNKS[0], CHUNKS[2])], ids=["all stored", "one missing"])
def test_full_prefix_and_ratio_one_give_the_stock_models_greedy_answer(family, known, tiny_engine, stock_model):
    engine = tiny_engine(family)
    list(engine.precompute_all(known))
    expected = greedy(stock_model(family), engine.renderer.render(PROMPT), 10)
    assert engine.generate(PROMPT, mode="full", max_tokens=10).token_ids == expected
    assert engine.generate(PROMPT, mode="prefix", max_tokens=10).token_ids == expected
    assert engine.generate(PROMPT, recompute_ratio=1.0, max_tokens=10).token_ids == expected


def test_reuse_is_blend_at_ratio_zero_and_differs_from_full_prefill(engine):
    reuse, none = prefill(engine, PROMPT, mode="reuse"), prefill(engine, PROMPT, 0.0)
    assert torch.equal(reuse.logits, none.logits)
    assert (reuse.logits - prefill(engine, PROMPT, mode="full").logits).abs().max() > 1e-2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}])
def test_stream_and_generate_agree(mode, options, engine):
    result = engine.generate(PROMPT, mode=mode, max_tokens=12, **options)
    stream = engine.stream(PROMPT, mode=mode, max_tokens=12, **options)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text == result.text
    assert (stream.result.token_ids, stream.result.finish_reason) == (result.token_ids, result.finish_reason)
    assert facts(stream.result.report) == facts(result.report)


def test_the_answer_ends_before_a_stop_string(engine):
    expected = engine.generate(PROMPT, mode="full", max_tokens=30)
    whole = expected.text
    never = engine.generate(PROMPT, mode="full", max_tokens=30, stop=[whole[-3:] + "never"])
    assert (never.text, never.finish_reason) == (whole, expected.finish_reason)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    assert stop
    for stops in ([stop], stop, [stop, "never in there"]):
        result = engine.generate(PROMPT, mode="full", max_tokens=30, stop=stops)
        assert result.text == whole.partition(stop)[0]
        assert result.finish_reason == "stop"


def script(monkeypatch: pytest.MonkeyPatch, answer: list[int]) -> None:
    """Make the sampler return `answer` for any logits."""

    class Scripted:
        logprobs = None

        def __init__(self, options: GenerationOptions, prompt_ids: Sequence[int]) -> None:
            self.tokens: Iterator[int] = iter(answer)

        def sample(self, logits: torch.Tensor) -> int:
            return next(self.tokens)

    monkeypatch.setattr(generation, "Sampler", Scripted)


def test_the_end_token_ends_the_answer_and_is_not_in_it(engine, monkeypatch):
    ids = engine.renderer.text_ids("the answer")
    script(monkeypatch, [*ids, 2])
    result = engine.generate(PROMPT)
    assert (result.text, result.token_ids, result.finish_reason) == ("the answer", ids, "stop")
    assert result.report.completion_tokens == len(ids)


def test_the_answer_ends_where_the_context_does(renderer):
    from transformers.models.llama import LlamaForCausalLM

    layers = TransformersLayers(make_model(LlamaForCausalLM, max_position_embeddings=128))
    with TransformersEngine(layers, renderer, MemoryStore(1 << 20), name="short", fingerprint="f") as engine:
        room = 128 - len(engine.renderer.render(PROMPT))
        assert 0 < room < 100
        result = engine.generate(PROMPT, max_tokens=500, temperature=1.0, seed=3)
        if result.finish_reason == "length":
            assert len(result.token_ids) == room
        with pytest.raises(PromptTooLongError, match=r"prompt takes \d+ tokens, short reads 128.*`k`"):
            engine.generate(Prompt(CHUNKS * 3, "what?"))
        with pytest.raises(PromptTooLongError, match=r"chunk takes \d+ tokens, short reads 128.*`chunk_size`"):
            engine.precompute("x" * 200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode is 'fast'.*blend, full, prefix, reuse"),
        ({"rule": "best"}, "rule .best. is unknown; choose .*cacheblend"),
    ],
)
def test_bad_arguments_are_named_before_the_first_piece(options, message, engine):
    with pytest.raises(UsageError, match=message):
        engine.stream(PROMPT, **options)
    with pytest.raises(UsageError, match=message):
        engine.generate(PROMPT, **options)


def test_an_unknown_on_miss_is_named(tiny_engine):
    with pytest.raises(UsageError, match="on_miss is 'never'"):
        tiny_engine(on_miss="never")


# --- the report ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("missing", [(), (1,), (0, 1, 2)])
def test_the_reports_numbers_add_up(mode, missing, tiny_engine):
    engine = tiny_engine("llama")
    for index, chunk in enumerate(CHUNKS):
        if index not in missing:
            engine.precompute(chunk)
    result = engine.generate(PROMPT, mode=mode, rule="ask", recompute_ratio=0.2, max_tokens=3)
    report, matched = result.report, engine.match(PROMPT)
    assert (report.mode, report.prompt_tokens, report.num_chunks) == (mode, matched.num_tokens, 3)
    assert report.completion_tokens == len(result.token_ids)
    assert [chunk.num_tokens for chunk in report.chunks] == [run.num_tokens for run in matched.runs]
    assert [chunk.source for chunk in report.chunks] == ["one.txt", "two.txt", "three.txt"]
    assert report.num_chunk_hits == sum(chunk.hit for chunk in report.chunks)
    assert report.num_recomputed_tokens == sum(chunk.num_recomputed_tokens for chunk in report.chunks)
    hit_tokens = sum(chunk.num_tokens for chunk in report.chunks if chunk.hit)
    computed = report.prompt_tokens - report.num_prefix_tokens - hit_tokens
    assert report.num_reused_tokens + report.num_recomputed_tokens + computed == report.prompt_tokens
    assert all(chunk.hit or chunk.num_recomputed_tokens == 0 for chunk in report.chunks)
    assert all(not chunk.exact or chunk.num_recomputed_tokens == 0 for chunk in report.chunks)
    expected_hits = {
        "full": [False] * 3,
        "prefix": [0 not in missing, False, False],
        "reuse": [index not in missing for index in range(3)],
        "blend": [index not in missing for index in range(3)],
    }[mode]
    assert [chunk.hit for chunk in report.chunks] == expected_hits
    assert (report.num_recomputed_tokens > 0) == (mode == "blend" and any(expected_hits))
    is_prefix_known = mode != "full" and len(missing) < 3  # the first chunk that is ingested is computed after it
    assert report.num_prefix_tokens == (matched.num_prefix if is_prefix_known else 0)
    assert 0 < report.lookup_s + report.fuse_s + report.stall_s <= report.ttft_s
    assert report.rule == ("ask" if mode == "blend" else "none")
    assert report.recompute_ratio == {"blend": 0.2, "full": 1.0}.get(mode, 0.0)
    assert json.loads(json.dumps(report.as_dict()))["mode"] == mode
    assert ("full prefill" if mode == "full" else f"{report.num_chunk_hits}/3 chunks") in report.summary()


def test_the_time_to_first_token_counts_the_fetch_from_a_remote_tier(tiny_engine):
    local, values = MemoryStore(1 << 30), SlowValues()
    writer = tiny_engine("llama", local)
    for chunk in CHUNKS:
        writer.precompute(chunk)
    values.data.update({key: encode_chunk(load_into_memory(local.get(key))) for key in list(local.keys())})
    values.wait_s = 0.3
    reader = tiny_engine("llama", TieredStore(MemoryStore(1 << 30), RemoteStore(values, timeout_s=60.0)))
    first, second = (reader.generate(PROMPT, mode="reuse", max_tokens=1).report for _ in range(2))
    assert first.num_chunk_hits == second.num_chunk_hits == 3
    assert first.ttft_s > values.wait_s
    assert values.calls.count("get") == 3, "the second request waits for nothing"
    reader.store.close()


@pytest.mark.parametrize("system", [None, "Answer briefly. " * 30])
def test_a_process_that_ingested_and_later_ones_reuse_the_same_tokens(system, tmp_path):
    reports = []
    for ingested in ([A, B], [], [A, B]):
        with load_engine("demo", tmp_path, system=system) as engine:
            for chunk in ingested:
                engine.precompute(chunk)
            for _ in range(2):
                found = engine.generate(Prompt([A, B], QUESTION, system), max_tokens=4)
                report = found.report
                counts = (report.num_prefix_tokens, report.num_reused_tokens, report.num_recomputed_tokens)
                reports.append((*counts, found.token_ids))
    assert reports == [reports[0]] * 6
    assert reports[0][0] > 0


def test_the_last_prompt_token_is_never_counted_as_reused(engine):
    """It is computed, because its logits are the answer."""
    joint = len(engine.renderer.separator_ids)
    report = engine.generate(Prompt(CHUNKS[:2]), mode="reuse", max_tokens=1).report
    at_end = engine.generate(Prompt.from_text(CHUNKS[:2]), mode="reuse", max_tokens=1).report
    assert report.num_reused_tokens == report.prompt_tokens - joint - len(engine.renderer.tail_ids)
    assert at_end.num_reused_tokens == at_end.prompt_tokens - joint - 1


def test_the_charged_budget_counts_misses_and_probes(tiny_engine):
    engine = tiny_engine("llama")
    full = engine.generate(PROMPT, mode="full", max_tokens=1).report
    assert full.charged_budget == full.charged_budget_32 == 1.0
    nothing_stored = engine.generate(PROMPT, max_tokens=1).report
    assert nothing_stored.charged_budget == pytest.approx(1.0)
    list(engine.precompute_all(CHUNKS))
    assert engine.generate(PROMPT, mode="reuse", max_tokens=1).report.charged_budget == 0.0
    report = engine.generate(PROMPT, rule="cacheblend", recompute_ratio=0.2, max_tokens=1).report
    total = sum(chunk.num_tokens for chunk in report.chunks)
    candidates, kept = total - report.chunks[0].num_tokens, report.num_recomputed_tokens
    spent = candidates + (kept + candidates * engine.layers.kv_share) + 4 * kept
    assert report.charged_budget == pytest.approx(spent / (6 * total))
    assert report.charged_budget_32 < report.charged_budget
    chosen = engine.generate(PROMPT, rule="random", recompute_ratio=0.2, max_tokens=1).report
    assert chosen.charged_budget == pytest.approx(chosen.num_recomputed_tokens / total)


@pytest.mark.parametrize("rule", ["ask", "random"])
def test_layer_0_computed_instead_of_read_is_charged_once_at_any_depth(rule, tiny_engine, tmp_path):
    disk, memory = map(holding_chunks, (tiny_engine("llama", DiskStore(tmp_path, fsync=False)), tiny_engine("llama")))
    read, held = (engine.generate(PROMPT, rule=rule, recompute_ratio=0.2, max_tokens=4) for engine in (disk, memory))
    assert read.token_ids == held.token_ids
    share = disk.layers.kv_share
    assert read.report.charged_budget - held.report.charged_budget == pytest.approx(share / 6)
    assert read.report.charged_budget_32 - held.report.charged_budget_32 == pytest.approx(share / 32)


def test_the_default_rule_gives_way_where_asking_the_question_does_not_pay(engine):
    chunks = [f"{chunk.text}. " * 4 for chunk in CHUNKS]
    assert all(engine.precompute_all(chunks))

    def run(question: str, rule: str = "auto") -> BlendReport:
        prompt = Prompt(chunks, question)
        return engine.generate(prompt, rule=rule, recompute_ratio=0.2, max_tokens=1).report

    short, long = run("what is that?"), run("what is that answer to the question? " * 20)
    assert (short.rule, long.rule) == (DEFAULT_RULE, NO_PROBE_RULE)
    assert short.probe_s > 0
    assert short.fuse_s + short.stall_s >= short.probe_s
    assert long.probe_s == 0
    # A rule asked for by name runs.
    assert run("what is that answer to the question? " * 20, DEFAULT_RULE).rule == DEFAULT_RULE


def test_the_probe_takes_the_text_after_the_last_chunk(tiny_engine, chat_renderer):
    engine = holding_chunks(tiny_engine("llama", renderer=chat_renderer))
    first = Prompt.from_messages([("user", ["what is the other theory?\n\n", *CHUNKS])])
    request = engine.request(first, rule="ask", recompute_ratio=0.3)
    placements = engine._lookup(request, 0, set(), engine.store.get)
    asked = request.prompt
    plan = FusePlan(torch.tensor(asked.token_ids), placements, question_start=asked.question_start)
    tail = engine.renderer._tokenizer.decode(request.prompt.token_ids[-plan.num_queries :])
    assert tail == "<|end|>\n<|im|>assistant"
    exact = engine.generate(first, mode="full", max_tokens=4)
    assert engine.generate(first, rule="ask", recompute_ratio=1.0, max_tokens=4).text == exact.text
    assert engine.prefill(request).attention is not None


def test_what_was_stored_yesterday_is_found_today(tiny_engine, make_tokenizer, monkeypatch, tmp_path):
    """Llama 3.2's kind of chat template writes the date into the prefix of every prompt."""
    renderer = Renderer(make_tokenizer(TEMPLATES["dated"].text, SPECIALS))
    keys, texts = set(), set()
    for day in (datetime(2026, 11, 21), datetime(2026, 11, 22)):
        clock = type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None, day=day: day)})
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        engine = tiny_engine(renderer=renderer, store=DiskStore(tmp_path, fsync=False), on_miss="store")
        report = engine.generate(PROMPT, max_tokens=1).report
        engine.wait_for_precompute()
        texts.add(renderer.decode(renderer.render(PROMPT)))
        keys.add(frozenset(engine.store.keys()))
    assert report.num_chunk_hits == len(CHUNKS)
    # Today's date is in the prompt, but not in the prefix that the KV was computed after: approximate.
    assert {chunk.prefix_match for chunk in report.chunks} == {"approximate"}
    assert (len(keys), len(texts)) == (1, 2)
    assert all("21 Nov 2026" in text or "22 Nov 2026" in text for text in texts)


def test_the_prefix_match_is_exact_only_for_the_prompts_own_prefix(tiny_engine):
    engine = holding_chunks(tiny_engine("llama", system="be brief"))
    own = engine.generate(Prompt(CHUNKS, "what?", "be brief"), max_tokens=1).report
    assert [chunk.prefix_match for chunk in own.chunks] == ["exact"] * 3
    assert [chunk.exact for chunk in own.chunks] == [True, False, False]
    other = engine.generate(Prompt(CHUNKS, "what?", "be verbose"), max_tokens=1).report
    assert [chunk.prefix_match for chunk in other.chunks] == ["approximate"] * 3
    assert [chunk.exact for chunk in other.chunks] == [False] * 3
    assert other.num_chunk_hits == 3
    unknown = engine.generate(Prompt(["never seen"], "what?", "be brief"), max_tokens=1).report
    assert unknown.chunks[0].prefix_match is None


def test_a_chunk_after_an_approximate_prefix_is_not_exact(tiny_engine, stock_model):
    engine = tiny_engine("llama", system="be brief")
    engine.precompute(CHUNKS[0])
    prompt = Prompt(CHUNKS[:1], "what?", "something else entirely")
    exact = prefill(engine, prompt, 1.0)
    assert_full_prefill(exact, stock_model("llama"), engine.renderer.render(prompt))
    assert (prefill(engine, prompt, 0.0).logits - exact.logits).abs().max() > 1e-3


def test_the_same_chunk_twice_is_exact_once(engine):
    report = engine.generate(Prompt([CHUNKS[0], CHUNKS[0]], "what?"), max_tokens=1).report
    assert [chunk.exact for chunk in report.chunks] == [True, False]
    assert report.num_chunk_hits == 2


LONG = f"{CHUNKS[0].text} {CHUNKS[2].text}"
PARTS = {  # text of a prompt; tokens that LONG has before the run, the prompt between prefix and run, and LONG after it
    "beginning behind the prefix": (LONG[:-5] + ", or what is that?", (0, 0, 1), True),
    "middle behind the prefix": (LONG[10:-5] + ", or what is that?", (3, 0, 1), False),
    "all of it behind a label": (f"[1]\n{LONG}\nwhat is that?", (0, 4, 0), False),
}


@pytest.mark.parametrize("family", ["llama", "phi3", "deepseek_v2"])
@pytest.mark.parametrize(("text", "place", "is_exact"), PARTS.values(), ids=PARTS)
def test_a_partial_chunk_is_exact_only_directly_after_the_prefix(
    text, place, is_exact, family, tiny_engine, stock_model
):
    engine, prompt = tiny_engine(family), Prompt.from_messages([("user", text)])
    assert engine.precompute(LONG) > 0
    token_ids, (run,) = engine.renderer.render(prompt), engine.match(prompt).runs
    num_after = len(run.chunk_ids) - run.chunk_start - run.num_tokens
    assert (run.chunk_start, run.start - len(engine.default_prefix_ids), num_after) == place
    found = prefill(engine, prompt, mode="reuse")
    assert [(chunk.hit, chunk.exact) for chunk in found.report.chunks] == [(True, is_exact)]
    kv, rows = engine.store.get(engine.key(LONG)), slice(run.start, run.end)
    with torch.inference_mode():  # as every call of the engine: a model may keep tensors of an earlier one
        _, full = engine.layers.full_prefill(torch.tensor(token_ids))
    differences = []
    for layer in range(6):
        stored = LayerKV(*(each[:, run.chunk_start :][:, : run.num_tokens] for each in kv.layer(layer)))
        placed = engine.layers.place_keys(layer, stored.keys, torch.arange(run.start, run.end))
        torch.testing.assert_close(found.fused.keys(layer)[:, rows], placed, atol=1e-5, rtol=0)
        assert torch.equal(found.fused.values(layer)[:, rows], stored.values)
        differences.append((stored.values - full[layer].values[:, rows]).abs().max().item())
    assert (max(differences) < 1e-4) == is_exact
    assert_full_prefill(prefill(engine, prompt, 1.0), stock_model(family), token_ids)


# --- misses and the store ---


def stored(engine: TransformersEngine) -> dict[str, ChunkKV]:
    return {key: engine.store.get(key) for key in engine.store.keys()}  # noqa: SIM118 (a store is not a dict)


@pytest.mark.parametrize("mode", ["full", "prefix", "reuse", "blend"])
def test_inline_misses_store_nothing(mode, tiny_engine):
    engine = tiny_engine("llama", on_miss="inline")
    engine.generate(PROMPT, mode=mode, max_tokens=2)
    engine.wait_for_precompute()
    assert stored(engine) == {}
    assert engine.store.counters.num_puts == 0


def test_what_is_stored_after_a_miss_was_computed_alone(tiny_engine):
    """Invariant 7: not one bit of the prompt it was missed in."""
    alone, missed = holding_chunks(tiny_engine("llama")), tiny_engine("llama", on_miss="store")
    missed.generate(Prompt(CHUNKS, "what?", "another system text"), max_tokens=4)
    missed.wait_for_precompute()
    expected, found = stored(alone), stored(missed)
    assert set(found) == set(expected)
    for key, kv in expected.items():
        assert_same(found[key], kv)


def test_answering_does_not_change_what_is_stored(engine):
    before = copy.deepcopy(stored(engine))
    for ratio in (0.0, 0.3, 1.0):
        engine.generate(PROMPT, recompute_ratio=ratio, max_tokens=4)
    assert engine.store.counters.num_damaged == 0
    for key, kv in stored(engine).items():
        assert_same(kv, before[key])


def test_a_full_store_costs_speed_but_no_answer(tiny_engine):
    engine = tiny_engine("llama", store=MemoryStore(100), on_miss="store")
    result = engine.generate(PROMPT, max_tokens=3)
    assert result.token_ids
    with pytest.raises(StoreFullError):
        engine.wait_for_precompute()
    engine.wait_for_precompute()  # the error is raised once


def test_a_named_chunk_with_a_stored_beginning_is_stored_as_well(tiny_engine):
    """What it shares is reused at once, the rest is a miss."""
    engine = tiny_engine("llama", on_miss="store")
    engine.precompute(CHUNKS[0])
    similar = Chunk(CHUNKS[0].text[:-10] + " and the answer to what the other question is in the theory", "similar.txt")
    prompt = Prompt([CHUNKS[1], similar], "what is that?")
    first = engine.generate(prompt, max_tokens=1).report
    assert [(chunk.source, chunk.hit) for chunk in first.chunks[1:]] == [("", True), ("similar.txt", False)]
    engine.wait_for_precompute()
    assert engine.is_stored(similar)
    again = engine.generate(prompt, max_tokens=1).report
    assert [(chunk.source, chunk.hit) for chunk in again.chunks[1:]] == [("similar.txt", True)]


def test_precompute_stores_a_chunk_once_and_returns_its_bytes(tiny_engine):
    engine = tiny_engine("llama")
    nbytes = engine.precompute(CHUNKS[0])
    assert nbytes == engine.bytes_per_token * len(engine.renderer.chunk_ids(CHUNKS[0].text))
    assert engine.bytes_per_token == 6 * 2 * 2 * 16 * 4  # layers, K and V, heads, dimensions, float32
    assert engine.precompute(CHUNKS[0].text) == 0
    assert engine.store.counters.num_puts == 1
    key = chunk_key("tiny-llama", engine.default_prefix_ids, engine.renderer.chunk_ids(CHUNKS[0].text))
    assert stored(engine)[key].header.prefix_ids == engine.default_prefix_ids


def test_forget_drops_one_chunk(engine):
    assert engine.forget(CHUNKS[1]) is True
    assert engine.forget(CHUNKS[1]) is False
    assert [engine.is_stored(chunk) for chunk in CHUNKS] == [True, False, True]


@pytest.mark.parametrize("other", [{"namespace": "yours"}, {"fingerprint": "other weights", "namespace": "mine"}])
def test_one_namespace_or_model_never_reads_anothers(other, tiny_engine):
    store = MemoryStore(1 << 28)
    mine, yours = holding_chunks(tiny_engine("llama", store, namespace="mine")), tiny_engine("llama", store, **other)
    assert mine.generate(PROMPT, max_tokens=1).report.num_chunk_hits == 3
    assert yours.generate(PROMPT, max_tokens=1).report.num_chunk_hits == 0
    assert not yours.is_stored(CHUNKS[0])
    assert yours.precompute(CHUNKS[0]) > 0


@pytest.mark.parametrize("share", [0.0, 0.4, 0.7, 1.0])  # header, an early, a middle and the last layer
def test_a_damaged_entry_is_a_miss_and_never_an_answer(share, tiny_engine, tmp_path):
    store = DiskStore(tmp_path / "damaged", fsync=False)
    engine, intact = tiny_engine("llama", store), tiny_engine("llama", DiskStore(tmp_path / "intact", fsync=False))
    list(engine.precompute_all(CHUNKS))
    intact.precompute(CHUNKS[0])
    intact.precompute(CHUNKS[2])
    path = path_of(store.root, engine.key(CHUNKS[1]))
    flip(path, int(share * (path.stat().st_size - 1)))
    found, expected = prefill(engine, PROMPT), prefill(intact, PROMPT)
    torch.testing.assert_close(found.logits, expected.logits, atol=0, rtol=0)
    for layer in range(6):
        count = found.fused.length
        assert torch.equal(found.fused.keys(layer)[:, :count], expected.fused.keys(layer)[:, :count])
        assert torch.equal(found.fused.values(layer)[:, :count], expected.fused.values(layer)[:, :count])
    assert [chunk.hit for chunk in found.report.chunks] == [True, False, True]
    assert store.counters.num_damaged == 1
    assert found.report.num_damaged_entries == (1 if share > 0 else 0)  # met in the middle of the fuse, not at lookup
    assert not engine.is_stored(CHUNKS[1])
    assert [segment.chunk for segment in found.misses] == [CHUNKS[1]]


def test_several_damaged_entries_are_all_left_out(tiny_engine, tmp_path, stock_model):
    store = DiskStore(tmp_path, fsync=False)
    engine = holding_chunks(tiny_engine("llama", store, on_miss="store"))
    for chunk in CHUNKS:
        flip(path_of(store.root, engine.key(chunk)), -1)
    result = engine.generate(PROMPT, max_tokens=6)
    ids = engine.renderer.render(PROMPT)
    assert result.token_ids == greedy(stock_model("llama"), ids, 6)
    assert result.report.num_damaged_entries == 3
    engine.wait_for_precompute()  # and they are repaired for the next time
    healed = engine.generate(PROMPT, max_tokens=1).report
    assert (healed.num_chunk_hits, healed.num_damaged_entries) == (3, 0)


# --- conversations ---


@pytest.fixture
def chat_engine(tiny_engine, make_tokenizer):
    renderer = Renderer(make_tokenizer(TEMPLATES["chatml"].text, SPECIALS))
    return holding_chunks(tiny_engine("llama", renderer=renderer))


def turns(*answers: str) -> Prompt:
    """A question about the first chunks, the answers so far, and a question about the last chunk."""
    messages: list[tuple[str, Any]] = [("user", [CHUNKS[0], CHUNKS[1], "what is that?"])]
    for answer in answers:
        messages += [("assistant", answer), ("user", [CHUNKS[2], "and the other?"])]
    return Prompt.from_messages(messages)


def test_the_second_turn_reuses_the_first_and_is_exact_at_ratio_one(chat_engine, stock_model, monkeypatch):
    conversation = Conversation()
    answer = chat_engine.renderer.text_ids("the answer is that")
    with monkeypatch.context() as patch:
        script(patch, [*answer, 2])
        first = chat_engine.generate(turns(), recompute_ratio=1.0, conversation=conversation)
    second = turns(first.text)
    ids = chat_engine.renderer.render(second)
    prefilled = prefill(chat_engine, second, 1.0, conversation=conversation)
    assert prefilled.report.num_prefix_tokens == first.report.prompt_tokens + len(answer)
    assert [chunk.hit for chunk in prefilled.report.chunks] == [True] * 3
    assert [chunk.exact for chunk in prefilled.report.chunks] == [True, True, False]
    assert_full_prefill(prefilled, stock_model("llama"), ids)
    result = chat_engine.generate(second, recompute_ratio=1.0, max_tokens=8, conversation=conversation)
    assert result.token_ids == greedy(stock_model("llama"), ids, 8)
    assert conversation.fused.length == len(conversation.token_ids)
    assert conversation.token_ids[: len(ids)] == ids


def test_a_later_turn_reports_as_exact_what_the_earlier_turn_reported(chat_engine):
    conversation = Conversation()
    first = chat_engine.generate(turns(), recompute_ratio=0.1, max_tokens=3, conversation=conversation)
    assert [chunk.exact for chunk in first.report.chunks] == [True, False]
    assert conversation.num_exact == chat_engine.match(turns()).runs[1].start
    second = turns(first.text)
    for ratio in (0.1, 1.0):  # recomputing the new chunk does not change what earlier turns left
        report = prefill(chat_engine, second, ratio, conversation=conversation).report
        assert report.num_prefix_tokens >= first.report.prompt_tokens
        assert [chunk.exact for chunk in report.chunks] == [True, False, False]
    third = chat_engine.generate(second, mode="full", max_tokens=2, conversation=conversation)
    assert conversation.num_exact == conversation.fused.length
    again = chat_engine.generate(turns(first.text, third.text), max_tokens=1, conversation=conversation).report
    assert [chunk.exact for chunk in again.chunks][:2] == [True, True]


def test_a_conversation_from_full_prefill_serves_a_blend(chat_engine, stock_model):
    conversation = Conversation()
    first = chat_engine.generate(turns(), mode="full", max_tokens=5, conversation=conversation)
    second = turns(first.text)
    found = prefill(chat_engine, second, 1.0, conversation=conversation)
    assert found.report.num_prefix_tokens >= first.report.prompt_tokens
    assert_full_prefill(found, stock_model("llama"), chat_engine.renderer.render(second))


def test_resident_rows_may_end_inside_a_run_whose_rest_is_placed(chat_engine, stock_model):
    conversation = Conversation()
    begun = CHUNKS[1].text[:60]  # the other conversation has no more of this chunk
    other = Prompt.from_messages([("user", [CHUNKS[0], f"{begun}!", "what is that?"])])
    chat_engine.generate(other, mode="full", max_tokens=2, conversation=conversation)
    prompt = turns()
    matched = chat_engine.match(prompt)
    run, num_shared = matched.runs[1], common_prefix_length(conversation.token_ids, matched.token_ids)
    assert run.start + 8 < num_shared < run.end - 4

    placed = prefill(chat_engine, prompt, 0.0, conversation=conversation)
    assert placed.report.num_prefix_tokens == num_shared
    assert [(chunk.hit, chunk.exact) for chunk in placed.report.chunks] == [(True, True), (True, False)]
    kv = chat_engine.store.get(chat_engine.key(CHUNKS[1]))
    for layer in range(6):
        rest = placed.fused.values(layer)[:, num_shared : run.end]
        assert torch.equal(rest, kv.layer(layer).values[:, num_shared - run.start :])
        resident = placed.fused.values(layer)[:, run.start : num_shared]
        assert layer == 0 or not torch.allclose(resident, kv.layer(layer).values[:, : num_shared - run.start])
    exact = prefill(chat_engine, prompt, 1.0, conversation=conversation)
    assert exact.report.num_prefix_tokens == num_shared
    assert_full_prefill(exact, stock_model("llama"), matched.token_ids)
    assert chat_engine.forget(CHUNKS[1])  # its rest is computed, and charged
    computed = prefill(chat_engine, prompt, 0.0, conversation=conversation)
    assert computed.report.charged_budget == pytest.approx(1)
    assert [run.start for run in computed.misses] == [run.start]
    assert_full_prefill(computed, stock_model("llama"), matched.token_ids)


def test_the_same_prompt_again_still_computes_its_last_token(chat_engine):
    conversation = Conversation()
    first = chat_engine.generate(turns(), recompute_ratio=1.0, max_tokens=5, conversation=conversation)
    again = chat_engine.generate(turns(), recompute_ratio=1.0, max_tokens=5, conversation=conversation)
    assert again.token_ids == first.token_ids
    assert again.report.num_prefix_tokens == again.report.prompt_tokens - 1


# --- text that is none ---

HALF = "half \ud83d emoji"


@pytest.mark.parametrize(
    ("what", "prompt"),
    [
        ("the user text", Prompt(question=HALF)),
        ("the system text", Prompt(CHUNKS, "what is that?", HALF)),
        ("a chunk", Prompt([CHUNKS[0], HALF], "what is that?")),
        (
            "the assistant text",
            Prompt.from_messages([("user", "what?"), ("assistant", HALF), ("user", "so?")]),
        ),
    ],
)
def test_a_lone_surrogate_in_a_prompt_is_named_with_its_position(engine, what, prompt):
    message = rf"{what} holds a lone surrogate, U\+D83D at character 5 .*encode\(\"utf-8\", \"replace\"\)"
    for ask in (engine.generate, engine.stream, partial(explain, engine)):
        with pytest.raises(UsageError, match=message):
            ask(prompt)


def test_half_a_character_is_named_in_every_other_argument(engine, tiny_engine):
    for call in (engine.precompute, engine.is_stored, engine.forget, engine.key):
        with pytest.raises(UsageError, match="a chunk holds a lone surrogate"):
            call(HALF)
    with pytest.raises(UsageError, match="a chunk holds"):
        list(engine.precompute_all([CHUNKS[0], HALF]))
    with pytest.raises(UsageError, match="a stop string holds"):
        engine.generate(PROMPT, stop=[HALF])
    for name, what in (("system", "the system text"), ("namespace", "the namespace")):
        with pytest.raises(UsageError, match=f"{what} holds"):
            tiny_engine(**{name: HALF})
    whole = HALF.encode("utf-8", "replace").decode()  # as the message says
    assert engine.generate(Prompt(CHUNKS, whole), max_tokens=1).report.num_chunk_hits == 3


# --- streams and threads ---


def test_a_stream_whose_engine_is_closed_ends_quietly(tiny_engine, monkeypatch, caplog):
    """Half read, read by another thread at this moment, and not begun; with chunks that would have been stored."""
    engine = tiny_engine(on_miss="store", shadow=1.0)
    engine.precompute(CHUNKS[0])
    monkeypatch.setattr(engine, "stop_ids", frozenset())  # nothing ends them but the context, seconds later
    half, running, unread = (engine.stream(PROMPT, max_tokens=2000) for _ in range(3))
    shown = [next(half)]
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.extend(running), daemon=True)
    thread.start()
    while len(running.result.token_ids) < 5:
        time.sleep(0.001)
    engine.close()
    thread.join(20)
    assert not thread.is_alive()
    shown += half
    assert list(unread) == []
    for stream, pieces in ((half, shown), (running, ended), (unread, [])):
        assert (stream.result.finish_reason, stream.result.text) == ("cancelled", "".join(pieces))
        assert stream.result.report.completion_tokens == len(stream.result.token_ids) < 1000
    with pytest.raises(EngineClosedError, match="load it again"):
        engine.stream(PROMPT)
    engine.close()
    assert not [record for record in caplog.records if record.exc_info]


def test_threads_that_miss_the_same_chunks_store_each_once(tiny_engine):
    engine = tiny_engine("llama", on_miss="store")
    with ThreadPoolExecutor(4) as pool:
        missed = list(pool.map(lambda _: engine.generate(PROMPT, max_tokens=2).report.num_chunk_hits, range(4)))
    engine.wait_for_precompute()
    assert 0 in missed
    assert engine.store.counters.num_puts == 3
    assert engine.generate(PROMPT, max_tokens=1).report.num_chunk_hits == 3


def test_leaving_the_engine_finishes_its_background_work(tiny_layers, renderer):
    store = MemoryStore(1 << 28)
    options: dict[str, Any] = {"name": "tiny", "fingerprint": "f", "check": False}
    with TransformersEngine(tiny_layers("llama"), renderer, store, **options) as engine:
        engine.generate(PROMPT, max_tokens=1)
    assert len(list(store.keys())) == 3
    assert not [thread for thread in threading.enumerate() if re.match("ragblend-(backfill|loader)", thread.name)]


def test_the_layers_times_are_recorded_only_into_a_given_list(engine):
    prefill(engine, PROMPT)
    assert engine.timelines is None
    engine.timelines = []
    asked = prefill(engine, PROMPT)
    (timeline,) = engine.timelines
    assert [len(events) for events in timeline] == [6, 6]
    assert sum(event.end_s - event.start_s for event in timeline.fuse) <= asked.report.fuse_s * 1.001
    assert sum(event.end_s - event.start_s for event in timeline.load) == pytest.approx(asked.report.load_s)


@pytest.mark.parametrize("chunks", [CHUNKS[:1], (Chunk("what no call has stored"),)])
def test_asking_first_needs_nothing_to_ask_about(engine, chunks):
    """The only chunk is exact at its position, or missing: no token is stale, so no probe runs."""
    prompt = Prompt(chunks, "what is that?")
    full = engine.generate(prompt, mode="full", max_tokens=8)
    assert engine.generate(prompt, rule="ask", recompute_ratio=0.2, max_tokens=8).token_ids == full.token_ids


@pytest.mark.parametrize("mode", ["blend", "reuse", "prefix"])
def test_text_before_the_first_chunk_is_reused_only_by_a_later_prompt(tiny_engine, mode):
    engine = tiny_engine()
    engine.precompute(CHUNKS[0])
    preamble = "A preamble of many words that no document has and no earlier prompt had, long enough to count. " * 4
    prompt = Prompt.from_messages([("user", [preamble, CHUNKS[0], "what is that?"])])
    first, second = (engine.generate(prompt, mode=mode, recompute_ratio=0.0, max_tokens=1).report for _ in range(2))
    num_preamble = engine.match(prompt).num_prefix - len(engine.default_prefix_ids)
    assert num_preamble > 60
    assert first.num_prefix_tokens <= len(engine.default_prefix_ids)
    assert first.num_reused_tokens == second.num_reused_tokens - num_preamble
    assert second.num_prefix_tokens == first.num_prefix_tokens + num_preamble
    assert first.lookup_s < first.fuse_s
