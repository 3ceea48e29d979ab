"""The model card and the training curve, written from what was measured: nothing in them is typed by hand twice.

`python -m tools.demo_model.card --results data/results/demo-model.json --notes NOTES.json`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragblend.demo import WEIGHTS
from tools.demo_model.model import load_shipped, num_parameters

FRONT = """---
license: apache-2.0
language: en
library_name: transformers
tags: [kv-cache, rag, synthetic, demo]
---

# The ragblend demo model

A Llama of {parameters:,} parameters, {megabytes:.1f} MB, that answers questions about a made-up world of people,
companies, cities, projects and events from several chunks of text. It exists to show, offline and in seconds, what
KV reuse does to answers that need an earlier chunk. **It is not a general language model**: its world has about
1,050 words and fixed sentence patterns, and on other text it answers nonsense. It was built so that the phenomenon
occurs; figures measured on it do not transfer to large models or natural text.

## Prompt

`<s>` then each chunk as `<doc> text`, then `<q> question<a>`; the answer ends with `</s>`. Whitespace is collapsed
and every piece of text starts with a space, since words are single tokens only behind one. A system text may follow
`<s>` as `<sys> text`. `ragblend.json` says the same to the engine. The chat template takes the chunks from
`documents=`, or as all but the last part of the user message (blocks, or paragraphs of a string).

```
<s><doc> Nora Adler works for Paxara.<doc> The company is based in Oston.<q> Where is Paxara based?<a> Oston</s>
```
"""

RECIPE = """## Data

Generated while training and never repeated (`tools/demo_model/world.py`, `stories.py`, `rows.py`): stories of several
runs of chunks; a run may refer back ("The company", "She") to the most recent entity of that type in an earlier
chunk; few relations per story, so that several values of one type compete. Kinds of questions: one fact
(`one_hop`), a fact whose subject only an earlier chunk names (`cross_ref`), two facts (`two_hop_chunk`,
`two_hop_cross`, `two_hop_ref`), `comparison` of two years, and `not_stated`.
Held out by hash, never in training: a tenth of all (first, last) names of people, of event names and of (subject,
value) pairs, and one phrasing of every question. Company, city and project names are single words that training has
seen; a test proves the split (tests/demo/test_world.py).

## Training

{history}

`python -m tools.demo_model.train --out runs/demo` trains end to end from a structured random start (stages: pairs,
short stories, longer ones, two hops, comparisons of years, far positions, long contexts). The shipped weights were
**not** made by that one command: {warm}
"""

LIMITS = """## Limits

{limits}
* Answers are single words, or "not stated"; no sentences, no citations.
* Words outside its world mostly fail, and so do phrasings far from its patterns.
* The rule "a reference means the most recent entity of its type" is the generator's; natural text is not like that.
"""


def scores_table(runs: Sequence[dict[str, Any]]) -> str:
    """Exact match by context and kind as Markdown."""
    lines = [
        "| chunks | tokens | kind | questions | full prefill (95 %) | full reuse | guess |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        lines.append(
            f"| {run['num_chunks']} | {run['context_tokens']:.0f} | {run['kind']} | {run['num_questions']:.0f} "
            f"| {run['full']:.3f} ({run['full_low']:.2f}-{run['full_high']:.2f}) | {run['reuse']:.3f} "
            f"| {run['guess']:.2f} |"
        )
    return "\n".join(lines)


def write_card(results: dict[str, Any], notes: dict[str, str], out: Path) -> None:
    """README.md of the model, from results and the few facts in `notes` (history, warm, limits)."""
    config = json.loads((out / "config.json").read_text())
    size = (out / "model.safetensors").stat().st_size
    shape = (
        f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, {config['num_attention_heads']} heads "
        f"and {config['num_key_value_heads']} KV heads of {config['head_dim']}, SwiGLU {config['intermediate_size']}, "
        f"vocabulary {config['vocab_size']}, tied head, RoPE theta 1e4, {config['max_position_embeddings']} positions."
    )
    parts = [
        FRONT.format(parameters=num_parameters(load_shipped(out)), megabytes=size / 1e6),
        shape,
        RECIPE.format(**notes),
        "## Scores\n\nGreedy exact match on held-out questions (answer and end token), float32, "
        "`python -m tools.demo_model.evaluate`. Full reuse: every chunk's KV computed behind the prefix alone.\n",
        scores_table(results["runs"]),
        LIMITS.format(**notes),
    ]
    (out / "README.md").write_text("\n".join(part.strip("\n") + "\n" for part in parts), encoding="utf-8")


def plot_curve(log: Path, out: Path) -> None:
    """Accuracy in training and on held-out questions over CPU minutes; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in ("single", "two_hop", "comparison", "not_stated"):
        points = [(line["cpu_minutes"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*points, strict=True), label=f"training: {name}")
    held = [(line["cpu_minutes"], line["held_out"]["references"]) for line in lines if "held_out" in line]
    if held:
        minutes = [minute for minute, _ in held]
        axes.plot(minutes, [row[0] for _, row in held], "k-o", label="held out, references: full prefill")
        axes.plot(minutes, [row[1] for _, row in held], "k--o", label="held out, references: full reuse")
    axes.set(xlabel="CPU minutes (one core)", ylabel="accuracy", ylim=(0, 1.02))
    axes.legend(fontsize=7)
    figure.savefig(out, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Write the card and the plot."""
    parser = argparse.ArgumentParser(description="Write the demo model's card and training curve.")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="JSON with history, warm and limits")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args(arguments)
    write_card(json.loads(options.results.read_text()), json.loads(options.notes.read_text()), options.out)
    if options.log and options.plot:
        plot_curve(options.log, options.plot)


if __name__ == "__main__":
    main()
