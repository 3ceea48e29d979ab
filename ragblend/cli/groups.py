"""The commands' groups and examples, for `--help` and for the reference docs/commands.md."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from typer import BadParameter, Typer
from typer.core import TyperCommand, TyperGroup

from ragblend.cli.options import how_to_set_without_flag

_ParserError: type[Any] = BadParameter.__bases__[0]  # typer's UsageError, which it does not export

GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "Begin": {
        "demo": ("demo", 'demo --question "What does Zenco sell?"'),
        "ui": ("ui --demo", "ui --model Qwen/Qwen3-8B   # for your own documents"),
        "doctor": ("doctor", "doctor --backend vllm --model Qwen/Qwen3-8B --store kv/"),
    },
    "Ingest": {
        "ingest": (
            "ingest docs/ --model Qwen/Qwen3-8B",
            "ingest docs/   # again after changes or an interruption",
        ),
        "precompute": (
            "precompute --model Qwen/Qwen3-14B   # KV of the indexed chunks for another model",
            "precompute --kv-dtype int8   # half the bytes",
        ),
        "documents": ("documents", "documents --backend http://localhost:8000"),
        "remove": (
            "remove docs/old.md",
            "remove docs/faq.jsonl#3   # one record",
            "remove llamaindex   # a collection",
            "remove --text old.txt",
        ),
    },
    "Answer": {
        "ask": (
            'ask "Who signed the lease?" --model Qwen/Qwen3-8B --show-sources',
            'ask "Who signed the lease?" --backend http://localhost:8000 --model Qwen/Qwen3-8B --json',
        ),
        "chat": ("chat --model Qwen/Qwen3-8B",),
        "search": ('search "Who signed the lease?" -k 10',),
        "explain": (
            'explain "Who signed the lease?" --model Qwen/Qwen3-8B --html explain.html',
            "explain --prompt request.json   # why it reuses nothing",
        ),
        "serve": ("serve Qwen/Qwen3-8B --store kv/ --max-model-len 16384   # vLLM's flags go to vLLM",),
    },
    "Store": {
        "stats": ("stats",),
        "verify": ("verify", "verify --repair   # prefills lost chunks again"),
        "gc": ("gc --max-size 20GiB",),
        "push": ("push --remote redis://cache:6379/0",),
        "init-key": ("init-key",),
        "sign": ("sign --store kv/", "sign --store kv/ --old-key-file OLD.key"),
    },
    "Measure": {
        "calibrate": ("calibrate --model Qwen/Qwen3-8B --target 0.9",),
        "profile": ("profile --model Qwen/Qwen3-8B --store kv/ --json",),
        "plan": (
            "plan --model Qwen/Qwen3-8B --gpu H100 --corpus 100GB --storage nvme:3.5:0.1",
            "plan --profile machine.json --storage disk::0.08",
        ),
        "analyze": (
            "analyze requests.jsonl --model models/smollm2   # counts with your model",
            "analyze -   # reads stdin: jq -c .body batch.jsonl | ragblend analyze -",
        ),
        "bench": (
            "bench ttft --shape llama-200m --threads 1",
            "bench quality --model Qwen/Qwen3-8B --data questions.jsonl",
        ),
    },
}

HELP_WIDTH = 100  # columns of `--help` at most
NUM_IN_ONE_LIST = 9  # options of a command that are shown as one list
RARE_OPTIONS = {
    "--api-keys-file", "--condense", "--context", "--contexts", "--device", "--dtype", "--embedder", "--loader",
    "--namespace", "--num-held-out", "--precompute", "--ratios", "--remote",
    "--repeats", "--rule", "--rules", "--save", "--split", "--system", "--text-field", "--threads",
    "--tier", "--trust-remote-code", "--vllm-options", "--workers",
}  # fmt: skip
"""Options that `--help` lists last: few users set them."""


class CommandWithRareOptions(TyperCommand):
    """A command whose help lists common options first and the rare ones under a second heading."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options."""
        params = self.get_params(ctx)
        options = [param for param in params if param.param_type_name == "option"]
        rare = [param for param in options if RARE_OPTIONS & {*param.opts}] if len(options) > NUM_IN_ONE_LIST else []
        sections = {
            "Arguments": [param for param in params if param.param_type_name == "argument"],
            "Options": [param for param in options if param not in rare],
            "More options": rare,
        }
        for heading, listed in sections.items():
            if records := [record for param in listed if (record := param.get_help_record(ctx)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(records)


class SectionedHelpGroup(TyperGroup):
    """A command group whose help lists, under the headings of `GROUPS`, each command with its help's first sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. If an unknown flag names a setting, the error says how to set that setting without a flag."""
        try:
            return super().invoke(ctx)
        except _ParserError as error:
            command = getattr(error.ctx, "command", None)
            unflagged = getattr(getattr(command, "callback", None), "unflagged", ())
            if hint := how_to_set_without_flag(getattr(error, "option_name", ""), unflagged):
                error.message = f"No such option: {error.option_name}; {hint}"
                error.possibilities = None
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and the first sentences of their help, by group."""
        for heading, names in groupby(self.list_commands(ctx), key=_heading):
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(1000)) for name, command in commands if command])


def _heading(name: str) -> str:
    """Return the name of the command's group; "Commands" for a subcommand."""
    return next((heading for heading, group in GROUPS.items() if name in group), "Commands")


def examples_epilog(name: str) -> str:
    """Return the epilog of the command `name`: its examples, one per line. click does not rewrap these lines."""
    lines = (line for group in GROUPS.values() for examples in group.values() for line in examples)
    return "\n".join(("\b", "Examples:", *(f"  ragblend {line}" for line in lines if line.startswith(name))))


def set_help_layout(app: Typer, prefix: str = "") -> None:
    """Make the help of each command show its common and its rare options under two headings, then its examples.

    `prefix`: the words before the names of these commands, such as "bench ".
    """
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        command.cls, command.epilog = CommandWithRareOptions, examples_epilog(prefix + name)
