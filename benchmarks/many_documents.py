"""Time to add, replace, remove and match one document in a store of many documents.

    python -m benchmarks.many_documents --out data/results/many-documents.json

A store and a LangChain vector store over it grow to each of the counts. At each count documents are added as LangChain
and LlamaIndex users do, one per call. The model is a random one of two small layers and a document has 24 tokens, so
that a store of a million documents fits on a disk, and the time is that of the catalogue, not of copying bytes. The
entries that fill the store contain zeros. The times are of whole calls, prefill included, and of matching a prompt's
chunks. `open` is the time until the engine of a new process has matched its first prompt.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import Annotated, Any

import torch
import typer
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from benchmarks.results import OutOption, write_result
from ragblend import ChatBlend, Prompt
from ragblend.catalog.ledger import open_ledger
from ragblend.catalog.schema import DocumentKey
from ragblend.cli.printing import print_notice
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import key_from_header
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.lab.bench.common.shapes import DecoderShape
from ragblend.lab.bench.common.workloads import save_checkpoint
from ragblend.vectorstores import BlendVectorStore

COUNTS = (1_000, 10_000, 100_000, 1_000_000)
REPEATS = 20
SHAPE = DecoderShape("llama", 2, 32, 64, 2, 1, 16, vocab_size=512, max_positions=4096)
TOKENS = 24
_FILL_AT_ONCE = 1_000


def text_of(number: int) -> str:
    """Return the text of a document: TOKENS random words of the tokenizer's vocabulary, unique to `number`."""
    return " ".join(map(str, Random(number).choices(range(SHAPE.vocab_size), k=TOKENS)))


class ManyDocuments:
    """A store with documents 0 to `count`, and the operations that are timed."""

    def __init__(self, folder: Path) -> None:
        self.count = 0
        self._folder, self._model = folder / "store", folder / "model"
        save_checkpoint(SHAPE, self._model)
        self.llm = ChatBlend(model=str(self._model), store=str(self._folder), max_tokens=1)
        engine = self.llm.engine
        assert isinstance(engine, TransformersEngine)
        self._engine = engine
        # A vector store whose own cost does not grow with its size: a vector is made from its text's digest.
        self.store = BlendVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), llm=self.llm)

    def grow(self, count: int) -> None:
        """Fill the store up to `count` documents, as if they had been added."""
        disk, layers = DiskStore(self._folder, fsync=False), self._engine.layers
        names = iter(range(self.count, count))
        with open_ledger(self._engine.store) as ledger:
            while numbers := [number for number, _ in zip(names, range(_FILL_AT_ONCE), strict=False)]:
                texts = {DocumentKey(self.store.collection, str(number)): text_of(number) for number in numbers}
                for name, text in texts.items():
                    ledger.add_texts({name: {text: 0}})
                self._engine.add_known_chunks(texts.values())
                for text in texts.values():
                    kv = self._empty_entry(text, layers.kv_shapes)
                    ledger.record_entry_chunk(kv.header.key, kv.header.token_ids, "")
                    disk.put(kv)
        self.count = count

    def _empty_entry(self, text: str, shapes: Any) -> MemoryKV:
        ids = self._engine.renderer.chunk_ids(text)
        facts = (self._engine.fingerprint, self._engine.default_prefix_ids, ids, len(shapes), "float32")
        header = KVHeader(self._engine.key(text), *facts)
        assert key_from_header(header) == header.key
        layers = [
            LayerKV(torch.zeros(heads, len(ids), keys), torch.zeros(heads, len(ids), values))
            for heads, keys, values in shapes
        ]
        return MemoryKV(header, tuple(layers))

    def measure(self) -> dict[str, Any]:
        """Return the median milliseconds of each step at the count that the store has."""
        sleep(3)  # the disk store lists a folder again if it has just changed
        new = iter(range(self.count, self.count + 10 * REPEATS))
        ids = [str(number) for number in range(0, self.count, self.count // REPEATS)]
        self.store.delete([ids[0]])  # a process's first removal and prompt fill caches
        self._match(1)
        steps: dict[str, Callable[[int], object]] = {
            "add": lambda at: self.store.add_documents([Document(text_of(number := next(new)), id=str(number))]),
            "replace": lambda at: self.store.add_documents([Document(text_of(next(new)), id=ids[at])]),
            "match": lambda at: self._match(int(ids[at]) + 1),
            "add and match": lambda at: self._match(self._add(next(new))),
            "remove": lambda at: self.store.delete([ids[at]]),
        }
        found: dict[str, Any] = {"num_documents": self.count}
        for name, step in steps.items():
            found[name] = 1e3 * median(_seconds(step, at) for at in range(1, REPEATS))
        found["open"] = 1e3 * self._open_in_a_new_process()
        return found

    def _add(self, number: int) -> int:
        self.store.add_documents([Document(text_of(number), id=str(number))])
        return number

    def _match(self, number: int) -> None:
        if not self._engine.match(Prompt([text_of(number)], "1 2 3")).runs:
            raise SystemExit(f"document {number} was not matched in its prompt")

    def _open_in_a_new_process(self) -> float:
        program = (
            "from time import perf_counter\nfrom ragblend import Prompt, load_engine\n"
            "from benchmarks.many_documents import text_of\nstart_s = perf_counter()\n"
            f"with load_engine({str(self._model)!r}, {str(self._folder)!r}) as engine:\n"
            "    assert engine.match(Prompt([text_of(1)], '1 2 3')).runs\n    print(perf_counter() - start_s)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])


def _seconds(step: Callable[[int], object], at: int) -> float:
    start_s = perf_counter()
    step(at)
    return perf_counter() - start_s


def main(
    counts: Annotated[list[int], typer.Option("--count", min=100, help="Documents; repeat for more.")] = list(COUNTS),  # noqa: B006
    home: Annotated[Path | None, typer.Option("--dir", help="Folder for a temporary folder with the store.")] = None,
    out: OutOption = None,
) -> None:
    """Measure each step at each number of documents."""
    torch.set_num_threads(1)
    runs = []
    with tempfile.TemporaryDirectory(dir=home) as folder:
        many = ManyDocuments(Path(folder))
        for count in sorted(counts):
            many.grow(count)
            runs.append(many.measure())
            print_notice("  ".join(f"{name} {value:,.1f}" for name, value in runs[-1].items()) + "  (ms)")
    write_result({"command": f"python -m benchmarks.many_documents{_shown(counts)}", "runs": runs}, out)


def _shown(counts: list[int]) -> str:
    return "".join(f" --count {count}" for count in counts)


if __name__ == "__main__":
    typer.run(main)
