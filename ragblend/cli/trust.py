"""`ragblend init-key | sign`: make a key for stored KV, and sign entries that are already stored."""

from __future__ import annotations

from typing import Annotated

import typer

from ragblend.cli.options import JsonOption, with_settings
from ragblend.cli.printing import print_result, progress_bars
from ragblend.config import Settings
from ragblend.files.places import expand_user_path

EXIT_CORRUPT = 4


def init_key(
    out: Annotated[
        str | None,
        typer.Option(
            "--key-file", metavar="FILE", help="File to write the key to. Default: the file that all commands read."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Make a key that signs stored KV. New KV is signed; KV without a signature of the key is not used."""
    from ragblend.engine.store.signing import KEY_VARIABLE, key_path, write_key

    path = (key_path() if out is None else expand_user_path(out, "--key-file")).absolute()
    key = write_key(path)
    lines = [
        f"{path} holds a new key ({key.id}); only you can read the file",
        *([f"point to it: export RAGBLEND_STORE_KEY_FILE={path}"] if path != key_path() else []),
        "sign the entries of your stores, if you trust their writers: ragblend sign --store DIR",
        f"other machines that share a store need the same key: that file, or {KEY_VARIABLE} set to its contents",
    ]
    print_result({"path": str(path), "id": key.id}, "\n".join(lines), json_)


@with_settings("store")
def sign(
    settings: Settings,
    signed_with: Annotated[
        str | None,
        typer.Option(
            "--old-key-file", metavar="FILE", help="File of an older key. Only entries signed with it are signed again."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Sign a store's entries with the key of `ragblend init-key`.

    Without --old-key-file every intact entry is signed. Do so only if you trust everyone who could write to the store.
    """
    from ragblend.engine.store.signing import find_process_key, read_key
    from ragblend.errors import NotFoundError
    from ragblend.operations.signing import sign_store

    key = find_process_key()
    if key is None:
        raise NotFoundError("there is no store key to sign with; make one: ragblend init-key")
    old = read_key(expand_user_path(signed_with, "--old-key-file")) if signed_with is not None else None
    with progress_bars() as progress:
        report = sign_store(settings.store, key, signed_with=old, progress=progress, kv_dir=settings.kv_dir)
    lines = [
        f"{settings.store}: {report['num_signed']} entries and {report['num_notes']} notes signed, "
        f"{report['num_known']} were (key {key.id})",
        *(f"  {name}: {reason}" for name, reason in report["refused_keys"].items()),
    ]
    if report["refused"]:
        lines.append(f"{report['refused']} refused; drop and recompute them: ragblend verify --repair")
    print_result(report, "\n".join(lines), json_)
    if report["refused"]:
        raise typer.Exit(EXIT_CORRUPT)
