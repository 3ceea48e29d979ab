"""Byte counts as text: parsing and formatting."""

from __future__ import annotations

import re

from ragblend.errors import UsageError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: str | int) -> int:
    """Parse a size, and return it in bytes. `KiB` and `K` are 1024, `KB` is 1000; no unit is bytes. Raises UsageError.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 kB"), parse_bytes(512)
    (8589934592, 1500, 512)
    """
    match = _SIZE.fullmatch(str(size))
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{size!r} is not a size; write a number and a unit, such as 8GiB, 500MB or 4096")
    unit = _UNITS[match[2].upper()]
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes as text in binary units.

    >>> format_bytes(512), format_bytes(8 * 1024**3)
    ('512 B', '8.0 GiB')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        amount /= 1024
        if abs(amount) < 1023.95 or unit == "PiB":  # a number that rounds to 1024.0 gets the next unit
            break
    return f"{amount:.1f} {unit}"
