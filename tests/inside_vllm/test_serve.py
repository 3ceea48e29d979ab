"""`ragblend serve` with vLLM's own server, processes and HTTP. Every kind of client gets the same answer."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import pytest
from demo_texts import QUESTION, A, B
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from openai import AuthenticationError, OpenAI
from pages import PAGES, blocks, run_python
from served import make_known, metrics, served_demo
from servers import wait_until

from ragblend import Prompt, load_engine
from ragblend.errors import RagblendError
from ragblend.llamaindex import BlendLLM as LlamaIndexLLM
from ragblend.llm import BlendLLM
from ragblend.precompute import precompute_documents

pytestmark = pytest.mark.smoke

PROMPT = Prompt([A, B], QUESTION)
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The server's working folder, with its store in `kv`."""
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def url(home):
    """A server over an empty store, for this module."""
    with served_demo(home, "--max-model-len", "1024", RAGBLEND_API_KEY=KEY) as server:
        yield server.url


@pytest.fixture(scope="module")
def engine(url):
    """Our client, with both chunks ingested through it."""
    with load_engine("demo", backend=url, api_key=KEY) as engine:
        report = precompute_documents([A, B], engine, ids=["a.txt", "b.txt"])
        assert report.num_new_kv == 2
        yield engine


@pytest.fixture(scope="module")
def openai(url, engine):
    return OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def test_our_client_gets_the_answer_from_stored_chunks(engine):
    for mode, hits in (("full", 0), ("reuse", 2), ("blend", 2)):
        answer = engine.generate(PROMPT, mode=mode, max_tokens=8)
        assert (answer.text, answer.report.num_chunk_hits, answer.report.mode) == ("Kinport", hits, mode)
    assert [chunk.source for chunk in answer.report.chunks] == ["a.txt", "b.txt"]
    assert 0 < answer.report.num_recomputed_tokens < answer.report.num_reused_tokens
    assert answer.report.num_reused_tokens < answer.report.prompt_tokens


def test_chunks_behind_labels_and_parts_of_them_are_reused(engine):
    prompt = Prompt.from_messages([("user", f"[1] {A}\n\n(2) {B.partition(' ')[2]}\n\n{QUESTION}")])
    full, whole = (engine.generate(prompt, max_tokens=8, **how) for how in ({"mode": "full"}, {"recompute_ratio": 1.0}))
    assert whole.token_ids == full.token_ids
    assert (full.report.num_chunk_hits, whole.report.num_chunk_hits) == (0, 2)
    reused = engine.generate(prompt, mode="reuse", max_tokens=8).report
    assert [(chunk.hit, chunk.exact, chunk.num_recomputed_tokens) for chunk in reused.chunks] == [(True, False, 0)] * 2


def test_an_answer_that_a_stop_string_ended_has_its_report(engine):
    stopped, whole = (engine.generate(PROMPT, max_tokens=8, stop=stop) for stop in (["port"], None))
    assert stopped.text == "Kin"
    for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "charged_budget"):
        assert getattr(stopped.report, name) == getattr(whole.report, name), name
    assert stopped.report.num_chunk_hits == 2
    batch = [engine.generate(PROMPT, max_tokens=8, mode="full", stop=["port"]).report for _ in range(2)]
    assert [report.num_chunk_hits for report in batch] == [0, 0]


def test_a_stuff_documents_chain_gets_the_same(engine, url):
    llm = BlendLLM(backend=url, api_key=KEY, max_tokens=8)
    chain = create_stuff_documents_chain(llm, ChatPromptTemplate.from_template("{context}\n\n{question}"))
    assert chain.invoke({"context": [Document(A), Document(B)], "question": QUESTION}) == "Kinport"
    prompt = f"{A}\n\n{B}\n\n{QUESTION}"
    report = llm.generate([prompt]).generations[0][0].generation_info["ragblend"]
    assert (report["num_chunk_hits"], report["num_chunks"]) == (2, 2)


def test_llamaindex_gets_the_same(engine, url):
    llm = LlamaIndexLLM(backend=url, api_key=KEY, max_tokens=8)
    response = llm.complete(f"{A}\n\n{B}\n\n{QUESTION}")
    assert (response.text, response.raw["ragblend"]["num_chunk_hits"]) == ("Kinport", 2)


MESSAGES: Any = [{"role": "user", "content": f"{A}\n\n{B}\n\n{QUESTION}"}]


