"""Stop strings end an answer for any cut into pieces; sampling follows the distribution of the logits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragblend.engine.decoding import Sampler, cut_at_stop
from ragblend.errors import UsageError
from ragblend.options import GenerationOptions

texts = st.text(alphabet="abc", max_size=30)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def scan(pieces: list[str], stop: list[str]) -> tuple[str, bool]:
    shown, held, stopped = "", "", False
    for piece in pieces:
        if not stopped:
            more, held, stopped = cut_at_stop(held + piece, stop)
            shown += more
    return shown + held, stopped


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def before_the_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, the longest of those, and whether there is one."""
    for end in range(1, len(text) + 1):
        if found := [each for each in stop if text[:end].endswith(each)]:
            return text[: end - max(map(len, found))], True
    return text, False


@given(text=texts, stop=stops, places=st.lists(st.integers(0, 30), max_size=8))
@example(text="abc", stop=["abc", "b"], places=[])
def test_an_answer_ends_before_its_first_stop_string_for_any_pieces(text, stop, places):
    expected = before_the_stop(text, stop)
    assert scan(cut(text, places), stop) == scan(list(text), stop) == expected


@given(text=texts, stop=stops)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(text, stop):
    shown, held = "", ""
    for letter in text:
        more, held, stopped = cut_at_stop(held + letter, stop)
        shown += more
        if stopped:
            break
        assert text.startswith(text[: len(shown)] + held)
        assert not held or any(needle.startswith(held) for needle in stop)


def test_without_a_seed_answers_differ_and_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    samplers = [Sampler(GenerationOptions(temperature=1.0)) for _ in range(2)]
    one, other = ([sampler.sample(torch.zeros(50)) for _ in range(20)] for sampler in samplers)
    assert one != other
    assert torch.equal(torch.get_rng_state(), before)


# --- penalties, bias and limits: transformers' own `generate` is the judge ---

PROMPT_IDS = [5, 9, 9, 30, 31, 7]
SHAPES = [
    {"repetition_penalty": 1.7},
    {"logit_bias": {9: 4.0, 30: -100.0}},
    {"repetition_penalty": 1.3, "logit_bias": {7: 2.5}},
]


@pytest.mark.parametrize("options", SHAPES)
def test_greedy_answers_are_those_of_transformers_generate(options, tiny_model):
    model = tiny_model("llama")
    theirs = dict(options)
    if "logit_bias" in theirs:
        theirs["sequence_bias"] = {(token,): bias for token, bias in theirs.pop("logit_bias").items()}
    ids = torch.tensor([PROMPT_IDS])
    with torch.inference_mode():
        expected = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0, **theirs)
        sampler, found = Sampler(GenerationOptions(**options), PROMPT_IDS), list(PROMPT_IDS)
        for _ in range(12):
            found.append(sampler.sample(model(torch.tensor([found])).logits[0, -1]))
    assert found == expected[0].tolist()
    assert found[-12:] != model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None)[0, -12:].tolist()


@pytest.mark.parametrize(
    "options",
    [
        *({"temperature": temperature} for temperature in (0.5, 1.0, 3.0)),
        *({"top_p": top_p} for top_p in (0.01, 0.6, 0.95)),
        {"top_k": 3},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_what_may_be_chosen_is_what_transformers_leaves(options):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    options = {"temperature": 0.7, **options}
    warpers = [TemperatureLogitsWarper(options["temperature"])]
    warpers += [TopKLogitsWarper(options["top_k"])] if "top_k" in options else []
    warpers += [TopPLogitsWarper(options["top_p"])] if "top_p" in options else []
    warpers += [MinPLogitsWarper(options["min_p"])] if "min_p" in options else []
    left = LogitsProcessorList(warpers)(torch.tensor([[0]]), logits[None])[0].softmax(-1)
    sampler = Sampler(GenerationOptions(seed=1, **options))
    counts = torch.bincount(torch.tensor([sampler.sample(logits) for _ in range(2000)]), minlength=40) / 2000
    assert set(counts.nonzero().flatten().tolist()) <= set(left.nonzero().flatten().tolist())
    torch.testing.assert_close(counts, left, atol=0.04, rtol=0)


def test_presence_and_frequency_count_the_answer_and_not_the_prompt():
    logits = torch.tensor([5.0, 4.8, 4.5, 0.0])
    for options, expected in (
        ({"presence_penalty": 0.4}, [0, 1, 0, 0, 0]),
        ({"frequency_penalty": 0.4}, [0, 1, 0, 2, 1]),
        ({"presence_penalty": -1.0}, [0, 0, 0, 0, 0]),
    ):
        sampler = Sampler(GenerationOptions(**options), [0, 0, 0, 0])
        assert [sampler.sample(logits) for _ in range(5)] == expected, options


def test_equal_seeds_choose_equal_tokens_under_any_limits():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for options in ({}, {"top_k": 10}, {"min_p": 0.02, "repetition_penalty": 1.2}):
        first, second, other = (Sampler(GenerationOptions(temperature=1.0, seed=s, **options)) for s in (4, 4, 5))
        chosen = [[each.sample(logits) for _ in range(20)] for each in (first, second, other)]
        assert chosen[0] == chosen[1] != chosen[2]


def test_logprobs_are_the_models_own_before_bias_is_added():
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    sampler = Sampler(GenerationOptions(logprobs=True, top_logprobs=2, logit_bias={3: 100.0}))
    assert sampler.sample(logits) == 3
    expected = logits.log_softmax(-1)
    ((token, logprob, top),) = sampler.logprobs
    assert (token, [each for each, _ in top]) == (3, [1, 2])
    assert logprob == pytest.approx(float(expected[3]))
    assert [value for _, value in top] == pytest.approx(expected[[1, 2]].tolist())


def test_forbidden_tokens_are_no_alternatives_and_forced_tokens_are_certain():
    logits = torch.tensor([1.0, -torch.inf, 2.0, -torch.inf])
    sampler = Sampler(GenerationOptions(logprobs=True, top_logprobs=3))
    assert sampler.sample(logits) == 2
    sampler.record_forced([1, 3])
    chosen, *forced = sampler.logprobs
    assert [token for token, _ in chosen[2]] == [2, 0]
    assert forced == [(1, 0.0, [(1, 0.0)]), (3, 0.0, [(3, 0.0)])]


def test_penalties_count_what_had_to_come():
    sampler = Sampler(GenerationOptions(presence_penalty=2.0))
    sampler.record_forced([1])
    assert sampler.sample(torch.tensor([2.0, 3.0, 0.0])) == 0


def test_a_bias_on_an_unknown_token_is_named():
    with pytest.raises(UsageError, match=r"logit_bias cannot be used"):
        Sampler(GenerationOptions(logit_bias={99: 1.0})).sample(torch.zeros(10))
