"""The studies of what counts as a run and of quoted questions: small runs over a tiny model."""

import pytest

from benchmarks import quoted_questions, run_rules
from ragblend.lab.quality.tasks import QaCase
from ragblend.prompt import token_index

PASSAGES = (
    "The lighthouse on Gull Rock was built long ago. Its lamp is turned by clockwork. A boat comes each week.",
    "Tomas Veld repairs the lamp each spring. He lives in the harbour. His sister keeps the books of the port.",
)
CASE = QaCase("Who repairs the lamp?", ("Tomas Veld",), PASSAGES)


@pytest.mark.parametrize("study", run_rules.STUDIES)
def test_a_variant_that_computes_all_tokens_is_full_prefill(study, tiny_engine, monkeypatch):
    monkeypatch.setattr(token_index, "MIN_RUN", token_index.WINDOW)
    variants = run_rules.run_study(tiny_engine(), study, [CASE])
    shares = [each.placed_share for each in variants]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]
    assert all(each.first_token_kl >= 0 for each in variants)
    if shares[-1] == 0:
        assert variants[-1].first_token_kl == pytest.approx(0, abs=1e-6)


def test_quoted_questions_are_answered_and_reuse_their_entries(tiny_engine):
    entries = [
        f"What is number {number}?\nIt is the number {number}, as the book of numbers says." for number in range(6)
    ]
    found = quoted_questions.compare(tiny_engine(), entries, [entry.partition("\n")[0] for entry in entries])
    assert found.num_questions == 6
    assert found.interval[0] <= found.same_answer <= found.interval[1]
    assert 0.3 < found.reused_share < 1
