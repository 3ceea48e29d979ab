"""Messages to token ids, exactly as the model's own chat template and tokenizer make them.

A conversation is rendered by the chat template and the text is tokenized as a whole: the ids are those that the model
reads without ragblend. There is one exception. A control token that is written in the content of a message would end
its turn or open another; here it stays ordinary text. Only for such messages the rendered text is cut at the template's
own control tokens, where tokenizers cut as well, and what lies between is tokenized without control tokens.

Knows a Hugging Face tokenizer by its methods. Read `Renderer.render` first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ragblend.errors import UsageError
from ragblend.prompt.formats import is_markup

DELIMITER = "\n\n"
"""What prompts of ours have between chunks; it stands behind a chunk while the ids of the chunk are determined."""

_HEAD, _TAIL = "ragblendhead", "ragblendtail"
_PROBE = _HEAD + DELIMITER + _TAIL  # two paragraphs: the demo model's template frames all but the last as documents
_SENTINEL = "\ue0ff"  # a control token of `_plain_backend` alone: what is behind it is not the first text of a prompt

Turn = Mapping[str, Any]


class Rendered(NamedTuple):
    """A text, its token ids and, for each id, the characters of the text that it spells: [start, end)."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]

    def ids_within(self, start: int, end: int) -> tuple[int, ...]:
        """Return the ids that spell characters of text[start:end] and no others."""
        return tuple(
            token for token, (first, last) in zip(self.ids, self.spans, strict=True) if start <= first < last <= end
        )


