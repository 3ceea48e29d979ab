"""Ingestion by workers on Ray: beside one process, by their number, and while workers and driver are killed.

    python -m benchmarks.ingestion_workers --model models/smollm2 --out data/results/ingestion-workers.json
    python -m benchmarks.ingestion_workers --num-chunks 9800 --chunk-tokens 32 --embedder hashing --counts 2 \
        --worker-kills 10 --driver-kills 5 --out data/results/ingestion-killed.json

Every run is the command line, `ragblend ingest`, over the same files: paragraphs of MuSiQue's questions, cut to
`--chunk-tokens`, repeated with edits so that no two chunks are the same. Each run's store is held against that of one
process, entry by entry. Read `main` first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any

import typer

from ragblend.bench.common.hardware import hardware_card
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.kv import in_memory

SCHEMA_VERSION = 1
QUESTIONS = Path(__file__).parents[1] / "data" / "questions" / "musique_100.json"
CHUNKS_PER_FILE = 20
SAMPLE_S = 0.5


@dataclass(slots=True)
class Run:
    """One ingestion, to its end. Seconds are the report's own: without the command's start, with the workers'."""

    num_workers: int  # 0: one process, without Ray
    num_chunks: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    prefill_s: float = 0.0
    tokens_per_s: float = 0.0  # of the prefill
    over_one_process: float = 0.0  # tokens_per_s over that of the run without workers
    per_core: float = 0.0  # the same, per core that is used
    driver_rss: list[float] = field(default_factory=list)  # MiB, at a quarter, half, and all of the samples
    worker_rss: list[float] = field(default_factory=list)  # of the largest worker
    worker_kills: int = 0
    driver_kills: int = 0
    num_missing: int = 0  # entries that one process has and this run has not
    num_different: int = 0  # entries with other tensors, or that one process has not
    num_rewritten: int = 0  # entries that were there at a kill and were written again
    known_s: float = (
        0.0  # elapsed_s of the same into another index, when nothing is left to prefill: what workers leave
    )


