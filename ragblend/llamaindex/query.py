"""LlamaIndex over one ragblend engine: an LLM, a synthesizer that names nodes as chunks, a query engine, ingestion.

There are three ways to query. `index.as_query_engine(llm=BlendLLM(...))` reuses stored chunks in LlamaIndex's prompts.
`response_synthesizer=BlendSynthesizer(llm)` sends only the nodes and the question, and stores the KV of new nodes.
`BlendQueryEngine` is a query engine with this synthesizer.

Depends on llama-index-core, the index and `ragblend.llamaindex.llm`, not on LangChain.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import (
    ChatMessage,
    CitableBlock,
    MessageRole,
    TextBlock,
)
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.base import BaseIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    QueryType,
    RelatedNodeInfo,
    TextNode,
    TransformComponent,
)
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters
from pydantic import Field

from ragblend.config import Settings
from ragblend.errors import UsageError
from ragblend.frameworks.aio import run_in_thread
from ragblend.index import ChunkIndex, SearchHit, open_index
from ragblend.ingestion.documents import delete_precomputed
from ragblend.ingestion.identity import as_chunk, identify
from ragblend.llamaindex.llm import BlendLLM
from ragblend.option_fields import default_of
from ragblend.precompute import precompute_documents

# --- answering from nodes ---------------------------------------------------------------------------------------------


class BlendSynthesizer(BaseSynthesizer):
    """A synthesizer that answers from one prompt with all nodes: the nodes as chunks, then the question.

    The prompt has the model's chat template, and no prompt template of LlamaIndex. A node is written as its plain text.
    `metadata_mode` selects metadata that are written before this text; they are prefilled in every prompt. The report
    on reuse is in `response.metadata["ragblend"]`; a stream fills it when it ends.
    """

    def __init__(
        self,
        llm: BlendLLM,
        *,
        system: str | None = None,
        streaming: bool = False,
        metadata_mode: MetadataMode = MetadataMode.NONE,
        callback_manager: CallbackManager | None = None,
        empty_response: str | None = None,
    ) -> None:
        if not isinstance(llm, BlendLLM):
            raise UsageError(f"llm is a {type(llm).__name__}; BlendSynthesizer needs ragblend.llamaindex.BlendLLM")
        super().__init__(llm=llm, callback_manager=callback_manager, streaming=streaming, empty_response=empty_response)
        self._blend = llm
        self._system = system
        self._metadata_mode = metadata_mode

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        """No prompt template: the layout is the model's own."""

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Return the answer to `query` from one prompt with all `nodes`. The prompt does not contain
        `additional_source_nodes`; the answer lists them as sources."""
        chunk_options = {"chunks": self._exact_texts(nodes)}
        return super().synthesize(query, nodes, additional_source_nodes, **response_kwargs, **chunk_options)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Return the result of `synthesize` without blocking the event loop."""
        chunk_options = {"chunks": self._exact_texts(nodes)}
        return await super().asynthesize(query, nodes, additional_source_nodes, **response_kwargs, **chunk_options)

    def _exact_texts(self, nodes: Sequence[NodeWithScore]) -> list[str]:
        return [node.node.get_content(metadata_mode=self._metadata_mode) for node in nodes]

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], chunks: Sequence[str] | None = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Return the answer to `query_str` from `chunks`, the exact texts of the nodes; if None, from `text_chunks`.

        The answer is text, or a generator of text if the synthesizer is streaming.
        """
        asked = self._make_chat_arguments(query_str, text_chunks if chunks is None else chunks) | response_kwargs
        if self._streaming:
            return (response.delta for response in self._blend.stream_chat(**asked) if response.delta)
        return self._blend.chat(**asked).message.content or ""

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], chunks: Sequence[str] | None = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Run `get_response` without blocking the event loop."""
        asked = self._make_chat_arguments(query_str, text_chunks if chunks is None else chunks) | response_kwargs
        if self._streaming:
            responses = await self._blend.astream_chat(**asked)
            return (response.delta async for response in responses if response.delta)
        return (await self._blend.achat(**asked)).message.content or ""

    def _make_chat_arguments(self, query: str, texts: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of `chat`: the system text, if set, and one user turn of the texts and the question."""
        system = [ChatMessage(role=MessageRole.SYSTEM, content=self._system)] if self._system else []
        cited = [CitableBlock(title="", source="", content=[TextBlock(text=text)]) for text in texts]
        return {"messages": [*system, ChatMessage(role=MessageRole.USER, blocks=[*cited, TextBlock(text=query)])]}


class BlendQueryEngine(RetrieverQueryEngine):
    """A RetrieverQueryEngine with BlendSynthesizer by default. Supports query, aquery, streaming and source nodes."""

    @classmethod
    def from_args(
        cls,
        retriever: BaseRetriever,
        llm: Any = None,
        response_synthesizer: BaseSynthesizer | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        *args: Any,
        streaming: bool = False,
        system: str | None = None,
        **kwargs: Any,
    ) -> BlendQueryEngine:
        """Return a query engine over any LlamaIndex retriever. `llm`: a BlendLLM; not used if a synthesizer is given.

        Raises UsageError for arguments that only LlamaIndex's own prompts use (`response_mode`, prompt templates, ...),
        and for `streaming` or `system` together with a synthesizer, which has these settings itself.
        """
        _reject_unknown("from_args", [*map(repr, args), *kwargs])
        if response_synthesizer is not None and (streaming or system is not None):
            raise UsageError(
                "streaming and system are the synthesizer's; give them to BlendSynthesizer, or leave it out"
            )
        synthesizer = response_synthesizer or BlendSynthesizer(
            llm, system=system, streaming=streaming, callback_manager=callback_manager
        )
        return cls(retriever, synthesizer, node_postprocessors, callback_manager)

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any] | ChunkIndex | str | Path,
        llm: BlendLLM,
        *,
        similarity_top_k: int = default_of(Settings, "k"),
        neighbours: int | None = None,
        order: Literal["score", "document"] | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        streaming: bool = False,
        system: str | None = None,
        **kwargs: Any,
    ) -> BlendQueryEngine:
        """Return a query engine over a LlamaIndex index, or over a ragblend index: an open one, or its folder.

        `neighbours` and `order` are only for a ragblend index, see `ChunkIndex.search`; with a LlamaIndex index they
        raise UsageError. Unknown arguments also raise it. To use your own retriever, call `from_args`.
        """
        _reject_unknown("from_index", kwargs)
        if isinstance(index, BaseIndex):
            if neighbours is not None or order is not None:
                raise UsageError(
                    f"neighbours and order are those of a ragblend index; {type(index).__name__} has neither. Leave "
                    "them out, or give its retriever to BlendQueryEngine.from_args"
                )
            retriever: BaseRetriever = index.as_retriever(similarity_top_k=similarity_top_k)
        else:
            retriever = BlendIndexRetriever(
                index, similarity_top_k=similarity_top_k, neighbours=neighbours or 0, order=order or "score"
            )
        return cls.from_args(
            retriever,
            llm,
            node_postprocessors=node_postprocessors,
            callback_manager=callback_manager,
            streaming=streaming,
            system=system,
        )


def _reject_unknown(where: str, unknown: Iterable[str]) -> None:
    """Raise UsageError if any argument is unknown; LlamaIndex itself would ignore it."""
    if names := list(unknown):
        raise UsageError(
            f"BlendQueryEngine.{where} does not know {', '.join(names)}, because its prompt is the model's own layout. "
            "Pass response modes and templates to index.as_query_engine(llm=...), and a retriever's arguments to "
            "from_args(index.as_retriever(...), llm)"
        )


class BlendIndexRetriever(BaseRetriever):
    """A retriever that returns the chunks of a ragblend index as nodes.

    `index`: an open ChunkIndex, or its folder. `neighbours`, `order`: see `ChunkIndex.search`; by default the nodes are
    sorted by score.
    """

    def __init__(
        self,
        index: ChunkIndex | str | Path,
        *,
        similarity_top_k: int = default_of(Settings, "k"),
        neighbours: int = default_of(Settings, "neighbours"),
        order: Literal["score", "document"] = default_of(Settings, "order"),
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager=callback_manager)
        self.index = index if isinstance(index, ChunkIndex) else open_index(index)
        self.similarity_top_k = similarity_top_k
        self.neighbours = neighbours
        self.order = order

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self.index.search(
            query_bundle.query_str, self.similarity_top_k, neighbours=self.neighbours, order=self.order
        )
        return [_node(hit) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await run_in_thread(lambda cancelled: self._retrieve(query_bundle))


def _node(hit: SearchHit) -> NodeWithScore:
    chunk = hit.chunk
    metadata = {"source": chunk.source, **chunk.metadata}
    node = TextNode(
        id_=chunk.id,
        text=chunk.text,
        start_char_idx=chunk.start,
        end_char_idx=chunk.end,
        metadata=metadata,
        # Metadata in the text would be prefilled with every prompt.
        excluded_llm_metadata_keys=list(metadata),
        excluded_embed_metadata_keys=list(metadata),
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.source)},
    )
    return NodeWithScore(node=node, score=hit.score)


# --- ingestion --------------------------------------------------------------------------------------------------------


_COLLECTION = "llamaindex"  # of documents whose caller names none


class BlendIngestion(TransformComponent):
    """The last step of an IngestionPipeline. It precomputes the KV of all nodes, and returns the nodes unchanged.

    Put it after the splitter. `llm` is a BlendLLM or an engine. A node that cannot be prefilled is logged with its id,
    and returned like the others.

    A document is identified by its `doc_id`. LlamaIndex gives a document without one a random id, another in each run:
    such a document is identified by metadata["file_path"], else its nodes are stored by their texts. The nodes of a
    changed document replace the stored nodes of the document, and KV that no document needs any more is deleted. If a
    document is unchanged, its nodes are added to its stored nodes, because they may come in several batches or from
    several splitters. A pipeline does not report deletions; `delete_ref_doc` deletes a document and its KV. If two
    pipelines have different documents with equal ids, give each pipeline its own `collection`.

    The pipeline's cache never skips this step. A node with stored KV costs one lookup. A pipeline with a docstore
    passes only changed documents to this step, so fill a new store once with `precompute_documents`.
    """

    llm: Any = Field(exclude=True)
    collection: str = _COLLECTION

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the fields and an id that differs in every call.

        LlamaIndex hashes this dictionary to find a step's result in its cache. The new id makes it run this step.
        """
        return {**super().to_dict(**kwargs), "call_id": uuid.uuid4().hex}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the processes of `pipeline.run(num_workers=...)`, each of which loads its own engine."""
        self.llm.__reduce_ex__(2)  # raises the reason; LlamaIndex would omit an object that cannot be pickled
        return super().__getstate__()

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Precompute `nodes` and return them. Several calls may pass nodes of the same document."""
        precompute_documents(nodes, self.llm, collection=self.collection)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Precompute `nodes` and return them, without blocking the event loop."""
        return await run_in_thread(lambda cancelled: self(nodes, **kwargs))


def delete_ref_doc(index: BaseIndex[Any], ref_doc_id: str, llm: Any, *, collection: str = _COLLECTION) -> int:
    """Delete a document from `index` and from its docstore, and the KV that `BlendIngestion` made of its nodes.

    Return the number of deleted entries. The KV of a text that another document contains is kept. If the id is a random
    one of LlamaIndex, the document is found by its nodes in `index`. An index over a database that cannot list them
    gives 0; `ragblend documents` then says what to remove.
    """
    ids = {ref_doc_id, *(identify(node, as_chunk(node)).id for node in _nodes_of(index, ref_doc_id))}
    index.delete_ref_doc(ref_doc_id, delete_from_docstore=True)
    return delete_precomputed(sorted(ids), llm, collection=collection)


def _nodes_of(index: BaseIndex[Any], ref_doc_id: str) -> Sequence[BaseNode]:
    """Return the nodes of a document from the docstore, or from a vector store that keeps them; [] if neither can."""
    document_info = index.docstore.get_ref_doc_info(ref_doc_id)
    if document_info is not None:
        return index.docstore.get_nodes(document_info.node_ids, raise_error=False)
    with suppress(AttributeError, NotImplementedError, ValueError):  # an index or a store that cannot list nodes
        filters = MetadataFilters(filters=[MetadataFilter(key="doc_id", value=ref_doc_id)])
        return list(index.vector_store.get_nodes(filters=filters))  # type: ignore[attr-defined]
    return []
