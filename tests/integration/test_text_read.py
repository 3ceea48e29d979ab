"""The text that the model reads is the text that was sent, whatever was ingested: random corpora, prompts, templates,
frameworks and modes, over tokenizers of three kinds. RAGBLEND_FAULTS=full runs 2,000 cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.llms import ChatMessage, MessageRole
from tiny_models import CHATML

import ragblend.engine.transformers.blend as blend_module
from ragblend.engine.report import MODES
from ragblend.engine.store.tiered import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.llamaindex import BlendLLM as LlamaBlend
from ragblend.llm import BlendLLM, ChatBlend
from ragblend.precompute import precompute_documents
from ragblend.prompt.formats import prompt_format
from ragblend.prompt.segmenter import Segmenter

CASES = 2000 if os.environ.get("RAGBLEND_FAULTS") == "full" else 250

MARKS = ("<|im|>", "<|end|>", "[INST]", "[/INST]")
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}</s>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)


@dataclass
class Reader:
    """An engine and everything that its model was given to read since the last look."""

    engine: TransformersEngine
    read: list[list[int]]

    def text(self) -> str:
        """The longest that was read: the prompt, beside its prefix and chunks that were computed for it."""
        ids = max(self.read, key=len)
        self.read.clear()
        return str(self.engine.segmenter._tokenizer.decode(ids, skip_special_tokens=False))

    def sent(self, messages: list[tuple[str, str]]) -> str:
        """What the model's own template and tokenizer make of the messages: read back with a mark for each content,
        because a tokenizer of the second kind doubles the spaces behind its control tokens, whoever uses it."""
        tokenizer = self.engine.segmenter._tokenizer
        turns = [{"role": role, "content": f"XQ{index}XQ"} for index, (role, _) in enumerate(messages)]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        text = str(tokenizer.decode(ids, skip_special_tokens=False))
        for index, (_, content) in enumerate(messages):
            before, mark, after = text.partition(f"XQ{index}XQ")
            assert mark
            text = before + content + after
        return text


@pytest.fixture(scope="module")
def readers(
    tiny_model: Callable[[str], Any],
    make_tokenizer: Callable[..., Any],
    make_spaced_tokenizer: Callable[..., Any],
) -> Iterator[dict[str, Callable[[], Reader]]]:
    """For each kind of tokenizer, what makes a fresh engine with an empty store, whose reading is recorded."""
    model = tiny_model("llama")
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    layers = TransformersLayers(model)
    tokenizers = {
        "byte level": make_tokenizer(CHATML, specials=("<|im|>", "<|end|>")),
        "space in front": make_spaced_tokenizer(MISTRAL, MARKS),
        "space in front, ChatML": make_spaced_tokenizer(CHATML, MARKS),
    }
    read: list[list[int]] = []
    fuse, full_prefill = blend_module.fuse, TransformersLayers.full_prefill

    def noting_fuse(layers: Any, plan: Any, *rest: Any) -> Any:
        read.append(plan.token_ids.tolist())
        return fuse(layers, plan, *rest)

    def noting_full(self: TransformersLayers, token_ids: torch.Tensor) -> Any:
        read.append(token_ids.tolist())
        return full_prefill(self, token_ids)

    def maker(tokenizer: Any) -> Callable[[], Reader]:
        segmenter = Segmenter(tokenizer, prompt_format(tokenizer))

        def make() -> Reader:
            engine = TransformersEngine(
                layers, segmenter, MemoryStore(1 << 28), name="tiny", fingerprint="tiny", check=False, on_miss="inline"
            )
            read.clear()
            return Reader(engine, read)

        return make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend_module, "fuse", noting_fuse)
        patch.setattr(TransformersLayers, "full_prefill", noting_full)
        yield {name: maker(tokenizer) for name, tokenizer in tokenizers.items()}


# --- what is sent ---

WORDS = (
    "the harbour 125,000 12 12.5 euro. James Bell was born in Dorburg. He lives there, I'm sure: yes! «né» 漢字。 🙂 "
    "https://example.org/a?b=1 a_b (x) </s> <|im|> Question: Answer: --- * # `code` it's naïve\u00a0space"
)
words = st.sampled_from(WORDS.split(" "))
sentences = st.lists(words, min_size=1, max_size=12).map(" ".join)
passages = st.lists(sentences, min_size=1, max_size=4).flatmap(
    lambda said: st.sampled_from(["\n", "\n\n", " ", "\n  "]).map(lambda joint: joint.join(said))
)
documents = st.sampled_from(
    ["{c}", "{c}", "[{n}] {c}", "Content: {c}\nSource: {n}.txt", "{c} (page {n})", "<doc>{c}</doc>", "- {c}", '"{c}"',
     "{c}, he said.", "Facts: {c}5,000 euro", "x{c}", "Title {n}\n{c}", "> {c}", "{c}\t", " {c} "]
)  # fmt: skip
joiners = st.sampled_from(["\n\n", "\n\n", "\n", " ", "\n---\n", "", "\r\n", ", ", "\n \n"])
LABELLED = (
    "{c}|Title\n{c}|[{n}] {c}|({n}) {c}|{n}. {c}|- {c}|> {c}|> [{n}] Text: {c}|Document {n}: {c}|文档： {c}|   {c}   "
    "|Content: {c}\nSource: {n}|{c} (page {n})|{c} [source: a.md, page {n}]|<p>{c}</p> (page {n})|<doc>{c}</doc>"
    '|<document index="{n}">{c}</document>'
)
"""Ways to put a text into a prompt that hide none."""
questions = st.one_of(sentences, sentences.map(lambda said: f"Is it true that {said}?"))
FRAMEWORKS = (
    "ChatBlend",
    "ChatBlend, template",
    "BlendLLM",
    "BlendLLM, chat",
    "LlamaIndex chat",
    "LlamaIndex complete",
)
layouts = st.sampled_from(
    [
        [("system", "Use the context.\n\n{context}"), ("user", "{question}")],
        [("user", "Context:\n{context}\n\nQuestion: {question}\nAnswer:")],
        [("user", "{context}\n\n{question}")],
        [("user", "Question: {question}\n\n{context}")],
        [("user", "Context: {context} Question: {question}")],
        [("user", "hi"), ("assistant", "{question}"), ("user", "{context}\n{question}")],
        [("user", "Summarize:\n\n{context}")],
    ]
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Texts in the prompt, texts ingested (those, parts of them, others), and the messages."""
    given_texts = draw(st.lists(passages, min_size=1, max_size=4))
    parts = [text[: draw(st.integers(1, len(text)))] for text in given_texts if draw(st.booleans())]
    lines = [line for text in given_texts for line in text.split("\n") if draw(st.booleans())]
    ingested = [
        *(text for text in given_texts if draw(st.booleans())),
        *parts,
        *lines,
        *draw(st.lists(sentences, max_size=2)),
    ]
    document, question = draw(documents), draw(st.one_of(questions, st.sampled_from(given_texts)))
    filled = [document.replace("{n}", str(n)).replace("{c}", text) for n, text in enumerate(given_texts)]
    context = draw(joiners).join(filled)
    messages = [
        (role, text.replace("{question}", question).replace("{context}", context)) for role, text in draw(layouts)
    ]
    return given_texts, ingested, messages


