"""What the LangChain and the LlamaIndex models share: settings, one engine, prompts, strictness, async.

`BlendModel` is the pydantic half of both; the frameworks' classes add their own messages and results. Read
`BlendModel._prepare` first: the messages of a conversation in, a Prompt out.

Knows engines and pydantic. Knows no framework.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import copy
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from weakref import WeakSet, WeakValueDictionary

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_serializer, model_validator

from ragblend.engine.report import Generation
from ragblend.errors import RagblendError, UsageError
from ragblend.files.places import user_path
from ragblend.options import (
    MODEL_NAMES,
    RETRIES,
    SECONDS,
    TIER_NAMES,
    TOOLS,
    TRUE_OR_FALSE,
    ContextPolicy,
    GenerationOptions,
    Mode,
    ModelOptions,
    RatioChoice,
    Validator,
    check_option,
    int_between,
    is_url,
    option,
)
from ragblend.prompt.types import Chunk, Message, Prompt
from ragblend.redaction import hide_secrets, redact

if TYPE_CHECKING:
    from ragblend.engine.api import Engine, Stream
    from ragblend.engine.generation import Answer

T = TypeVar("T")

MAX_ANSWERS = 128
"""Most answers to one prompt, as with OpenAI."""
TOOL_CHOICE = Validator(
    lambda value: isinstance(value, str | bool | Mapping), "auto, any, required, none or the name of a tool"
)
RESPONSE_FORMAT = Validator(lambda value: isinstance(value, Mapping), "a dictionary such as {'type': 'json_object'}")


class ChunkNotReusedError(RagblendError):
    """With `strict=True`: a chunk that should have been reused is not in the prompt, or its KV is not in the store."""


@dataclass(frozen=True, slots=True)
class CallOptions(GenerationOptions):
    """Everything one call may set; the model's own fields are the defaults."""

    timeout: float | None = option(None, "Seconds for a whole answer.", SECONDS)
    strict: bool = option(False, "Raise where a chunk is not reused.", TRUE_OR_FALSE)
    tools: Sequence[Mapping[str, Any]] = option((), "Tools in OpenAI's form.", TOOLS)
    tool_choice: Any = option(None, "Whether to call a tool, or which.", TOOL_CHOICE)
    parallel_tool_calls: bool | None = option(None, "Whether there may be several calls.", TRUE_OR_FALSE)
    response_format: Any = option(None, "Form of the answer, as OpenAI has it.", RESPONSE_FORMAT)
    n: int | None = option(None, "Answers to one prompt.", int_between(1, MAX_ANSWERS))


_OPTION_NAMES = tuple(option.name for option in fields(CallOptions))
_PER_CALL_OPTIONS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "response_format"})  # no fields
# Frameworks hand these down beside the user's own arguments; they say nothing to an engine.
_IGNORED_OPTIONS = frozenset(
    {"stream", "formatted", "ls_structured_output_format", "structured_output_format", "model"}
)
# What `load_engine` takes and no field is for.
_ENGINE_OPTIONS = frozenset({*TIER_NAMES, "shadow", "trust_remote_code", "new_model", "max_num_seqs"}) - {"remote"}
_MODEL_FIELDS = tuple(name for name in MODEL_NAMES if name != "trust_remote_code")  # ModelOptions that are fields
_ENGINE_FIELDS = frozenset(  # what opens an engine
    {"model", "store", "remote", "backend", "system", "namespace", "on_miss", "context", "max_retries"}
    | {"vllm_options", "engine_options", *_MODEL_FIELDS}
)
_FIELD_CHECKS = {"max_retries": RETRIES}  # fields that no call sets
_MAY_HOLD_SECRETS = ("remote", "backend", "vllm_options", "engine_options", "model_kwargs")
_LEGACY_TOOL_OPTIONS = ("functions", "function_call")  # what OpenAI called tools before


NamedMessage = tuple[Message, Sequence[Chunk]]
"""A message of a framework, and the chunks that it names."""


class Request(NamedTuple):
    """A prompt, and how to answer it."""

    prompt: Prompt
    options: CallOptions


