"""What a vLLM request and its answer carry. Needs no vLLM."""

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
    report_from_params,
    report_to_json,
)
from ragblend.errors import UsageError

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_parameters_survive_json():
    asked = BlendParams("blend", "random", 0.2, refine_ratio=0.3, namespace="team", seed=4)
    behind = BlendParams("ingest", span=(3, 9))
    selected = BlendParams(rule="cacheblend", check_layers=[1, 8], recompute_ratios=[0.2, 0.1], blend_min_tokens=256)
    for params in (asked, behind, selected):
        assert parse_params(json.loads(json.dumps(params.as_dict()))[PARAMS_KEY]) == params
    assert parse_params({}) == BlendParams()
    assert parse_params({"ratio": "auto"}).ratio == "auto"


def test_a_report_survives_json_and_newer_fields():
    chunks = [ChunkReport("", 5, True, "exact", kv_dtype="int8"), ChunkReport("", 4, False)]
    report = BlendReport("blend", "cacheblend", 0.15, chunks=chunks, num_reused_tokens=7)
    sent = json.loads(json.dumps({PARAMS_KEY: {**report_to_json(report), "from_the_future": 1}}))
    for chunk in sent[PARAMS_KEY]["chunks"]:
        chunk["from_the_future"] = [2]
    assert report_from_params(sent) == report
    older = report_to_json(report)
    for name in ("failed", "chunks", "recompute_ratio"):
        older.pop(name, None)
    assert report_from_params({PARAMS_KEY: older}) == replace(report, chunks=[], recompute_ratio=0.0)
    for change in ({"version": 2}, {"mode": "ingest"}, {"chunks": 3}, {"chunks": [3]}):
        assert report_from_params({PARAMS_KEY: {**report_to_json(report), **change}}) is None
    for other in (None, {}, {PARAMS_KEY: 3}):
        assert report_from_params(other) is None


@given(raw=anything)
def test_whatever_a_client_sends_is_a_usage_error_at_worst(raw):
    single = [{name: raw} for name in ("span", "mode", "ratio", "rule", "namespace", "seed", "version")]
    spans = [{"mode": "ingest", "span": sent} for sent in (raw, [raw], [0, raw], [0, 5, raw])]
    for sent in (raw, *single, *spans, {"rule": raw, "span": [0, raw]}):
        try:
            parse_params(sent).check_tokens_after_span(10)
        except UsageError:
            continue


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"version": 2}, "parameters is 2, but this server reads 1"),
        ({"mode": "guess"}, "'guess'"),
        ({"ratio": 1.5}, "1.5"),
        ({"ratio": True}, "True"),
        ({"ratio": "all"}, "'all'"),
        ({"span": [0, 5]}, "leave it out"),
        ({"mode": "ingest", "span": [4, 4]}, r"\(4, 4\)"),
        ({"mode": "ingest", "span": [8, 4]}, r"\(8, 4\)"),
        ({"mode": "ingest", "span": [-1, 4]}, r"\(-1, 4\)"),
        ({"mode": "ingest", "span": "all"}, "'all'"),
        ({"mode": "ingest", "span": [0, 5, 9]}, r"\(0, 5, 9\)"),
        ({"mode": "ingest", "span": [0, True]}, "True"),
        ({"mode": "ingest", "span": {"0": 5}}, "0 <= start < end"),
        ({"mode": "ingest", "span": [[1, 3], [4, 6]]}, "0 <= start < end"),
        ({"mode": "ingest"}, "span is None"),
        ({"mode": "ingest", "span": [1, 3], "context": "neutral"}, "unknown ragblend parameters: 'context'"),
        ({"around": [[[1], []]]}, "unknown ragblend parameters: 'around'"),
        ({"key": "abc"}, "key"),
    ],
)
def test_an_error_names_what_is_wrong(raw, named):
    with pytest.raises(UsageError, match=named):
        parse_params(raw)


def test_a_span_must_fit_the_prompt():
    with pytest.raises(UsageError, match="ends at 12"):
        BlendParams("ingest", span=(2, 12)).check_tokens_after_span(11)
    with pytest.raises(UsageError, match="after the span"):
        BlendParams("ingest", span=(2, 12)).check_tokens_after_span(12)
