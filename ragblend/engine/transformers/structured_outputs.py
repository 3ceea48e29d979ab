"""Constrained decoding by llguidance: an answer follows a JSON schema, a regular expression or a grammar.

`GrammarCompiler.compile` validates a request, and `CompiledGrammar.new_guide` returns a constraint for one answer. The
constraint masks the logits before a token is chosen. It also returns forced tokens, which need no decode step. Depends
on tokenizers and logits, not on prompts, tools or KV.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragblend.errors import RagblendError, UsageError
from ragblend.prompt.render import Renderer

# JSON as `json.dumps` writes it, the layout in chat templates. Free whitespace lets a small model repeat it endlessly.
_LAYOUT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": True}
MAX_CACHED_GRAMMARS = 64
"""Compiled grammars kept per model."""
MAX_CACHED_MASKS = 128
"""Unpacked token masks kept, a byte for each token of the vocabulary."""
FORGOTTEN_AFTER = 1000
"""Answers of a grammar that share one cache of token masks in llguidance."""
Refused = Callable[[bytes, int, torch.device], Tensor]
_INSTALL = "structured_outputs, tools and schemas need llguidance here: pip install 'ragblend[structured]'"


class GrammarCompiler:
    """Compiles `structured_outputs` for one model. Safe to share between threads.

    `renderer` has the model's tokenizer. `vocab_size`: number of logits. `stop_ids`: tokens that end an answer.
    """

    def __init__(self, renderer: Renderer, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._renderer, self._vocab_size, self._stop_ids = renderer, vocab_size, sorted(stop_ids)
        self._compile = lru_cache(MAX_CACHED_GRAMMARS)(self._compile_json)
        # Masks recur (nearly all within a string are equal), and unpacking one takes as long as computing it.
        self._refused: Refused = lru_cache(MAX_CACHED_MASKS)(_refused)

    def compile(self, structured_outputs: Mapping[str, Any]) -> CompiledGrammar:
        """Return the grammar that `structured_outputs` of a request describes. Raises UsageError if it is invalid.

        Raises ImportError if llguidance is not installed. The message has the install command.
        """
        ((kind, value),) = structured_outputs.items()
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"structured_outputs has a {kind} that is not JSON ({error}); give plain values"
            ) from error
        return self._compile(kind, text)

    def _compile_json(self, kind: str, text: str) -> CompiledGrammar:
        """Return the grammar of this kind whose value is the JSON `text`."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ImportError(_INSTALL) from error
        value = json.loads(text)
        try:
            grammar = self._grammar(kind, value)
            problem = LLMatcher.validate_grammar(grammar, self._tokenizer)
            if problem and kind == "structural_tag":
                problem = self._narrowed(value) or problem
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            reason = " ".join(problem.split())[:500]
            raise UsageError(
                f"structured_outputs has a {kind} that cannot be followed ({reason}); correct it, or leave it out"
            )
        return CompiledGrammar(self._tokenizer, grammar, self._refused)

    def _narrowed(self, tag: Any) -> str:
        """Return the problem of the first invalid schema in a structural tag; "" if each is valid alone."""
        from llguidance import LLMatcher

        for begin, schema in _schemas(_read(tag)):
            problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(_laid_out(schema)), self._tokenizer)
            if problem:
                return f"after {begin!r}: {problem}"
        return ""

    @cached_property
    def _tokenizer(self) -> Any:
        """Return llguidance's tokenizer of the model, made at first use: a third of a second for 50,000 tokens."""
        from llguidance import LLTokenizer

        backend = self._renderer.backend
        size = max(self._vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self._stop_ids or None)

    def _grammar(self, kind: str, value: Any) -> str:
        from llguidance import LLMatcher

        if kind == "regex":
            return LLMatcher.grammar_from_regex(value)
        if kind == "grammar":
            return LLMatcher.grammar_from_lark(value)
        if kind == "choice":
            options = " | ".join(map(self._literal, [value] if isinstance(value, str) else value))
            if not options:
                raise ValueError("there is nothing to choose from")
            return LLMatcher.grammar_from_lark(f"start: {options}")
        if kind == "structural_tag":
            return LLMatcher.grammar_from_lark(_LarkBuilder(self._literal).lark(_read(value)["format"]))
        schema = {"type": "object"} if kind == "json_object" else _read(value)
        return LLMatcher.grammar_from_json_schema(_laid_out(schema))

    def _literal(self, text: str) -> str:
        """Return `text` in Lark, with control tokens that have no characters by their ids."""
        words = []
        for piece in self._renderer.split_control_tokens(text):
            if isinstance(piece, int) and self._tokenizer.is_special_token(piece):
                words.append(f"<[{piece}]>")
            else:
                piece_text = piece if isinstance(piece, str) else self._tokenizer.decode_str([piece])
                words.append(json.dumps(piece_text, ensure_ascii=False))
        return " ".join(words) or '""'


