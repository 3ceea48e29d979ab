"""A document longer than the context is answered from windows; what they share is prefilled once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel

from ragblend.chains import create_long_document_chain
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.langchain.long_documents import make_windows, window_spans
from ragblend.llm import BlendLLM, ChatBlend
from ragblend.prompt.types import Chunk

CONTEXT = 1352  # tokens: the sample corpus has four times as many
ASKED = [("Where was Diana Walsh born?", "Fendale"), ("What is the role of Otto Burke?", "driver")]


@pytest.fixture(scope="module")
def engine():
    with load_engine("demo", model_kwargs={"max_position_embeddings": CONTEXT}) as engine:
        assert engine.context_length == CONTEXT
        yield engine


@pytest.fixture
def prefilled(engine, monkeypatch):
    """The texts of the chunks that are computed alone, each as often as it is."""
    texts: list[str] = []
    compute = engine.precompute_all

    def noting(chunks: Any, *rest: Any, **options: Any) -> Any:
        chunks = list(chunks)
        texts.extend(chunk.text if isinstance(chunk, Chunk) else chunk for chunk in chunks)
        return compute(chunks, *rest, **options)

    monkeypatch.setattr(engine, "precompute_all", noting)
    return texts


def report_of_the_company() -> Document:
    """The sample corpus as one long document."""
    return Document("\n\n".join(record.markdown for record in sample_corpus().records), metadata={"source": "corpus"})


def chain(engine: TransformersEngine, **options: Any) -> Any:
    """A chain over the embedded model, which was trained on its own questions and no instructions."""
    chat = ChatBlend(engine=engine, max_tokens=8)
    return create_long_document_chain(chat, **{"map_prompt": "{input}", "chunk_tokens": 128, **options})


@pytest.mark.parametrize("combine", ["reduce", "rerank"])
def test_a_document_of_four_times_the_context_is_answered(combine, engine):
    document = report_of_the_company()
    assert engine.renderer.count_tokens(document.page_content) >= 4 * CONTEXT
    asked = chain(engine, combine=combine)
    found = asked.batch([{"input": question, "document": document} for question, _ in ASKED])
    assert [each["answer"] for each in found] == [answer for _, answer in ASKED]
    for result, (_, answer) in zip(found, ASKED, strict=True):
        assert len(result["windows"]) >= 5
        said = [each for each in result["windows"] if answer in each["answer"]]
        text = document.page_content
        assert said
        assert all(answer in text[each["start"] : each["end"]] for each in said)


def test_every_chunk_is_prefilled_once_though_windows_share_it(engine, prefilled):
    document = Document(
        report_of_the_company().page_content.replace(".", " .")
    )  # texts that no other test has prefilled
    asked = chain(engine, overlap_tokens=300)
    found = asked.invoke({"input": ASKED[0][0], "document": document})
    reports, tokens = [window["report"] for window in found["windows"]], found["tokens"]
    assert len(prefilled) == len(set(prefilled))
    assert sum(report["num_chunks"] for report in reports) >= len(prefilled) + 2 * (len(reports) - 1)  # windows overlap
    assert (
        tokens["num_chunk_tokens"]
        == tokens["num_prefilled_tokens"]
        == sum(map(engine.renderer.count_tokens, prefilled))
    )
    # All chunks of a window are stored when it is answered: reused, except for tokens that blending recomputes.
    assert all(report["num_chunk_hits"] == report["num_chunks"] for report in reports)
    in_windows = sum(chunk["num_tokens"] for report in reports for chunk in report["chunks"])
    assert in_windows >= tokens["num_chunk_tokens"] + 300 * (len(reports) - 1)
    assert tokens["num_reused_tokens"] >= 0.7 * in_windows
    assert tokens["num_reused_tokens"] == sum(report["num_reused_tokens"] for report in reports)
    again = asked.invoke({"input": ASKED[1][0], "document": document})
    assert again["tokens"]["num_prefilled_tokens"] == 0
    assert len(prefilled) == len(set(prefilled))


def test_questions_in_one_batch_prefill_a_document_once(engine, prefilled):
    document = Document(report_of_the_company().page_content.replace(".", " !"))
    found = chain(engine).batch([{"input": question, "document": document} for question, _ in ASKED * 2])
    assert len(prefilled) == len(set(prefilled)) > 0
    numbers = [each["tokens"]["num_prefilled_tokens"] for each in found]
    assert sorted(numbers) == [0, 0, 0, found[0]["tokens"]["num_chunk_tokens"]]


async def test_it_answers_the_same_without_blocking_and_in_pieces(engine):
    asked, given = chain(engine), {"input": ASKED[0][0], "document": report_of_the_company()}
    whole = asked.invoke(given)
    assert (await asked.ainvoke(given))["answer"] == whole["answer"]
    assert [each["answer"] for each in await asked.abatch([given, given])] == [whole["answer"]] * 2
    pieces = list(asked.stream(given))
    assert [name for piece in pieces for name in piece][:2] == ["input", "windows"]
    assert "".join(piece.get("answer", "") for piece in pieces) == whole["answer"]
    assert pieces[-1]["tokens"] == whole["tokens"] | {"num_prefilled_tokens": 0}
    assert "".join([piece.get("answer", "") async for piece in asked.astream(given)]) == whole["answer"]


def test_a_document_that_fits_takes_one_request(engine):
    document = report_of_the_company().page_content[:3000]
    for combine in ("reduce", "refine", "rerank"):
        found = chain(engine, combine=combine).invoke({"input": ASKED[0][0], "document": document})
        assert len(found["windows"]) == 1
        assert found["report"]["num_chunk_hits"] == found["report"]["num_chunks"] > 1
        assert found["tokens"]["prompt_tokens"] == found["report"]["prompt_tokens"]


def test_an_instruction_may_replace_the_question_over_documents_of_any_form(engine):
    document = report_of_the_company()
    asked = chain(engine, instruction=ASKED[1][0])
    forms = (document, document.page_content, [document], {"document": [document]})
    assert {asked.invoke(form)["answer"] for form in forms} == {ASKED[1][1]}
    assert asked.invoke({"input": ASKED[0][0], "document": document})["answer"] == ASKED[0][1]
    two = asked.invoke([Document("Nothing. " * 300, metadata={"source": "a"}), document])
    assert {(each["source"], each["last_source"]) for each in two["windows"]} == {("a", "corpus"), ("corpus", "corpus")}


# --- how answers become one: a model that says what it was asked ---


class Numbered(ChatBlend):
    """Answers with the number of the call, and notes what it was sent."""

    sent: list[str] = []  # noqa: RUF012
    saying: str = "It is {number}."

    def _generate(self, messages: Any, *rest: Any, **call: Any) -> Any:
        self.sent.append(messages[-1].text)
        found = super()._generate(messages, *rest, **call)
        found.generations[0].message.content = self.saying.format(number=len(self.sent))
        return found


@pytest.fixture
def numbered(engine):
    return Numbered(engine=engine, max_tokens=4, sent=[], strict=True)


def test_answers_that_differ_are_made_one_by_the_model(numbered):
    asked = create_long_document_chain(numbered, chunk_tokens=128)
    found = asked.invoke({"input": "Who?", "document": report_of_the_company()}, {"max_concurrency": 1})
    num_windows = len(found["windows"])
    assert len(numbered.sent) == num_windows + 1
    assert all("answer: not stated" in text for text in numbered.sent[:-1])
    assert numbered.sent[-1].startswith(
        "These are answers from different parts of one document:\n\nIt is 1.\n\nIt is 2."
    )
    assert found["answer"] == f"It is {num_windows + 1}."
    assert found["report"]["num_chunks"] == 0


def test_answers_too_many_for_a_prompt_are_made_one_in_rounds(numbered):
    numbered.saying = "It is {number} " + "and the other and the other and the other" * 20
    asked = create_long_document_chain(numbered, chunk_tokens=128)
    found = asked.invoke({"input": "Who?", "document": report_of_the_company()}, {"max_concurrency": 1})
    combining = [text for text in numbered.sent if text.startswith("These are answers")]
    assert len(combining) > 2
    assert all(numbered.get_num_tokens(text) < CONTEXT for text in combining)
    assert found["answer"].startswith(f"It is {len(numbered.sent)} ")
    assert found["tokens"]["prompt_tokens"] > sum(each["report"]["prompt_tokens"] for each in found["windows"])


def test_windows_that_agree_or_have_no_answer_need_no_further_answer(numbered):
    for saying in ("It is so.", "This is Not stated."):
        numbered.saying = saying
        found = create_long_document_chain(numbered, chunk_tokens=128).invoke(
            {"input": "Who?", "document": report_of_the_company()}
        )
        assert (found["answer"], "report" in found) == (saying, False)
    assert not [text for text in numbered.sent if text.startswith("These are answers")]


def test_refining_hands_every_window_the_answer_so_far(numbered):
    asked = create_long_document_chain(numbered, combine="refine", chunk_tokens=128)
    found = asked.invoke({"input": "Who?", "document": report_of_the_company()})
    assert len(numbered.sent) == len(found["windows"])
    for number, text in enumerate(numbered.sent[1:], start=1):
        assert f"The answer from earlier passages: It is {number}.\n" in text
    assert found["answer"] == f"It is {len(numbered.sent)}."
    assert "answer" not in found["windows"][-1]  # it is the answer


def test_what_is_bound_counts(engine):
    llm = BlendLLM(engine=engine, max_tokens=700)
    given = {"input": "Who?", "document": report_of_the_company()}
    with pytest.raises(UsageError, match="the answer 1400, but the context has"):
        create_long_document_chain(llm.as_chat().bind(max_tokens=1400)).invoke(given)
    found = create_long_document_chain(llm.as_chat().bind(max_tokens=2), chunk_tokens=128).invoke(given)
    assert all(each["report"]["completion_tokens"] <= 2 for each in found["windows"])


def test_other_models_are_refused_by_name():
    with pytest.raises(UsageError, match="FakeListChatModel; long documents need ChatBlend"):
        create_long_document_chain(FakeListChatModel(responses=["x"]))


# --- windows ---


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40), room=st.integers(9, 40), overlap=st.integers(0, 20))
def test_windows_cover_everything_in_order_and_fit(sizes, room, overlap):
    spans = window_spans(sizes, room, overlap)
    assert (spans[0][0], spans[-1][1]) == (0, len(sizes))
    for (start, end), (following, last) in itertools.pairwise(spans):
        assert start < following <= end < last
        shared = sum(sizes[following:end])
        # As much as was asked for, unless one chunk more and the next would not fit.
        assert shared >= overlap or following == start + 1 or sum(sizes[following - 1 : end + 1]) > room
    assert all(sum(sizes[start:end]) <= room for start, end in spans)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"window_tokens": 5000}, "leave 1000 tokens"),
        ({"window_tokens": 200, "overlap_tokens": 200}, "cannot overlap"),
        ({"window_tokens": 200, "chunk_tokens": 150, "overlap_tokens": 60}, "cannot overlap"),
    ],
)
def test_sizes_that_fit_nowhere_are_refused_with_the_numbers(sizes, reason, engine):
    with pytest.raises(UsageError, match=reason):
        make_windows([("Some text.", "")], engine, 1000, **sizes)


@pytest.mark.parametrize(
    ("given_input", "reason"),
    [
        ({"document": "x"}, "needs a question"),
        ({"input": "Who?"}, "pass a text"),
        ({"input": "Who?", "document": 3}, "is a int"),
        ({"input": "Who?", "document": ["x", 3]}, "is a int"),
        ({"input": "Who?", "document": " "}, "empty"),
    ],
)
def test_bad_input_is_refused_in_words(given_input, reason, engine):
    with pytest.raises(UsageError, match=reason):
        chain(engine).invoke(given_input)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"combine": "stuff"}, "choose reduce, refine or rerank"),
        ({"map_prompt": 'Answer as {"answer": ...}. {input}'}, 'map_prompt.*"answer".*{input}, {no_answer}.*twice'),
        ({"refine_prompt": "{input} {answers}"}, "refine_prompt.*{answers}.*{answer}, {input}"),
        ({"combine_prompt": "{answers} {input"}, "combine_prompt.*expected '}'"),
    ],
    ids=["way", "json", "misspelt", "open"],
)
def test_an_invalid_way_or_prompt_is_rejected_before_any_reading(engine, options, found):
    with pytest.raises(UsageError, match=found):
        chain(engine, **options)
    assert chain(engine, map_prompt='{input} As {{"name": "..."}}').invoke({"input": "Who?", "document": "No text."})


def test_with_no_words_for_no_answer_no_answer_is_left_out(engine):
    texts = [
        Document(text, metadata={"source": None}) for text in ("Bob Fox lives in Norburg. " * 40, "Ida is ill. " * 80)
    ]
    asked = chain(
        engine, window_tokens=200, chunk_tokens=100, overlap_tokens=0, no_answer="", combine_prompt="{answers}?"
    )
    result = asked.invoke({"input": "Where does Bob Fox live?", "document": texts})
    assert len({each["answer"] for each in result["windows"]}) > 1
    assert "report" in result  # they were put together
    assert {each["source"] for each in result["windows"]} == {""}
