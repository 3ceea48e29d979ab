"""`benchmarks.compare_commits`: equal requests of equal commits, differences, and times of both trees."""

import json

import pytest

from benchmarks.compare_commits import __main__ as compare_commits
from benchmarks.compare_commits.hash_requests import digest_request
from ragblend import Prompt, load_engine

pytestmark = pytest.mark.slow


def test_requests_of_one_commit_are_equal(tmp_path):
    passages = ["The harbour has a lighthouse of red bricks.", "The keeper of the lighthouse is James Bell."]
    cases = [{"question": f"Who keeps it, {name}?", "passages": passages, "answers": ["James Bell"]} for name in "abc"]
    data = tmp_path / "cases.json"
    data.write_text("\n".join(map(json.dumps, cases)))
    compare_commits.compare_requests("HEAD", "demo", str(data), tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["num_requests"] == 48
    assert result["different"] == []


def test_digest_depends_on_the_kv_and_on_the_prompt():
    chunks = ["The harbour has a lighthouse of red bricks.", "The keeper of the lighthouse is James Bell."]
    with load_engine("demo", on_miss="inline") as engine:
        prompt = Prompt(chunks, "Who is the keeper?")
        engine.generate(prompt, max_tokens=1)
        requests = [(prompt, "full"), (prompt, "full"), (prompt, "reuse"), (Prompt(chunks, "Who?"), "full")]
        full, again, reused, other = [digest_request(engine, asked, mode=mode) for asked, mode in requests]
    assert full == again
    assert len({full, reused, other}) == 3


def test_different_requests_are_an_error(monkeypatch, tmp_path):
    digests = iter([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}])
    monkeypatch.setattr(compare_commits, "run_json", lambda *arguments: next(digests))
    with pytest.raises(SystemExit, match="1 of 2 requests differ"):
        compare_commits.compare_requests("HEAD", out=tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["different"] == ["b"]


def test_times_of_documents_are_compared_step_by_step(tmp_path):
    compare_commits.compare_documents("HEAD", 1000, 1, tmp_path / "out.json")
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert set(steps) == {"add", "replace", "match", "add and match", "remove", "open"}
    assert all(step["ratio"] == step["here"] / step["base"] for step in steps.values())


def test_each_step_of_a_request_is_timed_in_both_trees(tmp_path, monkeypatch):
    monkeypatch.setitem(compare_commits.time_requests.STEPS, "transformers", ("reuse auto", "ingest neutral"))
    compare_commits.compare_times("HEAD", 1, out=tmp_path / "out.json")
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert list(steps) == ["reuse auto", "ingest neutral"]
    assert all(step["base"] > 0 and step["here"] > 0 for step in steps.values())
