"""MLA in vLLM: entries of both engines, and scattered rows that attend together, as on a GPU."""

from __future__ import annotations

import pytest
from continued import Continued, assert_continues
from harness import PREFIX, ask, assert_same_answer, engine, ingest, recorded_selections, report
from test_blend import CHUNKS, STEPS, TOLERANCE, blend_params, counted_together, patchy_prompt, plain_prompt
from test_families import LATENT_OPTIONS, make_family

from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.engine.vllm.support import model_kv_spec
from ragblend.engine.vllm.worker_side.layers import VllmLayers

pytestmark = pytest.mark.timeout(300)
TEXTS = ["the theory of the first chunk answers the question", "another chunk, and the theory of that question"]


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def latent_model(request, make_tokenizer, tmp_path_factory):
    """A model with MLA that rotates adjacent dimensions and scales its RoPE, and its folder."""
    model, path = make_family(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return model, path


def test_both_engines_store_the_same_latents_under_the_same_key(latent_model, tmp_path):
    _, path = latent_model
    with load_engine(str(path), store=tmp_path / "hf", dtype="float32", on_miss="inline") as transformers:
        prefix_ids, chunks = transformers.default_prefix_ids, map(transformers.renderer.chunk_ids, TEXTS)
        for text in TEXTS:
            transformers.precompute(text)
        spec = transformers.shape
    with engine(path, tmp_path / "vllm", **LATENT_OPTIONS) as llm:
        assert model_kv_spec(llm.llm_engine.vllm_config.model_config) == find_checkpoint(str(path)).kv_spec == spec
        for chunk_ids in chunks:
            ingest(llm, list(prefix_ids), list(chunk_ids))
    theirs, ours = DiskStore(tmp_path / "hf"), DiskStore(tmp_path / "vllm")
    assert sorted(theirs.keys()) == sorted(ours.keys())
    for key in theirs.keys():  # noqa: SIM118 (a store is not a dict)
        expected, found = theirs.get(key), ours.get(key)
        assert found.header == expected.header
        for layer in range(expected.header.num_layers):
            for mine, other in zip(found.layer(layer), expected.layer(layer), strict=True):
                assert (mine - other).abs().max() <= 1e-4 * other.abs().max()  # float32: rounding alone


def test_scattered_rows_attend_together_over_resident_latents(latent_model, tmp_path, monkeypatch):
    model, path = latent_model
    monkeypatch.setattr(VllmLayers, "attends_scattered_rows_together", True)
    reference = Continued(model)
    with engine(path, tmp_path, **LATENT_OPTIONS) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        for prompt, rule, ratio in ((plain_prompt(), "ask", 0.15), (patchy_prompt(), "cacheblend", 0.5)):
            with recorded_selections() as selections, counted_together() as counts:
                output = ask(llm, prompt.ids, blend_params(ratio, rule), STEPS)
            assert any(counts)
            expected = reference.blended(prompt.parts, ratio, rule, selections[-1], prompt.question_start)
            assert selections[-1] == expected.selected
            assert_continues(output, reference, TOLERANCE)


def test_latents_in_half_precision_pass_the_check_and_equal_full_prefill(make_tokenizer, tmp_path):
    """Without experts: rounding may choose others in a random model."""
    make_family("deepseek_v3", first_k_dense_replace=6).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    prompt = plain_prompt()
    with engine(tmp_path / "model", tmp_path / "kv", dtype="bfloat16", **LATENT_OPTIONS) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        full, blended = ask(llm, prompt.ids, max_tokens=1), ask(llm, prompt.ids, blend_params(1.0), max_tokens=1)
    assert report(blended)["num_chunk_hits"] == len(CHUNKS)
    assert_same_answer(blended, full, 0.1)


def test_two_ranks_store_each_latent_once_and_answer_as_one_rank(make_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    make_family("deepseek_v3", first_k_dense_replace=6).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    prompt, two = plain_prompt(), {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    answers = []
    for name, options in (("two", two), ("one", {})):
        with engine(tmp_path / "model", tmp_path / name, **LATENT_OPTIONS, **options) as llm:
            for chunk in CHUNKS:
                assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
            answers.append([ask(llm, prompt.ids, way) for way in (None, blend_params(1.0), blend_params(0.15, "ask"))])
    assert_same_answer(answers[0][1], answers[0][0], TOLERANCE)
    for mine, other in zip(*answers, strict=True):
        assert_same_answer(mine, other, TOLERANCE)
    stores = [DiskStore(tmp_path / name) for name in ("two", "one")]
    assert sorted(stores[0].keys()) == sorted(stores[1].keys())
    for key in stores[0].keys():  # noqa: SIM118 (a store is not a dict)
        mine, other = (store.get(key).layer(3) for store in stores)
        assert mine.values.shape == other.values.shape
        assert (mine.values - other.values).abs().max() <= 1e-4 * other.values.abs().max()
