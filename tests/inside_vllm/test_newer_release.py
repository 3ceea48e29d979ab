"""A release of vLLM that is newer than the tested ones: accepted if what ragblend uses of it is the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.attention.backend import AttentionMetadataBuilder

from ragblend.engine.vllm.releases.contract import calls, find_differences, imports
from ragblend.engine.vllm.support import BEFORE, require_supported_version
from ragblend.errors import RagblendError

pytestmark = pytest.mark.smoke


def test_a_newer_release_with_the_same_names_is_accepted_with_a_warning(caplog, monkeypatch):
    assert len({*((module, name) for module, name, _ in imports())}) > 20
    assert sum(len(keywords) for *_, keywords in calls()) > 20
    monkeypatch.setattr(logging.getLogger("ragblend"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        require_supported_version(BEFORE)
    assert "tested with releases before" in caplog.text
    assert find_differences() == []


def without_slots(attn_metadata: Any, vllm_config: Any, num_tokens: int | None = None) -> None:
    """`set_forward_context` without the slots."""


def with_another_order(self: Any, blocks: Any, request: Any, num_external_tokens: int) -> None:
    """`update_state_after_alloc` with its parameters in another order."""


@pytest.mark.parametrize(
    ("target", "name", "value", "difference"),
    [
        ("vllm.forward_context", "set_forward_context", without_slots, r"set_forward_context\(slot_mapping=\)"),
        ("vllm.v1.attention.backend", "CommonAttentionMetadata", None, r"backend\.CommonAttentionMetadata"),
        (AttentionMetadataBuilder, "build", None, r"AttentionMetadataBuilder\.build"),
        (
            KVConnectorBase_V1,
            "update_state_after_alloc",
            with_another_order,
            r"KVConnectorBase_V1\.update_state_after_alloc\(self, blocks, request, num_external_tokens\)",
        ),
    ],
)
def test_a_newer_release_is_rejected_with_the_names_that_differ(monkeypatch, target, name, value, difference):
    if isinstance(target, str):
        target = __import__(target, fromlist=[name])
    if value is None:
        monkeypatch.delattr(target, name)
    else:
        monkeypatch.setattr(target, name, value)
    with pytest.raises(RagblendError, match=rf"newer than .*{difference}.*pip install 'vllm<0\.34'"):
        require_supported_version(BEFORE)
