"""PDF files made here, read: text, marks, metadata, notes and errors; limits and hostile files."""

from __future__ import annotations

import re
import threading
import time
import zlib

import pytest
from document_files import only
from hypothesis import given
from hypothesis import strategies as st
from pdf_files import HELVETICA, PICTURE, line, lines, make_pdf, write_objects

from ragblend.corpus.readers.pdf import _clean_title, read_pdf
from ragblend.corpus.readers.pdf_text import compose_accents, is_garbage, join_hyphens, normalize_characters
from ragblend.corpus.readers.types import Mark, ParsedRecord
from ragblend.errors import UnreadableDocumentError

CONTROLS = "".join(f"\\{1 + at % 8:03o}" for at in range(120))  # octal


def read(data: bytes) -> ParsedRecord:
    return only(read_pdf(data))


def error_of(data: bytes) -> str:
    with pytest.raises(UnreadableDocumentError) as caught:
        list(read_pdf(data))
    return str(caught.value)


# -- text


def test_pages_are_blocks_with_a_mark_at_their_first_character():
    record = read(make_pdf(lines("First page", "of two lines"), line("Second")))
    assert record.text == "First page\nof two lines\n\nSecond"
    assert record.marks == (Mark(0, "page", "1"), Mark(record.text.index("Second"), "page", "2"))
    assert (record.key, record.metadata, record.notes) == ("", {"num_pages": 2}, ())


def test_an_empty_page_has_no_mark_and_no_blank_lines():
    record = read(make_pdf(line("First"), "", line("Third")))
    assert record.text == "First\n\nThird"
    assert [mark.value for mark in record.marks] == ["1", "3"]
    assert not record.notes


def test_kerning_is_space_where_it_is_wide_and_ligatures_are_letters():
    text = read(make_pdf("BT /F1 12 Tf 20 350 Td [(The) -400 (pump) -400 (le) 20 (aks)] TJ ET")).text
    assert text == "The pump leaks"
    assert read(make_pdf(line("the \\256rst \\257oor"))).text == "the first floor"  # octal: fi and fl in Helvetica


def font(names: str, kind: str = "Type1", more: str = "") -> str:
    """A font of the kind whose codes from 1 on have these glyph names."""
    return f"<</Type/Font/Subtype/{kind}/BaseFont/Foo/Encoding<</Type/Encoding/Differences[1 {names}]>>{more}>>"


TYPE3 = f"/FontBBox[0 0 9 9]/FontMatrix[.1 0 0 .1 0 0]/CharProcs<<>>/FirstChar 1/LastChar 120/Widths[{'6 ' * 120}]"
LIGATURES = "The Federal O\\003ce \\001rst o\\002er"


@pytest.mark.parametrize(
    ("names", "kind", "more"),
    [
        ("/fi/ff/ffi", "Type1", ""),  # PDFium knows them
        ("/f_i/f_f/f_f_i", "Type1", ""),
        ("/f_i.liga/ff.alt/uni006600660069", "TrueType", ""),
        ("/fi/ff/ffi 32/space 84/T", "Type3", TYPE3),  # PDFium reads no names of type 3
    ],
)
def test_names_of_glyphs_are_letters(names, kind, more):
    record = read(make_pdf(line(LIGATURES), font=font(names, kind, more)))
    assert (record.text, record.notes) == ("The Federal Office first offer", ())


def test_names_of_glyphs_leave_the_rest_of_the_file_as_it_is():
    others = {"annotations": [TENANT % ""], "bookmarks": [("The Federal Office", 1)], "title": "Guide"}
    named, plain = (make_pdf(line("x"), line(text), font=font("/f_i/f_f/f_f_i"), **others) for text in (LIGATURES, "y"))
    assert read(named)._replace(text="")[2:] == read(plain)._replace(text="")[2:]


@pytest.mark.parametrize(
    ("names", "text", "num"),
    [
        ("/g1/g2/g3", "The Federal O\ufffdce \ufffdrst o\ufffder", 3),  # control codes, two of which PDFium drops
        ("/uniE001/uniE002/uniE003", "The Federal O\ufffdce \ufffdrst o\ufffder", 3),  # private use
        ("/fi/ff/uniFFFD", "The Federal O\ufffdce first offer", 1),
        ("/fi/ff/g3", "The Federal O\ufffdce first offer", 1),
    ],
)
def test_glyphs_that_no_name_explains_are_noted(names, text, num):
    page = lines(LIGATURES, *["to all who have read this page"] * 3)
    record = read(make_pdf(line("Readable"), page, font=font(names)))
    assert text in record.text
    characters = "1 character" if num == 1 else f"{num} characters"
    assert record.notes[0].startswith(f"page 2 has {characters} that the fonts do not name (read as \ufffd); if words")


