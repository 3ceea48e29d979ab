"""Write a trained model the way users load it: safetensors, tokenizer, chat template, prompt format and model card.

`python -m tools.demo_model.export --checkpoint runs/demo/checkpoint.pt --out ragblend/demo/weights`
"""

from __future__ import annotations

import argparse
import json
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ragblend.demo import WEIGHTS
from ragblend.engine.hf.model import CHECKSUMS
from tools.demo_model.model import DemoModel, ModelConfig, to_hugging_face
from tools.demo_model.tokenizer import (
    ANSWER,
    BOS,
    DOC,
    EOS,
    PAD,
    QUESTION,
    SYSTEM,
    build_tokenizer,
    save_tokenizer,
    token_id,
)

PROMPT_FORMAT = {
    "prefix": BOS,
    "system": SYSTEM + "{system}",
    "chunk_prefix": DOC,
    "text_lead": " ",
    "question_prefix": QUESTION,
    "answer_prefix": ANSWER,
    "assistant_end": EOS,
    "collapse_whitespace": True,
}
"""`ragblend.json`: how a prompt is written. Every word is one token only behind a space, hence `text_lead`."""


def export(model: DemoModel, out: Path) -> None:
    """Write every file of the model to `out` in bfloat16; each file replaces its older self in one move."""
    tokenizer = build_tokenizer()
    pad, bos, eos = (token_id(tokenizer, token) for token in (PAD, BOS, EOS))
    shipped: Any = to_hugging_face(model, pad, bos, eos).to(torch.bfloat16)
    shipped.generation_config.update(do_sample=False, eos_token_id=eos, pad_token_id=pad, bos_token_id=bos)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        fresh = Path(name)
        shipped.save_pretrained(fresh)
        save_tokenizer(fresh, max_length=model.config.max_positions)
        (fresh / "ragblend.json").write_text(json.dumps(PROMPT_FORMAT, indent=2) + "\n")
        digests = {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(fresh.iterdir())}
        (fresh / CHECKSUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
        for file in sorted(fresh.iterdir()):
            file.chmod(0o644)
            file.replace(out / file.name)


def load_checkpoint(path: Path) -> DemoModel:
    """The model of a training checkpoint."""
    state = torch.load(path, weights_only=False)
    model = DemoModel(ModelConfig(**state["config"]))
    model.load_state_dict(state["model"])
    return model.eval()


def main(arguments: list[str] | None = None) -> None:
    """Export a checkpoint."""
    parser = argparse.ArgumentParser(description="Write a training checkpoint as a loadable model.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args(arguments)
    export(load_checkpoint(options.checkpoint), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
