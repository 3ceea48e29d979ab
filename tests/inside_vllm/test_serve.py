"""`ragblend serve` with vLLM's own server, processes and HTTP. Every kind of client gets the same answer."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import machine
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from openai import AuthenticationError, OpenAI
from pages import PAGES, blocks, run_python
from served import make_known, served_demo
from servers import REDIS_BINARY, running_redis

from ragblend import Prompt, load_engine
from ragblend.engine.fusion.rules import DEFAULT_RATIO
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.tuning.calibration import Calibration, CurvePoint, RuleFit, save_calibration
from ragblend.engine.tuning.machine import vllm_machine_facts, write_profile
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.errors import RagblendError
from ragblend.llamaindex import BlendLLM as LlamaIndexLLM
from ragblend.llm import BlendLLM
from ragblend.precompute import precompute_documents

pytestmark = pytest.mark.smoke

A, B = (
    "George Keller lives in Kinport. Julia Bishop works for Synon.",
    "The company has its main office in Wesstad. The firm sells knives.",
)
QUESTION = "Where does George Keller live?"
PROMPT = Prompt([A, B], QUESTION)
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis behind the server's store; "" where there is none to start."""
    if REDIS_BINARY is None or importlib.util.find_spec("redis") is None:
        yield ""
    else:
        for server in running_redis(tmp_path_factory.mktemp("redis")):
            yield server.url


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's working folder, with its store in `kv`."""
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def url(remote: str, home: Path) -> Iterator[str]:
    """A server over an empty store, for this module."""
    own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "RAGBLEND_API_KEY": KEY}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        write_profile(home / "kv", machine(find_checkpoint("demo"), 0.8, vllm_machine_facts(None)))
    with served_demo(
        home,
        "--max-model-len",
        "1024",
        "--enable-prompt-tokens-details",
        *(("--remote", remote) if remote else ()),
        **own,
    ) as server:
        yield server.url


@pytest.fixture(scope="module")
def engine(url: str) -> Iterator[Any]:
    """Our client, with both chunks ingested through it."""
    with load_engine("demo", backend=url, api_key=KEY) as engine:
        report = precompute_documents([A, B], engine, ids=["a.txt", "b.txt"])
        assert report.num_new_kv == 2
        yield engine


