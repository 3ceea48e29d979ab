"""Options are checked when they are made, and a type checker has the same names."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import get_type_hints

import pytest

from ragblend import load_engine, open_store
from ragblend.config import Settings
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.params import BlendParams
from ragblend.errors import UsageError
from ragblend.frameworks.call_options import CallOptions
from ragblend.option_keywords import GenerationKeywords, LoadKeywords, TierKeywords
from ragblend.options import GenerationOptions, LoadOptions, ModelOptions, TierOptions
from tools import option_keywords


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode is 'fast'; choose one of blend, full, prefix, reuse"),
        ({"recompute_ratio": 1.5}, r"recompute_ratio is 1.5; choose 0 \(full reuse\) to 1 .*, or 'auto'"),
        ({"recompute_ratio": True}, "recompute_ratio is True"),
        ({"max_tokens": 0}, "max_tokens is 0; choose a whole number, 1 or more"),
        ({"max_tokens": 24.0}, "max_tokens is 24.0; choose a whole number"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"rule": 5}, "rule is 5; choose a text"),
        ({"seed": 1.0}, "seed is 1.0; choose a whole number"),
        ({"seed": 2**70}, "seed is 1180591620717411303424; choose a whole number, -9223372036854775808 to 9223"),
        ({"stop": ["a", 5]}, r"stop is \['a', 5\]; choose a text or a list of texts"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": {"a": 1}}, "stop is {'a': 1}"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "0"}, r"temperature is '0'; choose 0 \(greedy\) or more"),
        ({"top_p": "1"}, "top_p is '1'"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"logprobs": 3}, "logprobs is 3; choose True or False"),
        ({"logprobs": True, "top_logprobs": 500}, "top_logprobs is 500; choose a whole number, 0 to 20"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"top_k": -1}, r"top_k is -1; choose a whole number, 0 \(all\) or more"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; choose more than 0"),
        ({"presence_penalty": 3}, "presence_penalty is 3; choose a number from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is .*; choose a dictionary of token ids"),
        ({"logit_bias": {5: 200}}, "from -100 .never. to 100"),
        ({"top_logprobs": 3}, "top_logprobs is 3, but logprobs is off; pass logprobs=True, too"),
    ],
)
def test_a_generation_option_that_cannot_be_is_named(options, message):
    with pytest.raises(UsageError, match=message):
        GenerationOptions(**options)


@pytest.mark.parametrize(
    ("make", "name", "near"),
    [
        (GenerationOptions, "max_token", "max_tokens"),
        (TierOptions, "memory_gb", "memory_gib"),
        (ModelOptions, "adaptor", "adapter"),
        (LoadOptions, "vllm_option", "vllm_options"),
        (CallOptions, "time_out", "timeout"),
        (partial(load_engine, "demo"), "memory_gb", "memory_gib"),
        (partial(open_store, None), "memory_gb", "memory_gib"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest(make, name, near):
    with pytest.raises(UsageError, match=f"^there is no option '{name}'; the nearest is '{near}'; choose from "):
        make(**{name: 5})


def test_a_positional_argument_too_many_is_still_a_type_error():
    with pytest.raises(TypeError, match="positional"):
        TierOptions(*range(9))


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(UsageError) as caught:
        GenerationOptions(mode="x" * 5000)
    assert len(str(caught.value)) < 300


def test_one_stop_string_is_a_list_of_it():
    assert GenerationOptions(stop="end").stop_strings == ("end",)
    assert GenerationOptions(stop=["a", "b"]).stop_strings == ("a", "b")
    assert GenerationOptions().stop_strings == ()


@pytest.mark.parametrize("made", [TierOptions, ConnectorConfig])
@pytest.mark.parametrize(
    "options",
    [{"memory_gib": -1}, {"disk_gib": -1}, {"remote_timeout_s": 0}, {"remote_timeout_s": "5"}, {"kv_dtype": "int4"}],
)
def test_a_tier_option_that_cannot_be_is_named(made, options):
    (name,) = options
    with pytest.raises(UsageError, match=f"{name} is .*; choose "):
        made(**options)


def test_vllm_rejects_a_ratio_in_the_same_words():
    words = r"choose 0 \(full reuse\) to 1 \(recompute every chunk token\), or 'auto'"
    for made in (ConnectorConfig, BlendParams):
        with pytest.raises(UsageError, match=words):
            made(ratio=2)
        with pytest.raises(UsageError, match=r"choose 0 \(no refinement\) to 1"):
            made(refine_ratio=2)


def test_the_types_of_keyword_arguments_are_generated_from_the_options():
    assert option_keywords.FILE.read_text(encoding="utf-8") == option_keywords.source(), (
        "run python -m tools.option_keywords"
    )


@pytest.mark.parametrize(
    ("options", "keywords"), [(TierOptions, TierKeywords), (GenerationOptions, GenerationKeywords)]
)
def test_type_checkers_have_the_same_names_and_types(options, keywords):
    names = options.__dataclass_fields__
    hints = get_type_hints(options)
    assert get_type_hints(keywords) == {name: hints[name] for name in names}


def test_type_checkers_have_every_argument_of_load_engine():
    known = {*LoadOptions.__dataclass_fields__, *ModelOptions.__dataclass_fields__, "torch_dtype"}
    assert set(get_type_hints(LoadKeywords)) == known


PACKAGE = Path(__file__).parents[1] / "ragblend"
DECLARING = (TierOptions, ModelOptions, LoadOptions, CallOptions, GenerationOptions, Settings, ConnectorConfig)
"""The classes whose fields are the options of the package."""
OTHER_MEANINGS = {
    "BlendParams.mode": "a request to the server may also be an ingestion",
    "DocumentInput.chunk_size": "limits of an HTTP body, for its schema",
    "QaCase.order": "test data say in which order their chunks come",
    "analyze.model": "a forecast without a model estimates tokens from characters",
    "machine_facts.device": "a device to describe, not to compute on",
    **dict.fromkeys(("plan.rule", "plan.recompute_ratio", "analyze.recompute_ratio"), "what a forecast assumes"),
    "read_model_sizes.device": "a device to describe, not to compute on",
    "serve.api_key": "the key that the server demands, not one that it sends",
    "serve.keys": "the flag of the file, whose path the connector is passed",
    "ModelSizes.dtype": "a dtype that was read, not one that was chosen",
    **{
        f"{name}.k": "the signature of LangChain's VectorStore"
        for name in (
            "similarity_search_with_score",
            "similarity_search_with_score_by_vector",
            "similarity_search",
            "similarity_search_by_vector",
            "max_marginal_relevance_search",
            "max_marginal_relevance_search_by_vector",
        )
    },
}
"""Fields and parameters that have an option's name and another meaning, with the reason."""
BENCHES = PACKAGE / "lab" / "bench"
"""Studies, whose configurations are fixed so that their figures can be compared. They declare their own flags."""