def test_a_line_end_hyphen_differs_from_a_glyph_without_a_letter():
    record = read(make_pdf(lines("hyphen-", "ated O\\003ce"), font=font("/g1/g2/g3")))
    assert record.text == "hyphenated O\ufffdce"


def rising(*parts: tuple[str, int]) -> str:
    """Return the operators that print texts beside each other, (text, points above the line); shifted ones smaller."""
    return " ".join(f"/F1 {7 if rise else 12} Tf {rise} Ts ({text}) Tj" for text, rise in parts)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((("6.022 x 10", 0), ("23", 5), (" mol", 0), ("-1", 5)), "6.022 x 10^23 mol^-1"),
        ((("H", 0), ("2", -2), ("O and log", 0), ("10", -2), ("2", 0)), "H_2O and log_(10)2"),
        ((("It is due.", 0), ("1", 5)), "It is due.[1]"),
        ((("1", 5), ("Paid monthly", 0)), "[1] Paid monthly"),
        ((("Use 3", 0), ("1", 4), ("/", 0), ("2", -2)), "Use 3 1/2"),
        ((("In 2024, 12.5 and A4", 0),), "In 2024, 12.5 and A4"),
        ((("1", 0), ("st", 3), (" of May", 0)), "1st of May"),  # only digits change a number
    ],
)
def test_raised_and_lowered_digits_do_not_join_a_number(parts, text):
    assert read(make_pdf(f"BT 20 350 Td {rising(*parts)} ET")).text == text


def test_a_superscript_on_a_separate_line_returns_to_its_text():
    content = f"BT 1 0 0 1 20 350 Tm {rising(('Value 10', 0))} 1 0 0 1 66.7 357 Tm /F1 7 Tf (23) Tj ET"
    assert read(make_pdf(content)).text == "Value 10^23"


def test_words_that_a_line_end_divides_are_joined():
    assert read(make_pdf(lines("hyphen-", "ated word"))).text == "hyphenated word"
    assert read(make_pdf(lines("the post-office", "and a post-", "office at the Anglo-", "Saxon"))).text == (
        "the post-office\nand a post-office at the Anglo-\nSaxon"
    )


def test_text_off_the_page_is_left_out():
    hidden = " ".join(line(f"Printer mark {at}", 900, 300) for at in range(9))
    assert read(make_pdf(f"{line('Seen')} {hidden}")).text == "Seen"


def test_characters_beyond_16_bits_are_kept():
    table = b"""/CIDInit /ProcSet findresource begin 12 dict begin begincmap
/CMapName /X def /CMapType 2 def 1 begincodespacerange <00> <FF> endcodespacerange
2 beginbfchar <41> <D835DC65> <42> <0042> endbfchar endcmap end end"""
    content = line("AB").encode()
    objects = {
        1: b"<</Type/Catalog/Pages 2 0 R>>",
        2: b"<</Type/Pages/Count 1/Kids[4 0 R]>>",
        3: b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/ToUnicode 6 0 R>>",
        4: b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 400]/Resources<</Font<</F1 3 0 R>>>>/Contents 5 0 R>>",
        5: b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
        6: b"<</Length %d>>stream\n%s\nendstream" % (len(table), table),
    }
    assert read(write_objects(objects)).text == "\U0001d465B"


# -- form fields and notes

TENANT = "<</Type/Annot/Subtype/Widget/FT/Tx/T(tenant)/V(Alice)/DA(/F1 12 Tf)/Rect[100 340 200 360]%s>>"
EMPTY = "<</Type/Annot/Subtype/Widget/FT/Tx/T(landlord)/V()/DA(/F1 12 Tf)/Rect[100 300 200 320]>>"
NOTE = "<</Type/Annot/Subtype/%s/Contents(%s)/DA(/F1 12 Tf)/Rect[20 200 200 220]%s>>"
BOX = "<</Type/Annot/Subtype/Widget/FT/Btn/T(b)/TU(Smoker)/V/On/AS/%s/AP<</N<</On null/Off null>>>>/Rect[20 9 30 19]>>"


def test_form_values_have_their_names_and_notes_are_a_block():
    notes = [NOTE % ("FreeText", "Checked in May", ""), NOTE % ("Text", "Ask Bob", ""), NOTE % ("Link", "no", "")]
    record = read(make_pdf(line("Lease"), line("End"), annotations=[TENANT % "", *notes]))
    assert record.text == "Lease\n\ntenant: Alice\n\nChecked in May\nAsk Bob\n\nEnd"
    assert read(make_pdf(line("x"), annotations=[TENANT % "/TU(Name of tenant)"])).text == "x\n\nName of tenant: Alice"


