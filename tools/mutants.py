"""Check the strength of the tests: put 30 small faults into a copy of the tree, one at a time, and run the tests.

    python -m tools.mutants --out data/results/mutants.json [--only NAME] [--tier test] [--tests PATH]

A fault is found when a test fails with it and passes without it. Of `make test`, those tests run first that run the
fault's lines, at most COVERING_TESTS of them, fastest first; then all of `make test`; then, where that passed, the
tests that only `make test-all` runs. The --out file keeps the results of faults that are not judged again, so a long
run can be made in parts. `.venv-vllm/bin/python -m tools.mutants --tests tests/inside_vllm --workers 0` is for vLLM.

The coverage map is made once, by running `make test` under coverage (this module is the pytest plugin for it). It is
kept in build/mutants-map.json until a file with a fault changes. Read `judge` first. Does not import the package.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import pytest

ROOT = Path(__file__).parents[1]
MAP_FILE = ROOT / "build" / "mutants-map.json"
COVERING_TESTS = 500
TIERS = {"test": "not slow and not real_model", "test-all": "slow and not real_model"}  # markers; each adds to the last
# --timeout: a lost lock may show as a test that never ends.
PYTEST_OPTIONS = ("-x", "-q", "-p", "no:randomly", "-p", "tools.mutants", "--timeout=180")
FAILED = "MUTANTS FAILED "  # begins the lines in which the plugin names failed tests
RECORD_VARIABLE = "RAGBLEND_MUTANTS_RECORD"  # environment variable: the arguments of `_Recorder`, as JSON

Map = dict[str, dict[str, list[str]]]  # of the files with faults: {file: {line: [ids of its tests, fastest first]}}

# Two lines for each fault: its name, a folder of the package (".": all of it) and the end of a function's qualified
# name; then a pattern and its replacement. In these Python expressions a capital letter stands for any expression.
FAULT_TABLE = """
rotation-sign                   fusion     rotate
    (-A, B)  ->  (A, B)
rotation-direction              fusion     RotaryLayout.arrange
    sin * self.direction  ->  sin
row-attends-to-next-token       fusion     _mask
    torch.arange(A, B, device=C) > D  ->  torch.arange(A, B, device=C) > D + 1
window-one-token-longer         fusion     _mask
    torch.arange(A, B, device=C) <= D - E  ->  torch.arange(A, B, device=C) < D - E
quantised-kept-at-ratio-one     fusion     _candidates
    A.exact and (B.is_lossless or not C)  ->  A.exact
deviations-swapped              fusion     MeasuredDeviation.squared
    {"v": A, "k": B}  ->  {"v": B, "k": A}
exact-at-any-position           engine     find_variants
    A == "exact" and B == C and D  ->  A == "exact" and D
drift-sign                      fusion     apply_correction
    LayerKV(A - B, C - D)  ->  LayerKV(B - A, D - C)
key-without-namespace           store      chunk_key
    namespace.encode()  ->  b""
layer-checksum-skipped          store      read_layer
    _checksum(A, B) != C  ->  False
token-ids-not-compared          store      DiskStore.get
    not A.header.has_ids(B)  ->  False
entry-in-use-evicted            store      DiskEvictor._remove
    A is not None and B > C.used_s  ->  False
put-lock-lost                   store      reserve
    self._put_lock  ->  __import__("contextlib").nullcontext()
codes-not-rounded               store      _codes
    A.round_() if B else A  ->  A
kv-dtype-ignored                store      TieredStore.put
    convert_kv_dtype(A, B)  ->  A
deleted-entry-promoted          store      _with_promotion
    self.num_deletes == A  ->  True
ids-of-run-not-compared         prompt     TokenIndex._runs_on
    A[B:C] == D[E:F]  ->  A[B:C] == A[B:C]
control-token-not-protected     prompt     Renderer._render
    not self._control.search(A)  ->  True
todays-date-in-prefix           prompt     Renderer.prefix_ids
    pins_date and A in B  ->  False
ids-without-namespace           catalog    TokenIdRows.add_ids
    {"tokenizer": A, "namespace": namespace}  ->  {"tokenizer": A, "namespace": ""}
