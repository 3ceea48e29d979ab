"""Common base of the LangChain and LlamaIndex models: fields, the engine, prompts and answers.

`BlendModel` is a pydantic model; the frameworks' classes add their messages and results. Read `BlendModel._prepare`
first, which makes a Prompt from the messages of a conversation. Does not depend on a framework.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
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

from ragblend.config import Settings
from ragblend.engine.api import BatchEngine
from ragblend.engine.report import Generation
from ragblend.errors import PromptTooLongError, UsageError
from ragblend.frameworks.call_options import (
    ALSO_CALLED,
    CALL_ALIASES,
    ENGINE_OPTIONS,
    IGNORED_OPTIONS,
    LEGACY_TOOL_OPTIONS,
    OPTION_NAMES,
    PER_CALL_OPTIONS,
    CallOptions,
    reject_unknown,
)
from ragblend.frameworks.engines import absolute_store, close_at_exit, share_engine
from ragblend.frameworks.strict import ChunkNotReusedError, check_chunks
from ragblend.option_fields import default_of, nearest_name_hint, replace_aliases
from ragblend.options import (
    RETRIES,
    LoadOptions,
    Mode,
    ModelOptions,
    RatioChoice,
    is_server_url,
)
from ragblend.prompt.types import Chunk, Message, Prompt
from ragblend.redaction import hide_secrets, redact_url

if TYPE_CHECKING:
    from ragblend.engine.api import Engine, Stream
    from ragblend.engine.generation import RunningAnswer


_ENGINE_FIELDS = frozenset(  # fields that determine the engine
    {"model", "store", "backend", "dtype", "device", "system", "namespace", "max_retries", "engine_options"}
)
MAY_HOLD_SECRETS = ("backend", "engine_options", "call_options")
_OPENED_WITH: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Values of _ENGINE_FIELDS for each engine that a BlendModel loaded. "pair": the loaded model that was passed."""


MessageAndChunks = tuple[Message, Sequence[Chunk]]
"""A framework's message as a Message of ragblend, and the chunks that it names."""


class Request(NamedTuple):
    """One call: its prompt and its options. `reports` are dictionaries that a framework fills with the report."""

    prompt: Prompt
    options: CallOptions
    reports: Sequence[dict[str, Any]] = ()


