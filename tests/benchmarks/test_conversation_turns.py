"""The summary of measured conversations: which turns are over the limit, and which answers are equal."""

from benchmarks.conversations import KINDS, NUM_TURNS, WAYS, summary


def held(kind, number, way, ttft_s):
    turns = [{"ttft_s": ttft_s, "answer": "yes"} for _ in range(NUM_TURNS)]
    return {"kind": kind, "conversation": number, "way": way, "turns": turns}


def test_blend_is_compared_with_the_better_of_prefix_and_full_prefill():
    found = []
    for kind in KINDS:
        for number, scale in enumerate((1.0, 2.0, 10.0)):
            ttft_s = dict(zip(WAYS, (0.5, 1.0, 2.0, 1.0), strict=True))
            found += [held(kind, number, way, scale * ttft_s[way]) for way in WAYS]
    found[0]["turns"][3]["ttft_s"] = 9.0  # one slow turn of three does not count
    for record in found[:12:4]:
        record["turns"][5]["ttft_s"] *= 2.4  # 1.2 times prefix
    found[3]["turns"][0]["answer"] = "no"
    same, new = (summary(found)[kind] for kind in ("same", "new"))
    assert same["blend_over_the_better"] == [0.5, 0.5, 0.5, 0.5, 0.5, 1.2]
    assert (same["turns_over_the_limit"], new["turns_over_the_limit"]) == (1, 0)
    assert same["answers_at_ratio_one"] == "17 of 18 equal full's"
    assert new["median_ttft_s"]["full"] == [4.0] * NUM_TURNS
