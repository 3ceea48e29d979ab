"""A GGUF loaded by its file name: what it answers, by which names it is found, and what is refused."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from tiny_models import CHATML
from tiny_prompts import CHUNKS, PROMPT
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from ragblend.cli.app import app
from ragblend.engine.load import load_engine
from ragblend.engine.transformers import gguf as gguf_module
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.errors import NotFoundError, UnsupportedModelError, UsageError
from ragblend.llm import ChatBlend
from tests.gguf_files import write_gguf


@pytest.fixture(scope="module")
def parts(tiny_model, make_tokenizer):
    return tiny_model("llama"), make_tokenizer(CHATML, specials=("<|im|>", "<|end|>"))


@pytest.fixture(scope="module")
def file(tmp_path_factory, parts):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf", *parts)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, file):
    """What transformers makes of the file, as a folder of safetensors."""
    path = tmp_path_factory.mktemp("converted")
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)
    return path


def test_a_gguf_by_its_file_name_answers_as_its_converted_folder(file, converted, capfd):
    answers = []
    for model in (str(file), str(converted)):
        with load_engine(model, on_miss="inline") as engine:
            list(engine.precompute_all(CHUNKS))
            blended = engine.generate(PROMPT, recompute_ratio=0.3, max_tokens=24)
            full = engine.generate(PROMPT, mode="full", max_tokens=24)
            ids = engine.renderer.render(PROMPT)
            answers.append((ids, blended.token_ids, full.token_ids, blended.report.num_chunk_hits))
    assert answers[0] == answers[1]
    assert answers[0][3] == 3
    assert "de-quantizing" not in capfd.readouterr().err


def test_the_chat_template_comes_out_of_the_file(file, parts):
    with load_engine(str(file)) as engine:
        ids = engine.renderer.render(PROMPT)
        assert parts[1].decode(ids).startswith("<|im|>user")
        assert engine.renderer.stop_ids() >= {parts[1].eos_token_id}


def test_the_weights_are_the_files_in_the_requested_dtype(file, tmp_path, parts):
    exact = write_gguf(tmp_path / "tiny-F32.gguf", *parts, quantise=False)
    with load_engine(str(exact)) as engine:
        state, expected = engine.layers.model.state_dict(), parts[0].state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())
        full = engine.fingerprint
    with load_engine(str(exact), dtype="bfloat16") as engine:
        assert engine.layers.dtype == torch.bfloat16
        assert engine.fingerprint != full
    with load_engine(str(file)) as engine:
        assert engine.fingerprint != full
        assert "gguf" not in str(engine.layers.model.config)
        engine.layers.model.save_pretrained(tmp_path / "saved")  # it is a plain model


def test_a_gguf_is_found_by_every_name_it_has(file, tmp_path):
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--org--tiny-GGUF"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(file, repo / "snapshots" / commit / file.name)
    hub: dict[str, Any] = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    with (
        load_engine(str(file)) as path,
        load_engine(f"{file.parent}:{file.name}") as inside,
        load_engine(f"org/tiny-GGUF:{file.name}", **hub) as repository,
        load_engine("org/tiny-GGUF", model_kwargs={"gguf_file": file.name}, **hub) as transformers_way,
    ):
        engines = (path, inside, repository, transformers_way)
        assert len({engine.fingerprint for engine in engines}) == 1
    chat = ChatBlend(model=str(file), max_tokens=2)
    assert chat.engine.fingerprint == path.fingerprint
    chat.engine.close()


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("{tmp}/gone.gguf", NotFoundError, r"no GGUF at .*gone\.gguf; pass a file, or one of .*ORG/REPO:gone\.gguf"),
        ("gone.gguf", NotFoundError, "no GGUF at gone.gguf"),
        ("{tmp}:gone.gguf", NotFoundError, "no GGUF at"),
        ("org/gone:x.gguf", NotFoundError, "neither a local path nor on Hugging Face"),
        ("{tmp}", NotFoundError, r"has no config\.json; name the GGUF: .*broken\.gguf"),
        ("{tmp}/broken.gguf", UnsupportedModelError, "cannot be loaded as a causal language model"),
        ("big-00001-of-00003.gguf", UnsupportedModelError, "llama-gguf-split --merge"),
    ],
)
def test_a_file_that_is_no_gguf_is_named(name, error, reason, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(error, match=reason):
        load_engine(name.format(tmp=tmp_path))


def test_a_revision_of_a_file_is_refused(file):
    with pytest.raises(UsageError, match=r"revision is 'v2', but .* is a path"):
        load_engine(str(file), revision="v2")


def test_a_scaled_rope_that_transformers_drops_is_rejected_until_it_is_configured(parts, tmp_path):
    file = write_gguf(tmp_path / "scaled.gguf", *parts, rope_freqs=True)
    with pytest.raises(UnsupportedModelError, match=r"scaled RoPE \(rope_freqs.weight\), which transformers does not"):
        load_engine(str(file))
    llama3 = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    with load_engine(str(file), model_kwargs={"rope_parameters": llama3}) as engine:
        assert engine.layers.config.rope_parameters["factor"] == 8.0
        first = engine.fingerprint
    with load_engine(str(file), model_kwargs={"rope_parameters": llama3 | {"factor": 4.0}}) as engine:
        assert engine.fingerprint != first


def test_without_the_packages_the_extra_is_named(file, monkeypatch):
    monkeypatch.setattr(gguf_module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'ragblend\[gguf\]'"):
        load_engine(str(file))


def test_vllm_rejects_a_gguf_and_names_the_other_backend(file):
    with pytest.raises(UnsupportedModelError, match="is a GGUF file, which only backend='transformers' reads"):
        find_checkpoint(str(file))


def test_the_command_line_takes_a_gguf(file, tmp_path):
    (tmp_path / "doc.txt").write_text("the theory of the chunk and the other question with that answer")
    where = ["--store", str(tmp_path / "kv"), "--model", str(file)]
    done = CliRunner().invoke(app, ["ingest", str(tmp_path / "doc.txt"), *where, "--embedder", "hashing"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["ask", "what is that?", *where, "--max-tokens", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert '"num_chunk_hits": 1' in done.output
    done = CliRunner().invoke(app, ["doctor", "--model", str(file)])
    assert "LlamaForCausalLM" in done.output