class BlendModel(BaseModel):
    """Fields and behaviour common to every framework's model over one engine.

    Give `engine=`, or what `load_engine` takes: `model`, `store` and so on; models of the same process that name the
    same ones share one engine. `model` may be what transformers has loaded: a pair (model, tokenizer) or a pipeline.
    How one is loaded has transformers' names. Five names of other libraries are taken for ours: `model_name`,
    `base_url` (`backend`), `torch_dtype`, `max_new_tokens` and `max_completion_tokens`. A copy, deep or not, shares the
    engine.
    Pickled, a model is its settings: it opens its engine again where it is loaded, with the API key from the
    environment (`RAGBLEND_API_KEY`), because keys are not kept. One that was given an engine, a loaded model or a store
    that is an object cannot be pickled, and says so. `strict=True` raises ChunkNotReusedError when a prompt holds no
    known chunk, when the text of a chunk that it names is not in it, or when a chunk's KV is not in the store. A call
    may override every field from `mode` to `strict`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), hide_input_in_errors=True)

    # A name or a path; a loaded (model, tokenizer) becomes its name, and `loaded`.
    model: Any = Field(default="demo", validation_alias=AliasChoices("model", "model_name"))
    store: Any = None
    remote: str | None = None  # shared tier under `store`: redis://HOST:6379/0, s3://BUCKET/PREFIX or an fsspec URL
    # Or "vllm", or a server's "http://HOST:PORT".
    backend: str = Field(default="transformers", validation_alias=AliasChoices("backend", "base_url"))
    dtype: Any = Field(default="auto", validation_alias=AliasChoices("dtype", "torch_dtype"))
    device: Any = "auto"
    device_map: Any = None
    attn_implementation: str | None = None
    revision: str | None = None
    cache_dir: Any = None
    local_files_only: bool = False
    adapter: Any = None  # of peft, on top of `model`: a directory or a Hugging Face id
    model_kwargs: dict[str, Any] | None = None  # for `from_pretrained`: quantization_config, token, config fields
    system: str | None = None  # chunks are precomputed behind it, and it opens every prompt without a system message
    namespace: str = ""
    on_miss: str = "store"
    context: ContextPolicy | None = None  # what chunks are computed behind besides the prefix; None: the store's
    mode: Mode = "blend"
    rule: str = "auto"
    recompute_ratio: RatioChoice = None  # 0 to 1; "auto" and None: as `ragblend calibrate` found, else the default
    max_tokens: int | None = Field(
        default=GenerationOptions().max_tokens,
        validation_alias=AliasChoices("max_tokens", "max_new_tokens", "max_completion_tokens"),
    )
    temperature: float | None = 0.0
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None  # what every answer is held to, see GenerationOptions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Any, float] | None = None  # token ids, and what is added to their logits
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None  # answers to one prompt, in LangChain
    timeout: float | None = None  # seconds for a whole answer
    max_retries: int | None = None  # for a server; an engine in this process has nothing to retry
    api_key: Any = Field(default=None, exclude=True, repr=False)  # for a server; not kept here
    vllm_options: dict[str, Any] | None = None  # vLLM's own engine arguments, with backend="vllm"
    engine_options: dict[str, Any] | None = None  # more for `load_engine`: memory_gib, shadow, max_num_seqs, ...
    strict: bool = False
    engine: Any = Field(default=None, exclude=True, repr=False)  # an Engine
    loaded: Any = Field(default=None, exclude=True, repr=False)  # the pair that was given as `model`; not for users
    opened_with: Any = Field(default=None, exclude=True, repr=False)  # the settings that opened `engine`; not for users

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Raise UsageError for an option that there is not, with the name that is nearest to it."""
        known = [*cls.model_fields, *ALSO_CALLED, *(field.alias for field in cls.model_fields.values() if field.alias)]
        unknown = [name for name in given if name not in known] if isinstance(given, Mapping) else []
        if unknown:
            raise UsageError(f"{cls.__name__} has no option {unknown[0]!r}{_nearest(unknown[0], known)}")
        # Checked before pydantic makes a number of "5" and a truth value of "yes", so that a model and a call, which
        # pydantic does not read, take the same values.
        for name, value in given.items() if isinstance(given, Mapping) else ():
            field = ALSO_CALLED.get(name, name)
            if value is None:
                continue
            if field in _OPTION_NAMES:
                check_option(CallOptions, field, value)
            elif field in _FIELD_CHECKS:
                _FIELD_CHECKS[field].validate(field, value)
        return given

    def model_post_init(self, context: Any, /) -> None:
        """Check the settings, then load or share the engine."""
        super().model_post_init(context)
        key, self.api_key = self.api_key, None
        self.store = _resolve_store(self.store)  # once: copies and pickles are made in other working folders
        self._name_model()
        self._merge_options({})
        unknown = sorted(set(self.engine_options or ()) - _ENGINE_OPTIONS)
        if unknown:
            known = ", ".join(sorted(_ENGINE_OPTIONS))
            raise UsageError(f"engine_options has {', '.join(unknown)}; choose from {known}. All else is a field")
        if self.opened_with is not None:
            # Made from every field of another model, as LangChain's configurable fields and `as_chat` do: its settings
            # are what counts, and one of them may have been changed.
            if self.opened_with != self._engine_settings():
                self.engine = None
        elif self.engine is not None:
            if self.engine_options:
                raise UsageError("engine_options make an engine, and the one given is made: hand them to load_engine")
            self.model = self.engine.name
            if self.system is None:
                self.system = getattr(self.engine, "system", None)
        self._open_engine(key)

    def _name_model(self) -> None:
        """Have `model`, `dtype` and `device` be texts, whatever they were given as."""
        if not isinstance(self.model, str | Path):
            from ragblend.engine.transformers.loaded_model import pair_name, validate_loaded_model

            self.loaded = validate_loaded_model(self.model)
            self.model = pair_name(self.loaded)
        self.model = str(self.model)
        self.dtype = ModelOptions.from_keywords(dtype=self.dtype).dtype
        self.device = ModelOptions.from_keywords(device=self.device).device
        self._model_options()

    @field_serializer(*_MAY_HOLD_SECRETS)
    def _without_secrets(self, value: Any) -> Any:
        """What `model_dump` shows: logs and traces keep it."""
        return redact_setting(value)

    def __repr_args__(self) -> Any:
        return (
            (name, redact_setting(value) if name in _MAY_HOLD_SECRETS else value)
            for name, value in super().__repr_args__()
        )

    def _engine_settings(self) -> dict[str, Any]:
        """What `share_engine` takes; no secrets."""
        others = {"vllm_options", "max_retries", "engine_options", *_MODEL_FIELDS}
        own = {name: getattr(self, name) for name in _ENGINE_FIELDS - others}
        own |= {
            "model": self.loaded or self.model,
            "store": self.store,
        } | self._model_options().non_defaults
        return own | _backend_options(self) | (self.engine_options or {})

    def _model_options(self) -> ModelOptions:
        """How the model is loaded, save whether its own code may run."""
        return ModelOptions.from_keywords(**{name: getattr(self, name) for name in _MODEL_FIELDS})

    def _open_engine(self, api_key: Any = None) -> None:
        """The engine that the settings name, where there is none yet."""
        if self.engine is None:
            self.opened_with = self._engine_settings()
            secret = getattr(api_key, "get_secret_value", lambda: api_key)()
            options = self.opened_with | ({"api_key": secret or None} if is_url(self.backend) else {})
            self.engine = share_engine(options.pop("model"), options.pop("store"), **options)
        _CLOSE_AT_EXIT.add(self.engine)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy of the settings over the same engine, which is no value."""
        shared = (self.engine, self.store, self.loaded, *self._handlers())
        return super().__deepcopy__({**(memo or {}), **{id(each): each for each in shared}})

    def _handlers(self) -> Iterator[Any]:
        """Callbacks: objects that somebody watches, and no values either."""
        return (self.__dict__.get(name) for name in ("callbacks", "callback_manager"))

    def __getstate__(self) -> dict[Any, Any]:
        """The settings that open the engine again. Raises TypeError where there are none."""
        given = "engine" if self.opened_with is None else "model" if self.loaded is not None else ""
        if not given and not isinstance(self.store, str | Path | None):
            given = "store"
        if given:
            name = type(self).__name__
            raise TypeError(
                f"this {name} was given its {given} as an object of this process, which cannot be pickled; name what "
                f"it is made of instead: {name}(model=..., store='DIR'). copy.deepcopy works, and shares it"
            )
        bare = copy(self)
        for name in ("engine", "opened_with"):
            del bare.__dict__[name]
        return super(BlendModel, bare).__getstate__()

    def __setstate__(self, state: dict[Any, Any]) -> None:
        BaseModel.__setstate__(self, state)
        self.engine = self.opened_with = None
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
        if options.strict:
            self._check_strict(prompt)
        return Request(prompt, options)

    def _options(self, call: Mapping[str, Any]) -> CallOptions:
        """The fields, overridden by what the call gives."""
        call = dict(call)
        for name in [name for name in call if ALSO_CALLED.get(name) in (*_OPTION_NAMES, "model")]:
            known, value = ALSO_CALLED[name], call.pop(name)
            if value is None:
                continue
            if call.get(known) not in (None, value):
                raise UsageError(f"{known} is {call[known]!r}, and as {name} {value!r}; say it once")
            call[known] = value
        old = [name for name in _LEGACY_TOOL_OPTIONS if call.get(name)]
        if old:
            raise UsageError(f"the call has {old[0]}=...; describe them as tools: bind_tools([...], tool_choice=...)")
        named = call.get("model")
        if named not in (None, self.model, self.engine.name):
            raise UsageError(f"model is {named!r}, this object runs {self.model!r}; make another one for it")
        unknown = [
            name
            for name in call
            if name not in _OPTION_NAMES and name not in (*_IGNORED_OPTIONS, *_LEGACY_TOOL_OPTIONS)
        ]
        if unknown:
            near = _nearest(unknown[0], _OPTION_NAMES)
            raise UsageError(f"the call has {unknown[0]}=...{near}; what a call may set is {', '.join(_OPTION_NAMES)}")
        return self._merge_options({name: call[name] for name in _OPTION_NAMES if name in call})

    def _merge_options(self, call: Mapping[str, Any]) -> CallOptions:
        own = {name: getattr(self, name) for name in _OPTION_NAMES if name not in _PER_CALL_OPTIONS}
        return CallOptions(**{name: value for each in (own, call) for name, value in each.items() if value is not None})

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
        return engine.stream(request.prompt, **request.options.keywords)

    def _pieces(self, stream: Stream, request: Request, cancelled: threading.Event | None = None) -> Iterator[str]:
        """The pieces of `stream`, which is closed however this ends. Raises TimeoutError between two pieces."""
        start_s, timeout_s = perf_counter(), request.options.timeout
        with closing(stream):
            for piece in stream:
                yield piece
                if cancelled is not None and cancelled.is_set():
                    return
                _check_time(start_s, timeout_s)

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

    def _settings(self) -> dict[str, Any]:
        """What makes two answers differ: the key of an answer cache. Holds no secrets."""
        names = {"backend", "namespace", "system", *_OPTION_NAMES} - _PER_CALL_OPTIONS - {"timeout"}
        own = {name: getattr(self, name) for name in sorted(names)} | {"backend": redact(self.backend)}
        return {"model": self.model, "fingerprint": self.engine.fingerprint, **own}


ALSO_CALLED = {
    other: name
    for name, field in BlendModel.model_fields.items()
    if isinstance(field.validation_alias, AliasChoices)
    for other in field.validation_alias.choices
    if isinstance(other, str) and other != name
}
"""Other names of fields, and theirs. In a call those count whose field a call may set."""


def _nearest(name: str, known: Iterable[str]) -> str:
    """For the end of a message about a name that is unknown: the nearest that is known; "" where none is like it."""
    found = get_close_matches(name, known, 1)
    return f"; the nearest is {found[0]!r}" if found else ""


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


def _backend_options(model: BlendModel) -> dict[str, Any]:
    """What `load_engine` takes beside the ordinary, for this backend; no secrets."""
    if is_url(model.backend):
        return {"max_retries": model.max_retries}
    return {"vllm_options": model.vllm_options} if model.vllm_options else {}


# --- engines ----------------------------------------------------------------------------------------------------------

_ENGINES: WeakValueDictionary[tuple[Any, ...], Engine] = WeakValueDictionary()
_ENGINES_LOCK = threading.Lock()
_CLOSE_AT_EXIT: WeakSet[Any] = WeakSet()


def share_engine(model: Any, store: Any = None, **options: Any) -> Engine:
    """`load_engine`, but one engine for all who ask for the same model, store and options while it is in use."""
    from ragblend.engine.load import load_engine

    loading = {name: options.pop(name) for name in (*MODEL_NAMES, "torch_dtype") if name in options}
    options |= ModelOptions.from_keywords(**loading).non_defaults

    def load() -> Engine:
        loaded: Engine = load_engine(model, store, **options)
        _CLOSE_AT_EXIT.add(loaded)
        return loaded

    if store is not None and not isinstance(store, str | Path):
        return load()
    said = sorted((name, value) for name, value in options.items() if value is not None)
    key = (model, _resolve_store(store), repr(said))
    with _ENGINES_LOCK:
        engine = _ENGINES.get(key)
        if engine is None or not getattr(engine, "is_usable", True):
            engine = _ENGINES[key] = load()
        return engine


def _resolve_store(store: Any) -> Any:
    """A directory's absolute path, the same from every working folder; else `store`."""
    return str(user_path(store, "store").resolve()) if isinstance(store, str | Path) else store


