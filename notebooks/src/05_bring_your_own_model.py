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
# # Bring your own model
#
# **You learn** how to use your own model, and how ragblend checks it. It takes less than a minute with the embedded
# model.
#
# Any standard decoder that transformers loads works without training or conversion (Llama, Mistral, Qwen2, Qwen3,
# Phi-3, Gemma, Granite, ...). With every token recomputed it gives full prefill's result.
#
# Name a Hugging Face id or a local directory, then run all cells:
#
# ```bash
# RAGBLEND_NOTEBOOK_MODEL=Qwen/Qwen3-0.6B jupyter lab notebooks/05_bring_your_own_model.ipynb
# ```
#
# Without the variable, or if the model cannot be loaded, the embedded one is used.
#
# It needs, in a checkout: `pip install -e . jupyterlab`.

# %%
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from ragblend import Prompt, load_engine
from ragblend.demo.corpus import sample_corpus
from ragblend.errors import RagblendError

workplace = TemporaryDirectory()
folder = Path(workplace.name)

wanted = os.environ.get("RAGBLEND_NOTEBOOK_MODEL", "").strip()
label = Path(wanted).name if Path(wanted).is_absolute() else wanted
engine = None
if not wanted:
    print("RAGBLEND_NOTEBOOK_MODEL is not set: showing the embedded model.")
else:
    try:
        engine = load_engine(wanted, store=folder / "kv")
        print(f"Loaded {label}.")
    except RagblendError as error:
        reason = str(error).replace(wanted, label)
        print(f"SKIPPED {label}, showing the embedded model instead.\nReason: {reason}")

own_model = engine is not None
if not own_model:
    engine, label = load_engine("demo", store=folder / "kv"), "the embedded model"
print(
    f"{label}: {engine.layers.num_layers} layers, {engine.context_length} tokens of context, "
    f"{engine.bytes_per_token / 1024:.0f} KiB of KV per chunk token"
)

# %% [markdown]
# Loading ends with a test: on a short prompt, blending at ratio 1.0 must give the logits of the unmodified model.
# Otherwise loading fails, and the error names the model. Models whose KV cannot be moved exactly, such as those with
# state-space layers, are rejected with the reason.
#
# ## Chunks and a question
# Some chunks refer to earlier ones, for example by "the keeper" or "the firm". The question to your model is about a
# short English story. The one to the embedded model is about its made-up world.

# %%
if own_model:
    chunks = [
        "The lighthouse on Gull Rock was built in 1872 of grey granite. Its lamp is lit by an oil burner.",
        "The harbour of Port Ellery is kept by Maren Holt. She records every storm in a green logbook.",
        "The lighthouse is kept by Tomas Reed. He was born on the island and studied optics in Aberdeen.",
        "The keeper described above also repairs clocks. The other one, who keeps the harbour, paints boats.",
    ]
    question, gold = "Who repairs clocks? Answer with the full name only.", "Tomas Reed"
else:
    corpus = sample_corpus()
    item = next(item for item in corpus.questions if item.kind == "cross_ref" and " born?" in item.text)
    own = next(record for record in corpus.records if record.filename == item.gold[0]["source"])
    other = next(record for record in corpus.records if record != own)
    chunks = [*other.chunks[:2], *own.chunks]
    question, gold = item.text, item.answer

for chunk in chunks:
    engine.precompute(chunk)
    print("-", " ".join(chunk.split()))
print(f"\n{question}   (gold: {gold})")

# %% [markdown]
# ## Four modes, and blend with everything recomputed

# %%
prompt = Prompt(chunks, question)
settings = [("full", None), ("prefix", None), ("reuse", None), ("blend", 0.15), ("blend", 0.3), ("blend", 1.0)]
print(f"{'mode':<8}{'ratio':>6}{'reused':>8}{'recomputed':>12}  answer")
for mode, ratio in settings:
    found = engine.generate(prompt, mode=mode, recompute_ratio=ratio, max_tokens=32)
    report = found.report
    print(
        f"{mode:<8}{ratio if ratio is not None else '':>6}{report.num_reused_tokens:>8}"
        f"{report.num_recomputed_tokens:>12}  {' '.join(found.text.split())}"
    )

# %% [markdown]
# ## Ratio 1.0 is full prefill
# The answer and even the logits are equal, except for rounding.

# %%
logits = {
    mode: engine.prefill(engine.request(prompt, mode=mode, recompute_ratio=1.0)).logits.float()
    for mode in ("full", "reuse", "blend")
}
for mode in ("reuse", "blend"):
    difference = (logits[mode] - logits["full"]).abs().max().item()
    name = "blend, ratio 1.0" if mode == "blend" else "reuse"
    print(f"{name:<18} largest difference to full prefill's logits: {difference:.1e}")

# %%
engine.close()
workplace.cleanup()

# %% [markdown]
# Next, run `ragblend ingest docs/ --model YOUR_MODEL`, and then
# `ragblend ask "..." --model YOUR_MODEL --show-sources`.
