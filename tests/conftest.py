"""Shared fixtures: the models of `tiny_models`, tokenizers, and their engines. None of them uses the network.

Models are built once per session. `stock_model` returns the originals, `tiny_model` copies.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Tests must not read the settings and the store key of the user who runs them.
os.environ.update(XDG_CONFIG_HOME="/nonexistent")
# Measured times would decide which requests of the tiny models are blended.
os.environ["RAGBLEND_AUTO_PROFILE"] = "0"
os.environ.pop("RAGBLEND_STORE_KEY", None)
os.environ.pop("RAGBLEND_STORE_KEY_FILE", None)
# Without a GPU, Triton's kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from postgres import fresh_schema, running_postgres
from servers import running_redis, running_s3
from tiny_models import CHATML, FAMILIES, VOCABULARY, stock_models
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from ragblend.engine.fusion import attention
from ragblend.engine.store.tiered import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.prompt.render import Renderer

if os.environ.get("RAGBLEND_TEST_KERNELS"):  # every test with Triton's kernels, also on a CPU: many times slower
    attention.KERNEL_DEVICES |= {"cpu"}
# The libraries keep a million objects, which each full collection would scan for a second or two.
gc.disable()
torch.set_num_threads(1)
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
# A deadline fails slow machines, not wrong code.
settings.register_profile("ragblend", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ragblend")

# Files and folders whose tests only `make test-all` runs. Single slow tests have the marker `slow` in their files.
SLOW = (
    "benchmarks", "lab", "tools",
    "cli/test_analyze.py", "cli/test_cli_explain.py",
    "faults/test_full_disk.py", "faults/test_ingest_faults.py", "faults/test_mutations.py",
    "faults/test_planted_entries.py", "faults/test_request_bounds.py",
    "ingestion/test_ray_workers.py",
    "integration/test_chat_tools.py", "integration/test_corpus_follows_folder.py", "integration/test_drift.py",
    "integration/test_langchain_standard.py", "integration/test_notebooks.py", "integration/test_own_databases.py",
    "integration/test_real_documents.py",
    "test_limits.py", "test_long_documents.py",
    "engine/beside_vllm/test_vllm_contract.py", "engine/store/test_remote_bounds.py",
    "engine/transformers/test_quantised.py",
)  # fmt: skip
FAST = ("lab/ui/test_ui_browser.py", "tools/test_identifiers.py")
"""Files in the folders of SLOW that `make test` runs nevertheless, except their tests with the marker `slow`."""

FIRST = (
    "ingestion/test_ray_workers.py",
    "tools/test_code_blocks.py",
    "faults/test_kills.py",
    "faults/test_full_disk.py",
)
"""Files that take minutes and run first. A worker of `make test-all` runs whole files; the others would idle."""

COUNTED = "counted"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests of SLOW as slow. After pytest-randomly has set the order, move the tests of FIRST to the front."""
    here = Path(__file__).parent
    slow, fast, first = ({here / name for name in names} for names in (SLOW, FAST, FIRST))
    missing = [str(path) for path in slow | fast | first if not path.exists()]
    assert not missing, f"SLOW, FAST or FIRST in {__file__} names files that do not exist: {missing}"
    for item in items:
        if item.path not in fast and not slow.isdisjoint([item.path, *item.path.parents]):
            item.add_marker(pytest.mark.slow)
    yield
    items.sort(key=lambda item: item.path not in first)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exclude the objects that exist now from garbage collection, and enable it for those of the tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def counted(record_property):
    """Function `counted(text)` that adds a line to the list of survived faults at the end of the run."""
    return lambda text: record_property(COUNTED, text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seed of the random order, and the faults that passed tests survived."""
    seed = terminalreporter.config.getoption("randomly_seed", None)
    if seed is not None:
        terminalreporter.line(f"the order was random; repeat it with --randomly-seed={seed}")
    passed = terminalreporter.stats.get("passed", [])
    lines = [text for report in passed for name, text in report.user_properties if name == COUNTED]
    if lines:
        terminalreporter.section("faults survived")
        for line in lines:
            terminalreporter.line(str(line))


@pytest.fixture(params=list(FAMILIES))
def family(request):
    """Name of every supported family in turn; `pytest.mark.parametrize("family", ...)` selects some of them."""
    return str(request.param)


@pytest.fixture(scope="session")
def stock_model():
    """Function `stock_model(family)`: the unmodified transformers model with eager attention. Shared."""
    return stock_models()


@pytest.fixture(scope="session")
def tiny_model(stock_model):
    """Function `tiny_model(family)`: a new copy of the model, which a test may change."""
    return lambda family: copy.deepcopy(stock_model(family))


@pytest.fixture(scope="session")
def tiny_layers(tiny_model):
    """Function `tiny_layers(family)`: TransformersLayers over a copy. Shared, because they keep no state."""
    return cache(lambda family: TransformersLayers(tiny_model(family)))


@pytest.fixture(scope="session")
def make_tokenizer():
    """Function `make_tokenizer(chat_template=None, specials=(), added=())`: byte-level BPE with at most 300 ids.

    specials: further control tokens. added: added tokens that are not special. With special tokens, BOS is first.
    """
    text = "the theory of the other chunk and the question: what is that? answer the question with the chunk. "

    def build(
        chat_template: str | None = None, specials: tuple[str, ...] = (), added: tuple[str, ...] = ()
    ) -> PreTrainedTokenizerFast:
        control = ["<pad>", "<s>", "</s>", "<doc>", "<q>", "<a>", *specials]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(added),
            special_tokens=control,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator([text] * 4, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        fast = _as_fast(tokenizer, chat_template, additional_special_tokens=["<doc>", "<q>", "<a>", *specials])
        fast.add_tokens(list(added))
        assert len(fast) <= VOCABULARY
        return fast

    return build


def _as_fast(tokenizer: Tokenizer, chat_template: str | None, **tokens: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers with the usual control tokens and `tokens`."""
    usual = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **usual, **tokens)
    fast.chat_template = chat_template
    return fast