@pytest.fixture(scope="module")
def openai(url: str, engine: Any) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    found = (re.match(r"(vllm:\w+)\{[^}]*\} (\S+)$", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


def test_our_client_gets_the_answer_from_stored_chunks(engine: Any) -> None:
    for mode, hits in (("full", 0), ("reuse", 2), ("blend", 2)):
        answer = engine.generate(PROMPT, mode=mode, max_tokens=8)
        assert (answer.text, answer.report.num_chunk_hits, answer.report.mode) == ("Kinport", hits, mode)
    assert [chunk.source for chunk in answer.report.chunks] == ["a.txt", "b.txt"]
    assert 0 < answer.report.num_recomputed_tokens < answer.report.num_reused_tokens
    assert answer.report.num_reused_tokens < answer.report.prompt_tokens


def test_chunks_behind_labels_and_parts_of_them_are_reused(engine: Any) -> None:
    prompt = Prompt.from_messages([("user", f"[1] {A}\n\n(2) {B.partition(' ')[2]}\n\n{QUESTION}")])
    full, whole = (engine.generate(prompt, max_tokens=8, **how) for how in ({"mode": "full"}, {"recompute_ratio": 1.0}))
    assert whole.token_ids == full.token_ids
    assert (full.report.num_chunk_hits, whole.report.num_chunk_hits) == (0, 2)
    reused = engine.generate(prompt, mode="reuse", max_tokens=8).report
    assert [(chunk.hit, chunk.exact, chunk.num_recomputed_tokens) for chunk in reused.chunks] == [(True, False, 0)] * 2


def test_an_answer_that_a_stop_string_ended_has_its_report(engine: Any) -> None:
    stopped, whole = (engine.generate(PROMPT, max_tokens=8, stop=stop) for stop in (["port"], None))
    assert stopped.text == "Kin"
    for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "charged_budget"):
        assert getattr(stopped.report, name) == getattr(whole.report, name) > 0, name
    batch = [engine.generate(PROMPT, max_tokens=8, mode="full", stop=["port"]).report for _ in range(2)]
    assert [report.num_chunk_hits for report in batch] == [0, 0]


def test_the_transformers_engine_and_the_server_agree(engine: Any, home: Path) -> None:
    store = home / "kv"
    with load_engine("demo", store, on_miss="inline") as reference:
        assert reference.fingerprint == engine.fingerprint
        assert reference.is_stored(A)
        ours, theirs = (each.generate(PROMPT, max_tokens=8) for each in (engine, reference))
        assert ours.token_ids == theirs.token_ids
        assert ours.report.num_chunk_hits == theirs.report.num_chunk_hits == 2
        assert ours.report.num_recomputed_tokens == theirs.report.num_recomputed_tokens


def test_what_the_server_ingested_another_machine_gets_from_redis(
    engine: Any, remote: str, home: Path, tmp_path: Path
) -> None:
    if not remote:
        pytest.skip("no redis-server, or no redis-py: apt-get install redis-server; pip install 'ragblend[redis]'")
    with load_engine("demo", tmp_path / "kv", remote=remote, remote_timeout_s=60, on_miss="inline") as elsewhere:
        end_s = time.monotonic() + 60
        while not elsewhere.is_stored(B) and time.monotonic() < end_s:
            time.sleep(0.1)  # it is sent in the background
        theirs = elsewhere.generate(PROMPT, rule="cacheblend_k", max_tokens=8)
        assert theirs.report.num_chunk_hits == 2
        assert theirs.token_ids == engine.generate(PROMPT, rule="cacheblend_k", max_tokens=8).token_ids
        new = "Arthur Archer lives in Calville. He sells knives."
        elsewhere.precompute(new)
        elsewhere.store.flush(60)
    make_known(home / "kv", engine.renderer, [new])
    answer = engine.generate(Prompt([new, A], QUESTION), max_tokens=8)
    assert answer.report.num_chunk_hits == 2


def test_the_server_takes_the_ratio_from_the_calibration_in_its_store(engine: Any, home: Path) -> None:
    store = home / "kv"
    points = tuple(CurvePoint(ratio, ratio, 0.9, 0.8, 1.0, 0.1, ratio) for ratio in (0.0, 1.0))
    fit = RuleFit("cacheblend_k", 1, 0.4, True, points)
    facts = (engine.fingerprint, engine.renderer.prefix_ids(), "112 tokens", 1e9, 0.9, 60, "k 2")
    before = engine.generate(PROMPT, max_tokens=1).report
    path = save_calibration(DiskStore(store), Calibration(*facts, (fit,)))
    found = [engine.generate(PROMPT, recompute_ratio=ratio, max_tokens=8) for ratio in (None, "auto", 0.2)]
    path.unlink()
    assert (before.recompute_ratio, before.predicted_agreement) == (DEFAULT_RATIO, None)
    assert [answer.report.recompute_ratio for answer in found] == [0.4, 0.4, 0.2]
    assert [answer.report.predicted_agreement for answer in found] == [0.9, 0.9, 0.9]
    assert {answer.text for answer in found} == {"Kinport"}


def test_the_server_follows_the_profile_in_its_store(engine: Any, home: Path) -> None:
    """The profile says that loading takes 0.8 of the time of prefill; what the server ingested itself is in memory."""
    store = home / "kv"
    places = ("Wesstad", "Calville")
    chunks = [f"Tom Ashby has lived in {place} for years, and works for Synon. " * 6 for place in places]
    with load_engine("demo", store, on_miss="inline") as elsewhere:  # on the server's disk, and not in its memory
        precompute_documents(chunks, elsewhere)

    def ratio(chunk: str) -> float:
        prompt = Prompt([chunk], QUESTION)
        report = engine.generate(prompt, rule="cacheblend", max_tokens=1).report  # hides loading; `ask` does not
        assert report.num_chunk_hits == 1
        return report.recompute_ratio

    assert ratio(chunks[0]) > 0.5
    assert ratio(chunks[0]) == DEFAULT_RATIO
    assert ratio(chunks[1]) > 0.5


def test_a_stuff_documents_chain_gets_the_same(engine: Any, url: str) -> None:
    llm = BlendLLM(backend=url, api_key=KEY, max_tokens=8)
    chain = create_stuff_documents_chain(llm, ChatPromptTemplate.from_template("{context}\n\n{question}"))
    assert chain.invoke({"context": [Document(A), Document(B)], "question": QUESTION}) == "Kinport"
    prompt = f"{A}\n\n{B}\n\n{QUESTION}"
    report = llm.generate([prompt]).generations[0][0].generation_info["ragblend"]  # type: ignore[index]
    assert (report["num_chunk_hits"], report["num_chunks"]) == (2, 2)


def test_llamaindex_gets_the_same(engine: Any, url: str) -> None:
    llm = LlamaIndexLLM(backend=url, api_key=KEY, max_tokens=8)
    response = llm.complete(f"{A}\n\n{B}\n\n{QUESTION}")
    assert (response.text, response.raw["ragblend"]["num_chunk_hits"]) == ("Kinport", 2)


MESSAGES: Any = [{"role": "user", "content": f"{A}\n\n{B}\n\n{QUESTION}"}]


def test_the_openai_client_gets_the_same_on_every_route(engine: Any, openai: OpenAI, url: str) -> None:
    """Without a parameter of ours; the server knows the chunks."""
    ours = engine.generate(PROMPT, max_tokens=8)
    chat = openai.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8, temperature=0)
    assert (chat.choices[0].message.content or "").strip() == ours.text
    ids = engine.renderer.render(PROMPT)
    completion = openai.completions.create(model="demo", prompt=ids, max_tokens=8, temperature=0)
    assert completion.choices[0].text.strip() == ours.text
    for answer in (chat, completion):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == ours.report.prompt_tokens
        report = (answer.model_extra or {})["kv_transfer_params"]["ragblend"]
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == report["num_reused_tokens"]
        for name in ("mode", "num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "rule", "charged_budget"):
            assert report[name] == getattr(ours.report, name), name
    before = metrics(url)["vllm:ragblend_requests_total"]
    response = openai.responses.create(model="demo", input=MESSAGES, max_output_tokens=8, temperature=0)
    assert response.output_text.strip() == ours.text
    assert metrics(url)["vllm:ragblend_requests_total"] == before + 1


def test_an_openai_request_says_what_it_wishes(openai: OpenAI) -> None:
    for wish, hits in (({"mode": "full"}, 0), ({"mode": "reuse"}, 2), ({"rule": "random", "ratio": 0.5}, 2)):
        answer = openai.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=8, temperature=0,
            extra_body={"kv_transfer_params": {"ragblend": wish}},
        )  # fmt: skip
        report = (answer.model_extra or {})["kv_transfer_params"]["ragblend"]
        assert (report["mode"], report["num_chunk_hits"]) == (wish.get("mode", "blend"), hits)
        assert report["recompute_ratio"] == wish.get("ratio", float(wish.get("mode") == "full"))


