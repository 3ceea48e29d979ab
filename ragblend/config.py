"""Settings: flags > `RAGBLEND_*` environment > the folder's `ragblend.toml` > the user's own file > defaults.

A folder may be of unknown origin, so its file may only set how answers are made, and paths inside the folder. Settings
that run code, send documents elsewhere or name other folders are read from flags, the environment and the user's own
`$XDG_CONFIG_HOME/ragblend/config.toml` only; in a folder's file they are ignored with a warning. `Settings` are frozen
and validated when they are created.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ragblend.errors import UsageError
from ragblend.files.directory import Directory
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_text
from ragblend.files.store_folder import DEFAULT_STORE
from ragblend.option_fields import at_least, copy_option, one_of, option
from ragblend.options import (
    BACKEND,
    GENERATION_NAMES,
    SELECTION_NAMES,
    ContextPolicy,
    Deviation,
    GenerationOptions,
    LoadOptions,
    Mode,
    ModelOptions,
    RatioChoice,
    SelectionOptions,
    TierOptions,
    is_server_url,
)
from ragblend.redaction import redact_url

log = logging.getLogger(__name__)

CONFIG_FILE = "ragblend.toml"
USER_FILE = "config.toml"
"""The user's own settings, in `user_folder()`."""
_EMBEDDERS = ("auto", "minilm", "hashing")
_WITHOUT_FLAG = (
    "memory_gib",
    "disk_gib",
    "kv_dir",
    "catalog",
    "remote_timeout_s",
    "refine_ratio",
    *SELECTION_NAMES,
    "store_key_file",
    "auto_profile",
    "max_file_mib",
    "gpus_per_worker",
)
"""Settings without a flag: the environment or a file sets them."""
_ARGUMENT_FLAGS = {  # arguments of functions that are no settings, and the flag that sets each
    "address": "--workers",
    "api_key": "--api-key",
    "count": "--workers",
    "keys": "--api-keys-file",
    "loader": "--loader",
    "precompute": "--precompute",
    "vllm_options": "--vllm-options",
}
_ARGUMENT = re.compile(r"`([a-z_]+)(?:=([^`]+))?`")