def send(framework: str, reader: Reader, messages: list[tuple[str, str]], mode: str) -> list[tuple[str, str]]:
    """Have the model of `framework` answer the messages; what it was sent."""
    options: dict[str, Any] = {"engine": reader.engine, "max_tokens": 1, "mode": mode}
    kinds = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    roles = {"system": MessageRole.SYSTEM, "user": MessageRole.USER, "assistant": MessageRole.ASSISTANT}
    if framework == "ChatBlend":
        ChatBlend(**options).invoke([kinds[role](text) for role, text in messages])
    elif framework in ("ChatBlend, template", "BlendLLM, chat"):
        names = {"system": "system", "user": "human", "assistant": "ai"}
        slots = [(names[role], f"{{t{n}}}") for n, (role, _) in enumerate(messages)]
        llm: Any = ChatBlend(**options) if framework.startswith("Chat") else BlendLLM(**options)
        (ChatPromptTemplate.from_messages(slots) | llm).invoke({f"t{n}": text for n, (_, text) in enumerate(messages)})
    elif framework == "LlamaIndex chat":
        LlamaBlend(**options).chat([ChatMessage(role=roles[role], content=text) for role, text in messages])
    else:
        whole = "\n\n".join(text for _, text in messages)
        messages = [("user", whole)]
        if framework == "BlendLLM":
            BlendLLM(**options).invoke(whole)
        else:
            LlamaBlend(**options).complete(whole)
    return messages


@settings(max_examples=CASES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases(), framework=st.sampled_from(FRAMEWORKS), mode=st.sampled_from(MODES), kind=st.integers(0, 2))
def test_the_text_that_the_model_reads_is_the_text_that_was_sent(
    case: Any, framework: str, mode: str, kind: int, readers: dict[str, Callable[[], Reader]]
) -> None:
    _, ingested, messages = case
    reader = list(readers.values())[kind]()
    precompute_documents(ingested, reader.engine)
    reader.read.clear()
    sent = send(framework, reader, messages, mode)
    assert reader.text() == reader.sent(sent)


@settings(max_examples=CASES // 2, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(passages.filter(lambda text: len(text) >= 24), min_size=1, max_size=5, unique=True),
    document=st.sampled_from(LABELLED.split("|")),
    joiner=st.sampled_from(["\n\n", "\n", "\n---\n", "\r\n", "\n \n"]),
    kind=st.integers(0, 2),
)
def test_every_ingested_text_that_stands_alone_is_recognised(
    texts: list[str], document: str, joiner: str, kind: int, readers: dict[str, Callable[[], Reader]]
) -> None:
    texts = [text for text in texts if not any(text in other for other in texts if other is not text)]
    reader = list(readers.values())[kind]()
    precompute_documents(texts, reader.engine)
    context = joiner.join(document.replace("{n}", str(n)).replace("{c}", text) for n, text in enumerate(texts))
    answer = ChatBlend(engine=reader.engine, max_tokens=1).invoke([("system", f"Use:\n{context}"), ("human", "Who?")])
    report = answer.response_metadata["ragblend"]
    assert (report["num_chunks"], report["num_chunk_hits"]) == (len(texts), len(texts))
