"""Sends stored entries to a remote tier, and reports which of them did not arrive.

Works on tiers. Does not depend on documents, engines or models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ragblend.engine.store.base import KVStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError, DamagedEntryError, StoreFullError

_PROGRESS_S = 0.2  # between two reports of progress


@dataclass(slots=True)
class PushReport:
    """Result of sending entries: their numbers, and the bytes that were sent."""

    num_sent: int = 0
    num_known: int = 0  # entries that the remote tier had
    num_damaged: int = 0  # entries that could not be read on this machine, and that were not sent
    num_dropped: int = 0  # entries that did not arrive because the remote tier failed or is full
    sent_bytes: int = 0
    problem: str = ""  # why the last dropped entry did not arrive
    is_full: bool = False  # the remote tier has no free space


def send_entries(
    keys: Sequence[str],
    remote_keys: Collection[str],
    tiers: Sequence[KVStore],
    remote: RemoteStore,
    progress: Callable[[str, int, int | None], None],
) -> PushReport:
    """Send the entries `keys` to `remote`, except those that it has, which are `remote_keys`. Wait for each reply.

    tiers: those of this machine, from which the entries are read; the first that has an entry is used. progress: called
    with "push", the number of finished entries, and the number of all. If `remote` fails repeatedly, its circuit
    breaker opens, and the remaining entries are not sent.
    """
    report = PushReport()
    for done, key in enumerate(keys, start=1):
        if key in remote_keys:
            report.num_known += 1
        elif not remote.breaker.is_closed:
            report.num_dropped += 1
            report.problem = report.problem or remote.last_failure
        else:
            try:
                local_kv = next((kv for tier in tiers if (kv := tier.get(key)) is not None), None)
                if local_kv is not None:
                    remote.put_and_wait(local_kv)
                    report.num_sent += 1
                    report.sent_bytes += local_kv.nbytes
                else:
                    report.num_damaged += 1
            except DamagedEntryError:
                report.num_damaged += 1
            except (BackendUnreachableError, StoreFullError) as error:
                report.num_dropped += 1
                report.problem, report.is_full = str(error), isinstance(error, StoreFullError)
        progress("push", done, len(keys))
    return report


def finish_sending(
    keys: Iterable[str], store: KVStore, progress: Callable[[str, int, int | None], None]
) -> list[tuple[RemoteStore, PushReport]]:
    """Wait until `store` has sent its queued entries, then send what its remote tiers still lack of the entries `keys`.

    Return each remote tier with its report; [] for a store without one. A remote tier that does not answer is
    not waited for, and all `keys` then count as dropped. Entries that a tier lacks and that are not on this machine
    count as damaged. progress: called with "push", the number of finished entries, and the number of all.
    """
    reports = list[tuple[RemoteStore, PushReport]]()
    wanted = list(dict.fromkeys(keys))
    local = [tier for tier in store.tiers if not tier.is_remote]
    for remote in store.find_tiers(RemoteStore):
        total = remote.num_waiting
        while not remote.flush(_PROGRESS_S) and remote.breaker.is_closed:
            progress("push", total - remote.num_waiting, total)
        lacking = wanted[::-1]  # backwards, because vLLM's workers may be sending the same entries, the oldest first
        reports.append((remote, send_entries(lacking, remote.find_stored(wanted), local, remote, progress)))
    return reports
