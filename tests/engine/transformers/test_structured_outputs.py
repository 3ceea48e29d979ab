"""What an answer is held to, it keeps: every schema, expression and grammar, on random models, however it ends."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import jsonschema
import pytest
import torch

from ragblend.engine.transformers.structured_outputs import GrammarCompiler
from ragblend.errors import UsageError
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Prompt

PROMPT = Prompt(["the theory of the other chunk", "question the chunk with that theory"], "what is that?")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["lamp", "boat", "tower"]},
        "place": {
            "type": "object",
            "properties": {"floor": {"type": "integer", "minimum": 0, "maximum": 99}, "lit": {"type": "boolean"}},
            "required": ["floor", "lit"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "kind", "place", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def engine(tiny_engine):
    return tiny_engine("llama")


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[a-z]{3}-[0-9]{2}"}, r"[a-z]{3}-[0-9]{2}"),
        ({"choice": ["yes", 'no, "never"', "perhaps\nso"]}, r'yes|no, "never"|perhaps\nso'),
        ({"grammar": 'start: "lamp" (" " NUMBER){1,3}\nNUMBER: /[0-9]/'}, r"lamp( [0-9]){1,3}"),
        ({"json_object": True}, r"\{.*"),
        ({"json": '{"enum": ["a", "b"]}'}, r'"[ab]"'),
    ],
)
def test_every_kind_is_followed_as_its_pieces_come(engine, asked, pattern):
    stream = engine.stream(PROMPT, structured_outputs=asked, max_tokens=40)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text
    assert re.fullmatch(pattern, stream.result.text, re.DOTALL)
    assert stream.result.finish_reason == ("length" if "json_object" in asked else "stop")
    assert stream.result.report.completion_tokens == len(stream.result.token_ids)


@pytest.mark.parametrize(
    "shaped",
    [
        *({"temperature": 1.5, "seed": seed} for seed in range(8)),
        {"logit_bias": dict.fromkeys(range(0, 300, 7), 50.0)},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 1.0, "seed": 1, "top_k": 3, "min_p": 0.2, "top_p": 0.5},
    ],
)
def test_a_random_model_follows_the_schema_under_any_sampling_options(engine, shaped):
    answer = engine.generate(PROMPT, structured_outputs={"json": SCHEMA}, max_tokens=400, **shaped)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_every_token_has_its_own_logprob_those_that_had_to_come_too(engine):
    options = {"logprobs": True, "top_logprobs": 3}
    answer = engine.generate(PROMPT, structured_outputs={"choice": ["yes, it is", "no"]}, **options)
    assert answer.logprobs is not None
    assert [each.token_id for each in answer.logprobs] == answer.token_ids
    assert answer.logprobs[0].logprob < 0
    assert answer.logprobs[-1].logprob == 0
    assert all(math.isfinite(value) for each in answer.logprobs for _, value in each.top)


def test_an_object_that_does_not_fit_is_cut_with_finish_reason_length(engine):
    whole = engine.generate(PROMPT, structured_outputs={"json": SCHEMA}, max_tokens=400)
    for max_tokens in range(1, 30, 4):
        cut = engine.generate(PROMPT, structured_outputs={"json": SCHEMA}, max_tokens=max_tokens)
        assert (cut.finish_reason, len(cut.token_ids)) == ("length", max_tokens)
        assert cut.token_ids == whole.token_ids[:max_tokens]
    exact = engine.generate(PROMPT, structured_outputs={"json": SCHEMA}, max_tokens=len(whole.token_ids))
    assert (exact.text, exact.finish_reason) == (whole.text, "stop")


def test_a_stop_string_ends_an_object_too(engine):
    answer = engine.generate(PROMPT, structured_outputs={"json": SCHEMA}, stop=['"kind"'], max_tokens=400)
    assert answer.finish_reason == "stop"
    assert answer.text.startswith('{"name": "')
    assert '"kind"' not in answer.text


def test_forced_tokens_take_no_step_and_leave_the_kv_that_steps_would(engine, stock_model, monkeypatch):
    """Where there is a choice, it is the stock model's own: the most likely token that the schema allows."""
    steps: list[int] = []
    decode = engine.loop._decode
    monkeypatch.setattr(engine.loop, "_decode", lambda asked: steps.append(len(asked[0].tokens)) or decode(asked))
    answer = engine.generate(PROMPT, mode="full", structured_outputs={"json": SCHEMA}, max_tokens=400)
    assert len(steps) < len(answer.token_ids) - 10
    prompt_ids = engine.renderer.render(PROMPT)
    with torch.inference_mode():
        logits = stock_model("llama")(torch.tensor([prompt_ids + answer.token_ids])).logits[0].float()
    guide = engine.request(PROMPT, structured_outputs={"json": SCHEMA}).grammar.new_guide()
    place, num_chosen = 0, 0
    while not guide.ended:
        row = guide.mask_logits(logits[len(prompt_ids) - 1 + place])
        assert int(row.argmax()) == answer.token_ids[place]
        taken = guide.accept_with_forced(answer.token_ids[place], 400)
        assert taken == answer.token_ids[place : place + len(taken)]
        place, num_chosen = place + len(taken), num_chosen + 1
    assert (place, num_chosen) == (len(answer.token_ids), len(steps) + 1)


