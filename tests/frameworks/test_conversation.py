"""A conversation: what a follow-up is searched for, and that asking for it changes nothing else."""

from __future__ import annotations

import pytest

from ragblend import Prompt, load_engine
from ragblend.frameworks.conversation import REPHRASE, ChatSession

CHUNKS = ["George Keller lives in Kinport.", "Julia Bishop works for Synon.", "Synon is based in Wesstad."]
QUESTION, FOLLOW_UP = "Where does George Keller live?", "And Julia Bishop?"


@pytest.fixture
def engine(tmp_path):
    with load_engine("demo", tmp_path, on_miss="store") as engine:
        for chunk in CHUNKS[:2]:
            engine.precompute(chunk)
        yield engine


def ask(session: ChatSession, chunks: list[str], question: str) -> str:
    turn = session.stream(Prompt(chunks, question).chunks, question, max_tokens=8)
    return "".join(turn)


def test_a_follow_up_is_rephrased_from_questions_and_answers_without_their_chunks(engine):
    session = ChatSession(engine, system="Be brief.")
    answer = ask(session, CHUNKS[:2], QUESTION)
    turns = [("system", REPHRASE), ("user", QUESTION), ("assistant", answer), ("user", FOLLOW_UP)]
    written = engine.generate(Prompt.from_messages(turns), mode="full", max_tokens=96)
    assert written.finish_reason == "stop"
    assert session.condense(FOLLOW_UP) == " ".join(written.text.split()) != ""


def test_rephrasing_stores_nothing_and_leaves_the_conversation_as_it_was(engine):
    plain, asked = ChatSession(engine), ChatSession(engine)
    for session in (plain, asked):
        ask(session, CHUNKS[:2], QUESTION)
    engine.wait_for_precompute()
    stored, messages = set(engine.store.keys()), asked.messages
    asked.condense(FOLLOW_UP)
    engine.wait_for_precompute()
    assert (set(engine.store.keys()), asked.messages) == (stored, messages)
    for session in (plain, asked):
        ask(session, [CHUNKS[2]], FOLLOW_UP)
    assert asked.messages == plain.messages
    assert asked.messages[2].content == f"{CHUNKS[2]}\n\n{FOLLOW_UP}", (
        "what was typed is answered, not what was searched for"
    )


def test_a_question_that_cannot_be_rephrased_is_searched_as_it_is(engine, tiny_engine, caplog):
    assert ChatSession(engine).condense(QUESTION) == QUESTION
    endless = tiny_engine()
    endless.stop_ids = frozenset()  # a random model that never comes to an end
    session = ChatSession(endless)
    ask(session, CHUNKS, QUESTION)
    assert session.condense(FOLLOW_UP) == FOLLOW_UP
    short = ChatSession(engine)
    ask(short, [], "Where does " + "George " * 150 + "live?")
    assert short.condense("Where " + "is " * 5000) == "Where " + "is " * 5000
    assert "the last turns exceed the model's context" in caplog.text