class Renderer:
    """Renders prompts for a tokenizer with its chat template, or with `template`. Thread-safe.

    Raises UsageError for a tokenizer that is written in Python: it does not return which characters its tokens spell.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(
                f"the tokenizer is a {type(tokenizer).__name__}, which is written in Python and does not "
                "return which characters a token spells; load a fast one: AutoTokenizer.from_pretrained(model, "
                "use_fast=True)"
            )
        self._backend: Tokenizer = backend
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._control_ids = {
            text: token
            for text, token in tokenizer.get_added_vocab().items()
            if text.strip() and len(text) > 1 and (text in special or is_markup(text))
        }
        texts = sorted(self._control_ids, key=len, reverse=True)
        control = "|".join(map(re.escape, texts)) if texts else r"(?!)"
        self._control = re.compile(control)
        self._closing = re.compile(rf"(?:\s|{control})*\Z")

    def render(self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of a conversation, up to where the model's answer begins.

        `messages` and `tools` are what `tokenizer.apply_chat_template` takes. Raises UsageError where the template
        refuses them.
        """
        return self._render(messages, tools).ids

    def render_text(self, text: str) -> list[int]:
        """Return the ids of a plain string, with the special tokens that the tokenizer adds."""
        if not self._control.search(text):
            return list(self._tokenizer(text).input_ids)
        whole, inner = self._tokenizer("a").input_ids, self._backend.encode("a", add_special_tokens=False).ids
        start = next(place for place in range(len(whole)) if whole[place : place + len(inner)] == inner)
        word = _unused_word(text)
        found: list[str] = []
        ids = self._encode_protected(self._protect(text, word, found), word, found).ids
        return [*whole[:start], *ids, *whole[start + len(inner) :]]

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids that `text` has in a user's message with more text behind it.

        Tokens that spell characters of the template or of the delimiter as well are not among them. A space that the
        template writes before the text belongs to it, because most tokenizers make one token of a space and a word.
        """
        rendered = self._render([{"role": "user", "content": text + DELIMITER + _TAIL}])
        # The template may have changed whitespace, and put control tokens before the last paragraph.
        before_tail = rendered.text[: rendered.text.rindex(_TAIL)]
        end = self._closing.search(before_tail).start()  # type: ignore[union-attr]  # the pattern matches anywhere
        return rendered.ids_within(len(self._before_content), end)

    def prefix_ids(self, system: str | None = None) -> tuple[int, ...]:
        """Return the ids before a chunk that begins the first user message, which follows a system message if any."""
        turns = [] if system is None else [{"role": "system", "content": system}]
        rendered = self._render([*turns, {"role": "user", "content": _PROBE}])
        return rendered.ids_within(0, len(rendered.text[: rendered.text.rindex(_HEAD)].rstrip(" ")))

    @cached_property
    def _before_content(self) -> str:
        """What the template writes before a chunk that begins a conversation, without the last space."""
        return self._apply_template([{"role": "user", "content": _PROBE}]).partition(_HEAD)[0].rstrip(" ")

    def _render(self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> Rendered:
        written = json.dumps([*messages, *tools], ensure_ascii=False, default=str)
        if not self._control.search(written):
            text = self._apply_template(messages, tools)
            encoding = self._backend.encode(text, add_special_tokens=False)
            return Rendered(text, encoding.ids, encoding.offsets)
        word = _unused_word(written)
        found: list[str] = []
        text = self._apply_template(self._protect(messages, word, found), self._protect(tools, word, found))
        return self._encode_protected(text, word, found)

    def _apply_template(self, messages: Sequence[Turn], tools: Sequence[Any] = ()) -> str:
        """Return the text that the chat template makes."""
        more = {"tools": list(tools)} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=True, **more
            )
        except Exception as error:  # templates raise jinja2 errors of many kinds
            roles = [turn.get("role") for turn in messages]
            raise UsageError(f"the model's chat template rejects the turns {roles}: {error}") from error
        return str(text)

    # --- control tokens in contents ---

    def _protect(self, value: Any, word: str, found: list[str]) -> Any:
        """Return `value` with a placeholder for each control token in its strings, which are added to `found`."""
        if isinstance(value, str):

            def replace(match: re.Match[str]) -> str:
                found.append(match.group())
                return f"{word}{len(found) - 1}end"

            return self._control.sub(replace, value)
        if isinstance(value, Mapping):
            return {name: self._protect(item, word, found) for name, item in value.items()}
        if isinstance(value, Iterable):
            return [self._protect(item, word, found) for item in value]
        return value

    def _encode_protected(self, text: str, word: str, found: Sequence[str]) -> Rendered:
        """Return the ids of `text` with what its placeholders stand for as ordinary text."""
        placeholder = re.compile(rf"{word}(\d+)end")
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        whole = ""
        for piece in self._control_with_space.split(text):
            token = self._control_ids.get(piece.strip())
            if token is not None:
                ids.append(token)
                spans.append((len(whole), len(whole) + len(piece)))
                whole += piece
            elif piece:
                plain = placeholder.sub(lambda match: found[int(match.group(1))], piece)
                lead = _SENTINEL if whole else ""
                encoding = self._plain_backend.encode(lead + plain, add_special_tokens=False)
                shift = len(whole) - len(lead)
                ids += [self._original_ids.get(each, each) for each in encoding.ids[len(lead) :]]
                spans += [(first + shift, last + shift) for first, last in encoding.offsets[len(lead) :]]
                whole += plain
        return Rendered(whole, ids, spans)

    @cached_property
    def _control_with_space(self) -> re.Pattern[str]:
        """A pattern of the control tokens with the whitespace that each of them swallows, in one group."""
        tokens = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
        patterns = [
            (r"\s*" if tokens[text].lstrip else "") + re.escape(text) + (r"\s*" if tokens[text].rstrip else "")
            for text in sorted(self._control_ids, key=len, reverse=True)
        ]
        return re.compile(f"({'|'.join(patterns)})")

    @cached_property
    def _plain_backend(self) -> Tokenizer:
        """The tokenizer without its control tokens."""
        state = json.loads(self._backend.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in self._control_ids]
        state |= {"post_processor": None, "truncation": None, "padding": None}
        backend = Tokenizer.from_str(json.dumps(state))
        backend.add_special_tokens([_SENTINEL])
        return backend

    @cached_property
    def _original_ids(self) -> dict[int, int]:
        """The ids of added tokens that `_plain_backend` numbers otherwise."""
        original = self._tokenizer.get_added_vocab()
        added = self._plain_backend.get_added_tokens_decoder()
        return {number: original[token.content] for number, token in added.items() if token.content in original}


def _unused_word(text: str) -> str:
    """Return a word that `text` does not have."""
    word = "ragblendcontrol"
    while word in text:
        word += "x"
    return word
