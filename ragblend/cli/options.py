"""Command options: those that are settings are made from `Settings`; the others are defined and parsed here.

`@with_settings("model store k")` gives a command the flags of those settings and calls it with the resulting settings.
A flag has the name, the type and the help of its field, and no default: `config` applies defaults.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from ragblend.cli.session import WorkerCount, prepare_demo_settings, settings_from
from ragblend.config import Settings, arguments_to_flags, flag_name, setting_type, unflagged_settings
from ragblend.errors import RagblendError, UsageError
from ragblend.option_fields import OptionSpec
from ragblend.options import RATIO, SELECTION_NAMES

Command = Callable[..., None]

SELECTION = " ".join(SELECTION_NAMES)
"""Settings of SelectionOptions, for `with_settings`."""


def with_settings(names: str, *, unflagged: str = "", demo: str = "") -> Callable[[Command], Command]:
    """Return a decorator that adds to a command a flag for each setting in `names`. The command receives `settings`.

    The help lists these flags after the command's arguments and before its options. A parameter of the command may be
    named like a setting. If the name is in `names`, the parameter gets the value of the added flag. Otherwise the
    parameter has its own flag or argument, whose value is also the setting's.

    `unflagged`: settings that the command reads without a flag; the help lists them. `demo`: help text of a flag
    `--demo`; "" adds no such flag. With `--demo`, the demo's values override environment and files, but not flags.
    """

    def decorate(command: Command) -> Command:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        del parameters["settings"]
        flags = {name: Annotated[_type(name), typer_option(name)] for name in names.split()}
        arguments = [each for each in parameters.values() if each.default is Parameter.empty and each.name not in flags]
        all_parameters = [
            *arguments,
            *(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=each) for name, each in flags.items()),
            *(each for each in parameters.values() if each not in arguments and each.name not in flags),
        ]
        if demo:
            kind = Annotated[bool, typer.Option("--demo", help=demo)]
            all_parameters.append(Parameter("demo", Parameter.KEYWORD_ONLY, default=False, annotation=kind))

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            asked = {name: value for name, value in arguments.items() if name in Settings.__dataclass_fields__}
            token = unflagged_settings.set(unflagged.split())
            try:
                settings = prepare_demo_settings(asked) if arguments.get("demo") else settings_from(asked)
                command(settings=settings, **{name: value for name, value in arguments.items() if name in parameters})
            except RagblendError as error:
                error.args = (arguments_to_flags(str(error)),)  # only this function knows the command's flags
                raise
            finally:
                unflagged_settings.reset(token)

        run.unflagged = unflagged.split()  # type: ignore[attr-defined]
        if unflagged:
            listed = ", ".join(sorted(unflagged.split()))
            run.__doc__ = (
                f"{inspect.cleandoc(command.__doc__ or '')}\n\nSettings without an option, as RAGBLEND_NAME in the "
                f"environment or as name in ragblend.toml: {listed}."
            )
        run.__signature__ = Signature([each.replace(kind=Parameter.KEYWORD_ONLY) for each in all_parameters])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in all_parameters}
        return run

    return decorate


def how_to_set_without_flag(argument: str, unflagged: Sequence[str]) -> str:
    """Return a hint for an unknown flag of a command: the environment variable and the key in ragblend.toml to use.

    `argument`: the flag that the user typed, such as "--fsync=no". `unflagged`: settings that the command reads without
    a flag. Returns "" if `argument` names none of these settings.
    """
    name = {flag_name(each): each for each in unflagged if flag_name(each)}.get(argument.partition("=")[0])
    return f"set RAGBLEND_{name.upper()}=..., or {name} in ragblend.toml" if name else ""


def typer_option(name: str) -> Any:
    """Return the typer option of a setting."""
    spec: OptionSpec = Settings.__dataclass_fields__[name].metadata["option"]
    more: dict[str, Any] = {"parser": parse_ratio, "metavar": "SHARE|auto"} if _type(name) is Any else {}
    return typer.Option(flag_name(name), help=spec.help, **more)


def _type(name: str) -> Any:
    """Return the type of a setting's flag, with None; Any for a number that may also be a name."""
    kind, names = setting_type(name)
    return Any if names and kind is not str else kind | None


def parse_ratio(text: str) -> float | str:
    """Return a ratio or "auto". Raises UsageError for any other text."""
    try:
        return text if text == "auto" else float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a ratio; choose {RATIO.expected}") from error


PlotOption = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Write a picture, FILE.png.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default is torch's choice.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ShowSources = Annotated[bool, typer.Option("--show-sources", help="Print the retrieved chunks.")]


def parse_workers(text: str) -> WorkerCount:
    """Parse `4` or `ray:4`. Raises UsageError for any other text."""
    where, _, count = text.rpartition(":")
    if where not in ("", "ray") or not count.isdecimal() or int(count) < 1 or text.startswith(":"):
        raise UsageError(
            f"--workers is {text!r}; choose a number of processes, such as 4, or ray:4 on a running Ray cluster"
        )
    return WorkerCount(int(count), where == "ray")


Workers = Annotated[
    Any,
    typer.Option(
        "--workers",
        parser=parse_workers,
        metavar="N|ray:N",
        help="Ingestion processes; ray:N: on the Ray cluster of RAY_ADDRESS.",
    ),
]
VllmOptions = Annotated[
    str | None,
    typer.Option("--vllm-options", help="vLLM's engine arguments, as JSON: '{\"enforce_eager\": false}'."),
]


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated option."""
    return [name.strip() for name in text.split(",") if name.strip()]


def split_numbers(text: str) -> list[float]:
    """Return the numbers in a comma-separated option."""
    try:
        return [float(name) for name in split_names(text)]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of numbers; write them like 0,0.15,1") from error


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """Return an option's JSON object; None gives an empty one. Raises UsageError for any other text."""
    try:
        values = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{option} is {text}; give an object, such as '{{\"enforce_eager\": false}}'")
    return values
