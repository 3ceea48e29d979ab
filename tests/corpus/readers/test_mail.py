"""Mails and mailboxes: every text in readable letters, attachments by name, one broken mail costs that mail."""

from __future__ import annotations

import email.message
import email.policy
from time import process_time

import pytest
from document_files import only
from hypothesis import given
from hypothesis import strategies as st

from ragblend.corpus.documents import read_documents
from ragblend.corpus.readers.mail import read_mail, read_mbox
from ragblend.corpus.readers.types import Mark, ParsedRecord, UnreadableRecord
from ragblend.errors import UnreadableDocumentError

LINE = b"From ann@example.com Mon Jan  5 10:00:00 2026\n"


def read(data: bytes) -> ParsedRecord:
    return only(read_mail(data))


def mail(subject: str, text: str) -> email.message.EmailMessage:
    message = email.message.EmailMessage(policy=email.policy.SMTP)
    message["Subject"], message["From"], message["To"] = subject, "Ann <a@example.com>", "b@example.com"
    message["Date"] = "Mon, 05 Jan 2026 10:00:00 +0100"
    message.set_content(text)
    return message


def test_header_body_and_attachments_are_read():
    message = mail("Käse für Öl", "Länge 3 m\n")
    message.add_alternative("<p>Länge <b>3</b> m</p>", subtype="html")
    message.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="Größe.pdf")
    message.add_attachment(b"x", maintype="image", subtype="png", filename="b.png")
    record = read(message.as_bytes())
    header = "Subject: Käse für Öl\nFrom: Ann <a@example.com>\nTo: b@example.com\nDate: Mon, 05 Jan 2026 10:00:00 +0100"
    assert record.text == f"{header}\n\nLänge 3 m\n\nAttachments: Größe.pdf, b.png"
    assert record.marks == (Mark(0, "heading", "Käse für Öl", 1),)
    assert record.metadata == {
        "title": "Käse für Öl",
        "from": "Ann <a@example.com>",
        "to": "b@example.com",
        "date": "2026-01-05T10:00:00+01:00",
    }


def test_the_html_part_is_read_where_there_is_no_plain_text():
    message = mail("s", "")
    message.add_alternative("<h1>Rent</h1><p>is due</p>", subtype="html")
    record = read(message.as_bytes())
    assert record.text.endswith("# Rent\n\nis due")
    assert record.marks[-1] == Mark(record.text.index("# Rent"), "heading", "Rent", 1)


def test_forwarded_mails_are_read_with_their_header():
    message = mail("outer", "see below")
    message.add_attachment(mail("inner", "the rent is due"))
    record = read(message.as_bytes())
    assert record.text.endswith("see below\n\nSubject: inner\nFrom: Ann <a@example.com>\nTo: b@example.com\n"
                                "Date: Mon, 05 Jan 2026 10:00:00 +0100\n\nthe rent is due")  # fmt: skip
    assert [(mark.value, mark.level) for mark in record.marks] == [("outer", 1), ("inner", 2)]


@pytest.mark.parametrize(
    ("kind", "charset", "transfer", "body"),
    [
        ("plain", "iso-8859-15", "quoted-printable", b"5 =A4 f=FCr K=E4se"),
        ("plain", "windows-1252", "8bit", b"5 \x80 f\xfcr K\xe4se"),
        ("plain", "utf-8", "base64", b"NSDigqwgZsO8ciBLw6RzZQ=="),
        ("plain", "no-such-charset", "8bit", "5 € für Käse".encode()),
        ("html", "utf-8", "quoted-printable", b"<p>5 =E2=82=AC f=C3=BCr K=C3=A4se</p>"),
    ],
)
def test_bodies_are_decoded(kind, charset, transfer, body):
    head = f"Subject: x\nContent-Type: text/{kind}; charset={charset}\nContent-Transfer-Encoding: {transfer}\n\n"
    assert read(head.encode() + body).text == "Subject: x\n\n5 € für Käse"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig"])
def test_mails_exported_in_other_encodings_are_read(encoding):
    assert read("Subject: Lease\nFrom: a@example.com\n\nRent is due in May.\n".encode(encoding)).text.endswith(
        "in May."
    )


def test_raw_letters_and_broken_words_in_headers_are_readable():
    record = read("Subject: Käse\nFrom: =?no-such?q?a=e4?= <a@example.com>\nDate: yesterday\n\nx".encode())
    assert record.metadata["title"] == "Käse"
    assert record.metadata["date"] == "yesterday"


def test_what_is_no_mail_is_named():
    with pytest.raises(UnreadableDocumentError, match="has no header of a mail"):
        read(b"Dear Ann,\n\nno mail at all\n")
    with pytest.raises(UnreadableDocumentError, match="is no mailbox"):
        list(read_mbox(b"Subject: x\n\nFrom here on\n"))


def test_each_mail_is_a_document_and_a_broken_one_fails_alone():
    mails = [
        b"Subject: one\n\ntext\n\nFrom here on, nothing.\n>From me\n\n",
        b"no mail\n\n",
        b"Subject: three\n\nend\n",
    ]
    records = list(read_mbox(b"".join(LINE + one for one in mails)))
    assert [record.key for record in records] == ["#0", "#1", "#2"]
    assert isinstance(records[1], UnreadableRecord)
    assert "mail 2 has no header" in records[1].reason
    assert isinstance(records[0], ParsedRecord)
    assert records[0].text == "Subject: one\n\ntext\n\nFrom here on, nothing.\nFrom me"
    contents = read_documents("/box.mbox", b"".join(LINE + one for one in mails))
    assert [document.source for document in contents.documents] == ["/box.mbox#0", "/box.mbox#2"]
    assert "1 of 3 records could not be read" in contents.failure


@pytest.mark.parametrize(
    "header",
    [
        b"Subject: " + b"=?utf-8?q?a?= " * 100_000,
        b"To: " + b"(" * 300_000,
        b"Content-Type: text/plain; " + b'a*0*="' * 100_000,
        b'Content-Type: multipart/mixed;\n boundary="' + b'"\n b' * 100_000,
        b"Subject: " + b"\n x" * 100_000,
    ],
)
def test_long_headers_take_linear_time(header):
    start = process_time()
    try:
        assert read(b"From: a@example.com\n" + header + b"\n\nbody").text.endswith("body")
    except UnreadableDocumentError as error:
        assert "Content header" in str(error)  # noqa: PT017 (either outcome is right, another error is not)
    assert process_time() - start < 2


@given(st.text(min_size=1), st.text())
def test_any_subject_and_text_come_back(subject, text):
    subject, text = " ".join(subject.split()), " ".join(text.split())
    message = email.message.EmailMessage(policy=email.policy.SMTPUTF8)
    for letter in subject + text:
        if not letter.isprintable():
            return
    message["Subject"], message["From"] = subject, "a@example.com"
    message.set_content(text)
    record = read(message.as_bytes())
    assert record.metadata.get("title", "") == subject
    assert record.text.endswith(text)
