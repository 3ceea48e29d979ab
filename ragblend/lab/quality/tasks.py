"""Cases of a study: questions with their passages, and the task that fixes prompt, answer length and measure.

The four tasks of the CacheBlend paper (section 7.1) have the prompt texts, answer lengths and measures of LongBench's
scripts (`dataset2prompt.json`, `dataset2maxlen.json`, `eval.py`; Bai et al. 2023). Depends on prompts alone. Read
`QaCase` first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Literal, NamedTuple

from ragblend.prompt.types import CHUNK_SEPARATOR, Part, Prompt, as_chunk

SYSTEM = "You will read several passages and then answer a question about them. Answer with a few words only."


class Task(NamedTuple):
    """A kind of question. `template`: the user's turn, with `{context}` for the chunks and `{input}` for the question.

    `measure`: the field of a record that says how good an answer is. `answer_tokens`: the most of an answer.
    """

    template: str = "{context}" + CHUNK_SEPARATOR + "{input}"
    answer_tokens: int = 16
    measure: Literal["token_f1", "rouge_l"] = "token_f1"
    is_chat: bool = True  # False: a completion, without the model's chat template
    is_first_line: bool = False  # True: only the first line of an answer is scored

    def scored_text(self, answer: str) -> str:
        """Return the part of an answer's text that is compared with the gold answers."""
        return answer.lstrip("\n").split("\n")[0] if self.is_first_line else answer


QUESTION = Task()
"""A question that is asked after its passages."""

_ONLY = "Only give me the answer and do not output any other words."
_PASSAGES = Task(
    f"Answer the question based on the given passages. {_ONLY}\n\nThe following are given passages.\n{{context}}\n\n"
    f"Answer the question based on the given passages. {_ONLY}\n\nQuestion: {{input}}\nAnswer:",
    answer_tokens=32,
)
TASKS = {
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        answer_tokens=128,
        measure="rouge_l",
        is_chat=False,
        is_first_line=True,
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        answer_tokens=512,
        measure="rouge_l",
    ),
}
"""Tasks by LongBench's name of the data set."""


class QaCase(NamedTuple):
    """A question, and the passages from which the chunks of its prompt are chosen.

    `order`: how the chunks are chosen. "score" takes the chunks nearest to the question, nearest first; "given" takes
    each passage as one chunk. `question` is empty where the task itself says what to do.
    """

    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]
    kind: str = ""
    order: Literal["score", "given"] = "given"
    system: str | None = SYSTEM
    task: Task = QUESTION

    def answer_tokens(self, most: int | None) -> int:
        """Return `most`, the largest number of tokens of an answer; if it is None, that of the task."""
        return self.task.answer_tokens if most is None else most

    def prompt(self, chunks: Iterable[Part]) -> Prompt:
        """Return the prompt that asks the question over `chunks`, in this order."""
        head, _, tail = self.task.template.partition("{context}")
        between = (part for chunk in chunks for part in (CHUNK_SEPARATOR, as_chunk(chunk)))
        parts: list[Part] = [head, *islice(between, 1, None), tail.replace("{input}", self.question)]
        if not self.task.is_chat:
            return Prompt.from_text(parts)
        return Prompt.from_messages([*([("system", self.system)] if self.system else []), ("user", parts)])