def states_a_value(node: ast.expr | None) -> bool:
    """Return True for a default that is neither unset (None, False, 0, "", "none", empty) nor taken from elsewhere."""
    if isinstance(node, ast.Constant):
        return node.value not in (None, False, 0, "", "none", ...)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field":
        return any(each.arg in ("description", "ge", "gt", "le", "lt", "max_length") for each in node.keywords)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("option", "typer.Option", "Option")
    return isinstance(node, ast.List | ast.Dict | ast.Set) or (isinstance(node, ast.Tuple) and bool(node.elts))


def declared_in(path: Path, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (option, "Class.field" or "function.parameter") for each that gives an option a default, help or limits."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        fields_and_defaults: list[tuple[str, ast.expr | None, ast.expr | None]] = []
        if isinstance(node, ast.ClassDef):
            fields_and_defaults = [
                (each.target.id, each.annotation, each.value)
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args]
            defaults = [None] * (len(arguments) - len(node.args.defaults)) + node.args.defaults
            pairs = [*zip(arguments, defaults, strict=True)]
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            fields_and_defaults = [(each.arg, each.annotation, default) for each, default in pairs]
        declares_all = isinstance(node, ast.ClassDef) and node.name in {each.__name__ for each in DECLARING}
        for name, annotation, default in fields_and_defaults:
            hint = ast.unparse(annotation) if annotation is not None else ""
            is_copy = isinstance(default, ast.Call) and ast.unparse(default.func) in ("copy_option", "default_of")
            has_help = "Option(" in hint or "Field(" in hint
            if name in names and (has_help or (not is_copy and (declares_all or states_a_value(default)))):
                yield name, f"{node.name}.{name}"


def test_each_option_is_declared_once():
    """`ratio` is the name of `recompute_ratio` in the connector's JSON."""
    names = {field.name for options in DECLARING for field in fields(options)} - {"ratio"}
    declarations, others = defaultdict[str, list[str]](list), set[str]()
    for path in sorted(set(PACKAGE.rglob("*.py")) - set(BENCHES.rglob("*.py"))):
        for name, place in declared_in(path, names):
            if place in OTHER_MEANINGS:
                others.add(place)
            else:
                declarations[name].append(place)
    assert {name: places for name, places in declarations.items() if len(places) != 1} == {}
    assert declarations.keys() == names
    assert others == OTHER_MEANINGS.keys()


def test_a_second_declaration_of_an_option_is_found(tmp_path):
    path = tmp_path / "second.py"
    path.write_text(
        "class Second:\n"
        "    k: int = 6\n"
        "    rule: str = copy_option(GenerationOptions, 'rule')\n"
        "    seed: int | None = None\n"
        "    n: int | None = Field(None, ge=1)\n"
        "def run(memory_gib: float = 2.0, order: str = default_of(A, 'order'), *, temperature=option(0, '')): ...\n"
        "def flag(max_tokens: Annotated[int, typer.Option('--max-tokens')] = None): ...\n"
    )
    names = {"k", "rule", "seed", "n", "memory_gib", "order", "temperature", "max_tokens"}
    assert [place for _, place in declared_in(path, names)] == [
        "Second.k",
        "Second.n",
        "run.memory_gib",
        "run.temperature",
        "flag.max_tokens",
    ]


def test_a_copied_option_has_the_declared_type():
    declared = {name: kind for options in DECLARING for name, kind in get_type_hints(options).items()}
    declared |= get_type_hints(GenerationOptions)
    for copies in (Settings, ConnectorConfig, BlendParams):
        for name, kind in get_type_hints(copies).items():
            if name in declared and f"{copies.__name__}.{name}" not in OTHER_MEANINGS:
                assert kind == declared[name], (copies, name)