def test_notes_that_quote_the_page_and_hidden_text_are_omitted():
    hidden = [TENANT % "/F 2", NOTE % ("FreeText", "Internal", "/F 2"), EMPTY]
    assert read(make_pdf(line("Lease"), annotations=hidden)).text == "Lease"
    assert read(make_pdf(line("Alice signs"), annotations=[TENANT % ""])).text == "Alice signs\n\ntenant: Alice"
    assert read(make_pdf(line("Lease note"), annotations=[NOTE % ("Highlight", "note", "")])).text == "Lease note"


@pytest.mark.parametrize(("state", "text"), [("On", "Form\n\nSmoker: yes"), ("Off", "Form")])
def test_a_box_that_is_ticked_is_text(state, text):
    assert read(make_pdf(line("Form"), annotations=[BOX % state])).text == text


def test_an_unreadable_form_is_a_note_and_no_log_warning(caplog):
    record = read(make_pdf(line("Please wait"), catalog="/NeedsRendering true/AcroForm<</Fields[]/XFA()>>"))
    assert record.text == "Please wait"
    assert record.notes[0].startswith("its form is of Adobe's type XFA")
    assert not caplog.records


# -- marks and metadata


def test_bookmarks_are_headings_at_the_line_with_their_words():
    pages = lines("Header", "1.2 Care of", "the pump", "Clean it.", "Repair", "Do not."), line("Other words")
    bookmarks = [("Care of the Pump", 0), ("Not printed", 0), ("Repair", 0), ("The end", 1)]
    record = read(make_pdf(*pages, bookmarks=bookmarks))
    at = record.text.index
    assert [mark for mark in record.marks if mark.kind == "heading"] == [
        Mark(at("1.2"), "heading", "Care of the Pump", 1),
        Mark(at("1.2"), "heading", "Not printed", 1),
        Mark(at("Repair"), "heading", "Repair", 1),
        Mark(at("Other"), "heading", "The end", 1),
    ]


def test_a_bookmark_may_lack_accents_and_its_line_a_number():
    font = HELVETICA.replace(">>", "/Encoding/WinAnsiEncoding>>")
    record = read(make_pdf(lines("Words", "Chapter 2 Caf\xe9"), bookmarks=[("Cafe", 0)], font=font))
    assert record.marks[1] == Mark(record.text.index("Chapter"), "heading", "Cafe", 1)


def test_a_bookmark_of_a_page_without_text_is_at_the_next_page():
    record = read(make_pdf("", line("Words"), bookmarks=[("Cover", 0), ("Words", 1)]))
    assert record.marks == (Mark(0, "page", "2"), Mark(0, "heading", "Cover", 1), Mark(0, "heading", "Words", 1))


def test_bookmarks_in_a_circle_and_in_a_deep_chain_end():
    data = make_pdf(line("One"), bookmarks=[("A", 0), ("B", 0)])
    circle = re.sub(rb"(\d+)( 0 R/Dest\[\d+ 0 R/Fit\])>>", rb"\1\2/Next \1 0 R/First \1 0 R>>", data)
    assert {mark.value for mark in read(circle).marks if mark.kind == "heading"} >= {"A"}
    chain = [f"<</Title(Level {at})/Dest[5 0 R/Fit]/First {at + 1} 0 R>>" for at in range(7, 3007)]
    objects = dict.fromkeys(range(1, 3008), b"<<>>")
    objects[1] = b"<</Type/Catalog/Pages 2 0 R/Outlines<</First 7 0 R>>>>"
    objects[2] = b"<</Type/Pages/Count 1/Kids[5 0 R]>>"
    objects[3] = HELVETICA.encode()
    content = line("Deep").encode()
    objects[4] = b"<</Length %d>>stream\n%s\nendstream" % (len(content), content)
    objects[5] = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 400]/Resources<</Font<</F1 3 0 R>>>>/Contents 4 0 R>>"
    objects |= {number: text.encode() for number, text in enumerate(chain, 7)}
    marks = read(write_objects(objects)).marks[1:]
    assert len(marks) == 3000
    assert max(mark.level for mark in marks) == 6


def test_page_labels_are_named_where_there_are_some():
    labels = "/PageLabels<</Nums[0<</S/r>>2<</S/D/St 1>>]>>"
    record = read(make_pdf(line("Preface"), line("Contents"), line("One"), catalog=labels))
    assert [mark.value for mark in record.marks] == ["i", "ii", "1"]


