"""Closeness and answers on a model that can read, over questions of six kinds: the figures of the README.

    python -m benchmarks.quality_1_5b --model Qwen/Qwen2.5-Coder-1.5B-Instruct --out data/results/quality-1-5b.json

The kinds are MuSiQue and NQ-open (reported questions, six chunks), and three recall tasks that are made here from the
definitions of RULER (Hsieh et al., 2024) over the texts of the sample corpus: several values of one key, one of several
keys, and variable tracking, in prompts of 2,000 and 4,000 tokens. Each question is answered by full prefill, and from
chunks stored alone and after the neutral text by full reuse, EPIC, ProphetKV, CacheBlend's rule and the default rule.
A run that is interrupted goes on with the same command, which also measures the configurations that a question lacks.
Read `study_configurations` and `recall_case` first.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.results import OutOption, split_counts, write_result
from ragblend.cli.options import PlotOption
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.corpus.embedders import default_embedder
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.fusion.rules import RULES, RuleInputs
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.plots import plot_quality
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.measures import FULL, REUSE, Configuration
from ragblend.lab.quality.study import QualityRecord, measure_prompt, run_label, summarize
from ragblend.lab.quality.tasks import QaCase
from ragblend.prompt.types import Prompt

MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
DATASETS = ("musique", "nq")
RECALL_TASKS = ("values", "keys", "tracking")
RECALL_SYSTEM = "You will read several passages and then answer a question about them. Answer with the values only."
PASSAGE_TOKENS = 200  # of a recall task's chunk, at least
NUM_VALUES, NUM_KEYS, NUM_VARIABLES = 4, 4, 5


def study_configurations() -> list[Configuration]:
    """Return full prefill; all rules over chunks stored alone; the default rule and CacheBlend's after neutral text."""
    others = [*_blends("epic", 0.15), *_blends("prophetkv", 0.05, 0.15)]
    in_both = [REUSE, *_blends("cacheblend", 0.15), *_blends("ask", 0.05, 0.15, 0.3)]
    return [
        FULL,
        *(each._replace(context="none") for each in (*others, *in_both)),
        *(each._replace(context="neutral") for each in in_both),
    ]


def _blends(rule: str, *ratios: float) -> list[Configuration]:
    return [Configuration("blend", rule, ratio) for ratio in ratios]


def add_control_rules(chunk_starts: Sequence[int]) -> None:
    """Add the rules of other papers to the rules by name, for a prompt whose chunks begin at these positions.

    `epic` recomputes the first tokens of each chunk (EPIC, arXiv 2410.15332). `prophetkv` recomputes the tokens that
    the question attends to, without edges or drift correction (ProphetKV, arXiv 2602.02579).
    """
    starts = torch.tensor(chunk_starts)

    def first_tokens(inputs: RuleInputs) -> Tensor:
        offsets = inputs.positions[:, None] - starts
        return -offsets.masked_fill(offsets < 0, 1 << 30).min(1).values.float()

    def attention(inputs: RuleInputs) -> Tensor:
        assert inputs.attention is not None
        return inputs.attention

    RULES["epic"] = replace(RULES["random"], name="epic", score=first_tokens)
    RULES["prophetkv"] = replace(
        RULES["ask"], name="prophetkv", score=attention, drift_gain=0.0, drift_gain_in_context=0.0
    )


# -- recall tasks


def recall_cases(task: str, num_tokens: int, count: int, engine: TransformersEngine) -> list[QaCase]:
    """Return `count` cases of a recall task in prompts of about `num_tokens` tokens."""
    return [recall_case(task, num_tokens, number, engine) for number in range(count)]


