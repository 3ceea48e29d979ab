"""The chain of `ragblend.chains.create_long_document_chain`: an answer from each window, then one from all of them.

A document longer than the context is read in overlapping windows. Windows are made of whole chunks, so that chunks in
two windows are stored once and reused in both. Depends on langchain-core and `ragblend.llm`. Read
`LongDocumentChain.build` first.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import (
    AddableDict,
    Runnable,
    RunnableConfig,
    RunnableGenerator,
    RunnableLambda,
    RunnablePassthrough,
)

from ragblend.chunker import split
from ragblend.corpus.documents import Document as SourceDocument
from ragblend.errors import UsageError
from ragblend.frameworks.aio import run_in_thread
from ragblend.langchain.model import unwrap_bindings
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk, Prompt

if TYPE_CHECKING:
    from ragblend.engine.api import Engine

_COUNTS = ("prompt_tokens", "num_reused_tokens", "num_recomputed_tokens")
_NEXT = "\n\n"  # between answers
_Rounds = Generator[tuple[Runnable[Any, Any], list[list[BaseMessage]]], Any, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class LongDocumentChain:
    """Builder of the chain that `create_long_document_chain` returns. That function explains the other fields.

    `chat`: a ChatBlend, with bound options or without. `sizes`: `window_tokens`, `overlap_tokens` and `chunk_tokens`.
    """

    chat: Runnable[Any, Any]
    combine: str
    instruction: str | None
    system: str | None
    sizes: Mapping[str, int | None]
    map_prompt: str
    refine_prompt: str
    combine_prompt: str
    no_answer: str
    _prefilling: Any = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        extra_variables = {"map_prompt": "", "refine_prompt": "answer", "combine_prompt": "answers"}
        for name, more in extra_variables.items():
            _check_prompt(name, getattr(self, name), {"input", "no_answer", *filter(None, [more])})

    def build(self) -> Runnable[Any, dict[str, Any]]:
        """Return the chain. It answers the question from each window of the document, and combines the answers to one.

        A window consists of adjacent chunks that fit into one prompt. `create_long_document_chain` explains the result.
        """
        return (
            RunnableLambda(self._read, self._aread)
            | RunnablePassthrough.assign(message=RunnableLambda(self._final_answer))
            | RunnableGenerator(_results, _aresults)
        )

    def _read(self, inputs: Any, config: RunnableConfig) -> dict[str, Any]:
        rounds, answers = self._rounds(*self._prepare_windows(inputs)), None
        while True:
            try:
                model, prompts = rounds.send(answers)
            except StopIteration as end:
                return dict(end.value)
            answers = model.batch(prompts, config)

    async def _aread(self, inputs: Any, config: RunnableConfig) -> dict[str, Any]:
        rounds, answers = self._rounds(*await run_in_thread(lambda cancelled: self._prepare_windows(inputs))), None
        while True:
            try:
                model, prompts = rounds.send(answers)
            except StopIteration as end:
                return dict(end.value)
            answers = await model.abatch(prompts, config)

    def _rounds(self, question: str, windows: Sequence[DocumentWindow], tokens: dict[str, int]) -> _Rounds:
        """Yield each batch of prompts with its model, and receive the answers. Return the state before the last one."""
        answered: list[AIMessage] = []
        reports: list[dict[str, Any]] = []  # of prompts without a window
        last: Any
        if self.combine == "refine" or len(windows) == 1:
            for window in windows[:-1]:
                answered += yield self.chat, [self._refine_messages(question, window, answered)]
            last = self.chat, self._refine_messages(question, windows[-1], answered)
        elif self.combine == "rerank":
            answered += yield (
                self.chat.bind(logprobs=True),
                [self._refine_messages(question, window, []) for window in windows],
            )
            last = max([each for each in answered if self._distinct_answers([each])] or answered, key=_confidence)
        else:
            answered += yield self.chat, [self._refine_messages(question, window, []) for window in windows]
            answers, notes = answered, self._distinct_answers(answered)
            while len(groups := self._groups(question, notes)) > 1:
                answers = yield self._lenient_chat, [self._combine_messages(question, group) for group in groups]
                reports += map(_report, answers)
                notes = self._distinct_answers(answers)
            sole_answer = next((each for each in answers if self._distinct_answers([each]) == notes), answers[0])
            last = sole_answer if len(notes) < 2 else (self._lenient_chat, self._combine_messages(question, notes))
        windows_read = [
            {**window.place, "answer": each.text.strip(), "report": _report(each)}
            for window, each in zip(windows, answered, strict=False)
        ]
        if self.combine == "rerank" and answered:
            windows_read = [
                {**each, "score": _confidence(answer)} for each, answer in zip(windows_read, answered, strict=True)
            ]
        windows_read += [window.place for window in windows[len(answered) :]]
        return {"input": question, "windows": windows_read, "tokens": tokens, "reports": reports, "last": last}

    def _final_answer(self, state: Mapping[str, Any]) -> Any:
        """Return the last answer, or a runnable that generates it."""
        if isinstance(state["last"], AIMessage):
            return state["last"]
        model, asked = state["last"]
        return RunnableLambda(lambda _: asked) | model

    # --- windows ---

    def _prepare_windows(self, inputs: Any) -> tuple[str, list[DocumentWindow], dict[str, int]]:
        """Store the document's chunks. Return the question, the windows and the token counts."""
        question, texts = self._parse_input(inputs)
        engine = self._model.engine
        asked = [self._fill_prompt(self.map_prompt, input=question)]
        if self.combine == "refine":
            asked.append(self._fill_prompt(self.refine_prompt, input=question, answer=""))
        num_answers = 2 if self.combine == "refine" else 1  # the prompt contains the answer so far
        budget = min(self._remaining_tokens(text, num_answers) for text in asked)
        windows = make_windows(texts, engine, budget, **self.sizes)
        chunks = list(dict.fromkeys(chunk for window in windows for chunk in window.chunks))
        count = engine.renderer.count_tokens
        with self._prefilling:  # questions in one batch are usually about the same document
            new = [chunk for chunk in {chunk.text: chunk for chunk in chunks}.values() if not engine.is_stored(chunk)]
            precompute_documents(chunks, self._model)
        tokens = {"num_chunk_tokens": sum(count(chunk.text) for chunk in chunks)}
        return question, windows, tokens | {"num_prefilled_tokens": sum(count(chunk.text) for chunk in new)}

    def _parse_input(self, inputs: Any) -> tuple[str, list[tuple[str, str]]]:
        is_named = isinstance(inputs, Mapping)
        question = inputs.get("input", self.instruction) if is_named else self.instruction
        document = inputs.get("document") if is_named else inputs
        if not isinstance(question, str) or not question.strip():
            raise UsageError(
                'the chain needs a question: invoke it with {"input": question, "document": document}, or create it '
                "with an instruction"
            )
        documents = list(document) if isinstance(document, list | tuple) else [document]
        wrong = next((each for each in documents if not isinstance(each, str | Document)), None)
        if wrong is not None or document is None:
            kind = type(wrong).__name__
            raise UsageError(f'"document" is a {kind}; pass a text, a LangChain Document or a list of either')
        return question, [
            (each, "") if isinstance(each, str) else (each.page_content, str(each.metadata.get("source") or ""))
            for each in documents
        ]

    def _remaining_tokens(self, text: str, num_answers: int = 1) -> int:
        """Return the tokens for chunks in a prompt with `text`."""
        model, bound = unwrap_bindings(self.chat)
        answer_tokens = num_answers * model._options(bound).max_tokens
        return chunk_token_budget(model.engine, self.system or model.system, text, answer_tokens)

    # --- prompts ---

    def _refine_messages(
        self, question: str, window: DocumentWindow, earlier: Sequence[AIMessage]
    ) -> list[BaseMessage]:
        """Return the prompt of a question over a window, with the last answer so far, if there is one."""
        if earlier:
            text = self._fill_prompt(self.refine_prompt, input=question, answer=earlier[-1].text.strip())
        else:
            text = self._fill_prompt(self.map_prompt, input=question)
        blocks = [
            {"type": "text", "text": chunk.text, "extras": {"chunk_id": chunk.id, "source": chunk.source}}
            for chunk in window.chunks
        ]
        return self._messages([*blocks, {"type": "text", "text": text}])

    def _combine_messages(self, question: str, notes: Sequence[str]) -> list[BaseMessage]:
        return self._messages(self._fill_prompt(self.combine_prompt, input=question, answers=_NEXT.join(notes)))

    def _messages(self, content: Any) -> list[BaseMessage]:
        return [*([SystemMessage(self.system)] if self.system else []), HumanMessage(content=content)]

    def _fill_prompt(self, prompt: str, **values: str) -> str:
        return prompt.format(no_answer=self.no_answer, **values)

    # --- answers ---

    def _distinct_answers(self, answered: Sequence[AIMessage]) -> list[str]:
        """Return the texts of answers, each once, without those that contain `no_answer`."""
        texts = (message.text.strip() for message in answered)
        none = self.no_answer.strip().lower()
        return list(dict.fromkeys(text for text in texts if text and not (none and none in text.lower())))

    def _groups(self, question: str, notes: Sequence[str]) -> list[list[str]]:
        """Return the answers in groups of at least two that each fit into a prompt."""
        if len(notes) < 2:
            return []
        budget = self._remaining_tokens(self._fill_prompt(self.combine_prompt, input=question, answers=""))
        groups: list[list[str]] = []
        for note in notes:
            together = _NEXT.join((*(groups[-1] if groups else ()), note))
            if not groups or (len(groups[-1]) > 1 and len(self._model.engine.renderer.text_ids(together)) > budget):
                groups.append([])
            groups[-1].append(note)
        return groups

    # --- the model ---

    @property
    def _lenient_chat(self) -> Runnable[Any, Any]:
        """Return the model for prompts without chunks, which a strict model would reject."""
        return self.chat.bind(strict=False)

    @property
    def _model(self) -> Any:
        return unwrap_bindings(self.chat)[0]


