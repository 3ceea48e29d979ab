"""Tiny random models on disk, for vLLM engines. `make test-vllm` runs these tests; without vLLM they are skipped."""

from __future__ import annotations

import gc
import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
sys.path.append(str(Path(__file__).parents[1]))  # for tests/reference.py and other helpers

from harness import SIZES
from tiny_models import stock_models

STORIES = (
    "test_deployment.py", "test_forgetting_and_updates.py", "test_replicas.py", "test_replicas_with_postgres.py",
)  # fmt: skip
"""Files whose tests run in order, each from the state in which the one before left the servers."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Have `--last-failed` repeat all tests of a file of STORIES, because one of them alone would fail."""
    failed = config.cache.get("cache/lastfailed", {}) if config.cache else {}
    files = {name.split("::")[0] for name in failed if Path(name.split("::")[0]).name in STORIES}
    if config.cache and files:
        reports = [each for group in terminalreporter.stats.values() for each in group if hasattr(each, "nodeid")]
        names = {each.nodeid for each in reports if each.nodeid and each.nodeid.split("::")[0] in files}
        config.cache.set("cache/lastfailed", failed | dict.fromkeys(names, True))


@pytest.fixture(scope="session", autouse=True)
def _models_are_inspected_here():
    """Inspect model classes in this process. vLLM starts a process per class, which takes 20 s.

    It does so to avoid the initialization of CUDA, which does not happen on a CPU.
    """
    from vllm.model_executor.models import registry

    gc.collect()
    gc.freeze()  # as in tests/conftest.py: a stopping engine collects garbage, which would scan a million objects
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="session")
def stock():
    """Function `stock(family)`: the float32 transformers model that `checkpoint` saves. Shared; must not be changed."""
    return stock_models(**SIZES)


@pytest.fixture(scope="session")
def checkpoint(stock, make_tokenizer, tmp_path_factory):
    """Function `checkpoint(family)`: folder of the saved model."""

    @cache
    def build(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        stock(family).save_pretrained(path)
        make_tokenizer().save_pretrained(path)
        return path

    return build
