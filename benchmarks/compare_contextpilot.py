"""ContextPilot on topics that are asked about again and again (docs/compare.md). In an environment of its own:

    python -m benchmarks.compare_peers --model models/smollm2 --prompts build/peers.json    # in ragblend's
    python3.11 -m venv build/contextpilot
    build/contextpilot/bin/pip install --constraint constraints.txt torch contextpilot==0.5.0 xxhash
    build/contextpilot/bin/python -m benchmarks.compare_contextpilot --model models/smollm2 \
        --prompts build/peers.json --out data/results/compare-contextpilot.json

(Not in ragblend's own: its wheel has a hook that loads into every Python process of the environment, for vLLM's sake.)

ContextPilot computes no KV: it sorts documents so that prompts begin alike, for a prefix cache behind it. Here that is
the plainest one there can be: transformers, every earlier prompt's KV kept, the longest common beginning taken over.
Its messages are rendered by the model's chat template, in three ways: `retrieved`, as they are without it; `online`,
each request sorted when it comes (`optimize`); `offline`, all requests known beforehand (`optimize_batch`), and made in
the order that it chooses. KL is KL(retrieved in full || this in full) of the first token: what another order and the
ranking in words change in the answer; the prefix cache changes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import contextpilot
import torch
from contextpilot.api import _build_system_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from ragblend.bench.common.hardware import hardware_card

Messages = list[dict[str, str]]


class PrefixCache:
    """Full prefill that takes the longest beginning it has seen before from the prompt that had it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._seen: list[tuple[list[int], DynamicCache]] = []

    def prefill(self, ids: list[int]) -> tuple[torch.Tensor, int, float]:
        """Log-probabilities of the first token, tokens taken over, and the processor seconds it took."""
        start_s = process_time()
        shared, source = max(((common(ids, known), cache) for known, cache in self._seen), default=(0, None), key=first)
        shared = min(shared, len(ids) - 1)
        cache = DynamicCache()
        for index, layer in enumerate(source.layers if source is not None and shared else ()):
            cache.update(layer.keys[:, :, :shared].clone(), layer.values[:, :, :shared].clone(), index)
        out = self._model(torch.tensor([ids[shared:]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        took_s = process_time() - start_s
        self._seen.append((ids, out.past_key_values))
        return out.logits[0, -1].double().log_softmax(-1), shared, took_s


def first(pair: tuple[int, Any]) -> int:
    """What pairs are compared by."""
    return pair[0]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of their common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def ways(requests: Sequence[dict[str, Any]], system: str, words: int | None) -> dict[str, list[tuple[int, Messages]]]:
    """In each way the requests in the order they are made, as messages, with their number."""
    texts = [[" ".join(text.split()[:words]) for text in each["texts"]] for each in requests]
    questions = [each["question"] for each in requests]

    def unsorted(number: int) -> Messages:
        said = _build_system_prompt(texts[number], texts[number], system)
        return [{"role": "system", "content": said}, {"role": "user", "content": questions[number]}]

    with contextlib.redirect_stdout(io.StringIO()):  # it tells its progress
        pilot = contextpilot.ContextPilot(use_gpu=False)
        online = [
            (number, pilot.optimize(docs, questions[number], system_instruction=system))
            for number, docs in enumerate(texts)
        ]
        batch, order = contextpilot.ContextPilot(use_gpu=False).optimize_batch(
            texts, questions, system_instruction=system
        )
    return {
        "retrieved": [(number, unsorted(number)) for number in range(len(requests))],
        "online": online,
        "offline": list(zip(order, batch, strict=True)),
    }


@torch.inference_mode()
def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="of benchmarks.compare_peers")
    parser.add_argument("--words", type=int, help="of each document; all of them by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kept = json.loads(given.prompts.read_text())
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    model(torch.tensor([[1] * 64]))  # warms up
    runs: list[dict[str, Any]] = []
    wanted: dict[int, torch.Tensor] = {}
    full_s = 0.0
    for way, asked in ways(kept["topics"], kept["system"], given.words).items():
        cache, far, shares, same, took_s, lengths = PrefixCache(model), [], [], [], 0.0, []
        for number, messages in asked:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            mine, shared, seconds = cache.prefill(list(ids))
            if way == "retrieved":
                wanted[number] = mine
                full_s += PrefixCache(model).prefill(list(ids))[2]
            far.append(float((wanted[number].exp() * (wanted[number] - mine)).sum().clamp_min(0)))
            same.append(bool(wanted[number].argmax() == mine.argmax()))
            shares.append(shared / len(ids))
            took_s += seconds
            lengths.append(len(ids))
        runs.append(
            {
                "way": way,
                "num_requests": len(asked),
                "prompt_tokens": mean(lengths),
                "num_topics": len({each["topic"] for each in kept["topics"]}),
                "first_token_kl": mean(far),
                "same_first_token": mean(same),
                "prefix_share": mean(shares),
                "speedup_cpu": full_s / took_s,  # of the requests together, over full prefill of `retrieved`
            }
        )
        print(f"{way:<11}{mean(far):>7.3f} nats  {mean(shares):>5.0%} from the prefix  {full_s / took_s:>5.2f}x")
    card = {**hardware_card(), "contextpilot": version("contextpilot")}
    if given.out is not None:
        found = {"schema_version": 1, "command": "compare_contextpilot", "hardware": card, "runs": runs}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