def test_the_openai_client_streams_as_ever_and_with_the_report_where_it_asks(openai: OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "stream": True}
    # A stream without ragblend's parameters has no additional event: every event must have `choices[0]`.
    stream = openai.chat.completions.create(**asked)
    assert "".join(event.choices[0].delta.content or "" for event in stream).strip() == "Kinport"
    *said, last = openai.chat.completions.create(**asked, extra_body={"kv_transfer_params": {"ragblend": {}}})
    assert "".join(event.choices[0].delta.content or "" for event in said).strip() == "Kinport"
    report = (last.model_extra or {})["kv_transfer_params"]["ragblend"]
    assert (last.choices, report["mode"], report["num_chunk_hits"]) == ([], "blend", 2)


def test_a_prompt_without_stored_chunks_gets_ordinary_vllm(openai: OpenAI, url: str) -> None:
    before = metrics(url)["vllm:ragblend_requests_total"]
    answer = openai.completions.create(model="demo", prompt=f"Once upon a time. {QUESTION}", max_tokens=8)
    assert answer.choices[0].text
    assert (answer.model_extra or {}).get("kv_transfer_params") is None
    assert metrics(url)["vllm:ragblend_requests_total"] == before
    assert metrics(url)["vllm:ragblend_left_requests_total"] > 0


def test_many_at_once_get_what_one_alone_gets(engine: Any) -> None:
    prompts = [Prompt(list(chunks), QUESTION) for chunks in ((A, B), (B, A), (A,), (B,))] * 4
    alone = [engine.generate(prompt, max_tokens=8).token_ids for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: engine.generate(prompt, max_tokens=8).token_ids, prompts)) == alone


def test_a_client_that_hangs_up_frees_its_blocks(engine: Any, url: str) -> None:
    stream = engine.stream(PROMPT, max_tokens=900)
    body = engine.request_body(stream._prompt, stream._options) | {"ignore_eos": True}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}
    ) as response:
        next(response.iter_lines())
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        now = metrics(url)
        if now["vllm:num_requests_running"] == 0 and now["vllm:kv_cache_usage_perc"] == 0:
            break
        time.sleep(0.2)
    assert (now["vllm:num_requests_running"], now["vllm:kv_cache_usage_perc"]) == (0, 0)
    assert engine.generate(PROMPT, max_tokens=8).text == "Kinport"


