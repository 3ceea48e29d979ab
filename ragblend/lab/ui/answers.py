"""Answers a question in every mode, compares each answer with full prefill's, and blends again at another ratio.

The functions report through a job's events. Works with engines, the index and explanations; does not depend on HTTP.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragblend.config import Settings
from ragblend.corpus.citations import citation_facts, describe_source
from ragblend.corpus.folder_scan import display_source
from ragblend.demo.show import example_questions
from ragblend.engine.api import Engine, Stream
from ragblend.engine.report import Generation
from ragblend.engine.transformers.checkpoints import DEMO
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import EmptyCorpusError, RagblendError
from ragblend.index import ChunkIndex, SearchHit
from ragblend.lab.explain import STATES, Comparison
from ragblend.lab.explain_page import render_tokens
from ragblend.lab.ui.job_queue import JobCancelled, UiJob
from ragblend.lab.ui.uploads import display_name, document_names, list_supported_suffixes
from ragblend.options import MODES, Mode
from ragblend.prompt.types import Prompt

MAX_KEPT_QUESTIONS = 2
"""Questions whose KV is held in memory, so that they can be blended again: one for each of two tabs."""
MAX_DOCUMENT_NAMES = 200
"""Largest number of documents that the page lists."""

_REPORT_FIELDS = (
    "rule", "recompute_ratio", "ttft_s", "prompt_tokens", "num_chunks", "num_chunk_hits", "num_reused_tokens",
    "num_recomputed_tokens", "num_prefix_tokens", "charged_budget", "refused_reason", "failed",
)  # fmt: skip

RetrieveChunks = Callable[[ChunkIndex, str, Settings], Sequence[SearchHit]]


@dataclass
class UiState:
    """State of the server of `ragblend ui`: the engine and the index, once they are open, and the latest questions.

    `retrieve` returns the chunks for a question. `questions`: the latest answered questions, by an id.
    """

    settings: Settings
    retrieve: RetrieveChunks
    engine: Engine | None = None
    index: ChunkIndex | None = None
    problem: str = ""  # error message if opening them failed
    questions: OrderedDict[str, QuestionRun] = field(default_factory=OrderedDict)
    is_warm: bool = False  # whether this process has answered a question
    _names: tuple[int, list[str]] = (-1, [])  # generation of the index, and its documents then

    @property
    def engine_and_index(self) -> tuple[Engine, ChunkIndex]:
        """The engine and the index. Raises RagblendError if they are not open."""
        if self.engine is None or self.index is None:
            raise RagblendError(self.problem or "the model is not loaded")
        return self.engine, self.index

    def collect_page_state(self) -> dict[str, Any]:
        """Return the page's content before the first question, as JSON values: status, settings and documents."""
        settings = self.settings
        limit = {"endings": list_supported_suffixes(), "max_mib": settings.max_file_mib}
        if self.engine is None or self.index is None:
            return {"status": "failed" if self.problem else "loading", "model": settings.model, **limit,
                    "problem": self.problem}  # fmt: skip
        names, model = self._document_names(self.index), self.engine.name
        return {
            "status": "ready",
            "model": Path(model).name if Path(model).exists() else model,
            "rule": settings.rule,
            "context": self.engine.context,
            "k": settings.k,
            "neighbours": settings.neighbours,
            "store": display_source(str(settings.store)),
            "num_chunks": self.index.num_chunks,
            "num_documents": len(names),
            "documents": names[:MAX_DOCUMENT_NAMES],
            "examples": self._examples(names),
            "is_demo": model == DEMO,
            "shows_tokens": isinstance(self.engine, TransformersEngine),
            **limit,
        }

    def _document_names(self, index: ChunkIndex) -> list[str]:
        generation = index.generation()
        if generation != self._names[0]:
            self._names = generation, document_names(index)
        return self._names[1]

    def _examples(self, names: Sequence[str]) -> list[dict[str, str]]:
        """Return the demo's questions about the index's documents; none for other models, which cannot answer them."""
        if self.engine is None or self.engine.name != DEMO:
            return []
        documents = set(names)
        return [
            {"question": question.text, "answer": question.answer}
            for question in example_questions()
            if all(span["source"] in documents for span in question.gold)
        ]


