"""Fields and behaviour that the LangChain and the LlamaIndex models share: one engine, prompts, strictness.

`BlendModel` is the pydantic half of both; the frameworks' classes add their own messages and results. Read
`BlendModel._prepare` first: it turns the messages of a conversation into a Prompt. Does not depend on a framework.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    SkipValidation,
    ValidationError,
    field_serializer,
    model_validator,
)

from ragblend.engine.report import Generation
from ragblend.errors import PromptTooLongError, RagblendError, UsageError
from ragblend.frameworks.engines import close_at_exit, resolve_store, share_engine
from ragblend.option_fields import Validator, int_between, known_names_only, nearest, option
from ragblend.options import (
    MODEL_NAMES,
    RETRIES,
    SECONDS,
    TOOLS,
    TRUE_OR_FALSE,
    GenerationOptions,
    LoadOptions,
    Mode,
    ModelOptions,
    RatioChoice,
    is_url,
)
from ragblend.prompt.types import Chunk, Message, Prompt
from ragblend.redaction import hide_secrets, redact

if TYPE_CHECKING:
    from ragblend.engine.api import Engine, Stream
    from ragblend.engine.generation import Answer

MAX_ANSWERS = 128
"""Most answers to one prompt, as with OpenAI."""
TOOL_CHOICE = Validator(
    lambda value: isinstance(value, str | bool | Mapping), "auto, any, required, none or the name of a tool"
)
RESPONSE_FORMAT = Validator(lambda value: isinstance(value, Mapping), "a dictionary such as {'type': 'json_object'}")

ALSO_CALLED = {
    "model_name": "model",
    "base_url": "backend",
    "torch_dtype": "dtype",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
"""Names that other libraries have for fields, and ours. A call takes those whose field it may set."""
ENGINE_OPTIONS = {*MODEL_NAMES, *(each.name for each in fields(LoadOptions))} - {
    *("dtype", "device", "system", "namespace", "timeout", "max_retries", "api_key")
}
"""Arguments of `load_engine` that are no fields: `engine_options` holds them."""


class ChunkNotReusedError(RagblendError):
    """With `strict=True`: a chunk that should have been reused is not in the prompt, or its KV is not in the store."""


@known_names_only
@dataclass(frozen=True, slots=True)
class CallOptions(GenerationOptions):
    """Everything one call may set; the model's fields and its `call_options` are the defaults."""

    timeout: float | None = option(None, "Seconds for a whole answer.", SECONDS)
    strict: bool = option(False, "Raise where a chunk is not reused.", TRUE_OR_FALSE)
    tools: Sequence[Mapping[str, Any]] = option((), "Tools in OpenAI's form.", TOOLS)
    tool_choice: Any = option(None, "Whether to call a tool, or which.", TOOL_CHOICE)
    parallel_tool_calls: bool | None = option(None, "Whether there may be several calls.", TRUE_OR_FALSE)
    response_format: Any = option(None, "Form of the answer, as OpenAI has it.", RESPONSE_FORMAT)
    n: int | None = option(None, "Answers to one prompt.", int_between(1, MAX_ANSWERS))


