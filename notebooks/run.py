"""Execute the notebooks in src/, and save each with its outputs and plots as NN_name.ipynb.

    python notebooks/run.py              executes all notebooks
    python notebooks/run.py 01 04        executes those whose names begin with 01 or 04
    python notebooks/run.py --check      executes without saving, as in CI
    python notebooks/run.py --part real  executes those on the model of `make real-model`; `embedded`: the others

Saved outputs contain no times, paths or warnings, so that a second run without changes writes the same files.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300  # for one cell
REAL_MODEL = HERE.parent / "models" / "smollm2"
NAMES_REAL_MODEL = "RAGBLEND_REAL_MODEL"  # notebooks that read this variable run on the real model
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
MACHINE_PATH = re.compile(r"(?<![\w.<])/(?:home|root|tmp|work|usr|var|opt|Users|private|mnt)/\S+")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of notebook names; default: all")
    parser.add_argument("--check", action="store_true", help="execute without saving")
    parser.add_argument(
        "--part", choices=("all", "embedded", "real"), default="all", help="by their model; default: all"
    )
    options = parser.parse_args(arguments)
    wanted = {"all": (False, True), "embedded": (False,), "real": (True,)}[options.part]
    named = [path for path in sorted((HERE / "src").glob("*.py")) if chosen(path, options.names)]
    sources = [path for path in named if is_real(path) in wanted]
    if not sources:
        parser.error(f"no notebook begins with {' or '.join(options.names)}; see {HERE / 'src'}")
    if any(map(is_real, sources)) and not (REAL_MODEL / "config.json").exists():
        parser.error(f"{REAL_MODEL} does not exist; run: make real-model, or add --part embedded")
    os.environ[NAMES_REAL_MODEL] = str(REAL_MODEL)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    failed = [path.stem for path in sources if not run(path, save=not options.check)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def chosen(path: Path, names: list[str]) -> bool:
    return not names or any(path.stem.startswith(name) for name in names)


def is_real(path: Path) -> bool:
    return NAMES_REAL_MODEL in path.read_text(encoding="utf-8")


def run(source: Path, *, save: bool) -> bool:
    """Execute one source. Return False if it failed, or if its outputs have paths of this machine."""
    notebook = build(source)
    start_s = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--IPKernelApp.log_level=40"],  # lower levels warn of the kernel's loopback sockets
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError) as error:
            print(f"{source.stem}: {error}", file=sys.stderr)
            return False
    tidy(notebook)
    paths = machine_paths(notebook)
    if paths:
        print(f"{source.stem}: outputs contain paths of this machine: {', '.join(paths)}", file=sys.stderr)
        return False
    if save:
        nbformat.write(notebook, HERE / f"{source.stem}.ipynb")
    print(f"{source.stem}: {'saved' if save else 'runs'}, {perf_counter() - start_s:.0f} s")
    return True


def build(source: Path) -> nbformat.NotebookNode:
    """Return the notebook of a py:percent source, without outputs. Equal sources give equal notebooks."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem}-{number:02}"
        cell.metadata = nbformat.NotebookNode()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Remove stderr outputs, which are printed instead, and metadata that depends on the Python version."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                print(output.text, file=sys.stderr, end="")
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    pairing = notebook.metadata.get("jupytext", {}).get("formats", "ipynb,src//py:percent")
    notebook.metadata = nbformat.from_dict(
        {"jupytext": {"formats": pairing}, "kernelspec": kernel, "language_info": {"name": "python"}}
    )


def machine_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the absolute paths in the text of the outputs."""
    texts = [str(output) for cell in notebook.cells for output in _without_images(cell.get("outputs", ()))]
    return sorted({path for text in texts for path in MACHINE_PATH.findall(text)})


def _without_images(outputs: list[nbformat.NotebookNode]) -> list[object]:
    return [
        {kind: data for kind, data in output.data.items() if not kind.startswith("image/")}
        if "data" in output
        else output.get("text", "")
        for output in outputs
    ]


if __name__ == "__main__":
    sys.exit(main())
