"""Do easy prompts need less? Recompute ratios that follow the prompt, against one ratio for all at the same mean cost.

    make real-model
    python -m benchmarks.adaptive --model models/smollm2 --data musique --contexts similar \\
        --out data/results/adaptive-musique.json

Each question is blended by rule `ask` at every ratio of a grid. Four ways to choose among these, each with one number
that sets how much is spent:

- `fixed`: the same ratio for all, on straight lines between those of the grid;
- `mass`: the least ratio at which no more than that share of the question's attention stays on stale tokens;
- `still`: the least ratio at which the first token's distribution has moved no more than that since the ratio before
  (what a mode that recomputes more only while the answer moves would do; its extra passes of the question are not
  charged);
- `oracle`: what no engine can know, the ratios that make the sum of the first tokens' KL smallest for that many tokens.

And how far what an engine could tell of one answer (how its first token moved, what stays stale) goes with its true KL.

Of the selection part, because it chooses. Read `choices` first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.selection_part import arguments, config_of, write
from ragblend.bench.common.configs import QualityConfig
from ragblend.bench.common.hardware import hardware_card
from ragblend.bench.common.shapes import find_dtype
from ragblend.bench.quality import study
from ragblend.bench.quality.data import Nearest, load_cases, prompt_of, stored_chunks
from ragblend.bench.quality.measures import FULL, REUSE, Configuration, answer, answer_and_reading, distance, kl, read
from ragblend.corpus.embedders import default_embedder
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.load import load_engine
from ragblend.engine.store.kv import dtype_name

GRID = (0.0, 0.0125, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
SPENT = (0.025, 0.05, 0.1, 0.15)  # mean ratios at which the ways are compared
WAYS = ("fixed", "mass", "still", "oracle")


class Seen(NamedTuple):
    """One question at every ratio of the grid; each [ratios]."""

    first_token_kl: list[float]  # KL(full || this), nats
    answer_kl: list[float]  # the same, mean over full prefill's answer
    stale: list[float]  # share of the question's attention on stale tokens that are kept
    moved: list[float]  # KL(this || one ratio less) of the first token, nats; the first: infinite


def watch(config: QualityConfig, progress: Callable[[str], None]) -> Iterator[Seen]:
    """Every question of `config`, in its one context."""
    (context,) = config.contexts
    dtype = dtype_name(find_dtype(config.dtype))
    with load_engine(config.model, dtype=dtype, device=config.device, on_miss="inline") as base, torch.inference_mode():
        assert isinstance(base, TransformersEngine)
        embedder = default_embedder()
        cases = load_cases(config, base)
        near = Nearest(cases, base, embedder, config) if context == "similar" else None
        for number, case in enumerate(cases, start=1):
            progress(f"question {number} of {len(cases)}")
            engine = study.engine_for(base, case, context)
            prompt = prompt_of(case, engine, embedder, config)
            request = engine.request(prompt, mode="full", max_tokens=config.answer_tokens)
            full = answer(engine, request, FULL)
            expected = read(engine, request.prompt, full.fused, full.token_ids)
            for chunk in stored_chunks(prompt, context, near):
                engine.precompute(chunk)
            found = Seen([], [], [], [])
            before = None
            for ratio in GRID:
                asked = Configuration("blend", "ask", ratio) if ratio else REUSE
                mine, reading = answer_and_reading(engine, request, asked, full)
                found.first_token_kl.append(kl(full.log_probs, mine.log_probs))
                found.answer_kl.append(distance(reading, expected).kl)
                stale = mine.report.attention_stale
                found.stale.append(1.0 if stale is None else stale)
                found.moved.append(np.inf if before is None else kl(mine.log_probs, before))
                before = mine.log_probs
            gc.collect()  # as in the study
            yield found


def choices(way: str, spent: float, seen: Sequence[Seen]) -> NDArray[np.float64]:
    """[Q, ratios]: how much of each ratio of the grid a question gets, 1 in sum, `spent` of the tokens in the mean.

    Two neighbouring settings of the way's number are mixed so that the mean is met.

    >>> easy, hard = Seen([0.0] * 9, [], [0.0] * 9, []), Seen([1.0] * 8 + [0.0], [], [1.0] * 8 + [0.0], [])
    >>> [int(row.argmax()) for row in choices("mass", 0.15, [easy, hard])]
    [0, 8]
    """
    last = len(GRID) - 1
    if way == "fixed":
        settings = [np.full(len(seen), place) for place in range(last + 1)]
    elif way == "oracle":
        kls = np.array([each.first_token_kl for each in seen])  # [Q, ratios]
        prices = np.geomspace(1e-4, 1e4, 2000)  # nats for all of a prompt's tokens
        settings = [(kls + price * np.array(GRID)).argmin(1) for price in prices[::-1]]
    else:
        facts = np.array([getattr(each, "stale" if way == "mass" else "moved") for each in seen])  # [Q, ratios]
        limits = [np.inf, *np.sort(facts[np.isfinite(facts)])[::-1], -1.0]
        enough = [facts <= limit for limit in limits]
        settings = [np.where(each.any(1), each.argmax(1), last) for each in enough]
    means = np.array([np.array(GRID)[each].mean() for each in settings])
    above = int((means >= spent - 1e-12).argmax())
    below = max(0, above - 1)
    width = means[above] - means[below]
    share = (spent - means[below]) / width if width > 0 else 1.0
    mixed = np.zeros((len(seen), last + 1))
    rows = np.arange(len(seen))
    mixed[rows, settings[below]] += 1 - share
    mixed[rows, settings[above]] += share
    return mixed


def compare(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """A record per way and mean ratio: mean KL of the first token and over the answer."""
    first, whole = (np.array([getattr(each, name) for each in seen]) for name in ("first_token_kl", "answer_kl"))
    records = []
    for spent in SPENT:
        for way in WAYS:
            mixed = choices(way, spent, seen)
            facts = {"first_token_kl": (mixed * first).sum(1).mean(), "answer_kl": (mixed * whole).sum(1).mean()}
            records.append({"way": way, "mean_ratio": spent, **{name: float(value) for name, value in facts.items()}})
    return records


def tells(seen: Sequence[Seen]) -> list[dict[str, float]]:
    """Per ratio above 0, how far what an engine sees goes with the KL that it does not: Spearman's rank correlation."""
    records = []
    for place, ratio in enumerate(GRID[1:], start=1):
        kls, moved, stale = (
            [getattr(each, name)[place] for each in seen] for name in ("first_token_kl", "moved", "stale")
        )
        told = (float(spearmanr(found, kls).statistic) for found in (moved, stale))
        records.append({"ratio": ratio, **dict(zip(("moved", "stale"), told, strict=True))})
    return records


def main() -> None:
    """Measure, print, and write JSON."""
    parser = arguments(__doc__)
    parser.set_defaults(contexts=["similar"])
    given = parser.parse_args()
    config = config_of(given, ("ask",))
    seen = list(watch(config, print))
    runs, told = compare(seen), tells(seen)
    for run in runs:
        print(f"{run['mean_ratio']:.1%} {run['way']:<8}{run['first_token_kl']:8.4f}{run['answer_kl']:8.4f}")
    print("rank correlation with the first token's KL, of what it moved by and of stale attention:")
    for each in told:
        print(f"{each['ratio']:.1%} {each['moved']:8.2f}{each['stale']:8.2f}")
    facts = {"config": config.as_dict(), "hardware": hardware_card(torch.device("cpu")), "grid": GRID, "runs": runs}
    facts["tells"] = told
    facts["questions"] = [{**each._asdict(), "moved": [None, *each.moved[1:]]} for each in seen]
    write(given, facts)


if __name__ == "__main__":
    main()