@dataclass(frozen=True, slots=True)
class Settings(TierOptions):
    """The settings of every command. Paths are relative to the working folder, `~` is the home.

    Those that are options of `load_engine` have its names and meanings. In Python they are arguments: `load_engine`
    reads no settings, except the user's own `catalog` and `auto_profile`.
    """

    model: str | None = option(
        None,
        "'demo', Hugging Face id, folder or [repo:]FILE.gguf. Default: the store's.",
    )
    backend: str = option(
        "transformers",
        "Engine: transformers, vllm, or a server's http://HOST:PORT (ragblend serve).",
        BACKEND,
    )
    dtype: str = copy_option(ModelOptions, "dtype")
    device: str = copy_option(ModelOptions, "device")
    store: str = option(DEFAULT_STORE, "Directory of the documents and their KV.")
    store_key_file: str | None = None  # key that signs and checks stored KV; None: that of `ragblend init-key`, if any
    embedder: str = option("auto", "minilm, hashing, a Hugging Face id or a folder.")  # auto: minilm if installed
    chunk_size: int | None = option(None, "Most tokens of a chunk. Default: the store's, or 512.", at_least(1))
    max_file_mib: float = option(
        256.0, "Largest file to read, in MiB; larger ones are skipped.", at_least(0, "no limit")
    )
    text_field: str = option("", "Text field of CSV, JSON, Parquet records: body, article.body.")
    gpus_per_worker: float = option(0.0, "GPUs of each ingestion worker.", at_least(0))
    context: ContextPolicy | None = copy_option(LoadOptions, "context")
    k: int = option(6, "Chunks retrieved per question.", at_least(1), flag="-k")
    neighbours: int = option(0, "Chunks added around each hit.", at_least(0))
    order: str = option("score", "Chunks by 'score' or in 'document' order.", one_of("score", "document"))
    mode: Mode = copy_option(GenerationOptions, "mode")
    rule: str = copy_option(GenerationOptions, "rule")
    recompute_ratio: RatioChoice = copy_option(GenerationOptions, "recompute_ratio")
    refine_ratio: float | None = copy_option(GenerationOptions, "refine_ratio")
    check_layers: Sequence[int] | None = copy_option(SelectionOptions, "check_layers")
    recompute_ratios: Sequence[float] | None = copy_option(SelectionOptions, "recompute_ratios")
    deviation: Deviation | None = copy_option(SelectionOptions, "deviation")
    deviation_thresholds: Sequence[float] | None = copy_option(SelectionOptions, "deviation_thresholds")
    blend_min_tokens: int | None = copy_option(SelectionOptions, "blend_min_tokens")
    max_tokens: int = copy_option(GenerationOptions, "max_tokens")
    temperature: float = copy_option(GenerationOptions, "temperature")
    system: str | None = copy_option(LoadOptions, "system")
    namespace: str = copy_option(LoadOptions, "namespace")
    trust_remote_code: bool = copy_option(ModelOptions, "trust_remote_code")
    shadow: float = copy_option(LoadOptions, "shadow")
    auto_profile: bool | None = copy_option(LoadOptions, "auto_profile")

    def __post_init__(self) -> None:
        TierOptions.__post_init__(self)
        object.__setattr__(self, "store", str(expand_user_path(self.store, "store")))

    @property
    def generation(self) -> dict[str, Any]:
        """The keyword arguments of `generate` and `stream`."""
        shared = self.__dataclass_fields__.keys() & set(GENERATION_NAMES)
        return GenerationOptions(**{name: getattr(self, name) for name in shared}).keywords

    @property
    def selection(self) -> dict[str, Any]:
        """The fields of SelectionOptions that are set."""
        return SelectionOptions(**{name: getattr(self, name) for name in SELECTION_NAMES}).selection

    @property
    def model_options(self) -> ModelOptions:
        """The options for loading the model."""
        return ModelOptions(dtype=self.dtype, device=self.device, trust_remote_code=self.trust_remote_code)

    @property
    def is_served(self) -> bool:
        """True if the backend is a server, which then has the KV store."""
        return is_server_url(self.backend)

    def __repr__(self) -> str:
        """Return the settings without passwords in URLs."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {name: values[name] and redact_url(values[name]) for name in ("remote", "catalog", "backend")}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def load_settings(flags: Mapping[str, Any] | None = None, directory: Path | None = None) -> Settings:
    """Return the settings from `flags`, the environment, `ragblend.toml` in `directory` and the user's file.

    An earlier source overrides a later one. A flag that is None is not set. `directory`: by default the working folder.
    Raises UsageError for an unknown setting in a file, and for an invalid value.
    """
    folder = directory or Path.cwd()
    user_settings = _read_settings_file(user_folder() / USER_FILE)
    said = read_environment(os.environ) | {name: value for name, value in (flags or {}).items() if value is not None}
    return Settings(
        **user_settings
        | _trusted_settings(_read_settings_file(folder / CONFIG_FILE), folder, user_settings | said)
        | said
    )


def trusted_setting(name: str) -> Any:
    """Return a setting from the environment or the user's file, never from a folder's file; None if neither sets it."""
    if (variable := f"RAGBLEND_{name.upper()}") in os.environ:
        return _cast(name, os.environ[variable], variable)
    return _read_settings_file(user_folder() / USER_FILE).get(name)


def user_folder() -> Path:
    """Return the folder of the user's own configuration: `$XDG_CONFIG_HOME/ragblend`, else `~/.config/ragblend`."""
    named, home = Path(os.environ.get("XDG_CONFIG_HOME", "")), os.path.expanduser("~")  # noqa: PTH111 (Path's raises)
    return (named if named.is_absolute() else Path("/", home, ".config")) / "ragblend"  # never below the working folder


def write_user_setting(name: str, value: str) -> Path:
    """Write a setting into the user's own file, whose other lines stay as they are. Return the file's path.

    Raises UsageError if the file is not valid, StoreNotWritableError or StoreFullError if it cannot be written.
    """
    path = (user_folder() / USER_FILE).resolve()  # the file may be a link to another folder
    settings = _read_settings_file(path)
    text = read_text(path, "settings", "repair the file, or move it away") if path.exists() else ""
    line = f"{name} = {json.dumps(value, ensure_ascii=False)}"  # also a string in TOML
    if name in settings:
        text = re.sub(rf"(?m)^\s*{name}\s*=.*$", lambda _: line, text)
    else:
        text += ("" if text.endswith("\n") or not text else "\n") + line + "\n"
    try:
        is_written = {**settings, name: value} == tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        is_written = False
    if not is_written:
        raise UsageError(f"{path} has {name} in a form that is not changed here; write this line into it: {line}")
    Directory(path.parent, fsync=True).write(path, text.encode())
    return path


