"""A settings file to begin with: every setting with what it does and its default, commented out.

Knows `Settings`; writes nothing itself.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ragblend.config import CONFIG_FILE, USER_FILE, USER_ONLY_SETTINGS, Settings, user_folder
from ragblend.options import TierOptions

FOLDER_HEAD = """Settings of ragblend for this folder. Flags and RAGBLEND_NAME in the environment come before it, it
comes before {user}. Uncomment what you change. What runs code or leads out of the folder is set there
alone: {refused}."""
USER_HEAD = """Your settings of ragblend, for every folder. A folder's {folder}, RAGBLEND_NAME in the environment and
flags come before it. Uncomment what you change."""


def settings_text(chosen: Mapping[str, Any], *, of_user: bool = False) -> str:
    """The file's text, TOML: `chosen` set, the others commented. of_user: with those that no folder's file may set.

    >>> print(settings_text({"model": "Qwen/Qwen3-8B"}).split("\\n\\n")[1])
    # 'demo', a Hugging Face id, a local path, or a GGUF: file.gguf, repo:file.gguf.
    model = "Qwen/Qwen3-8B"
    """
    head = (USER_HEAD if of_user else FOLDER_HEAD).format(
        user=user_folder() / USER_FILE, folder=CONFIG_FILE, refused=", ".join(USER_ONLY_SETTINGS)
    )
    parts = [_comment(head)]
    for field in sorted(fields(Settings), key=lambda field: field.name in TierOptions.__dataclass_fields__):
        known = field.metadata.get("option")
        if known is None or not (of_user or field.name not in USER_ONLY_SETTINGS):
            continue
        is_chosen = field.name in chosen
        value = chosen[field.name] if is_chosen else field.default
        line = f"{'' if is_chosen else '# '}{field.name} = {_toml(value)}".rstrip()
        parts.append(f"{_comment(known.help)}\n{line}" if known.help else line)
    return "\n\n".join(parts) + "\n"


def _comment(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110, initial_indent="# ", subsequent_indent="# ")


def _toml(value: Any) -> str:
    """A string, number or truth value, which TOML writes as JSON does; nothing, for what has no default."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)
