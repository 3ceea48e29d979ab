"""Replace `store` and `selections.json` in this folder, after an intended change of ids or file formats.

python tests/golden/write.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from langchain_core.documents import Document

from ragblend import Chunk, Prompt, ingest, load_engine
from ragblend.demo.corpus import sample_corpus
from ragblend.precompute import precompute_documents

GOLDEN = Path(__file__).parent
FILES = {
    "lease.md": "# Turin office\n\nThe lease of the Turin office was signed by Ada Ferro on 3 May 2024.",
    "desks.txt": "The Turin office has forty desks and a roof garden.",
}
DOCUMENTS = [Document("Rovon is led by Mara Quint.", id="a"), Document("Mara Quint was born in Eldale.", id="b")]


def write_store(folder: Path) -> None:
    """Ingest FILES and store DOCUMENTS, each alone and after the neutral text."""
    (folder / "docs").mkdir()
    for name, text in FILES.items():
        (folder / "docs" / name).write_text(text)
    with load_engine("demo", store=folder / "store", dtype="float32", context="neutral") as engine:
        ingest(folder / "docs", engine, folder / "store", embedder="hashing")
        precompute_documents(DOCUMENTS, engine)


def write_selections() -> None:
    """Keys of the demo corpus' chunks, and the tokens that each rule recomputes in prompts that were drawn once."""
    path = GOLDEN / "selections.json"
    golden = json.loads(path.read_text())
    chunks = [chunk for record in sample_corpus().records for chunk in record.chunks]
    with load_engine("demo", store=None, dtype="float32") as engine:
        golden["keys"] = {number: engine.key(Chunk(chunks[int(number)])) for number in golden["keys"]}
        for entry in golden["prompts"]:
            prompt = Prompt([Chunk(chunks[number]) for number in entry["chunks"]], entry["question"])
            list(engine.precompute_all(prompt.chunks))
            for rule in entry["recomputed"]:
                request = engine.request(prompt, rule=rule, recompute_ratio=golden["recompute_ratio"], max_tokens=1)
                entry["recomputed"][rule] = engine.prefill(request).recomputed.tolist()
    lines = ",\n".join(json.dumps(entry) for entry in golden["prompts"])
    head = f'"model": "demo", "recompute_ratio": {golden["recompute_ratio"]}'
    path.write_text(f'{{\n{head},\n"prompts": [\n{lines}\n],\n"keys": {json.dumps(golden["keys"])}\n}}\n')


if __name__ == "__main__":
    write_selections()
    with TemporaryDirectory() as folder:
        write_store(Path(folder))
        shutil.rmtree(GOLDEN / "store")
        ignored = shutil.ignore_patterns("catalog.sqlite*", "vectors.faiss")  # only entries and their models are golden
        shutil.copytree(Path(folder) / "store", GOLDEN / "store", ignore=ignored)
