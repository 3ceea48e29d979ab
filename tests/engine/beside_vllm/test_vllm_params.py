"""What a vLLM request and its answer carry, and how separators mark chunks. Needs no vLLM."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.engine.report import BlendReport, ChunkReport
from ragblend.engine.vllm.params import (
    PARAMS_KEY,
    BlendParams,
    parse_params,
    report_from,
    report_to_json,
    spans_between,
)
from ragblend.errors import UsageError

ids = st.lists(st.integers(3, 9), min_size=1, max_size=6)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_parameters_survive_json():
    params = BlendParams("reuse", "random", 0.2, ((3, 9), (9, 20)), "team", 4, ((2, 0), (1, 3)))
    assert parse_params(json.loads(json.dumps(params.as_dict()))) == params
    assert parse_params({}) == BlendParams()
    assert params.separators == (3, 4, 9, 17, 18, 19)
    assert parse_params({"ratio": "auto"}).ratio == "auto"


def test_a_report_survives_json_and_newer_fields():
    chunks = [ChunkReport("", 5, True, "exact", kv_dtype="int8"), ChunkReport("", 4, False)]
    report = BlendReport("blend", "cacheblend", 0.15, chunks=chunks, num_reused_tokens=7)
    sent = json.loads(json.dumps({PARAMS_KEY: {**report_to_json(report), "from_the_future": 1}}))
    for chunk in sent[PARAMS_KEY]["chunks"]:
        chunk["from_the_future"] = [2]
    assert report_from(sent) == report
    older = {
        name: value
        for name, value in report_to_json(report).items()
        if name not in ("failed", "chunks", "recompute_ratio")
    }
    assert report_from({PARAMS_KEY: older}) == replace(report, chunks=[], recompute_ratio=0.0)
    odd = [
        {**report_to_json(report), **change}
        for change in ({"version": 2}, {"mode": "ingest"}, {"chunks": 3}, {"chunks": [3]})
    ]
    for other in (None, {}, {PARAMS_KEY: 3}, *({PARAMS_KEY: one} for one in odd)):
        assert report_from(other) is None


@given(raw=anything)
def test_whatever_a_client_sends_is_a_usage_error_at_worst(raw):
    for sent in (
        raw,
        {"spans": raw},
        {"mode": raw},
        {"ratio": raw},
        {"rule": raw, "spans": [[0, raw]]},
        {"template": raw, "spans": [[0, 5]]},
    ):
        try:
            parse_params(sent).check_length(10)
        except UsageError:
            continue


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"version": 2}, "version 2"),
        ({"mode": "guess"}, "'guess'"),
        ({"ratio": 1.5}, "1.5"),
        ({"ratio": True}, "True"),
        ({"ratio": "all"}, "'all'"),
        ({"spans": [[4, 4]]}, r"\(4, 4\)"),
        ({"spans": [[0, 5], [4, 9]]}, "starts at 4"),
        ({"mode": "ingest"}, "exactly one span"),
        ({"spans": [[0, 5], [5, 9]], "template": [[1, 0]]}, "1 entries for 2 spans"),
        ({"spans": [[0, 5]], "template": [[3, 3]]}, r"\(3, 3\)"),
        ({"spans": [[0, 5]], "template": [[-1, 0]]}, r"\(-1, 0\)"),
        ({"key": "abc"}, "key"),
    ],
)
def test_an_error_names_what_is_wrong(raw, named):
    with pytest.raises(UsageError, match=named):
        parse_params(raw)


def test_spans_must_fit_the_prompt():
    with pytest.raises(UsageError, match="ends at 12"):
        BlendParams(spans=((2, 12),)).check_length(11)
    with pytest.raises(UsageError, match="after the span"):
        BlendParams("ingest", spans=((2, 12),)).check_length(12)


@given(prefix=ids, chunks=st.lists(ids, min_size=1, max_size=4), question=ids)
def test_separators_give_back_the_chunks(prefix, chunks, question):
    separator = [0, 1]
    joined = prefix + separator + [token for chunk in chunks for token in [*chunk, *separator]] + question
    assert [joined[start:end] for start, end in spans_between(joined, separator)] == chunks
    opened = [[0, *chunk] for chunk in chunks]
    joined = prefix + [token for chunk in opened for token in chunk] + [1, *question]
    assert [joined[start:end] for start, end in spans_between(joined, [0], [1])] == opened


def test_a_prompt_without_separators_has_no_chunks():
    assert spans_between([3, 4, 5], [0]) == spans_between([3, 0, 4], [0]) == spans_between([3, 4], []) == ()
