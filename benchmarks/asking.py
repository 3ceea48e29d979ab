"""Who asks where the question stands before the chunks: what of a prompt is run ahead by rule `ask`, in four ways.

    make real-model
    python -m benchmarks.asking --model models/smollm2 --data musique --questions 14 --out data/results/asking.json

A question that stands before its chunks sees none of them, so its tokens have nothing to say about them. What follows
the last chunk does: the end of the turn and the head of the answer ("end"); its last token alone ("last"); everything
that is no chunk from the first one on, blank lines between chunks included ("behind"); or the question once more, run
ahead behind the prompt and in no KV of it ("again"). Prompts are those of `bench quality`, the question first. Of the
selection part, because it chooses (`ragblend.engine.fusion.plan.FusePlan.num_queries`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.selection_part import arguments, config_of, write
from ragblend.bench.quality import study as measured
from ragblend.bench.quality.cases import Case
from ragblend.engine.fusion import fuse
from ragblend.engine.fusion.attention import attend_weighing
from ragblend.engine.fusion.plan import FusePlan
from ragblend.engine.fusion.rules import RULES
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.prompt.prompt import Message, SegmentedPrompt

study: Any = measured  # whose names are replaced
WAYS = ("end", "last", "behind", "again")
_asked_again: list[Tensor] = []  # the ids of the question under way


def question_first(prompt: SegmentedPrompt) -> SegmentedPrompt:
    """`prompt` with its question before the chunks."""
    *before, asked = prompt.messages
    question = asked.parts[-1]
    assert isinstance(question, str)
    return SegmentedPrompt.from_messages([*before, Message("user", (question + "\n\n", *asked.parts[:-1]))])


@contextmanager
def ways() -> Iterator[None]:
    """Within, `RULES` has `ask` in each way, the question is known to the last of them, and prompts ask first."""
    probe, prompt_of = fuse._probe, study.prompt_of

    def ask(model: Any, plan: FusePlan, fused: Any, layers: Any, known: Any) -> Any:
        way, length = plan.rule.name.removeprefix("ask "), len(plan.token_ids)
        if way == "last":
            plan = replace(plan, question_start=length - 1)
        if way == "behind":
            first = plan.placements[0].start
            plan = replace(plan, question_start=length - int(fuse._fresh_rows(plan)[first:].sum()))
        if way != "again":
            return (yield from probe(model, plan, fused, layers, known))
        return (yield from _again(model, plan, fused, layers, known, _asked_again[-1]))

    def asking(case: Case, engine: TransformersEngine, *how: Any) -> SegmentedPrompt:
        _asked_again.append(torch.tensor(engine.segmenter.text_ids(case.question)))
        return question_first(prompt_of(case, engine, *how))

    names = {f"ask {way}": replace(RULES["ask"], name=f"ask {way}") for way in WAYS}
    RULES.update(names)
    fuse._probe, study.prompt_of = ask, asking
    try:
        yield
    finally:
        fuse._probe, study.prompt_of = probe, prompt_of
        for name in names:
            del RULES[name]


def _again(model: Any, plan: FusePlan, fused: Any, layers: Any, known: Any, question: Tensor) -> Any:
    """`fuse._probe` with `question` behind the prompt, which alone asks."""
    fresh, length = fuse._fresh_rows(plan).nonzero().flatten(), len(plan.token_ids)
    rows = torch.cat((fresh, torch.arange(length, length + len(question))))
    hidden = first = model.embed(torch.cat((plan.token_ids[fresh], question)))
    masses: list[Tensor] = []
    for layer in range(plan.probe_layers[-1] + 1):
        layers.wait(layer)

        def watch(queries: Any, keys: Tensor, values: Tensor, *, layer: int = layer) -> Tensor:
            known.queries[layer] = queries.last(len(question))
            output, mass = attend_weighing(queries, keys, values, len(question))
            masses.append(mass[:length])
            return output

        hidden = model.run_layer_ahead(layer, hidden, rows, fused, watch if layer in plan.probe_layers else None)
        if layer == 0:
            first = hidden[: len(fresh)]
        yield len(rows)
    known.attention = torch.stack(masses).mean(0)
    return fuse._Probe(len(rows), len(first), first, plan.probe_layers[-1], 0.0)


def main() -> None:
    """Measure, print, and write JSON."""
    given = arguments(__doc__).parse_args()
    with ways():
        config = config_of(given, (*(f"ask {way}" for way in WAYS), "cacheblend", "random"))
        result = study.run_quality(config, print)
    print("\n".join(study.table_lines(result)))
    write(given, result.as_dict())


if __name__ == "__main__":
    main()