def test_a_grammar_that_allows_everything_changes_nothing(engine):
    free = engine.generate(PROMPT, max_tokens=30, mode="full")
    held = engine.generate(PROMPT, max_tokens=30, mode="full", structured_outputs={"regex": "(.|\n)*"})
    same = next((n for n, (a, b) in enumerate(zip(free.token_ids, held.token_ids, strict=False)) if a != b), 30)
    # Control tokens and bytes that are no UTF-8 are no text; up to the first of those a random model writes the same.
    shown = engine.renderer.plain_text(free.token_ids[: same + 1])
    assert same == 30 or "\ufffd" in shown or not engine.renderer.plain_text([free.token_ids[same]])


def test_rows_that_no_word_has_are_never_chosen(renderer):
    num_words = renderer.backend.get_vocab_size(with_added_tokens=True)
    for size in (num_words, num_words + 1, num_words + 100):
        guide = GrammarCompiler(renderer, size, [2]).compile({"regex": "(.|\n)*"}).new_guide()
        row = guide.mask_logits(torch.zeros(size))
        assert torch.isinf(row[num_words:]).all()
        assert row[2] == 0  # the empty text is allowed, so it may end
        assert row[torch.isfinite(row)].eq(0).all()


def test_every_token_that_ends_an_answer_may_end_it(renderer):
    guide = GrammarCompiler(renderer, 300, [2, 5]).compile({"regex": "a*"}).new_guide()
    row = guide.mask_logits(torch.zeros(300))
    assert [row[token].item() for token in (2, 5)] == [0, 0]
    strict = GrammarCompiler(renderer, 300, [2, 5]).compile({"regex": "a+"}).new_guide()
    assert torch.isinf(strict.mask_logits(torch.zeros(300))[[2, 5]]).all()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json": {"type": "strin"}}, "json that cannot be followed .*strin"),
        ({"json": "{"}, "json that cannot be followed"),
        ({"json": 5}, "5 is no JSON schema"),
        ({"regex": "("}, "regex that cannot be followed"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"structural_tag": {"format": {"type": "zoo"}}}, "a structural tag has the type 'zoo'"),
        ({"structural_tag": {}}, "structural_tag that cannot be followed"),
        ({"xml": 1}, "choose one of json, json_object, regex, choice, grammar, structural_tag"),
        ({"json": {}, "regex": "a"}, "choose one of json"),
        ({"json": str}, "json that is not JSON .*type"),
        ({"json": {"enum": [{1}]}}, "json that is not JSON .*set"),
        ({"choice": []}, "nothing to choose from"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_anything_is_computed(engine, asked, said):
    with pytest.raises(UsageError, match=said):
        engine.stream(PROMPT, structured_outputs=asked)


def test_without_llguidance_the_install_command_is_named(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'ragblend\[structured\]'"):
        engine.generate(PROMPT, structured_outputs={"regex": "a"})
    assert engine.generate(PROMPT, max_tokens=2).text is not None


TAG = {"begin": "<call>\n", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "\n</call>"}


@pytest.mark.parametrize("special", [(), ("<call>",)])
def test_a_structural_tag_is_text_until_its_trigger_and_json_behind_it(special, tiny_engine, make_tokenizer):
    tokenizer = make_tokenizer(specials=special)
    engine = tiny_engine("llama", renderer=Renderer(tokenizer))
    several = {"type": "tags_with_separator", "tags": [TAG], "separator": "\n", "at_least_one": True}
    asked = {"structural_tag": {"type": "structural_tag", "format": {**several, "stop_after_first": True}}}
    answer = engine.generate(PROMPT, structured_outputs=asked, temperature=1, seed=1, max_tokens=400)
    body = answer.text.removeprefix("<call>").removesuffix("</call>")
    jsonschema.validate(json.loads(body), SCHEMA)
    assert answer.text.startswith("\n" if special else "<call>\n")  # a control token is not shown
    triggered = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [TAG]}
    grammar = engine.request(PROMPT, structured_outputs={"structural_tag": {"format": triggered}}).grammar
    guide = grammar.new_guide()
    for piece in engine.renderer.split_control_tokens('the theory <call>\n{"name": '):
        for token in [piece] if isinstance(piece, int) else engine.renderer.text_ids(piece):
            assert guide.mask_logits(torch.zeros(300))[token] == 0
            guide.accept_with_forced(token, 1)
    row = guide.mask_logits(torch.zeros(300))
    assert torch.isinf(row[engine.renderer.text_ids("t")]).all()  # inside, only a string may follow


def test_full_prefill_beside_a_request_is_held_to_the_same(tiny_engine):
    engine = tiny_engine("llama", shadow=1.0)
    answer = engine.generate(PROMPT, structured_outputs={"json": SCHEMA}, recompute_ratio=1.0, max_tokens=400)
    engine.flush_shadow()
    assert answer.report.shadow.answers_identical


def test_a_text_to_choose_is_not_the_list_that_it_looks_like(engine):
    for asked, text in ((["a"], "a"), ('["a"]', '["a"]')):
        assert engine.generate(PROMPT, structured_outputs={"choice": asked}, max_tokens=20).text == text