def test_the_openai_client_gets_the_same_on_every_route(engine, openai, url):
    """Without a parameter of ours; the server knows the chunks."""
    engine.generate(PROMPT, max_tokens=8)  # later requests find the first tokens of its prompt in vLLM's prefix cache
    ours = engine.generate(PROMPT, max_tokens=8)
    chat = openai.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8, temperature=0)
    assert (chat.choices[0].message.content or "").strip() == ours.text
    ids = engine.renderer.render(PROMPT)
    completion = openai.completions.create(model="demo", prompt=ids, max_tokens=8, temperature=0)
    assert completion.choices[0].text.strip() == ours.text
    for answer in (chat, completion):
        assert answer.usage.prompt_tokens == ours.report.prompt_tokens
        report = (answer.model_extra or {})["kv_transfer_params"]["ragblend"]
        assert answer.usage.prompt_tokens_details.cached_tokens == report["num_reused_tokens"]
        for name in ("mode", "num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "rule", "charged_budget"):
            assert report[name] == getattr(ours.report, name), name
    before = metrics(url)["vllm:ragblend_requests_total"]
    response = openai.responses.create(model="demo", input=MESSAGES, max_output_tokens=8, temperature=0)
    assert response.output_text.strip() == ours.text
    assert metrics(url)["vllm:ragblend_requests_total"] == before + 1


@pytest.mark.parametrize("stop", [None, "port"])  # after a stop string vLLM drops the report
def test_cached_tokens_are_the_reused_ones_in_streams_as_well(engine, openai, url, stop):
    """Recomputed tokens are not among them, and vLLM's own counters agree."""
    reused, prompt = 0, 0
    computed = metrics(url)["vllm:prompt_tokens_total"] - metrics(url)["vllm:prompt_tokens_cached_total"]
    for seed in (10, 20) if stop else (30, 40):
        # Another seed finds none of the other's blocks.
        wish = {"kv_transfer_params": {"ragblend": {"rule": "random", "ratio": 0.3, "seed": seed}}}
        asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "extra_body": wish}
        if seed % 20:
            events = openai.chat.completions.create(
                **asked, stop=stop, stream=True, stream_options={"include_usage": True}
            )
            usages = [event.usage for event in events if event.usage]
        else:
            usages = [openai.chat.completions.create(**asked, stop=stop).usage]
        report = engine.generate(PROMPT, rule="random", recompute_ratio=0.3, seed=seed + 1, max_tokens=1).report
        assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [report.num_reused_tokens]
        assert report.num_recomputed_tokens > 0
        reused, prompt = reused + 2 * report.num_reused_tokens, prompt + 2 * usages[0].prompt_tokens
    after = metrics(url)
    assert after["vllm:prompt_tokens_total"] - after["vllm:prompt_tokens_cached_total"] - computed == prompt - reused


def test_an_openai_request_says_what_it_wishes(openai):
    for wish, hits in (({"mode": "full"}, 0), ({"mode": "reuse"}, 2), ({"rule": "random", "ratio": 0.5}, 2)):
        answer = openai.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=8, temperature=0,
            extra_body={"kv_transfer_params": {"ragblend": wish}},
        )  # fmt: skip
        report = (answer.model_extra or {})["kv_transfer_params"]["ragblend"]
        assert (report["mode"], report["num_chunk_hits"]) == (wish.get("mode", "blend"), hits)
        assert report["recompute_ratio"] == wish.get("ratio", float(wish.get("mode") == "full"))


def test_the_openai_client_streams_and_gets_the_report_on_request(openai):
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "stream": True}
    # A stream without ragblend's parameters has no additional event: every event must have `choices[0]`.
    stream = openai.chat.completions.create(**asked)
    assert "".join(event.choices[0].delta.content or "" for event in stream).strip() == "Kinport"
    *said, last = openai.chat.completions.create(**asked, extra_body={"kv_transfer_params": {"ragblend": {}}})
    assert "".join(event.choices[0].delta.content or "" for event in said).strip() == "Kinport"
    report = (last.model_extra or {})["kv_transfer_params"]["ragblend"]
    assert (last.choices, report["mode"], report["num_chunk_hits"]) == ([], "blend", 2)


def test_a_client_that_hangs_up_frees_its_blocks(engine, url):
    stream = engine.stream(PROMPT, max_tokens=900)
    body = engine.request_body(stream._prompt, stream._options) | {"ignore_eos": True}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}
    ) as response:
        next(response.iter_lines())

    def is_idle() -> bool:
        now = metrics(url)
        return now["vllm:num_requests_running"] == now["vllm:kv_cache_usage_perc"] == 0

    wait_until(is_idle, 60, "the request and its blocks are gone")
    assert engine.generate(PROMPT, max_tokens=8).text == "Kinport"


def test_metrics_count_hits_and_misses(engine, url, home):
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


def test_without_the_key_nothing_is_told(url, engine):
    with pytest.raises(RagblendError, match="RAGBLEND_API_KEY"):
        load_engine("demo", backend=url, api_key="wrong")
    for method, path in (("GET", ""), ("GET", "/documents"), ("DELETE", "/documents")):
        assert httpx.request(method, f"{url}/v1/ragblend{path}").status_code == 401
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_the_readmes_client_gets_the_chunks_that_its_curl_sent(url, capsys):
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
    assert f" {report['num_reused_tokens']} tokens reused" in capsys.readouterr().out
    assert report["num_reused_tokens"] > 0


def test_the_programs_of_the_page_run(url, openai, tmp_path, monkeypatch):
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
