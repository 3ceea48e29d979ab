"""Answers of a multimodal model and of its decoder alone, as JSON.

    python pictured.py FOLDER gemma3|qwen3

A separate process, because torchvision, which image processors import, is a build for CUDA: with a torch for CPUs its
operators are missing, and importing it fails unless they are declared. No image processor calls them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

_declared = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from harness import (  # noqa: E402
    PREFIX,
    SIZES,
    ask_all,
    connector_scheduler,
    engine,
    greedy,
    ingest,
    random_ids,
    report,
    tokens,
    watch_counts,
)
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_models import FAMILIES, make_model, make_multimodal_gemma3, make_multimodal_qwen3  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

CHUNKS = [[token + 10 if token < 16 else token for token in random_ids(count, count)] for count in (61, 40)]
QUESTION = [200, 201, 202, 203, 204, 205]
TEXT = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]
WAYS: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "reuse"},
    {"mode": "blend", "rule": "cacheblend", "ratio": 0.3},
    {"mode": "blend", "rule": "ask", "ratio": 0.3},
    {"mode": "blend", "rule": "cacheblend", "ratio": 1.0},
]
# vLLM's class for Gemma 3 looks line breaks up in the vocabulary.
GEMMA = ("<boi>", "<eoi>", "<image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n")
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def make_tokenizer(specials: tuple[str, ...], **named: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose ids from 6 on are `specials`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    control = ["<pad>", "<s>", "</s>", "<doc>", "<q>", "<a>", *specials]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=control, initial_alphabet=alphabet))
    usual = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **usual, **named)


def save(kind: str, path: Path) -> list[int]:
    """Save the multimodal model in `path`/seeing and its decoder in `path`/text. Return the ids of an image's place."""
    text = make_model(FAMILIES[kind][0], **{**SIZES, **FAMILIES[kind][1]})
    if kind == "gemma3":
        from transformers import Gemma3ImageProcessor, Gemma3Processor

        names = dict(zip(("boi_token", "eoi_token", "image_token"), GEMMA, strict=False))
        tokenizer = make_tokenizer(GEMMA, extra_special_tokens=names)
        images = Gemma3ImageProcessor(size={"height": 28, "width": 28})
        processor, model, place = (
            Gemma3Processor(images, tokenizer, image_seq_length=4),
            make_multimodal_gemma3(**SIZES),
            [6],
        )
    else:
        from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

        tokenizer = make_tokenizer(QWEN)
        images = Qwen2VLImageProcessor(patch_size=8, size={"shortest_edge": 256, "longest_edge": 1024})
        processor = Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(patch_size=8))
        model, place = make_multimodal_qwen3(**SIZES), [6, 8, 7]
    for name, saved in (("seeing", model), ("text", text)):
        saved.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    processor.save_pretrained(path / "seeing")
    if kind == "gemma3":  # published checkpoints, which vLLM reads, have one more name before the tower's
        file = path / "seeing" / "model.safetensors"
        named = {
            name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in load_file(file).items()
        }
        save_file(named, file, {"format": "pt"})
    return place


def first_scores(output: Any) -> dict[int, float]:
    """The log-probabilities of the most probable first tokens of an answer."""
    return {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}


def main(path: Path, kind: str) -> dict[str, Any]:
    registry._run_in_subprocess = lambda look: look()  # as in conftest.py
    place = save(kind, path)
    picture = Image.frombytes("RGB", (32, 32), bytes(range(256)) * 12)
    prompts: list[Any] = [
        {"prompt_token_ids": [*TEXT[:-6], *place, *QUESTION], "multi_modal_data": {"image": picture}},
        {"prompt_embeds": torch.randn(40, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))},
    ]
    options: dict[str, Any] = {"enable_prompt_embeds": True, "limit_mm_per_prompt": {"image": 1}}
    if kind != "gemma3":
        options["limit_mm_per_prompt"]["video"] = 0
    plain = [greedy(None, 8)] * len(prompts)
    found: dict[str, Any] = {}
    with engine(path / "seeing", None, **options) as llm:
        found["plain"] = [
            tokens(each) for each in llm.generate([{"prompt_token_ids": TEXT}, *prompts], greedy(None, 8))
        ]
    with engine(path / "text", path / "kv of the decoder") as llm:
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
        found["decoder"] = [first_scores(each) for each in ask_all(llm, [(TEXT, way) for way in WAYS])]
    with engine(path / "seeing", path / "kv", {"mode": "blend"}, **options) as llm:
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
        counts = watch_counts(connector_scheduler(llm.llm_engine))
        llm.reset_prefix_cache()
        together = [*({"prompt_token_ids": TEXT} for _ in WAYS), *prompts]
        outputs = llm.generate(together, [*(greedy(way, 8, logprobs=20) for way in WAYS), *plain])
        asked = llm.generate(prompts, [greedy(WAYS[2], 8)] * len(prompts))
    found["served"] = [tokens(each) for each in outputs]
    found["scores"] = [first_scores(each) for each in outputs[: len(WAYS)]]
    found["reports"] = [report(each) for each in outputs[: len(WAYS)]]
    found["left"] = [each.kv_transfer_params for each in outputs[len(WAYS) :]]
    found["asked"] = [(tokens(each), report(each)) for each in asked]
    found["counts"] = {name: count for name, count in counts.data.items() if name.startswith("left_requests")}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
