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
# # Quickstart: reuse stored KV, and correct it
#
# **You learn** how to ingest documents, ask a question in the four modes, and read the report of what was reused. It
# takes less than a minute on a CPU, offline.
#
# A chunk's KV cache, computed once and alone, can be reused in any prompt. Reused *as it is*, it gives wrong answers if
# a chunk refers to another one. Recomputing about 15 % of the chunk tokens corrects most of them.
#
# The small model is part of the package. It was trained on one made-up world of people, companies and cities, so that
# right and wrong answers are easy to see.
#
# It needs, in a checkout: `pip install -e '.[plot]' jupyterlab`.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt

from ragblend import Prompt, ingest, load_engine
from ragblend.demo.corpus import sample_corpus
from ragblend.precompute import open_engine_index

workplace = TemporaryDirectory()
folder = Path(workplace.name)
corpus = sample_corpus()
questions = corpus.questions
corpus.write(folder / "corpus")
print(corpus.records[0].markdown)

# %% [markdown]
# Every paragraph becomes a chunk. Read alone, *"The firm sells ..."* does not say which firm.
#
# ## Ingest: prefill every chunk once
# `load_engine` takes `"demo"`, a Hugging Face id or a local path. `ingest` chunks, embeds, indexes and stores the KV of
# each chunk. A second run computes nothing new. The chunk size fits one paragraph, but not two. The embedder compares
# words (`"hashing"`), because a sentence encoder cannot distinguish made-up names.

# %%
engine = load_engine("demo", store=folder / "kv")
index = open_engine_index(folder / "index", engine, "hashing", chunk_size=112)
for _ in range(2):
    done = ingest(folder / "corpus", engine, index, chunk_size=112, glob="*.md")
    print(
        f"{done.num_documents} documents, {done.num_chunks} chunks: {done.num_new_kv} prefilled now, "
        f"{done.num_known_kv} known; {done.store_bytes / 2**20:.1f} MiB of KV"
    )

# %% [markdown]
# ## Ask: the same chunks in four modes
# `full` prefills the whole prompt and is the reference. `prefix` reuses only KV at the beginning of the prompt that was
# computed there. `reuse` takes the stored KV of every chunk unchanged. `blend` also takes it, and recomputes a few
# tokens.

# %%
MODES = ("full", "prefix", "reuse", "blend")


def prompt_for(question):
    """Return a prompt of the two best chunks, with two neighbours on either side, in document order."""
    hits = index.search(question, 2, neighbours=2, order="document")
    return Prompt([hit.chunk for hit in hits], question)


def ask(question):
    """Return the answers in all modes, each with text and report."""
    return {mode: engine.generate(prompt_for(question), mode=mode, max_tokens=16) for mode in MODES}


asked = questions[::6]  # every sixth of the prepared questions
answers = [ask(item.text) for item in asked]
right = [{mode: found[mode].text == item.answer for mode in MODES} for item, found in zip(asked, answers, strict=True)]

different = [i for i, ok in enumerate(right) if ok["full"] and ok["blend"] and not ok["reuse"]]
if not different:
    print("No question here shows the difference with these weights; this is simply the first one.\n")
shown = different[0] if different else 0
print(f"{asked[shown].text}   (gold: {asked[shown].answer})")
for number, chunk in enumerate(prompt_for(asked[shown].text).chunks, start=1):
    print(f"  [{number}] {' '.join(chunk.text.split())}")
print()
for mode in MODES:
    print(f"  {mode:<8}{answers[shown][mode].text:<14}{'right' if right[shown][mode] else 'WRONG'}")

# %% [markdown]
# ## The report of blend
# Every answer has a report. `num_reused_tokens` is the number of prompt tokens whose stored KV was used unchanged,
# `num_recomputed_tokens` the number of chunk tokens whose KV was replaced. `charged_budget` is the total compute: the
# token-layers run for chunk tokens, divided by those of full prefill. It includes running the question over the stored
# KV, which selects the tokens to recompute. `charged_budget_32` is the compute of the same rule with 32 layers. The
# first chunk of the prompt is at the position where it was computed. It is `exact` and never recomputed.

# %%
report = answers[shown]["blend"].report
for name in ("prompt_tokens", "num_chunks", "num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens"):
    print(f"{name:<22}{getattr(report, name):>6}")
print(f"{'charged_budget':<22}{report.charged_budget:>6.0%}")
print(f"{'charged_budget_32':<22}{report.charged_budget_32:>6.0%}")
print()
for number, chunk in enumerate(report.chunks, start=1):
    state = "exact" if chunk.exact else f"{chunk.num_recomputed_tokens} recomputed"
    print(f"chunk [{number}] {chunk.num_tokens:>3} tokens, {'hit' if chunk.hit else 'miss'}, {state}")

# %% [markdown]
# ## The recomputed tokens
# The rule selects the tokens that the question attends to most. `prefill`, one level below `generate`, returns them.
# The picture shows the chunks with the gold sentences.

# %%
request = engine.request(prompt_for(asked[shown].text), recompute_ratio=0.15)
recomputed = set(engine.prefill(request).recomputed.tolist())

gold = [span["text"] for span in asked[shown].gold]
texts = [chunk.text for chunk in prompt_for(asked[shown].text).chunks]
drawn = [number for number, text in enumerate(texts) if any(sentence in text for sentence in gold)] or [0]
PER_LINE = 20  # tokens
figure, axes = plt.subplots(figsize=(11, 0.5 + 1.7 * len(drawn)), layout="constrained")
line = 0
ticks = {}
for number in drawn:
    run, exact = request.prompt.runs[number], report.chunks[number].exact
    ticks[line + 0.4] = f"[{number + 1}]"
    for place, token in enumerate(request.prompt.token_ids[run.start : run.end]):
        row, column = line + place // PER_LINE, place % PER_LINE
        again = run.start + place in recomputed
        colour = "#ff9f43" if again else "#c8d6e5" if exact else "#eef2f7"
        axes.add_patch(plt.Rectangle((column, row), 0.94, 0.8, color=colour))
        word = engine.renderer.plain_text([token]).strip()
        axes.text(column + 0.47, row + 0.4, word, ha="center", va="center", fontsize=7)
    line = row + 1.4
axes.set_xlim(0, PER_LINE)
axes.set_ylim(line, -0.1)
axes.set_yticks(list(ticks), list(ticks.values()))
axes.set_xticks([])
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
axes.set_title("orange: recomputed    dark: exact, never recomputed    light: reused as stored", fontsize="medium")
plt.show()

# %% [markdown]
# ## More questions
# The chunks are those that retrieval found. If a needed chunk is missing, every mode answers wrong.

# %%
print(f"right answers to {len(asked)} questions:")
for mode in MODES:
    count = sum(ok[mode] for ok in right)
    print(f"  {mode:<8}{count:>3}  {'█' * count}")
lost = [ok for ok in right if ok["full"] and not ok["reuse"]]
same = sum(found["blend"].text == found["full"].text for found in answers)
print(f"\nReuse lost {len(lost)} that full prefill has; blend brought {sum(ok['blend'] for ok in lost)} of them back.")
print(f"Blend gave full prefill's own answer, right or wrong, to {same} of {len(asked)}.")

# %%
index.close()
engine.close()
workplace.cleanup()

# %% [markdown]
# The model is so small that its times are mostly overhead. `ragblend bench ttft --shape llama-200m` measures the time
# that reuse saves with a larger shape. Notebook `04_quality_vs_ratio` shows how quality depends on the ratio and the
# rule.
