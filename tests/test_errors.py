"""Errors: the library names Python arguments, and the command line prints flags in their place."""

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run_command
from typer.main import get_command

import ragblend
from ragblend.cli.app import app
from ragblend.cli.options import json_object
from ragblend.cli.printing import FlagFormatter, print_message, print_notice
from ragblend.config import Settings, arguments_to_flags, flag_name
from ragblend.engine.load import load_engine
from ragblend.engine.vllm.client import sse_events
from ragblend.errors import NotFoundError, RagblendError
from ragblend.prompt.render import Renderer
from ragblend.server.admin import _fields
from ragblend.server.requests import read_documents

PACKAGE = Path(ragblend.__file__).parent
COMMAND_LINE = ("cli", "lab", "operations/doctor.py")  # these print for the command line alone
FLAGS = sorted({flag for name in (*Settings.__dataclass_fields__, "count", "address") if (flag := flag_name(name))})
A_FLAG = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, FLAGS))}|--no-\w+)(?![\w-])")
A_COMMAND = re.compile(r"\b(ragblend|vLLM|pip|git|ray|qpdf)\b((?!\. [A-Z])[^;(])*$")


def texts_of(path: Path) -> Iterator[str]:
    """Texts of two or more words in a module, without docstrings and pieces of commands; f-string values are {}."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part != node}
    parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
        else:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if " " in text.strip() and not text.startswith(" --"):  # those are pieces of a command
            yield text


def library_texts() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(COMMAND_LINE):
            yield from ((name, text) for text in texts_of(path))


def test_the_library_names_no_flag_outside_of_a_command():
    found = [
        (name, match[0], text)
        for name, text in library_texts()
        for match in A_FLAG.finditer(text)
        if not A_COMMAND.search(text[: match.start()])
    ]
    assert not found


def test_every_argument_named_in_a_message_has_a_flag():
    commands = [get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
    taken = {flag for command in commands for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    named = {match[1] for _, text in library_texts() for match in re.finditer("`([a-z_]+)(?:=[^`]+)?`", text)}
    arguments = {name for name in named if arguments_to_flags(f"`{name}`") != f"`{name}`"}
    assert {"k", "chunk_size", "model", "store", "disk_gib"} <= arguments
    assert {flag for name in arguments if (flag := flag_name(name))} <= taken


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("fewer chunks (`k`), a smaller `chunk_size`", "fewer chunks (-k), a smaller --chunk-size"),
        ("use `model='my model'`", "use --model 'my model'"),
        ('choose `device="cpu"`', "choose --device cpu"),
        ("raise `max_file_mib=300`", "raise RAGBLEND_MAX_FILE_MIB=300"),
        ("`recompute_ratio` or `count`", "--ratio or --workers"),
        ("`precompute=False`", "--no-precompute"),
        ("`ragblend verify --repair`, the text `K` and `other_name`", None),
    ],
)
def test_arguments_in_a_message_become_flags(message, printed):
    assert arguments_to_flags(message) == (printed or message)


@pytest.mark.parametrize("command", [("ask", "Who?", "--model", "./gone"), ("doctor", "--model", "./gone")])
def test_commands_print_flags_where_the_library_names_arguments(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    with pytest.raises(NotFoundError, match="`model='demo'`"):
        load_engine("./gone", tmp_path / "s")
    assert run_command(*command, "--store", "s") != 0
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert "use the embedded model: --model demo" in printed
    assert "`model" not in printed


def test_the_tokenizer_does_not_warn_of_a_long_document(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 2
    Renderer(tokenizer).text_ids("the other theory of the other chunk")
    assert not tokenizer.deprecation_warnings  # transformers notes there that it has warned


@pytest.mark.parametrize(
    "read",
    [
        lambda text: json_object(text, "--vllm-options"),
        lambda text: list(sse_events([f"data: {text}"])),
        lambda text: read_documents(text.encode(), "application/json", None),
        lambda text: _fields(text.encode()),
    ],
    ids=["option", "server's event", "documents", "request"],
)
def test_json_that_is_nested_too_deep_is_an_error_with_words(read):
    with pytest.raises(RagblendError):
        read("[" * 100_000)


def test_log_lines_of_commands_have_flags():
    record = logging.LogRecord("ragblend", logging.WARNING, "", 0, "choose another `dtype`", (), None)
    assert FlagFormatter("%(message)s").format(record) == "choose another --dtype"


def test_messages_of_the_library_get_flags_and_a_quoted_question_does_not(capsys):
    print_message("choose another `store`")
    print_notice("searching for: what is a `store`?")
    assert capsys.readouterr().err.splitlines() == ["choose another --store", "searching for: what is a `store`?"]
