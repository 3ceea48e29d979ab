"""Leases on documents in a shared catalogue, so that only one server of a fleet stores each document.

A lease that is not renewed expires by PostgreSQL's clock. Another server then takes over the documents of a killed one.
Depends on names only.
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
    """Leases on names of documents, in a shared catalogue.

    Only one `Leases` object at a time can have the lease on a name. Safe between threads and machines.
    """

    def __init__(self, place: str) -> None:
        self._owner = uuid4().hex
        super().__init__(place)

    def take(self, names: Collection[str]) -> set[str]:
        """Take leases on `names` for `LEASE_S` seconds, or renew them. Return the names for which this succeeded.

        Names that another object has leased are left out.
        """
        values = {"owner": self._owner, "lease_s": LEASE_S, "names": sorted({*names})}
        with self._locked() as connection:
            return {str(name) for name in connection.execute(_TAKE, values).scalars()}

    def release(self, names: Collection[str]) -> None:
        """End the leases of this object on `names`."""
        with self._locked() as connection:
            connection.execute(_RELEASE, {"owner": self._owner, "names": sorted({*names})})

    def leased_by_others(self) -> set[str]:
        """Return the names that other objects have leased."""
        with self._locked() as connection:
            return {str(name) for name in connection.execute(_OTHERS, {"owner": self._owner}).scalars()}
