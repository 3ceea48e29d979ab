"""Facts about this machine, and the files of its MachineProfiles in a store, one per model and machine.

    ROOT/machines/FINGERPRINT-HARDWARE.json

Depends on the operating system, torch's devices and one directory, not on how profiles are measured or used.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from ragblend.engine.store.format.signed_json import decode_signed_json, encode_signed_json
from ragblend.engine.store.format.signing import KeyChoice, resolve_key
from ragblend.engine.store.metadata import MACHINES_DIR
from ragblend.engine.tuning.loading_controller import MachineProfile, machine_profile_from
from ragblend.files.directory import Directory
from ragblend.files.reading import read_file

log = logging.getLogger(__name__)

_CPUINFO = Path("/proc/cpuinfo")


def machine_facts(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the facts that determine this machine's speed. A profile is valid only for a machine with equal facts."""
    device = torch.device(device)
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def vllm_machine_facts(gpu: str | None, num_ranks: int = 1) -> dict[str, Any]:
    """Return the `machine_facts` of a vLLM that runs on `num_ranks` devices.

    The facts do not depend on vLLM's process: they are the same before vLLM starts and in each of its processes.
    `gpu`: name of the device, None for a CPU. On a CPU, the fact `threads` is the value of VLLM_CPU_OMP_THREADS_BIND,
    or of OMP_NUM_THREADS if that value is "nobind".
    """
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    threads = os.environ.get("OMP_NUM_THREADS", "all") if bound == "nobind" else bound
    return {
        "engine": "vllm",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": None if gpu else threads,
        "gpu": gpu,
        "ranks": num_ranks,
    }


def cpu_model() -> str:
    """Return the CPU's name from the operating system."""
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def drop_page_cache(paths: Iterable[Path]) -> bool:
    """Drop these files from the operating system's page cache; return False if the system cannot.

    Only pages that are on the disk already are dropped, so the files must have been synced.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return True


def profile_path(root: Path, fingerprint: str, hardware: Mapping[str, Any]) -> Path:
    """Return the path of the profile of that model on that machine in the store at `root`."""
    machine = xxh3_64_hexdigest(json.dumps(dict(hardware), sort_keys=True).encode())
    return root / MACHINES_DIR / f"{fingerprint}-{machine}.json"


def read_machine_profile(
    root: Path, fingerprint: str, hardware: Mapping[str, Any], *, store_key: KeyChoice = "auto"
) -> MachineProfile | None:
    """Return the profile of that model on that machine; None if none was measured.

    Returns None with a warning if the profile cannot be read or is not signed with the store's key.
    """
    path = profile_path(root, fingerprint, hardware)
    try:
        profile = machine_profile_from(decode_signed_json(read_file(path), MACHINES_DIR, resolve_key(store_key)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # UsageError is a ValueError
        log.warning("machine profile %s is not used: %s", path, error)
        return None
    return profile if (profile.fingerprint, dict(profile.hardware)) == (fingerprint, dict(hardware)) else None


def write_profile(root: Path, profile: MachineProfile) -> Path:
    """Write a profile into the store at `root`, and return the file's path. An older profile is replaced.

    Raises StoreFullError on a full disk, and StoreNotWritableError if the file cannot be written for another reason.
    """
    path = profile_path(root, profile.fingerprint, profile.hardware)
    data = encode_signed_json(profile.as_dict(), MACHINES_DIR, resolve_key("auto"))
    Directory(root, fsync=True).write(path, data)
    return path
