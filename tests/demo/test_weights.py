"""The embedded model as it is shipped: its size, and a chat template that writes the prompt of its declared format."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

from ragblend import Prompt, load_engine
from ragblend.demo import WEIGHTS
from ragblend.demo.corpus import sample_corpus


def test_limits_of_the_wheel() -> None:
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 15_000_000
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 32 * 2**20


def test_the_chat_template_writes_the_same_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    corpus = sample_corpus()
    chunks, question = [*corpus.records[0].chunks], corpus.questions[0].text
    with load_engine("demo") as engine:
        ids = engine.renderer.tokenize(Prompt(chunks, question)).token_ids
    parts = [{"type": "text", "text": text} for text in [*chunks, question]]
    written = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert tokenizer.encode(written, add_special_tokens=False) == [*ids]
    bare = [text.replace("\n\n", " ") for text in chunks]
    paragraphs = [{"role": "user", "content": "\n\n".join([*bare, question])}]
    assert tokenizer.apply_chat_template(paragraphs, tokenize=False) == written
    system = [{"role": "system", "content": "Be short."}, *paragraphs]
    assert tokenizer.apply_chat_template(system, tokenize=False).startswith("<s><sys> Be short.<doc>")
