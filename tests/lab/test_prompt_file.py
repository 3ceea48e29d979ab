"""Prompts as applications send them: the forms that are read, and why stored texts in them are not reused."""

import json

import pytest
from tiny_prompts import CHUNKS

from ragblend.catalog.ledger import open_ledger
from ragblend.catalog.schema import DocumentKey
from ragblend.errors import NotFoundError, UsageError
from ragblend.lab.prompt_file import find_missed_reuse, name_stored_chunks, read_prompt
from ragblend.prompt.types import Chunk, Message, Prompt, ToolCall

USER = {"role": "user", "content": "Who signed?"}
CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "lease"}'}}
TOOL = {"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}
TEXT = CHUNKS[0].text


@pytest.mark.parametrize(
    ("written", "prompt"),
    [
        ("Who signed?", Prompt(question="Who signed?")),
        ("[1] Who signed?", Prompt(question="[1] Who signed?")),
        ([USER], Prompt(question="Who signed?")),
        ({"model": "any", "messages": [{"role": "developer", "content": "Be brief."}, USER]},
         Prompt(question="Who signed?", system="Be brief.")),
        ([{"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "signed?"}]}],
         Prompt(question="Who signed?")),
        ({"model": "any", "prompt": "It was signed by"}, Prompt.from_text("It was signed by")),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                       {"role": "tool", "tool_call_id": "1", "content": "Ida"}], "tools": [TOOL]},
         Prompt.from_messages([("user", "Who signed?"),
                               Message("assistant", "", (ToolCall("search", '{"q": "lease"}', "1"),)),
                               Message("tool", "Ida", call_id="1")], [TOOL])),
    ],
    ids=["text", "text like JSON", "messages", "system", "parts", "completion", "tools"],
)  # fmt: skip
def test_every_form_is_the_prompt_that_the_engine_is_given(tmp_path, written, prompt):
    file = tmp_path / "prompt.json"
    file.write_text(written if isinstance(written, str) else json.dumps(written))
    assert read_prompt(str(file)) == prompt


@pytest.mark.parametrize("written", [{"question": "Who?"}, [1, 2], [{"role": "user", "parts": 3}, {}], {"messages": 3}])
def test_other_json_is_refused(tmp_path, written):
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(written))
    with pytest.raises(UsageError, match=r"JSON without messages.*give messages"):
        read_prompt(str(file))


def test_a_missing_file_is_named():
    with pytest.raises(NotFoundError, match=r"nowhere\.json does not exist"):
        read_prompt("nowhere.json")


@pytest.mark.parametrize(
    ("key", "source"),
    [(DocumentKey("contracts", "lease"), "contracts/lease"), (DocumentKey("", "lease"), "lease"), (DocumentKey(), "")],
    ids=["collection and id", "id", "no id"],
)
def test_stored_chunks_in_a_file_are_named_and_the_prompt_stays(tiny_engine, key, source):
    engine = tiny_engine()
    with open_ledger(engine.store) as ledger:
        ledger.add_texts({key: {TEXT: 0}})
    engine.precompute(TEXT)
    for sent in (Prompt(question=f"{TEXT}\n\nwhat is that?"), Prompt.from_text(f"{TEXT}\n\nwhat is that?")):
        named = name_stored_chunks(engine, sent, None)
        assert [(chunk.text, chunk.source) for chunk in named.chunks] == [(TEXT, source)]
        before, after = engine.match(sent), engine.match(named)
        assert (after.token_ids, [run.start for run in after.runs]) == (before.token_ids, [1])
        assert after.runs[0].chunk == named.chunks[0]
        assert named.is_chat == sent.is_chat


@pytest.mark.parametrize(
    ("stored_for", "sent", "reason"),
    [
        (None, f"{TEXT}\n\nwhat is that?", "the same text, stored for no model yet: ragblend precompute"),
        (("another", ""), f"{TEXT}\n\nwhat is that?", "the same text, stored for another tokenizer"),
        (("own", "acme"), f"{TEXT}\n\nwhat is that?", "the same text, stored for namespace 'acme', not ''"),
        (("own", "acme"), f"{TEXT.upper()}\n\nwhat?", "stored for namespace 'acme', not ''; differs in letter case: "),
        (("own", ""), TEXT, "the same text; chunks of fewer than 8 tokens are not found"),
        (("own", ""), f"{TEXT}\n\nwhat is that?", None),
    ],
)
def test_the_reason_is_the_cause(tiny_engine, stored_for, sent, reason):
    engine = tiny_engine()
    ledger = open_ledger(engine.store)
    ledger.add_texts({DocumentKey("contracts", "lease"): {TEXT: 0}})
    if stored_for is not None:
        tokenizer = engine.renderer.fingerprint if stored_for[0] == "own" else stored_for[0]
        ledger.add_ids([(TEXT, engine.renderer.chunk_ids(Chunk(TEXT).text))], tokenizer, stored_for[1])
    found = find_missed_reuse(engine, Prompt(question=sent))
    assert [each["document"] for each in found] == ([] if reason is None else ["contracts/lease"])
    assert all(each["reason"].startswith(reason or "") and each["share"] == 1.0 for each in found)
