"""The page's server over HTTP: its answers, rejected requests, the folder of uploads, and the order of requests."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from typing import Any

import httpx
import pytest
from ui_site import QUESTION, of, open_for, parsed, running, settings_in

from ragblend.cli.session import retrieve
from ragblend.corpus.readers import child
from ragblend.errors import UnsupportedModelError, UsageError
from ragblend.lab.ui import app, job_queue
from ragblend.lab.ui.answers import QuestionRun, shared_beginning
from ragblend.lab.ui.uploads import uploads_folder, validate_file_name
from ragblend.prompt.types import Prompt

EVIL = "</p><script>hacked = 1</script>"


# -- answers


def test_a_question_is_answered_in_all_modes_each_beside_full_prefill(site):
    events = site.events("/ask", {"question": QUESTION})
    names = [name for name, _ in events]
    assert names[-1] == "end"
    assert "error" not in names
    sources = of(events, "sources")[0]["sources"]
    assert {source["name"] for source in sources} >= {"security-review.md"}
    assert all(source["place"].startswith(source["name"]) for source in sources)
    answers = {facts["mode"]: facts for facts in of(events, "answer")}
    assert list(answers) == ["full", "prefix", "reuse", "blend"]
    # What the command-line demo shows of this question, here as there.
    assert {mode: facts["text"].strip() for mode, facts in answers.items()} == {
        "full": "trainer", "prefix": "trainer", "reuse": "not stated", "blend": "trainer",
    }  # fmt: skip
    assert [facts["shared"] for facts in answers.values()] == ["trainer", "trainer", "", "trainer"]
    assert all(facts["ttft_s"] > 0 for facts in answers.values())
    assert answers["full"]["num_reused_tokens"] == 0 < answers["reuse"]["num_reused_tokens"]
    assert answers["blend"]["num_recomputed_tokens"] > 0
    assert answers["full"]["agreement"] is None
    assert answers["prefix"]["agreement"]["first_token_kl"] == pytest.approx(0, abs=1e-5)
    assert answers["reuse"]["agreement"]["answers_identical"] is False
    assert answers["reuse"]["agreement"]["first_token_kl"] > answers["blend"]["agreement"]["first_token_kl"]
    pieces = [facts["text"] for facts in of(events, "piece") if facts["mode"] == "blend"]
    assert "".join(pieces) == answers["blend"]["text"]
    (tokens,) = of(events, "tokens")
    assert sum(tokens["counts"].values()) == answers["blend"]["prompt_tokens"]
    assert tokens["counts"]["recomputed"] == answers["blend"]["num_recomputed_tokens"]


def test_another_ratio_runs_blending_alone_and_whole_recompute_is_full_prefill(site):
    first = site.events("/ask", {"question": QUESTION})
    name = of(first, "asked")[0]["id"]
    found = {}
    for ratio in (0.0, 1.0):
        events = site.events("/blend", {"id": name, "ratio": ratio})
        assert [facts["mode"] for facts in of(events, "start")] == ["blend"]
        found[ratio] = of(events, "answer")[0] | of(events, "tokens")[0]["counts"]
    assert found[0.0]["recomputed"] == 0 < found[0.0]["reused"]
    assert found[1.0]["reused"] == 0 < found[1.0]["recomputed"]
    assert found[1.0]["agreement"]["first_token_kl"] < 1e-5
    assert found[1.0]["agreement"]["answers_identical"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/blend", {"id": "long-gone", "ratio": 0.1}, "ask it again"),
        ("/ask", {"question": "why " * 5000}, "fewer chunks"),
        ("/ingest", {"names": ["never-sent.txt"]}, "never-sent.txt"),
    ],
    ids=["KV that was released", "prompt too long", "no such upload"],
)
def test_a_request_that_cannot_be_served_is_an_error_with_the_fix(site, path, body, words):
    (error,) = of(site.events(path, body), "error")
    assert words in error["message"]


@pytest.mark.parametrize("ratio", ["-0.1", "1.5", "9" * 400, "NaN", "1e999"], ids=lambda ratio: ratio[:9])
def test_a_ratio_that_is_no_share_is_refused(site, ratio):
    reply = site.client.post("/blend", content=f'{{"id": "x", "ratio": {ratio}}}')
    assert reply.status_code == 400
    assert "choose 0 (full reuse) to 1" in reply.json()["error"]
    assert len(reply.json()["error"]) < 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/ask", b'{"question": "  "}'),
        ("/ask", b"[]"),
        ("/ask", b"no json"),
        ("/ingest", b'{"names": "a.md"}'),
        ("/ingest", b'{"names": ["../a.md"]}'),
        ("/blend", b'{"id": "x", "ratio": true}'),
        ("/blend", b'{"id": "x", "ratio": "0.1"}'),
        ("/blend", b'{"id": "x", "ratio": ' + b"9" * 5000 + b"}"),  # more digits than Python makes an int of
        ("/ask", b"[" * 100_000),
        ("/ask", b'{"question": ' * 15_000),
        ("/ingest", b'{"names": ["\\ud800.md"]}'),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(site, path, body):
    reply = site.client.post(path, content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]


@pytest.mark.parametrize(
    ("answer", "reference", "shared"),
    [
        ("It was Ann, in May.", "It was Ann, in June.", "It was Ann, in "),
        ("train", "trainer", ""),
        (" the same", "the same and more", "the same"),
        ("the same and more", "the same", "the same"),
        ("equal", "equal", "equal"),
        ("", "any", ""),
    ],
)
def test_answers_part_at_the_beginning_of_a_word(answer, reference, shared):
    assert shared_beginning(answer, reference) == shared


def test_the_page_says_that_its_scale_is_not_linear(site):
    script = site.client.get("/page.js").text
    assert "The scale is not linear" in script
    assert 'id="ratio-scale"' in site.client.get("/").text
    subtitle = script.partition('$("about").textContent = `${model} ')[2].partition("\n")[0]
    assert subtitle.startswith("answers from")
    assert not any(word in subtitle for word in ("rule", "context", "retrieved"))


# -- documents


def test_an_upload_is_ingested_and_its_text_comes_back_as_text(empty):
    assert empty.state()["num_documents"] == 0
    (error,) = of(empty.events("/ask", {"question": "Who is there?"}), "error")
    assert "drop some" in error["message"]

    assert empty.upload("né <b>.md", f"James Bell has a job at Velora. {EVIL}".encode()).status_code == 201
    events = empty.events("/ingest", {"names": ["né <b>.md"]})
    (report,) = of(events, "ingested")
    assert (report["num_documents"], report["num_chunks"], report["num_new_kv"]) == (1, 1, 1)
    assert of(events, "progress")[-1] == {"stage": "prefill", "done": 1, "total": 1}
    assert empty.state()["documents"] == ["né <b>.md"]

    events = empty.events("/ask", {"question": "Where has James Bell a job?"})
    assert EVIL in of(events, "sources")[0]["sources"][0]["text"]
    html = of(events, "tokens")[0]["html"]
    assert "<script" not in html
    assert "&lt;" in html

    empty.upload("né <b>.md", b"Other words about Torham.")  # the same name replaces the document
    assert of(empty.events("/ingest", {"names": ["né <b>.md"]}), "ingested")[0]["num_documents"] == 1
    sources = of(empty.events("/ask", {"question": "Where has James Bell a job?"}), "sources")[0]["sources"]
    assert [source["text"] for source in sources] == ["Other words about Torham."]


def test_a_damaged_pdf_is_named_and_the_others_are_ingested(empty):
    empty.upload("bad.pdf", b"%PDF-1.7 and nothing")
    empty.upload("good.txt", b"James Bell lives in Dorburg, and he sells many lamps there.")
    (report,) = of(empty.events("/ingest", {"names": ["bad.pdf", "good.txt"]}), "ingested")
    (problem,) = report["problems"]
    assert problem["name"] == "bad.pdf"
    assert "repair it" in problem["reason"]
    assert empty.state()["documents"] == ["good.txt"]
    assert [path.name for path in uploads_folder(empty.settings.store).iterdir()] == ["good.txt"]


def test_an_upload_that_crashes_its_reader_is_rejected_and_others_stay(empty, monkeypatch):
    assert empty.upload("a.html", b"<p>James Bell lives in Dorburg.").status_code == 201
    monkeypatch.setattr(child, "_COMMAND", (sys.executable, "-c", "import os; os.abort()"))
    reply = empty.upload("a.html", b"<p>Other words")
    assert (reply.status_code, "reading it crashed (SIGABRT)" in reply.json()["error"]) == (400, True)
    (path,) = uploads_folder(empty.settings.store).iterdir()
    assert path.read_bytes() == b"<p>James Bell lives in Dorburg."


def test_a_file_beyond_the_limit_leaves_nothing(empty):
    data = b"x" * (1 << 20) + b"y"
    assert empty.upload("big.txt", data).status_code == 413

    def unsaid() -> Any:
        yield data

    reply = empty.client.post("/documents", params={"name": "big.txt"}, content=unsaid())
    assert reply.status_code == 413
    assert "RAGBLEND_MAX_FILE_MIB" in reply.json()["error"]
    folder = uploads_folder(empty.settings.store)
    assert not folder.exists() or not list(folder.iterdir())
    assert empty.upload("fits.txt", data[:-1]).status_code == 201


def test_a_body_far_beyond_the_limit_is_answered_with_413(empty):
    """The answer comes before the body has been sent: one that is not read to its end would be reset with it."""
    for _ in range(5):
        reply = empty.upload("big.txt", bytes(48 << 20))
        assert (reply.status_code, "RAGBLEND_MAX_FILE_MIB" in reply.json()["error"]) == (413, True)
    assert empty.client.post("/ask", content=bytes(48 << 20)).status_code == 413


@pytest.mark.parametrize(
    "name", ["../out.md", "a/b.md", "a\\b.md", "/etc/passwd", "..", ".hidden", "", " ", "a\nb.md", "a\0b", "x" * 201]
)
def test_no_name_leads_out_of_the_folder(site, name):
    folder = uploads_folder(site.settings.store).parent
    before = sorted(folder.rglob("*"))
    assert site.upload(name, b"text").status_code == 400
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(UsageError):
        validate_file_name(name)


def test_an_upload_replaces_a_link_and_does_not_follow_it(empty, tmp_path):
    outside = tmp_path / "outside.md"
    outside.write_text("mine")
    folder = uploads_folder(empty.settings.store)
    folder.mkdir(exist_ok=True)
    (folder / "a.md").symlink_to(outside)
    assert empty.upload("a.md", b"yours").status_code == 201
    assert outside.read_text() == "mine"


# -- allowed origins


def test_a_name_that_is_not_this_machines_is_refused_for_reading_too(site):
    for path in ("/", "/state", "/page.js"):
        assert site.client.get(path, headers={"host": "evil.example"}).status_code == 403
        assert site.client.get(path, headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_page_can_neither_ask_nor_upload(site, headers):
    jobs = list(site.desk._jobs)  # of other tests; they may end during this one
    with httpx.Client(base_url=site.url, headers=headers, trust_env=False) as other:
        for path in ("/ask", "/ingest", "/blend", "/documents?name=a.md"):
            assert other.post(path, json={"question": QUESTION, "names": ["a.md"]}).status_code == 403
    assert [job for job in site.desk._jobs if job not in jobs] == []
    assert not (uploads_folder(site.settings.store) / "a.md").exists()


def test_a_program_without_an_origin_may_ask(site):
    with httpx.Client(base_url=site.url, trust_env=False, timeout=60) as program:
        assert program.post("/blend", json={"id": "x", "ratio": 0.5}).status_code == 200


def test_pages_cannot_be_framed_and_run_no_script_but_their_own(site):
    for path in ("/", "/page.css", "/tokens.css", "/page.js", "/state", "/nothing"):
        headers = site.client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    page = "".join(site.client.get(path).text for path in ("/", "/page.css", "/page.js"))
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert site.client.get("/../app.py").status_code == 404


# -- one at a time


def test_a_second_request_waits_and_one_that_hung_up_is_not_answered(filled, monkeypatch):
    gate, left, answered = threading.Event(), threading.Event(), list[str]()

    def find(index: Any, question: str, settings: Any) -> Any:
        assert question != "slow" or gate.wait(60)
        return retrieve(index, QUESTION, settings)

    leave, answer = job_queue.UiJob.cancel_unless_kept, QuestionRun.answer
    monkeypatch.setattr(job_queue.UiJob, "cancel_unless_kept", lambda job: (leave(job), left.set()))
    monkeypatch.setattr(
        QuestionRun, "answer", lambda asked, mode, job: (answer(asked, mode, job), answered.append(mode))
    )
    with running(filled, find=find) as site:
        ask = functools.partial(site.client.stream, "POST", "/ask")
        with ask(json={"question": "slow"}) as slow, ask(json={"question": "next"}) as second:
            events = parsed(second)
            assert next(events) == ("waiting", {"ahead": 1, "behind": "answering a question"})
            assert site.state()["now"]["title"] == "answering a question"
            slow.close()
            assert left.wait(30), "the hang-up is noticed while the job runs"
            gate.set()
            rest = list(events)
        assert len(of(rest, "answer")) == 4
        assert of(rest, "error") == []
        assert answered == ["full", "prefix", "reuse", "blend"], "the first question was answered in no mode"


def test_an_ingestion_outlives_its_browser_and_another_one_waits(tmp_path, monkeypatch):
    gate, begun = threading.Event(), threading.Event()
    take_in = app.ingest_uploads

    def slowly(job: job_queue.UiJob, *arguments: Any) -> None:
        begun.set()
        assert gate.wait(60)
        take_in(job, *arguments)

    monkeypatch.setattr(app, "ingest_uploads", slowly)
    with running(settings_in(tmp_path)) as site:
        for name in ("a.md", "b.md"):
            site.upload(name, f"The words of {name} about Velora.".encode())
        with site.client.stream("POST", "/ingest", json={"names": ["a.md"]}) as first:
            assert begun.wait(60)
            first.close()
        with site.client.stream("POST", "/ingest", json={"names": ["b.md"]}) as second:
            events = parsed(second)
            assert next(events) == ("waiting", {"ahead": 1, "behind": "ingesting documents"})
            gate.set()
            assert of(list(events), "error") == []
        assert site.state()["documents"] == ["a.md", "b.md"]


def test_an_abandoned_answer_stops_and_frees_the_engine(filled):
    engine, index = open_for(filled)
    with engine, index:
        prompt = Prompt([hit.chunk for hit in retrieve(index, QUESTION, filled)], QUESTION)

        async def leave_after_a_piece() -> list[str]:
            question, names = QuestionRun(engine, prompt, filled), list[str]()
            worker = job_queue.JobQueue()
            async for name, _ in (job := worker.submit(lambda job: question.answer("reuse", job), "it")).events():
                names.append(name)
                if name == "piece":
                    job.cancel_unless_kept()
            worker.wait_for_jobs()
            return names

        names = asyncio.run(leave_after_a_piece())
        assert names[0] == "start"
        assert names[-1] == "end"
        assert engine.generate(prompt, mode="full", max_tokens=16).text.strip() == "trainer"


# -- what goes wrong


def test_the_page_names_a_model_that_is_not_supported(tmp_path):
    reason = "layers of type Mamba keep no KV; choose a model with attention"

    def refuse(job: job_queue.UiJob) -> Any:
        raise UnsupportedModelError(reason)

    with running(settings_in(tmp_path, model="some/model"), refuse) as site:
        (error,) = of(site.events("/ask", {"question": QUESTION}), "error")
        assert error["message"] == reason
        state = site.state()
        assert (state["status"], state["model"], state["problem"]) == ("failed", "some/model", reason)


def test_a_bug_is_called_one_and_the_desk_goes_on(filled):
    def find(index: Any, question: str, settings: Any) -> Any:
        return 1 / 0 if question == "bug" else retrieve(index, QUESTION, settings)

    with running(filled, find=find) as site:
        (error,) = of(site.events("/ask", {"question": "bug"}), "error")
        assert "This is a bug" in error["message"]
        assert len(of(site.events("/ask", {"question": QUESTION}), "answer")) == 4


def test_stopping_the_server_ends_what_is_running(filled):
    waiting = threading.Event()

    def find(index: Any, question: str, settings: Any) -> Any:
        waiting.set()
        threading.Event().wait(1)
        return retrieve(index, QUESTION, settings)

    with running(filled, find=find) as site:
        with site.client.stream("POST", "/ask", json={"question": QUESTION}) as reply:
            assert waiting.wait(60)
            site.desk.close()
            (error,) = of(list(parsed(reply)), "error")
        assert "stopped" in error["message"]


def test_a_port_in_use_is_an_error_with_a_free_one(site):
    port = int(site.url.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"--port {port + 1}"):
        app._listen("127.0.0.1", port)
