"""Options are checked when they are made, and a type checker has the same names."""

from collections import defaultdict
from functools import partial
from typing import get_type_hints

import pytest

from ragblend import load_engine, open_store
from ragblend.config import Settings
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.params import BlendParams
from ragblend.errors import UsageError
from ragblend.frameworks.call_options import CallOptions
from ragblend.frameworks.model import BlendModel
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


def test_a_ratio_is_refused_in_the_same_words_on_its_way_to_vllm():
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


def declaring_classes() -> dict[str, list[str]]:
    """The classes that declare an option of each name. A field made by `copy_option` is no declaration."""
    specs, found = [], defaultdict[str, list[str]](list)
    for each in (TierOptions, ModelOptions, LoadOptions, GenerationOptions, CallOptions, Settings, ConnectorConfig,
                 BlendParams, BlendModel):  # fmt: skip
        for name in set(each.__annotations__) - {"model_config", "_overflow_error"}:
            field = getattr(each, "__dataclass_fields__", {}).get(name)
            spec = None if field is None else field.metadata.get("option")
            if spec is None or not any(spec is other for other in specs):
                specs.append(spec)
                found[name].append(each.__name__)
    return found


def test_only_pydantic_and_the_request_declare_an_option_again():
    """pydantic has its own fields, and a request's parameters their own checks. Two names mean something else."""
    others = {name: {*classes[1:]} - {"BlendModel", "BlendParams"} for name, classes in declaring_classes().items()}
    assert {name: classes for name, classes in others.items() if classes} == {
        "store": {"ConnectorConfig"},
        "timeout": {"CallOptions"},
    }
