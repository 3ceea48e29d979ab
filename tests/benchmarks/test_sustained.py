"""The stream of `benchmarks.sustained`: what its prompts have, and which requests are compared."""

from __future__ import annotations

from math import gcd

from benchmarks.sustained import COMPARED_EVERY, NEW_DOCUMENTS, NUM_CHUNKS, NUM_WORDS, UNSEEN_EVERY, Stream, summarize
from ragblend.prompt.types import as_chunk


def test_prompts_mix_newest_earlier_and_unseen_passages():
    stream = Stream()
    earlier, newest = stream.new_documents(), stream.new_documents()
    assert len({*earlier, *newest}) == 2 * NEW_DOCUMENTS
    for number in range(2 * UNSEEN_EVERY):
        chunks = [as_chunk(chunk).text for chunk in stream.prompt().chunks]
        assert len(set(chunks)) == NUM_CHUNKS
        assert all(len(chunk.split()) <= NUM_WORDS for chunk in chunks)
        assert sum(chunk in newest for chunk in chunks) == NUM_CHUNKS // 2
        assert sum(chunk not in newest + earlier for chunk in chunks) == (number % UNSEEN_EVERY == 0)


def test_compared_requests_have_unseen_passages_as_often_as_others():
    assert gcd(COMPARED_EVERY, UNSEEN_EVERY) == 1


def test_a_batch_compares_each_request_with_itself():
    row = {"batch": 0, "num_chunk_hits": 5, "num_chunks": 6, "ingest_s": 0.0}
    rows = [row | {"blend_s": 1.0, "prefix_s": 3.0, "full_s": 4.0}, row | {"blend_s": 2.0}]
    (found,) = summarize([*rows, row | {"blend_s": 2.0, "prefix_s": 4.0, "full_s": 6.0}])
    assert (found["over_full"], found["over_prefix"], found["num_requests"]) == (3.5, 2.5, 3)
