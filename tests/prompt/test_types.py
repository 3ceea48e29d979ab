"""Prompts as callers write them: which messages and which chunks they have, and what is refused."""

import pytest

from ragblend.errors import UsageError
from ragblend.prompt.types import Chunk, Message, Prompt, ToolCall

ONE, TWO = Chunk("one", "a.txt"), Chunk("two")


def test_the_usual_prompt_has_chunks_then_a_question_behind_a_system_text():
    prompt = Prompt([ONE, "two"], "what?", "be brief")
    assert prompt.messages == (Message("system", "be brief"), Message("user", "one\n\ntwo\n\nwhat?"))
    assert prompt.chunks == (ONE, TWO)
    assert prompt.is_chat
    assert Prompt([ONE, "two"], "what?", separator="<doc>").messages[0].content == "one<doc>two<doc>what?"
    assert Prompt(["one"]).messages == (Message("user", "one"),)


def test_turns_are_tuples_or_messages_and_name_their_chunks():
    assert Prompt.from_messages([Message("user", "hi")]) == Prompt.from_messages([("user", "hi")])
    prompt = Prompt.from_messages([("system", TWO), ("user", ["See: ", ONE, "what?"])], chunks=["in both"])
    assert [message.content for message in prompt.messages] == ["two", "See: one\n\nwhat?"]
    assert prompt.chunks == (Chunk("in both"), TWO, ONE)
    Prompt.from_messages([Message("assistant", "", calls=(ToolCall("f", "{}"),))])  # a turn without text


def test_plain_text_is_joined_and_names_its_chunks():
    prompt = Prompt.from_text(["Once ", ONE, "upon"], chunks=["upon"])
    assert (prompt.messages[0].content, prompt.chunks) == ("Once one\n\nupon", (ONE, Chunk("upon")))
    assert not prompt.is_chat


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Prompt(), "empty"),
        (lambda: Prompt("one text", "q"), r"chunks=\[text\]"),
        (lambda: Prompt.from_messages([]), "no messages"),
        (lambda: Prompt.from_messages([("user", [])]), "no messages"),
        (lambda: Prompt.from_messages([("model", "x")]), "'model'.*system, user, assistant or tool"),
        (lambda: Prompt.from_text([]), "empty"),
        (lambda: Prompt.from_text([""]), "empty"),
    ],
)
def test_a_prompt_without_text_or_with_unknown_roles_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_chunks_id_depends_on_source_place_and_text():
    chunk = Chunk("text", "a.txt", 5)
    assert chunk.end == 9
    assert chunk.id == Chunk("text", "a.txt", 5, metadata={"page": 1}).id
    others = (Chunk("text", "b.txt", 5), Chunk("text", "a.txt", 6), Chunk("texts", "a.txt", 5))
    assert len({chunk.id, *(other.id for other in others)}) == 4
