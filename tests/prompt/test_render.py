"""What prompts and chunks are in token ids, with templates and tokenizers of several kinds."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest
from chat_templates import SPECIALS, TEMPLATES
from hypothesis import example, given
from hypothesis import strategies as st
from pages import SMOLLM2
from tokenizers import processors
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from ragblend.demo import WEIGHTS
from ragblend.errors import UsageError
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import CHUNK_SEPARATOR, Chunk, Message, Prompt, ToolCall

WORDS = (
    "the", " chunk", "\n", "\n\n", "  ", "é", "日本", "<|im|>", "<|end|>", "</s>", ".", '"', "{", "ragblendcontrol"
)  # fmt: skip
CONTENTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@pytest.fixture(scope="module", params=["byte level", "spaced"])
def renderers(request, make_tokenizer, make_spaced_tokenizer):
    """A renderer for each template, with a tokenizer of one of two kinds."""
    make = make_tokenizer if request.param == "byte level" else make_spaced_tokenizer
    return {name: Renderer(make(template.text, SPECIALS)) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="module")
def byte_level(make_tokenizer):
    return {name: Renderer(make_tokenizer(template.text, SPECIALS)) for name, template in TEMPLATES.items()}


def text_of(renderer: Renderer, ids: Any) -> str:
    """Every character of the ids, control tokens included."""
    return str(renderer._tokenizer.decode(list(ids), skip_special_tokens=False))


def control_tokens(renderer: Renderer, ids: Any) -> list[int]:
    return [token for token in ids if token in renderer._control_ids.values()]


# --- control tokens in texts ---


@pytest.mark.parametrize("name", ["chatml", "last", "one line"])
@given(messages=st.lists(CONTENTS, min_size=1, max_size=3))
def test_cutting_at_control_tokens_changes_no_id(name, messages, renderers):
    renderer = renderers[name]
    contents = [renderer._control.sub("", content) for content in messages]
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    text = renderer._apply_template(turns)
    whole = renderer.backend.encode(text, add_special_tokens=False)
    found = renderer._encode_protected(text, "unused", [])
    assert (found.text, found.ids, found.offset_mapping) == (text, whole.ids, whole.offsets)


@given(text=CONTENTS)
@example(text="</s></s>")
@example(text="<<s>s>")
def test_plain_text_is_tokenized_as_the_tokenizer_does(text, renderers):
    renderer = renderers["chatml"]
    ids = renderer.encode_with_special_tokens(text)
    if not renderer._control.search(text):
        assert ids == renderer._tokenizer(text).input_ids
    else:
        num_prefix = len(renderer.added_ids[0])
        assert tuple(ids[:num_prefix]) == renderer.added_ids[0]
        assert not control_tokens(renderer, ids[num_prefix:])
    assert not control_tokens(renderer, renderer.text_ids(text))


@given(text=st.text(max_size=40) | CONTENTS)
def test_text_reads_as_it_was_written(text, byte_level):
    renderer = byte_level["chatml"]
    assert text_of(renderer, renderer.text_ids(text)) == text


@pytest.mark.slow
def test_thousands_of_control_tokens_in_a_text_stay_text(make_tokenizer):
    """Llama 3 reserves 250, multimodal models more; a text may hold each of them many times."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|reserved_{n}|>" for n in range(1200)]})
    renderer = Renderer(tokenizer)
    text = "".join(f"<|reserved_{n % 1300}|>" for n in range(5000))
    ids = renderer.text_ids(text)
    assert control_tokens(renderer, ids) == []
    assert text_of(renderer, ids) == text


def test_added_tokens_that_are_ordinary_text_are_read_as_such(make_tokenizer):
    """Gemma adds newlines, GPT-NeoX runs of spaces: documents are full of them. `<tool_call>` stays control."""
    tokenizer = make_tokenizer(added=("\n\n", "    ", "漢", "<tool_call>"))
    renderer = Renderer(tokenizer)
    tool_call = tokenizer.convert_tokens_to_ids("<tool_call>")
    for text in ("a\n\nb", "if:\n    pass", "漢字", "<tool_call>{}", "<tool_call>漢\n\n"):
        ids = renderer.text_ids(text)
        assert tokenizer.decode(ids) == text
        assert tool_call not in ids
    assert tokenizer.convert_tokens_to_ids("漢") in renderer.text_ids("<tool_call>漢")


