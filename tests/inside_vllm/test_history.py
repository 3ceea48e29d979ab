"""What was asked before changes no answer: each equals the one that an empty prefix cache gives."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, NamedTuple

import pytest
from harness import PREFIX, ask_all, assert_same_answer, engine, ingest, make_known, random_ids, report, tokens
from harness import ask as ask_afresh

from ragblend.engine.vllm.scheduler_side.scheduler import BlendScheduler

ask = partial(ask_afresh, forgets=False)
CHUNKS = [random_ids(n, n) for n in (90, 70, 110, 80)]
LONG, OTHER = random_ids(50, 5), random_ids(9, 6)
BLOCK = 32


class Asked(NamedTuple):
    """A prompt's ids and ragblend's parameters."""

    ids: list[int]
    params: dict[str, Any]


def first_logprobs(answer: Any) -> dict[int, float]:
    """Of the likeliest first tokens; the last few may be others after rounding."""
    return {token: each.logprob for token, each in [*answer.outputs[0].logprobs[0].items()][:12]}


@pytest.fixture(scope="module")
def tail(checkpoint, tmp_path_factory):
    """What the chat template writes after a user turn."""
    return list(make_known(tmp_path_factory.mktemp("none"), checkpoint("llama"), []).tail_ids)


@pytest.fixture(scope="module", params=["roomy", "crowded"])
def llm(checkpoint, tmp_path_factory, request):
    """An engine whose store has the chunks; in a crowded one, parts are evicted and look-ups late."""
    crowded = request.param == "crowded"
    options = {"num_gpu_blocks_override": 32, "max_model_len": 768} if crowded else {}
    with pytest.MonkeyPatch.context() as patch:
        if crowded:
            patch.setattr(f"{BlendScheduler.__module__}.PATIENCE_S", 0.0)
        with engine(checkpoint("llama"), tmp_path_factory.mktemp("kv"), {"mode": "blend"}, **options) as made:
            for chunk in CHUNKS:
                assert ingest(made, PREFIX, chunk)["refused_reason"] == ""
            yield made


@pytest.fixture(scope="module")
def asked(llm, tail) -> dict[str, Asked]:
    """Requests that share prefixes, by what they are."""
    first, second, third, fourth = CHUNKS
    context = [*PREFIX, *first, *second, *third]
    # The prompt's last block is full once there is an answer, and contains the end of the last chunk.
    turn = [*context, *random_ids((BLOCK - 4 - len(context) - len(tail)) % BLOCK, 4), *tail]
    assert len(turn) // BLOCK * BLOCK < len(context)
    history = [*turn, *tokens(ask_afresh(llm, turn))]
    prompts = {
        "turn": turn,
        "other question": [*context, *OTHER, *tail],
        "long question": [*context, *LONG, *tail],
        "other last chunk": [*PREFIX, *first, *second, *fourth, *OTHER, *tail],
        "fewer chunks": [*PREFIX, *first, *OTHER, *tail],
        "second turn": [*history, *OTHER, *tail],
        "second turn, new chunk": [*history, *fourth, *OTHER, *tail],
        "second turn, old chunk": [*history, *second, *LONG, *tail],
        "third turn": [*history, *fourth, *OTHER, *tail, *LONG, *third, *OTHER, *tail],
        "without a template": [*context, *OTHER],
        "continued without a template": [*context, *OTHER, *LONG, *fourth, *OTHER],
        "no chunk": [*PREFIX, *LONG, *tail],
    }
    options_by_name = {
        "ratio .5": {"ratio": 0.5}, "ratio 1": {"ratio": 1.0}, "cacheblend": {"rule": "cacheblend", "ratio": 0.3},
        "random": {"rule": "random", "ratio": 0.3}, "reuse": {"mode": "reuse"}, "prefix": {"mode": "prefix"},
        "full": {"mode": "full"},
    }  # fmt: skip
    plain = {name: Asked(ids, {}) for name, ids in prompts.items()}
    varied = {
        f"{name}, {option}": Asked(prompts[name], options_by_name[option])
        for name in ("turn", "third turn")
        for option in options_by_name
    }
    return plain | varied


@pytest.fixture(scope="module")
def alone(llm, asked) -> dict[str, Any]:
    """The answers on an empty cache."""
    return {name: ask_afresh(llm, *each) for name, each in asked.items()}


@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_that_of_an_empty_cache(llm, asked, alone, seed):
    names, order = sorted(asked), random.Random(seed)
    llm.reset_prefix_cache()
    for _ in range(2):
        order.shuffle(names)
        for start in range(0, len(names), 3):  # some one by one, some at once
            together = names[start : start + 3]
            batches = [together] if start % 2 else [[name] for name in together]
            for batch in batches:
                for name, answer in zip(
                    batch, ask_all(llm, [asked[each] for each in batch], forgets=False), strict=True
                ):
                    try:
                        assert_same_answer(answer, alone[name], 1e-3)
                    except AssertionError as error:
                        raise AssertionError(f"{name}, seed {seed}, after {names[:start]}") from error


def test_later_turns_find_what_the_turns_before_have_fused(llm, asked):
    """And only they do: a prompt with another question, another rule or another chunk in the same turn does not."""
    llm.reset_prefix_cache()
    assert report(ask(llm, *asked["turn"]))["num_prefix_tokens"] <= len(PREFIX)
    for name in ("second turn", "second turn, new chunk", "third turn"):
        assert report(ask(llm, *asked[name]))["num_prefix_tokens"] >= len(asked["turn"].ids) // BLOCK * BLOCK, name
    for name in ("other question", "turn, ratio .5", "turn, cacheblend", "turn, reuse", "other last chunk"):
        assert report(ask(llm, *asked[name]))["num_prefix_tokens"] <= len(PREFIX), name
    for mode in ("prefix", "full"):
        assert ask(llm, asked["second turn"].ids, {"mode": mode}).num_cached_tokens == 0
