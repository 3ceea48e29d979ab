"""Notebooks: Markdown and code in order, short text outputs, no pictures."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import pytest
from document_files import only

from ragblend.corpus.readers.notebook import MAX_OUTPUT_CHARS, read_notebook
from ragblend.corpus.readers.types import Mark, ParsedRecord
from ragblend.errors import UnreadableDocumentError


def read(*cells: dict[str, Any], **others: Any) -> ParsedRecord:
    return only(read_notebook(json.dumps({"cells": cells, "metadata": {}, **others}).encode()))


def code(source: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def markdown(source: Any) -> dict[str, Any]:
    return {"cell_type": "markdown", "source": source}


def result(**data: str) -> dict[str, Any]:
    return {"output_type": "execute_result", "data": {name.replace("_", "/"): text for name, text in data.items()}}


def test_cells_are_read_in_order_with_headings():
    record = read(
        markdown(["# Pump\n", "text\n", "```\n", "# no heading\n", "```\n", "## Care #"]),
        code("print(1)", {"output_type": "stream", "name": "stdout", "text": ["1\n"]}),
        {"cell_type": "raw", "source": "raw text"},
        metadata={"language_info": {"name": "Python"}, "title": "The Pump"},
    )
    start = "# Pump\ntext\n```\n# no heading\n```\n## Care #"
    assert record.text == f"{start}\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\nraw text"
    assert record.marks == (Mark(0, "heading", "Pump", 1), Mark(start.index("## Care"), "heading", "Care", 2))
    assert record.metadata == {"title": "The Pump"}


def test_pictures_widgets_and_stderr_are_left_out():
    record = read(
        markdown("![a](data:image/png;base64,iVBORw0KGgo=) after"),
        code(
            "plot()",
            result(image_png="iVBORw0KGgo=", text_plain="<Figure size 640x480>"),
            result(text_plain="<Axes at 0x7f>".replace("Axes", "matplotlib.Axes")),
            {"output_type": "stream", "name": "stderr", "text": "warning"},
            {"output_type": "error", "ename": "ValueError", "evalue": "\x1b[31mbad\x1b[0m", "traceback": ["long"]},
        ),
    )
    assert record.text == "![a]() after\n\n```\nplot()\n```\n\n```text\nValueError: bad\n```"


def test_long_outputs_are_cut_at_a_line_and_that_is_noted():
    record = read(code("x", result(text_plain="row of a table\n" * MAX_OUTPUT_CHARS)))
    assert len(record.text) < MAX_OUTPUT_CHARS + 100
    assert record.text.endswith("row of a table\n```")
    assert "outputs of 1 cells were cut" in record.notes[0]


def test_code_with_fences_gets_longer_fences():
    assert read(code("a = '''\n```\n'''")).text == "````\na = '''\n```\n'''\n````"


def test_notebooks_of_format_3_are_read():
    cells = [{"cell_type": "heading", "level": 2, "source": "Old"}, {"cell_type": "code", "input": "x = 1"}]
    (record,) = read_notebook(json.dumps({"worksheets": [{"cells": cells}]}).encode())
    assert record.text == "## Old\n\n```\nx = 1\n```"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "no list of cells"),
        (b'{"cells": 3}', "no list of cells"),
        (b"[1]", "no list of cells"),
        (b'{"cells": [', "not JSON"),
        (b'{"cells": ' + b"[" * 200_000, "too deeply nested"),
    ],
)
def test_what_is_no_notebook_is_named(data, message):
    with pytest.raises(UnreadableDocumentError, match=message):
        list(read_notebook(data))


def test_long_lines_take_linear_time():
    start = process_time()
    assert read(markdown("# a" + " #" * 200_000 + "x"), markdown("data:a/b;base64," * 20_000)).marks[0].offset == 0
    assert process_time() - start < 2


def test_odd_values_in_cells_are_no_error():
    odd: list[Any] = [None, 3, "x", [], {}, {"a": None}]
    cells = [{"cell_type": kind, "source": one, "outputs": one} for kind in ("code", "markdown", None) for one in odd]
    cells += [code("x", {"data": one, "text": one, "output_type": one}) for one in odd]
    assert "x" in read(*cells, *odd).text
