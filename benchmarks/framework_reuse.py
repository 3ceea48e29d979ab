"""Share of chunk tokens that each construct of LangChain and LlamaIndex takes from the store, on MuSiQue passages.

    python -m benchmarks.framework_reuse --out data/results/framework-reuse.json

The passages of each question are split, embedded and precomputed by the framework's own API. Each construct then asks
the question; only the LLM is replaced. A row's share is placed tokens over the tokens of the texts that the
construct put into its prompts, summed over all calls. Only matching is measured, so the model is a random Llama of two
layers with the tokenizer and the chat template of --tokenizer. Read `measure` first.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from langchain_classic.chains import RetrievalQA, create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core import Document as LlamaDocument
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever as LlamaRetriever
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import (
    LongContextReorder,
    MetadataReplacementPostProcessor,
    SimilarityPostprocessor,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import MetadataMode
from llama_index.core.storage.docstore import SimpleDocumentStore
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.results import OutOption, write_result
from ragblend.chains import create_blend_chain
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.api import Engine, Stream
from ragblend.engine.load import load_engine
from ragblend.frameworks.model import Request
from ragblend.lab.quality.data import find_data
from ragblend.lab.quality.records import read_cases
from ragblend.lab.quality.tasks import QaCase
from ragblend.llamaindex import BlendIngestion, BlendSynthesizer
from ragblend.llamaindex import BlendLLM as LlamaBlend
from ragblend.llm import ChatBlend
from ragblend.vectorstores import BlendEmbeddings, BlendVectorStore

K = 6  # retrieved documents
CHUNK_CHARACTERS, PARENT_CHARACTERS, CHILD_CHARACTERS = 900, 1800, 450
CHUNK_TOKENS = 200  # of LlamaIndex' splitter, which counts with its own tokenizer
HIERARCHY = [512, 256, 128]
Texts = list[str]
_EMBEDDER = HashingEmbedder()
_SENTENCE = re.compile(r"(?<=[.!?]) ")


@dataclass
class Row:
    """Result of one construct over all questions."""

    framework: str
    construct: str
    note: str = ""
    num_calls: int = 0
    num_given_tokens: int = 0  # tokens of the texts that the construct put into prompts
    num_placed_tokens: int = 0

    @property
    def share(self) -> float:
        """Return placed tokens divided by given tokens."""
        return self.num_placed_tokens / self.num_given_tokens if self.num_given_tokens else 0.0


# --- the models -------------------------------------------------------------------------------------------------------

_CALLS: list[Stream] = []


class _RecordedChat(ChatBlend):
    def _open(self, request: Request) -> Stream:
        _CALLS.append(super()._open(request))
        return _CALLS[-1]


class _RecordedLlama(LlamaBlend):
    def _open(self, request: Request) -> Stream:
        _CALLS.append(super()._open(request))
        return _CALLS[-1]


@contextmanager
def random_engine(tokenizer: str) -> Iterator[Engine]:
    """Yield an engine with an empty store over a small random Llama with the tokenizer in this folder."""
    read = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(read),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16384,
    )
    with load_engine((LlamaForCausalLM(config).eval(), read), None, on_miss="inline") as engine:
        yield engine


# --- LangChain --------------------------------------------------------------------------------------------------------

CHAT = ChatPromptTemplate.from_messages([("system", "Use the context.\n\n{context}"), ("human", "{input}")])


@dataclass
class Passages:
    """A question, its passages in a LangChain vector store with KV, and the LLM."""

    case: QaCase
    llm: ChatBlend
    store: BlendVectorStore

    @property
    def retriever(self) -> BaseRetriever:
        """Return the retriever of the vector store."""
        return self.store.as_retriever(search_kwargs={"k": K})

    def stuff(self, retriever: Any) -> Texts:
        """Run a stuff chain over what a retriever finds. Return the texts of these documents."""
        found: list[Document] = retriever.invoke(self.case.question)
        create_stuff_documents_chain(self.llm, CHAT).invoke({"context": found, "input": self.case.question})
        return texts_of(found)


def texts_of(documents: Sequence[Document]) -> Texts:
    """Return the texts of documents."""
    return [document.page_content for document in documents]


class WordRetriever(BaseRetriever):
    """Retriever of the documents that share most words with the question: the keyword half of a hybrid search."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = set(query.lower().split())
        return sorted(self.documents, key=lambda each: -len(words & set(each.page_content.lower().split())))[:K]


