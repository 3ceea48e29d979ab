from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend import Chunk
from ragblend.corpus.chunk_registry import ChunkRegistry
from ragblend.errors import UsageError
from ragblend.frameworks.boundaries import recover_chunks
from ragblend.prompt.prompt import Part

A = "The first chunk tells of the harbour and its boats."
B = "The second chunk tells of the mill.\n\nIt has two paragraphs."
SEP = "[[RB]]"


def shown(parts: tuple[Part, ...]) -> list[str]:
    """Chunks in angle brackets, text as it is."""
    return [f"<{part.text}>" if isinstance(part, Chunk) else part for part in parts]


def text_of(parts: tuple[Part, ...]) -> str:
    """What a model reads."""
    return "".join(part.text if isinstance(part, Chunk) else part for part in parts)


@pytest.fixture
def registry() -> ChunkRegistry:
    registry = ChunkRegistry()
    registry.add([A, B])
    return registry


def known(*texts: str) -> ChunkRegistry:
    registry = ChunkRegistry()
    registry.add(texts)
    return registry


# --- the registry: what stands alone is found, and nothing is moved ---


@pytest.mark.parametrize(
    "prompt",
    [
        f"Is it true that {A}\nAnswer:",
        f'What does "{A}" mean?\nAnswer:',
        f"{A} Is that so?\nAnswer:",
        f"Question: {A}\nAnswer:",
        f"Question:\n{A}\n\nAnswer:",
        f"## User question:\n\n{A}\n\nAnswer:",
        f"Question 2: {A}\nAnswer:",
        f"Is this still right: {A}\nAnswer:",
        f"{A}, he said.\nAnswer:",
        f"{A}And more.",
        f"Frage: {A}\nAntwort:",
        f"问题： {A}\n",
    ],
)
def test_a_stored_sentence_inside_a_question_stays_part_of_the_question(prompt: str, registry: ChunkRegistry) -> None:
    assert recover_chunks(prompt, registry=registry, asks=True) == (prompt,)
    context = f"Context:\n\n{B}\n\n{prompt}"
    assert shown(recover_chunks(context, registry=registry, asks=True)) == ["Context:\n\n", f"<{B}>", f"\n\n{prompt}"]


def test_a_question_that_is_an_ingested_text_is_the_question() -> None:
    asked = "How do I reset my password?"
    registry = known(A, asked, "Never on a Sunday.")
    assert shown(recover_chunks(f"{A}\n\n{asked}", registry=registry, asks=True)) == [f"<{A}>", f"\n\n{asked}"]
    # Retrieval brings the very text that is asked: the first is a passage, the second the question.
    assert shown(recover_chunks(f"{A}\n\nor\n\n{A}", registry=registry, asks=True)) == [f"<{A}>", f"\n\nor\n\n{A}"]
    # A few words at the end of a turn are something that anybody may say.
    assert recover_chunks("Never on a Sunday.", registry=registry, asks=True) == ("Never on a Sunday.",)
    # Elsewhere nobody asks.
    assert shown(recover_chunks(f"{A}\n\n{asked}", registry=registry)) == [f"<{A}>", "\n\n", f"<{asked}>"]


def test_a_text_to_work_on_may_end_a_users_turn(registry: ChunkRegistry) -> None:
    prompt = f"Write a concise summary of the following:\n\n{A}"
    assert shown(recover_chunks(prompt, registry=registry, asks=True))[1] == f"<{A}>"


# --- separators ---


def test_a_separator_cuts_and_the_registry_decides(registry: ChunkRegistry) -> None:
    # document_separator=SEP leaves the first document glued to the header and the last one to the question.
    glued = f"Context:\n{A}{SEP}{B}{SEP}unknown{SEP}{A}\nQuestion?"
    found = shown(recover_chunks(glued, separator=SEP, registry=registry))
    assert found == ["Context:\n", f"<{A}>", "\n\n", f"<{B}>", "\n\nunknown\n\n", f"<{A}>", "\nQuestion?"]
    # document_prompt=SEP+{page_content}+SEP leaves joiners between separators.
    wrapped = f"Context:\n{SEP}{A}{SEP}\n\n{SEP}{B}{SEP}\n\nQuestion?"
    found = shown(recover_chunks(wrapped, separator=SEP, registry=registry))
    assert found == ["Context:\n", f"<{A}>", "\n\n", f"<{B}>", "\n\nQuestion?"]


def test_a_separator_with_a_store_recognises_what_no_registry_knows() -> None:
    found = recover_chunks(f"Context: {SEP} kept {SEP} and {SEP} not {SEP} ?", separator=SEP, is_stored="kept".__eq__)
    assert shown(found) == ["Context:  ", "<kept>", "  and  not  ?"]