class CompiledGrammar:
    """One grammar over one model's tokens. Any number of answers may use it at the same time.

    `refused` converts llguidance's bit mask to a mask of the tokens that may not follow (see `_refused`).
    """

    def __init__(self, tokenizer: Any, grammar: str, refused: Refused) -> None:
        self._tokenizer, self._grammar, self._refused = tokenizer, grammar, refused
        self._lock = threading.Lock()
        self._first: Any = None
        self._num_guides = 0

    def new_guide(self) -> TokenGuide:
        """Return a new TokenGuide for one answer.

        Guides share llguidance's cache of token masks, which makes masks several times as fast. The cache never
        shrinks, so a new cache is begun after every FORGOTTEN_AFTER guides.
        """
        from llguidance import LLMatcher

        with self._lock:
            if self._num_guides % FORGOTTEN_AFTER == 0:
                self._first = LLMatcher(self._tokenizer, self._grammar)
            self._num_guides += 1
            return TokenGuide(self._first.deep_copy(), self._refused)


class TokenGuide:
    """Constrains one answer to a grammar, token by token. `ended`: the answer is complete, so no token may follow."""

    def __init__(self, matcher: Any, refused: Refused) -> None:
        self.ended = False
        self._matcher, self._refused = matcher, refused

    def mask_logits(self, logits: Tensor) -> Tensor:
        """Return a copy of `logits` [vocabulary] that is minus infinity for each token that may not follow.

        Ids beyond the tokenizer's tokens, which only pad the vocabulary, are minus infinity, too.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        return logits.masked_fill(self._refused(bits, len(logits), logits.device), float("-inf"))

    def accept_with_forced(self, token: int, max_tokens: int) -> list[int]:
        """Accept `token`. Return it and the tokens after it that the grammar forces, at most `max_tokens` in all."""
        if not self._matcher.consume_token(token):
            self._check()
        forced = self._matcher.compute_ff_tokens()[: max_tokens - 1] if max_tokens > 1 else []
        if forced and not self._matcher.consume_tokens(forced):
            self._check()
        self.ended = self._matcher.is_stopped()
        return [token, *forced]

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())[:300]
            raise RagblendError(f"the answer cannot follow structured_outputs any further ({reason}); simplify them")


def _refused(bits: bytes, size: int, device: torch.device) -> Tensor:
    """Return a bool mask [size] of the tokens that may not follow, from llguidance's bit mask of those that may."""
    packed = ~np.frombuffer(bits, dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(packed, bitorder="little", count=size).view(np.bool_)).to(device)


