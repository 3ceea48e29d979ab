"""A conversation over retrieved chunks: earlier turns stay as exact prefix, newly retrieved chunks are blended.

`condense` has the model rewrite a follow-up into a question to search for. Depends on engines and prompts. Does not
depend on retrieval or the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from ragblend.engine.api import BatchEngine, Engine, Stream
from ragblend.engine.generation import Conversation
from ragblend.errors import PromptTooLongError
from ragblend.prompt.types import Chunk, Message, Part, Prompt, as_chunk

log = logging.getLogger(__name__)

REPHRASE = (
    "Given a chat history and the latest user question which might refer to it, write a standalone question that can "
    "be understood without the history. Do not answer it; return it as it is if nothing is missing."
)
"""System text of the call that rewrites a follow-up into a question to search for, also in LangChain chains."""
_REPHRASE_TURNS = 6  # previous questions and answers that this call contains
_REPHRASE_TOKENS = 96  # longest rewritten question


class ChatSession:
    """The turns of a conversation and their KV. `stream` answers the next question and then adds a turn.

    An engine that is no BatchEngine (vLLM) receives all turns for each question, and fuses all chunks again.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self._engine = engine
        self._turns: list[tuple[str, str]] = []  # questions, without chunks, and answers
        self._seen: set[str] = set()  # texts of earlier turns' chunks
        self._messages: list[Message] = [Message("system", system)] if system else []
        self._conversation = Conversation()

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the system text and the turns, oldest first."""
        return tuple(self._messages)

    @property
    def has_answers(self) -> bool:
        """Return True if the conversation has an answer, so that the next question may refer to it."""
        return bool(self._turns)

    def condense(self, question: str) -> str:
        """Return the text to search for: `question`, rewritten by the model so that it needs no earlier turn.

        The model receives the last questions and answers, without chunks. This call is not part of the conversation.
        Returns `question` unchanged before the first answer, if the last turns exceed the context length, and if the
        model's text is empty or was cut. Do not call this with a model that is too small to rewrite questions.
        """
        if not self._turns:
            return question
        turns = [(role, text) for turn in self._turns for role, text in zip(("user", "assistant"), turn, strict=True)]
        turns = turns[-_REPHRASE_TURNS:]
        prompt = Prompt.from_messages([("system", REPHRASE), *turns, ("user", question)])
        try:
            answer = self._engine.generate(prompt, mode="prefix", max_tokens=_REPHRASE_TOKENS)
        except PromptTooLongError:
            log.warning("the last turns exceed the model's context, so the question is searched for unchanged")
            return question
        rephrased = " ".join(answer.text.split()).strip("\"'` ")
        return rephrased if rephrased and answer.finish_reason == "stop" else question

    def stream(self, chunks: Sequence[Part], question: str, **generation: Any) -> StreamedReply:
        """Return the stream of the answer to `question` over `chunks`.

        Chunks that an earlier turn contains are not repeated in this turn. `generation`: keyword arguments of
        `engine.stream`. If the conversation exceeds the model's context length, all earlier turns are dropped. Raises
        PromptTooLongError if the prompt is too long without them.
        """
        new = [chunk for part in chunks if (chunk := as_chunk(part)).text not in self._seen]
        asked = Prompt(new, question).messages[-1]
        prompt = Prompt.from_messages([*self._messages, asked], chunks=new)
        if isinstance(self._engine, BatchEngine):
            generation = {**generation, "conversation": self._conversation}
        try:
            stream = self._engine.stream(prompt, **generation)
        except PromptTooLongError:
            if not self.has_answers:
                raise
            log.warning("the conversation exceeds the model's context; earlier turns are dropped")
            self._messages = [message for message in self._messages if message.role == "system"]
            self._conversation, self._turns, self._seen = Conversation(), [], set()
            generation.pop("conversation", None)
            return self.stream(chunks, question, **generation)
        return StreamedReply(self, asked, question, new, stream)

    def add_turn(self, asked: Message, question: str, chunks: Sequence[Chunk], answer: str) -> None:
        """Append a finished turn: the user message `asked` and its `answer`.

        `asked` was made of `chunks` and `question`.
        """
        self._messages += [asked, Message("assistant", answer)]
        self._turns.append((question, answer))
        self._seen.update(chunk.text for chunk in chunks)


class StreamedReply:
    """An iterator over the texts of one answer. After the last text, the session receives the question and answer."""

    def __init__(
        self, session: ChatSession, asked: Message, question: str, chunks: Sequence[Chunk], stream: Stream
    ) -> None:
        self._session = session
        self._turn = (asked, question, chunks)
        self._stream = stream
        self.result = stream.result

    def __iter__(self) -> Iterator[str]:
        yield from self._stream
        self._session.add_turn(*self._turn, self.result.text)
