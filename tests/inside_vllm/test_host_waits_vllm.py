"""Inside vLLM, too, what the host looks into does not grow with the number of layers: it queues them and goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SIZES, ask, ingest, random_ids, report
from test_blend import CHUNKS, PREFIX, Prompt, blend_params, engine_of, patchy_prompt, plain_prompt
from tiny_models import FAMILIES, make_model

from benchmarks.operations import DeviceLooks
from ragblend.engine.fusion.rules import RULES


def looks(
    kind: str, num_layers: int, prompt: Prompt, make_tokenizer: Callable[..., object], place: Path
) -> dict[str, Counter[str]]:
    """Count device reads by rule and by source line, while a model of `num_layers` layers blends a prompt."""
    model_class, changes = FAMILIES["llama"]
    model = place / "model"
    made = make_model(model_class, **{**SIZES, **changes, "num_hidden_layers": num_layers})
    made.save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    found = {}
    with pytest.MonkeyPatch.context() as patch, engine_of(kind, model, place / "kv", patch) as llm:
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
        for rule in ("ask", "cacheblend", "random"):
            ask(llm, random_ids(9, 3), None, 1)
            params = blend_params(0.15, rule)
            ask(llm, prompt.ids, params, 1)  # what is made once: the prefix' KV, a self-check
            with DeviceLooks() as seen:
                assert report(ask(llm, prompt.ids, params, 1))["num_chunk_hits"] == 3
            found[rule] = seen.places
    return found


@pytest.mark.parametrize("kind", ["alone", "together", "by kernels"])
@pytest.mark.parametrize("prompt", [plain_prompt(), patchy_prompt()], ids=["plain", "patchy"])
def test_twice_the_layers_are_not_looked_into_more_often(kind, prompt, make_tokenizer, tmp_path):
    few = looks(kind, 6, prompt, make_tokenizer, tmp_path / "few")
    many = looks(kind, 12, prompt, make_tokenizer, tmp_path / "many")
    assert few.keys() <= RULES.keys()
    for rule, places in few.items():
        assert places, rule  # choosing itself is a look
        assert many[rule] == places, rule
