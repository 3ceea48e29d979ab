"""The saved notebooks: paired with their sources, executed, and free of this machine's traces.

`make notebooks` executes and saves them; here they are executed without saving.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
from pages import NEEDS_SMOLLM2, ROOT

nbformat = pytest.importorskip("nbformat")
for _name in ("jupytext", "nbclient"):
    pytest.importorskip(_name)

NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted((NOTEBOOKS / "src").glob("*.py"))


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", NOTEBOOKS / "run.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_source_has_its_notebook_and_the_other_way_round():
    assert [path.stem for path in SOURCES] == [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    assert len(SOURCES) >= 5


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_saved_notebook_is_its_source_executed(source, runner):
    saved = nbformat.read(NOTEBOOKS / f"{source.stem}.ipynb", as_version=4)
    nbformat.validate(saved)
    built = runner.build(source)
    assert [(cell.id, cell.source) for cell in saved.cells] == [(cell.id, cell.source) for cell in built.cells], (
        f"{source.stem} has changed since it was executed: make notebooks"
    )
    code = [cell for cell in saved.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert runner.machine_paths(saved) == []
    assert saved.metadata.kernelspec.name == "python3"


EXTRA_OF = {"matplotlib": "plot", "langchain_core": "langchain", "llama_index": "llamaindex"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_first_cell_names_the_extras_that_the_notebook_needs(source, runner):
    first, *others = runner.build(source).cells
    imported = set(re.findall(r"^(?:from|import) (\w+)", "\n".join(cell.source for cell in others), re.MULTILINE))
    needed = {extra for module, extra in EXTRA_OF.items() if module in imported}
    command = re.search(r"`pip install -e (?:'\.\[([\w,]+)\]'|\.)(.*) jupyterlab`", first.source)
    assert command is not None
    assert set(filter(None, (command[1] or "").split(","))) - {"demo"} == needed
    assert ("langchain-classic" in command[2]) is ("langchain_classic" in imported)


def test_every_notebook_is_linked_from_a_page_of_docs():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert [path.stem for path in SOURCES if not any(f"/{path.stem}.ipynb" in page for page in pages)] == []


def test_paths_of_this_machine_are_found(runner):
    def notebook(text: str) -> object:
        cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("stream", text=text)])
        return nbformat.v4.new_notebook(cells=[cell])

    assert runner.machine_paths(notebook("saved /tmp/x1/kv and /home/me/kv")) == ["/home/me/kv", "/tmp/x1/kv"]
    assert runner.machine_paths(notebook("5 of 9, mean/median, https://a.org/tmp/x, Qwen/Qwen3-8B, a/home/b")) == []


def test_figures_of_closeness_are_shown_on_a_real_model(runner):
    assert [path.stem[:2] for path in SOURCES if runner.is_real(path)] == ["04", "06", "07"]


@pytest.mark.parametrize("part", ["embedded", pytest.param("real", marks=NEEDS_SMOLLM2)])
def test_every_notebook_runs_top_to_bottom(part, runner):
    command = [sys.executable, str(NOTEBOOKS / "run.py"), "--check", "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    assert len(done.stdout.splitlines()) == sum(runner.is_real(path) == (part == "real") for path in SOURCES)
