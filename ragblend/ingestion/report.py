"""Report of an ingestion. Plain values only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ragblend.corpus.folder_scan import ReadFailure

BLANK_TEXT = "it has no visible text"
"""Reason for which a chunk is in `skipped`."""
NOT_IN_REMOTE = "it is stored, but not in the server's remote tier"
"""Beginning of a server's reason for a stored document of which some KV did not reach its remote tier."""


@dataclass(slots=True)
class IngestReport:
    """Results of one ingestion: numbers, sizes, durations, and lists of documents and files.

    The paths of files are absolute. The fields `num_..._kv` count entries. An entry is the KV of one chunk in one
    context, so a store with the context policy "similar" has two entries of each chunk.
    """

    num_documents: int = 0
    num_unchanged: int = 0
    num_updated: int = 0
    num_chunks: int = 0  # chunks of the documents, new and stored ones
    num_tokens: int = 0  # tokens of those chunks, by the LLM's tokenizer
    num_new_kv: int = 0  # entries prefilled by this ingestion
    num_known_kv: int = 0  # entries that were stored before
    num_rewritten_kv: int = 0  # stored entries whose storage dtype was changed
    num_other_kv: int = 0  # stored entries that stay in another dtype than the store's
    new_kv_bytes: int = 0
    bytes_per_token: int = 0
    store_bytes: int | None = None  # size of the whole store on this machine; None if a server has it
    elapsed_s: float = 0.0
    prefill_s: float = 0.0
    num_evicted_kv: int = 0  # entries that the disk's budget evicted meanwhile, also of earlier ingestions
    num_removed_kv: int = 0  # deleted entries: of changed or removed chunks, and of chunks with them in the context
    num_dropped: int = 0  # entries that did not reach the remote tier; `failures` has a line about them
    problem: str = ""  # why the last of these entries did not reach it
    is_full: bool = False  # the remote tier has no free space
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
