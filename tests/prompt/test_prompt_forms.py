"""Any form of conversation reads, token after token, as the model's own template writes the whole of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ragblend.errors import UsageError
from ragblend.prompt.formats import prompt_format
from ragblend.prompt.prompt import Chunk, Part, SegmentedPrompt
from ragblend.prompt.segmenter import Segmenter

LOOP = "{% for m in messages %}<|im|>{{ m['role'] }}\n{{ CONTENT }}<|end|>\n{% endfor %}"
HEAD = "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
TAKES_TURNS = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('they take turns') }}{% endif %}"
)
SYSTEM_APART = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
)
THINKS = (
    "{% for m in messages %}{% set said = m['content'] %}{% if m['role'] == 'assistant' and '</think>' in said %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im|>{{ m['role'] }}\n{{ said }}<|end|>\n{% endfor %}"
)
TEMPLATES = {
    # What ChatML, SmolLM2 and Qwen 2.5 do: everything as it is.
    "plain": LOOP.replace("CONTENT", "m['content']") + HEAD,
    # Llama 3.2: today's date, contents trimmed.
    "dated": "Today: {{ strftime_now('%d %b %Y') }}\n" + LOOP.replace("CONTENT", "m['content'] | trim") + HEAD,
    # Gemma 3: the system text opens the first user turn; turns alternate; contents trimmed.
    "merges": SYSTEM_APART
    + "{% for m in rest %}"
    + TAKES_TURNS
    + "<|im|>{{ m['role'] }}\n{% if loop.first and first %}{{ first + '\n\n' }}{% endif %}"
    + "{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    + HEAD,
    # Mistral 7B v0.3: the system text stands in the last user turn; turns alternate; answers alone are trimmed.
    "last": SYSTEM_APART
    + "{% for m in rest %}"
    + TAKES_TURNS
    + "{% if m['role'] == 'user' %}[INST] {{ first + '\n\n' if loop.last and first else '' }}{{ m['content'] }}[/INST]"
    + "{% else %} {{ m['content'] | trim }}</s>{% endif %}{% endfor %}",
    # Llama 2: system and question are stripped together.
    "strips": SYSTEM_APART
    + "{% for m in rest %}"
    + TAKES_TURNS
    + "{% set said = '<<' + first + '>>\n\n' + m['content'] if loop.first and first else m['content'] %}"
    + "{% if m['role'] == 'user' %}[INST] {{ said.strip() }} [/INST]{% else %} {{ said.strip() }} </s>{% endif %}"
    + "{% endfor %}",
    # Qwen 3: what was thought for earlier answers is left out.
    "thinks": THINKS + HEAD,
}


def found(text: str) -> Chunk:
    """A chunk that stands in a text."""
    return Chunk(text, found_in_prompt=True)


FORMS: dict[str, list[tuple[str, str | Part | Sequence[Part]]]] = {
    "several turns with chunks": [
        ("system", "be brief"),
        ("user", [Chunk("one"), Chunk("two"), "a?"]),
        ("assistant", "x"),
        ("user", [Chunk("three"), "b?"]),
    ],
    "chunks in the system text": [("system", ["Use:\n", found("one"), "\n", found("two")]), ("user", "what?")],
    "a chunk in an answer": [("user", "a?"), ("assistant", ["It says: ", found("one"), "."]), ("user", "b?")],
    "the question first": [("user", ["what?\n\n", Chunk("one"), Chunk("two")])],
    "the question around": [("user", ["Q: what?\n\n", found("one"), "\n\n", found("two"), "\n\nAnswer:"])],
    "whitespace": [
        ("system", "be brief\n"),
        ("user", ["\n  Context:\n", found("one"), "\n\na?\n"]),
        ("assistant", " x\n"),
        ("user", ["\n", found("two"), "\n \n"]),
    ],
    "more than ten turns": [("assistant" if index % 2 else "user", f"turn {index}.") for index in range(23)],
    "texts like slots": [
        ("system", "RAGBLENDSLOT1END"),
        ("user", [Chunk("RAGBLENDSLOT0END"), "RAGBLENDSLOT1END"]),
    ],
    "a thought": [
        ("user", "hello"),
        ("assistant", "<think>\nhm\n</think>\n\nhi"),
        ("user", [Chunk("one"), "what?"]),
    ],
    "a thought about a chunk": [
        ("user", "hello"),
        ("assistant", ["<think>so ", found("one"), "</think>it is ", found("two"), " "]),
        ("user", "what?"),
    ],
}
ROWS = {
    "two questions": [("user", "hello"), ("user", [Chunk("one"), "b?"])],
    "two system texts": [("system", "be brief"), ("system", "be good"), ("user", [Chunk("one"), "b?"])],
    "only a system text": [("system", ["Use ", found("one"), " now."])],
}


def joined(content: str | Part | Sequence[Part]) -> str:
    """A content as any other client sends it."""
    text, parts = "", [content] if isinstance(content, str | Chunk) else list(content)
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        text += part if isinstance(part, str) else part.text
        text += "\n\n" if isinstance(part, Chunk) and not part.found_in_prompt and following != "" else ""
    return text


def read_and_written(
    make_tokenizer: Callable[..., Any], template: str, form: Sequence[tuple[str, Any]]
) -> tuple[str, str]:
    """What the model is given to read, and what its template writes of the joined contents."""
    tokenizer = make_tokenizer(TEMPLATES[template], ("<|im|>", "<|end|>", "[INST]", "[/INST]"))
    ids = Segmenter(tokenizer, prompt_format(tokenizer)).tokenize(SegmentedPrompt.from_messages(form)).token_ids
    turns = [{"role": role, "content": joined(content)} for role, content in form]
    written = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer.decode(ids, skip_special_tokens=False), written


TURNS_STAY = itertools.product(["plain", "dated", "thinks"], ["two questions", "two system texts"])


@pytest.mark.parametrize(("template", "form"), [*itertools.product(TEMPLATES, FORMS), *TURNS_STAY])
def test_a_conversation_reads_as_the_models_own_template_writes_it(
    template: str, form: str, make_tokenizer: Callable[..., Any]
) -> None:
    read, written = read_and_written(make_tokenizer, template, (FORMS | ROWS)[form])
    assert read == written


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("template", ["merges", "last", "strips"])
def test_nothing_is_lost_where_the_template_would_refuse_or_drop_a_turn(
    template: str, form: str, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(TEMPLATES[template], ("<|im|>", "<|end|>", "[INST]", "[/INST]"))
    own, prompt = Segmenter(tokenizer, prompt_format(tokenizer)), SegmentedPrompt.from_messages(ROWS[form])
    text = tokenizer.decode(own.tokenize(prompt).token_ids, skip_special_tokens=False)
    places = [text.index(part) for _, content in ROWS[form] for part in joined(content).split("\n\n")]
    assert places == sorted(places)
    assert text.count("[INST]") + text.count("<|im|>user") == 1


def test_a_template_that_wants_a_question_first_says_so(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"refuses the turns .*take turns"):
        read_and_written(make_tokenizer, "merges", [("assistant", "Hello."), ("user", "what?")])


@pytest.mark.parametrize(
    "parts", [["what?", Chunk("one")], [found("one"), Chunk("two")], ["what?", Chunk("one"), "ok?"]]
)
def test_a_chunk_that_was_handed_over_is_set_apart_from_what_stands_before_it(
    parts: list[Part], make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(TEMPLATES["plain"], ("<|im|>", "<|end|>"))
    ids = Segmenter(tokenizer, prompt_format(tokenizer)).tokenize(SegmentedPrompt.from_messages([("user", parts)]))
    texts = [part if isinstance(part, str) else part.text for part in parts]
    assert "\n\n".join(texts) in tokenizer.decode(ids.token_ids, skip_special_tokens=False)
