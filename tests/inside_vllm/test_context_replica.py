"""A vLLM with an empty disk finds variants of chunks in a shared remote tier: those of its configured policy."""

import pytest
from harness import SIZES, SMALL
from served import make_known
from tiny_models import FAMILIES, make_model
from tiny_prompts import CHUNKS

from ragblend import Prompt, load_engine
from ragblend.precompute import ingest

pytestmark = pytest.mark.timeout(600)
TEXTS = [chunk.text for chunk in CHUNKS]


@pytest.fixture
def model(make_tokenizer, tmp_path):
    """Folder of a random model whose context length has space for the neutral text."""
    model_class, changes = FAMILIES["llama"]
    sizes = {**SIZES, **changes, "max_position_embeddings": 4096}
    make_model(model_class, **sizes).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_replica_with_an_empty_disk_finds_versions(model, tmp_path):
    url = f"file://{tmp_path}/shared"
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)
    options = {"dtype": "float32", "remote": url, "context": "neutral", "on_miss": "inline"}
    with load_engine(model, tmp_path / "first", **options) as ours:
        ingest(tmp_path / "docs", ours, tmp_path / "index", chunk_size=64, embedder="hashing")
        ours.store.flush()
    with load_engine(
        model,
        tmp_path / "second",
        backend="vllm",
        vllm_options=SMALL | {"block_size": 32, "max_model_len": 4096},
        **options,
    ) as replica:
        make_known(tmp_path / "second", replica.renderer, TEXTS)  # as a catalogue that both share would do
        report = replica.generate(Prompt(TEXTS, "what is the theory?"), mode="reuse", max_tokens=1).report
        assert [chunk.context for chunk in report.chunks] == ["none", "neutral", "neutral"]
        assert (replica.context, replica.store.read_context_policy()) == ("neutral", None)
