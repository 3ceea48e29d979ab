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
# # Layer by layer: how reused KV deviates, and how blending corrects it
#
# **You learn** in which layers stored KV deviates from full prefill's, which tokens the question attends to, which
# tokens are recomputed, and how that changes the first token of the answer. It takes about two minutes on two CPU
# cores.
#
# The model is SmolLM2-135M-Instruct, which `make real-model` prepares. The question is from MuSiQue, in
# `data/questions/`.
#
# It needs, in a checkout: `pip install -e '.[plot]' jupyterlab`.

# %%
import json
import os
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import ragblend
from ragblend import Prompt, load_engine

model = os.environ.get("RAGBLEND_REAL_MODEL", "../models/smollm2")
data = Path(ragblend.__file__).parents[1] / "data"
SYSTEM = "You will read several passages and then answer a question about them. Answer with a few words only."

case = json.loads((data / "questions" / "musique_100.json").read_text())[0]
passages = [" ".join(passage["text"].split()[:90]) for passage in case["ctxs"][:6]]
engine = load_engine(model, system=SYSTEM, context="none")  # each chunk stored alone, in memory
for passage in passages:
    engine.precompute(passage)
prompt = Prompt(passages, case["question"], SYSTEM)
matched = engine.match(prompt)
chunks = matched.runs
num_layers = engine.layers.num_layers
ids = matched.token_ids
print(case["question"], "->", case["answers"][0])
print(f"{num_layers} layers; {len(ids)} tokens, {sum(chunk.num_tokens for chunk in chunks)} of them in chunks")

# %% [markdown]
# ## Four ways to prefill the prompt
# `full` computes all tokens. `reuse` moves the stored KV of every chunk to its position and does not change it. The two
# blends recompute 5 % of the chunk tokens, selected by CacheBlend's rule and by the rule `ask`.


# %%
def prefill(mode, rule="auto", ratio=0.0):
    """Return KV, logits of the first token, and the recomputed positions."""
    return engine.prefill(engine.request(prompt, mode=mode, rule=rule, recompute_ratio=ratio))


ways = {
    "full": prefill("full"),
    "reuse": prefill("reuse"),
    "cacheblend 5 %": prefill("blend", "cacheblend", 0.05),
    "ask 5 %": prefill("blend", "ask", 0.05),
}


def deviation(way):
    """Return the relative difference of the values from full prefill's, [layers, tokens]. 0: equal."""
    rows = []
    for layer in range(num_layers):
        want = ways["full"].fused.values(layer)[:, : len(ids)].float()  # [heads, tokens, head size]
        got = ways[way].fused.values(layer)[:, : len(ids)].float()
        rows.append((got - want).norm(dim=(0, 2)) / want.norm(dim=(0, 2)))
    return torch.stack(rows)


deviations = {way: deviation(way) for way in ways if way != "full"}
in_chunks = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
print("Mean deviation of the chunk tokens' values")
for way, found in deviations.items():
    by_layer = found[:, in_chunks].mean(1)
    print(
        f"  {way:<15}" + "".join(f"layer {layer}: {by_layer[layer]:.3f}  " for layer in (0, 1, 10, 20, num_layers - 1))
    )

# %% [markdown]
# ## Deviation by layer and token
# A row is a layer, a column a token. **Layer 0 is black**, because its keys and values depend only on the token, so the
# stored ones are exact. **The first chunk is black**, because it was computed after the same prefix as in this prompt.
# The other chunks were computed without the chunks before them. The last columns are the question, which is always
# computed, but attends to KV that deviates.

# %%
figure, axes = plt.subplots(figsize=(11, 4), layout="constrained")
picture = axes.imshow(deviations["reuse"], aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest")
for chunk in chunks:
    axes.axvline(chunk.start - 0.5, color="white", linewidth=0.8)
axes.axvline(chunks[-1].end - 0.5, color="white", linewidth=0.8)
axes.set_xticks([(chunk.start + chunk.end) / 2 for chunk in chunks], [f"chunk {n}" for n in range(1, len(chunks) + 1)])
axes.set_ylabel("layer")
figure.colorbar(picture, label="deviation of the values, full reuse")
plt.show()

reused = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks[1:]])  # the first chunk is exact
by_token = deviations["reuse"].square().mean(0)[reused]
ranked = by_token.sort(descending=True).values.cumsum(0) / by_token.sum()
for share in (0.05, 0.15, 0.5):
    print(
        f"The {share:.0%} of the tokens that deviate most hold {ranked[int(share * len(ranked))]:.0%} of the deviation"
    )
