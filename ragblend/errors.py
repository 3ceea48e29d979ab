"""Errors of the package, each with the exit code of the command line.

Messages contain the value, the reason and the command to type. Does not depend on the rest of the package.
"""

from __future__ import annotations


class RagblendError(Exception):
    """Base of the package's errors. `exit_code` is the exit code of a command that ends with it."""

    exit_code: int = 1


class UsageError(RagblendError, ValueError):
    """An argument outside its range, or two that exclude each other."""

    exit_code = 2


class NotFoundError(RagblendError, FileNotFoundError):
    """An index, a store, a model or a path that does not exist."""

    exit_code = 3

    def __str__(self) -> str:  # FileNotFoundError would print errno and file name
        return str(self.args[0]) if self.args else ""


class CorruptError(RagblendError):
    """Stored bytes that do not match their checksum or schema."""

    exit_code = 4


class DamagedEntryError(CorruptError):
    """A stored entry that fails a check, such as its checksum, or cannot be read. Callers treat `key` as a miss."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"stored KV {key} is damaged ({reason}); `ragblend verify --repair` drops and recomputes it")
        self.key = key
        self.reason = reason


class LateEntryError(DamagedEntryError):
    """An entry of which the rest did not arrive from a remote tier in time. Callers treat `key` as a miss."""

    def __init__(self, key: str, reason: str) -> None:
        RagblendError.__init__(self, f"stored KV {key} is not used ({reason})")
        self.key = key
        self.reason = reason


class BacklogFullError(RagblendError):
    """A namespace has as many documents that wait to be stored as it may have. The same request succeeds later."""


class BackendUnreachableError(RagblendError, ConnectionError):
    """A server, a remote tier or a catalogue's database that does not answer."""

    exit_code = 5


class EngineClosedError(RagblendError):
    """A call to a closed engine. A stream that is open when the engine is closed ends without an error."""


class UnsupportedModelError(RagblendError):
    """A model whose layers cannot be fused exactly. The message names the layer type and the fix."""


class PromptTooLongError(RagblendError):
    """A prompt or a chunk that is longer than the model's context length."""


class StoreMismatchError(RagblendError):
    """A store or an index that belongs to another model."""


class StoreFullError(RagblendError):
    """The disk is full, or one chunk exceeds a tier's byte budget."""


class StoreNotWritableError(RagblendError):
    """A file or folder that is read-only, of another user, or on a failing disk; nothing was written."""


class EmptyCorpusError(RagblendError):
    """Nothing to ingest, or nothing ingested yet."""


class UnreadableDocumentError(RagblendError):
    """A document that could not be read as text. Ingestion reports it and continues with the others."""


class NotADocumentError(UnreadableDocumentError):
    """A file without text: it is empty or of an unsupported type. In a folder such files are skipped and counted."""
