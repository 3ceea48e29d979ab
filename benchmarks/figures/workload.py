"""The workload of a figure: model, questions, and sizes, with the configurations that every figure compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ragblend.corpus.embedders import default_embedder
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.measures import FULL, PREFIX, REUSE, Configuration
from ragblend.lab.quality.tasks import QaCase
from ragblend.lab.tables import Facts
from ragblend.prompt.types import Prompt

PAPER = Configuration("blend", "cacheblend", 0.15)
"""The paper's rule at the paper's ratio, over chunks that are stored without context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a figure is measured on. `model`: None in figures of times means random weights of llama-50m."""

    model: str | None
    data: str = "demo"
    num_questions: int = 8
    num_chunks: int = 6
    chunk_tokens: int = 256
    dtype: str = "float32"
    threads: int | None = 1
    on_progress: Progress = ignore_progress

    @property
    def config(self) -> QualityConfig:
        """The options of `bench quality` with the same questions and sizes."""
        names = ("data", "num_questions", "num_chunks", "chunk_tokens", "dtype", "threads")
        return QualityConfig(model=self.model or "demo", **{name: getattr(self, name) for name in names})

    def as_dict(self) -> dict[str, Any]:
        """Return the workload as JSON values. Of the paths of model and data, only the last part is included."""
        return {
            name: value
            for name, value in self.config.as_dict().items()
            if name in ("model", "data", "part", "num_questions", "num_chunks", "chunk_tokens", "dtype", "threads")
        }


class Figure(NamedTuple):
    """A figure: the function that measures it, and the sizes that it has by default."""

    measure: Callable[[Workload], Facts]
    defaults: Mapping[str, int]


class Question(NamedTuple):
    """One case and its prompt."""

    case: QaCase
    prompt: Prompt


@contextmanager
def open_engine(work: Workload) -> Iterator[TransformersEngine]:
    """Yield the model of `work` on the transformers engine, without gradients. Raises UsageError for other engines."""
    with load_engine(work.model or "demo", dtype=work.dtype, on_miss="inline") as base, torch.inference_mode():
        if not isinstance(base, TransformersEngine):
            raise UsageError(f"--model is {work.model!r}; give one that transformers runs here")
        yield base


def questions_of(work: Workload, base: TransformersEngine) -> list[Question]:
    """Return the questions of `work`, with the prompts that `bench quality` builds."""
    embedder = default_embedder()
    return [Question(case, build_prompt(case, base, embedder, work.config)) for case in load_cases(work.config)]


def own_default(base: TransformersEngine) -> Configuration:
    """Return ragblend's default for this model: rule `ask` at its ratio, over chunks stored alone."""
    rule = find_rule("auto", base.layers.num_layers)
    return Configuration("blend", rule.name, rule.ratio)


def compared(base: TransformersEngine) -> list[Configuration]:
    """Return the configurations that figures compare: full prefill, the baselines, the paper's rule and the default."""
    return list(dict.fromkeys([FULL, PREFIX, REUSE, PAPER, own_default(base)]))


def label_of(configuration: Configuration) -> str:
    """Return the name of a configuration in legends."""
    if configuration.mode != "blend":
        return str(configuration.mode)
    context = f", {configuration.context}" if configuration.context != "none" else ""
    return f"{configuration.rule} {configuration.ratio:.0%}{context}"


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean of one value or more."""
    return sum(values) / len(values)
