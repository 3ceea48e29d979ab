"""`expand_user_path`: checks and expands the paths of settings, options and arguments. Opens no file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from ragblend.errors import UsageError
from ragblend.redaction import redact_url

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # one slash, because str(Path("s3://bucket")) is "s3:/bucket"
_URL_OPTIONS = {
    "store": "set a shared tier as `remote`, a server as `backend`",
    "index": "an index is a folder of this machine; set a shared tier for its KV as `remote`",
    "model": "give a Hugging Face id (ORG/NAME) or a folder; a server is the `backend`",
}


def expand_user_path(place: str | os.PathLike[str], name: str) -> Path:
    """Return the path of a setting or argument with `~` and `~user` expanded. A relative path stays relative.

    name: the setting or argument, for errors. Raises UsageError for an empty path, a URL, a shell variable, and for
    `~user` if there is no such user. Write `./` before a folder whose name looks like a URL or a variable.
    """
    text = os.fspath(place)
    if not text.strip():
        raise UsageError(f"{name} is {text!r}, but a path is needed; give one, or leave {name} out")
    if "\0" in text:
        raise UsageError(f"{name} is {text!r}, but no path has a zero byte; remove it")
    if url := _URL.match(text):
        fix = _URL_OPTIONS.get(name, "download it, and give the path of the copy")
        if url[1].lower() == "file":
            fix = f"write the path itself: /{unquote(text[url.end() :])}"
        raise UsageError(f"{name} is {redact_url(text)!r}, a URL, but it has to be a path on this machine; {fix}")
    expanded = os.path.expanduser(text)  # noqa: PTH111 (Path's raises where there is no such user)
    if expanded == text and text[0] in "~$" and not os.path.lexists(text):
        reason = "there is no such user" if text[0] == "~" else "only shells expand variables"
        raise UsageError(f"{name} is {text!r}, but {reason}; write the whole path, or begin it with ~/ for your home")
    return Path(expanded)
