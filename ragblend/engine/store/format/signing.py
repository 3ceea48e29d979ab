"""The store key: a secret that signs entries and metadata, so that only its holders can write what a store accepts.

A signature is keyed BLAKE2b (RFC 7693) over a whole header, which contains a BLAKE3 digest of every layer. From the
store key, one key is derived for the entries of each namespace, and one for each kind of metadata (calibrations,
models, machines). A signature is therefore valid for one purpose only. The store key comes from the environment or from
a file of the user, never from a working folder, and is never printed. Works on bytes and paths.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Literal, NoReturn

from ragblend.config import trusted_setting, user_folder
from ragblend.errors import UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_private_file

KEY_VARIABLE = "RAGBLEND_STORE_KEY"
KEY_FILE = "store.key"
"""Name of the default key file in the user's configuration folder."""

DIGITS = 64  # of a signature
_KEY_BYTES = 32
_LEAST_TEXT = 16  # letters of a key that is not 64 hex digits: a shorter one can be guessed
_SALT = b"ragblend store key"

Purpose = Literal["entry", "note"]
"""The kinds of signed data: entries, and metadata files."""


class StoreKey:
    """A secret key that signs entries and metadata. The key is never shown; its `id` identifies it in messages."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != _KEY_BYTES:
            raise UsageError(f"a store key has {_KEY_BYTES} bytes, this one {len(secret)}; make one: ragblend init-key")
        self._secret = secret

    @classmethod
    def parse(cls, text: str, origin: str = "the store key") -> StoreKey:
        """Return the key that `text` gives. 64 hex digits are the key itself.

        Any other text is a passphrase of at least 16 letters, from which scrypt derives the key. scrypt is slow by
        design, so that guessing the passphrase is slow. Raises UsageError for a shorter text; the error does not show
        the text. origin: where the text is from, for the error.
        """
        text = text.strip()
        try:
            secret = bytes.fromhex(text) if len(text) == 2 * _KEY_BYTES else b""
        except ValueError:
            secret = b""
        if not secret:
            if len(text) < _LEAST_TEXT:
                raise UsageError(
                    f"{origin} has {len(text)} letters; give 64 hex digits (ragblend init-key makes a file of them; "
                    f"openssl rand -hex 32 prints some), or {_LEAST_TEXT} letters at least"
                )
            secret = _stretched(text)
        return cls(secret)

    @property
    def id(self) -> str:
        """8 hex digits that differ from key to key."""
        return self._derived("id").hex()[:8]

    def sign(self, purpose: Purpose, name: str, message: bytes | bytearray) -> str:
        """Return the signature of `message`, 64 hex digits. It is valid for one `purpose` and one `name` only.

        purpose: "entry" for the header of an entry; `name` is its namespace. "note" for a metadata file; `name` is its
        kind.
        """
        return hashlib.blake2b(message, key=self._derived(purpose, name), digest_size=DIGITS // 2).hexdigest()

    def has_signed(self, purpose: Purpose, name: str, message: bytes | bytearray, signature: str) -> bool:
        """Return True if `signature` is the result of `sign` for the other arguments."""
        expected = self.sign(purpose, name, message)
        return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogatepass"))

    def _derived(self, purpose: str, name: str = "") -> bytes:
        data = name.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._secret, person=purpose.encode(), digest_size=_KEY_BYTES).digest()

    def __repr__(self) -> str:
        return f"StoreKey(id={self.id})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a store key is not pickled; give other processes {KEY_VARIABLE}, or the key's file")


KeyChoice = StoreKey | None | Literal["auto"]
"""The key of a store: "auto" is the result of `find_process_key`, None is no key."""


def resolve_key(choice: KeyChoice) -> StoreKey | None:
    """Return the key for a `choice`: "auto" is the key of the process, a StoreKey is itself, and None is no key."""
    return find_process_key() if isinstance(choice, str) else choice


def find_process_key() -> StoreKey | None:
    """Return the key of this process; None if there is none.

    The first of these is used: the variable RAGBLEND_STORE_KEY; the file that the setting `store_key_file` names; the
    file at `key_path`, which `ragblend init-key` writes. The setting is read from RAGBLEND_STORE_KEY_FILE or from the
    user's own configuration.

    Raises UsageError or NotFoundError if a key is configured and cannot be used, because a process without a key would
    accept unsigned entries.
    """
    if (text := os.environ.get(KEY_VARIABLE)) is not None:
        return StoreKey.parse(text, KEY_VARIABLE)
    if (named := trusted_setting("store_key_file")) is not None:
        return read_key(expand_user_path(named, "store_key_file"))
    path = key_path()
    return read_key(path) if os.path.lexists(path) else None


def key_path() -> Path:
    """Return the default path of the key: `$XDG_CONFIG_HOME/ragblend/store.key`."""
    return user_folder() / KEY_FILE


def key_origin() -> str:
    """Return the name of the variable, or the path of the file, that `find_process_key` reads. For messages."""
    if KEY_VARIABLE in os.environ:
        return KEY_VARIABLE
    return str(trusted_setting("store_key_file") or key_path())


def read_key(path: Path) -> StoreKey:
    """Return the key in a file. Raises NotFoundError for a missing file, UsageError for a file without a valid key.

    Raises UsageError, too, for a file with unsafe permissions (see `read_private_file`).
    """
    missing = f"there is no store key at {path}; make one: ragblend init-key --key-file {path}"
    text = read_private_file(path, "the store key", missing, 4096)
    try:
        return StoreKey.parse(text.decode("utf-8-sig"), f"the store key {path}")
    except UnicodeDecodeError:
        raise UsageError(f"the store key {path} is no text; make one: ragblend init-key --key-file {path}") from None


def write_key(path: Path) -> StoreKey:
    """Create a key and write it to a file of mode 0600. Raises UsageError if the file exists or cannot be written."""
    secret = secrets.token_bytes(_KEY_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as stream:
            stream.write(secret.hex() + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except FileExistsError:
        raise UsageError(
            f"there is a file at {path} already. A new key would make its signatures invalid; "
            "to change keys: move the file away, make a new one, and sign the store again (ragblend sign)"
        ) from None
    except OSError as error:
        raise UsageError(f"the store key cannot be written to {path}: {error.strerror or error}") from error
    return StoreKey(secret)


UNSIGNED = "it is not signed with this store's key"


@lru_cache(maxsize=8)
def _stretched(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(data, salt=_SALT, n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=_KEY_BYTES)
