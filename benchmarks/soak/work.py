"""Chunks, prompts and reference answers of the soak test.

The right answer to a prompt depends only on the mode and on the set of chunks that were hits. The transformers engine
computes all of these answers before the run, in this process, one prompt at a time. Batched sums are computed in
another order, so only certain tokens are compared: those before the first token whose lead over the second most likely
one is less than `MARGIN` nats.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock
from typing import Any

from ragblend.demo.corpus import REFERENCE_KINDS, Corpus, sample_corpus
from ragblend.engine.load import load_engine
from ragblend.engine.report import Generation
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.vllm.params import BlendParams, VllmMode
from ragblend.errors import RagblendError
from ragblend.options import Mode
from ragblend.prompt.types import Prompt

TENANTS = ("acme", "globex", "initech")
MIN_CHUNKS, MAX_PROMPT_CHUNKS = 24, 3
ANSWER_TOKENS = 8
MARGIN = 0.05
"""Nats. Log-probabilities of different engines and batches differ by less than a thousandth of this."""

Hits = frozenset[int]


@dataclass(frozen=True, slots=True)
class Text:
    """A chunk. `owners`: the namespaces that ingest it, which are all, one or none. `text`: of a new chunk."""

    number: int
    token_ids: tuple[int, ...]
    owners: tuple[str, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its chunks, in order."""

    number: int
    prompt: Prompt
    token_ids: tuple[int, ...]
    texts: tuple[Text, ...]

    def spans(self) -> list[tuple[int, int]]:
        """Return the start and the end of each chunk in the prompt's tokens."""
        found: list[tuple[int, int]] = []
        for text in self.texts:
            start = found[-1][1] if found else 0
            while self.token_ids[start : start + len(text.token_ids)] != text.token_ids:
                start += 1
            found.append((start, start + len(text.token_ids)))
        return found


@dataclass(frozen=True, slots=True)
class Reference:
    """The certain tokens at the beginning of a right answer."""

    token_ids: tuple[int, ...]

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """Return True if the answer equals the reference over the length of the shorter one.

        >>> Reference((4, 5)).agrees([4]), Reference((4, 5)).agrees([4, 5, 9]), Reference((4, 5)).agrees([5])
        (True, True, False)
        """
        shared = min(len(self.token_ids), len(token_ids))
        return tuple(token_ids[:shared]) == self.token_ids[:shared]


