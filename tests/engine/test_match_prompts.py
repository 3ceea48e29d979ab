"""Which runs of a prompt an engine reuses: of stored chunks anywhere, of named ones, and not of a question."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_prompts import CHUNKS

from ragblend.engine.matching import LEAST_QUOTE
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Chunk, MatchedPrompt, Prompt

ONE, TWO, THREE = CHUNKS
QUESTION = "what is that?"
LONG = Chunk(" ".join(chunk.text for chunk in CHUNKS), "long.txt")


@pytest.fixture
def engine(tiny_engine, chat_renderer):
    """An engine whose store holds ONE and TWO."""
    engine = tiny_engine(renderer=chat_renderer)
    list(engine.precompute_all([replace(chunk, source="") for chunk in (ONE, TWO)]))
    return engine


def texts_of(matched: MatchedPrompt, renderer: Renderer) -> list[str]:
    """The texts of the runs, each equal to a stretch of its chunk's ids."""
    for run in matched.runs:
        ids = tuple(matched.token_ids[run.start : run.end])
        assert ids == run.chunk_ids[run.chunk_start :][: len(ids)]
    return [renderer.plain_text(matched.token_ids[run.start : run.end]).strip() for run in matched.runs]


def test_stored_chunks_are_found_in_any_turn_by_their_ids(engine):
    turns = [
        ("system", ONE.text),
        ("user", f"Read: {TWO.text} {QUESTION}"),
        ("assistant", ONE.text),
        ("user", QUESTION),
    ]
    matched = engine.match(Prompt.from_messages(turns))
    # Beside text that no blank line separates from it, a chunk's first and last tokens may be others.
    assert all(
        text in chunk.text and len(text) > 0.8 * len(chunk.text)
        for text, chunk in zip(texts_of(matched, engine.renderer), (ONE, TWO, ONE), strict=True)
    )
    assert {run.chunk for run in matched.runs} == {None}
    assert matched.prefix_ids == engine.renderer.prefix_ids(ONE.text)


def test_a_prompt_gives_its_chunks_their_names(engine):
    matched = engine.match(Prompt([TWO, ONE], QUESTION))
    assert texts_of(matched, engine.renderer) == [TWO.text, ONE.text]
    assert [run.chunk for run in matched.runs] == [TWO, ONE]
    assert matched.num_prefix == len(engine.default_prefix_ids) == len(matched.prefix_ids)
    assert matched.question_start == matched.runs[-1].end


@pytest.mark.parametrize("start", ["", "Is it so? ", '"'])
def test_a_question_that_quotes_a_chunk_stays_fresh(start, engine):
    quoting = engine.match(Prompt([TWO], start + ONE.text))
    assert texts_of(quoting, engine.renderer) == [TWO.text]
    assert engine.match(Prompt(question=start + ONE.text)).runs == ()
    twice = engine.match(Prompt([ONE], start + ONE.text))  # named, and there as well
    assert [(run.chunk, run.start) for run in twice.runs] == [(ONE, twice.num_prefix)]
    assert len(twice.token_ids) > twice.runs[0].end + 2 * len(engine.renderer.tail_ids)


def test_text_behind_the_quotation_makes_it_a_document(engine):
    matched = engine.match(Prompt(question=f"{ONE.text}\n\n{QUESTION}"))
    assert texts_of(matched, engine.renderer) == [ONE.text]


@pytest.mark.parametrize(("num_tokens", "is_document"), [(LEAST_QUOTE, True), (LEAST_QUOTE - 1, False)])
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_document_at_the_end_counts_from_64_tokens(num_tokens, is_document, is_chat, engine):
    text = ("0123456789" * 7)[:num_tokens]  # a token is a digit
    assert len(engine.renderer.chunk_ids(text)) == num_tokens
    engine.add_known_chunks([text])
    content = f"{QUESTION}\n\n{text}"
    matched = engine.match(Prompt(question=content) if is_chat else Prompt.from_text(content))
    assert texts_of(matched, engine.renderer) == ([text] if is_document else [])


def test_a_chunk_that_the_prompt_names_counts_at_the_end(engine):
    for prompt in (Prompt.from_messages([("user", [QUESTION, ONE])]), Prompt.from_text([QUESTION, ONE])):
        (run,) = engine.match(prompt).runs
        assert run.chunk == ONE


def test_a_named_chunk_that_is_not_stored_is_a_miss_once(tiny_engine, chat_renderer):
    engine = tiny_engine(renderer=chat_renderer, on_miss="store")
    engine.precompute(ONE)
    prompt, unnamed = Prompt([ONE, THREE], QUESTION), Prompt(question=f"{ONE.text}\n\n{THREE.text}\n\n{QUESTION}")
    assert [run.chunk for run in engine.match(prompt).runs] == [ONE, THREE]
    assert len(engine.match(unnamed).runs) == 1, "it is neither stored nor named"
    assert not engine.has_kv(engine.renderer.chunk_ids(THREE.text))
    report = engine.generate(prompt, max_tokens=1).report
    assert (report.num_chunks, report.num_chunk_hits) == (2, 1)
    engine.wait_for_precompute()
    report = engine.generate(unnamed, max_tokens=1).report
    assert (report.num_chunks, report.num_chunk_hits) == (2, 2)


def test_a_forgotten_chunk_is_found_no_more(engine):
    assert engine.forget(ONE)
    matched = engine.match(Prompt(question=f"{ONE.text}\n\n{TWO.text}\n\n{QUESTION}"))
    assert texts_of(matched, engine.renderer) == [TWO.text]


def test_a_named_chunk_that_shares_sentences_with_another_matches_whole(engine):
    """Splitters let chunks overlap: the end of one is the beginning of the next."""
    following = Chunk(f"{' '.join(TWO.text.split()[6:])} and {THREE.text}", "two.txt", 30)
    matched = engine.match(Prompt([TWO, following], QUESTION))
    assert [run.chunk for run in matched.runs] == [TWO, following]
    assert texts_of(matched, engine.renderer) == [TWO.text, following.text]


def test_a_stored_chunk_that_holds_a_named_one_is_found_whole(engine):
    engine.add_known_chunks([LONG])
    part = Chunk(" ".join(LONG.text.split()[3:30]))
    matched = engine.match(Prompt.from_messages([("user", f"{LONG.text}\n\n{QUESTION}")], chunks=[part]))
    assert texts_of(matched, engine.renderer) == [LONG.text]


def test_the_prefix_of_a_prompt_is_its_own(engine):
    renderer = engine.renderer
    assert engine.match(Prompt([ONE], QUESTION, "be brief")).prefix_ids == renderer.prefix_ids("be brief")
    assert engine.match(Prompt.from_text([ONE, QUESTION])).prefix_ids == renderer.added_ids[0]
    answered = Prompt.from_messages([("assistant", "yes"), ("user", [ONE, QUESTION])])
    assert engine.match(answered).prefix_ids == ()
