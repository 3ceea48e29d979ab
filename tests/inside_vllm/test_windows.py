"""Models with sliding windows in vLLM: refused at start with the flag to type, and served with it."""

import pytest
from harness import PREFIX, SIZES, ask, engine, ingest, random_ids, report, tokens
from tiny_models import make_model
from transformers import MistralForCausalLM, Starcoder2ForCausalLM
from vllm import EngineArgs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers.checkpoints import model_fingerprint
from ragblend.engine.vllm.connector import BlendConnector
from ragblend.errors import UnsupportedModelError

CHUNKS, QUESTION = [random_ids(n, n) for n in (61, 40)], random_ids(9, 4)
WINDOW = 256


@pytest.fixture(scope="module", params=[MistralForCausalLM, Starcoder2ForCausalLM])
def windowed(request, tmp_path_factory, make_tokenizer):
    """A checkpoint whose layers all have a window."""
    path = tmp_path_factory.mktemp("windowed")
    make_model(request.param, **SIZES, sliding_window=WINDOW).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_windows_are_refused_at_start_with_the_flag_to_type(windowed, tmp_path):
    with (
        pytest.raises(UnsupportedModelError, match=f"{WINDOW} tokens only.*--disable-sliding-window"),
        engine(windowed, tmp_path / "kv"),
    ):
        pass


def test_vllm_turns_its_hybrid_cache_manager_off_for_the_connector(checkpoint):
    """So that layers with windows keep their blocks without a flag, on GPUs, which have that manager, too."""
    transfer = {"kv_connector": "BlendConnector", "kv_connector_module_path": BlendConnector.__module__}
    config = KVTransferConfig(kv_role="kv_both", **transfer)
    assert not KVConnectorFactory.supports_hma_config(config)
    made = EngineArgs(str(checkpoint("gemma3")), kv_transfer_config=config, skip_tokenizer_init=True)
    assert made.create_engine_config().scheduler_config.disable_hybrid_kv_cache_manager


def test_a_model_of_windows_only_is_served_up_to_one_window(windowed, tmp_path):
    ids = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]
    with engine(windowed, tmp_path / "kv", disable_sliding_window=True, max_model_len=WINDOW) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        full = ask(llm, ids)
        blended = ask(llm, ids, {"mode": "blend", "rule": "cacheblend", "ratio": 1.0})
        assert report(blended)["num_chunk_hits"] == 2
        assert tokens(blended) == tokens(full)
        stale = ask(llm, ids, {"mode": "reuse"})
        mine, theirs = (output.outputs[0].logprobs[0] for output in (stale, full))
        assert max(abs(mine[each].logprob - theirs[each].logprob) for each in mine.keys() & theirs.keys()) > 0.01
    models = {header.fingerprint for header in DiskStore(tmp_path / "kv").headers()}
    assert models == {model_fingerprint(windowed, "float32")}