_OPTION_NAMES = tuple(option.name for option in fields(CallOptions))
_PER_CALL_OPTIONS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "response_format"})  # no defaults
# Frameworks hand these down beside the user's own arguments; they say nothing to an engine.
_IGNORED_OPTIONS = frozenset(
    {"stream", "formatted", "ls_structured_output_format", "structured_output_format", "model"}
)
_ENGINE_FIELDS = frozenset(  # fields that decide which engine is opened
    {"model", "store", "backend", "dtype", "device", "system", "namespace", "max_retries", "engine_options"}
)
MAY_HOLD_SECRETS = ("backend", "engine_options", "call_options")
_LEGACY_TOOL_OPTIONS = ("functions", "function_call")  # what OpenAI called tools before
_OPENED_WITH: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""The fields that opened an engine, for each engine that a model opened. "pair": the loaded model that it was given."""


NamedMessage = tuple[Message, Sequence[Chunk]]
"""A message of a framework, and the chunks that it names."""


class Request(NamedTuple):
    """A prompt, and how to answer it."""

    prompt: Prompt
    options: CallOptions


class BlendModel(BaseModel):
    """Fields and behaviour common to every framework's model over one engine.

    Give `engine=`, or `model` and `store`; models of the same process that name the same ones share one engine.
    `model`: "demo", a Hugging Face id, a local path, or what transformers has loaded: a pair (model, tokenizer) or a
    pipeline. Left out, it is the model whose KV the store holds. `engine_options` are the other arguments of
    `load_engine`: remote, memory_gib, adapter, vllm_options and so on.

    A call may override the fields from `mode` to `strict`. `call_options` are the defaults of a call's options that are
    no fields: min_p, repetition_penalty, logit_bias, structured_outputs. Five names of other libraries are taken for
    ours: `model_name`, `base_url` (`backend`), `torch_dtype`, `max_new_tokens` and `max_completion_tokens`.

    A copy, deep or not, shares the engine. A pickled model is its settings: it opens its engine again where it is
    loaded, with the API key from the environment (`RAGBLEND_API_KEY`), because keys are not kept. Pickling a model that
    was given an engine, a loaded model or a store that is an object raises TypeError. `strict=True` raises
    ChunkNotReusedError when a prompt holds no known chunk, when the text of a chunk that it names is not in it, or when
    a chunk's KV is not in the store. The constructor raises UsageError for an unknown name and for a value that an
    option does not take.
    """

    _overflow_error: ClassVar[type[PromptTooLongError]] = PromptTooLongError  # as the framework wants to catch it
    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), hide_input_in_errors=True)

    model: Any = None  # a name or a path; of a loaded (model, tokenizer) its name is kept
    store: Any = None
    backend: str = "transformers"  # or "vllm", or a server's "http://HOST:PORT"
    dtype: Any = "auto"
    device: Any = "auto"
    system: str | None = None  # chunks are precomputed behind it, and it opens every prompt without a system message
    namespace: str = ""
    # Options of a call: CallOptions checks them, so that a model and a call take the same values.
    mode: SkipValidation[Mode] = "blend"
    rule: SkipValidation[str] = "auto"
    recompute_ratio: SkipValidation[RatioChoice] = None  # "auto" and None: as `ragblend calibrate` found, else default
    max_tokens: SkipValidation[int | None] = GenerationOptions().max_tokens
    temperature: SkipValidation[float | None] = 0.0
    top_p: SkipValidation[float | None] = None
    top_k: SkipValidation[int | None] = None
    seed: SkipValidation[int | None] = None
    stop: SkipValidation[list[str] | None] = None
    presence_penalty: SkipValidation[float | None] = None
    frequency_penalty: SkipValidation[float | None] = None
    logprobs: SkipValidation[bool | None] = None
    top_logprobs: SkipValidation[int | None] = None
    n: SkipValidation[int | None] = None  # answers to one prompt, in LangChain
    timeout: SkipValidation[float | None] = None  # seconds for a whole answer
    strict: SkipValidation[bool] = False
    call_options: dict[str, Any] | None = None
    max_retries: SkipValidation[int | None] = None  # of requests to a server
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)  # of a server; not kept here
    engine_options: dict[str, Any] | None = None
    engine: Any = Field(default=None, exclude=True, repr=False)  # an Engine

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _usage_error(error) from None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Return the fields by our names. Raises UsageError for a name that is no field, with the one to type."""
        if not isinstance(given, Mapping):
            return given
        given = _own_names(given)
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values() if field.alias)}
        for name in given:
            if name in ENGINE_OPTIONS:
                raise UsageError(f"{name} is an engine option: engine_options={{{name!r}: ...}}")
            if name in CALL_OPTIONS:
                raise UsageError(f"{name} is an option of a call; for every call: call_options={{{name!r}: ...}}")
            if name not in known:
                near = nearest(name, [*known, *ALSO_CALLED]) or nearest(name, [*ENGINE_OPTIONS, *CALL_OPTIONS])
                raise UsageError(f"{cls.__name__} has no option {name!r}{near}")
        return given

    def model_post_init(self, context: Any, /) -> None:
        """Check the settings, then load or share the engine."""
        super().model_post_init(context)
        key, self.api_key = self.api_key, None
        self.store = resolve_store(self.store)  # once: copies and pickles are made in other working folders
        _reject_unknown("call_options", self.call_options, CALL_OPTIONS)
        _reject_unknown("engine_options", self.engine_options, ENGINE_OPTIONS)
        self._options({})
        if self.max_retries is not None:
            RETRIES.validate("max_retries", self.max_retries)
        if self.engine is not None:
            self._adopt_engine()
        self._open_engine(key)

    def _adopt_engine(self) -> None:
        """Take the settings of the engine that was given, or drop it if the fields name another one."""
        opened = _OPENED_WITH.get(self.engine)
        if opened is not None and self.model_fields_set >= _ENGINE_FIELDS:
            # LangChain's configurable fields and `as_chat` make a model from every field of another model, whose
            # settings may have been changed.
            if opened != self._engine_settings() | {"pair": opened["pair"]}:
                self.engine = None
                self.model = opened["pair"] if opened["pair"] and self.model == opened["model"] else self.model
            return
        if self.engine_options:
            raise UsageError("engine_options make an engine, and the one given is made: hand them to load_engine")
        known = opened or {"model": self.engine.name, "system": getattr(self.engine, "system", None)}
        self.model = known["model"]
        for name in _ENGINE_FIELDS.intersection(known):
            if name not in self.model_fields_set or getattr(self, name) is None:
                setattr(self, name, known[name])

    @field_serializer(*MAY_HOLD_SECRETS)
    def _without_secrets(self, value: Any) -> Any:
        """What `model_dump` shows: logs and traces keep it."""
        return redact_setting(value)

    def __repr_args__(self) -> Any:
        return (
            (name, redact_setting(value) if name in MAY_HOLD_SECRETS else value)
            for name, value in super().__repr_args__()
        )

    def _engine_settings(self) -> dict[str, Any]:
        """The fields that decide which engine is opened; no secrets but those of `engine_options`."""
        return {name: getattr(self, name) for name in _ENGINE_FIELDS}

    def _open_engine(self, api_key: SecretStr | None = None) -> None:
        """Open the engine that the settings name, where there is none yet."""
        if self.engine is None:
            placed = ModelOptions.from_keywords(dtype=self.dtype, device=self.device)
            self.dtype, self.device = placed.dtype, placed.device
            pair = None
            if self.model is None and not is_url(self.backend):
                from ragblend.engine.load import remembered_model

                self.model = remembered_model(self.store)
            elif not isinstance(self.model, str | Path | None):
                from ragblend.engine.transformers.loaded_model import pair_name, validate_loaded_model

                pair = validate_loaded_model(self.model)
                self.model = pair_name(pair)
            self.model = None if self.model is None else str(self.model)
            options = {name: getattr(self, name) for name in ("backend", "dtype", "device", "system", "namespace")}
            if is_url(self.backend):
                options |= {"max_retries": self.max_retries}
                options |= {"api_key": api_key.get_secret_value() or None} if api_key is not None else {}
            self.engine = share_engine(pair or self.model, self.store, **options, **(self.engine_options or {}))
            self.model = self.model or self.engine.name  # the server's
            self.system = getattr(self.engine, "system", self.system)  # where none is given, what the store remembers
            _OPENED_WITH.setdefault(self.engine, self._engine_settings() | {"pair": pair})
        close_at_exit(self.engine)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy of the settings over the same engine, which is no value."""
        handlers = (self.__dict__.get(name) for name in ("callbacks", "callback_manager"))
        shared = (self.engine, self.store, *handlers)  # objects that are observed, and no values either
        return super().__deepcopy__({**(memo or {}), **{id(each): each for each in shared}})

    def __getstate__(self) -> dict[Any, Any]:
        """The settings that open the engine again. Raises TypeError where there are none."""
        opened = _OPENED_WITH.get(self.engine)
        given = "engine" if opened is None else "model" if opened["pair"] is not None else ""
        if not given and not isinstance(self.store, str | Path | None):
            given = "store"
        if given:
            name = type(self).__name__
            raise TypeError(
                f"this {name} was given its {given} as an object of this process, which cannot be pickled; name what "
                f"it is made of instead: {name}(model=..., store='DIR'). copy.deepcopy works, and shares it"
            )
        bare = copy(self)
        del bare.__dict__["engine"]
        return super(BlendModel, bare).__getstate__()

    def __setstate__(self, state: dict[Any, Any]) -> None:
        BaseModel.__setstate__(self, state)
        self.engine = None
        self._open_engine()

    # --- prompts ---

    def _prepare(self, content: str | Iterable[NamedMessage], *, raw: bool = False, **call: Any) -> Request:
        """The prompt of a call. A string is one user turn or, `raw`, all there is."""
        options = self._options(call)
        if options.tools or options.response_format or options.tool_choice:
            from ragblend.frameworks.tools import output_constraint

            options = replace(
                options, structured_outputs=output_constraint(options, self.engine.renderer), response_format=None
            )
        turns = [(Message("user", content), ())] if isinstance(content, str) else list(content)
        messages = [message for message, _ in turns]
        chunks = [chunk for _, named in turns for chunk in named]
        if not any(message.content.strip() or message.calls for message in messages):
            raise UsageError("the prompt is empty; give a message with text")
        if raw:
            prompt = Prompt.from_text(messages[0].content, chunks)
        else:
            if self.system and messages[0].role != "system":
                messages.insert(0, Message("system", self.system))
            prompt = Prompt.from_messages(messages, options.tools, chunks)
        if options.strict and not is_url(self.backend):  # a server's report says it, once the answer is there
            self._check_strict(prompt)
        return Request(prompt, options)

    def _options(self, call: Mapping[str, Any]) -> CallOptions:
        """The fields, overridden by what the call gives."""
        call = _own_names(call, (*_OPTION_NAMES, "model"))
        old = [name for name in _LEGACY_TOOL_OPTIONS if call.get(name)]
        if old:
            raise UsageError(f"the call has {old[0]}=...; describe them as tools: bind_tools([...], tool_choice=...)")
        named = call.get("model")
        if named is not None and named not in (self.model, self.engine.name):
            raise UsageError(f"model is {named!r}, this object runs {self.model!r}; make another one for it")
        unknown = [name for name in call if name not in {*_OPTION_NAMES, *_IGNORED_OPTIONS, *_LEGACY_TOOL_OPTIONS}]
        if unknown:
            near = nearest(unknown[0], _OPTION_NAMES)
            raise UsageError(f"the call has {unknown[0]}=...{near}; what a call may set is {', '.join(_OPTION_NAMES)}")
        given = self._default_options() | {name: call[name] for name in _OPTION_NAMES if call.get(name) is not None}
        return CallOptions(**{name: value for name, value in given.items() if value is not None})

    def _default_options(self) -> dict[str, Any]:
        """The options of a call that the fields and `call_options` set."""
        return {name: getattr(self, name) for name in _OPTION_FIELDS} | (self.call_options or {})

    def _check_strict(self, prompt: Prompt) -> None:
        """Raise ChunkNotReusedError where the prompt has no chunk whose KV is stored, or names one that is not."""
        for chunk in prompt.chunks:
            if not any(chunk.text.strip() in message.content for message in prompt.messages):
                raise ChunkNotReusedError(
                    f"the chunk {chunk.text[:60]!r} was given but its text is not in the prompt word for word; "
                    "put chunks into the prompt unchanged, or call with strict=False"
                )
        matched = self.engine.match(prompt)
        if not matched.runs:
            raise ChunkNotReusedError(
                "no ingested chunk was found in the prompt; ingest the documents into this store "
                "(ragblend.precompute.precompute_documents), or call with strict=False"
            )
        for run in matched.runs:
            if not self.engine.has_kv(run.chunk_ids):
                text = self.engine.renderer.plain_text(run.chunk_ids).strip()
                raise ChunkNotReusedError(
                    f"the chunk {text[:60]!r} has no KV in the store; precompute it "
                    "(ragblend.precompute.precompute_documents), or call with strict=False"
                )

    # --- answers ---

    def _open(self, request: Request) -> Stream:
        """The answer as a stream, not started yet; arguments and prompt length are checked here."""
        engine: Engine = self.engine
        try:
            return engine.stream(request.prompt, **request.options.keywords)
        except PromptTooLongError as error:
            raise self._overflow_error(str(error)) from error

    def _pieces(self, stream: Stream, request: Request, cancelled: threading.Event | None = None) -> Iterator[str]:
        """The pieces of `stream`, which is closed however this ends. Raises TimeoutError between two pieces."""
        start_s, timeout_s = perf_counter(), request.options.timeout
        with closing(stream):
            try:
                for piece in stream:
                    yield piece
                    if cancelled is not None and cancelled.is_set():
                        return
                    _check_time(start_s, timeout_s)
            except PromptTooLongError as error:  # a server may say so only now
                raise self._overflow_error(str(error)) from error
        report = stream.result.report
        if request.options.strict and is_url(self.backend) and report.num_chunk_hits < max(1, report.num_chunks):
            raise ChunkNotReusedError(
                f"the server reused {report.num_chunk_hits} of {report.num_chunks} known chunks in the prompt; send it "
                "the documents (ragblend.precompute.precompute_documents), or call with strict=False"
            )

    def _answer(self, request: Request, cancelled: threading.Event | None = None) -> Generation:
        """The whole answer, the first of several; a set `cancelled` ends it early."""
        return self._answers([request], cancelled)[0][0]

    def _answers(self, requests: Sequence[Request], cancelled: threading.Event | None = None) -> list[list[Generation]]:
        """The `n` answers to each request; a set `cancelled` ends them early.

        An engine in this process decodes them together, see `engine.loop`, beside those of other threads.
        Raises the first error there was, once the others have ended.
        """
        asked = [self._split_answers(request) if request.options.n else [request] for request in requests]
        streams = [[self._open(request) for request in several] for several in asked]
        run_to_end = getattr(self.engine, "run_to_end", None)
        if run_to_end is None:
            for request, stream in zip(chain(*asked), chain(*streams), strict=True):
                for _ in self._pieces(stream, request, cancelled):
                    pass
        else:
            timeout_s = requests[0].options.timeout if requests else None  # of one call, and so of all
            watch = None if timeout_s is None and cancelled is None else partial(_should_stop, timeout_s, cancelled)
            for error in run_to_end(list(chain(*streams)), watch):
                if error is not None:
                    raise error
        return [[stream.result for stream in several] for several in streams]

    def _split_answers(self, request: Request) -> list[Request]:
        """A request for each of its `n` answers, each with a seed of its own."""
        seed = request.options.seed
        seeds = [None if seed is None else seed + number for number in range(request.options.n or 1)]
        return [request._replace(options=replace(request.options, seed=each)) for each in seeds]

    def _logprobs(self, result: Generation) -> dict[str, Any]:
        """Log-probabilities of the answer's tokens in the form of OpenAI's chat API."""

        def shown(token: int, logprob: float) -> dict[str, Any]:
            text = self.engine.renderer.token_texts([token])[0]
            return {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": logprob}

        content = [
            shown(each.token_id, each.logprob) | {"top_logprobs": [shown(*other) for other in each.top]}
            for each in result.logprobs or ()
        ]
        return {"content": content}


_OPTION_FIELDS = tuple(name for name in _OPTION_NAMES if name in BlendModel.model_fields)
CALL_OPTIONS = frozenset(_OPTION_NAMES) - {*_OPTION_FIELDS} - _PER_CALL_OPTIONS
"""Options of a call that are no fields: `call_options` holds their defaults."""


def _own_names(given: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return `given` by our names, or by those of our names that are in `names`.

    Raises UsageError where one of them is given by two names, with two values.
    """
    found = dict(given)
    for other, own in ALSO_CALLED.items():
        if other not in given or (names is not None and own not in names):
            continue
        value = found.pop(other)
        if value is not None and found.get(own) not in (None, value):
            raise UsageError(f"{own} is {found[own]!r}, and as {other} {value!r}; say it once")
        if value is not None:
            found[own] = value
    return found


