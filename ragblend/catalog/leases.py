"""Which documents the servers of a fleet are working on, so that each is stored by one of them.

A lease ends when it is not renewed, by PostgreSQL's clock, so another server takes over the documents of a killed one.
Depends on names only; the caller does the work.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import uuid4

from sqlalchemy import text

from ragblend.catalog.database import Catalog

LEASE_S = 60.0
_TAKE = text(
    "INSERT INTO leases (name, owner, expires_at) "
    "SELECT name, :owner, now() + make_interval(secs => :lease_s) FROM unnest(CAST(:names AS text[])) AS name "
    "ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at "
    "WHERE leases.expires_at < now() OR leases.owner = excluded.owner RETURNING name"
)
_RELEASE = text("DELETE FROM leases WHERE owner = :owner AND name = ANY(CAST(:names AS text[]))")
_OTHERS = text("SELECT name FROM leases WHERE owner <> :owner AND expires_at >= now()")


class Leases(Catalog):
    """Leases in a shared catalogue, of one owner: this object. Safe between threads, processes and machines."""

    def __init__(self, place: str) -> None:
        self._owner = uuid4().hex
        super().__init__(place)

    def take(self, names: Collection[str]) -> set[str]:
        """Take or renew leases for `LEASE_S` seconds, by one statement. Return those that no other owner has."""
        values = {"owner": self._owner, "lease_s": LEASE_S, "names": sorted({*names})}
        with self._locked() as connection:
            return {str(name) for name in connection.execute(_TAKE, values).scalars()}

    def release(self, names: Collection[str]) -> None:
        """End leases of this owner."""
        with self._locked() as connection:
            connection.execute(_RELEASE, {"owner": self._owner, "names": sorted({*names})})

    def others(self) -> set[str]:
        """Return the names that other owners have leased."""
        with self._locked() as connection:
            return {str(name) for name in connection.execute(_OTHERS, {"owner": self._owner}).scalars()}
