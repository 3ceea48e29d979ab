"""Prints a digest of each request's first logits, KV and counts as JSON. `compare_commits` runs it in each tree.

Arguments: a model, and a JSON file of prompts: [{"chunks", "question", "system"}].
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ragblend import Prompt, load_engine

RULES = ("ask", "cacheblend", "cacheblend_k", "random")
MODES = (("full", None), ("reuse", None), ("blend", 0.05), ("blend", 0.15))


def digest_request(engine: Any, prompt: Prompt, **options: Any) -> str:
    """Return the SHA-256 of a request's first logits, of the KV of its whole prompt, and of its report's counts."""
    prefilled = engine.prefill(engine.request(prompt, **options))
    digest = hashlib.sha256(_bytes(prefilled.logits))
    fused, report = prefilled.fused, prefilled.report
    for layer in range(fused.num_layers):
        digest.update(_bytes(fused.keys(layer)[:, : fused.length]))
        digest.update(_bytes(fused.values(layer)[:, : fused.length]))
    counts = (report.num_reused_tokens, report.num_recomputed_tokens, report.num_chunk_hits, report.charged_budget)
    digest.update(repr(counts).encode())
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def main(model: str, prompts: str) -> None:
    """Print {request: digest} of each prompt with each rule, and each mode and ratio."""
    torch.set_num_threads(1)
    digests = {}
    with load_engine(model, dtype="float32", on_miss="inline") as engine:
        for number, texts in enumerate(json.loads(Path(prompts).read_text(encoding="utf-8"))):
            prompt = Prompt(**texts)
            engine.generate(prompt, max_tokens=1)  # stores its chunks
            for rule, (mode, ratio) in product(RULES, MODES):
                options = {"mode": mode, "rule": rule, "recompute_ratio": ratio}
                digests[f"prompt {number}, {mode}, {rule}, {ratio}"] = digest_request(engine, prompt, **options)
    print(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
