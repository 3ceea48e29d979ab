"""Passwords, tokens and API keys show up nowhere: not in messages, logs, representations, dumps or printed commands."""

import json
import logging
import traceback

import pytest

from ragblend import BlendLLM, ChatBlend, load_engine
from ragblend.cli.printing import remote_line
from ragblend.config import Settings
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.vllm.client import Connection
from ragblend.errors import UsageError
from ragblend.llamaindex import BlendLLM as LlamaIndexLLM
from ragblend.operations.serve import build_server_command
from ragblend.redaction import redact_url

SECRET = "geheim"
URLS = (
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"redis://user:{SECRET}@127.0.0.1:1/0?socket_timeout=1",
    f"redis://127.0.0.1:1/0?password={SECRET}",
    f"redis://127.0.0.1:1/0?socket_timeout={SECRET}",
    f"redis://127.0.0.1:1/0?unknown={SECRET}",
    f"redis://:a#{SECRET}@127.0.0.1:1/0",
    f"redis://:{SECRET}#a@127.0.0.1:1/0",
    f"redis://:{SECRET}/a@127.0.0.1:1/0",
    f"redis://:{SECRET}?a@127.0.0.1:1/0",
    f"redis://:a@{SECRET}@127.0.0.1:1/0",
    f"redis://user:{SECRET}@127.0.0.1:port/0",
    f"redis://user:{SECRET}",
    f"rediss://:{SECRET}@127.0.0.1:1/0?ssl_cert_reqs={SECRET}",
    f"reddis://:{SECRET}@127.0.0.1/0",
    f"redis:/:{SECRET}@127.0.0.1/0",
    f"redis//:{SECRET}@127.0.0.1/0",
    f":{SECRET}@127.0.0.1",
    f"s3:/key:{SECRET}@bucket",
    f"http://user:{SECRET}@[::1",
    f"sftp://user:{SECRET}@127.0.0.1:1/x",
    f"ftp://user:{SECRET}@127.0.0.1:1/x",
)


@pytest.mark.parametrize("url", URLS)
def test_no_message_about_a_remote_shows_its_password(url, caplog):
    caplog.set_level(logging.DEBUG)
    shown = [redact_url(url), repr(Settings(remote=url))]
    try:
        store = open_remote(url, timeout_s=0.5)
        store.get("a" * 32)
        shown += [str(store.status()), repr(store.values), *map(str, store.keys())]
        store.close()
    except (UsageError, ImportError):
        shown.append(traceback.format_exc())
    shown += [record.getMessage() for record in caplog.records if record.name.startswith("ragblend")]
    assert SECRET not in "\n".join(shown)


def test_a_password_with_reserved_characters_is_an_error_that_names_their_escapes():
    with pytest.raises(UsageError, match="'#' as %23"):
        open_remote("redis://:a#b@cache:6379/0")


def test_a_url_as_it_was_printed_is_refused_instead_of_tried():
    with pytest.raises(UsageError, match="give the whole URL"):
        open_remote(redact_url("redis://:geheim@cache:6379/0"))


@pytest.mark.parametrize("make", [BlendLLM, ChatBlend, LlamaIndexLLM])
def test_a_framework_model_shows_no_password(make):
    url = f"redis://user:{SECRET}@127.0.0.1:1/0?password={SECRET}"
    model = make(model="demo", engine_options={"remote": url, "memory_gib": 0.5})
    dumps = [model.model_dump(), model.model_dump(mode="json"), json.loads(model.model_dump_json())]
    dumps += [getattr(model, name)() for name in ("asdict", "to_dict") if hasattr(model, name)]
    dumps.append(getattr(model, "_identifying_params", None))  # LangChain's
    assert SECRET not in repr((repr(model), str(model), dumps))
    assert model.model_dump()["engine_options"] == {"remote": "redis://***@127.0.0.1:1/0", "memory_gib": 0.5}
    assert model.engine_options["remote"] == url, "only what is shown is cut"


@pytest.mark.parametrize("backend", [f"htp://user:{SECRET}@host:8000", f"user:{SECRET}@host", f"http//:{SECRET}@host"])
def test_a_mistyped_backend_is_refused_without_its_password(backend):
    for refuse in (lambda: Settings(backend=backend), lambda: load_engine("demo", backend=backend)):
        with pytest.raises(UsageError) as caught:
            refuse()
        assert SECRET not in str(caught.value)


def test_a_server_that_does_not_answer_is_named_without_its_password():
    connection = Connection(f"http://user:{SECRET}@127.0.0.1:1", max_retries=0)
    with pytest.raises(Exception, match=r"no server answers at http://\*\*\*@127") as caught:
        connection.request_json("GET", "/v1/models")
    connection.close()
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_the_printed_command_of_a_server_hides_what_is_secret(tmp_path):
    flags = ("--hf-token", SECRET, f"--ssl-keyfile-password={SECRET}", "--max-model-len", "512")
    remote = f"redis://127.0.0.1:6379/0?password={SECRET}"
    settings = Settings(model="demo", store=str(tmp_path), remote=remote)
    made = build_server_command(settings, flags, api_key=SECRET, check=False)
    assert SECRET not in made.display_command()
    assert made.display_command().endswith("--max-model-len 512")
    assert made.command[-5:-3] == ("--hf-token", SECRET), "vLLM still gets it"


@pytest.mark.parametrize("url", ["redis://:geheim@127.0.0.1:1/0", "redis://127.0.0.1:1/0"])
def test_a_command_that_a_message_suggests_can_be_run(url, caplog):
    store = open_remote(url, timeout_s=0.2)
    store.get("a" * 32)
    store.close()
    shown = remote_line({"reachable": True, "url": redact_url(url), "store_bytes": 1, "latency_s": 1.0,
                         "num_stored_kv": 1, "num_missing": 1})  # fmt: skip
    commands = [each.partition("ragblend ")[2] for each in (shown, *caplog.messages) if "ragblend " in each]
    assert len(commands) >= 2
    assert not [each for each in commands if "***" in each]
