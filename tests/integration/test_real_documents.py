"""Real input: MuSiQue passages (CC BY 4.0), ingested and asked.

The model cannot answer these questions; what is checked is that every chunk is a hit and that recomputing everything
gives the text of full prefill.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ragblend import Prompt, load_engine
from ragblend.engine.transformers.checkpoints import find_model
from ragblend.precompute import ingest, open_engine_index

MUSIQUE = Path(__file__).parents[2] / "data" / "questions" / "musique_100.json"
CASES = json.loads(MUSIQUE.read_text())[:4]  # of 100; ten passages each


def test_every_chunk_hits_and_ratio_one_equals_full_prefill(tmp_path):
    """Random weights, 16,384 tokens of context, chunks of up to 512 tokens."""
    demo = find_model("demo")
    config = LlamaConfig.from_pretrained(demo, max_position_embeddings=16_384, num_hidden_layers=3, dtype="float32")
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).write_bytes((demo / name).read_bytes())
    with load_engine(str(tmp_path / "model"), tmp_path / "kv") as engine:
        (tmp_path / "musique.json").write_text(json.dumps(CASES))
        report = ingest(tmp_path / "musique.json", engine, tmp_path / "index", chunk_size=512, embedder="hashing")
        assert report.num_documents == 10 * len(CASES)
        with open_engine_index(tmp_path / "index", engine, "hashing", create=False) as index:
            assert report.num_new_kv == len({chunk.text for chunk in index.chunks()})
            for question in (case["question"] for case in CASES):
                prompt = Prompt([hit.chunk for hit in index.search(question, 6)], question)
                full = engine.generate(prompt, mode="full", max_tokens=12)
                assert full.token_ids
                for mode, ratio in (("prefix", None), ("reuse", None), ("blend", 0.15), ("blend", 1.0)):
                    answer = engine.generate(prompt, mode=mode, recompute_ratio=ratio, max_tokens=12)
                    if mode != "prefix":
                        assert answer.report.num_chunk_hits == answer.report.num_chunks == 6
                    if mode == "prefix" or ratio == 1.0:
                        assert (answer.token_ids, answer.text) == (full.token_ids, full.text)