def main(
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON there.")] = None,
    model: Annotated[str, typer.Option("--model")] = "demo",
    num_chunks: Annotated[int, typer.Option("--num-chunks")] = 480,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens")] = 128,
    counts: Annotated[str, typer.Option("--counts", help="Numbers of workers; empty for one process alone.")] = "1,2,4",
    context: Annotated[str, typer.Option("--context")] = "none",
    embedder: Annotated[str, typer.Option("--embedder")] = "auto",
    worker_kills: Annotated[int, typer.Option("--worker-kills", help="In each run with workers, at random.")] = 0,
    driver_kills: Annotated[int, typer.Option("--driver-kills")] = 0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Measure, print a line per run, write the JSON."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="ragblend-workers-") as folder:
        home = Path(folder)
        write_corpus(home / "docs", num_chunks, chunk_tokens, dice)
        options = ["--model", model, "--chunk-size", str(chunk_tokens)]
        options += ["--context", context, "--embedder", embedder]
        runs: list[Run] = []
        for count in (0, *(int(each) for each in counts.split(",") if each)):
            run = Run(count)
            ingest(home, run, options, dice, *((worker_kills, driver_kills) if count else (0, 0)))
            if not count:
                run.known_s = known(home, options)
            finish(run, runs[0] if runs else run, home)
            runs.append(run)
            print(json.dumps(asdict(run)), file=sys.stderr, flush=True)
    config = {"model": model, "num_chunks": num_chunks, "chunk_tokens": chunk_tokens, "context": context, "seed": seed}
    config["embedder"] = embedder
    made = {
        "schema_version": SCHEMA_VERSION, "command": "benchmarks.ingestion_workers", "hardware": hardware_card(),
        "config": config, "runs": [asdict(run) for run in runs],
    }  # fmt: skip
    text = json.dumps(made, indent=1) + "\n"
    if out is None:
        print(text)
    else:
        out.write_text(text)


def write_corpus(folder: Path, num_chunks: int, chunk_tokens: int, dice: random.Random) -> None:
    """Files of about `CHUNKS_PER_FILE` chunks each. An edit is a sentence of another paragraph, put in somewhere."""
    asked = json.loads(QUESTIONS.read_text())
    texts = [passage["text"] for each in asked for passage in each["ctxs"]]
    words = [word for text in texts for word in text.split()]
    folder.mkdir()
    # About: how many tokens a word has is the tokenizer's. What came of it is in `Run.num_chunks`.
    per_file = int(CHUNKS_PER_FILE * chunk_tokens / 1.45)
    for number in range(-(-num_chunks // CHUNKS_PER_FILE)):
        start = dice.randrange(len(words))
        own = list(itertools.islice(itertools.cycle(words), start, start + per_file))
        for at in range(0, len(own), max(1, chunk_tokens // 4)):
            own[at] = dice.choice(words)
        (folder / f"{number:05}.txt").write_text(" ".join(own) + "\n")


def ingest(home: Path, run: Run, options: list[str], dice: random.Random, worker_kills: int, driver_kills: int) -> None:
    """Run the command until it ends by itself; before that kill what is to be killed, at random moments."""
    store = home / f"kv-{run.num_workers}"
    command = ingest_command(home, options, store, home / f"index-{run.num_workers}")
    command += ["--workers", str(run.num_workers)] if run.num_workers else []
    seen: dict[str, int] = {}
    left = [True] * driver_kills + [False] * worker_kills  # whether it is the driver
    dice.shuffle(left)
    while True:
        with (home / "out").open("wb") as printed:
            driver = subprocess.Popen(command, stdout=printed, start_new_session=True)
        ended, samples = Event(), list[tuple[float, float]]()
        watch = Thread(target=sample, args=(driver.pid, samples, ended))
        watch.start()
        while left and driver.poll() is None:
            time.sleep(dice.uniform(3, 8))
            if not (workers := workers_of_ray()) or driver.poll() is not None:
                continue
            seen |= entries(store)
            is_driver = left.pop()
            os.kill(driver.pid if is_driver else dice.choice(workers), signal.SIGKILL)
            run.driver_kills, run.worker_kills = run.driver_kills + is_driver, run.worker_kills + (not is_driver)
            if is_driver:
                break
        code = driver.wait()
        ended.set()
        watch.join()
        if code == 0:
            break
        assert code == -signal.SIGKILL, f"exit code {code}"
        while workers_of_ray():
            time.sleep(0.2)
    told = json.loads((home / "out").read_text())
    run.num_chunks, run.num_tokens = told["num_chunks"], told["num_tokens"]
    run.elapsed_s, run.prefill_s = told["elapsed_s"], told["prefill_s"]
    run.driver_rss, run.worker_rss = map(over_time, zip(*samples, strict=True))
    stored = entries(store)
    run.num_rewritten = sum(stored.get(name) != found for name, found in seen.items())


def ingest_command(home: Path, options: list[str], store: Path, index: Path) -> list[str]:
    """The command line, without what says how many workers."""
    own = ["--store", str(store), "--index", str(index), "--json"]
    return [sys.executable, "-m", "ragblend", "ingest", str(home / "docs"), *options, *own]


def known(home: Path, options: list[str]) -> float:
    """Seconds for all that one process has to do beside prefilling: everything is in its store already."""
    command = ingest_command(home, options, home / "kv-0", home / "index-known")
    told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert not told["num_new_kv"], told
    return float(told["elapsed_s"])


def over_time(samples: tuple[float, ...]) -> list[float]:
    """At a quarter, at half, and at the end."""
    return [round(samples[at], 1) for at in (len(samples) // 4, len(samples) // 2, len(samples) - 1)]


def finish(run: Run, alone: Run, home: Path) -> None:
    """What follows from beside the run without workers."""
    # Of a run that was begun again only the rest was prefilled in the seconds that it reports.
    if not run.driver_kills:
        run.tokens_per_s = run.num_tokens / run.prefill_s
        run.over_one_process = run.tokens_per_s / alone.tokens_per_s
        run.per_core = run.over_one_process / min(max(run.num_workers, 1), os.cpu_count() or 1)
    if run is not alone:
        expected, found = (dict(digests(home / f"kv-{each.num_workers}")) for each in (alone, run))
        run.num_missing = len(expected.keys() - found.keys())
        run.num_different = sum(expected.get(key) != digest for key, digest in found.items())


def digests(store: Path) -> Iterator[tuple[str, str]]:
    """Every entry's tensors and header, verified, as a digest."""
    disk = DiskStore(store)
    for key in disk.keys():  # noqa: SIM118 (a store is not a dict)
        found = disk.get(key)
        assert found is not None, key
        kv = in_memory(found)
        digest = hashlib.blake2b(repr((kv.header.key, kv.header.token_ids)).encode())
        for index in range(kv.header.num_layers):
            for tensor in kv.layer(index):
                digest.update(tensor.contiguous().view(-1).numpy().tobytes())
        yield key, digest.hexdigest()


def sample(driver: int, samples: list[tuple[float, float]], ended: Event) -> None:
    """Resident MiB of the driver and of the largest worker, every half second."""
    while not ended.wait(SAMPLE_S):
        now = rss_mib(driver), max(map(rss_mib, workers_of_ray()), default=0.0)
        if now[0]:  # it may just have ended
            samples.append(now)


def rss_mib(pid: int) -> float:
    """0 for a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


def entries(store: Path) -> dict[str, int]:
    """The store's files: an entry that is written again is another one, with an inode of its own."""
    return {path.name: path.stat().st_ino for path in store.glob("??/*.safetensors")}


def workers_of_ray() -> list[int]:
    """Processes of Ray's that run our class, on this machine."""
    found: list[Any] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_one = (folder / "cmdline").read_bytes().startswith(b"ray::_Worker")
        except OSError:
            continue
        found += [int(folder.name)] * is_one
    return found


if __name__ == "__main__":
    typer.run(main)