# --- chunks ---


@pytest.mark.parametrize("name", ["chatml", "last", "strips", "one line", "merges"])
@given(chunk=CONTENTS.map(str.strip).filter(bool), rest=CONTENTS)
def test_a_chunks_ids_are_those_inside_a_message_beginning_with_it(name, chunk, rest, renderers):
    renderer = renderers[name]
    inner, prefix = renderer.chunk_ids(chunk), renderer.prefix_ids()
    ids = renderer.render(Prompt([Chunk(chunk)], f"{rest} end"))
    assert ids[: len(prefix)] == list(prefix)
    assert any(ids[start:][: len(inner)] == list(inner) for start in range(len(prefix), len(prefix) + 3))
    assert "".join(text_of(renderer, inner).split()) in "".join(chunk.split())


# Of each template: the text before the first chunk, without and with a system text; between two chunks; after the
# question; and before an answer.
EDGES = {
    "chatml": ("<|im|>user\n", "<|im|>system\nS<|end|>\n<|im|>user\n", "\n\n", "<|end|>\n<|im|>assistant\n", ""),
    "dated": (
        "<s>Today: 26 Jul 2024\n<|im|>user\n",
        "<s>Today: 26 Jul 2024\n<|im|>system\nS<|end|>\n<|im|>user\n",
        "\n\n",
        "<|end|>\n<|im|>assistant\n",
        "",
    ),
    "refuses": ("<s><|im|>user\n", "<s><|im|>user\nS\n\n", "\n\n", "<|end|>\n<|im|>assistant\n", ""),
    "merges": ("<|im|>user\n", "<|im|>user\nS\n\n", "\n\n", "<|end|>\n<|im|>assistant\n", ""),
    "last": ("<s>[INST]", "<s>[INST] S\n\n", "\n\n", "[/INST]", " "),
    "strips": ("<s>[INST]", "<s>[INST] <<S>>\n\n", "\n\n", " [/INST]", " "),
    "thinks": ("<|im|>user\n", "<|im|>system\nS<|end|>\n<|im|>user\n", "\n\n", "<|end|>\n<|im|>assistant\n", ""),
    "one line": ("user:", "system: S user:", "", " answer:", ""),
}


@pytest.mark.parametrize("name", EDGES)
def test_what_a_template_writes_around_chunks_and_answers(name, byte_level):
    renderer = byte_level[name]
    prefix, with_system, separator, tail, lead = EDGES[name]
    assert text_of(renderer, renderer.prefix_ids(pins_date=True)) == prefix
    assert text_of(renderer, renderer.prefix_ids("S", pins_date=True)) == with_system
    assert text_of(renderer, renderer.separator_ids) == separator
    assert text_of(renderer, renderer.tail_ids) == tail
    assert renderer.whitespace_before_answer == lead
    assert renderer.decode([*renderer.text_ids(f"{lead}It is."), *renderer.stop_ids()]) == "It is."


@pytest.mark.parametrize("name", EDGES)
def test_chunks_between_the_edges_of_a_template_are_the_whole_prompt(name, byte_level):
    """Two chunks and a question are the prefix, the ids of each part, the separators and the tail."""
    renderer = byte_level[name]
    texts = ("the other\n chunk is\t<|end|> in the question", " what is that theory? ", "the question")
    inner = [renderer.chunk_ids(text) for text in texts]
    whole = text_of(renderer, renderer.render(Prompt(texts[:2], texts[2], "S")))
    between = CHUNK_SEPARATOR if name != "one line" else ""
    parts = between.join(text_of(renderer, ids) for ids in inner)
    assert "".join(whole.split()).endswith("".join((parts + text_of(renderer, renderer.tail_ids)).split()))
    ids, start = renderer.render(Prompt(texts[:2], texts[2], "S")), 0
    for chunk in (ids[1:] for ids in inner[:2]):  # the first token has the space that a template may write before it
        start = next(place for place in range(start, len(ids)) if tuple(ids[place : place + len(chunk)]) == chunk)
    assert text_of(renderer, inner[0]).split() == texts[0].split()


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_a_blank_text_has_no_ids(text, byte_level):
    for renderer in byte_level.values():
        assert renderer.chunk_ids(text) == ()
        assert renderer.count_tokens("") == 0


