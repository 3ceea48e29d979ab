"""HTML and XHTML: the text that a reader of the page sees, without menus."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache

from ragblend.corpus.pages import read_page
from ragblend.corpus.readers.encodings import decode_text
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords

logger = logging.getLogger(__name__)

_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)


_MAX_EXTRACTED_CHARS = 2 << 20  # trafilatura takes 3 to 20 s per megabyte, and larger pages are data, not articles


def read_html(data: bytes) -> ParsedRecords:
    """Read one page as one document."""
    found = None if data.startswith(b"\xef\xbb\xbf") else _CHARSET.search(data[:4096])
    page = decode_text(data, found[1].decode() if found else "").text
    parsed = read_page(page)
    extract = _trafilatura_extract() if len(page) <= _MAX_EXTRACTED_CHARS else None
    text = extract(page, include_comments=False) if extract else None
    yield ParsedRecord("", text or parsed.text, {"title": parsed.title} if parsed.title else {})


@cache
def _trafilatura_extract() -> Callable[..., str | None] | None:
    """The extra `html`, which drops menus and footers that our own parser keeps; None when it is not installed."""
    try:
        from trafilatura import extract
    except ImportError as error:
        if error.name != "trafilatura":  # installed, but for example its lxml came without lxml_html_clean
            logger.warning("trafilatura does not import (%s); pages are read by the simpler parser", error)
        return None
    return extract  # type: ignore[no-any-return]
