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
# **The claim.** *Which* tokens are recomputed matters more than how many: rules that look at how far the stored KV
# deviates come back to full prefill at ratios where random tokens do not.
#
# **What this is not.** The model is the embedded one, of about a million parameters, and the text is a made-up world
# in which every question here needs two chunks together. That makes reuse fail on purpose. The curves show how
# the rules differ in kind; their figures do not transfer to large models.

# %%
import random
from collections import defaultdict
from math import sqrt
from statistics import fmean

import matplotlib.pyplot as plt
import torch

from ragblend import SegmentedPrompt, load_engine
from ragblend.demo.corpus import REFERENCE_KINDS, sample_corpus

NUM_QUESTIONS = 24
RULES = ("cacheblend", "cacheblend_gradual", "cacheblend_k", "first_k", "random")
RATIOS = (0.1, 0.15, 0.2, 0.3, 0.6)  # 0 and 1 are the same for every rule

corpus = sample_corpus()
questions = [item for item in corpus.questions if item.kind in REFERENCE_KINDS]
questions = [questions[i * len(questions) // NUM_QUESTIONS] for i in range(NUM_QUESTIONS)]
paragraphs = [text for record in corpus.records for text in record.chunks]
engine = load_engine("demo")  # its store is in memory
for text in paragraphs:
    engine.precompute(text)

# %% [markdown]
# ## The prompts
# Paragraphs come in pairs, and the second goes on about what the first named. A prompt is the pairs that hold the
# answer and two other pairs, in the corpus's order: six chunks or eight.

# %%
rng = random.Random(0)


def make_prompt(item):
    """The pairs of paragraphs with the answer and two others, in the corpus's order; then the question."""
    own = {chunk // 2 for chunk in corpus.gold_chunks(item)}
    others = [pair for pair in range(len(paragraphs) // 2) if pair not in own]
    pairs = sorted([*own, *rng.sample(others, 2)])
    chosen = [place for pair in pairs for place in (2 * pair, 2 * pair + 1)]
    return SegmentedPrompt([paragraphs[place] for place in chosen], item.text)


prompts = [make_prompt(item) for item in questions]
for chunk in prompts[0].chunks:
    print("-", " ".join(chunk.text.split()))
print(questions[0].text, "->", questions[0].answer)

# %% [markdown]
# ## The measurements
# *Exact match*: the whole answer is the gold answer. *KL*: how far the first answer token's distribution is from full
# prefill's, in nats; it sees differences that do not change the answer yet.


# %%
MAX_TOKENS = 8


def answer(prompt, mode, rule="auto", ratio=0.0):
    """Greedy answer, log-probabilities of its first token, and the report, from one prefill."""
    prefilled = engine.prefill(engine.request(prompt, mode=mode, rule=rule, recompute_ratio=ratio))
    ids, token = [], int(prefilled.logits.argmax())
    while token not in engine.stop_ids() and len(ids) < MAX_TOKENS:
        ids.append(token)
        token = int(engine.decode_step([token], prefilled.fused).argmax())
    return engine.segmenter.decode(ids), prefilled.logits.float().log_softmax(-1), prefilled.report


reference = [answer(prompt, "full") for prompt in prompts]


def measure(*setting):
    """Exact match, first-token KL and charged budget at 32 layers, means over the questions."""
    rows = defaultdict(list)
    for item, prompt, (_, full, _) in zip(questions, prompts, reference, strict=True):
        text, mine, report = answer(prompt, *setting)
        rows["exact_match"].append(text == item.answer)
        rows["kl"].append(float(torch.sum(full.exp() * (full - mine)).clamp_min(0)))
        rows["charged_budget_32"].append(report.charged_budget_32)
    return {name: fmean(values) for name, values in rows.items()}


full = fmean(text == item.answer for item, (text, _, _) in zip(questions, reference, strict=True))
none, all_tokens = measure("reuse"), measure("blend", "auto", 1.0)
curves = {rule: [none, *(measure("blend", rule, ratio) for ratio in RATIOS), all_tokens] for rule in RULES}
ratios = [0.0, *RATIOS, 1.0]

print(f"{len(questions)} questions. Full prefill answers {full:.0%}, full reuse {none['exact_match']:.0%}.")
print(f"At ratio 1.0 the KL to full prefill is {all_tokens['kl']:.1e}.\n")
print("exact match (first-token KL)")
print(f"{'rule':<20}" + "".join(f"{ratio:>14.0%}" for ratio in ratios))
for rule, curve in curves.items():
    print(f"{rule:<20}" + "".join(f"{point['exact_match']:>6.0%} ({point['kl']:>5.2f})" for point in curve))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
left.axhline(full, color="#7f7f7f", linestyle=":", label="full prefill")
styles = {"first_k": "--", "random": "--"}
for rule, curve in curves.items():
    options = {"marker": "o", "markersize": 4, "linestyle": styles.get(rule, "-"), "label": rule}
    left.plot(ratios, [point["exact_match"] for point in curve], **options)
    right.plot(ratios, [point["kl"] for point in curve], **options)
left.set_ylabel("share of questions answered right")
left.set_ylim(-0.03, 1.03)
right.set_ylabel("first-token KL to full prefill, nats")
right.set_ylim(bottom=0)
for axes in (left, right):
    axes.set_xlabel("recompute ratio")
    axes.axvline(0.15, color="#dddddd", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
left.legend(loc="lower right", fontsize="small")
figure.suptitle(f"embedded demo model, made-up world, {len(questions)} questions that need two chunks together")
plt.show()

# %% [markdown]
# ## Reading it

# %%
at = ratios.index(0.15)
ranked = sorted(RULES, key=lambda rule: curves[rule][at]["kl"])
noise = sqrt(0.25 / len(questions))
print(f"Nearest to full prefill at ratio 15 %, by KL: {', '.join(ranked)}.")
print(f"With {len(questions)} questions, exact match has a standard error of up to {noise:.0%}: read the KL first.")
print("Smallest ratio measured from which on at most one answer fewer than full prefill's is right:")
enough = full - 1.5 / len(questions)
for rule in ranked:
    short = max(place for place in range(-1, len(ratios)) if place < 0 or curves[rule][place]["exact_match"] < enough)
    print(f"  {rule:<20}" + (f"{ratios[short + 1]:>5.0%}" if short + 1 < len(ratios) else " none"))
print("The ratio is nominal. What 15 % costs in chunk work at 32 layers, finding the tokens included:")
for rule in ranked:
    print(f"  {rule:<20}{curves[rule][at]['charged_budget_32']:>5.0%}")

# %%
engine.close()
