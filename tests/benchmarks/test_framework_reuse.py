"""The benchmark of framework constructs: a small run over a tiny tokenizer."""

import pytest
from tiny_models import CHATML

from benchmarks.framework_reuse import measure
from ragblend.lab.quality.tasks import QaCase

PASSAGES = (
    "The lighthouse on Gull Rock was built long ago. Its lamp is turned by clockwork.",
    "Tomas Veld, the keeper's brother, repairs the lamp each spring.",
)
CASE = QaCase("Who repairs the lamp?", ("Tomas Veld",), PASSAGES, "", "score")


@pytest.mark.parametrize(
    ("framework", "construct", "least"),
    [
        ("LangChain", "create_stuff_documents_chain", 0.95),
        ("LangChain", "tool message, JSON", 0.9),
        ("LlamaIndex", "response mode compact", 0.95),
        ("LlamaIndex", "response mode accumulate", 0.95),
    ],
)
def test_a_construct_takes_the_share_of_its_texts_from_the_store(framework, construct, least, tmp_path, make_tokenizer):
    make_tokenizer(CHATML, specials=("<|im|>", "<|end|>")).save_pretrained(tmp_path)
    row = measure(framework, construct, str(tmp_path), [CASE])
    assert row.num_calls == (len(PASSAGES) if construct.endswith("accumulate") else 1)
    assert least <= row.share <= 1
