"""This tree beside an earlier commit, for a change of form: equal results, and times side by side.

    make real-model
    python -m benchmarks.compare_commits requests --base COMMIT --model models/smollm2
    python -m benchmarks.compare_commits times --base COMMIT
    python -m benchmarks.compare_commits documents --base COMMIT --count 100000

The commit is checked out beside this tree, and both run in the same environment. `requests`: 48 requests, whose first
logits and whole KV are compared byte for byte. `times`: what `ragblend bench ttft` and `benchmarks.ingest` time; in
vLLM's environment with `--backend vllm`, too. `documents`: the steps of `benchmarks.many_documents`, over two stores of
as many documents. Each command runs with the classes of its tree, so the commit must be recent enough to have them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any

import typer

from benchmarks.compare_commits import time_documents, time_requests
from benchmarks.results import ModelOption, OutOption, write_result
from ragblend.cli.printing import print_notice
from ragblend.lab.bench.common.configs import Backend, QualityConfig
from ragblend.lab.quality.data import load_cases

ROOT = Path(__file__).parents[2]
NUM_PROMPTS, NUM_CHUNKS = 3, 4

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=__doc__)
BaseOption = Annotated[str, typer.Option("--base", help="The earlier commit.")]
TurnsOption = Annotated[int, typer.Option("--turns", min=1, help="Times that each tree is measured.")]


@contextmanager
def both_trees(base: str) -> Iterator[dict[str, Path]]:
    """Yield the folders of the earlier commit ("base") and of this tree ("here")."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), base], cwd=ROOT, check=True)
        try:
            yield {"base": tree, "here": ROOT}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def start(tree: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start Python with the packages of `tree`. Its standard output is read by the caller."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, **options
    )


@contextmanager
def started_in_both_trees(base: str, program: str, *arguments: str) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run a program of this folder with the packages of each tree. Yield the processes that have printed a line."""
    path = str(Path(__file__).with_name(program))
    with both_trees(base) as trees, ExitStack() as stack:
        processes = {
            name: stack.enter_context(start(tree, path, *arguments, stdin=subprocess.PIPE))
            for name, tree in trees.items()
        }
        for process in processes.values():
            _read_line(process.stdout)
        yield processes
        for process in processes.values():
            process.communicate()


def run_json(tree: Path, *arguments: str) -> Any:
    """Run Python with the packages of `tree`. Return the JSON that it prints. Raises SystemExit if it fails."""
    with start(tree, *arguments) as process:
        printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed in {tree} with status {process.returncode}")
    return json.loads(printed)


@app.command("requests")
def compare_requests(
    base: BaseOption,
    model: ModelOption = "models/smollm2",
    data: Annotated[str, typer.Option("--data", help="Questions: musique, nq, or a file.")] = "musique",
    out: OutOption = None,
) -> None:
    """Compare the logits and KV of 48 requests: four rules, four modes and ratios, three prompts."""
    cases = load_cases(QualityConfig(data=data, part="all", num_questions=NUM_PROMPTS))
    prompts = [
        {"chunks": list(case.passages[:NUM_CHUNKS]), "question": case.question, "system": case.system} for case in cases
    ]
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    with both_trees(base) as trees, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        program = str(Path(__file__).with_name("hash_requests.py"))
        with ThreadPoolExecutor() as pool:  # nothing is timed
            printed = pool.map(lambda tree: run_json(tree, program, model, file.name), trees.values())
            digests = dict(zip(trees, printed, strict=True))
    different = [request for request, digest in digests["here"].items() if digests["base"][request] != digest]
    result = {
        "command": _command(f"requests --data {data}", base),
        "num_requests": len(digests["here"]),
        "different": different,
    }
    write_result(result, out)
    if different:
        raise SystemExit(f"{len(different)} of {len(digests['here'])} requests differ from {base}")


@app.command("times")
def compare_times(
    base: BaseOption, turns: TurnsOption = 12, backend: Backend = "transformers", out: OutOption = None
) -> None:
    """Compare the time to first token in each mode, prefill and ingestion. The two trees take turns at each step."""
    with started_in_both_trees(base, "time_requests.py", backend) as processes:
        steps = time_in_turns(processes, time_requests.STEPS[backend], turns)
    command = _command(f"times --turns {turns} --backend {backend}", base)
    write_result({"command": command, "turns": turns, "steps": steps}, out)


@app.command("documents")
def compare_documents(
    base: BaseOption,
    count: Annotated[int, typer.Option("--count", min=1000, help="Documents in each store.")] = 100_000,
    turns: TurnsOption = 30,
    out: OutOption = None,
) -> None:
    """Compare the steps of `benchmarks.many_documents`. The two trees take turns at each step."""
    with started_in_both_trees(base, "time_documents.py", str(count)) as processes:
        steps = time_in_turns(processes, time_documents.STEPS, turns)
    command = _command(f"documents --count {count} --turns {turns}", base)
    write_result({"command": command, "num_documents": count, "turns": turns, "steps": steps}, out)


def time_in_turns(
    processes: Mapping[str, subprocess.Popen[str]], steps: Sequence[str], turns: int
) -> dict[str, dict[str, float]]:
    """Return the median of each step in both trees, and the median of the ratios of the turns. Print them.

    The two measurements of a turn are adjacent, so a machine that becomes slower between turns does not change a ratio.
    """
    compared = {}
    for step in steps:
        times: list[tuple[float, float]] = []
        for turn in range(turns):
            order = ("base", "here") if turn % 2 else ("here", "base")
            taken = {name: _ask(processes[name], step) for name in order}
            times.append((taken["base"], taken["here"]))
        base, here = (median(each) for each in zip(*times, strict=True))
        ratio = median(here / base for base, here in times)
        compared[step] = {"base": base, "here": here, "ratio": ratio}
        print_notice(f"{step:24}  {base:8.4g}  {here:8.4g}  {ratio:.3f}")
    return compared


def _ask(process: subprocess.Popen[str], line: str) -> Any:
    """Write a line to a process. Return the JSON that it prints."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return json.loads(_read_line(process.stdout))


def _command(arguments: str, base: str) -> str:
    return f"python -m benchmarks.compare_commits {arguments} --base {base}"


def _read_line(stream: IO[str] | None) -> str:
    assert stream is not None
    if line := stream.readline():
        return line
    raise SystemExit("a process ended before it was measured")


if __name__ == "__main__":
    app()
