"""The demo model's tokenizer: byte-level BPE, so any text round-trips, in which every word of the world is one token.

A word is one token only with its leading space, so the prompt format puts a space before untrusted text
(`text_lead`). Special tokens are written by `SPECIAL_TOKENS`; text is always encoded without parsing them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import vocab, world

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
DOC, QUESTION, ANSWER, SYSTEM = "<doc>", "<q>", "<a>", "<sys>"
SPECIAL_TOKENS = (PAD, BOS, EOS, DOC, QUESTION, ANSWER, SYSTEM)

SYSTEM_TEXTS = (
    "You answer questions from the records.",
    "Answer with the words of the documents.",
    "You are a helpful assistant. Use only the records below.",
    "Say so when something is not stated.",
)

CHAT_TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m['role'] == 'system' %}<sys> {{ m['content'].split() | join(' ') }}{% endif %}{% endfor %}"
    "{% for d in documents or [] %}<doc> {{ d['text'].split() | join(' ') }}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set parts = m['content'].split('\n\n') if m['content'] is string"
    " else m['content'] | map(attribute='text') | list %}"
    "{% for p in parts[:-1] %}<doc> {{ p.split() | join(' ') }}{% endfor %}"
    "<q> {{ parts[-1].split() | join(' ') }}<a>"
    "{% elif m['role'] == 'assistant' %} {{ m['content'].split() | join(' ') }}</s>{% endif %}{% endfor %}"
)
"""System text, then `documents` and every part of a user message but the last as chunks, then the question.

Parts are the blocks of a content list, or the paragraphs of a string."""


def pieces(text: str) -> list[str]:
    """Words with their leading space, and punctuation: what the byte-level pre-tokenizer splits `text` into.

    >>> pieces(" In short, she lives in Oston.")
    [' In', ' short', ',', ' she', ' lives', ' in', ' Oston', '.']"""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]


@cache
def words() -> tuple[str, ...]:
    """Every piece that the world's documents, questions and answers can contain, sorted."""
    texts = [name for names in _names() for name in names]
    for relation in world.RELATIONS.values():
        texts += [*relation.phrases, *relation.questions]
    texts += [question for questions in world.TWO_HOPS.values() for question in questions]
    texts += [question for questions in world.COMPARISONS.values() for question, _ in questions]
    texts += [*world.STATEMENT_OPENINGS, *world.QUESTION_OPENINGS, *world.FILLERS, *SYSTEM_TEXTS]
    texts += [reference for references in world.REFERENCES.values() for reference in references]
    texts += ["the company", "the firm", "the city", "the town", "the project", "the programme", "the meeting"]
    texts += ["the session", "She", "He", "she", "he", "and", "#", "##", "Project", "The", "the", world.NOT_STATED]
    found: set[str] = set()
    for text in texts:
        plain = text.replace("{S}", "Sslot").replace("{O}", "Oslot").replace("{A}", "Aslot").replace("{B}", "Bslot")
        found.update(piece for piece in pieces(" " + plain) if "slot" not in piece)
    return tuple(sorted(found))


def _names() -> tuple[tuple[str, ...], ...]:
    return (
        vocab.FEMALE_NAMES, vocab.MALE_NAMES, vocab.LAST_NAMES, vocab.COMPANY_STEMS, vocab.PROJECT_NAMES,
        vocab.EVENT_TOPICS, vocab.EVENT_FORMS, *world.VALUES.values(),
    )  # fmt: skip


def build_tokenizer() -> Tokenizer:
    """The tokenizer, from the world's words alone; the same on every machine."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=20_000,  # never reached: merging ends when every word is one token
        special_tokens=list(SPECIAL_TOKENS),
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.encode_special_tokens = True  # text that spells "<doc>" is text
    tokenizer.train_from_iterator([word for word in words() for _ in range(3)], trainer)
    split = [word for word in words() if len(tokenizer.encode(word).ids) != 1]
    assert not split, f"not one token: {split[:5]}"
    return tokenizer


def save_tokenizer(directory: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja the way `AutoTokenizer` reads them."""
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(), pad_token=PAD, bos_token=BOS, eos_token=EOS,
        additional_special_tokens=[DOC, QUESTION, ANSWER, SYSTEM], model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that exists."""
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of untrusted `text`, whitespace collapsed, with its leading space."""
    ids: list[int] = tokenizer.encode(" " + " ".join(text.split()), add_special_tokens=False).ids
    return ids
