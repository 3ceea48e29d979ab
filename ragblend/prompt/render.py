"""Renderer: messages to token ids by the model's own chat template and tokenizer, and ids back to text.

The chat template renders a conversation, and the text is tokenized as a whole: the ids are those that the model reads
without ragblend. There is one exception. A control token in the content of a message would end its turn or begin
another, so it is encoded as ordinary text. The rendered text of such messages is cut at the template's own control
tokens, where tokenizers cut as well, and the pieces are tokenized without control tokens.

Depends on the methods of a Hugging Face tokenizer. Read `Renderer.render` first.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ragblend.errors import UsageError
from ragblend.prompt.template import PINNED_CLOCK, PLAIN_TEMPLATE, Turn, as_turn, controls_model, turn_arrangements
from ragblend.prompt.tools import HERMES, CallFormat, find_call_format, tool_use_as_text
from ragblend.prompt.types import CHUNK_SEPARATOR, Message, Prompt

NEUTRAL_TEXT = Path(__file__).with_name("neutral.txt").read_text(encoding="utf-8").strip()
"""Text about nothing in particular, after which neutral variants of chunks are computed. It is part of their keys."""

_HEAD, _TAIL = "ragblendhead", "ragblendtail"
_PROBE = _HEAD + CHUNK_SEPARATOR + _TAIL  # two paragraphs: the demo model's template frames all but the last
_WORD = "ragblendcontrol"  # placeholder of a control token in a content while the template renders it
_CHARACTER_TOKENS = 4  # most tokens of one character: its bytes in UTF-8
_CACHED_CHUNKS = 16_384  # texts, each with four bytes a token


class TokenizedText(NamedTuple):
    """Text, its token ids and, for each id, the characters of the text that it encodes: [start, end)."""

    text: str
    ids: list[int]
    offset_mapping: list[tuple[int, int]]

    def ids_within(self, start: int, end: int) -> tuple[int, ...]:
        """Return the ids that encode characters of text[start:end] and no others."""
        pairs = zip(self.ids, self.offset_mapping, strict=True)
        return tuple(token for token, (first, last) in pairs if start <= first < last <= end)


class Renderer:
    """Renderer of prompts by a tokenizer and `template`, by default the tokenizer's chat template. Thread-safe.

    Raises UsageError for a slow tokenizer (written in Python), which does not return the characters of each token.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(
                f"the tokenizer is a {type(tokenizer).__name__}, which is written in Python and does not "
                "return the characters of each token; load a fast one: AutoTokenizer.from_pretrained(model, "
                "use_fast=True)"
            )
        self.backend: Tokenizer = backend
        # A tokenizer's file may turn both on; transformers turns them off for each call without them.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if template is None:
            has_own = bool(getattr(tokenizer, "chat_template", None))
            template = str(tokenizer.get_chat_template()) if has_own else self._first_control() + PLAIN_TEMPLATE
        self._template = template
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._control_ids = {
            text: token
            for text, token in tokenizer.get_added_vocab().items()
            if text.strip() and len(text) > 1 and (text in special or controls_model(text))
        }
        texts = sorted(self._control_ids, key=len, reverse=True)
        control = "|".join(map(re.escape, texts)) if texts else r"(?!)"
        self._control = re.compile(control)
        self._closing = re.compile(rf"(?:\s|{control})*\Z")
        self._cached_chunk_ids = lru_cache(_CACHED_CHUNKS)(self._find_chunk_ids)
        is_dated = "strftime_now" in template
        self._cached_prefix_ids = self._find_prefix_ids if is_dated else lru_cache(64)(self._find_prefix_ids)
        self._plain_backend = lru_cache(2)(self._make_plain_backend)

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hex digits that depend only on the tokenizer and on whether there is a chat template."""
        kind = "plain" if self._template.endswith(PLAIN_TEMPLATE) else "chat"
        return hashlib.blake2b(f"{kind}\0{self.backend.to_str()}".encode(), digest_size=8).hexdigest()

    # --- prompts ---

    def render(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt, up to where the model's answer begins.

        The ids equal those of `tokenizer.apply_chat_template`, or for plain text those of `tokenizer(text)`. If the
        template does not support tools, the system message describes them. If the template rejects the turns, other
        arrangements are rendered (`turn_arrangements`). Raises UsageError if the template rejects all of them.
        """
        if not prompt.is_chat:
            return self.encode_with_special_tokens(prompt.messages[0].content)
        if prompt.uses_tools and not self.knows_tools:
            prompt = tool_use_as_text(prompt)
        refusals = list[UsageError]()
        for messages in turn_arrangements(prompt):
            try:
                turns = [as_turn(message) for message in messages]
                if self._control.search("\n".join(_texts_in([*turns, *prompt.tools]))):
                    return self._render(turns, prompt.tools).ids
                text = self._apply_template(turns, prompt.tools)
                return list(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            except UsageError as error:
                refusals.append(error)
        raise refusals[0]

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the ids of a plain string, with the special tokens that the tokenizer adds."""
        if not self._control.search(text):
            return list(self._tokenizer(text, verbose=False).input_ids)
        before, after = self.added_ids
        return [*before, *self.text_ids(text), *after]

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens; control tokens in it are ordinary text."""
        if not self._control.search(text):
            return list(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        word = _unused_word(text)
        originals: list[str] = []
        return self._encode_protected(self._protect(text, word, originals), word, originals).ids

    @cached_property
    def tail_ids(self) -> tuple[int, ...]:
        """Return the ids that the template writes after the content of the last user message."""
        rendered = self._render([{"role": "user", "content": _PROBE}])
        return rendered.ids_within(rendered.text.rindex(_TAIL) + len(_TAIL), len(rendered.text))

    # --- chunks ---

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of `text` inside a user's message. White space at both ends of `text` is ignored.

        Tokens that also encode characters of the template or of the separator are left out. A space that the template
        writes before the text is included, because most tokenizers make one token of a space and a word.
        """
        return tuple(self._cached_chunk_ids(text.strip()))

    def _find_chunk_ids(self, text: str) -> array[int]:
        if not text:
            return array("I")
        rendered = self._render([{"role": "user", "content": text + CHUNK_SEPARATOR + _TAIL}])
        # The template may have changed whitespace, or written control tokens before the last paragraph.
        before_tail = rendered.text[: rendered.text.rindex(_TAIL)]
        end = self._closing.search(before_tail).start()  # type: ignore[union-attr]  # the pattern matches anywhere
        return array("I", rendered.ids_within(len(self._before_content), end))

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of `text` as a chunk."""
        return len(self.chunk_ids(text) if self._rewrites_contents else self.text_ids(text))

    def prefix_ids(self, system: str | None = None, *, pins_date: bool = False) -> tuple[int, ...]:
        """Return the ids of everything before the first user message's text: template header, system message if any.

        The result is () if the template accepts no arrangement of these messages. `pins_date`: True makes a template
        that writes today's date write `PINNED_DATE` instead.
        """
        if pins_date and "strftime_now" in self._template:
            return Renderer(self._tokenizer, PINNED_CLOCK + self._template).prefix_ids(system)
        return self._cached_prefix_ids(system)

    def _find_prefix_ids(self, system: str | None) -> tuple[int, ...]:
        turns = [] if system is None else [Message("system", system)]
        for messages in turn_arrangements(Prompt.from_messages([*turns, ("user", _PROBE)])):
            try:
                rendered = self._render([as_turn(message) for message in messages])
            except UsageError:
                continue
            return rendered.ids_within(0, len(rendered.text[: rendered.text.rindex(_HEAD)].rstrip(" ")))
        return ()

    @cached_property
    def added_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the tokenizer adds before a plain text, and those that it adds after it."""
        whole, inner = self._tokenizer("a").input_ids, self.text_ids("a")
        starts = (start for start in range(len(whole)) if whole[start : start + len(inner)] == inner)
        start = next(starts, None)
        return ((), ()) if start is None else (tuple(whole[:start]), tuple(whole[start + len(inner) :]))

    @cached_property
    def separator_ids(self) -> tuple[int, ...]:
        """Return the ids between two chunks that a blank line separates."""
        second = _HEAD + "two"
        rendered = self._render([{"role": "user", "content": CHUNK_SEPARATOR.join((_HEAD, second, _TAIL))}])
        first = rendered.text.index(_HEAD) + len(_HEAD)
        return rendered.ids_within(first, len(rendered.text[: rendered.text.index(second)].rstrip(" ")))

    @cached_property
    def neutral_ids(self) -> tuple[int, ...]:
        """Return the ids of the neutral text as a chunk, followed by the ids of the separator between two chunks."""
        return self.chunk_ids(NEUTRAL_TEXT) + self.separator_ids

    @cached_property
    def _before_content(self) -> str:
        """Return the template's text before a chunk that begins a conversation, without the last space."""
        return self._apply_template([{"role": "user", "content": _PROBE}]).partition(_HEAD)[0].rstrip(" ")

    @cached_property
    def _rewrites_contents(self) -> bool:
        """Return True if the template changes the whitespace inside a message's content."""
        probe = f"{_HEAD}  two\nthree{CHUNK_SEPARATOR}{_TAIL}"
        return probe not in self._apply_template([{"role": "user", "content": probe}])

    # --- answers ---

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer's ids, without control tokens and without `whitespace_before_answer`."""
        return self.plain_text(token_ids).removeprefix(self.whitespace_before_answer)

    def plain_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without control tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)) if token_ids else ""

    @cached_property
    def whitespace_before_answer(self) -> str:
        """Return the whitespace that the template writes before an answer; "" if none. `decode` removes it."""
        turns = [{"role": "user", "content": "x"}]
        try:
            begun = self._apply_template(turns)
            whole = self._apply_template([*turns, {"role": "assistant", "content": _HEAD}], add_generation_prompt=False)
        except UsageError:
            return ""
        lead = whole[len(begun) :].partition(_HEAD)[0] if whole.startswith(begun) else ""
        return lead if lead.isspace() else ""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of every id, control tokens included. The joined texts equal the text of all ids.

        If several tokens encode one character, the last of them has the character and the others have "".
        """
        texts, start = [], 0
        for end in range(1, len(token_ids) + 1):
            # Two more ids at the front, because some tokenizers drop the space of the first id that they decode.
            before = max(0, start - 2)
            before_text = self._raw_text(token_ids[before:start])
            text = self._raw_text(token_ids[before:end])
            unfinished = text.endswith("\ufffd") and end < len(token_ids) and end - start < _CHARACTER_TOKENS
            texts.append("" if unfinished else text[len(before_text) :])
            start = start if unfinished else end
        return texts

    def _raw_text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False)) if token_ids else ""

    def split_control_tokens(self, text: str) -> list[str | int]:
        """Split `text` into plain text (str) and the ids of its control tokens (int), in order."""
        pieces: list[str | int] = []
        start = 0
        for match in self._control.finditer(text):
            pieces += [text[start : match.start()], self._control_ids[match.group()]]
            start = match.end()
        return [piece for piece in (*pieces, text[start:]) if piece != ""]

    def stop_ids(self) -> frozenset[int]:
        """Return the ids that end an answer according to the tokenizer."""
        end = self._tokenizer.eos_token_id
        return frozenset(end if isinstance(end, list) else [end] if end is not None else [])

    # --- tools ---

    @cached_property
    def call_format(self) -> CallFormat:
        """Return the format in which this model writes tool calls."""
        return self._own_call_format or HERMES

    @cached_property
    def call_format_in_text(self) -> CallFormat:
        """Return `call_format` without the control tokens, which decoding removes from an answer's text."""

        def show(text: str) -> str:
            return "".join(p if isinstance(p, str) else self.plain_text([p]) for p in self.split_control_tokens(text))

        return self.call_format.without_control_tokens(show)

    @property
    def knows_tools(self) -> bool:
        """Return True if the template shows tools, calls and their results."""
        return self._own_call_format is not None

    @cached_property
    def _own_call_format(self) -> CallFormat | None:
        """Return the call format of the template; None if it does not support tools with arguments as JSON."""
        return find_call_format(self._apply_template) if "tools" in self._template else None

    # --- the template ---

    def _render(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> TokenizedText:
        written = "\n".join(_texts_in([*turns, *tools]))
        if not self._control.search(written):
            text = self._apply_template(turns, tools)
            encoding = self.backend.encode(text, add_special_tokens=False)
            return TokenizedText(text, encoding.ids, encoding.offsets)
        word = _unused_word(written)
        originals: list[str] = []
        text = self._apply_template(self._protect(turns, word, originals), self._protect(tools, word, originals))
        return self._encode_protected(text, word, originals)

    def _apply_template(
        self, turns: Sequence[Turn], tools: Sequence[Any] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """Return the text that the chat template renders. By default the text ends where the model's answer begins."""
        more = {"tools": list(tools)} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(
                list(turns),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **more,
            )
        except Exception as error:  # templates raise jinja2 errors of many kinds
            roles = [turn.get("role") for turn in turns]
            raise UsageError(f"the model's chat template rejects the turns {roles}: {error}") from error
        return str(text)

    def _first_control(self) -> str:
        """Return template code for the BOS token if the tokenizer adds it before a text, else ""."""
        ids, bos = self._tokenizer("a").input_ids, self._tokenizer.bos_token
        return "{{ bos_token }}" if bos and ids and ids[0] == self._tokenizer.bos_token_id else ""

    # --- control tokens in contents ---

    def _protect(self, value: Any, word: str, originals: list[str]) -> Any:
        """Return `value` with a placeholder for each control token in its strings, which are added to `originals`."""
        if isinstance(value, str):

            def replace(match: re.Match[str]) -> str:
                originals.append(match.group())
                return f"{word}{len(originals) - 1}end"

            return self._control.sub(replace, value)
        if isinstance(value, Mapping):
            return {
                self._protect(name, word, originals): self._protect(item, word, originals)
                for name, item in value.items()
            }
        if isinstance(value, Iterable):
            return [self._protect(item, word, originals) for item in value]
        return value

    def _encode_protected(self, text: str, word: str, originals: Sequence[str]) -> TokenizedText:
        """Return the ids of `text`, in which each placeholder is replaced by its control token as ordinary text."""
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
                plain = placeholder.sub(lambda match: originals[int(match.group(1))], piece)
                # The word is a control token before the piece, so that it is not encoded as the first text of a prompt.
                lead, num_lead = (word, 1) if whole else ("", 0)
                encoding = self._plain_backend(word).encode(lead + plain, add_special_tokens=False)
                shift = len(whole) - len(lead)
                ids += [self._original_ids.get(each, each) for each in encoding.ids[num_lead:]]
                spans += [(first + shift, last + shift) for first, last in encoding.offsets[num_lead:]]
                whole += plain
        return TokenizedText(whole, ids, spans)

    @cached_property
    def _control_with_space(self) -> re.Pattern[str]:
        """Return a pattern of the control tokens, each with the whitespace that it strips, in one group."""
        tokens = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
        patterns = [
            (r"\s*" if tokens[text].lstrip else "") + re.escape(text) + (r"\s*" if tokens[text].rstrip else "")
            for text in sorted(self._control_ids, key=len, reverse=True)
        ]
        return re.compile(f"({'|'.join(patterns)})")

    def _make_plain_backend(self, word: str) -> Tokenizer:
        """Return the tokenizer without its control tokens, but with `word` as one."""
        state = json.loads(self.backend.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in self._control_ids]
        state |= {"post_processor": None, "truncation": None, "padding": None}
        backend = Tokenizer.from_str(json.dumps(state))
        backend.add_special_tokens([word])
        return backend

    @cached_property
    def _original_ids(self) -> dict[int, int]:
        """Return the original ids of added tokens, by their ids in `_plain_backend`."""
        original = self._tokenizer.get_added_vocab()
        added = self._plain_backend(_WORD).get_added_tokens_decoder()
        return {number: original[token.content] for number, token in added.items() if token.content in original}


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all strings in `value`, keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in([*value, *value.values()])
    elif isinstance(value, Iterable):
        for item in value:
            yield from _texts_in(item)


def _unused_word(text: str) -> str:
    """Return a word that is not in `text`."""
    word = _WORD
    while word in text:
        word += "x"
    return word
