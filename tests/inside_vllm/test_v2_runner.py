"""Under `-p v2_runner` the engines of the other tests run vLLM's Model Runner V2."""

import os

import pytest
from harness import engine


@pytest.mark.v2_runner
@pytest.mark.skipif("VLLM_USE_V2_MODEL_RUNNER" not in os.environ, reason="runs with -p v2_runner")
def test_the_engine_runs_the_second_model_runner(tmp_path, checkpoint):
    with engine(checkpoint("llama"), tmp_path) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert type(runner).__module__.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))
