"""Jupyter notebooks (.ipynb): Markdown cells unchanged, code cells and the text that they printed in fences.

Outputs are left out if they are pictures, widgets or text on stderr (warnings, progress bars), and cut after
MAX_OUTPUT_CHARS: printed tables answer questions, logs of training runs would fill chunks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ragblend.corpus.readers.blocks import TextBlocks, fence_code
from ragblend.corpus.readers.encodings import decode_text, unify_line_breaks
from ragblend.corpus.readers.text_headings import find_markdown_headings
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.errors import UnreadableDocumentError

MAX_OUTPUT_CHARS = 2000
_DATA_URI = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,[\w+/=%-]*")
_ANSI_CODE = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")
_FIGURE = re.compile(r"<Figure size |<[\w.]+ at 0x")  # text that replaces a picture or an object


def read_notebook(data: bytes) -> ParsedRecords:
    """Read one notebook as one document. Raises UnreadableDocumentError if `data` is no notebook."""
    notebook = _parse(data)
    metadata = notebook.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    language = _language(metadata)
    blocks = TextBlocks()
    num_cut = sum(_add_cell(blocks, cell, language) for cell in _cells(notebook))
    notes = (f"outputs of {num_cut} cells were cut after {MAX_OUTPUT_CHARS} characters",) if num_cut else ()
    title = metadata.get("title")
    yield blocks.build({"title": title if isinstance(title, str) else ""}, notes)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        notebook = json.loads(decode_text(data).text)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise UnreadableDocumentError(f"is no notebook: not JSON ({reason}); save or download it again") from error
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells", notebook.get("worksheets")), list):
        raise UnreadableDocumentError("is no notebook: it has no list of cells; rename it to .json if it is other data")
    return notebook


def _language(metadata: dict[str, Any]) -> str:
    """Return the notebook's programming language, for the fences; "" if it is unknown."""
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        section = metadata.get(key)
        value = section.get(name) if isinstance(section, dict) else None
        if isinstance(value, str) and value.isalnum():
            return value.lower()
    return ""


def _cells(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the notebook's cells; format 3 has them in worksheets."""
    sheets = notebook["worksheets"] if "cells" not in notebook else [notebook]
    for sheet in sheets:
        cells = sheet.get("cells") if isinstance(sheet, dict) else None
        yield from (cell for cell in (cells if isinstance(cells, list) else []) if isinstance(cell, dict))


def _add_cell(blocks: TextBlocks, cell: dict[str, Any], language: str) -> bool:
    """Add a cell to the blocks. Return True if its outputs were cut."""
    kind = cell.get("cell_type")
    source = _text(cell.get("source", cell.get("input")))
    if kind == "heading":  # a cell of format 3
        level = cell.get("level")
        blocks.add_heading(source, level if isinstance(level, int) else 1)
    elif kind != "code":
        source = _DATA_URI.sub("", source).strip("\n").rstrip()
        blocks.add_text(source, find_markdown_headings(source))
    else:
        blocks.add(fence_code(source, language))
        texts = (_ANSI_CODE.sub("", _output_text(output)).strip("\n") for output in _list(cell.get("outputs")))
        outputs = "\n".join(text for text in texts if text)
        blocks.add(fence_code(_cut(outputs), "text"))
        return len(outputs) > MAX_OUTPUT_CHARS
    return False


def _output_text(output: Any) -> str:
    """Return an output's text; "" for pictures, widgets and stderr."""
    if not isinstance(output, dict) or output.get("name") == "stderr" or output.get("stream") == "stderr":
        return ""
    kind = output.get("output_type")
    if kind in ("error", "pyerr"):
        return f"{_text(output.get('ename'))}: {_text(output.get('evalue'))}"
    bundle = output.get("data")
    bundle = bundle if isinstance(bundle, dict) else {}
    text = _text(output.get("text")) or _text(bundle.get("text/plain"))
    if any(name.startswith("image/") for name in bundle) or _FIGURE.match(text):
        return ""
    return text


def _cut(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARS:
        return text
    return text[:MAX_OUTPUT_CHARS].rpartition("\n")[0] or text[:MAX_OUTPUT_CHARS]


def _text(value: Any) -> str:
    """Return the text of a field, which is a string or a list of lines."""
    lines = value if isinstance(value, list) else [value]
    return unify_line_breaks("".join(line for line in lines if isinstance(line, str)))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
