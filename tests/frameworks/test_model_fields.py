"""Fields of the frameworks' models: few, named as elsewhere, and each name that is no field says where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import ConfigurableField
from pydantic import SecretStr

from ragblend import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.errors import UsageError
from ragblend.llamaindex import BlendLLM as LlamaBlend
from ragblend.llm import BlendLLM, ChatBlend

KINDS = [ChatBlend, BlendLLM, LlamaBlend]
MAX_FIELDS = 30
EXPECTED = {
    "model",
    "temperature",
    "max_tokens",
    "stop",
    "api_key",
    "system",
    "namespace",
    "dtype",
    "device",
    "timeout",
}


def test_a_chat_model_adds_at_most_thirty_fields():
    own = ChatBlend.model_fields.keys() - BaseChatModel.model_fields.keys()
    assert len(own) <= MAX_FIELDS
    assert own >= EXPECTED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adapter": "a"}, r"^adapter is an engine option; pass engine_options=\{'adapter': \.\.\.\}"),
        ({"remote": "redis://:hush@cache"}, r"^remote is an engine option; pass engine_options=\{'remote': \.\.\.\}"),
        ({"vllm_options": {}}, "^vllm_options is an engine option"),
        ({"memory_gib": 2}, "^memory_gib is an engine option"),
        ({"min_p": 0.1}, r"^min_p is an option of a call; for every call, pass call_options=\{'min_p': \.\.\.\}"),
        ({"call_options": {"min_q": 0.1}}, "^call_options has min_q; the nearest is 'min_p'; choose from "),
        ({"call_options": {"temperature": 1}}, "^call_options has temperature.*Pass others as fields"),
        ({"call_options": {"min_p": 2}}, r"^min_p is 2; choose 0 \(any\) to 1"),
        ({"call_options": 5}, "^call_options: Input should be a valid dictionary"),
        ({"api_key": 5}, "^api_key: Input should be"),
    ],
    ids=str,
)
def test_an_unknown_field_is_an_error_that_names_its_place(kind, given, message, tiny_engine):
    with pytest.raises(UsageError, match=message) as caught:
        kind(engine=tiny_engine(), **given)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_call_options_are_defaults_of_every_call(kind, tiny_engine):
    llm = kind(engine=tiny_engine(), call_options={"min_p": 0.1, "logit_bias": {3: 1.0}})
    assert (llm._options({}).min_p, llm._options({"min_p": 0.5}).min_p) == (0.1, 0.5)
    assert llm._options({}).logit_bias == {3: 1.0}
    assert llm._options({"refine_ratio": 0.2}).keywords["refine_ratio"] == 0.2
    if hasattr(llm, "_identifying_params"):  # LangChain's
        assert llm._identifying_params["logit_bias"] == {3: 1.0}, "an answer cache must distinguish them"


def test_one_stop_text_is_a_list_of_it(tiny_engine):
    chat = ChatBlend(engine=tiny_engine(), stop="end")
    assert chat._options({}).stop_strings == ("end",)
    assert chat._get_ls_params()["ls_stop"] == ["end"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_left_out_is_the_one_whose_kv_the_store_holds(kind, tmp_path):
    kind(model="demo", store=tmp_path).engine.close()
    llm = kind(store=tmp_path)
    assert (llm.model, llm.engine.name) == ("demo", "demo")
    llm.engine.close()


def test_an_engine_without_a_model_loads_the_stores_model(tmp_path):
    load_engine("demo", tmp_path / "kv").close()
    with load_engine(store=tmp_path / "kv") as engine:
        assert engine.name == "demo"
    DiskStore(tmp_path / "kv").put_model("f" * 32, {"model": "other"})
    with pytest.raises(UsageError, match="kv holds KV of demo, other; give a Hugging Face id"):
        load_engine(store=tmp_path / "kv")


@pytest.mark.parametrize("store", [None, "empty", "missing"])
@pytest.mark.parametrize("make", [*KINDS, load_engine])
def test_without_a_saved_model_the_usage_error_names_the_demo(make, store, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"`model` is not given, and .*or `model='demo'` for a trial"):
        make(store=store and tmp_path / store)
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("key", ["hush", SecretStr("hush")])
def test_an_api_key_is_handed_to_the_client_and_not_kept(key, monkeypatch):
    asked: list[dict[str, Any]] = []

    class Served:
        name, system = "demo", None

        def close(self) -> None:
            """Do nothing."""

    def share(model: str, store: Any, **options: Any) -> Served:
        asked.append(options)
        return Served()

    monkeypatch.setattr("ragblend.frameworks.model.share_engine", share)
    chat = ChatBlend(model="demo", backend="http://127.0.0.1:1", api_key=key, max_retries=1)
    assert (asked[0]["api_key"], asked[0]["max_retries"]) == ("hush", 1)
    assert chat.api_key is None
    assert ChatBlend.model_fields["api_key"].annotation == SecretStr | None


def test_a_model_over_another_models_engine_has_its_settings(tmp_path):
    first = ChatBlend(model="demo", store=tmp_path, engine_options={"memory_gib": 1})
    second = BlendLLM(engine=first.engine, max_tokens=2)
    assert (second.store, second.engine_options) == (first.store, {"memory_gib": 1})
    fields = {"temperature": ConfigurableField("t"), "namespace": ConfigurableField("n")}
    configurable: Any = second.configurable_fields(**fields)
    assert configurable._prepare({"configurable": {"t": 0.5}})[0].engine is first.engine
    other = configurable._prepare({"configurable": {"n": "theirs"}})[0].engine
    assert other is not first.engine
    for engine in (first.engine, other):
        engine.close()