at_one, later = deviations["reuse"][1][reused], deviations["reuse"][num_layers // 2][reused]
print(
    f"Layer 1 and layer {num_layers // 2}, token by token: correlation",
    f"{torch.corrcoef(torch.stack([at_one, later]))[0, 1]:.2f}",
)

# %% [markdown]
# CacheBlend's rule predicts from one early layer which tokens deviate in later layers. The correlation above shows how
# well this works in this model.
#
# ## Attention of the question
# Rule `ask` first runs the question over the stored KV up to the middle layers, and sums its attention there. Most
# tokens get almost none. **Their deviation does not matter to this question.**

# %%
attention = ways["ask 5 %"].attention[: len(ids)]
figure, axes = plt.subplots(figsize=(11, 2.6), layout="constrained")
axes.vlines(in_chunks, 0, attention[in_chunks], linewidth=1, color="C0")
for chunk in chunks:
    axes.axvline(chunk.start - 0.5, color="#bbbbbb", linewidth=0.8)
axes.set_xticks([(chunk.start + chunk.end) / 2 for chunk in chunks], [f"chunk {n}" for n in range(1, len(chunks) + 1)])
axes.set_ylabel("share of the attention")
axes.spines[["top", "right"]].set_visible(False)
plt.show()


def words(positions):
    """Return the texts of the tokens at these positions."""
    return "  ".join(repr(engine.renderer.plain_text([ids[place]])) for place in positions)


most = in_chunks[attention[in_chunks].argsort(descending=True)[:12]].tolist()
print(f"Looked at most:  {words(most)}")
far = reused[by_token.argsort(descending=True)[:12]].tolist()
print(f"Deviating most:  {words(far)}")
for number, chunk in enumerate(chunks, start=1):
    share = attention[chunk.start : chunk.end].sum() / attention[in_chunks].sum()
    print(f"chunk {number}: {share:>4.0%} of what it gives to chunks")

# %% [markdown]
# ## The recomputed tokens
# Both rules select the same number of tokens. (`ask` also corrects the KV of the tokens that it keeps, by the change of
# similar recomputed tokens.) Each dot is a token of a chunk that was stored alone. Tokens further to the right deviate
# more. The question attends more to tokens further up.

# %%
figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
axes.scatter(by_token.sqrt(), attention[reused].clamp_min(1e-7), s=6, color="#cccccc", label="kept as stored")
for way, marker, colour in (("cacheblend 5 %", "x", "C1"), ("ask 5 %", "+", "C0")):
    chosen = torch.isin(reused, ways[way].recomputed)
    x, y = by_token.sqrt()[chosen], attention[reused].clamp_min(1e-7)[chosen]
    axes.scatter(x, y, s=40, marker=marker, color=colour, label=f"recomputed by {way[:-4]}")
axes.set_yscale("log")
axes.set_xlabel("deviation of the stored values, all layers")
axes.set_ylabel("share of the question's attention")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(fontsize="small")
plt.show()

theirs, ours = (set(ways[way].recomputed.tolist()) for way in ("cacheblend 5 %", "ask 5 %"))
print(f"Recomputed: {len(theirs)} by cacheblend, {len(ours)} by ask, {len(theirs & ours)} by both")
print(f"ask's first ones:        {words(sorted(ours)[:14])}")
print(f"cacheblend's first ones: {words(sorted(theirs)[:14])}")

# %% [markdown]
# ## The remaining deviation by layer
# Left: the mean deviation of the chunk tokens that remains. Right: the same mean, weighted by the question's attention.
# Only the weighted deviation affects the answer.

# %%
weights = attention[reused] / attention[reused].sum()
figure, both = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharex=True)
for way, found in deviations.items():
    both[0].plot(found[:, reused].mean(1), label=way)
    both[1].plot(found[:, reused] @ weights, label=way)
for axes, title in zip(both, ("every token counts the same", "counted by the question's attention"), strict=True):
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("layer")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
both[0].set_ylabel("deviation of the values")
both[1].legend(fontsize="small")
plt.show()

# %% [markdown]
# ## The first token
# The result is the distribution of the first token of the answer.

# %%
want = ways["full"].logits.double().log_softmax(-1)


def kl(way):
    """Return KL(full || way) of the first token, in nats."""
    return float((want.exp() * (want - way.logits.double().log_softmax(-1))).sum().clamp_min(0))


top = want.topk(5).indices.tolist()
print(f"{'':<16}{'KL':>7}   " + "".join(f"{engine.renderer.plain_text([token])!r:>12}" for token in top))
for name, way in ways.items():
    shares = way.logits.double().softmax(-1)
    print(f"{name:<16}{kl(way):>7.4f}   " + "".join(f"{shares[token]:>12.1%}" for token in top))

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4)
curves = {
    rule: [kl(ways["reuse"]), *(kl(prefill("blend", rule, ratio)) for ratio in RATIOS), kl(prefill("blend", rule, 1.0))]
    for rule in ("ask", "cacheblend", "random")
}
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for rule, curve in curves.items():
    axes.plot(range(len(curve)), curve, marker="o", markersize=4, label=rule)
axes.set_xticks(range(len(RATIOS) + 2), [f"{ratio:.0%}" for ratio in (0, *RATIOS, 1)])
axes.set_xlabel("recompute ratio")
axes.set_ylabel("first-token KL, nats")
axes.set_ylim(bottom=0)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(fontsize="small")
plt.show()
print(f"Everything recomputed is full prefill: KL {curves['ask'][-1]:.1e}")

# %% [markdown]
# This is a single question; [notebook 04](04_quality_vs_ratio.ipynb) has 69. `ragblend explain "..."` shows your own
# prompts in this way, token by token.

# %%
engine.close()
