"""A question, answered in every mode one after the other, each beside full prefill; and blended again at another ratio.

What happens is told to a Job's listener as events. Knows engines, the index and explanations; nothing of HTTP.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragblend.config import Settings
from ragblend.corpus.folders import shown
from ragblend.demo.show import examples
from ragblend.engine.api import Engine, Stream
from ragblend.engine.report import MODES, Generation, Mode
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.model import DEMO
from ragblend.errors import EmptyCorpusError, RagblendError
from ragblend.index import ChunkIndex, SearchHit
from ragblend.lab.explain import Comparison
from ragblend.lab.explain_page import render_tokens
from ragblend.lab.ui.desk import Job, Stopped
from ragblend.lab.ui.uploads import document_names, readable_endings, shown_name
from ragblend.prompt.prompt import SegmentedPrompt

NUM_KEPT = 2
"""Questions whose KV is held in memory, to be blended again: one for each of two tabs."""
NUM_NAMES = 200
"""Documents that the page lists."""

_SHOWN = (
    "rule", "recompute_ratio", "ttft_s", "prompt_tokens", "num_chunks", "num_chunk_hits", "num_reused_tokens",
    "num_recomputed_tokens", "num_prefix_tokens", "charged_budget", "refused_reason", "failed",
)  # fmt: skip

Find = Callable[[ChunkIndex, str, Settings], Sequence[SearchHit]]


@dataclass
class Room:
    """What the page is about: an engine and an index, once they are open, and the latest questions."""

    settings: Settings
    find: Find
    engine: Engine | None = None
    index: ChunkIndex | None = None
    problem: str = ""  # why they could not be opened
    asked: OrderedDict[str, Asked] = field(default_factory=OrderedDict)
    is_warm: bool = False  # whether something was answered before
    _names: tuple[int, list[str]] = (-1, [])  # of the documents, as of a generation of the index

    @property
    def opened(self) -> tuple[Engine, ChunkIndex]:
        """Both. Raises RagblendError where they could not be opened."""
        if self.engine is None or self.index is None:
            raise RagblendError(self.problem or "the model is not loaded")
        return self.engine, self.index

    def facts(self) -> dict[str, Any]:
        """What the page shows before anything is asked."""
        settings = self.settings
        limit = {"endings": readable_endings(), "max_mib": settings.max_file_mib}
        if self.engine is None or self.index is None:
            return {"status": "failed" if self.problem else "loading", "model": settings.model, **limit,
                    "problem": self.problem}  # fmt: skip
        names = self._document_names(self.index)
        return {
            "status": "ready",
            "model": _model_name(self.engine.name),
            "rule": settings.rule,
            "context": self.engine.context,
            "k": settings.k,
            "neighbours": settings.neighbours,
            "index": shown(str(settings.index)),
            "num_chunks": self.index.num_chunks,
            "num_documents": len(names),
            "documents": names[:NUM_NAMES],
            "examples": self._examples(names),
            "is_demo": self.engine.name == DEMO,
            "shows_tokens": isinstance(self.engine, TransformersEngine),
            **limit,
        }

    def _document_names(self, index: ChunkIndex) -> list[str]:
        generation = index.generation()
        if generation != self._names[0]:
            self._names = generation, document_names(index)
        return self._names[1]

    def _examples(self, names: Sequence[str]) -> list[dict[str, str]]:
        """Prepared questions about the documents that are here, which only the embedded model understands."""
        if self.engine is None or self.engine.name != DEMO:
            return []
        known = set(names)
        return [
            {"question": question.text, "answer": question.answer}
            for question in examples()
            if all(span["source"] in known for span in question.gold)
        ]


class Asked:
    """One question over its chunks, to be answered in one mode after the other, full prefill first."""

    def __init__(self, engine: Engine, prompt: SegmentedPrompt, settings: Settings) -> None:
        self._engine, self._prompt = engine, prompt
        self._options = replace(settings, mode="blend", temperature=0.0).generation
        # An engine of another backend keeps the KV to itself: of its answers only the texts can be compared.
        self._compared = Comparison(engine, prompt, **self._options) if isinstance(engine, TransformersEngine) else None
        self._full: Generation | None = None

    def answer(self, mode: Mode, job: Job, ratio: float | None = None) -> None:
        """Answer in `mode`, telling "start", every "piece" and the "answer" with its facts. `ratio`: see Comparison."""
        job.check()
        job.tell("start", mode=mode)
        stream = self._stream(mode, ratio)
        try:
            for piece in stream:
                job.tell("piece", mode=mode, text=piece)
                job.check()
        except Stopped:
            stream.close()
            raise
        result = stream.result
        if mode == "full":
            self._full = result
        report = result.report
        facts = {name: getattr(report, name) for name in _SHOWN}
        contexts = sorted({chunk.context for chunk in report.chunks if chunk.hit and not chunk.exact})
        job.tell(
            "answer",
            mode=mode,
            text=result.text,
            finish_reason=result.finish_reason,
            contexts=contexts,
            agreement=self._agreement(mode, result),
            **facts,
        )

    def tokens(self, job: Job) -> None:
        """Tell what blending did to every token, as HTML; nothing where the engine does not show its KV."""
        if self._compared is not None:
            explanation = self._compared.explanation()
            counts = {state: explanation.count(state) for state in ("exact", "computed", "reused", "recomputed")}
            job.tell("tokens", html=render_tokens(explanation), counts=counts)

    def _stream(self, mode: Mode, ratio: float | None) -> Stream:
        if self._compared is not None:
            return self._compared.stream(mode, ratio)
        options = self._options.copy()
        options["mode"] = mode
        if ratio is not None:
            options["recompute_ratio"] = ratio
        return self._engine.stream(self._prompt, **options)

    def _agreement(self, mode: Mode, result: Generation) -> dict[str, Any] | None:
        if self._full is None or mode == "full":
            return None
        if self._compared is not None:
            return self._compared.agreement(mode)._asdict()
        return {"answers_identical": result.text == self._full.text}


def ask(job: Job, question: str, room: Room) -> None:
    """Find chunks for a question and answer it in every mode."""
    engine, index = room.opened
    if question.strip() and not index.num_chunks:
        raise EmptyCorpusError("there are no documents yet; drop some on this page, then ask again")
    hits = room.find(index, question, room.settings)
    chunks = [hit.chunk for hit in hits]
    job.tell("sources", sources=[_source(hit) for hit in hits])
    engine.prefetch(chunks)  # while full prefill runs: what reading from disk takes is not what is compared
    prompt = SegmentedPrompt(chunks, question, room.settings.system)
    asked = Asked(engine, prompt, room.settings)
    if not room.is_warm:  # what the first request of a process pays once is not what is compared either
        job.tell("warming")
        job.check()
        engine.generate(prompt, mode="blend", max_tokens=1)
        room.is_warm = True
    for mode in MODES:
        asked.answer(mode, job)
    name = secrets.token_urlsafe(8)
    room.asked[name] = asked
    while len(room.asked) > NUM_KEPT:
        room.asked.popitem(last=False)
    asked.tokens(job)
    job.tell("asked", id=name)


def blend_again(job: Job, name: str, ratio: float, room: Room) -> None:
    """Answer a question once more by blending, with another share recomputed."""
    asked = room.asked.get(name)
    if asked is None:
        raise RagblendError(f"{NUM_KEPT} newer questions were asked since, and this one's KV is let go; ask it again")
    room.asked.move_to_end(name)
    asked.answer("blend", job, ratio)
    asked.tokens(job)


def _model_name(name: str) -> str:
    """A model as people call it: of a local path its last part."""
    return Path(name).name if Path(name).exists() else name


def _source(hit: SearchHit) -> dict[str, Any]:
    chunk = hit.chunk
    return {
        "name": shown_name(chunk.source) if chunk.source else "chunk",
        "source": shown(chunk.source),
        "start": chunk.start,
        "end": chunk.end,
        "score": round(hit.score, 3),
        "is_neighbour": hit.is_neighbour,
        "text": chunk.text,
    }
