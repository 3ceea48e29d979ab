"""Network file systems, by the lines that Linux has of them."""

from pathlib import Path

import pytest

from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import DocumentKey
from ragblend.errors import StoreNotWritableError
from ragblend.files import network
from ragblend.files.network import parse_network_file_system
from ragblend.files.store_folder import CATALOG_FILE

MOUNTS = r"""
21 27 0:20 / /proc rw,nosuid shared:12 - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
41 27 0:35 / /home rw,relatime shared:20 - nfs4 filer:/home rw,vers=4.2,addr=10.0.0.7
42 41 259:3 / /home/local rw,relatime shared:21 - xfs /dev/nvme0n1p3 rw
43 27 0:36 / /mnt/share\040of\040all rw - cifs //filer/all rw,vers=3.1.1
44 27 0:37 / /mnt/objects rw master:3 propagate_from:1 - fuse.s3fs s3fs rw
45 27 0:38 / /scratch rw shared:22 - lustre 10.0.0.1@tcp:/scratch rw,flock
46 27 0:39 / /over rw - nfs filer:/over rw
47 46 0:40 / /over rw - tmpfs tmpfs rw
48 27 0:41 / /images rw - overlay overlay rw,lowerdir=/nfs/a,upperdir=/b
49 27 0:42 / /mnt/c rw - 9p C:\134 rw,dirsync
50 27 0:43 / /ssd rw - fuse.mergerfs a:b rw
51 27 0:44 / /ssh rw - fuse.sshfs host:/ rw
a line of another kernel
"""
FOUND = {
    "/srv/store": "", "/home/a/store": "nfs4", "/home": "nfs4", "/homes/a": "", "/home/local/store": "",
    "/mnt/share of all/x": "cifs", "/mnt/share": "", "/mnt/objects/a": "fuse.s3fs", "/scratch/a/b/c": "lustre",
    "/over/a": "", "/images/a": "", "/mnt/c/Users": "", "/ssd/store": "", "/ssh/a": "fuse.sshfs",
}  # fmt: skip


@pytest.mark.parametrize(("path", "expected"), FOUND.items())
def test_the_file_system_of_a_path(path, expected):
    assert parse_network_file_system(Path(path), MOUNTS) == expected


def test_a_catalogue_file_on_a_network_disk_is_refused(tmp_path, monkeypatch):
    with Ledger(tmp_path / CATALOG_FILE) as ledger:
        ledger.add_texts({DocumentKey("notes", "1"): {"text": 0}})
    monkeypatch.setattr("ragblend.catalog.sqlite.find_network_file_system", lambda folder: "nfs4")
    with pytest.raises(StoreNotWritableError, match=r"network file system \(nfs4\).*`catalog='postgresql://"):
        Ledger(tmp_path / CATALOG_FILE)
    monkeypatch.setattr("os.access", lambda *_: False)  # one that is only read has no locks
    assert list(Ledger(tmp_path / CATALOG_FILE).texts()) == ["text"]


def test_this_machine_s_own_are_read():
    network.find_network_file_system.cache_clear()
    assert network.find_network_file_system(Path("/proc")) == ""
