"""What a body under /v1/ragblend/documents may be, and what a refusal says."""

import re

import pytest
from hostile_bodies import HOSTILE, JSON, LINES

from ragblend.errors import UsageError
from ragblend.server.requests import read_deletion, read_documents


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_rejected_with_a_short_reason_and_place(name):
    sent = HOSTILE[name]
    with pytest.raises(UsageError) as refused:
        read_deletion(sent.body) if sent.method == "DELETE" else read_documents(sent.body, sent.content_type, None)
    assert re.search(rf"\b{re.escape(sent.named)}\b", str(refused.value))
    assert 10 < len(str(refused.value)) < 1000


def test_reasons_say_where():
    for content_type, body, said in [
        (JSON, b'{"documents": [{"text": "a"}, {"text": 7}]}', r"documents\.1\.text: Input should be a valid string"),
        (JSON, b'{"documents": [{"id": "a"}]}', "give either `text` or `chunks`"),
        (LINES, b'{"text": "a"}\n\n{"text": 7}', "line 3 is invalid: text"),
        (JSON, b'{"cache_salt": "", "documents": [{"text": "a"}]}', "cache_salt: String should have at least 1"),
        (LINES, b'{"text": "a", "cache_salt": "s"}', "line 1 is invalid: cache_salt: Extra inputs"),
    ]:
        with pytest.raises(UsageError, match=said):
            read_documents(body, content_type, None)
    many = b'{"documents": [' + b",".join([b"7"] * 50) + b"]}"
    with pytest.raises(UsageError, match="and 47 more"):
        read_documents(many, JSON, None)


def test_the_least_that_is_needed():
    (one,), salt = read_documents(b'{"documents": [{"text": "a"}]}', JSON, None)
    assert salt is None
    assert (one.collection, one.id, one.body) == ("default", one.version, {"text": "a"})
    (same,), _ = read_documents(b'{"text": "a"}\n', LINES, "kb")
    assert (same.collection, same.id) == ("kb", one.id)
    (other,), _ = read_documents(b'{"documents": [{"text": "a", "chunk_size": 64}]}', JSON, None)
    assert other.version != one.version
    with pytest.raises(UsageError, match="only for JSON lines"):
        read_documents(b'{"documents": [{"text": "a"}]}', JSON, "kb")
