"""Answers over stored chunks with and without drafts, as JSON. A separate process, because vLLM's drafts from
text load numba, after which no other engine of vLLM's can be made in the process.

    python drafted.py STORE SPECULATIVE_CONFIG
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import ask_all, engine, ingest, report, tokens
from transformers import AutoTokenizer

import ragblend
from ragblend.demo.corpus import sample_corpus

MODEL = Path(ragblend.__file__).parent / "demo" / "weights"
QUESTION = "Check the files: What role does James Bell have?"
RECORD = "security-review.md"
NUM_TOKENS = 60  # past the answer's end, where a small model says the same again: what a draft from the text foresees
WAYS: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "reuse"},
    {"mode": "blend", "ratio": 0.15, "rule": "cacheblend"},
    {"mode": "blend", "ratio": 0.3, "rule": "ask"},
    {"mode": "blend", "ratio": 1.0},
]


def main(store: str, drafts: dict[str, Any]) -> dict[str, Any]:
    """Per way of asking the answer's ids and the report; and how many steps the engine took for all together."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (record,) = [each for each in sample_corpus().records if each.filename == RECORD]
    prefix = tokenizer("<s>", add_special_tokens=False).input_ids
    chunks = [
        tokenizer(f"<doc> {' '.join(text.split())}", add_special_tokens=False).input_ids for text in record.chunks[:4]
    ]
    tail = tokenizer(f"<q> {QUESTION}<a>", add_special_tokens=False).input_ids
    options = {"speculative_config": drafts} if drafts else {}
    with engine(MODEL, Path(store), {"prefix_ids": prefix}, skip_tokenizer_init=True, **options) as llm:
        for chunk in chunks:
            ingest(llm, prefix, chunk)
        core, num_steps = llm.llm_engine.engine_core, 0
        step = core.get_output

        def counting() -> Any:
            nonlocal num_steps
            num_steps += 1
            return step()

        core.get_output = counting
        ids = [*prefix, *(token for chunk in chunks for token in chunk), *tail]
        outputs = ask_all(llm, [(ids, way) for way in WAYS], NUM_TOKENS, logprobs=None)
    return {
        "answers": [tokens(each) for each in outputs],
        "reports": [report(each) for each in outputs],
        "num_steps": num_steps,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
