"""Settings: flags > `RAGBLEND_*` environment > the folder's `ragblend.toml` > the user's own file > defaults.

A folder may come from anywhere, so its file sets what answers look like, and what is inside the folder. What would run
code, send documents elsewhere or reach into other folders counts from flags, the environment and the user's own
`$XDG_CONFIG_HOME/ragblend/config.toml` only; in a folder's file it is ignored, and said. A frozen value, checked once,
at birth.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ragblend.errors import UsageError
from ragblend.files.reading import read_file
from ragblend.redaction import redacted

log = logging.getLogger(__name__)

CONFIG_FILE = "ragblend.toml"
USER_FILE = "config.toml"
"""The user's own settings, in `user_folder()`."""
_EMBEDDERS = ("auto", "minilm", "hashing")


@dataclass(frozen=True, slots=True)
class Settings:
    """What every command and `load_engine` can be told. Paths are relative to the working directory."""

    model: str = "demo"  # "demo", a Hugging Face id or a local path
    backend: str = "transformers"  # transformers, vllm, or the address of a server: http://HOST:PORT
    dtype: str = "auto"  # auto (the checkpoint's, float32 on CPU), float32, bfloat16, float16
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    index: str = "ragblend-data/index"
    store: str = "ragblend-data/kv"
    embedder: str = "auto"  # auto (MiniLM if installed, else hashing), minilm, hashing, a Hugging Face id or a path
    memory_gib: float = 2.0  # budget of the memory tier
    disk_gib: float = 0.0  # budget of the disk tier; 0: no limit
    remote: str | None = None  # shared tier: redis://HOST:6379/0, s3://BUCKET/PREFIX or any fsspec URL
    store_key_file: str | None = None  # signs and checks what is stored; None: what `ragblend init-key` made, if it did
    remote_timeout_s: float = 5.0  # longest wait for one chunk from there
    kv_dtype: str = "auto"  # how new KV is stored: auto (as computed), int8, fp8
    chunk_size: int | None = None  # tokens of the LLM's own tokenizer; None: the index's own, 512 for a new one
    max_file_mib: float = 256.0  # ingest: larger files are not read, and are said; 0: no limit
    neighbour_kv: bool = False  # ingest: also keep each chunk's KV as computed behind the chunk before it
    k: int = 6  # chunks retrieved per question
    neighbours: int = 0  # chunks added before and after each hit, from the same document
    order: str = "score"  # score, or document: hits in reading order
    mode: str = "blend"
    rule: str = "auto"
    ratio: float | Literal["auto"] | None = None  # recompute ratio; None and "auto": calibrated, else the default
    max_tokens: int = 256
    system: str | None = None
    namespace: str = ""
    trust_remote_code: bool = False
    shadow: float = 0.0  # share of the requests that full prefill runs beside, to count how often they agree

    def __post_init__(self) -> None:
        if self.ratio not in (None, "auto") and not (isinstance(self.ratio, int | float) and 0 <= self.ratio <= 1):
            raise UsageError(
                f"ratio is {self.ratio}; choose 0 (full reuse) to 1 (recompute every chunk token), or auto"
            )
        if not 0 <= self.shadow <= 1:
            raise UsageError(f"shadow is {self.shadow}; choose 0 (off) to 1 (full prefill beside every request)")
        for name in ("chunk_size", "k", "max_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")
        if self.neighbours < 0:
            raise UsageError(f"neighbours is {self.neighbours}; choose 0 or more")
        for name, meaning in (
            ("memory_gib", "no memory tier"),
            ("disk_gib", "no limit"),
            ("max_file_mib", "no limit"),
        ):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 0 ({meaning}) or more")
        if self.remote_timeout_s <= 0:
            raise UsageError(f"remote_timeout_s is {self.remote_timeout_s}; choose more than 0 seconds")
        if self.backend not in ("transformers", "vllm") and not self.is_served:
            raise UsageError(
                f"backend is {redacted(self.backend)!r}; choose transformers, vllm or a server's http://HOST:PORT"
            )
        for name, known in (
            ("mode", ("blend", "full", "prefix", "reuse")),
            ("order", ("score", "document")),
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("kv_dtype", ("auto", "int8", "fp8")),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}")

    @property
    def is_served(self) -> bool:
        """Whether the backend is a server: the KV store is then the server's."""
        return _is_url(self.backend)

    def __repr__(self) -> str:
        """Without passwords, which URLs may hold."""
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shown |= {name: value and redacted(value) for name, value in shown.items() if name in ("remote", "backend")}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def load_settings(flags: Mapping[str, Any] | None = None, directory: Path | None = None) -> Settings:
    """Settings from `flags` (None values are unset), the environment, `directory`'s `ragblend.toml`, the user's own."""
    folder = directory or Path.cwd()
    own = _from_file(user_folder() / USER_FILE)
    said = read_environment(os.environ) | {name: value for name, value in (flags or {}).items() if value is not None}
    return Settings(**own | _believed(_from_file(folder / CONFIG_FILE), folder, own | said) | said)


