"""Matching of stored chunks in prompts: share of matched tokens in common templates, time, and size of the index.

    python -m benchmarks.matching recall --tokenizer models/smollm2 --tokenizer tekken.json --out FILE.json
    python -m benchmarks.matching index --chunks 1000 --chunks 100000 --chunks 1000000 --out FILE.json

`recall` formats the passages of MuSiQue questions, and texts in other scripts, by TEMPLATES. It prints the share of the
chunks' tokens that is matched. A tokenizer is a folder, a `tekken.json`, or a SentencePiece `.model` such as those in
the package mistral-common. `index` times TokenIndex on random chunks, and on prompts that are hard to match. Read
`measure_recall` first.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.results import OutOption, write_result
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries
from ragblend.engine.matching import find_runs_of
from ragblend.lab.quality.data import find_data
from ragblend.lab.quality.records import read_cases
from ragblend.prompt.render import Renderer
from ragblend.prompt.token_index import TokenIndex
from ragblend.prompt.types import Prompt

NUM_QUESTIONS, NUM_CHUNKS = 6, 6
CHUNK_TOKENS, PROMPT_TOKENS, LONG_PROMPT_TOKENS, VOCABULARY = 256, 8000, 32000, 50_000

INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
"""Chat template for tokenizers that have none."""

TEMPLATES = {
    "plain": "{text}",
    "dash": "- {text}",
    "star": "* {text}",
    "number": "{n}. {text}",
    "[n]": "[{n}] {text}",
    "[n]:": "[{n}]: {text}",
    "(n)": "({n}) {text}",
    "#n": "#{n} {text}",
    "source behind": "{n}. {text} (source: d{n}.txt)",
    "score in front": "(score 0.8{n}) {text}",
    "Document n:": "Document {n}: {text}",
    "Document [n]:": "Document [{n}]: {text}",
    "Document [n](Title)": "Document [{n}](Title: x) {text}",
    "file in label": "Document {n} (d{n}.txt): {text}",
    "file:": "d{n}.txt: {text}",
    "Source and Content": "Source: d{n}.txt\nContent: {text}",
    "Title and Content": "Title: d{n}\nContent: {text}",
    "Passage n": "Passage {n}:\n{text}",
    "Context n": "### Context {n}\n\n{text}",
    "heading": "## d{n}\n{text}",
    "bold": "**Document {n}:** {text}",
    "Excerpt": "Excerpt {n}/6: {text}",
    "pipe": "Title{n} | {text}",
    "url": "https://example.org/{n} - {text}",
    "arrows": "CONTEXT {n} >>> {text} <<<",
    "rule": "{text}\n---",
    "LMCache": "{text} # # ",
    "Begin and End": "BEGIN CONTEXT {n}\n{text}\nEND CONTEXT {n}",
    "<doc>": "<doc>{text}</doc>",
    "<document index>": '<document index="{n}">{text}</document>',
    "<document> in lines": '<document index="{n}">\n<source>d{n}.txt</source>\n{text}\n</document>',
    "<passage> and <text>": "<passage id='{n}' score='0.91'><text>{text}</text></passage>",
    "quotes": '"{text}"',
    "single quotes": "'{text}'",
    "three quotes": '"""{text}"""',
    "quoted line": "> {text}",
    "braces": "{{{text}}}",
    "fence": "```\n{text}\n```",
    "JSON": '{{"id": {n}, "text": "{text}"}}',
    "YAML": "- id: {n}\n  text: {text}",
    "German": "Dokument {n}: {text}",
    "French": "Document n° {n} : {text}",
    "Chinese": "文档{n}：{text}",
    "Japanese": "文書{n}「{text}」",
}
"""Formats in which applications write a passage into a prompt; {n} is its number."""

REWRITTEN: dict[str, Callable[[str], str]] = {
    "indented by four": lambda text: "    " + text.replace("\n", "\n    "),
    "quoted lines": lambda text: "> " + text.replace("\n", "\n> "),
    "JSON escapes": lambda text: json.dumps(text, ensure_ascii=False),
    "JSON, ASCII only": json.dumps,
    "whitespace normalised": lambda text: " ".join(text.split()),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
}
"""Changes that applications make to the text of a passage. Only the parts between two changes can be matched."""

_CODE = '''def reuse(prompt, store, ratio=0.05):
    """Place what is stored, then recompute a share of it."""
    placements = []
    for run in match(prompt.token_ids):
        entry = store.get(run.key)
        if entry is None:
            continue  # a miss is computed like any other text
        placements.append((entry.rows(run.chunk_start, run.length), run.start))
    kept = [place for place, _ in placements if place.num_tokens >= 16]
    return fuse(placements, num_recomputed=int(ratio * sum(p.num_tokens for p in kept)))


class Store:
    def __init__(self, folder: str) -> None:
        self.entries = {path.stem: path for path in Path(folder).glob("*.kv")}

    def get(self, key: str):
        path = self.entries.get(key)
        return None if path is None else read_entry(path)
'''
_MARKDOWN = """## Opening hours

