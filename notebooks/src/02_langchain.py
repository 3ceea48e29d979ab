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
# # LangChain: swap one object
#
# **You learn** how to use stored KV in a LangChain chain by replacing its LLM and nothing else, and what
# `create_blend_chain` adds. It takes less than a minute on a CPU, offline, with the embedded model of a made-up world.
#
# The chunks that a chain puts into its prompt are found in the prompt's token ids, and their stored KV is reused.
#
# It needs, in a checkout: `pip install -e '.[langchain,plot]' langchain-classic jupyterlab`.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.prompts import ChatPromptTemplate

from ragblend import ChatBlend, ingest, load_engine
from ragblend.chains import BlendRetriever, create_blend_chain
from ragblend.demo.corpus import REFERENCE_KINDS, sample_corpus
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
# ## LangChain's own chain
# Any retriever works, because a chunk's KV is found by its tokens. The prompt has no
# instructions, because the embedded model cannot follow any. With another model, write your own.

# %%
retriever = BlendRetriever(index=index, k=2, neighbours=2, order="document")
prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])


def build(llm):
    """Return the application's chain. It is the same for every LLM."""
    return create_stuff_documents_chain(llm, prompt)


# before: llm = ChatOpenAI(...), ChatHuggingFace(...), any other LLM
llm = ChatBlend(engine=engine, max_tokens=16)  # or ChatBlend(model="Qwen/Qwen3-8B", store="kv/")
chain = build(llm)

item = next(item for item in questions if item.kind == "two_hop_ref")
documents = retriever.invoke(item.text)
with get_usage_metadata_callback() as usage:
    answer = chain.invoke({"input": item.text, "context": documents})
print(f"{item.text}\n  {answer}   ({'right' if answer == item.answer else f'WRONG, gold is {item.answer}'})")

# %% [markdown]
# The chain passed one long string to the model. `cache_read` in LangChain's usage metadata is the number of its tokens
# that were not prefilled.

# %%
for model, counted in usage.usage_metadata.items():
    read = counted["input_token_details"]["cache_read"]
    print(f"model {model!r}: {counted['input_tokens']} prompt tokens, {read} read from stored KV")

# %% [markdown]
# The same chain with full prefill, as any other LLM would run it, with reuse without recompute, and with blend at its
# default of 15 % and at 30 %:

# %%
asked = [item for item in questions if item.kind in REFERENCE_KINDS][::5]
settings = {
    "full": llm.model_copy(update={"mode": "full"}),
    "reuse": llm.model_copy(update={"mode": "reuse"}),
    "blend": llm,
    "blend, 30 %": llm.model_copy(update={"recompute_ratio": 0.3}),
}
answers = {
    name: [build(one).invoke({"input": item.text, "context": retriever.invoke(item.text)}) for item in asked]
    for name, one in settings.items()
}
print(f"{len(asked)} questions whose answer needs two chunks together")
for name, given in answers.items():
    right = sum(a == item.answer for a, item in zip(given, asked, strict=True))
    same = sum(a == b for a, b in zip(given, answers["full"], strict=True))
    print(f"  {name:<12}{right:>3} right, {same:>3} as full prefill answers")

# %% [markdown]
# ## A chain that returns the report
# `create_blend_chain` retrieves, puts the documents and the question into one message, and returns answer, documents
# and report. It takes any LangChain retriever too.

# %%
blend_chain = create_blend_chain(retriever, llm)
result = blend_chain.invoke(item.text)
report = result["report"]
print(result["input"], "->", result["answer"])
print("from", ", ".join(Path(source).name for source in result["sources"]))
print(
    f"{report['num_chunk_hits']} of {report['num_chunks']} chunks from the store; of {report['prompt_tokens']} prompt "
    f"tokens {report['num_reused_tokens']} reused, {report['num_recomputed_tokens']} recomputed"
)

# %%
reports = [blend_chain.invoke(item.text)["report"] for item in asked]
reused = [r["num_reused_tokens"] for r in reports]
again = [r["num_recomputed_tokens"] for r in reports]
rest = [r["prompt_tokens"] - r["num_reused_tokens"] - r["num_recomputed_tokens"] for r in reports]

figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
places = range(len(reports))
axes.bar(places, reused, color="#c8d6e5", label="reused from stored KV")
axes.bar(places, again, bottom=reused, color="#ff9f43", label="recomputed")
axes.bar(places, rest, bottom=[a + b for a, b in zip(reused, again, strict=True)], color="#57606f", label="question")
axes.set_xlabel("question")
axes.set_ylabel("prompt tokens")
axes.set_xticks([])
axes.margins(y=0.3)
axes.legend(ncols=3, loc="upper center", frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()
num_hits, num_chunks = sum(r["num_chunk_hits"] for r in reports), sum(r["num_chunks"] for r in reports)
print(f"{num_hits} of {num_chunks} chunks came from the store")

# %% [markdown]
# Answers stream as well (`blend_chain.stream`), and every call may set `mode`, `rule` and `recompute_ratio`:

# %%
for mode, ratio in (("blend", 0.15), ("blend", 1.0), ("full", None)):
    message = llm.bind(mode=mode, recompute_ratio=ratio).invoke(
        prompt.invoke({"context": "\n\n".join(document.page_content for document in documents), "input": item.text})
    )
    facts = message.response_metadata["ragblend"]
    print(f"{mode:<6} {ratio or '':<5} {message.text:<12} recomputed {facts['num_recomputed_tokens']:>3}")

# %%
index.close()
engine.close()
workplace.cleanup()
