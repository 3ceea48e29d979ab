"""Answers and hits of three stock OpenAI clients of `ragblend serve`, compared with those of the local engine.

    pip install langchain-openai llama-index-llms-openai-like
    python -m benchmarks.stock_clients --model models/smollm2 --server-python .venv-vllm/bin/python \\
        --out data/results/stock-clients.json

The passages of MuSiQue questions go to the server's documents API. Each question is then asked over its passages at
temperature 0 by the openai package, by `ChatOpenAI` in a LangChain chain and by LlamaIndex' `OpenAILike`; these
clients do not use ragblend. The reference is ragblend's engine in this process over a copy of the server's store, with
the defaults of both. vLLM's prefix cache is emptied before each request, so that all clients start from the same state.
Read `compare` first.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import httpx
import torch
import typer

from benchmarks.results import ModelOption, OutOption, ServerPython, write_result
from benchmarks.servers import ServerProcess, free_port
from ragblend import Prompt, load_engine
from ragblend.chunker import split
from ragblend.corpus.documents import Document
from ragblend.errors import RagblendError
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.quality.data import load_cases
from ragblend.lab.quality.tasks import SYSTEM

ANSWER_TOKENS = 16
TEMPLATE = "{context}\n\n" + SYSTEM + "\n\n{question}"
Ask = Callable[[str, str], str]
"""Function from a context and a question to the answer."""


def openai_package(url: str, model: str, http: httpx.Client) -> Ask:
    """Return the openai package's client."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", http_client=http)

    def ask(context: str, question: str) -> str:
        content = TEMPLATE.format(context=context, question=question)
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=ANSWER_TOKENS
        )
        return answer.choices[0].message.content or ""

    return ask


def langchain_chain(url: str, model: str, http: httpx.Client) -> Ask:
    """Return a LangChain chain with `ChatOpenAI`."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    settings: dict[str, Any] = {"base_url": url, "api_key": "none", "model": model, "http_client": http}
    llm = ChatOpenAI(**settings, temperature=0, max_tokens=ANSWER_TOKENS)
    chain = ChatPromptTemplate.from_messages([("user", TEMPLATE)]) | llm | StrOutputParser()
    return lambda context, question: chain.invoke({"context": context, "question": question})


def llamaindex_model(url: str, model: str, http: httpx.Client) -> Ask:
    """Return LlamaIndex' `OpenAILike`."""
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        api_base=url,
        api_key="none",
        model=model,
        http_client=http,
        is_chat_model=True,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
    )
    template = PromptTemplate(TEMPLATE)
    return lambda context, question: llm.predict(template, context=context, question=question)


CLIENTS: Mapping[str, Callable[[str, str, httpx.Client], Ask]] = {
    "openai": openai_package,
    "langchain": langchain_chain,
    "llamaindex": llamaindex_model,
}


class Questions:
    """Questions with their passages, each passage cut to one chunk."""

    def __init__(self, model: str, count: int, num_chunks: int) -> None:
        from ragblend.engine.transformers.model import load_tokenizer
        from ragblend.prompt.render import Renderer

        config = QualityConfig(model=model, data="musique", part="all", num_questions=count)
        tokens = Renderer(load_tokenizer(model)[0]).count_tokens
        self.asked = [
            (
                [split(Document(text), tokens, config.chunk_tokens)[0].text for text in case.passages[:num_chunks]],
                case.question,
            )
            for case in load_cases(config)
        ]

    @property
    def documents(self) -> list[dict[str, Any]]:
        """Return the passages as documents of the server's API, one document per question."""
        return [{"id": f"question-{number}", "chunks": chunks} for number, (chunks, _) in enumerate(self.asked)]


