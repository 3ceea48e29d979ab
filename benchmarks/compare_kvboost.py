"""KVBoost on the prompts that ragblend was measured on (docs/compare.md). Runs in an environment of its own:

    python -m benchmarks.compare_peers --model models/smollm2 --prompts build/peers.json    # in ragblend's
    python3.11 -m venv build/kvboost
    build/kvboost/bin/pip install --constraint constraints.txt torch kvboost==0.9.0 xxhash
    build/kvboost/bin/python -m benchmarks.compare_kvboost --model models/smollm2 --prompts build/peers.json \
        --out data/results/compare-kvboost.json

Measured are KL(full || KVBoost) of the first token in nats, and the time to it as KVBoost's callback tells it, both
beside KVBoost's own baseline mode, which is plain transformers. In float32, as ragblend is measured. Two occasions:

- `moved`: the six documents were warmed one by one, then the prompt is asked.
- `again`: the same documents in the same order were asked about before, with another question: what it is made for.

and two ways to cut a prompt into chunks: `grid`, its own of 128 tokens, and `documents`, where it is told where each
document begins and ends, which it has no argument for, so that its splitting is replaced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any

import torch
from kvboost import GenerationMode, KVBoost
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragblend.bench.common.hardware import hardware_card


class Asked:
    """KVBoost's engine over one model, given token ids in place of text, so that both projects read the same."""

    def __init__(self, model: str, *, documents: bool) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.engine = KVBoost(loaded, tokenizer, max_cache_bytes=4 << 30, max_chunks=1024, device="cpu")
        self._ids: dict[str, list[int]] = {}
        self._cuts: dict[tuple[int, ...], list[tuple[int, int, list[int]]]] = {}
        self.engine._encode = self._ids.__getitem__
        if documents:
            own = self.engine._split_tokens
            self.engine._split_tokens = lambda ids, text="": self._cuts.get(tuple(ids)) or own(ids, text)

    def name(self, segments: Sequence[list[int]]) -> str:
        """What to call that prompt: the ids and the cuts between its parts are known by it."""
        ids = [token for segment in segments for token in segment]
        cuts, start = [], 0
        for segment in segments:
            cuts.append((start, start + len(segment), segment))
            start += len(segment)
        self._cuts[tuple(ids)] = cuts
        self._ids[name := f"prompt {len(self._ids)}"] = ids
        return name

    def warm(self, segment: list[int], position: int) -> None:
        """Store a document's chunks, as its README does before questions come."""
        self.engine.warm(self.name([segment]), position_offset=position)

    def ask(self, segments: Sequence[list[int]], mode: GenerationMode) -> tuple[torch.Tensor, float, float, float]:
        """Log-probabilities of the first token, seconds and processor seconds until it, share of the prompt reused."""
        first: list[tuple[float, float]] = []
        name = self.name(segments)
        start_s, start_cpu_s = perf_counter(), process_time()
        # Its own ttft_ms begins after the recomputation. This begins with the request.
        told = self.engine.generate(
            name, max_new_tokens=1, mode=mode, on_token=lambda _: first.append((perf_counter(), process_time()))
        )
        logits = torch.from_numpy(told.first_token_logits).double()
        return logits.log_softmax(-1), first[0][0] - start_s, first[0][1] - start_cpu_s, told.kv_reuse_ratio


@torch.inference_mode()
def measured(model: str, prompts: Sequence[dict[str, Any]], *, documents: bool) -> list[dict[str, Any]]:
    """A run per occasion."""
    asked = Asked(model, documents=documents)
    rows: dict[str, list[tuple[float, float, float, float, bool]]] = {"moved": [], "again": []}
    for number, prompt in enumerate(prompts):
        prefix, *chunks, suffix = prompt["segments"]
        other = prompts[number - 1]["segments"][-1]
        full, full_s, full_cpu_s, _ = asked.ask([prefix, *chunks, suffix], GenerationMode.BASELINE)
        for occasion, found in rows.items():
            asked.engine.reset_cache()
            if occasion == "moved":
                asked.warm(prefix, 0)
                for chunk in chunks:
                    asked.warm(chunk, len(prefix))
            else:
                asked.ask([prefix, *chunks, other], GenerationMode.CHUNK_KV_REUSE)
            mine, took_s, took_cpu_s, reused = asked.ask([prefix, *chunks, suffix], GenerationMode.CHUNK_KV_REUSE)
            far = float((full.exp() * (full - mine)).sum().clamp_min(0))
            found.append((far, full_s / took_s, full_cpu_s / took_cpu_s, reused, bool(full.argmax() == mine.argmax())))
    return [
        {
            "occasion": occasion,
            "chunks": "documents" if documents else "grid",
            "num_questions": len(found),
            "first_token_kl": mean(row[0] for row in found),
            "speedup": median(row[1] for row in found),
            "speedup_cpu": median(row[2] for row in found),
            "reused": mean(row[3] for row in found),
            "same_first_token": mean(row[4] for row in found),
        }
        for occasion, found in rows.items()
    ]


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="of benchmarks.compare_peers")
    parser.add_argument("--questions", type=int, help="the first ones only")
    parser.add_argument("--grid-questions", type=int, default=2, help="as many with its own grid")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    prompts = json.loads(given.prompts.read_text())["moved"][: given.questions]
    runs = measured(given.model, prompts, documents=True)
    runs += measured(given.model, prompts[: given.grid_questions], documents=False)
    for run in runs:
        print(
            f"{run['occasion']:<7}{run['chunks']:<11}{run['first_token_kl']:>8.3f} nats {run['speedup_cpu']:>6.2f}x "
            f"{run['reused']:>5.0%} reused"
        )
    card = {**hardware_card(), "kvboost": version("kvboost")}
    if given.out is not None:
        found = {"schema_version": 1, "command": "compare_kvboost", "hardware": card, "runs": runs}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
