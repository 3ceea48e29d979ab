"""`benchmarks.many_documents` at small counts: what it fills a store with is found, replaced and removed."""

import pytest

from benchmarks.many_documents import ManyDocuments, text_of

pytestmark = pytest.mark.slow


def test_every_step_is_measured_on_documents_that_are_there(tmp_path):
    many = ManyDocuments(tmp_path)
    many.grow(100)
    assert all(many.llm.engine.is_stored(text_of(number)) for number in (0, 50, 99))
    found = many.measure()
    assert found.pop("num_documents") == 100
    assert set(found) == {"add", "replace", "match", "add and match", "remove", "open"}
    assert all(milliseconds > 0 for milliseconds in found.values())
    assert not many.llm.engine.is_stored(text_of(5)), "it was replaced, and then removed"
