"""Logs of every documented shape become the same requests; what is broken is named and ends nothing."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, dictionaries, floats, integers, lists, none, recursive, sampled_from, text

from ragblend.bench.traffic import logs
from ragblend.bench.traffic.logs import Broken, files_of, values_in
from ragblend.bench.traffic.requests import LoggedRequest, Marks, Piece, requests_in
from ragblend.corpus.texts import ChunkRegistry
from ragblend.errors import NotFoundError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who signed?"}]
BODY = {"model": "m", "messages": CHAT, "temperature": 0}
ANSWER = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Ada."}}]}
AT, AT_ISO = 1_700_000_000.5, "2023-11-14T22:13:20.500000+00:00"
LANGCHAIN = [[
    {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "SystemMessage"],
     "kwargs": {"content": "Be brief."}},
    {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "HumanMessage"],
     "kwargs": {"content": "Who signed?", "type": "human"}},
]]  # fmt: skip
LANGCHAIN_ANSWER = {"generations": [[{"text": "Ada.", "message": {"kwargs": {"content": "Ada."}}}]]}

SHAPES: dict[str, dict[str, Any]] = {
    "openai": BODY | {"timestamp": AT},
    "openai batch": {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
    "wrapped": {"request": BODY, "response": ANSWER, "timestamp": AT_ISO},
    "wrapped, as text": {"request": json.dumps(BODY), "response": json.dumps(ANSWER), "timestamp": AT * 1000},
    "litellm": {"id": "1", "call_type": "completion", "startTime": AT, "endTime": AT + 1, "messages": CHAT,
                "response": ANSWER, "model": "m", "metadata": {}},
    "litellm, in a callback": {"standard_logging_object": {"startTime": AT, "messages": CHAT, "response": ANSWER}},
    "langsmith": {"id": "1", "run_type": "llm", "start_time": AT_ISO, "inputs": {"messages": LANGCHAIN},
                  "outputs": LANGCHAIN_ANSWER},
    "langsmith, wrapped client": {"id": "1", "run_type": "llm", "start_time": AT_ISO, "inputs": BODY,
                                  "outputs": ANSWER},
    "langfuse": {"id": "1", "traceId": "t", "type": "GENERATION", "startTime": "2023-11-14T22:13:20.500Z",
                 "input": CHAT, "output": {"role": "assistant", "content": "Ada."}},
    "langfuse, blob storage": {"id": "1", "trace_id": "t", "type": "GENERATION",
                               "start_time": "2023-11-14 22:13:20.500000", "input": json.dumps({"messages": CHAT}),
                               "output": json.dumps("Ada.")},
    "responses": {"request": {"model": "m", "instructions": "Be brief.", "input": "Who signed?"}, "timestamp": AT},
    "anthropic": {"system": "Be brief.", "messages": CHAT[1:], "timestamp": AT},
}  # fmt: skip
WITHOUT_TIME, WITHOUT_ANSWER = {"openai batch"}, {"openai", "openai batch", "responses", "anthropic"}


def joined(request: LoggedRequest) -> str:
    return "".join(str(piece.content) for piece in request.pieces)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_reads_as_the_same_request(shape: str) -> None:
    (found,) = requests_in(json.loads(json.dumps(SHAPES[shape])))
    assert joined(found) == "<system>\nBe brief.\n<user>\nWho signed?\n"
    assert found.time_s == (None if shape in WITHOUT_TIME else pytest.approx(AT))
    if shape not in WITHOUT_ANSWER and shape != "langfuse, blob storage":
        assert found.answer == "Ada."


@pytest.mark.parametrize(
    "other",
    [
        {"run_type": "chain", "inputs": {"messages": CHAT}, "outputs": {}},
        {"run_type": "retriever", "inputs": {"query": "x"}},
        {"traceId": "t", "type": "SPAN", "input": CHAT},
        {"custom_id": "1", "url": "/v1/embeddings", "body": {"model": "e", "input": ["a", "b"]}},
        {"level": "info", "message": "started"},
        {"messages": []},
        [1, 2],
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
        [{"type": "tool_result", "content": [{"type": "text", "text": "42"}]}],
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


def test_completions_are_texts_or_ids_and_spans_mark_chunks() -> None:
    params = {"kv_transfer_params": {"ragblend": {"spans": [[2, 4], [4, 5]], "namespace": "acme"}}}
    (found,) = requests_in({"prompt": [1, 2, 3, 4, 5, 6]} | params)
    assert found.pieces == (
        Piece((1, 2)), Piece((3, 4), True), Piece(()), Piece((5,), True), Piece((6,)),
    )  # fmt: skip
    assert found.namespace == "acme"
    assert [joined(each) for each in requests_in({"prompt": ["a", "b"]})] == ["a", "b"]
    (hostile,) = requests_in({"prompt": [1, 2], "kv_transfer_params": {"ragblend": {"spans": [[9, 4], "x", None]}}})
    assert [piece.content for piece in hostile.pieces] == [(1, 2)]


def test_chunks_are_marked_by_blocks_separators_and_stored_texts(tmp_path: Path) -> None:
    passage = "The lease was signed by Ada Lovelace in 1842."
    block = [{"type": "text", "text": passage, "chunk_id": "7"}, {"type": "text", "text": "Who?"}]
    (found,) = requests_in({"messages": [{"role": "user", "content": block}]})
    assert [piece.content for piece in found.pieces if piece.is_chunk] == [passage]

    cut = f"Use [[RB]]{passage}[[RB]] Who?"
    (found,) = requests_in({"prompt": cut}, Marks(separator="[[RB]]"))
    assert [piece.content for piece in found.pieces if piece.is_chunk] == [passage]

    registry = ChunkRegistry(tmp_path / "texts.sqlite")
    registry.add([passage])
    (found,) = requests_in({"messages": [{"role": "user", "content": f"{passage}\n\nWho?"}]}, Marks(registry=registry))
    assert [piece.content for piece in found.pieces if piece.is_chunk] == [passage]


# -- files


def texts_of(path: Path | str, broken: Broken) -> list[str]:
    return [joined(request) for _, value in values_in(path, broken) for request in requests_in(value)]


def lines(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        lines("one", "two"),
        "\ufeff" + lines("one", "two"),
        "\n\n" + lines("one", "two").rstrip(),
        json.dumps([{"prompt": "one"}, {"prompt": "two"}]),
        json.dumps([{"prompt": "one"}, {"prompt": "two"}], indent=2),
        json.dumps({"data": [{"prompt": "one"}, {"prompt": "two"}], "meta": {"page": 1}}, indent=2),
        json.dumps({"data": [{"prompt": "one"}, {"prompt": "two"}]}),
        "INFO 09-10 19:10:43 [logger.py:41] Received request cmpl-1: prompt: 'one', params: SamplingParams(n=1), "
        "prompt_token_ids: None.\nINFO started\n"
        'DEBUG Request cmpl-2 details: prompt: "two", prompt_token_ids: [1, 2], prompt_embeds shape: None.\n',
    ],
    ids=["jsonl", "bom", "blank lines", "array", "indented array", "page", "page on a line", "vllm"],
)
def test_what_a_file_is_shows_its_content(content: str, packed: bool, tmp_path: Path) -> None:
    path, broken = tmp_path / "log.anything", Broken()
    data = content.encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    assert texts_of(path, broken) == ["one", "two"]
    assert broken.count == 0


def test_broken_lines_are_counted_and_named_and_say_nothing_of_the_text(tmp_path: Path) -> None:
    path, broken = tmp_path / "log.jsonl", Broken()
    secret = '{"prompt": "my secret'
    path.write_bytes(
        lines("one").encode() + f"{secret}\n".encode() + b"\xff\xfe\n" + lines("two").encode() + b'{"a": ['
    )
    assert texts_of(path, broken) == ["one", "two"]
    assert broken.count == 3
    assert [place.split(": ")[0] for place in broken.places] == [f"{path}:{number}" for number in (2, 3, 5)]
    assert "secret" not in str(broken.places)


def test_a_line_that_never_ends_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LINE", 1 << 16)
    path, broken = tmp_path / "log.jsonl", Broken()
    path.write_text(lines("one") + '{"prompt": "' + "x" * (5 << 20) + '"}\n' + lines("two"))
    assert texts_of(path, broken) == ["one", "two"]
    assert broken.places == [f"{path}:2: longer than 0 MiB"]


def test_a_damaged_array_gives_what_stands_before(tmp_path: Path) -> None:
    path, broken = tmp_path / "log.json", Broken()
    path.write_text('[{"prompt": "one"}, {"prompt": "two"}, {"prompt": oops}, {"prompt": "three"}]')
    assert texts_of(path, broken) == ["one", "two"]
    assert broken.count == 1
    assert "element 2" in broken.places[0]


def test_a_cut_off_archive_gives_what_it_holds(tmp_path: Path) -> None:
    path, broken = tmp_path / "log.gz", Broken()
    data = gzip.compress("".join(lines(f"prompt {number}") for number in range(50_000)).encode())
    path.write_bytes(data[: len(data) // 2])
    assert len(texts_of(path, broken)) > 1000
    assert broken.count >= 1


def test_values_nested_beyond_reason_are_broken(tmp_path: Path) -> None:
    path, broken = tmp_path / "log.jsonl", Broken()
    path.write_text('{"messages": ' + "[" * 100_000 + "\n" + lines("two"))
    assert texts_of(path, broken) == ["two"]
    assert broken.count == 1


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


def test_stdin_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(lines("one").encode()))))
    assert texts_of("-", Broken()) == ["one"]


NAMES = sampled_from(
    [
        "messages", "prompt", "role", "content", "type", "text", "body", "request", "response", "inputs", "outputs",
        "input", "run_type", "traceId", "timestamp", "time", "kwargs", "id", "tool_calls", "extras", "chunk_id", "data",
        "tools", "params", "kv_transfer_params", "ragblend", "spans", "system",
    ]
)  # fmt: skip
WORDS = sampled_from(["llm", "GENERATION", "user", "text", "image", "[", "{}", "[[1]]"])
JSON_VALUES = recursive(
    none() | booleans() | integers() | floats() | text(max_size=5) | WORDS,
    lambda inner: lists(inner, max_size=4) | dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_no_json_value_is_more_than_a_broken_line(value: Any) -> None:
    from ragblend.bench.traffic.reading import _added
    from ragblend.bench.traffic.spool import Spool
    from ragblend.bench.traffic.tokens import Estimate

    with Spool(Estimate()) as spool:
        _added(spool, "here", json.loads(json.dumps(value)), Marks(), Broken())
        list(spool.in_order())
