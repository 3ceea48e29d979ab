"""Mails (.eml) and mailboxes (.mbox): subject, sender, receivers and date as lines, then the decoded text.

The HTML part is read if there is no plain text. Attachments are only named; forwarded mails are read. Read
`_parse_mail` first.
"""

from __future__ import annotations

import email.policy
import re
from contextlib import suppress
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message
from email.parser import BytesParser
from email.utils import parsedate_to_datetime

from ragblend.corpus.readers.blocks import TextBlocks, collapse_whitespace
from ragblend.corpus.readers.encodings import decode_text
from ragblend.corpus.readers.html import parse_html
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords, UnreadableRecord
from ragblend.errors import UnreadableDocumentError

MAX_PARTS = 10_000
MAX_DEPTH = 100
MAX_HEADER_CHARS = 10_000  # Python's parsers of headers take quadratic time
_SHOWN_HEADERS = ("Subject", "From", "To", "Cc", "Date")
_MAIL_HEADERS = (*_SHOWN_HEADERS, "Received", "Message-ID", "MIME-Version", "Content-Type", "Return-Path", "Sender")
_UTF8_MARK = b"\xef\xbb\xbf"
# A mail in a mailbox begins after an empty line with "From ", an address and a date (RFC 4155).
_MAILBOX_LINE = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\r\n\r\n))From [^\r\n]*\d\d?:\d\d[^\r\n]*\r?\n")
_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)
_CONTENT_HEADER = re.compile(rb"^content-\w+:[^\n]*(?:\n[ \t][^\n]*)*", re.IGNORECASE | re.MULTILINE)
_MULTIPART = re.compile(rb"^content-type:\s*(?:multipart|message)/", re.IGNORECASE | re.MULTILINE)


def read_mail(data: bytes) -> ParsedRecords:
    """Read one mail as one document. Raises UnreadableDocumentError if `data` is no mail."""
    yield _parse_mail(data, "")


def read_mbox(data: bytes) -> ParsedRecords:
    """Read each mail of a mailbox as a document. Raises UnreadableDocumentError if `data` is no mailbox."""
    starts = list(_MAILBOX_LINE.finditer(data.removeprefix(_UTF8_MARK)))
    if not starts:
        raise UnreadableDocumentError('is no mailbox: no line begins with "From " and a date; call one mail .eml')
    ends = [start.start() for start in starts[1:]] + [len(data)]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        try:
            yield _parse_mail(_QUOTED_FROM.sub(rb"\1", data[start.end() : end]), f"#{number}")
        except UnreadableDocumentError as error:
            yield UnreadableRecord(f"#{number}", f"mail {number + 1} {error}")


def _parse_mail(data: bytes, key: str) -> ParsedRecord:
    if (num_parts := len(_MULTIPART.findall(data))) > MAX_PARTS:
        raise UnreadableDocumentError(
            f"has {num_parts} parts inside each other, more than the {MAX_PARTS} that are read"
        )
    longest = max((len(header[0]) for header in _CONTENT_HEADER.finditer(data)), default=0)
    if longest > MAX_HEADER_CHARS:
        raise UnreadableDocumentError(
            f"has a Content header of {longest} bytes, more than the {MAX_HEADER_CHARS} that are read; save it again"
        )
    try:
        mail = BytesParser(policy=email.policy.compat32).parsebytes(_to_ascii_compatible(data))
    except (RecursionError, MessageError, ValueError, LookupError) as error:
        raise UnreadableDocumentError(f"cannot be parsed as a mail ({type(error).__name__}); save it again") from error
    if not any(name in mail for name in _MAIL_HEADERS):
        raise UnreadableDocumentError(
            "has no header of a mail (From, Subject, Date, ...); rename it to .txt if it is text"
        )
    reader = _PartReader()
    reader.read(mail)
    metadata = {"title": _header(mail, "Subject"), "from": _header(mail, "From"), "to": _header(mail, "To")}
    return reader.blocks.build({**metadata, "date": _date(mail)}, dict.fromkeys(reader.notes), key)