class Work:
    """Chunks and prompts of a run, determined by the seed."""

    def __init__(self, engine: TransformersEngine, num_prompts: int, seed: int) -> None:
        self._engine, self._random, corpus = engine, random.Random(seed), sample_corpus()
        passages = [chunk for record in corpus.records for chunk in record.chunks]
        kinds = itertools.cycle(
            (REFERENCE_KINDS, ("one_hop", "two_hop_cross", "comparison"))
        )  # answers to the first need attention between chunks, which full reuse lacks
        asked = [self._draw_question(corpus, next(kinds)) for _ in range(num_prompts)]
        used = dict.fromkeys(number for gold, _ in asked for number in gold)
        others = [number for number in range(len(passages)) if number not in used]
        used |= dict.fromkeys(self._random.sample(others, max(MAX_PROMPT_CHUNKS, MIN_CHUNKS - len(used))))
        self._passages = [passages[number] for number in used]
        self.texts = [self._text(number, passage) for number, passage in enumerate(self._passages)]
        self.all_texts = list(self.texts)  # and those of `make_text`
        places = {number: place for place, number in enumerate(used)}
        self.questions = [
            self._question(number, [places[each] for each in gold], question)
            for number, (gold, question) in enumerate(asked)
        ]
        self._fresh, self._lock = itertools.count(len(self.texts)), Lock()
        self.stop_ids, self.prefix_ids = engine.renderer.stop_ids(), engine.default_prefix_ids
        self.tokenizer = engine.renderer.fingerprint

    def _draw_question(self, corpus: Corpus, kinds: Sequence[str]) -> tuple[tuple[int, ...], str]:
        """Draw a question of one of these kinds. Return the numbers of the chunks that answer it, and its text."""
        while True:
            question = self._random.choice(corpus.questions)
            gold = corpus.gold_chunks(question)
            if question.kind in kinds and len(gold) < MAX_PROMPT_CHUNKS:
                return gold, question.text

    def _text(self, number: int, passage: str) -> Text:
        # Of six chunks, four are ingested by all namespaces, one by a single namespace, and one by none.
        owners = {4: (TENANTS[number // 6 % len(TENANTS)],), 5: ()}.get(number % 6, TENANTS)
        return Text(number, self._ids(passage), owners)

    def _ids(self, passage: str) -> tuple[int, ...]:
        return self._engine.renderer.chunk_ids(passage)

    def make_text(self, *, shuffled: bool = False) -> Text:
        """Make a new chunk that every namespace may ingest. May be called from any thread.

        shuffled: its words are in another order, so that no other chunk is found in it.
        """
        with self._lock:
            number = next(self._fresh)
            passage = self._passages[number % len(self._passages)]
            if shuffled:
                words = passage.split()
                passage = " ".join(random.Random(number).sample(words, len(words)))
            passage = f"{passage} This is copy {number}."
            text = Text(number, self._ids(passage), TENANTS, passage)
            self.all_texts.append(text)
            return text

    def _question(self, number: int, gold: Sequence[int], asked: str) -> Question:
        """Make a prompt from the gold chunks, in order, with other chunks inserted at random positions."""
        chosen = list(gold)
        others = [text.number for text in self.texts if text.number not in gold]
        while len(chosen) < self._random.randint(2, MAX_PROMPT_CHUNKS):
            chosen.insert(self._random.randint(0, len(chosen)), others.pop(self._random.randrange(len(others))))
        texts = [self.texts[place] for place in chosen]
        prompt = Prompt([self._passages[text.number] for text in texts], asked)
        matched = self._engine.match(prompt)
        assert [run.chunk_ids for run in matched.runs] == [text.token_ids for text in texts]
        return Question(number, prompt, tuple(matched.token_ids), tuple(texts))


class References:
    """Right answers by prompt number, mode and hits. `num_certain`: mean number of certain tokens."""

    def __init__(self, found: dict[tuple[int, Mode, Hits], Reference], num_certain: float) -> None:
        self._found = found
        self.num_certain = num_certain

    def __len__(self) -> int:
        return len(self._found)

    def of(self, question: Question, mode: Mode, ratio: float | None, hits: Hits) -> Reference:
        """Return the right answer of a request. Without reuse, and at ratio 1, it is that of full prefill."""
        if mode in ("full", "prefix") or ratio == 1.0 or not hits:
            mode, hits = "full", frozenset()
        return self._found[question.number, mode, hits]


def subsets(count: int) -> Iterator[Hits]:
    """Yield every non-empty set of positions of `count` chunks.

    >>> [sorted(each) for each in subsets(2)]
    [[0], [1], [0, 1]]
    """
    for size in range(1, count + 1):
        yield from map(frozenset, itertools.combinations(range(count), size))


def compute_references(questions: Sequence[Question], model: str, notify: Callable[[str], None]) -> References:
    """Compute the right answers of all questions. For each set of hits, only the chunks at its positions are stored."""
    found: dict[tuple[int, Mode, Hits], Reference] = {}
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="ragblend-soak-"))
        engine = stack.enter_context(load_engine(model, store, on_miss="inline", context="none"))
        stop_ids = engine.renderer.stop_ids()
        for question in questions:
            notify(f"right answers: prompt {question.number + 1} of {len(questions)}")
            found[question.number, "full", frozenset()] = _answer(engine, question, "full", stop_ids, frozenset())
            for hits in subsets(len(question.texts)):
                chunks = list(question.prompt.chunks)
                stored = [chunks[position] for position in sorted(hits)]
                for chunk in stored:
                    engine.precompute(chunk)
                for mode in ("blend", "reuse"):
                    found[question.number, mode, hits] = _answer(engine, question, mode, stop_ids, hits)
                for chunk in stored:
                    engine.forget(chunk)
    certain = [len(reference.token_ids) for reference in found.values()]
    return References(found, sum(certain) / len(certain))


def _answer(
    engine: TransformersEngine, question: Question, mode: Mode, stop_ids: frozenset[int], hits: Hits
) -> Reference:
    generation: Generation = engine.generate(
        question.prompt,
        mode=mode,
        max_tokens=ANSWER_TOKENS,
        logit_bias=exclude_tokens(stop_ids),
        logprobs=True,
        top_logprobs=3,
    )
    seen = {position for position, chunk in enumerate(generation.report.chunks) if chunk.hit}
    if seen != hits:
        raise RagblendError(
            f"the reference engine hit chunks {sorted(seen)} of prompt {question.number}, but {sorted(hits)} are stored"
        )
    certain: list[int] = []
    for token in generation.logprobs or ():
        others = [logprob for token_id, logprob in token.top if token_id not in stop_ids]
        if others[0] - others[1] < MARGIN:
            break
        certain.append(token.token_id)
    return Reference(tuple(certain))


def exclude_tokens(token_ids: frozenset[int]) -> dict[int, float]:
    """Return a logit bias that excludes these tokens. Without stop tokens, all answers have the full length."""
    return dict.fromkeys(token_ids, -100.0)


def request_body(
    question: Question, *, mode: VllmMode, ratio: float | None, stream: bool, more: dict[str, Any]
) -> dict[str, Any]:
    """Return the JSON body of a completion request, with the fields of `more`.

    In mode ingest the question has one chunk, which ends before the last token of the prompt.
    """
    end = len(question.token_ids) - 1
    span = (end - len(question.texts[0].token_ids), end) if mode == "ingest" else None
    return {
        "prompt": list(question.token_ids),
        "temperature": 0.0,
        "return_token_ids": True,
        "stream": stream,
        "kv_transfer_params": BlendParams(mode, ratio=ratio, span=span).as_dict(),
        **more,
    }
