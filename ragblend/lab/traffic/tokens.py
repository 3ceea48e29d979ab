"""Texts as token ids: by a model's tokenizer, or estimated from the characters where no model is named.

The estimate cuts words into pieces of a few letters, so that a passage has the same pieces wherever it stands. What a
piece is called follows from its text alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
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


class Estimate:
    """Pieces of words for tokens. `keep_texts`: remember what the pieces are, for `text`."""

    name, is_estimate = "estimate", True

    def __init__(self, keep_texts: bool = False) -> None:
        self._texts: dict[int, str] | None = {} if keep_texts else None

    def ids(self, text: str) -> Ids:
        """The pieces' ids."""
        pieces = _PIECE.findall(text)
        ids = np.fromiter(map(_number, pieces), np.int32, len(pieces))
        if self._texts is not None:
            self._texts.update(zip(ids.tolist(), pieces, strict=True))
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """The pieces' texts."""
        return "".join((self._texts or {}).get(each, "") for each in ids)


@lru_cache(1 << 18)
def _number(piece: str) -> int:
    """A piece's id: 31 bits of its checksum."""
    return zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF


class ModelTokens:
    """A transformers tokenizer. Every text is tokenized alone, without special tokens."""

    is_estimate = False

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, self.name = tokenizer, name
        tokenizer.model_max_length = 1 << 40  # no warning per long text

    def ids(self, text: str) -> Ids:
        """Its token ids."""
        clean = text.encode("utf-8", "replace").decode()  # lone surrogates, which no tokenizer takes
        return np.asarray(self._tokenizer(clean, add_special_tokens=False)["input_ids"], np.int32)

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids)))


Tokens = Estimate | ModelTokens