class SentenceExtractor(BaseDocumentCompressor):
    """Compressor that keeps the sentences with a word of five or more letters of the question, as LLMChainExtractor
    would.
    """

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Return the documents with only these sentences; documents without one are left out."""
        words = set(re.findall(r"\w{5,}", query.lower()))
        kept = []
        for document in documents:
            sentences = _SENTENCE.split(document.page_content)
            wanted = " ".join(each for each in sentences if words & set(re.findall(r"\w{5,}", each.lower())))
            kept += [Document(wanted, metadata=document.metadata)] if wanted else []
        return kept


def split_documents(case: QaCase, size: int) -> list[Document]:
    """Return the question's passages, split into documents of at most `size` characters."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=0)
    return splitter.split_documents(
        [Document(text, metadata={"source": f"{n}"}) for n, text in enumerate(case.passages)]
    )


def retrieval_chain(given: Passages) -> Texts:
    """Run create_retrieval_chain over create_stuff_documents_chain. Return the retrieved texts."""
    chain = create_retrieval_chain(given.retriever, create_stuff_documents_chain(given.llm, CHAT))
    return texts_of(chain.invoke({"input": given.case.question})["context"])


def retrieval_qa(given: Passages) -> Texts:
    """Run RetrievalQA. Return the retrieved texts."""
    chain = RetrievalQA.from_chain_type(given.llm, retriever=given.retriever, return_source_documents=True)
    return texts_of(chain.invoke(given.case.question)["source_documents"])


def blend_chain(given: Passages) -> Texts:
    """Run create_blend_chain. Return the retrieved texts."""
    create_blend_chain(given.retriever, given.llm).invoke(given.case.question)
    return texts_of(given.retriever.invoke(given.case.question))


def qa_chain(kind: str, given: Passages) -> Texts:
    """Run a chain of type map_reduce or refine, whose prompts have one document each. Return the retrieved texts."""
    found = given.retriever.invoke(given.case.question)
    asked = {"input_documents": found, "question": given.case.question}
    load_qa_chain(given.llm, chain_type=kind).invoke(asked)
    return texts_of(found)


def multi_query(given: Passages) -> Texts:
    """Run a stuff chain over MultiQueryRetriever. Return the retrieved texts."""
    return given.stuff(MultiQueryRetriever.from_llm(given.store.as_retriever(search_kwargs={"k": 3}), given.llm))


def parent_documents(given: Passages) -> Texts:
    """Run a stuff chain over ParentDocumentRetriever: children are precomputed, but the prompt has their parents."""
    retriever = ParentDocumentRetriever(
        vectorstore=new_store(given.llm),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=CHILD_CHARACTERS, chunk_overlap=0),
        parent_splitter=RecursiveCharacterTextSplitter(chunk_size=PARENT_CHARACTERS, chunk_overlap=0),
        search_kwargs={"k": K},
    )
    retriever.add_documents([Document(text) for text in given.case.passages])
    return given.stuff(retriever)


def sentences(given: Passages) -> Texts:
    """Run a stuff chain over ContextualCompressionRetriever with an extractor of sentences."""
    return given.stuff(
        ContextualCompressionRetriever(base_compressor=SentenceExtractor(), base_retriever=given.retriever)
    )


def reordered(given: Passages) -> Texts:
    """Run a stuff chain over documents in the order of LongContextReorder: the best ones first and last."""

    def reorder(found: list[Document]) -> list[Document]:
        return [*found[::2], *found[1::2][::-1]]

    return given.stuff(given.retriever | reorder)


def ensemble(given: Passages) -> Texts:
    """Run a stuff chain over EnsembleRetriever, which combines the vector store and keywords."""
    words = WordRetriever(documents=split_documents(given.case, CHUNK_CHARACTERS))
    return given.stuff(EnsembleRetriever(retrievers=[given.retriever, words], weights=[0.5, 0.5]))


