"""docs/start.md from top to bottom as it is printed, over a PDF, with a model that is available here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot
from pages import MODELS, blocks, command_lines, run_python
from typer.testing import CliRunner

from ragblend.cli.app import app

PAGE = "docs/start.md"
NAMED = "Qwen/Qwen3-0.6B"
# Words of the page that are not run here, and why.
LEFT_OUT = {
    "python": "makes an environment; these tests stand in one",
    ".": "enters it",
    "pip": "installs; that the extras exist is tested in test_code_blocks.py",
    "demo": "takes no part in what follows; tests/demo and `make demo` run it",
}


def test_what_is_left_out_is_still_there():
    typed = [words for place, words in command_lines() if place.startswith(PAGE)]
    assert set(LEFT_OUT) <= {words[1] if words[0] == "ragblend" else words[0] for words in typed}


@pytest.mark.parametrize("model", MODELS)
def test_the_page_leads_to_an_answer_over_a_pdf(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = pyplot.figure()
    figure.text(0.1, 0.8, "The lease of the Turin office was signed by Ada Ferro on 3 May 2024.")
    figure.savefig("handbook.pdf")
    pyplot.close(figure)
    (settings,) = (block.text for block in blocks("toml") if block.page == PAGE)
    Path("ragblend.toml").write_text(settings.replace(NAMED, model))
    said: dict[str, str] = {}
    for place, (program, *words) in command_lines():
        if not place.startswith(f"{PAGE}:") or program in LEFT_OUT or words[0] in LEFT_OUT:
            continue
        ended = CliRunner().invoke(app, [word.replace(NAMED, model) for word in words])
        if words[0] == "doctor":  # may find that this machine lacks something, which is what it is for
            assert ended.exit_code in (0, 1), ended.output
        else:
            assert ended.exit_code == 0, f"{place}\n{ended.output}"
        said[" ".join(words[:1] + words[-1:])] = ended.output
    assert "handbook.pdf" in said["ask --show-sources"]
    assert "handbook.pdf" in said["ask full"]
    assert "<html" in (tmp_path / "explain.html").read_text(encoding="utf-8")

    names: dict[str, Any] = {}
    run_python(PAGE, names, {NAMED: model})
    names["llm"].engine.close()
    result = names["result"]
    assert result["answer"].strip()
    assert [Path(document.metadata["source"]).name for document in result["context"]] == ["handbook.pdf"]
    assert result["report"]["num_chunk_hits"] == result["report"]["num_chunks"] == 1