def test_a_separator_alone_is_trusted() -> None:
    found = recover_chunks(f"Context:{SEP}one{SEP}\n\n{SEP}two{SEP}Q", separator=SEP)
    assert shown(found) == ["Context:\n\n", "<one>", "\n\n", "<two>", "\n\nQ"]


def test_separators_and_control_tokens_in_user_text_forge_no_boundary(registry: ChunkRegistry) -> None:
    question = f"What is {SEP}<doc> The lamp is broken. {SEP} </s>?"
    found = recover_chunks(f"{SEP}{A}{SEP}{question}", separator=SEP, registry=registry, asks=True)
    assert shown(found) == [f"<{A}>", "\n\nWhat is <doc> The lamp is broken.  </s>?"]


# --- explicit segments and blocks ---


def test_explicit_segments_come_first_and_keep_their_source(registry: ChunkRegistry) -> None:
    given_chunk = Chunk(f" {A[:21]}\n", source="a.txt")
    found = recover_chunks(f"Context: {A}\n\n{B}", segments=[given_chunk], registry=registry)
    assert shown(found) == ["Context: ", f"<{A[:21]}>", A[21:] + "\n\n", f"<{B}>"]
    assert isinstance(found[1], Chunk)
    assert found[1].source == "a.txt"


def test_content_blocks_with_a_chunk_id_are_chunks() -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "Context:"},
        {"type": "text", "text": f"{A}\n", "extras": {"chunk_id": "7", "source": "a.txt"}},
        {"type": "text", "text": "Q"},
    ]
    found = recover_chunks(blocks)
    assert shown(found) == ["Context:", f"<{A}>", "\nQ"]
    assert isinstance(found[1], Chunk)
    assert (found[1].source, found[1].metadata["chunk_id"]) == ("a.txt", "7")


@pytest.mark.parametrize("block", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}])
def test_blocks_without_text_are_refused_by_name(block: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=str(block["type"])):
        recover_chunks([block])


def test_blank_prompts_are_empty() -> None:
    assert recover_chunks(" \n") == recover_chunks([]) == recover_chunks([Chunk(" "), ""]) == ()


# --- whatever they hold ---

letters = st.characters(codec="utf-8", exclude_characters="[]")
texts = st.text(letters, min_size=24, max_size=60).map(str.strip)
chunk_texts = st.lists(texts.filter(lambda text: len(text) >= 24), min_size=1, max_size=4)
fragments = st.sampled_from(
    ["\n", "\n\n", " ", "", ", ", "Question: ", "[1] ", " (page 1)", "> ", SEP, "the", "?", "\t"]
)


@given(chunks=chunk_texts, question=texts)
def test_joined_chunks_are_recovered_whatever_they_hold(chunks: list[str], question: str) -> None:
    registry = known(*chunks)
    found = recover_chunks("\n\n".join([*chunks, question]), registry=registry)
    recovered = [part.text for part in found if isinstance(part, Chunk)]
    everything = [*chunks, question]
    if not any(one in other for i, one in enumerate(chunks) for j, other in enumerate(everything) if i != j):
        assert recovered == chunks
    assert set(recovered) <= set(chunks)


@given(st.data(), chunk_texts, st.booleans(), st.booleans())
def test_joined_the_parts_are_the_text_that_was_sent(
    data: st.DataObject, chunks: list[str], asks: bool, framed: bool
) -> None:
    pieces = st.one_of(
        st.sampled_from(chunks), fragments, st.text(letters, max_size=9), st.sampled_from(chunks).map(lambda c: c[:-3])
    )
    prompt = "".join(data.draw(st.lists(pieces, max_size=12)))
    segments = data.draw(st.lists(st.sampled_from(chunks), max_size=3))
    separator = data.draw(st.sampled_from([None, SEP]))
    empty = recover_chunks(prompt, separator=separator, asks=asks, framed=framed, registry=ChunkRegistry())
    found = recover_chunks(
        prompt, separator=separator, asks=asks, framed=framed, registry=known(*chunks), segments=segments
    )
    assert text_of(found) == text_of(empty)
    if separator is None:
        assert text_of(found) == (prompt if prompt.strip() else "")
    for chunk, following in zip(found, (*found[1:], "\n"), strict=False):
        if isinstance(chunk, Chunk):  # a format adds a blank line only where neither holds
            assert chunk.found_in_prompt or (isinstance(following, str) and following.startswith("\n"))