def test_the_templates_date_is_todays_and_no_part_of_the_prefix(byte_level, monkeypatch):
    renderer, stored, read = byte_level["dated"], set(), set()
    for day in (datetime(2026, 11, 21), datetime(2026, 11, 22)):
        clock = type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None, day=day: day)})
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        stored.add(renderer.prefix_ids("be brief", pins_date=True))
        text = text_of(renderer, renderer.render(Prompt(["one"], "what?", "be brief")))
        assert text.startswith(text_of(renderer, renderer.prefix_ids("be brief")))
        assert f"Today: {day:%d %b %Y}" in text
        read.add(text)
    assert len(read) == 2
    assert len(stored) == 1


# --- templates that refuse turns, and tokenizers without one ---

REFUSED = {
    "two questions": [("user", "hello"), ("user", "one\n\nb?")],
    "two system texts": [("system", "be brief"), ("system", "be good"), ("user", "one\n\nb?")],
}


@pytest.mark.parametrize("turns", REFUSED)
@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if template.alternates])
def test_no_text_is_lost_where_the_template_refuses_a_turn(name, turns, byte_level):
    renderer = byte_level[name]
    text = text_of(renderer, renderer.render(Prompt.from_messages(REFUSED[turns])))
    places = [text.index(part) for _, content in REFUSED[turns] for part in content.split("\n\n")]
    assert places == sorted(places)
    assert text.count("[INST]") + text.count("<|im|>user") == 1


_ONLY_FIRST = (
    "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('first') }}{% endif %}{% endfor %}"
)
_NONE = _ONLY_FIRST.replace("[1:]", "")
ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def letters_as_prompt(letters: str) -> Prompt:
    """A prompt with a turn for each letter: s, u, a, c (an answer that calls a tool) or t (its result)."""
    call = ToolCall("look", "{}", "call00001")
    calls, call_ids = {"c": (call,)}, {"t": call.id}
    turns = enumerate(letters)
    return Prompt.from_messages(
        [Message(ROLES[each], f"said {n}", calls.get(each, ()), call_ids.get(each, "")) for n, each in turns]
    )


@pytest.mark.parametrize("refuses", [_ONLY_FIRST, _NONE], ids=["later ones", "all"])
@pytest.mark.parametrize(
    ("turns", "template"),
    [(turns, "merges") for turns in ("us", "usu", "uas", "uasu", "uassu", "sus", "susu", "suas", "suasu")]
    + [("uctsct", "calls")],
)
def test_a_refused_system_turn_is_a_user_turn_wherever_it_is(turns, template, refuses, make_tokenizer):
    renderer = Renderer(make_tokenizer(refuses + TEMPLATES[template].text, SPECIALS))
    kept = 1 if refuses == _ONLY_FIRST else 0
    repaired = turns[:kept] + turns[kept:].replace("s", "u")
    text = text_of(renderer, renderer.render(letters_as_prompt(turns)))
    assert text == text_of(renderer, renderer.render(letters_as_prompt(repaired)))
    places = [text.index(f"said {number}") for number in range(len(turns))]
    assert places == sorted(places)


