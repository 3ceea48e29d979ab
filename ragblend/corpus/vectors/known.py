"""Places outside of an index's folder that this user has named once: a list in the user's own configuration folder.

An index remembers where its vectors are, and an index may come from anywhere. What it remembers is asked only if the
user has said it: else a folder that somebody sent could have questions go to a server of theirs, or, with Qdrant in a
folder, whose files are pickles, run code. Knows names of places, without secrets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ragblend.config import trusted_setting, user_folder
from ragblend.corpus.vectors.choice import Choice, choose
from ragblend.errors import RagblendError, UsageError
from ragblend.files.directory import Directory
from ragblend.files.reading import read_file

PLACES_FILE = "vector-places.json"


def with_password(known: str) -> Choice:
    """The place that an index remembers, as the user's own settings have it if they name the same."""
    said = trusted_setting("vectors")
    own = choose(said) if said else None
    return own if own is not None and own.remembered == known else choose(known)


def note(choice: Choice) -> None:
    """The user has named this place. Where the list cannot be written, it has to be named again."""
    if choice.kind != "faiss" and choice.remembered not in (places := _places()):
        try:
            folder = Directory(user_folder(), fsync=False, make_room="Make room and run the command again")
            folder.write(user_folder() / PLACES_FILE, json.dumps([*places, choice.remembered], indent=1).encode())
        except (RagblendError, OSError):
            return


def is_known(choice: Choice) -> bool:
    """Whether the user has named this place, now or once."""
    return choice.kind == "faiss" or choice.remembered in _places() or _is_said(choice)


def check_known(choice: Choice, index: object) -> None:
    """Raise UsageError for a place that nobody but the index has named."""
    if not is_known(choice):
        raise UsageError(
            f"the index {index} says that its vectors are in {choice.shown}, which you have not named: questions would "
            f"go there. If that is right, name it: RAGBLEND_VECTORS={choice.shown} (with its user and password), or "
            f"ragblend ingest DOCS --index {index} --vectors ...; --vectors faiss has them in the index's folder again"
        )


def _is_said(choice: Choice) -> bool:
    said = trusted_setting("vectors")
    return bool(said) and choose(said).remembered == choice.remembered


def _places() -> Sequence[str]:
    try:
        found = json.loads(read_file(user_folder() / PLACES_FILE))
    except (OSError, ValueError, RecursionError):
        return []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
