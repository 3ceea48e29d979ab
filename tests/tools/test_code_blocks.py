"""Every program and every command that README.md and docs/ print does what it is printed for.

Python is executed, each page's blocks in order. Commands of ours are parsed by the command line itself;
those that a newcomer types first are executed, in test_start_page.py and tests/integration/test_readme.py.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import pytest
from pages import PAGES, ROOT, blocks, command_lines, inline_commands, run_python
from postgres import running_postgres
from typer.main import get_command

from ragblend.cli.app import app
from ragblend.demo.corpus import sample_corpus
from ragblend.lab.calibrate import min_questions

# Not executed here, and why. A test fails where a line of this is no longer needed.
ELSEWHERE = {
    "README.md": "test_readme.py executes its programs, tests/inside_vllm/test_serve.py that for a server",
    "docs/start.md": "its program needs what its commands ingest: test_start_page.py executes both, in their order",
    "docs/vllm.md": "needs vLLM and a server: tests/inside_vllm/test_serve.py executes it",
}
OTHERS_COMMANDS = {
    "docker": "images are built where Docker is; tests/deploy/test_images.py reads the Dockerfile",
    "kubectl": "needs a cluster",
    "helm": "needs a cluster; tests/deploy/test_chart.py renders the chart",
    "curl": "needs a server: its routes are in tests/inside_vllm",
    "jq": "rewrites logs; tests/lab/traffic reads what it writes",
    "zcat": "unpacks logs",
}
OF_VLLM = {"--max-model-len", "--structured-outputs-config", "--tensor-parallel-size", "--data-parallel-size"}

# Models, machines and servers that are not available here, and their substitutes.
REPLACED = {
    "Qwen/Qwen3-8B": "demo",
    "Qwen/Qwen3-0.6B": "demo",
    "models/smollm2": "demo",
    "cuda:1": "cpu",
    "redis://cache:6379/0": "file://REMOTE",
    "s3://bucket/kv": "file://REMOTE",
    "k=6, target=0.9": "k=1, target=0.5, ratios=(0.0, 1.0)",  # what a handful of questions can show
}
# Packages that a page names and no environment here has: what their documentation says of the names that it uses.
STUBS = {
    "docling/document_converter.py": """
from pathlib import Path
from types import SimpleNamespace

class DocumentConverter:
    def convert(self, source):
        return SimpleNamespace(document=SimpleNamespace(export_to_markdown=lambda: Path(source).read_text()))
""",
    "unstructured/partition/auto.py": """
from pathlib import Path
from types import SimpleNamespace

def partition(filename):
    return [SimpleNamespace(text=text) for text in Path(filename).read_text().split("\\n\\n")]
""",
    "langchain_community/document_loaders.py": """
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document

class ConfluenceLoader(BaseLoader):
    def __init__(self, url, *, space_key):
        self._source = f"{url}/{space_key}"

    def lazy_load(self):
        text = "The lease of the Turin office was signed by Ada Ferro on 3 May 2024."
        yield Document(text, metadata={"source": self._source})
""",
}
DATABASE = "postgresql+psycopg://rag@db:5432/rag"
PYTHON_PAGES = sorted({block.page for block in blocks("python")} - set(ELSEWHERE))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_models(folder: Path, tiny_model: Callable[[str], Any], make_tokenizer: Callable[..., Any]) -> None:
    """models/mine, models/base and an adapter of it, as docs/models.md names them."""
    from peft import LoraConfig, get_peft_model

    for name in ("mine", "base"):
        tiny_model("llama").save_pretrained(folder / "models" / name)
        make_tokenizer().save_pretrained(folder / "models" / name)
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "models/base")
    adapted.save_pretrained(folder / "adapters/support")


def write_stubs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the packages of `STUBS` importable, where the environment has none of that name."""
    for name, text in STUBS.items():
        path = folder / name
        if find_spec(name.partition("/")[0]) is None or path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    monkeypatch.syspath_prepend(folder)


def presumed(page: str, folder: Path) -> dict[str, Any]:
    """What a page's text says is there before its first block."""
    if page == "docs/documents.md":
        sample_corpus().write(folder / "docs")
    if page != "docs/fidelity.md":
        return {}
    from ragblend import Prompt, ingest, load_engine

    engine, corpus = load_engine("demo", store=folder / "kv"), sample_corpus()
    corpus.write(folder / "corpus")
    ingest(folder / "corpus", engine, folder / "index", embedder="hashing", glob="*.md")
    chunks = ["Mavdyne sells knives.", "The company has its main office in Wesstad."]
    return {
        "Prompt": Prompt,
        "load_engine": load_engine,
        "engine": engine,
        "chunks": chunks,
        "question": "What does Mavdyne sell?",
        "questions": [question.text for question in corpus.questions][: min_questions(0.5)],
    }


