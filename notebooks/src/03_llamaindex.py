# ---
# jupyter:
#   jupytext:
#     formats: ipynb,src//py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # LlamaIndex: nodes are chunks
#
# **You learn** how to query with `BlendQueryEngine`, and how your own LlamaIndex query engine reuses stored KV when its
# `llm` is a `BlendLLM`. It takes less than a minute on a CPU, offline, with the embedded model of a made-up world.
#
# It needs, in a checkout: `pip install -e '.[llamaindex]' jupyterlab`.

# %%
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.postprocessor import PrevNextNodePostprocessor
from llama_index.core.schema import NodeRelationship, TextNode

from ragblend import ingest, load_engine
from ragblend.demo.corpus import REFERENCE_KINDS, sample_corpus
from ragblend.llamaindex import BlendIndexRetriever, BlendLLM, BlendQueryEngine
from ragblend.precompute import open_engine_index

workplace = TemporaryDirectory()
folder = Path(workplace.name)
corpus = sample_corpus()
questions = corpus.questions
corpus.write(folder / "corpus")
engine = load_engine("demo", store=folder / "kv")
index = open_engine_index(folder / "index", engine, "hashing", chunk_size=112)
done = ingest(folder / "corpus", engine, index, chunk_size=112, glob="*.md")
print(f"{done.num_chunks} chunks, {done.num_new_kv} prefilled and stored")

# %% [markdown]
# ## Ready made: `BlendQueryEngine`
# It works with any LlamaIndex retriever; here with one over ragblend's index. `response.source_nodes` has LlamaIndex's
# nodes, and `response.metadata["ragblend"]` is the report.

# %%
llm = BlendLLM(engine=engine, max_tokens=16)  # or BlendLLM(model="Qwen/Qwen3-8B", store="kv/")
retriever = BlendIndexRetriever(index, similarity_top_k=2, neighbours=2, order="document")
query_engine = BlendQueryEngine.from_args(retriever, llm)


def show(item, response):
    """Print the question, the answer, whether it is right, and its sources."""
    verdict = "right" if str(response) == item.answer else f"WRONG, gold is {item.answer}"
    print(f"{item.text}  ->  {response}   ({verdict})")
    for found in response.source_nodes:
        text = " ".join(found.node.get_content().split())
        print(f"    {text[:90]}...")


item = next(item for item in questions if item.kind == "two_hop_ref")
response = query_engine.query(item.text)
show(item, response)
report = response.metadata["ragblend"]
print(
    f"\n{report['num_chunk_hits']} of {report['num_chunks']} chunks from the store; of {report['prompt_tokens']} "
    f"prompt tokens {report['num_reused_tokens']} reused, {report['num_recomputed_tokens']} recomputed"
)

# %% [markdown]
# ## Your own index with `BlendLLM`
# A plain `VectorStoreIndex` with `as_query_engine` joins its nodes to one string. ragblend matches the token ids of the
# ingested chunks, which the store's catalogue contains, in this string. With `strict=True`, a prompt that has nodes
# but no match is an error. The nodes only have to contain the text of the chunks.


# %%
class OurEmbedding(BaseEmbedding):
    """Embedding model that uses the index's embedder, so that nothing has to be downloaded."""

    def _get_text_embedding(self, text):
        return index.embedder.embed([text])[0].tolist()

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


nodes = []
for source in index.sources():
    paragraphs = [TextNode(text=chunk.text) for chunk in index.chunks(source)]
    for before, after in pairwise(paragraphs):
        before.relationships[NodeRelationship.NEXT] = after.as_related_node_info()
        after.relationships[NodeRelationship.PREVIOUS] = before.as_related_node_info()
    nodes += paragraphs
vector_index = VectorStoreIndex(nodes, embed_model=OurEmbedding())

# %%
neighbours = PrevNextNodePostprocessor(docstore=vector_index.docstore, num_nodes=2, mode="both")
own_engine = vector_index.as_query_engine(
    llm=BlendLLM(engine=engine, max_tokens=16, strict=True),  # the one object swapped
    similarity_top_k=2,
    node_postprocessors=[neighbours],
    # The embedded model cannot follow the English instructions of LlamaIndex's default template.
    text_qa_template=PromptTemplate("{context_str}\n\n{query_str}"),
)
show(item, own_engine.query(item.text))

# %% [markdown]
# `response.metadata["ragblend"]` has the report here, too. Its list `calls` has the reports of all calls of the LLM,
# because modes such as `refine` make several. LlamaIndex's default template with its instructions reuses the same
# chunks:

# %%
default_engine = vector_index.as_query_engine(llm=llm, similarity_top_k=2, node_postprocessors=[neighbours])
for name, one in (("our template", own_engine), ("LlamaIndex's template", default_engine)):
    response = one.query(item.text)
    report = response.metadata["ragblend"]
    print(
        f"{name:<24} {len(response.source_nodes)} nodes, {report['num_chunks']} found, "
        f"{report['num_chunk_hits']} from the store, {len(report['calls'])} call"
    )

# %% [markdown]
# ## The three ways agree
# Answers of full prefill, of `BlendQueryEngine` and of `as_query_engine` to the same questions:

# %%
asked = [item for item in questions if item.kind in REFERENCE_KINDS][::5]
full_engine = BlendQueryEngine.from_args(retriever, llm.model_copy(update={"mode": "full"}))
answers = {
    name: [str(one.query(item.text)) for item in asked]
    for name, one in (
        ("full prefill", full_engine),
        ("BlendQueryEngine", query_engine),
        ("as_query_engine", own_engine),
    )
}
print(f"{len(asked)} questions whose answer needs two nodes together")
for name, given in answers.items():
    right = sum(answer == item.answer for answer, item in zip(given, asked, strict=True))
    print(f"  {name:<18}{right:>3} right  {'█' * right}")

# %%
index.close()
engine.close()
workplace.cleanup()
