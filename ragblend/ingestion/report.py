"""Report of an ingestion. Plain values only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ragblend.corpus.folder_scan import ReadFailure

BLANK_TEXT = "it has no visible text"
"""Reason for which a chunk is in `skipped`."""


@dataclass(slots=True)
class IngestReport:
    """Results of one ingestion: numbers, sizes, durations, and lists of documents and files.

    The paths of files are absolute. The fields `num_..._kv` count KV entries. An entry is the stored KV of one chunk.
    """

    num_documents: int = 0
    num_unchanged: int = 0
    num_updated: int = 0
    num_chunks: int = 0  # chunks of the documents, new and stored ones
    num_tokens: int = 0  # tokens of those chunks, by the LLM's tokenizer
    num_new_kv: int = 0  # chunks prefilled by this ingestion
    num_known_kv: int = 0  # chunks whose KV was stored before
    num_rewritten_kv: int = 0  # stored chunks whose storage dtype was changed
    num_other_kv: int = 0  # stored chunks that stay in another dtype than the store's
    new_kv_bytes: int = 0
    bytes_per_token: int = 0
    store_bytes: int = 0  # size of the whole store on disk
    elapsed_s: float = 0.0
    prefill_s: float = 0.0
    num_evicted_kv: int = 0  # entries that the disk's budget evicted meanwhile, also of earlier ingestions
    num_removed_kv: int = 0  # deleted entries: of changed or removed chunks, and of chunks with them in the context
    removed: list[str] = field(default_factory=list)  # documents that were removed, those of renamed files included
    renamed: dict[str, str] = field(default_factory=dict)  # old path of a file -> new path, with the same bytes
    failures: list[ReadFailure] = field(default_factory=list)
    skipped: list[ReadFailure] = field(default_factory=list)  # files that are no documents
    ignored: list[str] = field(default_factory=list)  # files and folders that `.gitignore` excludes
    notes: list[ReadFailure] = field(
        default_factory=list
    )  # parts of files left out or guessed; texts too short to find

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        lists = {name: [item._asdict() for item in getattr(self, name)] for name in ("failures", "skipped", "notes")}
        return {**asdict(self), **lists}