def test_a_template_without_system_turns_gets_the_text_in_the_question(byte_level):
    renderer = byte_level["refuses"]
    ids = renderer.render(Prompt(["one"], "what?", "be brief"))
    assert text_of(renderer, ids) == "<s><|im|>user\nbe brief\n\none\n\nwhat?<|end|>\n<|im|>assistant\n"
    assert tuple(ids[: len(renderer.prefix_ids("be brief"))]) == renderer.prefix_ids("be brief")


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% bad", "{{ messages[0].content + 1 }}"])
def test_a_template_that_takes_no_turns_is_an_error_with_its_words(template, make_tokenizer):
    with pytest.raises(UsageError, match=r"chat template rejects the turns \['user', 'assistant', 'user'\]"):
        Renderer(make_tokenizer(template)).render(
            Prompt.from_messages([("user", "a"), ("assistant", "b"), ("user", "c")])
        )


def test_a_template_that_requires_a_question_first_is_an_error(byte_level):
    with pytest.raises(UsageError, match=r"rejects the turns .*take turns"):
        byte_level["merges"].render(Prompt.from_messages([("assistant", "Hello."), ("user", "what?")]))


def test_a_tokenizer_without_a_template_gets_a_plain_one(renderer):
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", "yes?"), ("user", ["note", Chunk("two"), "what?"])]
    ids = renderer.render(Prompt.from_messages(turns))
    assert text_of(renderer, ids) == "<s>be brief\n\nhi\nAnswer: yes?\n\nnote\n\ntwo\n\nwhat?\nAnswer:"


def test_plain_text_gets_no_template(renderer, chat_renderer):
    prompt = Prompt.from_text(["Once ", Chunk("one"), "upon"])
    assert {text_of(each, each.render(prompt)) for each in (renderer, chat_renderer)} == {"<s>Once one\n\nupon"}
    assert renderer.added_ids[0] == (renderer._tokenizer.bos_token_id,)


def test_a_tokenizer_that_appends_tokens_has_the_same_prefix(renderer):
    tokenizer = copy.deepcopy(renderer._tokenizer)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    ending = Renderer(tokenizer)
    assert ending.added_ids[0] == (start,)
    assert (
        ending.encode_with_special_tokens("one") == tokenizer("one").input_ids == [start, *ending.text_ids("one"), end]
    )


def test_the_fingerprint_depends_on_the_tokenizer_and_not_on_its_template(make_tokenizer):
    """An index keeps it, and may be ingested into again after the template has changed."""
    one, other = TEMPLATES["chatml"].text, TEMPLATES["dated"].text
    more = Renderer(make_tokenizer(one, SPECIALS)).fingerprint
    assert Renderer(make_tokenizer(one)).fingerprint == Renderer(make_tokenizer(other)).fingerprint
    assert len({more, Renderer(make_tokenizer(one)).fingerprint, Renderer(make_tokenizer()).fingerprint}) == 3


def test_a_tokenizer_that_is_written_in_python_is_refused():
    with pytest.raises(UsageError, match=r"str, which is written in Python.*use_fast=True"):
        Renderer("no tokenizer")


# --- ids to text ---


def test_the_text_of_a_template_is_split_at_its_control_tokens(byte_level):
    renderer = byte_level["chatml"]
    (end,) = renderer._tokenizer.convert_tokens_to_ids(["<|end|>"])
    assert renderer.split_control_tokens("a<|end|><|end|>b") == ["a", end, end, "b"]
    assert renderer.split_control_tokens("") == []


@pytest.mark.parametrize("path", [WEIGHTS, SMOLLM2], ids=["demo", "smollm2"])
def test_a_chunk_has_the_same_ids_in_prompts_of_real_tokenizers(path):
    if not path.exists():
        pytest.skip("no real model: make real-model")
    renderer = Renderer(AutoTokenizer.from_pretrained(path))
    document = "The lease was signed by Ada Ferro.\nIt ends in 2031."
    inner, ids = renderer.chunk_ids(document), renderer.render(Prompt([document], "Who signed it?"))
    start = ids.index(inner[0])
    assert ids[start : start + len(inner)] == list(inner)
    assert text_of(renderer, inner).split() == document.split()
    assert tuple(ids[: len(renderer.prefix_ids())]) == renderer.prefix_ids()
    assert tuple(ids[-len(renderer.tail_ids) :]) == renderer.tail_ids