@pytest.fixture(scope="session")
def make_spaced_tokenizer():
    """Function `make_spaced_tokenizer(chat_template=None, specials=())`: a tokenizer like Llama 2's and Mistral's.

    It adds a space before every text and encodes unknown letters as bytes.
    """

    def build(chat_template: str | None = None, specials: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
        words = ["<pad>", "<s>", "</s>", "<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aehtosn"]
        merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "n")]
        vocabulary = {word: index for index, word in enumerate([*words, *(a + b for a, b in merges)])}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        fast = _as_fast(tokenizer, chat_template, unk_token="<unk>", additional_special_tokens=list(specials))
        assert len(fast) <= VOCABULARY
        return fast

    return build


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    """The tiny tokenizer without a chat template. Shared."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def renderer(tokenizer):
    """The tiny tokenizer's renderer, with the plain template."""
    return Renderer(tokenizer)


@pytest.fixture(scope="session")
def chat_renderer(make_tokenizer):
    """The tiny tokenizer's renderer with a chat template, like that of a chat model."""
    tokenizer = make_tokenizer(CHATML, specials=("<|im|>", "<|end|>"))
    return Renderer(tokenizer)


@pytest.fixture
def tiny_engine(tiny_layers, renderer):
    """Function `tiny_engine(family="llama", store=None, **options)`: an engine; store None: a new MemoryStore."""
    made: list[TransformersEngine] = []

    def build(family: str = "llama", store: Any = None, **options: Any) -> TransformersEngine:
        store = MemoryStore(1 << 28) if store is None else store
        options = {"name": f"tiny {family}", "fingerprint": f"tiny-{family}", "check": False, **options}
        options.setdefault("on_miss", "inline")
        own_renderer = options.pop("renderer", renderer)
        made.append(TransformersEngine(tiny_layers(family), own_renderer, store, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    """A Redis server, shared by the tests of a file."""
    yield from running_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def s3_port():
    """Port of an S3 server, shared by the tests of a file."""
    with running_s3() as port:
        yield port


@pytest.fixture(scope="session")
def postgres():
    """URL of a PostgreSQL server, shared by all tests."""
    with running_postgres() as url:
        yield url


@pytest.fixture
def shared_catalog(postgres):
    """URL of an empty catalogue in PostgreSQL."""
    with fresh_schema(postgres) as url:
        yield url


@pytest.fixture(params=["file", "memory", "postgres"])
def any_place(request, tmp_path):
    """Place of a new catalogue: a file, memory, and a PostgreSQL server in turn."""
    if request.param == "postgres":
        return str(request.getfixturevalue("shared_catalog"))
    return tmp_path / CATALOG_FILE if request.param == "file" else None


@pytest.fixture(params=["file", "postgres"])
def kept_place(request, tmp_path):
    """Place of a new catalogue that outlives its process: a file, and a PostgreSQL server in turn."""
    return str(request.getfixturevalue("shared_catalog")) if request.param == "postgres" else tmp_path / CATALOG_FILE