class QuestionRun:
    """One question with its chunks, and its answers in several modes.

    Call `answer` for the mode "full" first: the answers in other modes are compared with that answer.
    """

    def __init__(self, engine: Engine, prompt: Prompt, settings: Settings) -> None:
        self._engine, self._prompt = engine, prompt
        self._options = replace(settings, mode="blend", temperature=0.0).generation
        # Other engines do not expose their KV, so only the texts of their answers are compared.
        self._compared = Comparison(engine, prompt, **self._options) if isinstance(engine, TransformersEngine) else None
        self._full: Generation | None = None

    def answer(self, mode: Mode, job: UiJob, ratio: float | None = None) -> None:
        """Answer in `mode`. Emit "start", then a "piece" for each piece of text, then "answer" with all figures.

        `ratio`: see `Comparison.stream`. Raises JobCancelled if the job was cancelled.
        """
        job.raise_if_cancelled()
        job.emit("start", mode=mode)
        stream = self._stream(mode, ratio)
        try:
            for piece in stream:
                job.emit("piece", mode=mode, text=piece)
                job.raise_if_cancelled()
        except JobCancelled:
            stream.close()
            raise
        result = stream.result
        if mode == "full":
            self._full = result
        report = result.report
        facts = {name: getattr(report, name) for name in _REPORT_FIELDS}
        contexts = sorted({chunk.context for chunk in report.chunks if chunk.hit and not chunk.exact})
        job.emit(
            "answer",
            mode=mode,
            text=result.text,
            finish_reason=result.finish_reason,
            contexts=contexts,
            agreement=self._compare_with_full(mode, result),
            shared=shared_beginning(result.text, self._full.text) if self._full is not None else result.text.strip(),
            **facts,
        )

    def emit_token_states(self, job: UiJob) -> None:
        """Emit the event "tokens": HTML that shows for each token of the prompt whether its KV was reused.

        The event describes the latest answer in mode "blend". Emits nothing if the engine does not expose its KV.
        """
        if self._compared is not None:
            explanation = self._compared.explanation()
            counts = {state: explanation.count(state) for state in STATES}
            job.emit("tokens", html=render_tokens(explanation), counts=counts)

    def _stream(self, mode: Mode, ratio: float | None) -> Stream:
        if self._compared is not None:
            return self._compared.stream(mode, ratio)
        options = self._options.copy()
        options["mode"] = mode
        if ratio is not None:
            options["recompute_ratio"] = ratio
        return self._engine.stream(self._prompt, **options)

    def _compare_with_full(self, mode: Mode, result: Generation) -> dict[str, Any] | None:
        if self._full is None or mode == "full":
            return None
        if self._compared is not None:
            return self._compared.agreement(mode)
        return {"answers_identical": result.text == self._full.text}


def shared_beginning(answer: str, reference: str) -> str:
    """Return the longest common beginning of two texts, without a word that is only partly common.

    White space at both ends of each text is ignored.

    >>> shared_beginning("He is a trainer of dogs.", "He is a train driver.")
    'He is a '
    >>> shared_beginning("the same", "the same and more")
    'the same'
    """
    text, other = answer.strip(), reference.strip()
    pairs = zip(text, other, strict=False)
    end = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(text), len(other)))
    is_between_words = all(end == len(each) or each[end].isspace() for each in (text, other))
    while end and not is_between_words and not text[end - 1].isspace():
        end -= 1
    return text[:end]


def answer_question(job: UiJob, question: str, ui: UiState) -> None:
    """Retrieve the chunks for a question, answer the question in every mode, and emit all results as events of `job`.

    The event "asked" follows the results. Its id is the `question_name` for `blend_again`. Raises EmptyCorpusError if
    the index has no documents.
    """
    engine, index = ui.engine_and_index
    if question.strip() and not index.num_chunks:
        raise EmptyCorpusError("there are no documents yet; drop some on this page, then ask again")
    hits = ui.retrieve(index, question, ui.settings)
    chunks = [hit.chunk for hit in hits]
    job.emit("sources", sources=[_source(hit) for hit in hits])
    engine.prefetch(chunks)  # during full prefill, because the comparison leaves out reads from the disk
    prompt = Prompt(chunks, question, ui.settings.system)
    run = QuestionRun(engine, prompt, ui.settings)
    if not ui.is_warm:  # because the comparison leaves out what only a process's first request costs
        job.emit("warming")
        job.raise_if_cancelled()
        engine.generate(prompt, mode="blend", max_tokens=1)
        ui.is_warm = True
    for mode in MODES:
        run.answer(mode, job)
    name = secrets.token_urlsafe(8)
    ui.questions[name] = run
    while len(ui.questions) > MAX_KEPT_QUESTIONS:
        ui.questions.popitem(last=False)
    run.emit_token_states(job)
    job.emit("asked", id=name)


def blend_again(job: UiJob, question_name: str, ratio: float, ui: UiState) -> None:
    """Answer a question again in mode "blend", with another recompute ratio, and emit the result as events of `job`.

    `question_name`: the id from the event "asked". Raises RagblendError if the question is no longer in `ui.questions`,
    because newer ones were asked.
    """
    run = ui.questions.get(question_name)
    if run is None:
        raise RagblendError(
            f"{MAX_KEPT_QUESTIONS} newer questions were asked, so the KV of this one is no longer held; ask it again"
        )
    ui.questions.move_to_end(question_name)
    run.answer("blend", job, ratio)
    run.emit_token_states(job)


def _source(hit: SearchHit) -> dict[str, Any]:
    chunk = hit.chunk
    name = display_name(chunk.source) if chunk.source else "chunk"
    return {
        "name": name,
        "place": describe_source(name, chunk.metadata),
        "source": display_source(chunk.source),
        "start": chunk.start,
        "end": chunk.end,
        **citation_facts(chunk.metadata),
        "score": round(hit.score, 3),
        "is_neighbour": hit.is_neighbour,
        "text": chunk.text,
    }