@pytest.mark.parametrize(
    ("title", "cleaned"),
    [
        ("Guide to pumps", "Guide to pumps"),
        ("Microsoft Word - Annual report", "Annual report"),
        *(
            (name, "")
            for name in ("Microsoft Word - x.doc", "untitled", "Untitled-1", "report_v2.pdf", "Document1", "")
        ),
        ("C:\\\\Users\\\\Bob\\\\lease.docx", ""),
        ("Version 1.2", "Version 1.2"),
        (" two \n lines\0", "two lines"),
    ],
)
def test_a_title_is_no_name_of_a_file(title, cleaned):
    assert _clean_title(title) == cleaned


def test_the_title_is_in_the_metadata():
    assert read(make_pdf(line("x"), title="Guide")).metadata == {"num_pages": 1, "title": "Guide"}
    assert "title" not in read(make_pdf(line("x"), title="untitled")).metadata


# -- pages that cannot be read


def test_garbage_and_pictures_are_named_and_the_other_pages_are_read():
    record = read(make_pdf(line("Readable"), line(CONTROLS), PICTURE, PICTURE, line("Last")))
    assert record.text == "Readable\n\nLast"
    assert record.metadata == {"num_pages": 5, "num_pages_unread": 3}
    garbled, pictures = record.notes
    assert re.match(r"page 2 has garbled text; run OCR on the file, for example: ocrmypdf .* FILE NEW$", garbled)
    assert re.match(r"pages 3-4 have a picture and no text; run OCR .*ocrmypdf .* FILE NEW$", pictures)


def test_a_file_of_such_pages_alone_fails_with_their_reasons():
    assert error_of(make_pdf(PICTURE, PICTURE)).startswith(
        "holds no text: pages 1-2 have a picture and no text; run OCR"
    )
    assert error_of(make_pdf(line(CONTROLS))).startswith("holds no text: page 1 has garbled text; run OCR")
    assert error_of(make_pdf("", "")).startswith("holds no text; if a viewer shows some, run OCR")


def test_a_page_of_symbols_alone_is_garbled():
    record = read(make_pdf(line("Words"), line("\\001 \\002 \\003 \\004")))
    assert record.notes[0].startswith("page 2 has garbled text")


def test_outlines_of_letters_are_a_picture_and_a_frame_is_none():
    outlines = "".join(f"{at} 100 m {at} 200 l S " for at in range(100))
    assert "picture" in error_of(make_pdf(outlines))
    assert not read(make_pdf(line("x"), "10 10 280 380 re S")).notes


def test_a_damaged_page_is_named():
    data = make_pdf(line("First"), line("Second"))
    kids = re.search(rb"/Kids\[(\d+ 0 R) (\d+ 0 R)", data)
    record = read(data.replace(kids[0], kids[0].replace(kids[2], b"1" * (len(kids[2]) - 4) + b" 0 R")))
    assert record.text == "First"
    assert record.notes == ("page 2 has contents that cannot be read; repair the file, for example: qpdf FILE NEW",)


@pytest.mark.parametrize(
    ("text", "garbage"),
    [
        ("/g145/g144/g3/g17 /g22(cid:12)(cid:13)", True),
        ("\ue001\ue002\ue003 private letters", True),
        ("\ufffd\ufffd\ufffd\ufffd lost letters", True),
        ("A formula \x12 a + b \x13 and \x10 c \x11", False),  # brackets of a font without a table
        ("\uf8eb a \uf8f6 \uf8ec b \uf8f7 \uf8ed c \uf8f8", False),
        ("\uf0b7 one\n\uf0b7 two\n\uf0b7 three", False),  # bullets of Word
        ("The glyph /g145 is drawn by this font in place of a letter", False),
        ("", False),
    ],
)
def test_garbage_is_distinguished_from_symbols(text, garbage):
    assert is_garbage(normalize_characters(text)) is garbage


# -- errors


def test_a_password_is_distinguished_from_damage():
    assert "needs a password; save it without one" in error_of(make_pdf(line("Secret"), password="sesame"))
    assert "is a damaged PDF" in error_of(make_pdf()), "the error of the file before it is not its own"
    assert read(make_pdf(line("Bought book"), password="")).text == "Bought book"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"%PDF-1.7 and nothing", r"is a damaged PDF \(it ends after 20 bytes.* repair it, for example: qpdf"),
        (make_pdf(line("x"))[:-200], r"is a damaged PDF \(it ends after .* bytes without %%EOF.* download it again"),
        (b"%PDF-1.7 and nothing %%EOF", r"is a damaged PDF \(PDFium finds no pages.* repair it"),
        (make_pdf(), "is a damaged PDF"),
        (b"<!DOCTYPE html><p>Log in</p>", "is no PDF: it begins with b'<!DOCTYPE html>.* download it again"),
    ],
)
def test_damage_is_named(data, reason):
    assert re.match(reason, error_of(data))