def _check_prompt(name: str, prompt: str, names: set[str]) -> None:
    try:
        unknown = {field for _, field, _, _ in Formatter().parse(prompt) if field is not None} - names
        wrong = f"it has {{{min(unknown)}}}" if unknown else ""
    except ValueError as error:  # a brace alone
        wrong = str(error)
    if wrong:
        fields = ", ".join(f"{{{field}}}" for field in sorted(names))
        raise UsageError(
            f"{name} cannot be filled in: {wrong}. Its fields: {fields}; write other braces twice: {{{{ }}}}"
        )


def _report(message: BaseMessage) -> dict[str, Any]:
    return dict(message.response_metadata.get("ragblend", {}))


def _confidence(message: AIMessage) -> float:
    """Return the mean log-probability of the answer's tokens, natural logarithm."""
    tokens = message.response_metadata["logprobs"]["content"]
    return float(sum(token["logprob"] for token in tokens)) / max(1, len(tokens))


class _StreamedResult:
    """Stream of the chain's result: windows, last answer, and the sums over all prompts."""

    def __init__(self) -> None:
        self._reports: list[dict[str, Any]] = []
        self._tokens: dict[str, int] = {}
        self._is_known = False  # True if the last answer is that of a window, whose report is counted already

    def push(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if "windows" in chunk:
            self._is_known = isinstance(chunk["last"], AIMessage)
            self._tokens = chunk["tokens"]
            self._reports = [*chunk["reports"], *(each["report"] for each in chunk["windows"] if "report" in each)]
            yield AddableDict(input=chunk["input"], windows=chunk["windows"])
        message = chunk.get("message")
        if message is not None:
            yield AddableDict(answer=message.text)
            if (report := _report(message)) and not self._is_known:
                self._reports.append(report)
                yield AddableDict(report=report)

    def end(self) -> dict[str, Any]:
        counts = {name: sum(report[name] for report in self._reports) for name in _COUNTS}
        return AddableDict(tokens={**self._tokens, **counts})


def _results(chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    streamed = _StreamedResult()
    for chunk in chunks:
        yield from streamed.push(chunk)
    yield streamed.end()


async def _aresults(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    streamed = _StreamedResult()
    async for chunk in chunks:
        for result in streamed.push(chunk):
            yield result
    yield streamed.end()


# --- windows ---

CHUNK_TOKENS = 256
"""Largest default size of a chunk, in tokens."""
_CHUNKS_PER_WINDOW = 4  # least number by default: with fewer chunks, windows cannot overlap by a small share
_OVERLAP = 0.1  # default share of a window that the next one repeats


@dataclass(frozen=True, slots=True)
class DocumentWindow:
    """Adjacent chunks for one prompt. They may continue from the end of one document into the next one."""

    chunks: tuple[Chunk, ...]

    @property
    def place(self) -> dict[str, Any]:
        """Return "source" and "start" of the first chunk, "last_source" and "end" of the last one.

        "start" and "end" are offsets in characters.
        """
        first, last = self.chunks[0], self.chunks[-1]
        return {"source": first.source, "start": first.start, "last_source": last.source, "end": last.end}


def make_windows(
    texts: Iterable[tuple[str, str]],
    engine: Engine,
    budget: int,
    *,
    window_tokens: int | None = None,
    overlap_tokens: int | None = None,
    chunk_tokens: int | None = None,
) -> list[DocumentWindow]:
    """Return windows over the documents `texts`, pairs of (text, source). No window has more than `budget` tokens.

    `window_tokens`: size of a window; default `budget`. `overlap_tokens`: number of tokens that a window shares with
    the previous one; default a tenth of a window. The overlap is rounded up to whole chunks, but it is smaller if a new
    chunk would not fit otherwise (see `window_spans`). `chunk_tokens`: largest size of a chunk. Raises UsageError if a
    window is too small for the overlap and one chunk together, or larger than `budget`, and if no document has text.
    """
    size = budget if window_tokens is None else window_tokens
    if not 0 < size <= budget:
        raise UsageError(
            f"window_tokens is {window_tokens}, but question, instructions and answer leave {budget} tokens of the "
            f"context; choose 1 to {budget}, or lower max_tokens"
        )
    overlap = int(size * _OVERLAP) if overlap_tokens is None else overlap_tokens
    num_separator = len(engine.renderer.separator_ids)
    largest = min(CHUNK_TOKENS, size // _CHUNKS_PER_WINDOW) if chunk_tokens is None else chunk_tokens
    if not 0 <= overlap < size or not 0 < largest + num_separator <= size - overlap:
        raise UsageError(
            f"windows of {size} tokens cannot overlap by {overlap} with chunks of {largest}; choose overlap_tokens and "
            "chunk_tokens that together are smaller than a window"
        )
    count = engine.renderer.count_tokens
    chunks = [chunk for text, source in texts for chunk in split(SourceDocument(text, source), count, largest)]
    if not chunks:
        raise UsageError("the document is empty; pass one with text")
    spans = window_spans([count(chunk.text) + num_separator for chunk in chunks], size, overlap)
    return [DocumentWindow(tuple(chunks[start:end])) for start, end in spans]


def window_spans(sizes: Sequence[int], budget: int, overlap: int) -> list[tuple[int, int]]:
    """Divide chunks into windows. Return for each window (start, end): the window has the chunks [start, end).

    `sizes`: tokens of each chunk. A window has as many chunks as `budget` tokens allow. Its first chunks are the last
    chunks of the previous window, with at least `overlap` tokens, but fewer if a new chunk would not fit otherwise.

    >>> window_spans([3, 3, 3, 3, 3], budget=9, overlap=3)
    [(0, 3), (2, 5)]
    >>> window_spans([3, 3, 3], budget=6, overlap=0), window_spans([5, 5, 5], budget=6, overlap=1)
    ([(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)])
    """
    spans: list[tuple[int, int]] = []
    start = 0
    while True:
        end = start + 1
        while end < len(sizes) and sum(sizes[start : end + 1]) <= budget:
            end += 1
        spans.append((start, end))
        if end == len(sizes):
            return spans
        following = end
        while following > start + 1 and sum(sizes[following:end]) < overlap:
            following -= 1
        while following < end and sum(sizes[following : end + 1]) > budget:
            following += 1
        start = following


def chunk_token_budget(engine: Engine, system: str | None, text: str, answer_tokens: int) -> int:
    """Return how many tokens of the context length are left for chunks in a prompt.

    `text`: question and instructions. `answer_tokens`: tokens that are kept free for the answer. Raises UsageError if
    no token is left for chunks.
    """
    num_other = len(engine.renderer.render(Prompt(["."], text, system)))
    budget = engine.context_length - num_other - answer_tokens
    if budget < 1:
        raise UsageError(
            f"question and instructions take {num_other} tokens and the answer {answer_tokens}, but the context has "
            f"{engine.context_length}; lower max_tokens or shorten the instructions"
        )
    return budget
