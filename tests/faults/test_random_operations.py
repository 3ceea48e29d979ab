"""Documents come, change and go at random in one store, by folders and by both frameworks: what is left is what a new
store would have. `RAGBLEND_FAULTS=full` raises the count."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from ragblend import ChatBlend
from ragblend.catalog.registry import open_registry
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import EmptyCorpusError
from ragblend.ingestion.documents import delete_precomputed
from ragblend.operations.maintenance import verify_store
from ragblend.options import ContextPolicy
from ragblend.precompute import ingest, open_engine_index, precompute_documents
from ragblend.prompt.types import Chunk
from ragblend.vectorstores import BlendVectorStore

NUM_STEPS = 500 if os.environ.get("RAGBLEND_FAULTS") == "full" else 120
NAMES = ("Alice Kern", "Bob Fox", "Tara Kern", "James Bell", "Nexon", "Zenco", "Bexmil", "Rovon")
FACTS = ("works for Nexex in the old harbour", "plays the flute in the town hall", "sells drones to the fire brigade")
TEXTS = [f"{name} {fact}, and has done so for many years." for name in NAMES for fact in FACTS]


class Everything:
    """One store and all who bring documents to it. `expected`: the texts that each of them has."""

    def __init__(self, root: Path, llm: ChatBlend, context: ContextPolicy, rng: random.Random) -> None:
        self.root, self.llm, self.context, self.rng = root, llm, context, rng
        assert isinstance(llm.engine, TransformersEngine)
        self.engine: TransformersEngine = llm.engine
        self.docs = root / "docs"
        self.docs.mkdir()
        self.stores = {
            name: BlendVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), llm=llm, collection=name)
            for name in ("one", "two")
        }
        self.added: dict[str, dict[str, list[str]]] = {"one": {}, "two": {}, "nodes": {}}

    def write_file(self) -> None:
        (self.docs / f"{self.rng.randrange(6)}.md").write_text(self.rng.choice(TEXTS))

    def move_file(self) -> None:
        if found := sorted(self.docs.iterdir()):
            self.rng.choice(found).rename(self.docs / f"{self.rng.randrange(6)}.md")

    def delete_file(self) -> None:
        if found := sorted(self.docs.iterdir()):
            self.rng.choice(found).unlink()

    def ingest_folder(self) -> None:
        with open_engine_index(self.root / "store", self.engine, "hashing", 64) as index:
            try:
                ingest(self.docs, self.engine, index, context=self.context)
            except EmptyCorpusError:
                assert not list(self.docs.iterdir())

    def add_documents(self) -> None:
        name, texts = self.rng.choice(sorted(self.stores)), self.rng.sample(TEXTS, 2)
        ids = [str(number) for number in self.rng.sample(range(4), 2)]  # of another store's documents as well
        self.stores[name].add_documents([Document(text, id=each) for text, each in zip(texts, ids, strict=True)])
        self.added[name] |= {each: [text] for text, each in zip(texts, ids, strict=True)}

    def delete_document(self) -> None:
        name = self.rng.choice(sorted(self.stores))
        if found := sorted(self.added[name]):
            self.stores[name].delete([gone := self.rng.choice(found)])
            del self.added[name][gone]

    def add_nodes(self) -> None:
        """A version of a document in two calls, as a LlamaIndex pipeline brings one in batches."""
        name, version = str(self.rng.randrange(4)), str(self.rng.random())
        texts = self.rng.sample(TEXTS, 3)
        for batch in (texts[:2], texts[2:]):
            precompute_documents(
                batch, self.llm, ids=[name] * len(batch), versions=[version] * len(batch), collection="nodes"
            )
        self.added["nodes"][name] = texts

    def delete_nodes(self) -> None:
        if found := sorted(self.added["nodes"]):
            delete_precomputed([gone := self.rng.choice(found)], self.llm, collection="nodes")
            del self.added["nodes"][gone]

    def expected(self) -> set[str]:
        added = {text for documents in self.added.values() for texts in documents.values() for text in texts}
        return added | {path.read_text() for path in self.docs.iterdir()}

    def assert_whole(self) -> None:
        """The store holds what is expected, and nothing tells of any other text."""
        wanted = self.expected()
        with open_registry(self.engine.store) as registry:
            assert set(registry.texts()) == wanted
        ids = {self.engine.renderer.chunk_ids(text) for text in wanted}
        alone = {self.engine.key(Chunk(text, context="none")) for text in wanted}
        found = list(DiskStore(self.root / "store").headers())
        assert {header.key for header in found if not header.context} == alone
        for header in found:
            assert header.token_ids in ids
            for part in header.context_ids:
                assert any(part[: len(each)] == each for each in ids), "computed after a text that is gone"
        report = verify_store(self.root / "store")
        assert not report.has_problems, report
        assert not report.num_without_kv


STEPS: tuple[Callable[[Everything], None], ...] = (
    Everything.write_file, Everything.write_file, Everything.move_file, Everything.delete_file,
    Everything.ingest_folder, Everything.ingest_folder, Everything.add_documents, Everything.add_documents,
    Everything.delete_document, Everything.add_nodes, Everything.delete_nodes,
)  # fmt: skip


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Everything]:
    options: dict[str, Any] = {"context": request.param, "memory_gib": 0}
    llm = ChatBlend(model="demo", store=str(tmp_path / "store"), engine_options=options)
    yield Everything(tmp_path, llm, request.param, random.Random(7))
    llm.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("opened", ["none", "similar"], indirect=True)
def test_after_any_operations_the_store_holds_what_is_left_and_nothing_of_what_went(
    opened: Everything, counted: Callable[[str], None]
) -> None:
    for number in range(NUM_STEPS):
        opened.rng.choice(STEPS)(opened)
        if number % 40 == 39:
            opened.ingest_folder()
            opened.assert_whole()
    opened.ingest_folder()
    opened.assert_whole()
    counted(f"{NUM_STEPS} operations by a folder and three collections, context {opened.context}: whole")