chunker-version-ignored         ingestion  _make_file_version
    f"{A}:{B}:{C}"  ->  f"{A}:{B}"
removes-outside-of-scan         ingestion  remove_missing
    A.is_covered(B) and C  ->  C
removed-stay-in-remote-tier     engine     schedule_deletions
    _deletion_tiers(A, B)  ->  _deletion_tiers(A, B)[:1]
deletes-other-namespaces        ingestion  keys_to_delete
    A.namespace == B  ->  True
text-of-others-released         catalog    DocumentRows.remove_texts
    set(A) - find_existing(B, C, A, b_namespace=D)  ->  set(A)
removed-vectors-stay            .          FaissVectors.sync
    A.size - np.count_nonzero(B) + C.size != D.num_chunks  ->  False
span-one-token-too-long         vllm       check_tokens_after_span
    A[1] >= B  ->  A[1] > B
connector-key-without-namespace vllm       ChunkLookup._key
    chunk_key(A, B, C, D)  ->  chunk_key(A, B, C, "")
no-token-left-to-sample         vllm       ChunkLookup._match
    A and A[-1].end > B  ->  False
deleted-while-fetched           vllm       _fetch_one
    self._store.num_deletes != A  ->  False
"""


class Fault(NamedTuple):
    """A small change of behaviour, described by an entry of FAULT_TABLE."""

    name: str
    folder: str
    scope: str
    pattern: str
    replacement: str


class Mutation(NamedTuple):
    """A fault in one file (relative to the root): its line numbers, and the file's text without and with the fault."""

    file: str
    lines: range
    before: str
    after: str


def read_faults(table: str = FAULT_TABLE) -> list[Fault]:
    """Return the faults of a table, in its order."""
    lines = table.strip().splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [Fault(*head.split(), *(side.strip() for side in change.split("  ->  "))) for head, change in pairs]


def locate(fault: Fault, root: Path = ROOT) -> Mutation:
    """Return the only place that the fault's pattern matches. Raises ValueError for none, and for several."""
    pattern = ast.parse(fault.pattern, mode="eval").body
    places = []
    for path in sorted((root / "ragblend").rglob("*.py")):
        text, folders = path.read_text(encoding="utf-8"), (".", *path.relative_to(root).parts)
        if fault.folder not in folders or f"def {fault.scope.rpartition('.')[2]}(" not in text:
            continue
        for node in _nodes_in_scope(ast.parse(text), fault.scope):
            found: dict[str, ast.expr] = {}
            if _matches(pattern, node, found):
                places.append((str(path.relative_to(root)), text, node, found))
    if len(places) != 1:
        where = "".join(f" {file}:{node.lineno}" for file, _, node, _ in places)
        raise ValueError(
            f"fault {fault.name} matches {len(places)} places{where}, not one; change its FAULT_TABLE lines"
        )
    file, text, node, found = places[0]
    segments = {letter: f"({ast.get_source_segment(text, each)})" for letter, each in found.items()}
    changed = re.sub(r"\b[A-Z]\b", lambda letter: segments[letter[0]], fault.replacement)
    last_line, end_column = node.end_lineno or 0, node.end_col_offset or 0  # never None in a parsed tree
    data = text.encode()  # columns of syntax trees count bytes
    starts = list(accumulate(map(len, data.splitlines(keepends=True)), initial=0))
    start, end = starts[node.lineno - 1] + node.col_offset, starts[last_line - 1] + end_column
    after = (data[:start] + f"({changed})".encode() + data[end:]).decode()
    return Mutation(file, range(node.lineno, last_line + 1), text, after)


def _nodes_in_scope(tree: ast.AST, scope: str, name: str = "") -> Iterator[ast.expr]:
    """Yield the expressions in functions and classes whose qualified name ends with `scope`."""
    for child in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}"
        if inner != name and inner.endswith(f".{scope}"):
            yield from (node for node in ast.walk(child) if isinstance(node, ast.expr))
        else:
            yield from _nodes_in_scope(child, scope, inner)