def test_metrics_count_hits_and_misses(engine: Any, url: str, home: Path) -> None:
    before = metrics(url)
    engine.generate(PROMPT, max_tokens=1)
    new, gone = "Ben Howard works for Xanco. He lives in Calville.", "Tom Ashby works for Synon. He lives in Norwick."
    make_known(home / "kv", engine.renderer, [gone])  # as if its KV had been evicted
    engine.generate(Prompt.from_messages([("user", f"{A}\n\n{gone}\n\n{QUESTION}")]), max_tokens=1)
    engine.generate(Prompt([A, new], QUESTION), max_tokens=1)
    engine.wait_for_precompute()
    assert engine.is_stored(new)  # what the prompt named was ingested in the background
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        now = metrics(url)
        grown = {name: now[name] - before[name] for name in now if "ragblend" in name and name.endswith("_total")}
        if grown["vllm:ragblend_ingested_chunks_total"] == 1 and grown["vllm:ragblend_chunk_hits_total"] == 4:
            break
        time.sleep(0.2)
    assert grown["vllm:ragblend_chunk_hits_total"] == 4
    assert grown["vllm:ragblend_chunk_misses_total"] == 1
    assert grown["vllm:ragblend_reused_tokens_total"] > 0
    assert grown["vllm:ragblend_fuse_seconds_total"] > 0
    for name in ("ttft", "load", "fuse", "stall"):
        assert now[f"vllm:ragblend_request_{name}_seconds_count"] > 0
    assert "vllm:ragblend_store_bytes" in now  # the disk's, as its files were last listed
    assert now["vllm:ragblend_tier_hits_total"] > 0
    assert now["vllm:ragblend_blend_queue"] == 0


def test_without_the_key_nothing_is_told(url: str, engine: Any) -> None:
    with pytest.raises(RagblendError, match="RAGBLEND_API_KEY"):
        load_engine("demo", backend=url, api_key="wrong")
    for method, path in (("GET", ""), ("GET", "/documents"), ("DELETE", "/documents")):
        assert httpx.request(method, f"{url}/v1/ragblend{path}").status_code == 401
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_the_readmes_client_gets_the_chunks_that_its_curl_sent(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    readme = PAGES["README.md"]
    (sent,) = re.findall(r"curl localhost:8000(\S+) \\\n +-d '(.*?)'\n", readme)
    headers = {"Authorization": f"Bearer {KEY}"}
    asked = httpx.post(f"{url}{sent[0]}", content=sent[1], headers=headers).raise_for_status().json()
    summary: dict[str, Any] = {}
    while not summary or any(each["num_waiting"] for each in summary["collections"].values()):
        summary = httpx.get(f"{url}{sent[0]}?ingestion={asked['ingestion']}", headers=headers).json()
    assert summary["reasons"] == []
    (program,) = (block.text for block in blocks("python") if "from openai" in block.text and block.page == "README.md")
    for word, other in {"http://localhost:8000": url, '"none"': f'"{KEY}"', "Qwen/Qwen3-0.6B": "demo"}.items():
        assert word in program
        program = program.replace(word, other)
    names: dict[str, Any] = {}
    exec(program, names)
    report = names["answer"].model_extra["kv_transfer_params"]["ragblend"]
    assert (report["mode"], report["num_chunk_hits"]) == ("blend", 1)
    assert "num_chunk_hits" in capsys.readouterr().out


def test_the_programs_of_the_page_run(
    url: str, openai: OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/vllm.md: a chain over the server, an engine in this process, an OpenAI client."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "documents": [Document(A), Document(B)],
        "chunks": [A, B],
        "text": A,
        "prompt": ChatPromptTemplate.from_template("{context}\n\n{question}"),
        "create_stuff_documents_chain": create_stuff_documents_chain,
        "client": openai,
        "MODEL": "demo",
    }
    # This server's key is not three dots.
    stands_in = {"http://localhost:8000": url, 'api_key="..."': f'api_key="{KEY}"'}
    run_python("docs/vllm.md", names, stands_in)
    assert names["chain"].invoke({"context": names["documents"], "question": QUESTION}).strip()
    names["llm"].engine.close()
    assert names["answer"].model_extra["kv_transfer_params"]["ragblend"]["num_chunks"] >= 2
