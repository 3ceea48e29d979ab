"""The CacheBlend paper's data sets: LongBench's files and the raw ones give LongBench's prompts, chunks and scores."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ragblend.cli.app import app
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.load import load_engine
from ragblend.errors import CorruptError
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.data import build_prompt
from ragblend.lab.quality.measures import answer_f1, rouge_l
from ragblend.lab.quality.records import NUM_EXAMPLES, read_cases
from ragblend.lab.quality.tasks import TASKS, QaCase

NAMES = ("Mara Oster", "Ilse Brandt", "Otto Sutton", "Lea Winter", "Jonas Falk", "Nora Stein")
PLACES = ("Dublin", "Lisbon", "Tallinn", "Cardiff", "Ghent", "Oslo")
LIVES = [
    f"{name} moved to {place} as a child. {name} has worked there as a teacher for many years, and likes it."
    for name, place in zip(NAMES, PLACES, strict=True)
]
CHATS = [
    f"{name.split()[0]}: I am at the station in {place} now, where are you?\nJan: Still at home, I take the next bus."
    for name, place in zip(NAMES, PLACES, strict=True)
]
SUMMARIES = [f"{name.split()[0]} waits for Jan in {place}." for name, place in zip(NAMES, PLACES, strict=True)]

TWO_WIKI = {
    "_id": "1", "type": "compositional", "question": "Where does Mara Oster work?", "answer": "Dublin",
    "context": [[name, [f"{part}." for part in text.rstrip(".").split(". ")]]
                for name, text in zip(NAMES, LIVES, strict=True)],
    "supporting_facts": [["Mara Oster", 0]], "evidences": [["Mara Oster", "residence", "Dublin"]],
}  # fmt: skip
MUSIQUE = {
    "id": "2hop__1_2", "question": "Where does Ilse Brandt work?", "answer": "Lisbon", "answer_aliases": ["Lisboa"],
    "answerable": True, "question_decomposition": [],
    "paragraphs": [{"idx": number, "title": name, "paragraph_text": text, "is_supporting": number == 1}
                   for number, (name, text) in enumerate(zip(NAMES, LIVES, strict=True))],
}  # fmt: skip
SAMSUM = [
    {"id": str(number), "dialogue": chat.replace("\n", "\r\n"), "summary": summary}
    for number, (chat, summary) in enumerate(zip(CHATS, SUMMARIES, strict=True))
]


def longbench(name: str, question: str, context: str, answers: Sequence[str]) -> dict[str, Any]:
    facts = {"length": len(context.split()), "dataset": name, "language": "en", "all_classes": None, "_id": "0a"}
    return {"input": question, "context": context, "answers": [*answers], **facts}


def passages_of(texts: Sequence[str]) -> str:
    return "\n".join(f"Passage {number}:\n{text}" for number, text in enumerate(texts, start=1))


EXAMPLES = [f"Dialogue: {chat}\nSummary: {summary}" for chat, summary in zip(CHATS, SUMMARIES, strict=True)]
LONGBENCH = [
    longbench("2wikimqa", "Where does Mara Oster work?", passages_of(LIVES), ["Dublin"]),
    longbench("musique", "Where does Ilse Brandt work?", passages_of(LIVES), ["Lisbon"]),
    longbench("samsum", f"Dialogue: {CHATS[0]}\nSummary: ", "\n".join(EXAMPLES[1:]), [SUMMARIES[0]]),
    longbench("multi_news", "", passages_of(LIVES), ["Six people work as teachers."]),
]


def write(path: Path, records: Sequence[Any], *, as_lines: bool) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n" if as_lines else json.dumps(records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def engine():
    with load_engine("demo", dtype="float32", on_miss="inline") as found:
        yield found


# -- files


def test_longbench_files_give_a_chunk_per_passage_example_and_article(tmp_path):
    cases = read_cases(write(tmp_path / "test.jsonl", LONGBENCH, as_lines=True))
    assert [case.kind for case in cases] == ["2wikimqa", "musique", "samsum", "multi_news"]
    assert [case.order for case in cases] == ["score", "score", "given", "given"]
    assert [list(case.passages) for case in cases] == [LIVES, LIVES, EXAMPLES[1:], LIVES]
    assert [case.task.measure for case in cases] == ["token_f1", "token_f1", "rouge_l", "rouge_l"]
    assert [case.task.answer_tokens for case in cases] == [32, 32, 128, 512]  # dataset2maxlen.json
    (again,) = read_cases(write(tmp_path / "e.jsonl", [{**LONGBENCH[3], "dataset": "multi_news_e"}], as_lines=True))
    assert again == cases[3]


def test_raw_two_wiki_and_musique_give_titled_paragraphs(tmp_path):
    (wiki,) = read_cases(write(tmp_path / "dev.json", [TWO_WIKI], as_lines=False))
    assert (wiki.question, wiki.answers, wiki.task) == (TWO_WIKI["question"], ("Dublin",), TASKS["2wikimqa"])
    titled = tuple(f"{name}\n{text}" for name, text in zip(NAMES, LIVES, strict=True))
    assert wiki.passages == titled
    unanswerable = {**MUSIQUE, "answerable": False}
    (musique,) = read_cases(write(tmp_path / "dev.jsonl", [unanswerable, MUSIQUE], as_lines=True))
    assert (musique.answers, musique.task) == (("Lisbon", "Lisboa"), TASKS["musique"])
    assert musique.passages == titled


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "parquet"])
def test_raw_samsum_gives_other_dialogues_with_summaries_as_examples(tmp_path, form):
    path = tmp_path / f"test.{form}"
    if form == "csv":
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", "dialogue", "summary"])
            writer.writeheader()
            writer.writerows(SAMSUM)
    elif form == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(SAMSUM), path)
    else:
        write(path, SAMSUM, as_lines=form == "jsonl")
    cases = read_cases(path)
    assert len(cases) == len(SAMSUM)
    for case, record in zip(cases, SAMSUM, strict=True):
        others = [f"Dialogue: {each['dialogue']}\nSummary: {each['summary']}" for each in SAMSUM if each != record]
        assert sorted(case.passages) == sorted(others)
        assert (case.question, case.answers) == (f"Dialogue: {record['dialogue']}\nSummary: ", (record["summary"],))
    assert read_cases(path) == cases
    many = [{**record, "dialogue": f"{record['dialogue']} {n}"} for n in range(9) for record in SAMSUM]
    crowd = read_cases(write(tmp_path / "many.json", many, as_lines=False))
    assert {len(case.passages) for case in crowd} == {NUM_EXAMPLES}


@pytest.mark.parametrize(("source", "target"), [("test.src.cleaned", "test.tgt"), ("val.txt.src", "val.txt.tgt")])
def test_raw_multi_news_gives_the_articles_and_the_summary(tmp_path, source, target):
    line = " ||||| ".join(text.replace(". ", ". NEWLINE_CHAR ") for text in LIVES) + " |||||"
    (tmp_path / source).write_text(f"{line}\n{line}\n")
    (tmp_path / target).write_text("\u2013 Six teachers.\n\u2013 Six people.\n")
    cases = read_cases(tmp_path / source)
    assert [case.answers for case in cases] == [("\u2013 Six teachers.",), ("\u2013 Six people.",)]
    assert [text.replace("\n ", "") for text in cases[0].passages] == LIVES
    record = {"document": line.replace("NEWLINE_CHAR", "\n"), "summary": "\u2013 Six teachers."}
    (other,) = read_cases(write(tmp_path / "test.jsonl", [record], as_lines=True))
    assert [each.split() for each in other.passages] == [each.split() for each in cases[0].passages]
    (tmp_path / target).write_text("one line\n")
    with pytest.raises(CorruptError, match=r"3 lines, but .* has 2"):
        read_cases(tmp_path / source)


def test_other_longbench_tasks_are_refused_with_the_known_names(tmp_path):
    path = write(tmp_path / "gov.jsonl", [longbench("gov_report", "", "A report.", ["short"])], as_lines=True)
    with pytest.raises(CorruptError, match=r"'gov_report'; known: 2wikimqa, musique, samsum, multi_news"):
        read_cases(path)


# -- prompts


def cases_of(tmp_path: Path) -> list[QaCase]:
    return read_cases(write(tmp_path / "test.jsonl", LONGBENCH, as_lines=True))


def test_prompts_have_the_text_of_longbench_around_the_chunks(engine, tmp_path):
    wiki, musique, samsum, news = cases_of(tmp_path)
    only = "Only give me the answer and do not output any other words."
    asked = f"Answer the question based on the given passages. {only}"
    whole = [case.prompt(case.passages).messages for case in (wiki, musique, samsum, news)]
    assert [[message.role for message in messages] for messages in whole] == [["user"]] * 4
    texts = [messages[0].content for messages in whole]
    body = "\n\n".join(LIVES)
    for text, case in zip(texts, (wiki, musique), strict=False):
        assert text == (
            f"{asked}\n\nThe following are given passages.\n{body}\n\n{asked}\n\nQuestion: {case.question}\nAnswer:"
        )
    few = "Summarize the dialogue into a few short sentences. The following are some examples."
    assert texts[2] == "\n\n".join([few, *EXAMPLES[1:], f"Dialogue: {CHATS[0]}\nSummary: "])
    one_page = "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
    assert texts[3] == f"{one_page}{body}\n\nNow, write a one-page summary of all the news.\n\nSummary:"
    ids = engine.renderer.render(samsum.prompt(samsum.passages))
    assert engine.renderer.decode(ids).endswith(texts[2])  # no turn of a chat around the examples


def test_every_chunk_of_a_data_set_is_found_in_its_prompt(engine, tmp_path):
    config = QualityConfig(num_chunks=4, chunk_tokens=96)
    for case in cases_of(tmp_path):
        prompt = build_prompt(case, engine, HashingEmbedder(), config)
        stored = with_own_store(engine, system=case.system, context="none")
        for chunk in prompt.chunks:
            stored.precompute(chunk)
        report = stored.generate(prompt, mode="blend", rule="cacheblend", recompute_ratio=0.15, max_tokens=1).report
        assert (report.num_chunks, report.num_chunk_hits) == (4, 4), case.kind
        if case.order == "given":
            assert [chunk.text for chunk in prompt.chunks] == [*case.passages[:4]]


# -- scores


@pytest.mark.parametrize(
    ("found", "gold", "score"),
    [  # by the package `rouge` 1.0.1, which LongBench's metrics.py calls
        ("A cat sat. It ran.", "A cat ran. A dog sat.", 0.7999999950000002),
        ("the quick brown fox. jumps over", "over the brown dog. a quick fox jumps.", 0.8571428522448981),
        (
            "Amanda baked cookies and will bring Jerry some tomorrow.",
            "Amanda will bring Jerry some cookies tomorrow. She baked them.",
            0.7368421002770082,
        ),
        ("x y x y z", "y x z x. x", 0.999999995),
        ("", "x", 0.0),
        ("Otto", "otto", 0.0),
    ],
)
def test_rouge_l_is_that_of_longbench_s_script(found, gold, score):
    assert rouge_l(found, gold) == pytest.approx(score, abs=1e-12)


def test_f1_normalizes_as_longbench_s_script_does():
    assert answer_f1("the\u2013end of an era", "end of era") == pytest.approx(2 * 2 / 6)  # "\u2013end" keeps its dash
    assert answer_f1("snake_case (a)", "snakecase") == 1.0


def test_only_the_first_line_of_a_dialogue_s_summary_is_scored():
    answer = "\nMara waits for Jan in Dublin.\nDialogue: Ilse: hi"
    assert TASKS["samsum"].scored_text(answer) == "Mara waits for Jan in Dublin."
    assert {TASKS[name].scored_text(answer) for name in ("2wikimqa", "musique", "multi_news")} == {answer}


def test_bench_quality_measures_each_data_set_from_its_file(tmp_path):
    news = " ||||| ".join(LIVES)
    files = {
        "2wikimqa": write(tmp_path / "2wiki.json", [TWO_WIKI], as_lines=False),
        "musique": write(tmp_path / "musique.jsonl", [MUSIQUE], as_lines=True),
        "samsum": write(tmp_path / "samsum.json", SAMSUM, as_lines=False),
        "multi_news": write(tmp_path / "n.jsonl", [{"document": news, "summary": "Six teachers."}], as_lines=True),
        "all": write(tmp_path / "longbench.jsonl", LONGBENCH, as_lines=True),
    }
    options = "--num-questions 4 --num-chunks 3 --answer-tokens 8 --rules cacheblend --ratios 0.15 --embedder hashing"
    for name, path in files.items():
        ran = CliRunner().invoke(app, ["bench", "quality", "--data", str(path), *options.split(), "--json"])
        assert ran.exit_code == 0, ran.output
        facts = json.loads(ran.stdout.splitlines()[-1])
        runs = [run for run in facts["runs"] if run["kind"] == "all"]
        assert [run["mode"] for run in runs] == ["full", "prefix", "reuse", "blend"]
        assert runs[0]["first_token_kl"] == 0.0 < runs[2]["first_token_kl"]
        assert all(run["rouge_l"] is not None for run in runs)
        kinds = {run["kind"] for run in facts["runs"]}
        assert kinds == ({"all", *TASKS} if name == "all" else {"all"})
