"""The embedded model as it is shipped: its size and its chat template."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from ragblend import Prompt, load_engine
from ragblend.demo import WEIGHTS
from ragblend.demo.corpus import sample_corpus


def test_limits_of_the_wheel():
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 15_000_000
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 32 * 2**20


def test_the_chat_template_takes_chunks_as_paragraphs_and_as_blocks():
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    corpus = sample_corpus()
    chunks, question = corpus.records[0].chunks, corpus.questions[0].text
    paragraphs = [{"role": "user", "content": "\n\n".join([*chunks, question])}]
    written = tokenizer.apply_chat_template(paragraphs, tokenize=False)
    with load_engine("demo") as engine:
        ids = engine.renderer.render(Prompt(chunks, question))
    assert ids == tokenizer.encode(written, add_special_tokens=False)
    blocks = [{"type": "text", "text": text} for chunk in chunks for text in chunk.split("\n\n")]
    asked = [{"role": "user", "content": [*blocks, {"type": "text", "text": question}]}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == written
    system = [{"role": "system", "content": "Be short."}, *paragraphs]
    assert tokenizer.apply_chat_template(system, tokenize=False).startswith("<s><sys> Be short.<doc>")
