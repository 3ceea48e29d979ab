"""Lines with OpenAI bodies become requests; a line that is none is named and ends nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, dictionaries, floats, integers, lists, none, recursive, sampled_from, text

from ragblend.lab.traffic.logs import LoggedRequest, RequestLog, parse_request

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who signed?"}]


def joined(request: LoggedRequest | None) -> str:
    return "".join(map(str, request.pieces))


def test_a_chat_is_its_turns_with_a_line_for_each_role():
    body = {"model": "m", "messages": CHAT, "temperature": 0}
    assert joined(parse_request(body)) == "<system>\nBe brief.\n<user>\nWho signed?\n"


def test_parts_are_read_and_media_counted():
    content = [
        {"type": "text", "text": "See "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "42"},
        {"type": "input_audio", "input_audio": {"data": "AA"}},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "数据 ünï"},
    ]
    found = parse_request({"messages": turns, "tools": tools})
    text_ = joined(found)
    assert found.num_media == 2
    assert text_.startswith("<tools>\n[")
    for part in ("<user>\nSee 42\n", '"name": "look", "arguments"', "<tool>\n数据 ünï\n"):
        assert part in text_
    assert "base64" not in text_


def test_completions_are_a_text_or_ids_in_their_namespace():
    params = {"kv_transfer_params": {"ragblend": {"namespace": "acme"}}}
    assert parse_request({"prompt": [1, 2, 3]} | params) == ([(1, 2, 3)], 0, "acme")
    salted = parse_request({"prompt": "a", "cache_salt": "s"} | params)
    assert salted.namespace not in ("", "acme", "s")


def test_lines_without_a_request_are_named_and_their_text_is_not(tmp_path):
    path = tmp_path / "log.jsonl"
    good = json.dumps({"prompt": "one"}).encode()
    lines = (
        b'{"prompt": "my secret',
        b"\xff\xfe",
        b'{"messages": ' + b"[" * 100_000,  # deeper than Python's stack
        b'{"messages": "secret"}',
        b'{"body": {"prompt": "secret"}}',
        b'["secret"]',
        b'{"prompt": ["secret", "secret"]}',
        b"{}",
    )
    path.write_bytes(b"\n".join((good, b"", *lines, good)))
    log = RequestLog([path])
    assert [joined(request) for request in log] == ["one", "one"]
    assert [place.split(": ")[0] for place in log.skipped] == [f"{path}:{number}" for number in range(3, 11)]
    assert "secret" not in str(log.skipped)


NAMES = sampled_from(
    [
        "messages", "prompt", "role", "content", "type", "text", "tool_calls", "tools", "kv_transfer_params",
        "ragblend", "namespace", "cache_salt",
    ]
)  # fmt: skip
WORDS = sampled_from(["user", "text", "image", "[", "{}", "[[1]]"])
JSON_VALUES = recursive(
    none() | booleans() | integers() | floats() | text(max_size=5) | WORDS,
    lambda inner: lists(inner, max_size=4) | dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_any_json_value_is_a_request_or_a_skipped_line(value):
    log = RequestLog([])
    found = log._read("here", json.dumps(value).encode())
    assert (found is None) == (log.num_skipped == 1)
    if found is not None:
        assert all(isinstance(piece, str | tuple) for piece in found.pieces)


@pytest.mark.parametrize(("role", "header"), [("user", "<user>\n"), (None, "<None>\n")])
def test_a_turn_without_content_is_its_header(role, header):
    assert joined(parse_request({"messages": [{"role": role, "content": None}]})) == f"{header}\n"