@atexit.register
def _close_engines() -> None:
    """Let background precomputation finish before the interpreter goes away under it."""
    for engine in list(_CLOSE_AT_EXIT):
        getattr(engine, "close", lambda: None)()


def precompute_and_register(documents: Sequence[Any], llm_or_engine: Any) -> None:
    """Precompute documents that are chunks already, and have them found in prompts."""
    from ragblend.precompute import precompute_documents

    precompute_documents(documents, llm_or_engine)


# --- async ------------------------------------------------------------------------------------------------------------


ASYNC_ANSWERS = 64
"""Calls of asynchronous methods that are answered at a time. An event loop's own threads are fewer than an engine may
decode together: four more than there are cores."""

_threads: dict[int, ThreadPoolExecutor] = {}  # by process: a forked one has none of its parent's


async def run_in_thread(function: Callable[[threading.Event], T]) -> T:
    """`function` on a thread of ours; its event is set when the caller is cancelled."""
    cancelled = threading.Event()
    call = partial(contextvars.copy_context().run, function, cancelled)
    pool = _threads.get(os.getpid()) or _threads.setdefault(os.getpid(), ThreadPoolExecutor(ASYNC_ANSWERS, "ragblend"))
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, call)
    except asyncio.CancelledError:
        cancelled.set()
        raise


async def iterate_in_thread(generator: Generator[T]) -> AsyncIterator[T]:
    """The items of `generator`, each made on a thread; it is closed however this ends, after the step under way."""
    loop, done = asyncio.get_running_loop(), object()
    step: asyncio.Future[Any] | None = None
    try:
        while True:
            call = partial(contextvars.copy_context().run, next, generator, done)
            step = loop.run_in_executor(None, call)
            item = await asyncio.shield(step)  # cancelling the caller must not lose track of the thread
            if item is done:
                return
            yield item
    finally:
        if step is not None and not step.done():
            step.add_done_callback(partial(_close_after, generator))
        else:
            generator.close()


def _close_after(generator: Generator[Any], step: asyncio.Future[Any]) -> None:
    if not step.cancelled():
        step.exception()  # looked at, so that the loop does not warn about it
    generator.close()