The reading room is open **Monday to Friday**, from 9:00 to 18:00:

- *winter term*: also on Saturday, 10:00 to 14:00
- *holidays*: closed, see the [calendar](https://example.org/calendar)

| room | seats | power |
|---|---|---|
| north | 48 | yes |
| south | 22 | no |

> Bags stay in the lockers on the ground floor; they take a two-euro coin.

1. Show your card at the desk.
2. Take the seat that the screen names.
3. Leave before the second bell.
"""
_CHINESE = """图书馆的阅览室周一至周五上午九点到下午六点开放，冬季学期星期六上午十点到下午两点也开放。节假日闭馆，
具体日期请参阅网站上的日历。读者进入阅览室之前须在服务台出示借书证，并把书包存放在一楼的储物柜里；储物柜需要
一枚两欧元的硬币，离开时退还。

北厅有四十八个座位，每个座位都有电源；南厅有二十二个座位，没有电源。座位由屏幕分配，不得互相调换。第二次铃响
之前必须离开，因为之后大门会自动锁上。遗失物品请到地下室的办公室领取，办公室每天下午三点到五点有人值班。
"""
_KOREAN = """도서관 열람실은 월요일부터 금요일까지 오전 아홉 시부터 오후 여섯 시까지 열려 있으며,
겨울 학기에는 토요일에도 오전 열 시부터 오후 두 시까지 이용할 수 있습니다.
공휴일에는 문을 닫으니 홈페이지의 달력을 확인하시기 바랍니다.
열람실에 들어가기 전에 안내 데스크에서 이용증을 보여 주고, 가방은 일 층 사물함에 보관해야 합니다.

북쪽 열람실에는 좌석이 마흔여덟 개 있고 모든 좌석에 전원이 있습니다. 남쪽 열람실에는 좌석이 스물두 개 있으며 전원은
없습니다. 좌석은 화면이 정해 주며 서로 바꿀 수 없습니다. 두 번째 종이 울리기 전에 나가야 합니다.
"""
_JAPANESE = """図書館の閲覧室は月曜日から金曜日の午前九時から午後六時まで開いており、
冬学期は土曜日も午前十時から午後二時まで利用できます。祝日は休館ですので、ウェブサイトのカレンダーをご確認ください。閲覧室に入る前に受付で利用証を提示し、
かばんは一階のロッカーに預けてください。ロッカーには二ユーロ硬貨が必要で、帰るときに戻ります。

北の閲覧室には四十八席あり、すべての席に電源があります。南の閲覧室には二十二席あり、電源はありません。席は画面が
指定し、互いに交換することはできません。二度目のベルが鳴る前に退室してください。その後は扉が自動的に閉まります。
"""
TEXTS = {
    "code": _CODE,
    "Markdown": _MARKDOWN,
    "Chinese": _CHINESE,
    "Korean": _KOREAN,
    "Japanese": _JAPANESE,
}
"""Chunks other than English prose."""
LABELS = {"plain": "{text}", "label": "Document {n}: {text}"}

app = typer.Typer(add_completion=False)


def measure_recall(renderer: Renderer, questions: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """Return the share of the chunks' tokens that is matched: by template, by script, and of rewritten texts.

    questions: (question, passages).
    """
    templates = {
        name: _share(
            renderer,
            (
                (passages, [template.format(n=n, text=text) for n, text in enumerate(passages, 1)], question)
                for question, passages in questions
            ),
        )
        for name, template in TEMPLATES.items()
    }
    scripts = {
        f"{name}, {label}": _share(renderer, [([text.strip()], [template.format(n=1, text=text.strip())], "Why?")])
        for name, text in TEXTS.items()
        for label, template in LABELS.items()
    }
    rewritten = {
        f"{name}, {change}": _share(renderer, [([text.strip()], [rewrite(text.strip())], "Why?")])
        for name, text in TEXTS.items()
        for change, rewrite in REWRITTEN.items()
    }
    return {
        "templates": templates,
        "mean": float(np.mean(list(templates.values()))),
        "least": min(templates.values()),
        "scripts": scripts,
        "rewritten": rewritten,
    }


def _share(renderer: Renderer, prompts: Iterable[tuple[Sequence[str], Sequence[str], str]]) -> float:
    """Return the share of the chunks' tokens that is matched.

    prompts: (chunks, their texts in the prompt, question).
    """
    found = total = 0
    for chunks, written, question in prompts:
        ids = [renderer.chunk_ids(chunk) for chunk in chunks]
        body = "\n\n".join(written)
        prompt = Prompt(question=f"Use these documents.\n\n{body}\n\nQuestion: {question}")
        found += sum(run.num_tokens for run in find_runs_of(ids, renderer.render(prompt)))
        total += sum(map(len, ids))
    return found / total


def load_renderer(place: str) -> Renderer:
    """Return the renderer of a tokenizer: a folder, a `tekken.json`, or a SentencePiece `.model`."""
    from transformers import AutoTokenizer

    path = Path(place)
    if path.is_dir() or not path.suffix:
        tokenizer = AutoTokenizer.from_pretrained(place)
    elif path.suffix == ".json":
        from transformers.integrations.mistral import convert_tekken_tokenizer

        tokenizer = convert_tekken_tokenizer(place, chat_template=INSTRUCT)
    else:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(path, Path(folder) / "tokenizer.model")
            config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = AutoTokenizer.from_pretrained(folder)
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = INSTRUCT
    return Renderer(tokenizer)


@app.command()
def recall(
    tokenizer: Annotated[
        list[str], typer.Option("--tokenizer", help="Folder, tekken.json or .model file; repeat for more.")
    ],
    out: OutOption = None,
) -> None:
    """Measure the share of the stored chunks' tokens that is matched in prompts of many templates."""
    quiet_libraries()
    cases = read_cases(find_data("musique"))[:NUM_QUESTIONS]
    questions = [(case.question, [" ".join(text.split()) for text in case.passages[:NUM_CHUNKS]]) for case in cases]
    found = {Path(place).name: measure_recall(load_renderer(place), questions) for place in tokenizer}
    for name, result in found.items():
        print_line(f"{name}: {len(TEMPLATES)} templates, mean {result['mean']:.4f}, least {result['least']:.4f}")
        print_line("  " + ", ".join(f"{script} {share:.3f}" for script, share in result["scripts"].items()))
    write_result({"recall": found, "num_questions": len(questions), "num_chunks": NUM_CHUNKS}, out)


# --- speed and size ---


@app.command()
def index(
    chunks: Annotated[list[int], typer.Option("--chunks", help="Number of chunks in the index.")],
    repeats: Annotated[int, typer.Option("--repeats", help="Number of runs; the result is their median.")] = 9,
    out: OutOption = None,
) -> None:
    """Time the index at several sizes, and on prompts that are hard to match."""
    sizes = {}
    for count in chunks:
        sizes[count] = _measure_size(count, repeats)
        print_line(f"{count} chunks: " + ", ".join(f"{name} {value:.4g}" for name, value in sizes[count].items()))
    hard = {name: _time_ms(*case, repeats) for name, case in _hard_cases().items()}
    print_line(f"{LONG_PROMPT_TOKENS} ids: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in hard.items()))
    write_result({"sizes": sizes, "hard_ms": hard, "prompt_tokens": PROMPT_TOKENS, "chunk_tokens": CHUNK_TOKENS}, out)


def _measure_size(count: int, repeats: int) -> dict[str, float]:
    """Measure an index of `count` random chunks.

    Return the milliseconds to match a prompt, the bytes per chunk, and the microseconds to add a chunk.
    """
    random = np.random.default_rng(0)
    stored = random.integers(0, VOCABULARY, (count, CHUNK_TOKENS), np.uint32)
    known = TokenIndex(stored.__getitem__)
    for start in range(0, count, 10_000):
        known.add((number, stored[number]) for number in range(start, min(count, start + 10_000)))
    picked = random.choice(count, PROMPT_TOKENS // (CHUNK_TOKENS + 4), replace=False)
    prompt = np.concatenate([np.concatenate((stored[number], random.integers(0, 9, 4))) for number in picked])
    find_ms = _median_ms(lambda: known.find_runs(prompt), repeats)
    assert len(known.find_runs(prompt)) == len(picked)
    new = random.integers(0, VOCABULARY, (100, CHUNK_TOKENS), np.uint32)
    start_s = perf_counter()
    for number, ids in enumerate(new):
        known.add([(count + number, ids)])
    add_us = (perf_counter() - start_s) * 1e4  # a hundred added chunks
    return {"find_ms": find_ms, "bytes_per_chunk": known.nbytes / count, "add_us": add_us}


def _hard_cases() -> dict[str, tuple[list[NDArray[np.int64]], NDArray[np.int64]]]:
    """Return chunks and prompts of LONG_PROMPT_TOKENS ids with many more hits than runs."""
    random = np.random.default_rng(0)

    def draw(count: int) -> NDArray[np.int64]:
        return random.integers(0, VOCABULARY, count)

    others = [draw(CHUNK_TOKENS) for _ in range(1000)]
    same, period, sentence = np.full(CHUNK_TOKENS, 7), draw(16), draw(32)
    shared = [np.concatenate((sentence, draw(CHUNK_TOKENS - 32))) for _ in range(20_000)]
    periodic = [np.resize(draw(length), CHUNK_TOKENS) for length in range(1, 13)]
    cases = {
        "one token": ([same, *others], same),
        "a period of 16": ([np.resize(period, CHUNK_TOKENS), *others], period),
        "periods of 1 to 12": ([*periodic, *others], np.concatenate([np.tile(each, 11) for each in periodic])),
        "a sentence in 20,000 chunks": (shared, np.concatenate(shared[:125])),
        "125 chunks": (others, np.concatenate(others[:125])),
        "nothing": (others, draw(LONG_PROMPT_TOKENS)),
    }
    return {name: (chunks, np.resize(ids, LONG_PROMPT_TOKENS)) for name, (chunks, ids) in cases.items()}


def _time_ms(chunks: Sequence[NDArray[np.int64]], prompt: NDArray[np.int64], repeats: int) -> float:
    known = TokenIndex(chunks.__getitem__)
    known.add(enumerate(chunks))
    return _median_ms(lambda: known.find_runs(prompt), repeats)


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    call()  # warm-up
    taken = []
    for _ in range(repeats):
        start_s = perf_counter()
        call()
        taken.append((perf_counter() - start_s) * 1e3)
    return median(taken)


if __name__ == "__main__":
    app()
