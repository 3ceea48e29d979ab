"""The README's programs and commands as printed, but with a model that is available here."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from pages import MODELS, ROOT
from typer.testing import CliRunner

from ragblend.cli.app import app

README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMED = "Qwen/Qwen3-0.6B"

EACH_MODEL = pytest.mark.parametrize("model", MODELS)


def block(language: str, holding: str, model: str = NAMED) -> str:
    """The one block of that language with `holding` in it, with `model` in the place of the model that it names."""
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if holding in text)
    return found.replace(NAMED, model)


@EACH_MODEL
def test_the_langchain_program_prints_what_the_page_prints(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = block("python", "prompt | llm")
    assert 'model="demo"' in program
    names: dict[str, Any] = {}
    exec(program.replace('model="demo"', f'model="{model}"'), names)
    names["llm"].engine.close()
    printed = capsys.readouterr().out
    assert printed.strip()
    if model == "demo":
        assert printed == block("console", "tokens reused")
    assert names["report"]["num_chunk_hits"] == names["report"]["num_chunks"] == len(names["notes"])
    assert names["report"]["mode"] == "blend"


def test_the_first_program_is_short_and_near_the_top():
    top = README.splitlines()[:30]
    program = block("python", "prompt | llm").splitlines()
    assert len(program) <= 12
    assert {*program, *block("console", "tokens reused").splitlines()} <= {*top}


@EACH_MODEL
def test_the_llamaindex_program_answers_from_what_it_stored(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("python", "BlendQueryEngine", model), names)
    names["llm"].engine.close()
    report = names["response"].metadata["ragblend"]
    assert str(names["response"]).strip()
    assert str(names["response"]) in capsys.readouterr().out
    assert report["num_chunk_hits"] == report["num_chunks"] == len(names["documents"])


@EACH_MODEL
def test_the_commands_ingest_a_folder_answer_chat_and_remove(model, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "lease.md").write_text(
        "The lease of the Turin office was signed by Ada Ferro on 3 May 2024.\n"
    )
    monkeypatch.chdir(tmp_path)
    outputs = {}
    for line in block("bash", "ragblend chat", model).splitlines():
        name, *arguments = shlex.split(line, comments=True)
        assert name == "ragblend"
        ended = CliRunner().invoke(app, arguments, input="Who signed the lease?\n" if arguments[0] == "chat" else None)
        assert ended.exit_code == 0, ended.output
        outputs[arguments[0]] = ended.output
    assert list(outputs) == ["ingest", "ask", "chat", "remove"]
    assert "lease.md" in outputs["ask"], "--show-sources"