def recall_case(task: str, num_tokens: int, number: int, engine: TransformersEngine) -> QaCase:
    """Return one case of a recall task: passages of the sample corpus, some with a planted sentence, and a question.

    `values`: one key has four values in four passages; all are asked for. `keys`: four keys have a value each; one is
    asked for. `tracking`: a variable gets a number, and each of four others the value of the one before; the names of
    all five are asked for. The gold answer lists all of them, so F1 is the measure.
    """
    draw = random.Random(f"{task} {num_tokens} {number}")
    passages = _passages(draw, num_tokens, engine)
    if task == "values":
        key, values = _name(draw), [_number(draw) for _ in range(NUM_VALUES)]
        planted = [f"One of the special magic numbers for {key} is: {value}." for value in values]
        question, answer = f"What are all the special magic numbers for {key}?", ", ".join(values)
    elif task == "keys":
        pairs = [(_name(draw), _number(draw)) for _ in range(NUM_KEYS)]
        planted = [f"The special magic number for {key} is: {value}." for key, value in pairs]
        key, answer = draw.choice(pairs)
        question = f"What is the special magic number for {key}?"
    elif task == "tracking":
        names, value = (
            ["".join(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(NUM_VARIABLES)],
            _number(draw),
        )
        planted = [f"VAR {names[0]} = {value}."]
        planted += [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
        question, answer = f"Which variables have the value {value}? List all of them.", ", ".join(names)
    else:
        raise UsageError(f"the task is {task!r}; choose from {', '.join((*DATASETS, *RECALL_TASKS))}")
    places = sorted(draw.sample(range(len(passages)), len(planted)))
    for place, sentence in zip(places, planted, strict=True):
        sentences = passages[place].split(". ")
        sentences.insert(draw.randrange(1, len(sentences) + 1), sentence.removesuffix("."))
        passages[place] = ". ".join(sentences)
    return QaCase(question, (answer,), tuple(passages), f"{task} {num_tokens}", "given", RECALL_SYSTEM)


def _passages(draw: random.Random, num_tokens: int, engine: TransformersEngine) -> list[str]:
    """Return passages of the sample corpus, in random order, of about `num_tokens` tokens together."""
    paragraphs = [chunk for record in sample_corpus().records for chunk in record.chunks]
    draw.shuffle(paragraphs)
    passages, total = list[str](), 0
    for paragraph in cycle(paragraphs):
        if not passages or engine.renderer.count_tokens(passages[-1]) >= PASSAGE_TOKENS:
            total += engine.renderer.count_tokens(passages[-1]) if passages else 0
            if total >= num_tokens:
                return passages
            passages.append(paragraph)
        else:
            passages[-1] = f"{passages[-1]} {paragraph}"
    raise AssertionError("the corpus has no paragraph")


def _name(draw: random.Random) -> str:
    syllables = ("ba", "co", "di", "fe", "gu", "la", "mo", "ni", "pe", "ru", "sa", "to", "vi", "zu")
    return "".join(draw.choices(syllables, k=4))


def _number(draw: random.Random) -> str:
    return str(draw.randrange(1_000_000, 10_000_000))


# -- the study


def study_cases(
    base: TransformersEngine, tasks: Sequence[str], questions: int, lengths: Sequence[int], config: QualityConfig
) -> Iterator[tuple[str, QaCase, Prompt]]:
    """Yield the task, the case and the prompt of each question."""
    embedder = default_embedder()
    for task in tasks:
        if task in DATASETS:
            for case in load_cases(replace(config, data=task, num_questions=questions)):
                yield task, case, build_prompt(case, base, embedder, config)
            continue
        for num_tokens in lengths:
            for case in recall_cases(task, num_tokens, questions, base):
                yield case.kind, case, Prompt(list(case.passages), case.question, case.system)


def main(
    model: Annotated[str, typer.Option("--model", help="A folder or a Hugging Face id.")] = MODEL,
    out: OutOption = None,
    plot: PlotOption = None,
    tasks: Annotated[str, typer.Option("--tasks", help="Comma-separated.")] = ",".join((*DATASETS, *RECALL_TASKS)),
    questions: Annotated[int, typer.Option("--questions", help="Largest number of a task's questions.")] = 60,
    tokens: Annotated[str, typer.Option("--tokens", help="Lengths of recall prompts, comma-separated.")] = "2000,4000",
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int | None, typer.Option("--threads", help="Compute threads.")] = None,
) -> None:
    """Measure the questions, write each one's records to `out`, and print a line per task and configuration."""
    quiet_libraries()
    set_num_threads(threads)
    config = QualityConfig(model=model, data="musique", dtype=dtype, answer_tokens=24)
    done: list[dict[str, Any]] = []
    if out is not None and out.exists():
        done = json.loads(out.read_text(encoding="utf-8"))["questions"]
    known = {(each["task"], each["question"]): each for each in done}
    with load_engine(model, dtype=dtype, on_miss="inline") as base, torch.inference_mode():
        if not isinstance(base, TransformersEngine):
            raise UsageError(f"--model is {model!r}; give one that transformers runs here")
        for task, case, prompt in study_cases(base, tasks.split(","), questions, split_counts(tokens), config):
            question = known.get((task, case.question), {"task": task, "question": case.question, "rows": []})
            rows = question["rows"]
            measured = {Configuration(*(row[name] for name in Configuration._fields)) for row in rows}
            lacking = [each for each in study_configurations() if each not in measured]
            if not lacking:
                continue
            add_control_rules([run.start for run in base.request(prompt).prompt.runs])
            records, question["prompt_tokens"] = measure_prompt(
                base, prompt, case, list(dict.fromkeys((FULL, *lacking))), case.answer_tokens(config.answer_tokens)
            )
            rows += [{**each._asdict(), **records[each]._asdict()} for each in lacking]
            if question not in done:
                done.append(question)
            if out is not None:
                write_result(_result(model, dtype, done), out)
            print_line(f"{task}: {sum(each['task'] == task for each in done)} questions")
            gc.collect()  # the question's engines are reference cycles, which hold gigabytes of KV
    result = _result(model, dtype, done)
    for run in result["runs"]:
        print_line(
            f"{run['kind']:<14} {run_label(run):<26} {run['num_questions']:>3} charged {run['charged_budget_32']:.3f} "
            f"first {run['first_token_kl']:.4f} ({run['first_token_kl_low']:.4f} to {run['first_token_kl_high']:.4f}) "
            f"answer {run['answer_kl']:.4f} F1 {run['token_f1']:.3f} contains {run['contains_answer']:.3f}"
        )
    if plot is not None:
        plot_quality({**result, "config": config.as_dict()}, Path(plot))
    if out is None:
        write_result(result, out)


def _result(model: str, dtype: str, questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON object: all rows, and the means of the configurations in which every question is measured."""
    records: dict[Configuration, list[QualityRecord]] = {}
    for question in questions:
        for row in question["rows"]:
            values = dict(row)
            configuration = Configuration(*(values.pop(name) for name in Configuration._fields))
            records.setdefault(configuration, []).append(QualityRecord(**values))
    records = {each: found for each, found in records.items() if len(found) == len(questions)}
    kinds = [question["task"] for question in questions]
    return {
        "model": Path(model).name,
        "dtype": dtype,
        "num_questions": len(questions),
        "runs": summarize(records, kinds),
        "questions": list(questions),
    }


if __name__ == "__main__":
    typer.run(main)