def _trusted_settings(file_settings: Mapping[str, Any], folder: Path, trusted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folder file's accepted settings. `trusted`: those of flags, environment and user file."""
    accepted = {}
    for name, value in file_settings.items():
        reason = _rejection_reason(name, value, folder, trusted)
        if not reason:
            accepted[name] = value
        elif name not in trusted:
            log.warning(
                "%s sets %s, which is ignored: %s. To set it, use its flag, RAGBLEND_%s, or %s",
                folder / CONFIG_FILE,
                name,
                reason,
                name.upper(),
                user_folder() / USER_FILE,
            )
    return accepted


def _rejection_reason(name: str, value: Any, folder: Path, trusted: Mapping[str, Any]) -> str:
    """Return why a folder's file may not set `name` to `value`; "" if it may."""
    if name == "trust_remote_code" and value:
        return "it would run code that comes with a model"
    if name == "model" and trusted.get("trust_remote_code"):
        return "it would choose the model whose code runs"
    if name == "embedder" and value not in _EMBEDDERS and (_is_path(value) or (folder / value).exists()):
        return "an embedding model in a folder may bring code"
    if name == "remote":
        return "your documents' KV would be sent there, and KV from there would be used"
    if name == "catalog":
        return "the texts of your documents would be sent there"
    if name == "backend" and is_server_url(value):
        return "your documents and questions would be sent there, with your API key"
    if name == "store_key_file":
        return "anyone with the key can write KV that is used"
    if name in ("store", "kv_dir") and not _is_inside(value, folder):
        return "it is outside of that folder"
    if name == "disk_gib" and not _is_inside(trusted.get("store", Settings().store), folder):
        return "it would evict KV of a store outside of that folder"
    return ""


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") > 1


def _is_inside(path: str, folder: Path) -> bool:
    try:
        return (folder / Path(path).expanduser()).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or not a path
        return False


def _read_settings_file(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        values = tomllib.loads(read_text(path, "settings", "repair the file, or move it away"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    names = {field.name for field in fields(Settings)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise UsageError(f"{path} sets {', '.join(unknown)}; known settings: {', '.join(sorted(names))}")
    return {name: _cast(name, value, str(path)) for name, value in values.items()}


def read_environment(environment: Mapping[str, str], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the settings in the variables `RAGBLEND_NAME` of `environment`; with `names`, only these settings."""
    values = {}
    for field in fields(Settings):
        variable = f"RAGBLEND_{field.name.upper()}"
        if variable in environment and (names is None or field.name in names):
            values[field.name] = _cast(field.name, environment[variable], variable)
    return values


def flag_name(argument: str) -> str:
    """Return the command-line flag of a setting or of another argument; "" if it has no flag.

    >>> flag_name("k"), flag_name("kv_dtype"), flag_name("recompute_ratio"), flag_name("disk_gib")
    ('-k', '--kv-dtype', '--ratio', '')
    """
    field = Settings.__dataclass_fields__.get(argument)
    if field is None or argument in _WITHOUT_FLAG:
        return _ARGUMENT_FLAGS.get(argument, "")
    return (field.metadata["option"].flag if "option" in field.metadata else "") or f"--{argument.replace('_', '-')}"


unflagged_settings: ContextVar[Collection[str]] = ContextVar("unflagged_settings", default=())
"""Settings that the command which runs reads, and has no flag for."""


def arguments_to_flags(message: str) -> str:
    """Return a message of the library for the command line: flags replace the names of arguments.

    The library writes an argument in backquotes: `` `k` `` or `` `model='demo'` ``. A setting without a flag becomes
    its environment variable. Other texts in backquotes stay as they are.

    >>> arguments_to_flags("fewer chunks (`k`), or `model='demo'` and `disk_gib=2`; `precompute=False` only indexes")
    'fewer chunks (-k), or --model demo and RAGBLEND_DISK_GIB=2; --no-precompute only indexes'
    """

    def replacement(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        flag = flag_name(name)
        if name in _WITHOUT_FLAG or name in unflagged_settings.get():
            variable = f"RAGBLEND_{name.upper()}"
            return variable if value is None else f"{variable}={shlex.quote(value.strip(chr(39) + chr(34)))}"
        if not flag:
            return match[0]
        if value in ("True", "False"):
            return flag if value == "True" else f"--no-{flag.removeprefix('--')}"
        return flag if value is None else f"{flag} {shlex.quote(value.strip(chr(39) + chr(34)))}"

    return _ARGUMENT.sub(replacement, message)


@cache
def setting_type(name: str) -> tuple[type, tuple[str, ...]]:
    """Return the type of a setting's values, and the words that the setting accepts instead, such as "auto".

    A setting that accepts only words, such as `mode`, has the type str.

    >>> setting_type("chunk_size"), setting_type("recompute_ratio")
    ((<class 'int'>, ()), (<class 'float'>, ('auto',)))
    """
    hint = get_type_hints(Settings)[name]
    kinds = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
    names = tuple(each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind))
    plain = [kind for kind in kinds if get_origin(kind) is not Literal and kind is not type(None)]
    return (plain[0] if plain else str), names


def _cast(name: str, value: Any, origin: str) -> Any:
    """`value` as the setting's type; text from the environment is parsed."""
    kind, names = setting_type(name)
    if value in names:
        return value
    try:
        if get_origin(kind) is Sequence:  # the environment has "1,8,16"
            (each,), parts = get_args(kind), value.split(",") if isinstance(value, str) else value
            return [each(part) if isinstance(part, str) else part for part in parts]
        if kind is bool and isinstance(value, str):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[value.lower()]
        if isinstance(value, bool | float) and kind is int and (isinstance(value, bool) or value % 1):
            raise ValueError  # int() would round 2.5 and count true as 1
        return kind(value)
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{origin} sets {name} to {value!r}; expected {kind.__name__}") from error