class BlendModel(BaseModel):
    """Common base of the frameworks' models: fields, the engine, prompts and answers.

    Pass `engine=`, or `model` and `store`. Models of one process with the same settings share one engine. `model` is
    "demo", a Hugging Face id, a local path, or a loaded transformers model: a pair (model, tokenizer) or a pipeline. If
    `model` is None, the store's own model is loaded: the one that computed its KV. `engine_options` are further
    arguments of `load_engine`, for example remote, memory_gib, adapter and vllm_options.

    The fields from `mode` to `strict` are defaults of a call's options. `call_options` are defaults of the options
    without a field: min_p, repetition_penalty, logit_bias, structured_outputs. Five names of other libraries are also
    accepted: `model_name`, `base_url` (for `backend`), `torch_dtype`, `max_new_tokens` and `max_completion_tokens`.
    With `strict=True`, a call raises ChunkNotReusedError unless all chunks of its prompt are stored (`check_chunks`).

    Copies share the engine. A pickle contains the settings without the API key. Unpickling loads the engine again, and
    takes the key from `RAGBLEND_API_KEY`. Pickling raises TypeError if the model was made from an engine, a loaded
    model or a store object. The constructor raises UsageError for an unknown name or an invalid value.
    """

    _overflow_error: ClassVar[type[PromptTooLongError]] = PromptTooLongError  # the class that the framework catches
    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), hide_input_in_errors=True)

    model: Any = None  # a name or a path; a loaded (model, tokenizer) is replaced by its name
    store: Any = None
    backend: str = default_of(Settings, "backend")  # "transformers", "vllm", or a server's "http://HOST:PORT"
    dtype: Any = default_of(ModelOptions, "dtype")
    device: Any = default_of(ModelOptions, "device")
    system: str | None = None  # system text after which chunks are precomputed, added to prompts without one
    namespace: str = default_of(LoadOptions, "namespace")
    # Options of a call. CallOptions validates them, so that a model and a call accept the same values.
    mode: SkipValidation[Mode] = default_of(CallOptions, "mode")
    rule: SkipValidation[str] = default_of(CallOptions, "rule")
    recompute_ratio: SkipValidation[RatioChoice] = None  # "auto" and None: the calibrated ratio, else the default
    max_tokens: SkipValidation[int | None] = default_of(CallOptions, "max_tokens")
    temperature: SkipValidation[float | None] = default_of(CallOptions, "temperature")
    top_p: SkipValidation[float | None] = None
    top_k: SkipValidation[int | None] = None
    seed: SkipValidation[int | None] = None
    stop: SkipValidation[list[str] | None] = None
    presence_penalty: SkipValidation[float | None] = None
    frequency_penalty: SkipValidation[float | None] = None
    logprobs: SkipValidation[bool | None] = None
    top_logprobs: SkipValidation[int | None] = None
    n: SkipValidation[int | None] = None  # number of answers to one prompt, in LangChain
    timeout: SkipValidation[float | None] = None  # seconds for a whole answer
    strict: SkipValidation[bool] = default_of(CallOptions, "strict")
    call_options: dict[str, Any] | None = None
    max_retries: SkipValidation[int | None] = None  # retries of requests to a server
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)  # a server's key; not stored here
    engine_options: dict[str, Any] | None = None
    engine: Any = Field(default=None, exclude=True, repr=False)  # an Engine

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _usage_error(error) from None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, settings: Any) -> Any:
        """Return the settings with other libraries' names replaced. Raises UsageError for an unknown name."""
        if not isinstance(settings, Mapping):
            return settings
        settings = replace_aliases(settings, ALSO_CALLED)
        option_names = {*cls.model_fields, *(field.alias for field in cls.model_fields.values() if field.alias)}
        for name in settings:
            if name in ENGINE_OPTIONS:
                raise UsageError(f"{name} is an engine option; pass engine_options={{{name!r}: ...}}")
            if name in CALL_OPTIONS:
                raise UsageError(f"{name} is an option of a call; for every call, pass call_options={{{name!r}: ...}}")
            if name not in option_names:
                near = nearest_name_hint(name, [*option_names, *ALSO_CALLED]) or nearest_name_hint(
                    name, [*ENGINE_OPTIONS, *CALL_OPTIONS]
                )
                raise UsageError(f"{cls.__name__} has no option {name!r}{near}")
        return settings

    def model_post_init(self, context: Any, /) -> None:
        """Validate the settings, then load or share the engine."""
        super().model_post_init(context)
        key, self.api_key = self.api_key, None
        self.store = absolute_store(self.store)  # resolved once: a copy may be loaded in another working folder
        reject_unknown("call_options", self.call_options, CALL_OPTIONS)
        reject_unknown("engine_options", self.engine_options, ENGINE_OPTIONS)
        self._options({})
        if self.max_retries is not None:
            RETRIES.validate("max_retries", self.max_retries)
        if self.engine is not None:
            self._adopt_engine()
        self._open_engine(key)

    def _adopt_engine(self) -> None:
        """Copy the settings of the passed engine, or drop the engine if the fields determine another one."""
        opened = _OPENED_WITH.get(self.engine)
        if opened is not None and self.model_fields_set >= _ENGINE_FIELDS:
            # LangChain's configurable fields and `as_chat` make a model from every field of another model, whose
            # settings may have been changed.
            if opened != self._engine_settings() | {"pair": opened["pair"]}:
                self.engine = None
                self.model = opened["pair"] if opened["pair"] and self.model == opened["model"] else self.model
            return
        if self.engine_options:
            raise UsageError(
                "engine and engine_options are both given, but engine_options are for an engine that this model loads; "
                "pass them to load_engine(...)"
            )
        settings = opened or {"model": self.engine.name, "system": self.engine.system}
        self.model = settings["model"]
        for name in _ENGINE_FIELDS.intersection(settings):
            if name not in self.model_fields_set or getattr(self, name) is None:
                setattr(self, name, settings[name])

    @field_serializer(*MAY_HOLD_SECRETS)
    def _without_secrets(self, value: Any) -> Any:
        """Return a setting for `model_dump` without secrets, because logs and traces store it."""
        return redact_setting(value)

    def __repr_args__(self) -> Any:
        return (
            (name, redact_setting(value) if name in MAY_HOLD_SECRETS else value)
            for name, value in super().__repr_args__()
        )

    def _engine_settings(self) -> dict[str, Any]:
        """Return the fields that determine the engine. Only `engine_options` may contain secrets."""
        return {name: getattr(self, name) for name in _ENGINE_FIELDS}

    def _open_engine(self, api_key: SecretStr | None = None) -> None:
        """Load or share the engine of the settings, unless there is one already."""
        if self.engine is None:
            placed = ModelOptions.from_keywords(dtype=self.dtype, device=self.device)
            self.dtype, self.device = placed.dtype, placed.device
            pair = None
            if self.model is None and not is_server_url(self.backend):
                from ragblend.engine.load import find_store_model

                self.model = find_store_model(self.store)
            elif not isinstance(self.model, str | Path | None):
                from ragblend.engine.transformers.loaded_model import loaded_model_name, unpack_loaded_model

                pair = unpack_loaded_model(self.model)
                self.model = loaded_model_name(pair)
            self.model = None if self.model is None else str(self.model)
            options = {name: getattr(self, name) for name in ("backend", "dtype", "device", "system", "namespace")}
            if is_server_url(self.backend):
                options |= {"max_retries": self.max_retries}
                options |= {"api_key": api_key.get_secret_value() or None} if api_key is not None else {}
            self.engine = share_engine(pair or self.model, self.store, **options, **(self.engine_options or {}))
            self.model = self.model or self.engine.name  # None is the server's model
            self.system = self.engine.system  # None is the stored system text
            _OPENED_WITH.setdefault(self.engine, self._engine_settings() | {"pair": pair})
        close_at_exit(self.engine)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a copy of the settings that shares the engine, the store and the callbacks."""
        handlers = (self.__dict__.get(name) for name in ("callbacks", "callback_manager"))
        shared = (self.engine, self.store, *handlers)
        return super().__deepcopy__({**(memo or {}), **{id(each): each for each in shared}})

    def __getstate__(self) -> dict[Any, Any]:
        """Return the settings with which the engine can be loaded again. Raises TypeError if there are none."""
        opened = _OPENED_WITH.get(self.engine)
        unpicklable = "engine" if opened is None else "model" if opened["pair"] is not None else ""
        if not unpicklable and not isinstance(self.store, str | Path | None):
            unpicklable = "store"
        if unpicklable:
            name = type(self).__name__
            raise TypeError(
                f"the {unpicklable} of this {name} is an object of this process, which cannot be pickled; pass names "
                f"and paths instead: {name}(model=..., store='DIR'). copy.deepcopy works and shares the {unpicklable}"
            )
        bare = copy(self)
        del bare.__dict__["engine"]
        return super(BlendModel, bare).__getstate__()

    def __setstate__(self, state: dict[Any, Any]) -> None:
        BaseModel.__setstate__(self, state)
        self.engine = None
        self._open_engine()

    # --- prompts ---

    def _prepare(self, content: str | Iterable[MessageAndChunks], *, raw: bool = False, **call: Any) -> Request:
        """Return the prompt and options of a call. A string is one user turn or, with `raw`, the whole prompt."""
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
            raise UsageError("the prompt is empty; pass a message with text")
        if raw:
            prompt = Prompt.from_text(messages[0].content, chunks)
        else:
            if self.system and messages[0].role != "system":
                messages.insert(0, Message("system", self.system))
            prompt = Prompt.from_messages(messages, options.tools, chunks)
        if options.strict and not is_server_url(self.backend):  # with a server, its report is checked after the answer
            check_chunks(self.engine, prompt)
        return Request(prompt, options)

    def _options(self, call: Mapping[str, Any]) -> CallOptions:
        """Return the options of a call: its arguments, else the fields and `call_options`."""
        call = replace_aliases(call, CALL_ALIASES)
        old = [name for name in LEGACY_TOOL_OPTIONS if call.get(name)]
        if old:
            raise UsageError(f"the call has {old[0]}=...; pass tools instead: bind_tools([...], tool_choice=...)")
        named = call.get("model")
        if named is not None and named not in (self.model, self.engine.name):
            raise UsageError(f"model is {named!r}, but this object runs {self.model!r}; create another object for it")
        unknown = [name for name in call if name not in {*OPTION_NAMES, *IGNORED_OPTIONS, *LEGACY_TOOL_OPTIONS}]
        if unknown:
            near = nearest_name_hint(unknown[0], OPTION_NAMES)
            raise UsageError(
                f"the call has {unknown[0]}=...{near}; the options of a call are {', '.join(OPTION_NAMES)}"
            )
        options = self._default_options() | {name: call[name] for name in OPTION_NAMES if call.get(name) is not None}
        return CallOptions(**{name: value for name, value in options.items() if value is not None})

    def _default_options(self) -> dict[str, Any]:
        """Return the default options of a call: those of the fields and of `call_options`."""
        return {name: getattr(self, name) for name in _OPTION_FIELDS} | (self.call_options or {})

    # --- answers ---

    def _open(self, request: Request) -> Stream:
        """Return the stream of an answer, which is not started yet. Checks the options and the prompt's length."""
        engine: Engine = self.engine
        try:
            return engine.stream(request.prompt, **request.options.keywords)
        except PromptTooLongError as error:
            raise self._overflow_error(str(error)) from error

    def _pieces(self, stream: Stream, request: Request, cancelled: threading.Event | None = None) -> Iterator[str]:
        """Yield the pieces of `stream` and close it at the end. Raises TimeoutError between two pieces."""
        start_s, timeout_s = perf_counter(), request.options.timeout
        with closing(stream):
            try:
                for piece in stream:
                    yield piece
                    if cancelled is not None and cancelled.is_set():
                        return
                    _check_time(start_s, timeout_s)
            except PromptTooLongError as error:  # a server checks the length after the request has started
                raise self._overflow_error(str(error)) from error
        report = stream.result.report
        if request.options.strict and is_server_url(self.backend) and report.num_chunk_hits < max(1, report.num_chunks):
            raise ChunkNotReusedError(
                f"the server reused {report.num_chunk_hits} of {report.num_chunks} known chunks in the prompt; send it "
                "the documents (ragblend.precompute.precompute_documents), or call with strict=False"
            )

    def _answer(self, request: Request, cancelled: threading.Event | None = None) -> Generation:
        """Return the whole answer, the first of several. Setting `cancelled` ends it early."""
        return self._answers([request], cancelled)[0][0]

    def _answers(self, requests: Sequence[Request], cancelled: threading.Event | None = None) -> list[list[Generation]]:
        """Return the `n` answers to each request. Setting `cancelled` ends them early.

        An engine in this process decodes them together with the answers of other threads, see `engine.loop`. Raises the
        first error after the other answers have ended.
        """
        single = [self._split_answers(request) if request.options.n else [request] for request in requests]
        streams = [[self._open(request) for request in several] for several in single]
        engine = self.engine
        if not isinstance(engine, BatchEngine):
            for request, stream in zip(chain(*single), chain(*streams), strict=True):
                for _ in self._pieces(stream, request, cancelled):
                    pass
        else:
            timeout_s = requests[0].options.timeout if requests else None  # all requests are of one call
            watch = None if timeout_s is None and cancelled is None else partial(_should_stop, timeout_s, cancelled)
            for error in engine.run_to_end(list(chain(*streams)), watch):
                if error is not None:
                    raise error
        return [[stream.result for stream in several] for several in streams]

    def _split_answers(self, request: Request) -> list[Request]:
        """Return a request for each of the `n` answers, with the seeds `seed`, `seed + 1`, ..."""
        seed = request.options.seed
        seeds = [None if seed is None else seed + number for number in range(request.options.n or 1)]
        return [request._replace(options=replace(request.options, seed=each)) for each in seeds]

    def _logprobs(self, result: Generation) -> dict[str, Any]:
        """Return the log-probabilities of the answer's tokens in the form of OpenAI's chat API."""

        def shown(token: int, logprob: float) -> dict[str, Any]:
            text = self.engine.renderer.token_texts([token])[0]
            return {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": logprob}

        content = [
            shown(each.token_id, each.logprob) | {"top_logprobs": [shown(*other) for other in each.top]}
            for each in result.logprobs or ()
        ]
        return {"content": content}


_OPTION_FIELDS = tuple(name for name in OPTION_NAMES if name in BlendModel.model_fields)
CALL_OPTIONS = frozenset(OPTION_NAMES) - {*_OPTION_FIELDS} - PER_CALL_OPTIONS
"""Options of a call that are no fields; `call_options` sets their defaults."""


def _usage_error(error: ValidationError) -> UsageError:
    """Return the UsageError that a validator raised, or one with the field that pydantic rejected."""
    first = error.errors(include_url=False, include_input=False)[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, UsageError):
        return raised
    return UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


def _should_stop(timeout_s: float | None, cancelled: threading.Event | None, answer: RunningAnswer) -> bool:
    """Return True if the call was cancelled. Raises TimeoutError."""
    if cancelled is not None and cancelled.is_set():
        return True
    _check_time(answer.start_s, timeout_s)
    return False


def _check_time(start_s: float, timeout_s: float | None) -> None:
    if timeout_s is not None and perf_counter() - start_s > timeout_s:
        raise TimeoutError(f"the answer took longer than timeout={timeout_s} s; raise it or lower max_tokens")


def redact_setting(value: Any) -> Any:
    """Return a setting with its passwords and tokens hidden."""
    if isinstance(value, Mapping):
        return hide_secrets(value)
    return redact_url(value) if isinstance(value, str) else value
