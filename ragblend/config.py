"""Settings: flags > `RAGBLEND_*` environment > `ragblend.toml` > defaults. A frozen value, checked once, at birth."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ragblend.errors import UsageError

CONFIG_FILE = "ragblend.toml"


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
    remote_timeout_s: float = 5.0  # longest wait for one chunk from there
    eviction: str = "lru"  # lru, or gdsf: what saves the most prefill per byte stays
    quota_gib: float = 0.0  # what each namespace may hold in each local tier; 0: no limit
    kv_dtype: str = "auto"  # how new KV is stored: auto (as computed), int8, fp8
    chunk_size: int | None = None  # tokens of the LLM's own tokenizer; None: the index's own, 512 for a new one
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
        for name, meaning in (("memory_gib", "no memory tier"), ("disk_gib", "no limit"), ("quota_gib", "no limit")):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 0 ({meaning}) or more")
        if self.remote_timeout_s <= 0:
            raise UsageError(f"remote_timeout_s is {self.remote_timeout_s}; choose more than 0 seconds")
        if self.backend not in ("transformers", "vllm") and not self.is_served:
            raise UsageError(f"backend is {self.backend!r}; choose transformers, vllm or a server's http://HOST:PORT")
        for name, known in (
            ("mode", ("blend", "full", "prefix", "reuse")),
            ("order", ("score", "document")),
            ("eviction", ("lru", "gdsf")),
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("kv_dtype", ("auto", "int8", "fp8")),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}")

    @property
    def is_served(self) -> bool:
        """Whether the backend is a server: the KV store is then the server's."""
        return self.backend.startswith(("http://", "https://"))


def load_settings(flags: Mapping[str, Any] | None = None, directory: Path | None = None) -> Settings:
    """Settings from `flags` (None values are unset), the environment and `ragblend.toml` in `directory`."""
    values = _from_file((directory or Path.cwd()) / CONFIG_FILE)
    values.update(read_environment(os.environ))
    values.update({name: value for name, value in (flags or {}).items() if value is not None})
    return Settings(**values)


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
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
