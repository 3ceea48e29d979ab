"""What a vLLM request and its answer carry. Needs no vLLM."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.engine.report import BlendReport, ChunkReport
from ragblend.engine.vllm.params import (
    MAX_SPANS,
    PARAMS_KEY,
    BlendParams,
    parse_params,
    report_from,
    report_to_json,
)
from ragblend.errors import UsageError

ids = st.lists(st.integers(3, 9), min_size=1, max_size=6)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_parameters_survive_json():
    around = (((), (5, 1 << 31)), ((7,), ()))
    params = BlendParams("reuse", "random", 0.2, ((3, 9), (9, 20)), "team", 4, around, 3)
    assert parse_params(json.loads(json.dumps(params.as_dict()))) == params
    assert parse_params({}) == BlendParams()
    assert parse_params({"ratio": "auto"}).ratio == "auto"


def test_what_stands_around_a_span_makes_its_chunk_whole():
    params = BlendParams(spans=((2, 5), (6, 8)), around=(((8, 9), (4,)), ((), ())), num_prefix=1)
    prompt = range(10, 20)
    assert [params.chunk_ids(prompt, place) for place in (0, 1)] == [(8, 9, 12, 13, 14, 4), (16, 17)]
    assert [params.chunk_start(place) for place in (0, 1)] == [2, 0]
    assert params.prefix_ids(prompt) == (10,)
    whole = replace(params, around=(), num_prefix=None)
    assert (whole.chunk_ids(prompt, 0), whole.chunk_start(0), whole.prefix_ids(prompt)) == ((12, 13, 14), 0, (10, 11))


def test_a_report_survives_json_and_newer_fields():
    chunks = [ChunkReport("", 5, True, "exact", kv_dtype="int8"), ChunkReport("", 4, False)]
    report = BlendReport("blend", "cacheblend", 0.15, chunks=chunks, num_reused_tokens=7)
    sent = json.loads(json.dumps({PARAMS_KEY: {**report_to_json(report), "from_the_future": 1}}))
    for chunk in sent[PARAMS_KEY]["chunks"]:
        chunk["from_the_future"] = [2]
    assert report_from(sent) == report
    older = report_to_json(report)
    for name in ("failed", "chunks", "recompute_ratio"):
        older.pop(name, None)
    assert report_from({PARAMS_KEY: older}) == replace(report, chunks=[], recompute_ratio=0.0)
    for change in ({"version": 1}, {"mode": "ingest"}, {"chunks": 3}, {"chunks": [3]}):
        assert report_from({PARAMS_KEY: {**report_to_json(report), **change}}) is None
    for other in (None, {}, {PARAMS_KEY: 3}):
        assert report_from(other) is None


@given(raw=anything)
def test_whatever_a_client_sends_is_a_usage_error_at_worst(raw):
    single = [{name: raw} for name in ("spans", "mode", "ratio", "num_prefix")]
    around = [{"around": sent, "spans": [[0, 5]]} for sent in (raw, [raw], [[raw, []]], [[[], [raw]]])]
    for sent in (raw, *single, *around, {"rule": raw, "spans": [[0, raw]]}):
        try:
            parse_params(sent).check_length(10)
        except UsageError:
            continue


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"version": 1}, "version 1"),
        ({"mode": "guess"}, "'guess'"),
        ({"ratio": 1.5}, "1.5"),
        ({"ratio": True}, "True"),
        ({"ratio": "all"}, "'all'"),
        ({"spans": [[4, 4]]}, r"\(4, 4\)"),
        ({"spans": [[0, 5], [4, 9]]}, "starts at 4"),
        ({"mode": "ingest"}, "exactly one span"),
        ({"mode": "ingest", "spans": [[1, 5]], "around": [[[], [7]]]}, "leave out around"),
        ({"spans": [[0, 5], [5, 9]], "around": [[[1], []]]}, "1 entries for 2 spans"),
        ({"around": [[[1], []]]}, "1 entries for 0 spans"),
        ({"spans": [[0, 5]], "around": [[[1], [], []]]}, r"\(\(1,\), \(\), \(\)\)"),
        ({"spans": [[0, 5]], "around": [[[-1], []]]}, r"\(\(-1,\), \(\)\)"),
        ({"spans": [[0, 5]], "around": [[[], [1 << 32]]]}, str(1 << 32)),
        ({"spans": [[0, 5]], "around": [[[], [True]]]}, "True"),
        ({"spans": [[0, 5]], "around": [[[], [2.5]]]}, "2.5"),
        ({"spans": [[0, 5]], "around": [[[], "ids"]]}, "ids"),
        ({"spans": [[0, 5]], "around": [[3, 4]]}, r"\(3, 4\)"),
        ({"spans": [[0, 5]], "around": {"0": [[1], []]}}, "pairs of lists"),
        ({"around": [[[], []]] * (MAX_SPANS + 1)}, f"{MAX_SPANS + 1} entries"),
        ({"num_prefix": -1}, "num_prefix is -1"),
        ({"num_prefix": 1.0}, "num_prefix is 1.0"),
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