def engines(names: dict[str, Any]) -> Iterator[Any]:
    """Those that a page's blocks opened."""
    for value in names.values():
        engine = getattr(value, "engine", value)
        if hasattr(type(engine), "precompute") and hasattr(type(engine), "close"):
            yield engine


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_every_program_runs(page, folder, tiny_model, make_tokenizer, monkeypatch):
    if page == "docs/models.md":
        save_models(folder, tiny_model, make_tokenizer)
    if page == "docs/documents.md":
        write_stubs(folder / "stubs", monkeypatch)
    names = presumed(page, folder)
    (folder / "remote").mkdir()
    replaced = REPLACED | {"file://REMOTE": f"file://{folder}/remote"}
    try:
        with running_postgres() if page == "docs/indexes.md" else nullcontext("") as url:
            run_python(page, names, replaced | {DATABASE: url.replace("postgresql:", "postgresql+psycopg:")})
    finally:
        for engine in engines(names):
            engine.close()


@pytest.mark.parametrize("page", ELSEWHERE)
def test_what_runs_elsewhere_is_still_there(page):
    assert any(block.page == page for block in blocks("python")), f"take {page} out of ELSEWHERE"


def test_other_programs_are_still_named():
    assert {words[0] for _, words in command_lines()} >= set(OTHERS_COMMANDS), "take it out of OTHERS_COMMANDS"


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """The last subcommand that `ragblend WORDS` names, and the words behind it."""
    command: Any = get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize(
    ("place", "words"), [pytest.param(*line, id=line[0]) for line in command_lines() if line[1][0] == "ragblend"]
)
def test_every_command_of_ours_is_understood(place, words, folder):
    (folder / "docs").mkdir()
    command, arguments = resolve(words[1:])
    command.make_context("ragblend", arguments)  # parses, and does not run


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        pytest.param(*line, id=line[0])
        for line in command_lines()
        if line[1][0] not in OTHERS_COMMANDS and line[1][0] != "ragblend"
    ],
)
def test_every_other_command_names_what_there_is(place, words, capsys):
    match words:
        case ["make", *targets]:
            assert {target for target in targets if "=" not in target} <= TARGETS
        case ["pip", "install", *wanted]:
            named = [extra for each in wanted for extra in re.findall(r"\[(.*?)\]", each)]
            assert set(",".join(named).split(",")) - {""} <= set(EXTRAS)
        case ["python", "-m", "venv", _] | [("." | "source"), _]:
            pass
        case ["python", "-m", module, *options]:
            check_options(runpy.run_module, module, options, capsys)
        case ["python", script, *options]:
            check_options(runpy.run_path, str(ROOT / script), options, capsys)
        case [script, *_]:
            assert (ROOT / script).is_file(), f"{place}: what is {script}?"


def check_options(run: Callable[..., Any], module: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The program is there, and its --help lists the options."""
    chosen = takewhile(lambda word: not word.startswith("--"), options)  # the subcommand, where there is one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *chosen, "--help"])
        with pytest.raises(SystemExit) as ended:
            run(module, run_name="__main__")
    assert ended.value.code == 0
    known = capsys.readouterr().out
    for option in (word.partition("=")[0] for word in options if word.startswith("--")):
        assert re.search(rf"{option}\b", known), option


def test_commands_in_sentences_have_the_options_that_they_name():
    unknown = []
    for page, typed in inline_commands():
        command, words = resolve(typed[1:])
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        known |= OF_VLLM | {"--help", "--install-completion"}
        named = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        if (len(words) == len(typed) - 1 and not named) or named - known:
            unknown.append((page, words))
    assert not unknown


def test_every_block_has_a_language_that_a_test_checks():
    fences = re.findall(r"^ *```(\w+)", "\n".join(PAGES.values()), re.MULTILINE)
    assert set(fences) <= {"bash", "python", "json", "toml", "console"}


@pytest.mark.parametrize("block", blocks("json", "toml"), ids=lambda block: f"{block.page}:{block.line}")
def test_data_is_well_formed(block):
    (json.loads if block.language == "json" else tomllib.loads)(block.text)