def trusted_setting(name: str) -> Any:
    """A setting that no folder's file may set: from the environment, else the user's own file; None where unset."""
    return read_environment(os.environ, (name,)).get(name, _from_file(user_folder() / USER_FILE).get(name))


def user_folder() -> Path:
    """Where the user's own configuration is: `$XDG_CONFIG_HOME/ragblend`, else `~/.config/ragblend`."""
    named, home = Path(os.environ.get("XDG_CONFIG_HOME", "")), os.path.expanduser("~")  # noqa: PTH111 (Path's raises)
    return (named if named.is_absolute() else Path("/", home, ".config")) / "ragblend"  # never below the working folder


def _believed(found: Mapping[str, Any], folder: Path, trusted: Mapping[str, Any]) -> dict[str, Any]:
    """What of a folder's file counts. `trusted`: what flags, environment and the user's own file say."""
    believed = {}
    for name, value in found.items():
        reason = _refusal(name, value, folder, trusted)
        if not reason:
            believed[name] = value
        elif name not in trusted:
            log.warning(
                "%s sets %s, which is ignored: %s. If you want it, say so yourself: its flag, RAGBLEND_%s, or %s",
                folder / CONFIG_FILE, name, reason, name.upper(), user_folder() / USER_FILE,
            )  # fmt: skip
    return believed


def _refusal(name: str, value: Any, folder: Path, trusted: Mapping[str, Any]) -> str:
    """Why a folder's file may not set `name` to `value`; "" where it may."""
    if name == "trust_remote_code" and value:
        return "it would run code that comes with a model"
    if name == "model" and trusted.get("trust_remote_code"):
        return "it would choose the model whose code runs"
    if name == "embedder" and value not in _EMBEDDERS and (_is_path(value) or (folder / value).exists()):
        return "an embedding model in a folder may bring code"
    if name == "remote":
        return "your documents' KV would go there, and what is there would be believed"
    if name == "backend" and _is_url(value):
        return "your documents and questions would go there, with your API key"
    if name == "store_key_file":
        return "who knows the key can write what is believed"
    if name in ("index", "store") and not _is_inside(value, folder):
        return "it is outside of that folder"
    if name == "disk_gib" and not _is_inside(trusted.get("store", Settings().store), folder):
        return "it would evict KV of a store outside of that folder"
    return ""


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") > 1


def _is_inside(path: str, folder: Path) -> bool:
    try:
        return (folder / path).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or no path at all
        return False


def _from_file(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        values = tomllib.loads(read_file(path).decode())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    known = {field.name for field in fields(Settings)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"{path} sets {', '.join(unknown)}; known settings: {', '.join(sorted(known))}")
    return {name: _cast(name, value, str(path)) for name, value in values.items()}


def read_environment(environment: Mapping[str, str], names: Collection[str] | None = None) -> dict[str, Any]:
    """Settings that `environment` has as `RAGBLEND_NAME`: all of them, or those named."""
    values = {}
    for field in fields(Settings):
        variable = f"RAGBLEND_{field.name.upper()}"
        if variable in environment and (names is None or field.name in names):
            values[field.name] = _cast(field.name, environment[variable], variable)
    return values


def _cast(name: str, value: Any, origin: str) -> Any:
    """`value` as the setting's type; text from the environment is parsed."""
    hint = get_type_hints(Settings)[name]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    if any(get_origin(kind) is Literal and value in get_args(kind) for kind in kinds):
        return value
    try:
        if kinds[0] is bool and isinstance(value, str):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[value.lower()]
        if isinstance(value, bool | float) and kinds[0] is int and (isinstance(value, bool) or value % 1):
            raise ValueError  # int() would round 2.5 and count true as 1
        return kinds[0](value)
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{origin} sets {name} to {value!r}; expected {kinds[0].__name__}") from error
