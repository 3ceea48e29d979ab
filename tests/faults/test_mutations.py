"""Bytes of every kind of file changed at random: no wrong answer, no traceback; `verify` finds and repairs the damage.

`RAGBLEND_FAULTS=full` makes 2,000 mutations. One that `verify` does not find must have changed no entry, row,
vector or metadata file. One that it finds is repaired by `verify --repair`, or by the fix that its message names.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import pytest
from commands import run_command
from places import text_about

from ragblend import Prompt, load_engine
from ragblend.catalog.database import delete_catalog_files
from ragblend.catalog.ledger import open_ledger
from ragblend.catalog.schema import DocumentKey
from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.engine.tuning.calibration import Calibration, CurvePoint, RuleFit, save_calibration
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.engine.tuning.machine import machine_facts, write_profile
from ragblend.errors import RagblendError
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.index import open_index
from ragblend.operations.maintenance import repair_store, verify_and_quarantine
from ragblend.precompute import ingest, open_engine_index
from ragblend.prompt.render import Renderer

pytestmark = pytest.mark.timeout(3600)

FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
NUM_PARTS = 4 if FULL else 1
NUM_MUTATIONS = 500 if FULL else 60  # in each part
EVERY_COMMAND = 25  # mutations between those that the command repairs, with a separate engine
KINDS = {
    "entry": "kv/kv/??/*.safetensors",
    "catalogue": "kv/catalog.sqlite",
    "model note": "kv/models/*.json",
    "calibration": "kv/calibrations/*.json",
    "machine": "kv/machines/*.json",
    "vectors": "kv/vectors.faiss",
}
LOSABLE = {"model note", "calibration", "machine"}
"""Files without which a store is another whole store: of a model not used yet, not calibrated or measured."""
DOCUMENTED = {0, 1, 3, 4}
QUESTION = "What is the secret of amber room 1?"


def flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def write_over(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.randrange(1, 200)] = rng.randbytes(rng.randrange(1, 200))


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def lengthen(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randrange(1, 5000))


def blank(data: bytearray, rng: random.Random) -> None:
    at, length = rng.randrange(len(data)), rng.randrange(1, 4096)
    data[at : at + length] = bytes(len(data[at : at + length]))


def shuffle(data: bytearray, rng: random.Random) -> None:
    """A page in another's place, as a disk that mixes up its writes leaves it."""
    one, other = (rng.randrange(0, len(data), 512) for _ in range(2))
    data[one : one + 512] = data[other : other + 512]


MUTATIONS = (flip, flip, flip, write_over, cut, lengthen, blank, shuffle)


def mutate(work: Path, kind: str, rng: random.Random) -> str:
    """Change one file of that kind; what was done."""
    paths = sorted(work.glob(KINDS[kind]))
    path, way = rng.choice(paths), rng.random()
    if way < 0.05 and kind not in LOSABLE:
        path.unlink()
        return f"{kind}: removed"
    if way < 0.1 and len(paths) > 1:
        path.write_bytes(rng.choice([each for each in paths if each != path]).read_bytes())
        return f"{kind}: another's bytes"
    if way < 0.13 and path.suffix == ".sqlite":
        path.with_name(f"{path.name}-wal").write_bytes(rng.randbytes(8000))
        return f"{kind}: a log of garbage"
    change, data = rng.choice(MUTATIONS), bytearray(path.read_bytes())
    change(data, rng)
    path.write_bytes(data)
    return f"{kind}: {change.__name__}"


@cache
def demo_tokenizer() -> str:
    return Renderer(load_tokenizer("demo")[0]).fingerprint


def contents(work: Path) -> dict[str, Any]:
    """Return the contents of an index and its store. Raises RagblendError if damage is found."""
    disk = DiskStore(work / "kv", create=False)
    with open_index(work / "kv") as index, open_ledger(disk) as ledger:
        vectors = {
            row: hashlib.md5(index._vectors.faiss.reconstruct(row).tobytes()).hexdigest()
            for row in faiss.vector_to_array(index._vectors.faiss.id_map).tolist()
        }
        return {
            "entries": {path.stem: path.read_bytes() for path in work.glob(KINDS["entry"])},
            "models": disk.models(),
            "calibrations": {path.name: path.read_bytes() for path in work.glob(KINDS["calibration"])},
            "machines": {path.name: path.read_bytes() for path in work.glob(KINDS["machine"])},
            "documents": index.content_hashes_by_file(),
            "files": index.files(),
            "facts": replace(index.manifest, generation=0),
            "chunks": [(chunk, dict(chunk.metadata)) for chunk in sorted(index.chunks(), key=lambda each: each.id)],
            "vectors": vectors,
            "texts": sorted(ledger.texts()),
            "stored": ledger.fingerprints_by_key(),
            "held": sorted(ledger.texts_of(DocumentKey())),
            "token ids": sorted(tuple(ids) for _, ids in ledger.ids_after(0, demo_tokenizer(), "")),
        }