def _reject_unknown(field: str, options: Mapping[str, Any] | None, known: Collection[str]) -> None:
    """Raise UsageError for names in the field `options` that are not `known`."""
    unknown = sorted(set(options or ()).difference(known))
    if unknown:
        choices = ", ".join(sorted(known))
        near = nearest(unknown[0], known)
        raise UsageError(f"{field} has {', '.join(unknown)}{near}; choose from {choices}. All else is a field")


def _usage_error(error: ValidationError) -> UsageError:
    """Return the UsageError that a validator raised, or one that names the field which pydantic rejected."""
    first = error.errors(include_url=False, include_input=False)[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, UsageError):
        return raised
    return UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


def _should_stop(timeout_s: float | None, cancelled: threading.Event | None, answer: Answer) -> bool:
    """Whether an answer is to end here. Raises TimeoutError."""
    if cancelled is not None and cancelled.is_set():
        return True
    _check_time(answer.start_s, timeout_s)
    return False


def _check_time(start_s: float, timeout_s: float | None) -> None:
    if timeout_s is not None and perf_counter() - start_s > timeout_s:
        raise TimeoutError(f"the answer took longer than timeout={timeout_s} s; raise it or lower max_tokens")


def redact_setting(value: Any) -> Any:
    """A setting without passwords and tokens."""
    if isinstance(value, Mapping):
        return hide_secrets(value)
    return redact(value) if isinstance(value, str) else value
