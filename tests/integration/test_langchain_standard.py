"""LangChain's own contract tests (langchain-tests) against every class of ours that has a suite.

Nothing is skipped that an engine can do. Five tests judge what the model says (that 3 is the argument, that a tool is
called unasked); the tiny random model is expected to fail those, and SmolLM2 runs the ones it is large enough for.

There is no suite for string models (BaseLLM) and none for a KV store: its values are tensors, not the bytes a BaseStore
holds, so ours is not one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests
from pages import NEEDS_SMOLLM2, SMOLLM2

from ragblend import Chunk, open_index
from ragblend.chains import BlendRetriever
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.api import Engine
from ragblend.index import ChunkIndex
from ragblend.llm import ChatBlend
from ragblend.vectorstores import BlendEmbeddings, BlendVectorStore, LangChainEmbedder


def _words(engine: Engine) -> Iterator[tuple[int, str]]:
    size = engine.renderer.backend.get_vocab_size()
    return zip(range(size), engine.renderer.token_texts(range(size)), strict=True)


class _Chat:
    """The tiny chat model; its engine is loaded once and shared by every ChatBlend these suites construct."""

    params: ClassVar[dict[str, Any]] = {}
    sampling: ClassVar[dict[str, Any]] = {}
    passages: ClassVar[list[str]] = []

    @pytest.fixture(autouse=True, scope="class")
    def _engine(self, chat_model_path: Path, store_path: Path, chat_engine: Engine, passages: list[str]) -> None:
        _Chat.params = {"model": str(chat_model_path), "store": store_path, "engine_options": {"on_miss": "inline"}}
        _Chat.passages = passages
        # A random model that takes the likeliest token never ends a string: these quotes are made likely.
        quotes = {id: 4.0 for id, text in _words(chat_engine) if text in ('"', '"}')}
        _Chat.sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 400, "call_options": {"logit_bias": quotes}}

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.params

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # one engine runs one model


class TestChatBlendUnit(_Chat, ChatModelUnitTests):
    @pytest.mark.xfail(
        reason="It reads with allowed_objects='all', which are the classes that LangChain has a list of, and keeps a "
        "snapshot with the store's path. Read with allowed_objects=[ChatBlend]: tests/test_llm_names.py"
    )
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


class _Suite(ChatModelIntegrationTests):  # the name keeps pytest from collecting it
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend


WIT = pytest.mark.xfail(reason="asks the model to understand, and this one is random", strict=False)


class TestChatBlend(_Chat, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.params, **self.sampling}

    @WIT
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @WIT
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @WIT
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @WIT
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @WIT
    def test_unicode_tool_call_integration(self, model: BaseChatModel, **options: Any) -> None:
        super().test_unicode_tool_call_integration(model, **options)

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = ChatBlend(**{**self.params, "max_tokens": 4})
        prompt = f"{self.passages[0]}\n\n{self.passages[1]}\n\nWhat is that?"
        message: AIMessage = chat.invoke(prompt)
        if stream:
            chunks = list(chat.stream(prompt))
            message = add_ai_message_chunks(*chunks)
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message


class TestChatBlendUnderstands:
    """The suite's tests that need an understanding model, and that a model of 135 million weights passes."""

    pytestmark = NEEDS_SMOLLM2

    @pytest.fixture(scope="class")
    def model(self) -> BaseChatModel:
        return ChatBlend(model=str(SMOLLM2), engine_options={"on_miss": "inline"}, max_tokens=128)

    async def test_it_passes_on_the_argument_that_was_asked_for(self, model: BaseChatModel) -> None:
        suite = _Suite()
        suite.test_tool_calling(model)
        await suite.test_tool_calling_async(model)
        suite.test_tool_calling_with_no_arguments(model)
        suite.test_unicode_tool_call_integration(model)


class TestBlendRetriever(RetrieversIntegrationTests):
    index: ClassVar[ChunkIndex]

    @pytest.fixture(autouse=True, scope="class")
    def _index(self, tmp_path_factory: pytest.TempPathFactory, passages: list[str]) -> Iterator[None]:
        with open_index(tmp_path_factory.mktemp("index"), HashingEmbedder(), create=True) as index:
            for number, text in enumerate(passages):
                index.add_document(f"{number}.txt", "", [Chunk(text, f"{number}.txt")])
            TestBlendRetriever.index = index
            yield

    @property
    def retriever_constructor(self) -> type[BlendRetriever]:
        return BlendRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"index": self.index}

    @property
    def retriever_query_example(self) -> str:
        return "Who repairs the lamp?"


class TestBlendVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> Iterator[VectorStore]:
        with open_index(tmp_path, LangChainEmbedder(self.get_embeddings()), create=True) as index:
            yield BlendVectorStore(index)


class TestBlendVectorStoreWithKV(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path: Path, chat_engine: Engine) -> Iterator[VectorStore]:
        with open_index(tmp_path, LangChainEmbedder(self.get_embeddings()), create=True) as index:
            yield BlendVectorStore(index, llm=chat_engine)


class TestBlendVectorStoreOverAnotherStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, chat_engine: Engine) -> VectorStore:
        return BlendVectorStore(InMemoryVectorStore(self.get_embeddings()), llm=chat_engine)


class _Embeddings:
    @property
    def embeddings_class(self) -> type[BlendEmbeddings]:
        return BlendEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"embedder": HashingEmbedder()}


class TestBlendEmbeddingsUnit(_Embeddings, EmbeddingsUnitTests): ...


class TestBlendEmbeddings(_Embeddings, EmbeddingsIntegrationTests): ...
