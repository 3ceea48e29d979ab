"""pyproject.toml's warning filters: a deprecated call of ours fails the suite, one within another package does not."""

from __future__ import annotations

import warnings

import pytest

OURS = ["ragblend", "ragblend.engine.load", "benchmarks.figures.__main__", "tools.site", "test_index", "tiny_models"]
OTHERS = ["ragblender", "langchain_core.load", "faiss.swigfaiss", "conftests.more"]


def warn_in(module: str, category: type[Warning]) -> None:
    """Warn as a library does whose caller is a line of `module`."""
    warnings.warn_explicit("the old name", category, "file.py", 1, module=module)


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
@pytest.mark.parametrize("module", OURS)
def test_a_deprecated_call_of_ours_fails(module, category):
    with pytest.raises(category, match="the old name"):
        warn_in(module, category)


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
@pytest.mark.parametrize("module", OTHERS)
def test_a_deprecated_call_of_another_package_is_ignored(module, category):
    warn_in(module, category)


def test_a_deprecated_argument_of_a_layer_fails_although_torch_is_named():
    with pytest.raises(FutureWarning):
        warn_in("torch.nn.modules.module", FutureWarning)
