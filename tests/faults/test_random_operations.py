"""Documents are added, changed and removed at random, by folders and by both frameworks, on one machine or two: what is
left is what a new store would have. `RAGBLEND_FAULTS=full` raises the count."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from postgres import fresh_schema

from ragblend import ChatBlend
from ragblend.catalog.ledger import open_ledger
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import EmptyCorpusError
from ragblend.ingestion.contexts import chunk_variants
from ragblend.ingestion.documents import delete_precomputed
from ragblend.operations.maintenance import verify_and_quarantine
from ragblend.options import ContextPolicy
from ragblend.precompute import ingest, open_engine_index, precompute_documents
from ragblend.prompt.types import Chunk
from ragblend.vectorstores import BlendVectorStore

NUM_STEPS = 500 if os.environ.get("RAGBLEND_FAULTS") == "full" else 120
NAMES = ("Alice Kern", "Bob Fox", "Tara Kern", "James Bell", "Nexon", "Zenco", "Bexmil", "Rovon")
FACTS = ("works for Nexex in the old harbour", "plays the flute in the town hall", "sells drones to the fire brigade")
TEXTS = [f"{name} {fact}, and has done so for many years." for name in NAMES for fact in FACTS]


class Machine:
    """A store's folder with an engine, a folder of documents, and two vector stores over databases that all share."""

    def __init__(
        self, root: Path, docs: Path, options: dict[str, Any], databases: dict[str, InMemoryVectorStore]
    ) -> None:
        self.root, self.docs = root, docs
        self.docs.mkdir(parents=True, exist_ok=True)
        self.llm = ChatBlend(model="demo", store=str(root), engine_options={"memory_gib": 0, **options})
        self.engine: TransformersEngine = self.llm.engine
        self.stores = {
            name: BlendVectorStore(database, llm=self.llm, collection=name) for name, database in databases.items()
        }

    def ingest_folder(self, context: ContextPolicy) -> None:
        with open_engine_index(self.root, self.engine, "hashing", 64) as index:
            try:
                ingest(self.docs, self.engine, index, context=context)
            except EmptyCorpusError:
                assert not list(self.docs.iterdir())


