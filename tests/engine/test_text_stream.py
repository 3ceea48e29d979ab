"""The pieces of a streamed answer, joined, are its text, and each costs the same."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from ragblend.engine.decoding import AnswerText
from ragblend.prompt.render import Renderer


@given(text=st.text(max_size=40))
@example(text="🙂é漢字")
@example(text="<s>a</s>")
def test_a_stream_of_tokens_reads_as_the_whole_answer(text, renderer):
    ids, stream = renderer.text_ids(text), AnswerText(renderer)
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.flush()]) == text.removeprefix(renderer.whitespace_before_answer)
    assert all(renderer.decode(ids[: end + 1]).startswith("".join(pieces[: end + 1])) for end in range(len(ids)))


@given(ids=st.lists(st.integers(0, 299), max_size=30))
def test_a_stream_holds_back_at_most_one_unfinished_character(ids, renderer):
    stream = AnswerText(renderer)
    shown = "".join(stream.push(token) for token in ids)
    rest = stream.flush()
    assert shown + rest == renderer.decode(ids)
    assert set(rest) <= {"\ufffd"}
    assert stream.flush() == ""


@given(text=st.text(max_size=30))
def test_byte_level_tokenizers_stream_the_same_text_as_the_answer(text, make_spaced_tokenizer):
    renderer = Renderer(make_spaced_tokenizer())
    ids, stream = renderer.text_ids(text), AnswerText(renderer)
    assert "".join([*map(stream.push, ids), stream.flush()]) == renderer.decode(ids)


@given(ids=st.lists(st.integers(0, 270), max_size=30))
def test_bytes_that_make_no_text_break_no_stream(ids, make_spaced_tokenizer):
    stream = AnswerText(Renderer(make_spaced_tokenizer()))
    for token in ids:
        stream.push(token)
    stream.flush()


def test_streaming_a_token_costs_the_same_however_long_the_answer_is(renderer, monkeypatch):
    decoded: list[int] = []
    decode = type(renderer._tokenizer).decode
    noting = lambda self, ids, **options: decoded.append(len(ids)) or decode(self, ids, **options)  # noqa: E731
    monkeypatch.setattr(type(renderer._tokenizer), "decode", noting)
    stream, text = AnswerText(renderer), "the chunk 🙂 " * 300
    assert "".join(stream.push(token) for token in renderer.text_ids(text)) + stream.flush() == text
    assert max(decoded, default=0) <= 12


def test_an_answer_has_no_control_tokens_and_no_template_space(renderer):
    ids = [*renderer.text_ids(" the chunk"), *renderer.stop_ids()]
    assert renderer.whitespace_before_answer == " "
    assert renderer.decode(ids) == "the chunk"
    stream = AnswerText(renderer)
    assert "".join(stream.push(token) for token in ids) == "the chunk"
