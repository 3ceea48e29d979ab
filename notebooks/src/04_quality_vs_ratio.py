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
# # How much must be recomputed, and which tokens?
#
# **You learn** how close an answer is to full prefill's by rule and by recompute ratio, and how to measure it. It takes
# about two minutes on two CPU cores.
#
# *Which* tokens are recomputed matters more than how many. A rule that probes the question first is close to full
# prefill with 5 % of the tokens; the same number of random tokens changes little.
#
# The model is SmolLM2-135M-Instruct, which `make real-model` prepares. The questions are from MuSiQue, and need several
# passages of Wikipedia each. They are in `data/questions/`.
#
# It needs, in a checkout: `pip install -e '.[plot]' jupyterlab`.

# %%
import json
import os
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

import ragblend
from ragblend import Prompt, load_engine

model = os.environ.get("RAGBLEND_REAL_MODEL", "../models/smollm2")
data = Path(ragblend.__file__).parents[1] / "data"
SYSTEM = "You will read several passages and then answer a question about them. Answer with a few words only."

engine = load_engine(model, system=SYSTEM, context="none")  # its store is in memory
print(f"{engine.layers.num_layers} layers, {engine.bytes_per_token / 1024:.0f} KiB of KV per chunk token")

# %% [markdown]
# ## Three questions, measured here
# Each question has six passages, cut to their first 90 words. Every passage is prefilled once, alone.

# %%
cases = json.loads((data / "questions" / "musique_100.json").read_text())[:3]
prompts = []
for case in cases:
    chunks = [" ".join(passage["text"].split()[:90]) for passage in case["ctxs"][:6]]
    for chunk in chunks:
        engine.precompute(chunk)
    prompts.append(Prompt(chunks, case["question"], SYSTEM))
    print(f"{engine.match(prompts[-1]).num_tokens} tokens: {case['question']}")

# %% [markdown]
# *KL* is the divergence of the first answer token's distribution from full prefill's, in nats. It also measures
# differences that do not change the answer.

# %%
RULES = ("ask", "cacheblend", "random")
RATIOS = (0.02, 0.05, 0.15, 0.3)  # 0 and 1 are the same for every rule


def log_probs(prompt, mode, rule="auto", ratio=0.0):
    """Return the log-probabilities of the first token of the answer."""
    prefilled = engine.prefill(engine.request(prompt, mode=mode, rule=rule, recompute_ratio=ratio))
    return prefilled.logits.double().log_softmax(-1)


full = [log_probs(prompt, "full") for prompt in prompts]


def kl(*setting):
    """Return the mean KL(full || setting) of the first token."""
    pairs = [(want, log_probs(prompt, *setting)) for prompt, want in zip(prompts, full, strict=True)]
    return fmean(float((want.exp() * (want - got)).sum().clamp_min(0)) for want, got in pairs)


none, every = kl("reuse"), kl("blend", "ask", 1.0)
curves = {rule: [none, *(kl("blend", rule, ratio) for ratio in RATIOS), every] for rule in RULES}
print(f"Everything recomputed: KL {every:.1e}. Nothing recomputed: {none:.3f}.\n")
print(f"{'rule':<12}" + "".join(f"{ratio:>8.0%}" for ratio in (0, *RATIOS, 1)))
for rule, curve in curves.items():
    print(f"{rule:<12}" + "".join(f"{value:>8.3f}" for value in curve))

# %% [markdown]
# Three questions only show the method.
#
# ## 69 questions, measured before
# `ragblend bench quality` measures in this way, with six retrieved chunks of at most 256 tokens. Its results are in
# `data/results/`. *Compute* is the whole work of a rule, including the selection of tokens, as a share of prefilling
# the chunks in a model of 32 layers. Chunks were stored alone. F1 is low in every row, even with full prefill, because
# the questions are too hard for a model of this size. The closeness to full prefill can still be measured.

# %%
kept = json.loads((data / "results" / "quality-musique.json").read_text())
runs = [run for run in kept["runs"] if run["kind"] == "all" and run["mode"] != "full"]
lines = {}
for run in runs:
    for rule in kept["config"]["rules"] if run["mode"] == "reuse" else [run["rule"]]:
        lines.setdefault(rule, []).append(run)

print(f"{kept['num_questions']} questions, {kept['prompt_tokens']:.0f} tokens each")
print(f"{'rule':<14}{'ratio':>6}{'compute':>9}{'first-token KL':>16}{'95 % interval':>17}{'F1':>7}")
for rule, points in lines.items():
    for run in points:
        if run["mode"] == "blend" or rule == "ask":
            print(
                f"{rule if run['mode'] == 'blend' else '(full reuse)':<14}{run['ratio']:>6.0%}"
                f"{run['charged_budget_32']:>9.1%}{run['first_token_kl']:>16.3f}"
                f"{run['first_token_kl_low']:>9.3f} to {run['first_token_kl_high']:.3f}{run['token_f1']:>7.3f}"
            )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for rule, curve in curves.items():
    left.plot([0, *RATIOS, 1], curve, marker="o", markersize=4, label=rule)
left.set_xscale("symlog", linthresh=0.05)
left.set_xticks([0, *RATIOS, 1], [f"{ratio:.0%}" for ratio in (0, *RATIOS, 1)])
left.set_title("3 questions, measured here", fontsize="medium")
left.set_xlabel("recompute ratio")
left.set_ylabel("first-token KL to full prefill, nats")
for rule, points in lines.items():
    spread = [[run["first_token_kl"] - run["first_token_kl_low"] for run in points]]
    spread.append([run["first_token_kl_high"] - run["first_token_kl"] for run in points])
    x = [run["charged_budget_32"] for run in points]
    right.errorbar(x, [run["first_token_kl"] for run in points], spread, capsize=3, label=rule)
right.set_title("69 questions, 95 % intervals", fontsize="medium")
right.set_xlabel("compute, finding the tokens included")
right.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
for axes in (left, right):
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small")
plt.show()

# %% [markdown]
# ## Interpretation
# Random tokens are the control: they show the gain of recomputing any tokens. CacheBlend's rule selects tokens whose KV
# deviates in one early layer. `ask`, the default from 12 layers on, first runs the question over the stored KV, and
# selects the tokens that it attends to. [Layer by layer](06_layer_by_layer.ipynb) shows the difference.
#
# To measure your own model, run `ragblend bench quality --model YOUR_MODEL --data YOUR_QUESTIONS.json`.
# `ragblend calibrate` finds the ratio for a model and saves it in the store.

# %%
engine.close()