class Everything:
    """Machines, and all who bring documents to them. `added`: the texts of each document, by collection."""

    def __init__(self, root: Path, options: list[dict[str, Any]], context: ContextPolicy, seed: int = 7) -> None:
        """options: the engine options of each machine; `store`, the name of its folder, is one of them."""
        self.context, self.rng = context, random.Random(seed)
        databases = {name: InMemoryVectorStore(DeterministicFakeEmbedding(size=8)) for name in ("one", "two")}
        self.machines: list[Machine] = []
        self.remotes = {each["remote"] for each in options if "remote" in each}
        for each in options:
            store = each.pop("store")
            self.machines.append(
                Machine(root / store, root / f"{store} documents", each | {"context": context}, databases)
            )
        self.added: dict[str, dict[str, list[str]]] = {"one": {}, "two": {}, "nodes": {}}

    @property
    def machine(self) -> Machine:
        """A machine at random."""
        return self.rng.choice(self.machines)

    def write_file(self) -> None:
        (self.machine.docs / f"{self.rng.randrange(6)}.md").write_text(self.rng.choice(TEXTS))

    def move_file(self) -> None:
        docs = self.machine.docs
        if found := sorted(docs.iterdir()):
            self.rng.choice(found).rename(docs / f"{self.rng.randrange(6)}.md")

    def delete_file(self) -> None:
        if found := sorted(self.machine.docs.iterdir()):
            self.rng.choice(found).unlink()

    def ingest_folder(self) -> None:
        self.machine.ingest_folder(self.context)

    def add_documents(self) -> None:
        stores = self.machine.stores
        name, texts = self.rng.choice(sorted(stores)), self.rng.sample(TEXTS, 2)
        ids = [str(number) for number in self.rng.sample(range(4), 2)]  # of another store's documents as well
        stores[name].add_documents([Document(text, id=each) for text, each in zip(texts, ids, strict=True)])
        self.added[name] |= {each: [text] for text, each in zip(texts, ids, strict=True)}

    def delete_document(self) -> None:
        stores = self.machine.stores
        name = self.rng.choice(sorted(stores))
        if found := sorted(self.added[name]):
            stores[name].delete([gone := self.rng.choice(found)])
            del self.added[name][gone]

    def add_nodes(self) -> None:
        """A version of a document in two calls, as a LlamaIndex pipeline brings one in batches."""
        name, version = str(self.rng.randrange(4)), str(self.rng.random())
        texts = self.rng.sample(TEXTS, 3)
        for batch in (texts[:2], texts[2:]):
            precompute_documents(
                batch, self.machine.llm, ids=[name] * len(batch), versions=[version] * len(batch), collection="nodes"
            )
        self.added["nodes"][name] = texts

    def delete_nodes(self) -> None:
        if found := sorted(self.added["nodes"]):
            delete_precomputed([gone := self.rng.choice(found)], self.machine.llm, collection="nodes")
            del self.added["nodes"][gone]

    def run(self, num_steps: int) -> None:
        """Take steps at random. Check the stores after every 40, and at the end."""
        for number in range(num_steps):
            self.rng.choice(STEPS)(self)
            for machine in self.machines:  # an entry sent after another machine has removed its text would stay
                machine.engine.store.flush()
            if number % 40 == 39 or number == num_steps - 1:
                for machine in self.machines:
                    machine.ingest_folder(self.context)
                for machine in self.machines:  # as it does every few seconds
                    machine.engine.store.apply_deletions()
                self.assert_whole()

    def expected(self) -> set[str]:
        added = {text for documents in self.added.values() for texts in documents.values() for text in texts}
        folders = {machine.docs for machine in self.machines}
        return added | {path.read_text() for docs in folders for path in docs.iterdir()}

    def assert_whole(self) -> None:
        """The stores hold every variant of what is expected, and no other entry."""
        wanted, engine = self.expected(), self.machines[0].engine
        for machine in self.machines:
            with open_ledger(machine.engine.store) as ledger:
                assert set(ledger.texts()) == wanted
        variants = chunk_variants(map(Chunk, wanted), self.context)
        assert {header.key for header in self.all_headers()} == {engine.key(variant) for variant in variants}
        for machine in self.machines:
            report = verify_and_quarantine(machine.root)
            assert not report.has_problems, report
            assert len(self.machines) > 1 or not report.num_without_kv

    def all_headers(self) -> list[KVHeader]:
        """Headers of all entries, in the folders and in the remote tiers."""
        found = [header for machine in self.machines for header in DiskStore(machine.root).headers()]
        for url in self.remotes:
            with closing(open_remote(url)) as tier:  # an engine's own may return what it has just fetched
                found += [kv.header for key in tier.keys() if (kv := tier.get(key)) is not None]  # noqa: SIM118
        return found

    def close(self) -> None:
        for machine in self.machines:
            machine.engine.close()


STEPS: tuple[Callable[[Everything], None], ...] = (
    Everything.write_file, Everything.write_file, Everything.move_file, Everything.delete_file,
    Everything.ingest_folder, Everything.ingest_folder, Everything.add_documents, Everything.add_documents,
    Everything.delete_document, Everything.add_nodes, Everything.delete_nodes,
)  # fmt: skip


@pytest.fixture
def build(tmp_path):
    """`build(options, context)`: see `Everything`. Closed at the end."""
    built: list[Everything] = []

    def build_one(*args: Any) -> Everything:
        built.append(Everything(tmp_path, *args))
        return built[-1]

    yield build_one
    for each in built:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("context", ["none", "neutral"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_one_folder_holds_what_is_left_and_nothing_of_what_was_removed(build, num_engines, context, counted):
    build([{"store": "store"} for _ in range(num_engines)], context).run(NUM_STEPS)
    counted(f"{NUM_STEPS} operations by {num_engines} engines over one folder, context {context}: whole")


@pytest.mark.slow
@pytest.mark.parametrize("context", ["none", "neutral"])
def test_two_machines_with_one_catalogue_hold_what_is_left(build, tmp_path, postgres, context, counted, monkeypatch):
    with fresh_schema(postgres) as catalog:
        monkeypatch.setenv("RAGBLEND_CATALOG", catalog)
        shared = {"catalog": catalog, "remote": f"file://{tmp_path}/remote"}
        build([{"store": name, **shared} for name in ("first", "second")], context).run(NUM_STEPS)
    counted(f"{NUM_STEPS} operations on two machines with one catalogue, context {context}: whole")
