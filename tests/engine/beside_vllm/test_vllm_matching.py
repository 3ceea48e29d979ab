"""Salts by which later turns of a conversation find its blended KV in vLLM's prefix cache. Needs no vLLM."""

from hypothesis import given
from hypothesis import strategies as st

from ragblend.engine.vllm.scheduler_side import matching
from ragblend.engine.vllm.scheduler_side.matching import ConversationSalts

TAIL, SETTINGS = (1, 2), ("acme", "blend", "ask", 0.15, False, 0)
ids = st.lists(st.integers(3, 5), min_size=1, max_size=12)


@given(first=ids, answer=ids, question=ids)
def test_a_later_turn_has_its_conversations_salt(first, answer, question):
    salts = ConversationSalts(TAIL)
    salt = salts.salt_for([*first, *TAIL], SETTINGS)
    second = [*first, *TAIL, *answer, *question]
    assert salts.salt_for([*second, *TAIL], SETTINGS) == salt
    assert salts.salt_for([*second, *TAIL, *answer], SETTINGS) == salt
    assert salts.salt_for([*first, *TAIL], SETTINGS) == salt  # asked again


@given(first=ids, second=ids)
def test_prompts_share_a_salt_where_one_begins_with_the_other_alone(first, second):
    salts = ConversationSalts(TAIL)
    is_later = second[: len(first)] == first
    assert (salts.salt_for(first, SETTINGS) == salts.salt_for(second, SETTINGS)) == is_later


def test_other_wishes_have_other_salts():
    salts, prompt = ConversationSalts(TAIL), [5, 6, 7]
    others = [(*SETTINGS[:place], "other", *SETTINGS[place + 1 :]) for place in range(len(SETTINGS))]
    assert len({salts.salt_for(prompt, settings) for settings in (SETTINGS, *others)}) == len(SETTINGS) + 1


def test_nobody_can_tell_a_salt_from_its_prompt():
    first, second = (ConversationSalts(TAIL).salt_for([5, 6, 7], SETTINGS) for _ in range(2))
    assert first != second


def test_only_the_latest_prompts_are_remembered(monkeypatch):
    monkeypatch.setattr(matching, "_PROMPTS_KEPT", 3)
    salts = ConversationSalts(TAIL)
    made = {length: salts.salt_for([length] * 9, SETTINGS) for length in range(5)}
    later = {length: salts.salt_for([*[length] * 9, 7], SETTINGS) for length in (4, 3, 2, 0)}
    assert [later[length] == made[length] for length in (4, 3, 2, 0)] == [True, True, False, False]
    assert len(salts._salts) == 3
    assert sum(salts._lengths.values()) == 3