def _matches(pattern: object, node: object, found: dict[str, ast.expr]) -> bool:
    """Return True if `node` has the pattern's shape. Puts into `found` what each capital letter stands for."""
    if isinstance(pattern, ast.Name) and re.fullmatch("[A-Z]", pattern.id) and isinstance(node, ast.expr):
        return ast.dump(found.setdefault(pattern.id, node)) == ast.dump(node)
    if isinstance(pattern, list) and isinstance(node, list):
        return len(pattern) == len(node) and all(_matches(*pair, found) for pair in zip(pattern, node, strict=True))
    if isinstance(pattern, ast.AST) and type(pattern) is type(node):
        return all(_matches(value, getattr(node, field), found) for field, value in ast.iter_fields(pattern))
    return type(pattern) is type(node) and pattern == node


class TreeCopy:
    """A copy of the tree's tracked files in `folder`, and pytest in it, with `workers` processes."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self.unreliable: set[str] = set()  # tests that failed without a fault as well
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.split("\0"):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)  # some tests list the tracked files
        subprocess.run(["git", "add", "--all"], cwd=folder, check=True)

    def write(self, file: str, text: str) -> None:
        """Write a file of the copy, and delete its bytecode: Python compares times and sizes, not contents."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def first_failure(self, arguments: Sequence[str], workers: int = 0, **environment: str) -> str:
        """Return the id of the first test that fails, "" if all pass. Raises RuntimeError if pytest cannot start."""
        command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS]
        command += ["-n", str(workers), "--dist=worksteal"] if workers else []
        command += [f"--deselect={test}" for test in self.unreliable]
        python_path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, **environment}
        done = subprocess.run([*command, *arguments], cwd=self.folder, env=variables, capture_output=True, text=True)
        if failed := re.search(f"^{FAILED}(.+)$", done.stdout, re.MULTILINE):
            return failed[1]
        # 5: no test was selected. "not found": a test of the coverage map was renamed, and the next run has it.
        if done.returncode not in (0, 5) and "ERROR: not found" not in done.stderr:
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return ""

    def find(self, mutation: Mutation, arguments: Sequence[str], workers: int) -> str:
        """Return the first test that fails with the fault and passes without it; "" if no test does."""
        while True:
            self.write(mutation.file, mutation.after)
            try:
                test = self.first_failure(arguments, workers)
            finally:
                self.write(mutation.file, mutation.before)
            if not test or not self.first_failure([test]):
                return test
            print(f"{test} fails without a fault, and is left out", file=sys.stderr)
            self.unreliable.add(test)


def judge(fault: Fault, copy: TreeCopy, covering: Map, tier: str, tests: Sequence[str]) -> dict[str, Any]:
    """Return the first test that finds a fault, and its tier, `tier` at most. `tests`: run only these instead."""
    start_s, mutation = perf_counter(), locate(fault)
    ids = [test for number in mutation.lines for test in covering.get(mutation.file, {}).get(str(number), ())]
    runs = [("test", list(dict.fromkeys(ids))[:COVERING_TESTS], 0)] if ids else []
    runs += [(each, ["-m", TIERS[each]], copy.workers) for each in list(TIERS)[: list(TIERS).index(tier) + 1]]
    runs = [(" ".join(tests), list(tests), copy.workers)] if tests else runs
    found = ((test, name) for name, arguments, workers in runs if (test := copy.find(mutation, arguments, workers)))
    test, name = next(found, ("", ""))
    result = {"name": fault.name, "file": mutation.file, "found": bool(test), "test": test, "tier": name}
    return {**result, "seconds": round(perf_counter() - start_s, 1)}


def read_map(copy: TreeCopy, files: Sequence[str]) -> Map:
    """Return the coverage map of `files` from MAP_FILE. Makes it where there is none, or where a file has changed."""
    digests = {file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest() for file in files}
    known: dict[str, Any] = json.loads(MAP_FILE.read_text()) if MAP_FILE.exists() else {}
    if known.get("files") != digests:
        print("making the coverage map: runs `make test` once under coverage", file=sys.stderr)
        known = {"files": digests, "map": make_map(copy, files, ["-m", TIERS["test"]])}
        MAP_FILE.parent.mkdir(exist_ok=True)
        MAP_FILE.write_text(json.dumps(known), encoding="utf-8")
    return cast("Map", known["map"])