@contextmanager
def served(python: str, model: str, home: Path, *flags: str) -> Iterator[str]:
    """Run `ragblend serve` over an empty store in `home`/kv. Yield its URL.

    python: interpreter of an environment with vLLM. flags: further options of the server. Raises
    BackendUnreachableError if the server does not start.
    """
    port = free_port()
    interpreter = str(Path(shutil.which(python) or python).absolute())  # the server runs in `home`
    command = [interpreter, "-m", "ragblend", "serve", str(Path(model).absolute()), "--store", str(home / "kv")]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(1 << 30), "--served-model-name", "model", *flags]
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment = {"PYTHONPATH": str(Path.cwd()), **os.environ, **own}
    server = ServerProcess(command, f"http://127.0.0.1:{port}", home, environment)
    server.start()
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def ingest(url: str, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Send the documents, wait until they are stored, and return the server's counts.

    Raises RagblendError if the server could not store all of them.
    """
    path = f"{url}/v1/ragblend/documents"
    sent = httpx.post(path, json={"collection": "musique", "documents": documents}, timeout=60).raise_for_status()
    while True:
        summary = httpx.get(path, params={"ingestion": sent.json()["ingestion"]}, timeout=60).raise_for_status().json()
        (counts,) = summary["collections"].values()
        if failed := [each for each in summary["reasons"] if each["status"] == "failed"]:
            raise RagblendError(f"the server did not store all passages: {failed[0]}")
        if not counts["num_waiting"]:
            return dict(counts)
        time.sleep(0.5)


def compare(url: str, model: str, store: Path, questions: Questions) -> list[dict[str, Any]]:
    """Return a record for each question: the local engine's answer and hits, and each client's."""
    reports: list[dict[str, Any]] = []

    def keep_report(response: httpx.Response) -> None:
        response.read()
        reports.append((response.json().get("kv_transfer_params") or {}).get("ragblend") or {})

    found = []
    with (
        httpx.Client(event_hooks={"response": [keep_report]}, timeout=600) as http,
        load_engine(model, store, dtype="float32", on_miss="inline") as engine,
    ):
        clients = {name: make(f"{url}/v1", "model", http) for name, make in CLIENTS.items()}
        for chunks, question in questions.asked:
            context = "\n\n".join(chunks)
            prompt = Prompt.from_messages([("user", TEMPLATE.format(context=context, question=question))])
            local = engine.generate(prompt, max_tokens=ANSWER_TOKENS)
            record: dict[str, Any] = {"question": question, "prompt_tokens": local.report.prompt_tokens}
            record["local"] = {"answer": local.text.strip(), "hits": local.report.num_chunk_hits}
            for name, ask in clients.items():
                httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
                start_s = perf_counter()
                answer = ask(context, question).strip()
                record[name] = {
                    "answer": answer,
                    "hits": reports[-1].get("num_chunk_hits"),
                    "s": perf_counter() - start_s,
                }
                record[name]["is_equal"] = all(
                    record[name][each] == record["local"][each] for each in ("answer", "hits")
                )
            found.append(record)
            print(len(found), {name: record[name]["is_equal"] for name in CLIENTS}, record["local"], flush=True)
    return found


def main(
    model: ModelOption,
    server_python: ServerPython,
    num_questions: Annotated[int, typer.Option("--questions", help="Number of MuSiQue questions.")] = 50,
    num_chunks: Annotated[int, typer.Option("--num-chunks", help="Passages per question.")] = 6,
    out: OutOption = None,
) -> None:
    """Ingest passages into a server, compare the clients' answers with the local engine's, and write JSON."""
    torch.set_num_threads(1)
    questions = Questions(model, num_questions, num_chunks)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with served(server_python, model, home) as url:
            counts = ingest(url, questions.documents)
            print(counts, flush=True)
            shutil.copytree(home / "kv", home / "copy")
            found = compare(url, model, home / "copy", questions)
    equal = {name: sum(record[name]["is_equal"] for record in found) for name in CLIENTS}
    facts = {
        "command": "benchmarks.stock_clients",
        "model": Path(model).name,
        "num_questions": len(found),
        "num_chunks": num_chunks,
        "ingested": counts,
        "equal": equal,
        "equal_of_all": f"{sum(equal.values())} of {len(found) * len(CLIENTS)}",
        "questions": found,
    }
    print(json.dumps({name: facts[name] for name in ("equal", "equal_of_all")}))
    write_result(facts, out)


if __name__ == "__main__":
    typer.run(main)
