"""Rendered prompts against the tokenizers' own rendering, with templates of several kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import REAL_MODEL
from tiny_models import CHATML
from transformers import AutoTokenizer

from ragblend.demo import WEIGHTS
from ragblend.prompt.render import DELIMITER, Renderer

TEMPLATES = {
    "chatml": CHATML,
    "llama 2": (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content | trim }}"
        " [/INST]{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
    ),
    "one line": "{% for m in messages %}{{ m.role }}: {{ m.content.split() | join(' ') }} {% endfor %}answer:",
}
WORDS = [
    "the",
    " chunk",
    "\n",
    "\n\n",
    "  ",
    "é",
    "日本",
    "<|im|>",
    "<|end|>",
    "</s>",
    ".",
    '"',
    "{",
    "ragblendcontrol",
]
CONTENTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
CONVERSATIONS = st.lists(CONTENTS, min_size=1, max_size=5).map(
    lambda contents: [
        {"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)
    ]
)


@pytest.fixture(scope="module", params=["byte level", "spaced"])
def tokenizers(request: pytest.FixtureRequest, make_tokenizer: Any, make_spaced_tokenizer: Any) -> dict[str, Any]:
    """A tokenizer for each template, of one of two kinds."""
    make = make_tokenizer if request.param == "byte level" else make_spaced_tokenizer
    return {name: make(template, specials=("<|im|>", "<|end|>")) for name, template in TEMPLATES.items()}


def has_control(renderer: Renderer, messages: list[dict[str, str]]) -> bool:
    return any(renderer._control.search(message["content"]) for message in messages)


def own_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=CONVERSATIONS)
def test_ids_are_those_of_the_models_own_rendering(
    name: str, messages: list[dict[str, str]], tokenizers: dict[str, Any]
) -> None:
    tokenizer = tokenizers[name]
    renderer = Renderer(tokenizer)
    if not has_control(renderer, messages):
        assert renderer.render(messages) == own_ids(tokenizer, messages)


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=CONVERSATIONS)
def test_a_control_token_in_a_content_stays_text(
    name: str, messages: list[dict[str, str]], tokenizers: dict[str, Any]
) -> None:
    tokenizer = tokenizers[name]
    renderer = Renderer(tokenizer)
    neutral = [{**m, "content": renderer._control.sub("word", m["content"])} for m in messages]

    def control_tokens(ids: list[int]) -> list[int]:
        return [token for token in ids if token in renderer._control_ids.values()]

    ids = renderer.render(messages)
    assert control_tokens(ids) == control_tokens(renderer.render(neutral))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "".join(tokenizer.decode(ids).split()) == "".join(text.split())


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=CONVERSATIONS)
def test_cutting_at_control_tokens_changes_no_id(
    name: str, messages: list[dict[str, str]], tokenizers: dict[str, Any]
) -> None:
    tokenizer = tokenizers[name]
    renderer = Renderer(tokenizer)
    if not has_control(renderer, messages):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        found = renderer._encode_protected(text, "unused", [])
        assert (found.text, found.ids, found.spans) == (text, whole.ids, whole.offsets)


@pytest.mark.parametrize("name", TEMPLATES)
@given(chunk=CONTENTS.map(str.strip).filter(bool), rest=CONTENTS)
def test_the_ids_of_a_chunk_stand_in_a_message_that_begins_with_it(
    name: str, chunk: str, rest: str, tokenizers: dict[str, Any]
) -> None:
    renderer = Renderer(tokenizers[name])
    inner, prefix = renderer.chunk_ids(chunk), renderer.prefix_ids()
    ids = renderer.render([{"role": "user", "content": f"{chunk}{DELIMITER}{rest} end"}])
    assert ids[: len(prefix)] == list(prefix)
    assert any(ids[start:][: len(inner)] == list(inner) for start in range(len(prefix), len(prefix) + 3))
    assert "".join(tokenizers[name].decode(inner).split()) in "".join(chunk.split())


@given(text=CONTENTS)
def test_plain_text_is_tokenized_as_the_tokenizer_does(text: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["chatml"]
    renderer = Renderer(tokenizer)
    ids = renderer.render_text(text)
    if not renderer._control.search(text):
        assert ids == tokenizer(text).input_ids
    else:
        assert not set(ids[1:]) & set(renderer._control_ids.values())


@pytest.mark.parametrize("path", [pytest.param(WEIGHTS, id="demo"), REAL_MODEL])
def test_real_tokenizers(path: Path | str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    renderer = Renderer(tokenizer)
    document = "The lease was signed by Ada Ferro.\nIt ends in 2031."
    messages = [{"role": "user", "content": f"{document}\n\nWho signed it?"}]
    assert renderer.render(messages) == own_ids(tokenizer, messages)
    inner, ids = renderer.chunk_ids(document), renderer.render(messages)
    start = ids.index(inner[0])
    assert ids[start : start + len(inner)] == list(inner)
    assert tokenizer.decode(inner).split() == document.split()
    prefix = renderer.prefix_ids()
    assert ids[: len(prefix)] == list(prefix)
