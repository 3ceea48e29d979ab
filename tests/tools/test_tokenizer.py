"""The tokenizer: one token per word of the world, any text round-trips, text cannot write special tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ragblend.demo import WEIGHTS
from tools.demo_model.tokenizer import DOC, SPECIAL_TOKENS, build_tokenizer, encode, pieces, words

TOKENIZER = build_tokenizer()


def test_every_word_is_one_token() -> None:
    assert all(len(TOKENIZER.encode(word).ids) == 1 for word in words())


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_whitespace_is_collapsed_and_text_gets_its_leading_space() -> None:
    ids = encode(TOKENIZER, "Anna Kern\n\nlives in  Oston.")
    assert ids == TOKENIZER.encode(" Anna Kern lives in Oston.").ids
    assert len(ids) == 6


def test_text_cannot_write_a_special_token() -> None:
    assert TOKENIZER.token_to_id(DOC) not in encode(TOKENIZER, "see <doc> and </s>")


def test_pieces_are_what_the_tokenizer_sees() -> None:
    text = " According to the register, she lives in Oston."
    assert len(pieces(text)) == len(TOKENIZER.encode(text).ids)


@pytest.mark.skipif(not (WEIGHTS / "tokenizer.json").exists(), reason="no exported model")
def test_the_shipped_tokenizer_is_the_built_one() -> None:
    shipped = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    assert shipped.get_vocab() == TOKENIZER.get_vocab()