@given(data=st.data())
def test_any_damage_gives_a_text_or_a_named_error(data):
    whole = make_pdf(lines("First page", "of two lines"), line("Second"), bookmarks=[("First page", 0)], title="Guide")
    broken = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=20)):
        broken[at] = data.draw(st.integers(0, 255))
    try:
        record = read(bytes(broken[: data.draw(st.integers(0, len(broken)))]))
    except UnreadableDocumentError:
        return
    assert all(0 <= mark.offset < len(record.text) for mark in record.marks)
    assert "\r" not in record.text


# -- limits


def bomb(content: bytes, filters: str) -> bytes:
    return write_objects(
        {
            1: b"<</Type/Catalog/Pages 2 0 R>>",
            2: b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
            3: b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 400]/Contents 4 0 R>>",
            4: b"<</Filter[%s]/Length %d>>stream\n%s\nendstream" % (filters.encode(), len(content), content),
        }
    )


def test_a_bomb_is_no_memory():
    operators = zlib.compress(b"(word) Tj 0 -1 Td " * 2_000_000, 9)
    assert "compressed pages hold more than" in error_of(bomb(operators, "/FlateDecode"))
    assert "compressed pages hold more than" in error_of(bomb(zlib.compress(operators, 9), "/FlateDecode/FlateDecode"))


def test_a_false_number_of_pages_is_no_loop():
    data = make_pdf(line("Hello")).replace(b"/Count 1", b"/Count 999999999")
    start_s = time.perf_counter()
    assert read(data).text == "Hello"
    assert time.perf_counter() - start_s < 10


@pytest.mark.slow
def test_time_is_linear_in_pages_and_in_characters():
    def seconds(data: bytes) -> float:
        start_s = time.process_time()
        list(read_pdf(data))
        return time.process_time() - start_s

    def pages(num: int) -> bytes:
        return make_pdf(*(line(f"Page {at}") for at in range(num)), bookmarks=[(f"Page {at}", at) for at in range(num)])

    def characters(num: int) -> bytes:
        return make_pdf(
            "".join(f"BT /F1 1 Tf {at * 7 % 290} {at * 3 % 390} Td (a-word of) Tj ET " for at in range(num))
        )

    assert seconds(pages(8000)) < 8 * seconds(pages(2000))
    assert seconds(characters(80_000)) < 8 * seconds(characters(20_000))


def test_threads_read_at_once():
    data, found = make_pdf(*(line(f"Page {at}") for at in range(30))), list[str]()
    threads = [threading.Thread(target=lambda: found.append(read(data).text)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [read(data).text] * 6


# -- cleaning


def test_a_hyphen_stays_before_a_conjunction_and_before_a_capital():
    assert join_hyphens(["Ein-\nund Ausgabe", "A-\nB"]) == ["Ein- und Ausgabe", "A-\nB"]
    assert join_hyphens(["soft\xadly and Soft\xad\nly"]) == ["softly and Softly"]
    assert join_hyphens(["1990-\n1995"]) == ["1990-\n1995"]


def test_accents_of_old_fonts_join_their_letters_and_quotation_marks_stay():
    assert compose_accents(["Tank¨onyv, Alap´ıtv´any, fejleszt˝o, Fran¸cais, tr`es"]) == [
        "Tankönyv, Alapítvány, fejlesztő, Français, très"
    ]
    for text in ("l´autre été, élève", "it´s", "echo `ls` and ``word''", "y ˜ x, 2ˆn, xˆa"):
        assert compose_accents([text]) == [text]


@given(st.lists(st.text(alphabet="ab-\xad\n¨´ .Aé", max_size=40), max_size=4))
def test_cleaning_loses_no_letter(pages):
    def letters(text: str) -> str:
        return "".join(filter(str.isascii, filter(str.isalpha, text)))

    for before, after in zip(pages, join_hyphens(pages), strict=True):
        assert letters(before) == letters(after)
        assert "\xad" not in after


@pytest.mark.parametrize("text", ["a" * 300_000, "- " * 200_000, "a-\n" * 100_000, "`a" * 200_000, "\xad\n" * 100_000])
def test_cleaning_is_linear(text):
    start_s = time.process_time()
    is_garbage(normalize_characters(text))
    join_hyphens(compose_accents([text]))
    assert time.process_time() - start_s < 5
