"""PDF: the text of its pages."""

from __future__ import annotations

import io
import unicodedata

from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords
from ragblend.errors import UnreadableDocumentError

# Typesetting, not spelling: nobody who asks about an office writes one, and tokenizers cut words at them.
_LIGATURES = {ord(ligature): unicodedata.normalize("NFKC", ligature) for ligature in "ﬀﬁﬂﬃﬄﬅﬆ"}


def read_pdf(data: bytes) -> ParsedRecords:
    """Read all pages as one document."""
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, FileNotDecryptedError
    except ImportError as error:
        raise UnreadableDocumentError("PDF needs pypdf: pip install 'ragblend[pdf]'") from error
    try:
        pages = [page.extract_text().translate(_LIGATURES) for page in PdfReader(io.BytesIO(data)).pages]
    except FileNotDecryptedError as error:
        raise UnreadableDocumentError(
            "is a PDF that needs a password; save it without one, for example: qpdf --decrypt --password=... FILE NEW"
        ) from error
    except DependencyError as error:  # an encrypted file that opens without a password
        raise UnreadableDocumentError(
            f"is an encrypted PDF, and {error}; install it, or save the file without encryption"
        ) from error
    except Exception as error:  # pypdf raises errors of many types for a damaged file
        raise UnreadableDocumentError(
            f"is a damaged PDF ({error or type(error).__name__}); repair it, for example: qpdf FILE NEW"
        ) from error
    yield ParsedRecord("", "\n\n".join(pages), {"num_pages": len(pages)})
