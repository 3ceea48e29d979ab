"""The hardware card of a benchmark, and its peak memory. Reads the operating system; does not depend on models or
prompts."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import ragblend
from ragblend.engine.tuning.machine import cpu_model

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): writing 5 resets the peak resident set size to the current one


def hardware_card(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return CPU, memory, GPU, system, versions and threads as JSON values. "gpu" is None unless `device` is a GPU."""
    return {
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "gpu": _gpu(torch.device(device)),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": package_version("transformers"),
        "ragblend": ragblend.__version__,
        "threads": torch.get_num_threads(),
    }


def hardware_lines(card: dict[str, Any]) -> list[str]:
    """Return a hardware card as lines of text, one per entry of `card`. Entries that are None are omitted."""
    return [f"{name:<15}{value}" for name, value in card.items() if value is not None]


def reset_peak_rss() -> None:
    """Reset the peak of `peak_rss_bytes` to the current resident memory, if the kernel supports it (Linux)."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return  # the peak is then that of the whole process so far


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process since `reset_peak_rss`, in bytes."""
    if _STATUS.is_file():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


def _gpu(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / (1 << 30):.0f} GiB, CUDA {torch.version.cuda}"


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
