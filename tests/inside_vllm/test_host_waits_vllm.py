"""Inside vLLM, too, what the host looks into does not grow with the number of layers: it queues them and goes on."""

from __future__ import annotations

import itertools
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


PROMPTS = {"plain": plain_prompt(), "patchy": patchy_prompt()}
KINDS = [*itertools.product(("alone", "together"), PROMPTS), ("by kernels", "patchy")]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_twice_the_layers_are_not_looked_into_more_often(kind, name, make_tokenizer, tmp_path):
    num_layers = 3 if kind == "by kernels" else 6  # interpreted kernels take a second a layer
    few = looks(kind, num_layers, PROMPTS[name], make_tokenizer, tmp_path / "few")
    many = looks(kind, 2 * num_layers, PROMPTS[name], make_tokenizer, tmp_path / "many")
    assert few.keys() <= RULES.keys()
    for rule, places in few.items():
        assert places, rule  # choosing itself is a look
        assert many[rule] == places, rule
