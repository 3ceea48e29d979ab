"""Detects network file systems, on which SQLite's locks and shared memory do not work.

Reads /proc/self/mountinfo, so it detects none on other systems than Linux.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

_NETWORK_TYPES = re.compile(
    r"nfs\d?|cifs|smb\w*|afs|ncpfs|ceph|lustre|gpfs|beegfs\w*|glusterfs|orangefs|pvfs2|gfs2|ocfs2|"
    r"fuse\.(ceph\w*|glusterfs|sshfs|s3fs|goofys|gcsfuse|blobfuse2?|juicefs|rclone|moosefs|mfs|curlftpfs|davfs2?|smbnetfs)|"
    r"davfs2?"
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


def parse_network_file_system(path: Path, mountinfo: str) -> str:
    """Return the type of the network file system of an absolute path, for example "nfs4"; "" for a local one.

    mountinfo: the text of /proc/self/mountinfo. If several file systems are mounted at one path, the last one counts.

    >>> lines = "22 1 8:1 / / rw - ext4 /dev/a rw\\n30 22 0:44 / /home rw shared:1 - nfs4 host:/home rw"
    >>> parse_network_file_system(Path("/home/a"), lines), parse_network_file_system(Path("/homes"), lines)
    ('nfs4', '')
    """
    depth, kind = -1, ""
    for line in mountinfo.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split(" ")
        if not separator or len(fields) < 5:
            continue
        place = Path(_ESCAPE.sub(lambda code: chr(int(code[1], 8)), fields[4]))
        if path.is_relative_to(place) and len(place.parts) >= depth:
            depth, kind = len(place.parts), source.split(" ")[0]
    return kind if _NETWORK_TYPES.fullmatch(kind) else ""


@lru_cache(64)
def find_network_file_system(folder: Path) -> str:
    """Return the type of an existing folder's network file system; "" for a local or unknown one."""
    try:
        return parse_network_file_system(
            folder.resolve(), Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        )
    except OSError:
        return ""
