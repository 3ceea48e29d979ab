"""Lines with OpenAI bodies become requests; what is broken is named and ends nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, dictionaries, floats, integers, lists, none, recursive, sampled_from, text

from ragblend.errors import NotFoundError
from ragblend.lab.traffic import logs
from ragblend.lab.traffic.logs import LoggedRequest, RequestLog, files_of, lines_of, requests_in
from ragblend.lab.traffic.tokens import Estimate

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who signed?"}]
BODY = {"model": "m", "messages": CHAT, "temperature": 0}
ANSWER = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Ada."}}]}
AT, AT_ISO = 1_700_000_000.5, "2023-11-14T22:13:20.500000+00:00"


def joined(request: LoggedRequest) -> str:
    return "".join(map(str, request.pieces))


@pytest.mark.parametrize(
    ("line", "time_s", "answer"),
    [
        (BODY, None, ""),
        (BODY | {"timestamp": AT}, AT, ""),
        ({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}, None, ""),
        ({"body": BODY, "response": ANSWER, "timestamp": AT_ISO}, AT, "Ada."),
        ({"body": BODY, "response": {"status_code": 200, "body": ANSWER}, "timestamp": "then"}, None, "Ada."),
        ({"body": BODY, "response": {"choices": [{"text": "Ada."}]}}, None, "Ada."),
        ({"body": BODY, "response": {"error": "overloaded"}}, None, ""),
    ],
    ids=["body", "with a time", "batch file", "logged", "batch answer", "completion", "error"],
)
def test_a_body_reads_the_same_alone_and_wrapped(line: dict[str, Any], time_s: float | None, answer: str) -> None:
    (found,) = requests_in(json.loads(json.dumps(line)))
    assert joined(found) == "<system>\nBe brief.\n<user>\nWho signed?\n"
    assert (found.time_s, found.answer) == (time_s if time_s is None else pytest.approx(time_s), answer)


@pytest.mark.parametrize(
    "other",
    [
        {"run_type": "llm", "inputs": {"messages": CHAT}},
        {"custom_id": "1", "url": "/v1/embeddings", "body": {"model": "e", "input": ["a", "b"]}},
        {"level": "info", "message": "started"},
        {"messages": []},
        {"messages": 7},
        {"body": [BODY]},
        [BODY],
        "text",
        None,
    ],
)
def test_what_is_no_request_is_none(other: Any) -> None:
    assert list(requests_in(other)) == []


def test_parts_are_read_and_media_counted() -> None:
    content = [
        {"type": "text", "text": "See "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "42"},
        {"type": "input_audio", "input_audio": {"data": "AA"}},
        None,
        7,
    ]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "数据 ünï"},
    ]
    (found,) = requests_in({"messages": turns, "tools": tools})
    text_ = joined(found)
    assert found.num_media == 2
    assert text_.startswith("<tools>\n[")
    for part in ("<user>\nSee 42\n", '"name": "look", "arguments"', "<tool>\n数据 ünï\n"):
        assert part in text_
    assert "base64" not in text_


def test_completions_are_texts_or_ids() -> None:
    params = {"kv_transfer_params": {"ragblend": {"spans": [[2, 4], [4, 5]], "namespace": "acme"}}}
    (found,) = requests_in({"prompt": [1, 2, 3, 4, 5, 6]} | params)
    assert found.pieces == [(1, 2, 3, 4, 5, 6)]
    assert found.namespace == "acme"
    (salted,) = requests_in({"prompt": "a", "cache_salt": "s"} | params)
    assert salted.namespace not in ("", "acme", "s")
    assert [joined(each) for each in requests_in({"prompt": ["a", "b"]})] == ["a", "b"]


# -- files


def texts_of(path: Path) -> tuple[list[str], list[str]]:
    """The prompts of a file, and its broken places with why."""
    broken: list[str] = []
    found = lines_of(path, lambda place, why: broken.append(f"{place}: {why}"))
    return [joined(request) for _, value in found for request in requests_in(value)], broken


def lines(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "content",
    [lines("one", "two"), "\ufeff" + lines("one", "two"), "\n\n" + lines("one", "two").rstrip()],
    ids=["jsonl", "bom", "blank lines"],
)
def test_lines_are_read_packed_or_not(content: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "log.anything"
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert texts_of(path) == (["one", "two"], [])


def test_broken_lines_are_named_and_say_nothing_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LINE", 1 << 18)
    path = tmp_path / "log.jsonl"
    broken = (
        b'{"prompt": "my secret',
        b"\xff\xfe",
        b'{"messages": ' + b"[" * 100_000,  # deeper than Python's stack
        b'{"prompt": "' + b"secret" * (1 << 20) + b'"}',
        b'{"a": [',
    )
    path.write_bytes(b"\n".join((lines("one").encode().strip(), *broken[:4], lines("two").encode().strip(), broken[4])))
    found, places = texts_of(path)
    assert found == ["one", "two"]
    assert [place.split(": ")[0] for place in places] == [f"{path}:{number}" for number in (2, 3, 4, 5, 7)]
    assert "longer than" in places[3]
    assert "secret" not in str(places)


def test_a_cut_off_archive_gives_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    data = gzip.compress("".join(lines(f"prompt {number}") for number in range(50_000)).encode())
    path.write_bytes(data[: len(data) // 2])
    found, broken = texts_of(path)
    assert len(found) > 1000
    assert broken


def test_folders_are_read_in_order_of_names_and_what_is_missing_is_said(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a/1.jsonl", "b/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines(name))
    assert [Path(each).name for each in files_of([tmp_path])] == ["1.jsonl", "2.jsonl"]
    with pytest.raises(NotFoundError, match="there is no"):
        files_of([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="no file"):
        files_of([tmp_path / "empty"])


def test_ids_answers_and_namespaces_come_back_in_the_order_of_the_times() -> None:
    requests = RequestLog(Estimate())
    assert requests.add(LoggedRequest(((1, 2), (3, 4, 5), ()), time_s=7.0, namespace="acme"))
    assert requests.add(LoggedRequest(((9,),)))  # no time: after the one before it
    assert requests.add(LoggedRequest(((6,),), answer="Ada.", time_s=5.0))
    assert not requests.add(LoggedRequest(((),)))
    earliest, named, last = requests.in_order()
    assert (earliest.ids.tolist(), earliest.seed) == ([6], 0)
    assert earliest.answer.tolist() == Estimate().ids("<assistant>\n").tolist() + Estimate().ids("Ada.\n").tolist()
    assert named.ids.tolist() == [1, 2, 3, 4, 5]
    assert named.seed != earliest.seed
    assert (last.ids.tolist(), last.answer.tolist()) == ([9], [])


NAMES = sampled_from(
    [
        "messages", "prompt", "role", "content", "type", "text", "body", "response", "choices", "message", "timestamp",
        "tool_calls", "tools", "kv_transfer_params", "ragblend", "spans", "namespace", "cache_salt",
    ]
)  # fmt: skip
WORDS = sampled_from(["user", "text", "image", "[", "{}", "[[1]]"])
JSON_VALUES = recursive(
    none() | booleans() | integers() | floats() | text(max_size=5) | WORDS,
    lambda inner: lists(inner, max_size=4) | dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_no_json_value_is_more_than_a_broken_line(value: Any) -> None:
    requests = RequestLog(Estimate())
    requests.add_logged("here", json.loads(json.dumps(value)))
    list(requests.in_order())