def fill(work: Path) -> None:
    (work / "corpus").mkdir(parents=True)
    for name in ("amber", "basalt", "copper"):
        (work / "corpus" / f"{name}.md").write_text(text_about(name))
    with load_engine("demo", work / "kv") as engine:
        bring_in(work, engine)
        disk = DiskStore(work / "kv")
        points = tuple(CurvePoint(ratio, ratio, 1.0, 0.9, 1.0, 0.0, ratio) for ratio in (0.0, 1.0))
        fit = RuleFit("cacheblend", 1, 0.5, True, points)
        prefix = tuple(engine.default_prefix_ids)
        made = Calibration(engine.fingerprint, prefix, "64 tokens", 1e9, 0.9, 20, "index", (fit,))
        save_calibration(disk, made)
        measured = MachineProfile(engine.fingerprint, machine_facts("cpu"), 4, 1024, ((100, 0.1), (200, 0.2)))
        write_profile(work / "kv", measured)


def bring_in(work: Path, engine: Engine) -> None:
    ingest(work / "corpus", engine, work / "kv", chunk_size=64, embedder="hashing", context="neutral")


def answered(work: Path, engine: Engine) -> tuple[Any, ...]:
    """What is retrieved for a question, and the answer with everything recomputed that is not exact."""
    with open_index(work / "kv") as index:
        hits = index.search(QUESTION, 3)
    prompt = Prompt([hit.chunk for hit in hits], QUESTION)
    result = engine.generate(prompt, recompute_ratio=1.0, max_tokens=4)
    return [hit.chunk.id for hit in hits], [hit.chunk.text for hit in hits], result.token_ids


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    work = tmp_path_factory.mktemp("mutations") / "work"
    fill(work)
    shutil.copytree(work, work.with_name("kept"))
    yield work
    shutil.rmtree(work.parent)


def restore(work: Path) -> None:
    shutil.rmtree(work / "kv")
    shutil.copytree(work.with_name("kept") / "kv", work / "kv")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_mutation_gives_a_wrong_answer_or_goes_unnoticed(part, kept, counted, capsys, caplog):
    work, rng = kept, random.Random(part)
    place = ("--store", str(work / "kv"))
    counts: Counter[str] = Counter()
    problems = list[str]()
    restore(work)  # another part has left what its last mutation made of it
    with load_engine("demo", work / "kv", memory_gib=0, on_miss="inline") as engine:
        right, whole = answered(work, engine), contents(work)

        def survive(number: int, done: str) -> None:
            what = f"mutation {number}: {done}"
            try:
                assert answered(work, engine) == right, f"{what}: another answer"
                counts["right answers"] += 1
            except RagblendError as error:
                counts["answers refused" if error.exit_code in DOCUMENTED else what] += 1
            capsys.readouterr()
            code = run_command("verify", "--json", *place)
            said = capsys.readouterr()
            assert code in DOCUMENTED, (what, code, said)
            if code == 0 and json.loads(said.out)["checked"] == len(whole["entries"]):
                counts["without effect, or repaired when read"] += 1
                # A changed value in a row of the catalogue may give no wrong answer, and goes unnoticed then.
                assert done.startswith("catalogue") or contents(work) == whole, f"{what}: not noticed"
                return
            assert code != 0, (what, said)
            counts["found"] += 1
            repair(work, engine, place, with_command=number % EVERY_COMMAND == 0, counts=counts)
            capsys.readouterr()
            code = run_command("verify", "--json", *place)
            assert code == 0, (what, said, capsys.readouterr())
            after = contents(work)
            for name in whole:
                if name in ("calibrations", "machines"):  # cannot be computed again: deleted, with a message
                    assert after[name].items() <= whole[name].items(), f"{what}: other {name}"
                else:
                    assert after[name] == whole[name], f"{what}: other {name}"
            assert answered(work, engine) == right, f"{what}: another answer after the repair"

        for number in range(NUM_MUTATIONS):
            restore(work)
            done = mutate(work, rng.choice(list(KINDS)), rng)
            try:
                survive(number, done)
            except Exception as error:  # all of them are in one message at the end
                problems.append(f"{number}, {done}: {error!r}"[:600])
            caplog.clear()
    assert not problems, "\n".join([f"{len(problems)} of {NUM_MUTATIONS}", *problems])
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    counted(f"{NUM_MUTATIONS} mutations of {len(KINDS)} kinds of files, no wrong answer: {listed}")


def repair(work: Path, engine: Engine, place: tuple[str, ...], *, with_command: bool, counts: Counter[str]) -> None:
    """Do what the message says: repair; if the catalogue is lost, ingest again."""
    try:
        report = verify_and_quarantine(work / "kv")
        is_catalog_lost = CATALOG_FILE in report.damaged_files
        if with_command:
            code = run_command("verify", "--repair", *place)
            counts["repaired by the command"] += code == 0
            if code == 0:
                if is_catalog_lost:
                    bring_in(work, engine)
                return
            report = verify_and_quarantine(work / "kv")
        with closing(open_engine_index(work / "kv", engine, create=False)) as index:
            repair_store(report, engine, index)
        if any(place.startswith("models/") for place in report.damaged_files):
            load_engine("demo", work / "kv").close()
        if not report.unrepaired:
            counts["repaired"] += 1
            if is_catalog_lost:
                bring_in(work, engine)
            return
    except RagblendError as error:
        counts["fixes named"] += error.exit_code in DOCUMENTED
    delete_catalog_files(work / "kv")
    bring_in(work, engine)
    run_command("verify", "--repair", *place)
    counts["repaired by ingesting again"] += 1
