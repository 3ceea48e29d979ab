"""Zip files of documents (Word, PowerPoint, OpenDocument, EPUB): read parts by name, within limits.

The sizes in a zip's directory may be wrong on purpose, so bytes are counted while they are unpacked.
"""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib

from ragblend.corpus.readers.rejected import OLE_MAGIC, describe_ole
from ragblend.errors import UnreadableDocumentError

MAX_UNPACKED_BYTES = 256 << 20
MAX_ENTRIES = 50_000
_DIRECTORY_ENTRY = b"PK\x01\x02"
_ENCRYPTED_FLAG = 1
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, struct.error)


class ZipContainer:
    """The parts of one zip file. `kind`: the format's name in errors ("Word file")."""

    def __init__(self, data: bytes, kind: str) -> None:
        self.kind = kind
        self._num_unpacked = 0
        self._zip = _open_zip(data, kind)
        # Part names are case-insensitive (ECMA-376 part 2, 6.2.2.3), and some writers use backslashes.
        self._entries = {_part_key(entry.filename): entry for entry in self._zip.infolist()}

    def __contains__(self, name: str) -> bool:
        return _part_key(name) in self._entries

    def check_declared_size(self) -> None:
        """Raise UnreadableDocumentError if the unpacked sizes in the zip file's directory sum to more than
        MAX_UNPACKED_BYTES. Call it before another library unpacks the file.
        """
        if sum(entry.file_size for entry in self._entries.values()) > MAX_UNPACKED_BYTES:
            raise UnreadableDocumentError(_size_message(self.kind))

    def read(self, name: str) -> bytes:
        """Return the bytes of a part. Raises UnreadableDocumentError if it cannot be read or is too large."""
        entry = self._entries.get(_part_key(name))
        if entry is None:
            raise UnreadableDocumentError(
                f"has no part {name!r}, which a {self.kind} needs: it is damaged or of another format; save it again"
            )
        if entry.flag_bits & _ENCRYPTED_FLAG:
            raise UnreadableDocumentError(f"is encrypted (part {name!r}); save it without a password")
        budget = MAX_UNPACKED_BYTES - self._num_unpacked
        try:
            with self._zip.open(entry) as file:
                data = file.read(budget + 1)
        except (NotImplementedError, RuntimeError) as error:
            raise UnreadableDocumentError(f"cannot be unpacked (part {name!r}: {error}); save it again") from error
        except _DAMAGE as error:
            raise UnreadableDocumentError(f"is damaged (part {name!r}: {error}); save or download it again") from error
        if len(data) > budget:
            raise UnreadableDocumentError(_size_message(self.kind))
        self._num_unpacked += len(data)
        return data


def _open_zip(data: bytes, kind: str) -> zipfile.ZipFile:
    if data.startswith(OLE_MAGIC):
        raise UnreadableDocumentError(describe_ole(data, kind))
    # Counted before the directory is read: a ZipInfo per entry takes 30 times the entry's bytes.
    if (num_entries := data.count(_DIRECTORY_ENTRY)) > MAX_ENTRIES:
        raise UnreadableDocumentError(
            f"holds {num_entries} zip entries, but a {kind} with more than {MAX_ENTRIES} is not read; split it"
        )
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except (*_DAMAGE, NotImplementedError) as error:
        raise UnreadableDocumentError(
            f"is no {kind}, or a damaged one ({error}); save or download it again, or correct its name's ending"
        ) from error


def _part_key(name: str) -> str:
    return name.replace("\\", "/").lstrip("/").lower()


def _size_message(kind: str) -> str:
    return f"unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB, but a {kind} of that size is not read; split it"
