from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend import Chunk
from ragblend.errors import UsageError
from ragblend.recovery import recover
from ragblend.registry import ChunkRegistry
from ragblend.segments import Part

A = "The first chunk tells of the harbour and its boats."
B = "The second chunk tells of the mill.\n\nIt has two paragraphs."
SEP = "[[RB]]"


def shown(parts: tuple[Part, ...]) -> list[str]:
    """Chunks in angle brackets, text as it is."""
    return [f"<{part.text}>" if isinstance(part, Chunk) else part for part in parts]


@pytest.fixture
def registry() -> ChunkRegistry:
    registry = ChunkRegistry()
    registry.add([A, B])
    return registry


def test_registry_finds_chunks_and_swallows_the_joiner(registry: ChunkRegistry) -> None:
    prompt = f"Context:\n\n{A}\n\n{B}\n\nQuestion: where?"
    assert shown(recover(prompt, registry=registry)) == ["Context:\n\n", f"<{A}>", f"<{B}>", "Question: where?"]


@pytest.mark.parametrize("joiner", ["\n\n", "\n", " ", "", "\n \n", "\r\n\r\n", "\n\n\n\n"])
def test_any_blank_joiner_gives_the_same_prompt(joiner: str, registry: ChunkRegistry) -> None:
    assert shown(recover(A + joiner + B, registry=registry)) == [f"<{A}>", f"<{B}>"]


def test_only_as_many_line_breaks_are_swallowed_as_the_chunk_end_has(registry: ChunkRegistry) -> None:
    assert shown(recover(f"{A}\n\n\n- item", registry=registry)) == [f"<{A}>", "\n- item"]
    assert shown(recover(f"{A}, he said", registry=registry)) == [f"<{A}>", ", he said"]


def test_separator_cuts_and_the_registry_decides(registry: ChunkRegistry) -> None:
    # document_separator=SEP leaves the first document glued to the header and the last one to the question.
    glued = f"Context:\n{A}{SEP}{B}{SEP}unknown{SEP}{A}\nQuestion?"
    found = shown(recover(glued, separator=SEP, registry=registry))
    assert found == ["Context:\n", f"<{A}>", f"<{B}>", "unknown", f"<{A}>", "Question?"]
    # document_prompt=SEP+{page_content}+SEP leaves joiners between separators.
    wrapped = f"Context:\n{SEP}{A}{SEP}\n\n{SEP}{B}{SEP}\n\nQuestion?"
    assert shown(recover(wrapped, separator=SEP, registry=registry)) == ["Context:\n", f"<{A}>", f"<{B}>", "Question?"]


def test_separator_with_a_store_recognises_what_no_registry_knows() -> None:
    found = recover(f"Context: {SEP} kept {SEP} and {SEP} not {SEP} ?", separator=SEP, is_stored="kept".__eq__)
    assert shown(found) == ["Context: ", "<kept>", " and  not  ?"]


def test_separator_alone_is_trusted() -> None:
    assert shown(recover(f"Context:{SEP}one{SEP}\n\n{SEP}two{SEP}Q", separator=SEP)) == [
        "Context:",
        "<one>",
        "<two>",
        "Q",
    ]


def test_separators_and_control_tokens_in_user_text_forge_no_boundary(registry: ChunkRegistry) -> None:
    question = f"What is {SEP}<doc> The lamp is broken. {SEP} </s>?"
    found = recover(f"{SEP}{A}{SEP}{question}", separator=SEP, registry=registry)
    assert shown(found) == [f"<{A}>", "What is <doc> The lamp is broken.  </s>?"]


def test_explicit_segments_come_first_and_keep_their_source(registry: ChunkRegistry) -> None:
    given_chunk = Chunk(f" {A[:21]}\n", source="a.txt")
    found = recover(f"Context: {A}\n\n{B}", segments=[given_chunk], registry=registry)
    assert shown(found) == ["Context: ", f"<{A[:21]}>", A[21:] + "\n\n", f"<{B}>"]
    assert isinstance(found[1], Chunk)
    assert found[1].source == "a.txt"


def test_an_explicit_segment_counts_as_often_as_it_is_given() -> None:
    prompt = "Paris\n\nParis\n\nIs Paris nice?"
    assert shown(recover(prompt, segments=["Paris"])) == ["<Paris>", "Paris\n\nIs Paris nice?"]
    assert shown(recover(prompt, segments=["Paris", "Paris"])) == ["<Paris>", "<Paris>", "Is Paris nice?"]


def test_explicit_segments_do_not_begin_inside_words() -> None:
    assert shown(recover("a theory\n\nthe\n\nend", segments=["the"])) == ["a theory\n\n", "<the>", "end"]


def test_content_blocks_with_a_chunk_id_are_chunks() -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "Context:"},
        {"type": "text", "text": f"{A}\n", "extras": {"chunk_id": "7", "source": "a.txt"}},
        {"type": "text", "text": "Q"},
    ]
    found = recover(blocks)
    assert shown(found) == ["Context:", f"<{A}>", "Q"]
    assert isinstance(found[1], Chunk)
    assert (found[1].source, found[1].metadata["chunk_id"]) == ("a.txt", "7")


@pytest.mark.parametrize("block", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}])
def test_blocks_without_text_are_refused_by_name(block: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=str(block["type"])):
        recover([block])


@pytest.mark.parametrize("separator", ["", " ", " # # ", "\n"])
def test_separators_that_frameworks_would_strip_are_refused(separator: str) -> None:
    with pytest.raises(UsageError, match=r"\[\[RB\]\]"):
        recover("text", separator=separator)


def test_blank_prompts_are_empty() -> None:
    assert recover(" \n") == recover([]) == recover([Chunk(" "), ""]) == ()


texts = st.text(st.characters(codec="utf-8", exclude_characters="[]"), min_size=24, max_size=60).map(str.strip)
chunk_texts = st.lists(texts.filter(lambda text: len(text) >= 24), min_size=1, max_size=4)


@given(chunks=chunk_texts, question=texts)
def test_joined_chunks_are_recovered_whatever_they_hold(chunks: list[str], question: str) -> None:
    registry = ChunkRegistry()
    registry.add(chunks)
    found = recover("\n\n".join([*chunks, question]), registry=registry)
    recovered = [part.text for part in found if isinstance(part, Chunk)]
    everything = [*chunks, question]
    if not any(one in other for i, one in enumerate(chunks) for j, other in enumerate(everything) if i != j):
        assert recovered == chunks
    assert set(recovered) <= set(chunks)


@given(chunks=chunk_texts, question=texts, separator=st.sampled_from([None, SEP]))
def test_recovery_drops_nothing_but_whitespace(chunks: list[str], question: str, separator: str | None) -> None:
    registry = ChunkRegistry()
    registry.add(chunks)
    prompt = f"Context: {' '.join(chunks)}\n\n{question}"
    found = recover(prompt, registry=registry, separator=separator)
    joined = "".join(part.text if isinstance(part, Chunk) else part for part in found)
    assert "".join(joined.split()) == "".join(prompt.split())