def with_history(given: Passages) -> Texts:
    """Run create_history_aware_retriever and a stuff chain with the earlier turns. Return the retrieved texts."""
    history = [HumanMessage("Who wrote it?"), AIMessage("The passages name two authors.")]
    rephrase = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}\nRephrase this question.")]
    )
    answer = ChatPromptTemplate.from_messages(
        [("system", "Use the context.\n\n{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    aware = create_history_aware_retriever(given.llm, given.retriever, rephrase)
    chain = create_retrieval_chain(aware, create_stuff_documents_chain(given.llm, answer))
    return texts_of(chain.invoke({"input": given.case.question, "chat_history": history})["context"])


def tool_message(write: Callable[[Texts], str], given: Passages) -> Texts:
    """Call the LLM as an agent's second step, in which the passages are the result of a tool. Return the passages."""
    found = texts_of(given.retriever.invoke(given.case.question))
    call = {"name": "search", "args": {"query": given.case.question}, "id": "1"}
    given.llm.invoke(
        [
            HumanMessage(given.case.question),
            AIMessage("", tool_calls=[call]),
            ToolMessage(write(found), tool_call_id="1"),
        ]
    )
    return found


LANGCHAIN: dict[str, Callable[[Passages], Texts]] = {
    "create_stuff_documents_chain": lambda given: given.stuff(given.retriever),
    "create_retrieval_chain": retrieval_chain,
    "RetrievalQA": retrieval_qa,
    "create_blend_chain": blend_chain,
    "map_reduce": partial(qa_chain, "map_reduce"),
    "refine": partial(qa_chain, "refine"),
    "MultiQueryRetriever": multi_query,
    "ParentDocumentRetriever": parent_documents,
    "ContextualCompressionRetriever, sentences": sentences,
    "LongContextReorder": reordered,
    "EnsembleRetriever": ensemble,
    "create_history_aware_retriever": with_history,
    "tool message, text": partial(tool_message, "\n\n".join),
    "tool message, JSON": partial(tool_message, json.dumps),
}


def new_store(llm: ChatBlend) -> BlendVectorStore:
    """Return an empty LangChain vector store that precomputes the KV of its documents."""
    return BlendVectorStore(InMemoryVectorStore(BlendEmbeddings(_EMBEDDER)), llm=llm)


# --- LlamaIndex -------------------------------------------------------------------------------------------------------


@dataclass
class Nodes:
    """A question, its passages as LlamaIndex documents, and the LLM."""

    case: QaCase
    llm: LlamaBlend

    @property
    def documents(self) -> list[LlamaDocument]:
        """Return the passages as LlamaIndex documents."""
        return [LlamaDocument(text=text, id_=str(n)) for n, text in enumerate(self.case.passages)]

    def index(self, nodes: Sequence[Any]) -> VectorStoreIndex:
        """Precompute nodes and index them."""
        return VectorStoreIndex(list(BlendIngestion(llm=self.llm)(nodes)), embed_model=_LlamaEmbedding(embed_dim=256))

    def chunks(self) -> VectorStoreIndex:
        """Return an index of the documents, split by SentenceSplitter."""
        splitter = SentenceSplitter(chunk_size=CHUNK_TOKENS, chunk_overlap=0)
        return self.index(splitter.get_nodes_from_documents(self.documents))

    def ask(self, retriever: LlamaRetriever, mode: str = "compact", postprocessors: Sequence[Any] = ()) -> Texts:
        """Ask a query engine of a response mode. Return the texts of the nodes that reached it."""
        engine = RetrieverQueryEngine(
            retriever,
            BlendSynthesizer(self.llm)
            if mode == "blend"
            else get_response_synthesizer(self.llm, response_mode=ResponseMode(mode)),
            node_postprocessors=list(postprocessors),
        )
        response = engine.query(self.case.question)
        return [each.node.get_content(metadata_mode=MetadataMode.NONE) for each in response.source_nodes]


class _LlamaEmbedding(MockEmbedding):
    def _get_text_embedding(self, text: str) -> list[float]:
        return [float(value) for value in _EMBEDDER.embed([text])[0]]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def response_mode(mode: str, given: Nodes) -> Texts:
    """Ask a query engine of this response mode. Return the texts of its nodes."""
    return given.ask(given.chunks().as_retriever(similarity_top_k=K), mode)


def postprocessed(postprocessor: Any, given: Nodes) -> Texts:
    """Ask a query engine with a node postprocessor. Return the texts of its nodes."""
    return given.ask(given.chunks().as_retriever(similarity_top_k=K), postprocessors=[postprocessor])


def sentence_window(given: Nodes, *, with_documents: bool) -> Texts:
    """Ask over SentenceWindowNodeParser: sentences are embedded; the prompt has each with three more on both sides.

    with_documents: also precompute the documents' chunks.
    """
    nodes = SentenceWindowNodeParser.from_defaults(window_size=3).get_nodes_from_documents(given.documents)
    if with_documents:
        given.chunks()
    index = given.index(nodes)
    return given.ask(
        index.as_retriever(similarity_top_k=K),
        postprocessors=[MetadataReplacementPostProcessor(target_metadata_key="window")],
    )


def hierarchy(given: Nodes) -> tuple[SimpleDocumentStore, VectorStoreIndex]:
    """Return all nodes of HierarchicalNodeParser, and an index of its leaves. Only the leaves are precomputed."""
    nodes = HierarchicalNodeParser.from_defaults(HIERARCHY, chunk_overlap=0).get_nodes_from_documents(given.documents)
    docstore = SimpleDocumentStore()
    docstore.add_documents(nodes)
    return docstore, given.index(get_leaf_nodes(nodes))


def auto_merging(given: Nodes) -> Texts:
    """Ask over AutoMergingRetriever: leaves are precomputed, but several leaves of a parent are replaced by it."""
    docstore, index = hierarchy(given)
    base: Any = index.as_retriever(similarity_top_k=3 * K)
    return given.ask(
        AutoMergingRetriever(base, StorageContext.from_defaults(docstore=docstore), simple_ratio_thresh=0.3)
    )


class ParentRetriever(LlamaRetriever):
    """Retriever of the parents of the found leaves, without duplicates."""

    def __init__(self, base: LlamaRetriever, docstore: SimpleDocumentStore) -> None:
        super().__init__()
        self.base = base
        self.docstore = docstore

    def _retrieve(self, query_bundle: Any) -> Any:
        found: dict[str, Any] = {}
        for each in self.base.retrieve(query_bundle):
            if each.node.parent_node is not None:
                parent: Any = self.docstore.get_document(each.node.parent_node.node_id)
                found.setdefault(parent.node_id, each.model_copy(update={"node": parent}))
        return list(found.values())


def llama_parents(given: Nodes) -> Texts:
    """Ask over ParentRetriever: leaves are precomputed, but the prompt has their parents."""
    docstore, index = hierarchy(given)
    return given.ask(ParentRetriever(index.as_retriever(similarity_top_k=K), docstore))


LLAMAINDEX: dict[str, Callable[[Nodes], Texts]] = {
    **{
        f"response mode {mode}": partial(response_mode, mode)
        for mode in ("compact", "refine", "tree_summarize", "simple_summarize", "accumulate")
    },
    "BlendSynthesizer": partial(response_mode, "blend"),
    "SentenceWindow, sentences precomputed": partial(sentence_window, with_documents=False),
    "SentenceWindow, chunks precomputed too": partial(sentence_window, with_documents=True),
    "AutoMergingRetriever": auto_merging,
    "parent documents": llama_parents,
    "LongContextReorder": partial(postprocessed, LongContextReorder()),
    "SimilarityPostprocessor": partial(postprocessed, SimilarityPostprocessor(similarity_cutoff=0.05)),
}


# --- the measurement --------------------------------------------------------------------------------------------------

NOTES = {
    "ParentDocumentRetriever": "parents are found child by child",
    "ContextualCompressionRetriever, sentences": "sentences of fewer than 16 tokens are prefilled",
    "tool message, JSON": "JSON escapes quotes and accented letters",
    "response mode simple_summarize": "prints a Python list, which escapes quotes",
    "SentenceWindow, sentences precomputed": "LlamaIndex joins sentences by a second space",
    "SentenceWindow, chunks precomputed too": "LlamaIndex joins sentences by a second space",
    "AutoMergingRetriever": "parents are found leaf by leaf",
    "parent documents": "parents are found leaf by leaf",
}
"""Reasons for shares below 100 %."""


def measure(framework: str, construct: str, tokenizer: str, cases: Sequence[QaCase]) -> Row:
    """Ask all questions by one construct, each over a store with only the passages of its question."""
    row = Row(framework, construct, NOTES.get(construct, ""))
    for case in cases:
        with random_engine(tokenizer) as engine:
            if framework == "LangChain":
                chat = _RecordedChat(engine=engine, mode="reuse", max_tokens=1)
                store = new_store(chat)
                if construct != "ParentDocumentRetriever":
                    store.add_documents(split_documents(case, CHUNK_CHARACTERS))
                texts = LANGCHAIN[construct](Passages(case, chat, store))
            else:
                llama = _RecordedLlama(engine=engine, mode="reuse", max_tokens=1)
                texts = LLAMAINDEX[construct](Nodes(case, llama))
            row.num_calls += len(_CALLS)
            row.num_given_tokens += sum(len(engine.renderer.chunk_ids(text)) for text in texts)
            placed = [chunk for stream in _CALLS for chunk in stream.result.report.chunks if chunk.hit]
            row.num_placed_tokens += sum(chunk.num_tokens for chunk in placed)
            _CALLS.clear()
    return row


def main(
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="Folder of a tokenizer with a chat template.")] = (
        "models/smollm2"
    ),
    questions: Annotated[int, typer.Option("--questions", help="Number of MuSiQue questions.")] = 10,
    out: OutOption = None,
) -> None:
    """Measure every construct, print a table, and write the result as JSON."""
    quiet_libraries()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    cases = read_cases(find_data("musique"))[:questions]
    rows = []
    print_line(f"{'framework':<12}{'construct':<45}{'calls':>6}{'tokens given':>14}{'placed':>9}")
    for framework, constructs in (("LangChain", LANGCHAIN), ("LlamaIndex", LLAMAINDEX)):
        for construct in constructs:
            row = measure(framework, construct, tokenizer, cases)
            rows.append({**vars(row), "share": round(row.share, 4)})
            counts = f"{row.num_calls:>6}{row.num_given_tokens:>14}{row.share:>9.1%}"
            print_line(f"{framework:<12}{construct:<45}{counts}  {row.note}".rstrip())
    write_result({"tokenizer": tokenizer, "num_questions": len(cases), "rows": rows}, out)


if __name__ == "__main__":
    typer.run(main)