def _to_ascii_compatible(data: bytes) -> bytes:
    """Return `data` as UTF-8 if it is UTF-16 (Outlook), without byte order mark and blank lines before the header."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:64]:
        data = decode_text(data).text.encode("utf-8", "replace")
    return data.removeprefix(_UTF8_MARK).lstrip()


class _PartReader:
    """Collects the text of a mail's parts in their order."""

    def __init__(self) -> None:
        self.blocks = TextBlocks()
        self.notes: list[str] = []
        self._attachments: list[str] = []

    def read(self, mail: Message) -> None:
        """Collect a mail's header lines, texts and forwarded mails, then the names of its attachments."""
        self._add_header(mail, 1)
        parts = [(mail, 1, 1)]
        while parts:
            part, depth, level = parts.pop()  # level: depth of mails inside mails
            if depth > MAX_DEPTH:
                self.notes.append(f"parts deeper than {MAX_DEPTH} are left out")
                continue
            level += part.get_content_type() == "message/rfc822"
            below = self._below(part, level)
            parts += [(one, depth + 1, level) for one in reversed(below)]
            if not below:
                self._add_part(part)
        if self._attachments:
            self.blocks.add("Attachments: " + ", ".join(self._attachments))

    def _below(self, part: Message, level: int) -> list[Message]:
        """Return the parts below `part` to read; of alternatives only one."""
        payload = part.get_payload()
        if not isinstance(payload, list):
            return []
        below = [one for one in payload if isinstance(one, Message)]
        kind = part.get_content_type()
        if kind == "message/rfc822":
            for mail in below:
                self._add_header(mail, level)
        elif kind == "multipart/alternative":
            return _choose_alternative(below)
        return below

    def _add_header(self, mail: Message, level: int) -> None:
        subject = _header(mail, "Subject")
        if subject:
            self.blocks.mark_heading(subject, min(level, 6))
        lines = (f"{name}: {value}" for name in _SHOWN_HEADERS if (value := _header(mail, name)))
        self.blocks.add("\n".join(lines))

    def _add_part(self, part: Message) -> None:
        kind = part.get_content_type()
        name = _file_name(part)
        if name or part.get_content_disposition() == "attachment" or kind not in ("text/plain", "text/html"):
            if name:
                self._attachments.append(name)
            return
        text = self._decode(part)
        if kind == "text/html":
            page = parse_html(text)
            self.blocks.add_text(page.text, page.marks)
        else:
            self.blocks.add(text)

    def _decode(self, part: Message) -> str:
        payload = part.get_payload(decode=True)
        if not isinstance(payload, bytes) or not payload.strip():
            return ""
        declared = str(part.get_content_charset() or "")
        try:
            decoded = decode_text(payload, declared)
        except UnreadableDocumentError as error:
            self.notes.append(f"a part of the mail is left out: it {error}")
            return ""
        self.notes.extend(decoded.notes)
        return decoded.text


def _choose_alternative(parts: list[Message]) -> list[Message]:
    """Return the plain text if it is not empty, else the last text, the richest (RFC 2046, 5.1.4)."""
    for part in parts:
        if part.get_content_type() == "text/plain" and str(part.get_payload()).strip():
            return [part]
    readable = [part for part in parts if part.is_multipart() or part.get_content_type().startswith("text/")]
    return readable[-1:] or parts[-1:]


def _file_name(part: Message) -> str:
    try:
        return collapse_whitespace(part.get_filename() or "")
    except (ValueError, LookupError, TypeError):
        return ""


def _header(mail: Message, name: str) -> str:
    """Return a header's decoded value; "" if the mail lacks it."""
    values = (value for key, value in mail.raw_items() if key.lower() == name.lower())
    raw = str(next(values, "")).encode("ascii", "surrogateescape")
    value = _decode_raw(raw[:MAX_HEADER_CHARS])
    if "=?" in value:
        with suppress(ValueError, LookupError, MessageError):
            value = str(make_header(decode_header(value)))
    return collapse_whitespace(value)


def _decode_raw(header: bytes) -> str:
    """Return a header that was written without encoding: UTF-8 (RFC 6532), else windows-1252."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("cp1252", "replace")


def _date(mail: Message) -> str:
    """Return the date in ISO 8601; unchanged if it cannot be parsed, "" if the mail has none."""
    value = _header(mail, "Date")
    try:
        return parsedate_to_datetime(value).isoformat() if value else ""
    except (ValueError, TypeError, IndexError, OverflowError):
        return value
