"""Two data-parallel engines behind one front end, on a CPU: reports and counters are those of both together."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from served import served_demo

from ragblend import Prompt, load_engine
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.precompute import precompute_documents

pytestmark = pytest.mark.timeout(1200)
TEXTS = [f"{person} lives in Kinport. {person} works for Synon." for person in ("George Keller", "Ben Howard")]
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    options = ("--max-model-len", "2048", "--data-parallel-size", "2")
    with served_demo(tmp_path_factory.mktemp("parallel"), *options, VLLM_SERVER_DEV_MODE="1") as server:
        yield server.url


def counted(url: str, name: str) -> dict[str, float]:
    """A counter of ours by engine."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found: Counter[str] = Counter()
    for labels, value in re.findall(rf"^vllm:ragblend_{name}_total\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE):
        engine = re.search(r'engine="(\d+)"', labels)
        found[engine[1]] += float(value)
    return dict(found)


def test_reports_and_counters_of_both_engines_add_up(url):
    with load_engine("demo", backend=url) as engine:
        precompute_documents(TEXTS, engine)

        def ask(number: int) -> tuple[int, str]:
            prompt = Prompt(TEXTS, f"Where does {('George Keller', 'Ben Howard')[number % 2]} live?")
            # A stop string ends it in the front end, which asks the workers of both engines for the report.
            stop = ["port"] if number % 3 == 0 else None
            answer = engine.generate(prompt, max_tokens=4, recompute_ratio=0.5, stop=stop)
            return answer.report.num_chunk_hits, answer.report.mode

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, range(NUM_REQUESTS)))
        assert answers == [(2, "blend")] * NUM_REQUESTS
        engine.generate(Prompt(TEXTS, "Who?"), max_tokens=1)  # a step after the last counts
        found = counted(url, "requests")
        assert set(found) == {"0", "1"}
        assert min(found.values()) > 0, "both engines served"
        assert sum(found.values()) == len(TEXTS) + NUM_REQUESTS + 1
        assert sum(counted(url, "ingested_chunks").values()) == len(TEXTS)
        assert sum(counted(url, "chunk_hits").values()) >= 2 * NUM_REQUESTS


def test_an_update_of_the_weights_ends_reuse_on_both_engines(url):
    with load_engine("demo", backend=url) as engine:
        assert engine.is_stored(TEXTS[0])
        weights = {"weights_path": str(find_checkpoint("demo").path)}
        update = {"method": "reload_weights", "kwargs": weights}
        httpx.post(f"{url}/collective_rpc", json=update, timeout=300).raise_for_status()
        with ThreadPoolExecutor(6) as pool:
            asked = [Prompt(TEXTS[:1], f"Where? {number}") for number in range(8)]
            answers = list(pool.map(lambda prompt: engine.generate(prompt, max_tokens=2), asked))
        assert [answer.report.num_chunk_hits for answer in answers] == [0] * len(asked)
