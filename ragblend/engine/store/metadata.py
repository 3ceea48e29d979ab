"""Metadata of a store's folder: small JSON files with a checksum, and a signature where the store has a key.

    ROOT/models/FINGERPRINT.json    facts about a model whose KV the store holds
    ROOT/calibrations/NAME.json     a calibration (see `calibration`)
    ROOT/machines/NAME.json         the prefill times and read speeds of a machine (see `machine`)
    ROOT/context.json               the context policy of the chunks (see `keys`)
    ROOT/store.json                 model and system prompt of the latest ingestion

Works on names, JSON values and one folder. Does not depend on entries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from ragblend.engine.store.base import EntryCheck
from ragblend.engine.store.eviction import NAME
from ragblend.engine.store.format.kv import KVSpec
from ragblend.engine.store.format.signed_json import decode_signed_json, encode_signed_json
from ragblend.engine.store.format.signing import StoreKey
from ragblend.errors import CorruptError, UsageError
from ragblend.files.directory import Directory, remove_file
from ragblend.files.reading import read_file
from ragblend.options import CONTEXT, ContextPolicy

log = logging.getLogger(__name__)

MODELS_DIR, MACHINES_DIR, CALIBRATIONS_DIR = "models", "machines", "calibrations"
CONTEXT_FILE = "context.json"
DEFAULTS_FILE = "store.json"
METADATA_DIRS = (MODELS_DIR, CALIBRATIONS_DIR, MACHINES_DIR)
"""Folders whose JSON files are signed if the store has a key."""


class StoreDefaults(NamedTuple):
    """Model and system prompt of the latest ingestion, the defaults of later commands.

    `model` is "" and `system` is None if they are not known.
    """

    model: str = ""
    system: str | None = None


class StoreMetadata:
    """The metadata files of a store: models, machines, calibrations, context policy and defaults.

    `root`: the store's folder. `store_key`: signs all files except the context policy; None signs nothing.
    """

    root: Path
    store_key: StoreKey | None
    _directory: Directory  # writes below `root`
    _had_models_dir = False

    def is_missing(self) -> bool:
        """Return True if the store's folder was deleted while this object was in use.

        A write creates the folder again, so its subfolder for models is checked, once it has been found.
        """
        has_models_dir = (self.root / MODELS_DIR).is_dir()
        self._had_models_dir = self._had_models_dir or has_models_dir
        return not (has_models_dir if self._had_models_dir else self.root.is_dir())

    def put_model(self, fingerprint: str, facts: Mapping[str, Any]) -> None:
        """Store facts about a model (name, dtype, number of layers, ...) as JSON.

        Raises StoreFullError or StoreNotWritableError if the file cannot be written.
        """
        self._write_metadata(self._model_path(fingerprint), facts)

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the facts that `put_model` stored, by fingerprint. Unreadable files are skipped with a warning."""
        return {path.stem: note for path, note in self._read_metadata(MODELS_DIR, _warn)}

    def model_specs(self) -> dict[str, KVSpec]:
        """Return the dtype and shapes of each model's KV, by fingerprint. Models without a valid spec are left out."""
        specs = {fingerprint: KVSpec.from_facts(facts) for fingerprint, facts in self.models().items()}
        return {fingerprint: spec for fingerprint, spec in specs.items() if spec is not None}

    def has_model(self, fingerprint: str) -> bool:
        """Return True if `put_model` stored facts about the model, readable or not."""
        return self._model_path(fingerprint).exists()

    def put_calibration(self, filename: str, facts: Mapping[str, Any]) -> Path:
        """Store the `facts` of a calibration under `filename`; return the file's path.

        Raises the errors of `put_model`.
        """
        path = self.root / CALIBRATIONS_DIR / filename
        self._write_metadata(path, facts)
        return path

    def put_defaults(self, defaults: StoreDefaults) -> None:
        """Store model and system prompt of the latest ingestion. Replaces earlier ones.

        Raises the errors of `put_model`.
        """
        self._write_metadata(self.root / DEFAULTS_FILE, defaults._asdict())

    def read_defaults(self) -> StoreDefaults:
        """Return the stored defaults; StoreDefaults() if there are none. Raises CorruptError for a damaged file, or for
        an unsigned file if the store has a key."""
        path = self.root / DEFAULTS_FILE
        try:
            note = decode_signed_json(read_file(path), DEFAULTS_FILE, self._note_key(path))
            return StoreDefaults(note["model"], note["system"])
        except FileNotFoundError:
            return StoreDefaults()
        except (OSError, ValueError, KeyError) as error:
            raise CorruptError(
                f"{path} is damaged ({error}), so the model and the system text that its chunks were computed with are "
                "not known. Give `model` and `system`, or drop the file and go on without: ragblend verify --repair "
                f"--store {self.root}"
            ) from error

    def put_context_policy(self, policy: ContextPolicy) -> None:
        """Store the context policy with which chunks are precomputed. Raises the errors of `put_model`."""
        self._write_metadata(self.root / CONTEXT_FILE, {"context": policy})

    def read_context_policy(self) -> ContextPolicy | None:
        """Return the policy that `put_context_policy` stored; None if there is none. Raises CorruptError for damage."""
        path = self.root / CONTEXT_FILE
        try:
            policy = decode_signed_json(read_file(path), _note_kind(path)).get("context")
            if not CONTEXT.accepts(policy):
                raise ValueError(f"its context is {policy!r}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CorruptError(
                f"{path} is damaged ({error}), so the ingestion context of the store's chunks is not known. Set it: "
                f"ragblend precompute --context none|neutral --store {self.root}; or delete the file: "
                f"ragblend verify --repair --store {self.root}"
            ) from error
        return cast(ContextPolicy, policy)

    def verify_metadata(
        self, problem_of: Callable[[Path, Mapping[str, Any]], str] | None = None
    ) -> Iterator[EntryCheck]:
        """Yield an EntryCheck for each metadata file with a problem. `EntryCheck.key` is the file's path below `root`.

        A file has a problem if it is damaged, if it should be signed with the store's key and is not, or if
        `problem_of` returns a text. problem_of: called with path and facts of each intact file of a model, calibration
        or machine. Returns the problem as text; "" for none.
        """
        checks = list[EntryCheck]()

        def complain(path: Path, error: Exception) -> None:
            checks.append(EntryCheck(_place(path), False, str(error)))

        for folder in METADATA_DIRS:
            for path, note in self._read_metadata(folder, complain):
                problem = problem_of(path, note) if problem_of is not None else ""
                if problem:
                    checks.append(EntryCheck(_place(path), False, problem))
        for name, read in ((CONTEXT_FILE, self.read_context_policy), (DEFAULTS_FILE, self.read_defaults)):
            try:
                read()
            except CorruptError as error:
                checks.append(EntryCheck(name, False, str(error.__cause__)))
        yield from checks

    def delete_metadata(self, location: str) -> None:
        """Delete a metadata file. location: its path below `root`. Raises StoreNotWritableError."""
        remove_file(self.root / location)

    def _read_metadata(
        self, folder: str, complain: Callable[[Path, Exception], object] = lambda *_: None
    ) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the metadata files of a folder with their facts. `complain` is called for each unreadable one."""
        for path in sorted((self.root / folder).glob("[!.]*.json")):
            try:
                yield path, decode_signed_json(read_file(path), _note_kind(path), self._note_key(path))
            except FileNotFoundError:
                continue  # deleted since the listing
            except (OSError, ValueError) as error:
                complain(path, error)

    def _write_metadata(self, path: Path, facts: Mapping[str, Any]) -> bool:
        """Write the file. Return False, without writing, if it has these facts already."""
        data = encode_signed_json(facts, _note_kind(path), self._note_key(path))
        with suppress(OSError):
            if read_file(path) == data:
                return False
        self._directory.write(path, data)
        return True

    def _note_key(self, path: Path) -> StoreKey | None:
        return self.store_key if path.parent.name in METADATA_DIRS or path.name == DEFAULTS_FILE else None

    def sign_metadata_files_again(self, source: StoreMetadata) -> int:
        """Sign the metadata files that `source` accepts and this store rejects. Return the number of signed files.

        source: the metadata of the same directory, opened with another key or with none.
        """
        count = 0
        for folder in METADATA_DIRS:
            signed = {path for path, _ in self._read_metadata(folder)}
            for path, note in source._read_metadata(folder):
                if path not in signed:
                    self._write_metadata(path, note)
                    count += 1
        with suppress(CorruptError):
            if (defaults := source.read_defaults()) != StoreDefaults():
                count += self._write_metadata(self.root / DEFAULTS_FILE, defaults._asdict())
        return count

    def _model_path(self, fingerprint: str) -> Path:
        return self.root / MODELS_DIR / f"{checked_name(fingerprint)}.json"


def _warn(path: Path, error: Exception) -> None:
    log.warning("%s is damaged (%s)", path, error)


def _note_kind(path: Path) -> str:
    """Return the kind under which a file is signed. Facts about a model do not name it, so the kind does."""
    if path.name in (CONTEXT_FILE, DEFAULTS_FILE):
        return path.name
    return _place(path) if path.parent.name == MODELS_DIR else path.parent.name


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def checked_name(name: str) -> str:
    """Return `name`, a key or a fingerprint, unchanged. Raises UsageError if it cannot be a file name (NAME)."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a file of a store; use `store.keys`'s chunk_key or fingerprint")
    return name
