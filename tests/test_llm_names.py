"""Five names of other libraries are taken for ours, and what users of those libraries look for is there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from llama_index.core.base.llms.types import ChatMessage
from transformers import pipeline

from ragblend.errors import UsageError
from ragblend.llamaindex import BlendLLM as LlamaBlend
from ragblend.llm import BlendLLM, ChatBlend

KINDS = [ChatBlend, BlendLLM, LlamaBlend]


@pytest.fixture
def engine(tiny_engine, chat_renderer):
    return tiny_engine(renderer=chat_renderer)


@pytest.mark.parametrize("name", ["max_new_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_length_of_an_answer_is_named_as_elsewhere(kind, name, engine):
    llm = kind(engine=engine, **{name: 3})
    assert llm.max_tokens == llm._options({}).max_tokens == 3
    assert llm._options({name: 2}).max_tokens == llm._options({name: 2, "max_tokens": None}).max_tokens == 2
    assert llm._options({name: None, "max_tokens": 4}).max_tokens == 4
    with pytest.raises(UsageError, match=f"max_tokens is 4, but {name} is 2; remove one of them"):
        llm._options({name: 2, "max_tokens": 4})
    with pytest.raises(UsageError, match=f"max_tokens is 3, but {name} is 4; remove one of them"):
        kind(engine=engine, max_tokens=3, **{name: 4})


@pytest.mark.parametrize("name", ["model", "model_name"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_named_as_elsewhere(kind, name, tmp_path):
    llm = kind(**{name: "demo"}, store=tmp_path)
    assert llm.engine.name == "demo"
    assert llm._options({name: "demo"}) == llm._options({})
    with pytest.raises(UsageError, match="this object runs 'demo'"):
        llm._options({name: "other"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_and_a_dtype_are_named_as_elsewhere(kind, tmp_path):
    assert kind(model="demo", store=tmp_path, base_url="transformers", torch_dtype="float32").dtype == "float32"
    with pytest.raises(UsageError, match="backend is 'elsewhere'"):
        kind(model="demo", store=tmp_path, base_url="elsewhere")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"model_id": "demo"}, "'model'"),
        ({"request_timeout": 4}, "'timeout'"),
        ({"openai_api_key": "hush"}, "'api_key'"),
        ({"recompute_rato": 0.2}, "'recompute_ratio'"),
        ({"remot": "redis://:hush@cache"}, "'remote'"),
        ({"pipeline_kwargs": {"top_k": 5}}, "has no option 'pipeline_kwargs'"),
    ],
)
def test_any_other_name_is_refused_with_the_nearest(kind, given, near, engine):
    with pytest.raises(UsageError, match=near) as caught:
        kind(engine=engine, **given)
    assert "hush" not in str(caught.value)


def test_so_it_is_in_calls(engine):
    chat = ChatBlend(engine=engine)
    with pytest.raises(UsageError, match=r"request_timeout=\.\.\.; the nearest is 'timeout'; the options of "):
        chat.invoke("the other", request_timeout=4)
    with pytest.raises(UsageError, match="the call has torch_dtype="):
        chat.invoke("the other", torch_dtype="float32")


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_a_model_is_made_from_its_id(kind, tmp_path):
    llm = kind.from_model_id("demo", task="text-generation", backend="default", device=-1, store=tmp_path)
    assert (llm.model, llm.backend, llm.device) == ("demo", "transformers", "cpu")
    with pytest.raises(UsageError, match="task is 'summarization'"):
        kind.from_model_id("demo", task="summarization")


def test_a_pipeline_is_a_loaded_model_and_its_tokenizer(tmp_path, tiny_model, make_tokenizer):
    made = pipeline("text-generation", model=tiny_model("llama"), tokenizer=make_tokenizer("{{ messages[0].content }}"))
    llm = BlendLLM(model=made, store=tmp_path, max_tokens=2)
    assert llm.generate(["the other"]).llm_output["token_usage"]["completion_tokens"] <= 2
    assert llm.engine.layers.model is made.model


# --- tokens ---


def test_tokens_of_messages_are_those_of_the_prompt_that_they_become(engine):
    chat = ChatBlend(engine=engine, max_tokens=1)
    messages = [SystemMessage("the theory"), HumanMessage("the other chunk"), AIMessage("the"), HumanMessage("what?")]
    counted = chat.get_num_tokens_from_messages(messages)
    assert counted == chat.invoke(messages).usage_metadata["input_tokens"]
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
    assert chat.get_num_tokens_from_messages(messages, tools) > counted
    assert BlendLLM(engine=engine).get_num_tokens_from_messages(messages) == counted
    assert chat.get_num_tokens_from_messages([]) == 0
    kept = trim_messages(messages, max_tokens=counted - 1, token_counter=chat, start_on="human", include_system=True)
    assert [message.text for message in kept] == ["the theory", "what?"]


def test_a_tokenizer_of_ones_own_counts(engine):
    assert ChatBlend(engine=engine, custom_get_token_ids=lambda text: [1] * len(text)).get_num_tokens("abc") == 3


def test_a_stream_ends_with_its_usage_unless_it_is_switched_off(engine):
    def used(chat: ChatBlend, **call: Any) -> list[Any]:
        return [each.usage_metadata for each in chat.stream("the other", **call) if each.usage_metadata]

    chat = ChatBlend(engine=engine, max_tokens=2)
    assert [usage["output_tokens"] for usage in used(chat)] == [2]
    assert used(chat, stream_usage=False) == used(ChatBlend(engine=engine, max_tokens=2, stream_usage=False)) == []


def test_the_profile_has_the_context_length_and_the_inputs(engine):
    profile = ChatBlend(engine=engine).profile
    assert profile["max_input_tokens"] == engine.context_length
    assert (profile["text_inputs"], profile["image_inputs"], profile["tool_calling"]) == (True, False, True)


async def test_llamaindex_finds_the_tokens_where_it_looks_for_them(engine):
    llm = LlamaBlend(engine=engine, max_tokens=2)
    said = [ChatMessage(role="user", content="the other")]
    streamed = list(llm.stream_chat(said))[-1]
    for response in (llm.chat(said), llm.complete("the other"), await llm.achat(said), streamed):
        assert response.additional_kwargs["completion_tokens"] == 2
        assert response.additional_kwargs == response.raw["usage"]


# --- LangChain's serialised form ---


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")  # of `loads`
@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_what_langchain_writes_it_reads_again(kind, tmp_path):
    llm = kind(model="demo", store=tmp_path, system="Who? Be brief.", max_tokens=7, stop=["x"], strict=True)
    written = dumps(llm)
    assert json.loads(written)["id"] == ["ragblend", "llm", kind.__name__]
    again = loads(written, valid_namespaces=["ragblend"], allowed_objects=[kind])
    assert again._identifying_params == llm._identifying_params
    assert again.engine is llm.engine


def test_a_model_over_an_engine_that_was_given_is_not_written(engine):
    assert json.loads(dumps(ChatBlend(engine=engine)))["type"] == "not_implemented"


def test_secrets_are_not_written(tmp_path):
    chat = ChatBlend(model="demo", store=tmp_path, api_key="hush-1")
    chat.engine_options = {"remote": "redis://user:hush-2@localhost:6379/0", "model_kwargs": {"token": "hush-3"}}
    written = dumps(chat)
    assert "constructor" in written
    assert "redis://" in written
    assert "hush" not in written
