"""Stored texts that are in a prompt in another form, and the first difference that is reported for each."""

import json

import pytest

from ragblend.lab.near_texts import LEAST_SHARE, MAX_NEAR, find_near_texts

LEASE = 'The lease of the "old mill" ends in May 2031.\nIts owner, Ida Nilsson, may prolong it once by six months.'
OTHER = "Rainfall at the northern station was measured daily, and the record of each month is kept in the archive."
ASK = "\n\nWho owns the mill?"


@pytest.mark.parametrize(
    ("sent", "difference"),
    [
        (LEASE.upper(), "differs in letter case: 'THE LEASE OF THE \"OLD' instead of 'The lease of the \"old'"),
        (LEASE.replace("\n", " "), "differs in white space or line breaks: "),
        (LEASE.replace("of the", "of  the"), "differs in white space or line breaks: "),
        (
            LEASE.replace('"old mill"', "“old mill”"),
            "other characters: 'The lease of the “old mill” ends in M' instead",
        ),
        (json.dumps(LEASE), "other characters: "),
        (LEASE.replace("six", "nine"), "other characters: "),
        (LEASE[:70], "the prompt has only a part: "),
        (LEASE[30:], "other characters: "),
        (LEASE, ""),
    ],
    ids=["case", "line break", "space", "quotes", "JSON", "word", "first part", "last part", "same"],
)
def test_the_first_difference_is_named_with_both_excerpts(sent, difference):
    rest = "" if sent == LEASE[:70] else ASK
    (near,) = find_near_texts([OTHER, LEASE], f"Read this. {sent}{rest}")
    assert near.text == LEASE
    assert near.difference.startswith(difference)
    assert bool(near.difference) == bool(difference)
    assert 0.5 < near.share <= 1.0


def test_an_escaped_line_break_is_shown_beside_the_real_one():
    plain = LEASE.replace('"', "")
    (near,) = find_near_texts([plain], json.dumps([{"text": plain}]))
    sent, stored = near.difference.removeprefix("other characters: ").split(" instead of ")
    assert r"2031.\\nIts" in sent
    assert r"2031.\nIts" in stored


def test_a_text_without_spaces_is_compared_by_its_characters():
    (near,) = find_near_texts(["水車小屋の賃貸契約は五月に終わります。"], "資料:水車小屋の賃貸契約は五月に終わります.")
    assert near.share == 1.0
    assert near.difference.startswith("other characters: ")


def test_nothing_near_gives_nothing():
    assert find_near_texts([LEASE, OTHER, "Too short."], "What is the capital of Norway? Too short.") == []
    assert find_near_texts([], LEASE) == []
    assert find_near_texts([LEASE], "") == []


def test_the_nearest_text_is_found_if_none_is_above_the_threshold():
    part, less = " ".join(LEASE.split()[:6]), " ".join(OTHER.split()[:5])
    (near,) = find_near_texts([OTHER, LEASE], f"{part}. {less}.")
    assert (near.text, near.share < LEAST_SHARE) == (LEASE, True)
    assert [each.text for each in find_near_texts([OTHER, LEASE], f"{part}. {OTHER.upper()}")] == [OTHER]


def test_what_the_prompt_matches_hides_the_texts_that_it_covers():
    longer = f"{LEASE} Until then the rent is due."
    prompt = f"{LEASE}\n\n{OTHER.upper()}"
    near = find_near_texts([longer, LEASE, OTHER], prompt, is_matched=LEASE.__eq__)
    assert [each.text for each in near] == [OTHER]


def test_the_most_similar_come_first_and_only_a_few():
    texts = [f"{OTHER} In year {number} it rained on {number} days of the summer." for number in range(9)]
    sent = "\n".join(text.replace("rained", "snowed") if "year 4" in text else text.upper() for text in texts)
    near = find_near_texts(texts, sent)
    assert len(near) <= MAX_NEAR
    assert [each.share for each in near] == sorted((each.share for each in near), reverse=True)
