"""What the fixture `calls` records."""

from __future__ import annotations

from typing import NamedTuple

from ragblend.engine.api import Stream
from ragblend.engine.report import Generation
from ragblend.frameworks.model import Request, Turn


class Call(NamedTuple):
    """One call of an LLM: what the framework sent, the prompt made of it, and the answer."""

    turns: list[Turn]
    request: Request
    stream: Stream

    @property
    def result(self) -> Generation:
        return self.stream.result
