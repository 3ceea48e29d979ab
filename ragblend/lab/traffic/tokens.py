"""Texts as token ids: by a model's tokenizer or, if no model is named, estimated from the characters.

The estimate cuts words into pieces of a few letters, so that a passage has the same pieces at any position. The id
of a piece depends on its text alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

# Of English prose and Markdown, SmolLM2's tokenizer makes a token per word and per mark, and two or more of long words;
# scripts that put no space between words have about one per letter.
_PIECE = re.compile(
    r"[^\S\n]?[^\W\d_\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]{1,9}"
    r"|\d{1,3}|\n+|[^\S\n]+|\w|[^\w\s]{1,2}"
)


class EstimatingTokenizer:
    """A tokenizer without a model. It cuts a text into about as many pieces as a model's tokenizer makes tokens."""

    name, is_estimate = "estimate", True

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def ids(self, text: str) -> Ids:
        """Return one id for each piece of `text`: 31 bits of the piece's checksum, so equal pieces have equal ids."""
        pieces = _PIECE.findall(text)
        ids = [zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF for piece in pieces]
        self._texts.update(zip(ids, pieces, strict=True))
        return np.asarray(ids, np.int32)

    def text(self, ids: Sequence[int]) -> str:
        """Return the joined text of the pieces with these ids. Ids that this tokenizer has not made are left out."""
        return "".join(self._texts.get(each, "") for each in ids)


class ModelTokenizer:
    """A model's tokenizer from transformers. It adds no chat template and no special tokens.

    `name`: the model's name in the analysis.
    """

    is_estimate = False

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, self.name = tokenizer, name
        tokenizer.model_max_length = 1 << 40  # no warning per long text

    def ids(self, text: str) -> Ids:
        """Return the token ids of a text."""
        clean = text.encode("utf-8", "replace").decode()  # lone surrogates, which no tokenizer takes
        return np.asarray(self._tokenizer(clean, add_special_tokens=False)["input_ids"], np.int32)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(ids)))


Tokenizer = EstimatingTokenizer | ModelTokenizer
