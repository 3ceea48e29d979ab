"""Encodings: what is declared, marked or detected gives the text; what is no text is refused."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragblend.corpus.readers.charsets import find_codec, rank_charsets
from ragblend.corpus.readers.encodings import decode_text, is_binary
from ragblend.errors import UnreadableDocumentError

GERMAN = "Die Käse sind gültig für fünf Tage – prüfen Sie „Größe“ und Maß."
FRENCH = "Le café est fermé à l’été, où l’on dîne à la française. Déjà vu, c’est ça."
SPANISH = "El niño comió mañana en España. ¿Qué año? ¡Sí! El teléfono está aquí."
POLISH = "Zażółć gęślą jaźń. Łódź leży w środkowej Polsce. Święta są później."
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. Smlouva končí v květnu."
HUNGARIAN = "Árvíztűrő tükörfúrógép. A szerződés májusban jár le."
SWEDISH = "Räksmörgås på Åland. Hyran ska betalas varje månad."
TURKISH = "Sözleşme Mayıs ayında sona eriyor. Kira her ay ödenir. Işık ığdır şöyle."
RUSSIAN = "Договор заканчивается в мае. Арендная плата вносится ежемесячно."
GREEK = "Η σύμβαση λήγει τον Μάιο. Το ενοίκιο καταβάλλεται μηνιαίως."
HEBREW = "החוזה מסתיים במאי. שכר הדירה משולם מדי חודש."
ARABIC = "ينتهي العقد في مايو. يدفع الإيجار شهريا."
THAI = "สัญญาจะสิ้นสุดในเดือนพฤษภาคม ค่าเช่าจ่ายทุกเดือน"
JAPANESE = "契約は五月に終わる。家賃は毎月末日までに支払うこと。"
CHINESE = "合同于五月到期。租金必须在每月最后一天之前支付。"
TAIWANESE = "合約於五月到期。租金必須在每月最後一天之前支付。"
KOREAN = "계약은 5월에 종료됩니다. 임대료는 매월 말일까지 지불해야 합니다."
LEGACY = [
    *((GERMAN, "cp1252"), (GERMAN.replace("–", "-").replace("„", "").replace("“", ""), "iso-8859-15")),
    *((FRENCH, "cp1252"), (SPANISH, "latin-1"), (SWEDISH, "cp1252"), (HUNGARIAN, "cp1250"), (TURKISH, "cp1254")),
    *((POLISH, "cp1250"), (POLISH, "iso-8859-2"), (CZECH, "cp1250"), (CZECH, "iso-8859-2")),
    *((RUSSIAN, "cp1251"), (RUSSIAN, "koi8-r"), (RUSSIAN, "cp866"), (RUSSIAN, "iso-8859-5")),
    *((GREEK, "cp1253"), (GREEK, "iso-8859-7"), (HEBREW, "cp1255"), (ARABIC, "cp1256"), (ARABIC, "iso-8859-6")),
    *((THAI, "cp874"), (JAPANESE, "cp932"), (JAPANESE, "euc-jp"), (JAPANESE, "iso-2022-jp")),
    *((CHINESE, "gbk"), (CHINESE, "gb18030"), (TAIWANESE, "big5"), (KOREAN, "cp949"), (KOREAN, "euc-kr")),
    *(("Müller;Straße 5", "cp1252"), ("It’s naïve", "cp1252"), ("30 °C", "cp1252"), ("© 2020 Foo", "cp1252")),
    *(("Größe und Käse, schöne Tür", "mac_roman"), ("Grüße für Käse", "cp850"), ("商品名,価格\nボルト,100\n", "cp932")),
]


@pytest.mark.parametrize(("text", "encoding"), LEGACY, ids=lambda value: value[:12])
def test_undeclared_legacy_encodings_are_detected_and_named_as_guesses(text, encoding):
    decoded = decode_text(text.encode(encoding))
    assert decoded.text == text
    if encoding != "iso-2022-jp":  # its escape sequences are proof, not a guess
        assert "(guessed); convert the file to UTF-8" in decoded.notes[0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_is_read_without_a_note(encoding):
    assert decode_text(f"{GERMAN}\n{JAPANESE}".encode(encoding)) == (f"{GERMAN}\n{JAPANESE}", ())


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", ["Rent is due monthly.\n", f"{GERMAN}\n" * 20, f"key: {RUSSIAN}\r\n"])
def test_utf16_without_a_mark_is_read(encoding, text):
    decoded = decode_text(text.encode(encoding))
    assert decoded.text == text
    assert encoding in decoded.notes[0]
    assert not is_binary(text.encode(encoding)[:64])


@pytest.mark.parametrize(
    ("label", "encoding", "text"),
    [
        ("gb2312", "gb18030", "朱镕基，㐀"),  # not in GB2312; browsers read all three as GB18030
        ("ISO-8859-1", "cp1252", "“quoted” – 5 €"),
        ("latin1", "cp1252", "“quoted”"),
        ("ISO-8859-9", "cp1254", "“şöyle”"),
        ("shift_jis", "cp932", "①髙"),
        ("ks_c_5601-1987", "cp949", "똠방각하"),
        ("windows-1251", "cp1251", RUSSIAN),
        ("x-sjis", "cp932", JAPANESE),
        ("utf-16", "utf-8", GERMAN),  # the declaration itself is read as ASCII, so the page is not UTF-16
        ("iso-8859-1", "utf-8", GERMAN),
        ("no-such-charset", "utf-8", GERMAN),
        ("hex", "utf-8", "abcd"),
    ],
)
def test_a_declared_label_means_what_browsers_take_it_for(label, encoding, text):
    assert decode_text(text.encode(encoding), label) == (text, ())


def test_a_declaration_that_does_not_fit_is_ignored():
    assert decode_text(GERMAN.encode("utf-8-sig"), "koi8-r") == (GERMAN, ())
    assert decode_text(GERMAN.encode("utf-16"), "koi8-r") == (GERMAN, ())
    assert decode_text(GERMAN.encode(), "shift_jis").text == GERMAN
    assert decode_text(GERMAN.encode("cp1252"), "utf-8").text == GERMAN


def test_a_few_broken_bytes_do_not_turn_utf8_into_another_encoding():
    decoded = decode_text(f"{GERMAN} {RUSSIAN}".encode() + b"\xe4 end")
    assert decoded == (f"{GERMAN} {RUSSIAN}\ufffd end", ("1 place is not UTF-8 and read as \ufffd",))
    declared = decode_text(JAPANESE.encode("cp932") + b"\x85", "shift_jis")
    assert declared.text.startswith(JAPANESE)
    assert "shift-jis" in declared.notes[0]


def test_a_file_cut_inside_a_character_is_read_up_to_it():
    decoded = decode_text(GERMAN.encode("utf-16")[:-1])
    assert decoded == (GERMAN[:-1] + "\ufffd", ("1 place is not utf-16 and read as \ufffd",))
    with pytest.raises(UnreadableDocumentError, match=r"byte order mark of utf-16 and is no such text.*iconv"):
        decode_text(b"\xff\xfe" + random.Random(1).randbytes(999))


def test_an_accent_after_much_ascii_is_found():
    text = "plain words\n" * 40_000 + RUSSIAN
    assert decode_text(text.encode("koi8-r")).text == text
    assert rank_charsets(("x" * 100_000 + FRENCH).encode("cp1252"))[0] == "cp1252"


@given(data=st.binary(min_size=64, max_size=600), seed=st.integers(0, 2**32))
@example(data=b"\xff" * 64, seed=3)
def test_random_bytes_are_never_text(data, seed):
    for noise in (random.Random(seed).randbytes(4000), random.Random(seed).randbytes(4000).replace(b"\0", b"\1")):
        with pytest.raises(UnreadableDocumentError):
            decode_text(noise)
    try:
        text = decode_text(data).text
    except UnreadableDocumentError:
        return
    num_controls = sum(char < " " and char not in "\t\n\r\f\x0b\x1b" for char in text)
    assert num_controls <= 0.05 * len(text)


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        b"\x7fELF\x02\x01\x01\0" + bytes(range(256)) * 4,
        b"".join(value.to_bytes(2, "little") for value in range(1, 200)),  # small numbers of two bytes
        bytes(range(1, 32)) * 3,
        b"text and then \xff\xfe\xfd\x01\x02\x03\x04" * 9,
        b"\0",
        b"GIF89a\0",
    ],
)
def test_binary_data_is_refused(data):
    with pytest.raises(UnreadableDocumentError):
        decode_text(data)


def test_the_first_bytes_of_a_binary_file_are_distinguished_from_utf16():
    assert is_binary(b"GIF89a\0")
    assert is_binary(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    assert not is_binary("Größe".encode("utf-16-be"))
    assert not is_binary(b"plain")


@given(label=st.text(max_size=20) | st.sampled_from(["rot13", "zip", "unicode_escape", "idna", "undefined", "utf-7"]))
def test_no_label_names_a_codec_that_is_not_a_charset(label):
    codec = find_codec(label)
    assert codec == "" or b"plain & ascii \\n".decode(codec) == "plain & ascii \\n"