def _read(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _schemas(format: Any, begin: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the schemas in a structural tag, each after the text that precedes it."""
    if isinstance(format, Mapping) and "json_schema" in format:
        yield begin, format["json_schema"]
    elif isinstance(format, Mapping | list):
        begin = format.get("begin", begin) if isinstance(format, Mapping) else begin
        for each in format.values() if isinstance(format, Mapping) else format:
            yield from _schemas(each, begin)


def _laid_out(schema: Any) -> Any:
    """Return a JSON schema with `_LAYOUT`, unless it has a layout (llguidance reads it under "x-guidance")."""
    if not isinstance(schema, Mapping):
        raise TypeError(f"{schema!r} is no JSON schema; pass an object such as {{'type': 'object', ...}}")
    closed: dict[str, Any] = _closed(schema)
    return {"x-guidance": _LAYOUT, **closed}


_ALTERNATIVES = ("anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions")
# Formats of Pydantic and OpenAPI that do not restrict a string or number; llguidance rejects such names.
_FORMLESS = {"path", "file-path", "directory-path", "password", "binary", "byte", "int32", "int64", "float", "double"}


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have only the named properties, unless it allows others.

    A small model would otherwise invent properties; vLLM closes schemas, too. Schemas with allOf or $ref are unchanged.
    """
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in _NAMED:
        if isinstance(closed.get(name), Mapping):
            closed[name] = {key: _closed(value) for key, value in closed[name].items()}
    for name in _ALTERNATIVES:
        if isinstance(closed.get(name), list):
            closed[name] = [_closed(each) for each in closed[name]]
    for name in ("items", "additionalProperties"):
        closed |= {name: _closed(closed[name])} if name in closed else {}
    if isinstance(closed.get("format"), str) and closed["format"] in _FORMLESS:
        del closed["format"]
    alone = not {"allOf", "$ref", "anyOf", "oneOf", "patternProperties", "additionalProperties"} & set(closed)
    return closed | ({"additionalProperties": False} if "properties" in closed and alone else {})


class _LarkBuilder:
    """Builder of a Lark grammar from a structural tag's format, as vLLM and xgrammar define it."""

    def __init__(self, literal: Any) -> None:
        self._literal = literal
        self._rules: list[str] = []

    def lark(self, format: Mapping[str, Any]) -> str:
        """Return the grammar. Raises ValueError for an unknown type of format."""
        start = self._rule(format)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _rule(self, format: Mapping[str, Any]) -> str:
        """Add a rule for `format` and return its name."""
        kind = format["type"]
        make = getattr(self, f"_{kind}", None)
        if make is None:
            raise ValueError(f"a structural tag has the type {kind!r}, which ragblend does not support")
        name = f"rule_{len(self._rules)}"
        self._rules.append("")  # reserved, because the rules inside it are added first
        self._rules[int(name[5:])] = f"{name}: {make(format)}"
        return name

    def _const_string(self, format: Mapping[str, Any]) -> str:
        return str(self._literal(format["value"]))

    def _json_schema(self, format: Mapping[str, Any]) -> str:
        return f"%json {json.dumps(_laid_out(format['json_schema']))}"

    def _any_text(self, format: Mapping[str, Any]) -> str:
        return r"/(.|\n)*/"

    def _sequence(self, format: Mapping[str, Any]) -> str:
        return " ".join(map(self._rule, format["elements"]))

    def _or(self, format: Mapping[str, Any]) -> str:
        return " | ".join(map(self._rule, format["elements"]))

    def _tag(self, format: Mapping[str, Any], trigger: str = "") -> str:
        begin = self._literal(format["begin"].removeprefix(trigger))
        return f"{begin} {self._rule(format['content'])} {self._literal(format['end'])}"

    def _tags_with_separator(self, format: Mapping[str, Any]) -> str:
        tags = "(" + " | ".join(self._rule({"type": "tag", **tag}) for tag in format["tags"]) + ")"
        more = "" if format.get("stop_after_first") else f" ({self._literal(format['separator'])} {tags})*"
        return f"{tags}{more}" if format.get("at_least_one") else f"({tags}{more})?"

    def _triggered_tags(self, format: Mapping[str, Any]) -> str:
        """Return a rule for text with tags, each of which begins at a trigger.

        A trigger that is a control token ends the text. A trigger of several tokens is matched lazily in the text.
        """
        heads = []
        for trigger in format["triggers"]:
            bodies = [f"({self._tag(tag, trigger)})" for tag in format["tags"] if tag["begin"].startswith(trigger)]
            name = f"head_{len(self._rules)}"
            written = self._literal(trigger)
            lazy = "" if written.startswith("<[") else "[lazy]"
            self._rules.append(f"{name}{lazy}: /(.|\\n)*/ {written}")
            heads.append(f"{name} ({' | '.join(bodies)})")
        one = "(" + " | ".join(heads) + ")"
        if format.get("stop_after_first"):
            return one if format.get("at_least_one") else f"{one} | /(.|\\n)*/"
        return f"{one}{'+' if format.get('at_least_one') else '*'} /(.|\\n)*/"
