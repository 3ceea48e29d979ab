"""Fixtures for the framework tests: a tiny random chat model on disk, its engine over a disk store, six passages."""

from __future__ import annotations

import pytest
from tiny_models import CHATML, make_model
from transformers.models.llama import LlamaForCausalLM

from ragblend.engine.api import Stream
from ragblend.frameworks.engines import share_engine
from ragblend.frameworks.model import BlendModel, Request
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Prompt


@pytest.fixture(scope="session")
def passages():
    """Passages to ingest. The second contains a blank line, and the third looks like a template."""
    return [
        "The lighthouse on Gull Rock was built in 1872. Its lamp is turned by clockwork.",
        "Maren keeps the logbook.\n\nEvery storm since 1901 is in it, with the height of the waves.",
        "Question: who repairs the lamp?\nAnswer: Tomas Veld, the keeper's brother, repairs it each spring.",
        "The supply boat comes on Thursdays, unless the wind is above force seven.",
        "Visitors may climb the tower in July. The stairs count 214 steps of iron.",
        "Radio weather is read at six in the morning and at six in the evening.",
    ]


@pytest.fixture(scope="session")
def chat_model_path(tmp_path_factory, make_tokenizer):
    """Folder of a random 3-layer chat model of 8192 tokens. Its answers are long and differ for every prompt."""
    path = tmp_path_factory.mktemp("model") / "tiny-chat"
    sizes = {"max_position_embeddings": 8192, "num_hidden_layers": 3}
    make_model(LlamaForCausalLM, **sizes).save_pretrained(path)
    make_tokenizer(CHATML, specials=("<|im|>", "<|end|>")).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def store_path(tmp_path_factory):
    """Folder of the session's KV store."""
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="session")
def chat_engine(chat_model_path, store_path, passages):
    """Engine of the tiny chat model, with precomputed KV of all passages. All LLM objects over this store share it."""
    engine = share_engine(str(chat_model_path), store_path, on_miss="inline", **SHARED)
    precompute_documents(passages, engine)
    yield engine
    engine.close()


SHARED = {"backend": "transformers", "dtype": "auto", "device": "auto", "system": None, "namespace": ""}


@pytest.fixture
def calls(monkeypatch):
    """List of (prompt, stream) of every call of a ragblend LLM in this test."""
    made: list[tuple[Prompt, Stream]] = []
    start = BlendModel._open

    def recording_open(self: BlendModel, request: Request) -> Stream:
        stream = start(self, request)
        made.append((request.prompt, stream))
        return stream

    monkeypatch.setattr(BlendModel, "_open", recording_open)
    return made
