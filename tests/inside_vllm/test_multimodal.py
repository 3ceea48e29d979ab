"""Multimodal classes: prompts of text are blended by the decoder inside, others are left to vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module", params=["gemma3", "qwen3"])
def answers(request, tmp_path_factory):
    """What `pictured.py` prints."""
    program, path = Path(__file__).with_name("pictured.py"), tmp_path_factory.mktemp(request.param)
    places = os.pathsep.join([str(TESTS), str(Path(sys.prefix) / "torchvision"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(program), str(path), request.param]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def distance(scores: dict[str, float], others: dict[str, float]) -> float:
    """The largest difference of log-probabilities."""
    return max(abs(scores[each] - others[each]) for each in scores.keys() & others.keys())


def test_text_is_blended_as_by_the_decoder_in_its_text_class(answers):
    full, reuse, *_, everything = answers["served"][: len(answers["scores"])]
    assert everything == full == answers["plain"][0] != reuse
    for found, expected in zip(answers["scores"], answers["decoder"], strict=True):
        assert distance(found, expected) < 1e-3
    exact, *between = answers["scores"][0], *answers["scores"][2:4]
    assert min(distance(each, exact) for each in between) > 0.01
    assert [each["num_chunk_hits"] for each in answers["reports"]] == [0, 2, 2, 2, 2]


def test_images_and_embeddings_are_left_to_vllm_and_counted(answers):
    assert answers["served"][-2:] == answers["plain"][1:]
    assert answers["left"] == [None, None]
    assert answers["counts"] == {"left_requests|multimodal": 2, "left_requests|embeddings": 2}


def test_images_reuse_nothing_even_if_their_request_asks_for_it(answers):
    for (found, report), expected, reason in zip(
        answers["asked"], answers["plain"][1:], ("images", "embeddings"), strict=True
    ):
        assert found == expected
        assert reason in report["refused_reason"]
        assert report["num_reused_tokens"] == 0
