"""The table of docs/frameworks.md: what it names as ours exists, what it leaves out has a reason, nothing is missed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from langchain_core.language_models import BaseChatModel, BaseLLM

from ragblend.frameworks.call_options import ALSO_CALLED, CallOptions
from ragblend.llm import BlendLLM, ChatBlend

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
HEADING = "## Beside langchain-huggingface and langchain-openai"
NAME = re.compile(r"`([a-z_]\w*)`")


class Row(NamedTuple):
    """Names in the first three columns, and what the last one says."""

    hugging_face: set[str]
    openai: set[str]
    ours: set[str]
    note: str


def rows() -> list[Row]:
    section = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(each) == 4 for each in cells)
    found = [Row(*(set(NAME.findall(cell)) for cell in each[:3]), each[3]) for each in cells]
    return [row for row in found if row.hugging_face or row.openai or row.ours]


def without_aliases(names: set[str]) -> set[str]:
    return {ALSO_CALLED.get(name, name) for name in names}


def test_the_table_is_read():
    assert len(rows()) > 35


@pytest.mark.parametrize("row", rows(), ids=lambda row: ",".join(sorted(row.ours or row.openai or row.hugging_face)))
def test_every_argument_in_the_table_exists_and_every_difference_has_a_reason(row):
    known = {*ChatBlend.model_fields, *BlendLLM.model_fields, *ALSO_CALLED}
    missing = [each for each in row.ours - known if not (hasattr(ChatBlend, each) or hasattr(BlendLLM, each))]
    assert not missing
    ours = without_aliases(row.ours)
    same = all(without_aliases(theirs) <= ours for theirs in (row.hugging_face, row.openai))
    assert row.note or (row.ours and same)


def test_only_names_that_exist_are_called_our_own():
    section = (
        PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("Only here:")[2].partition("LlamaIndex")[0]
    )
    names = NAME.findall(section)
    assert len(names) > 5
    assert set(names) <= {*ChatBlend.model_fields, *CallOptions.__dataclass_fields__}


def own_names(kind: Any, base: type) -> set[str]:
    """Constructor arguments of a class, by their own names and their aliases, and its public methods that are not
    `base`'s."""
    names = set(kind.model_fields)
    names |= {field.alias for field in kind.model_fields.values() if field.alias}
    bases = {name: getattr(base, name) for name in dir(base)}
    for name, value in inspect.getmembers(kind):
        is_new = not name.startswith("_") and callable(value) and not name.startswith("model_")
        if is_new and getattr(value, "__func__", value) is not getattr(bases.get(name), "__func__", bases.get(name)):
            names.add(name)
    return names - {"Config"}


def test_every_argument_of_the_other_libraries_has_a_row():
    theirs = pytest.importorskip("langchain_huggingface")
    openai = pytest.importorskip("langchain_openai")
    named = {name for row in rows() for name in row.hugging_face}
    for kind, base in ((theirs.HuggingFacePipeline, BaseLLM), (theirs.ChatHuggingFace, BaseChatModel)):
        names = own_names(kind, base) | {*inspect.signature(kind.from_model_id).parameters}
        assert names - named - {"kwargs", "task", "backend"} == set()  # those two are in from_model_id's row
    named = {name for row in rows() for name in row.openai}
    assert own_names(openai.ChatOpenAI, BaseChatModel) - named == set()