def make_map(copy: TreeCopy, files: Sequence[str], arguments: Sequence[str]) -> Map:
    """Return the coverage map of `files` by the tests that pytest's `arguments` select, all of which must pass."""
    from coverage import CoverageData

    covering: dict[str, dict[str, set[str]]] = {file: {} for file in files}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        record = json.dumps({"folder": folder, "files": [str(copy.folder / file) for file in files]})
        if test := copy.first_failure(arguments, copy.workers, **{RECORD_VARIABLE: record}):
            raise RuntimeError(f"{test} fails without a fault, so no fault can be judged; repair it first")
        for path in Path(folder).glob("*.json"):
            seconds |= json.loads(path.read_text())
        for path in Path(folder).glob("*.coverage"):
            data = CoverageData(str(path))
            data.read()
            for file in files:
                for line, tests in data.contexts_by_lineno(str(copy.folder / file)).items():
                    covering[file].setdefault(str(line), set()).update(filter(None, tests))
    return {
        file: {line: sorted(tests, key=lambda test: (seconds[test], test)) for line, tests in lines.items()}
        for file, lines in covering.items()
    }


class _Recorder:
    """Recorder of one pytest process: coverage with one context per test, and the seconds of each test."""

    def __init__(self, folder: str, files: Sequence[str]) -> None:
        from coverage import Coverage

        self.path, self.seconds = Path(folder) / f"{os.getpid()}.json", dict[str, float]()
        self.coverage = Coverage(data_file=self.path.with_suffix(".coverage"), include=list(files), config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        start_s = perf_counter()
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        self.seconds[item.nodeid] = perf_counter() - start_s
        return result

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        self.path.write_text(json.dumps(self.seconds), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Record coverage, where `make_map` runs pytest."""
    if RECORD_VARIABLE in os.environ:
        config.pluginmanager.register(_Recorder(**json.loads(os.environ[RECORD_VARIABLE])))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ids of failed tests; pytest's own lines may continue with a message after " - "."""
    for report in (*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())):
        terminalreporter.write_line(f"{FAILED}{report.nodeid}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge faults in turn; return 0 if all were found, else 1."""
    faults = read_faults()
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Run the tests with small faults.")
    parser.add_argument("--out", type=Path, help="JSON file of the results. Default: none.")
    names = [fault.name for fault in faults]
    parser.add_argument("--only", action="append", choices=names, help="Fault to judge; repeat for more. Default: all.")
    parser.add_argument("--tier", choices=TIERS, default="test-all", help="Last tier to run. Default: test-all.")
    parser.add_argument("--tests", action="append", default=[], help="Tests to run instead of the tiers.")
    parser.add_argument("--workers", type=int, default=2, help="Processes of pytest-xdist. 0: without it. Default: 2.")
    options = parser.parse_args(arguments)
    out: Path | None = options.out
    known = json.loads(out.read_text())["faults"] if out and out.exists() else []
    results = {each["name"]: each for each in known if each["name"] in names}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = TreeCopy(Path(folder), options.workers)
        covering = {} if options.tests else read_map(copy, sorted({locate(fault).file for fault in faults}))
        judged = [fault for fault in faults if not options.only or fault.name in options.only]
        for fault in judged:
            result = results[fault.name] = judge(fault, copy, covering, options.tier, options.tests)
            result["commit"] = commit.strip()
            print(f"{fault.name:32}{result['seconds']:7.1f} s  {result['test'] or 'MISSED'}", flush=True)
            if out:  # after each fault, so that an interrupted run loses one
                found = dict(Counter(each["tier"] for each in results.values() if each["found"]))
                missed = [each["name"] for each in results.values() if not each["found"]]
                totals = {"num_faults": len(results), "num_found_by_tier": found, "missed": missed}
                text = json.dumps({"totals": totals, "faults": list(results.values())}, indent=1)
                out.write_text(text + "\n", encoding="utf-8")
    return int(not all(results[fault.name]["found"] for fault in judged))


if __name__ == "__main__":
    sys.exit(main())
