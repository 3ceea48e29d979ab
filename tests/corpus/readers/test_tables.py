"""CSV as spreadsheets, banks and databases write it: delimiter, header and every value are found."""

from __future__ import annotations

import csv
import io
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.corpus.readers import tables
from ragblend.corpus.readers.tables import parse_table, read_csv
from ragblend.corpus.readers.types import ParsedRecord
from ragblend.errors import UnreadableDocumentError


def records(text: str | bytes, text_field: str = "") -> list[ParsedRecord]:
    return list(read_csv(text if isinstance(text, bytes) else text.encode(), text_field))


def rows(text: str) -> list[dict[str, str]]:
    """Values by name, without empty ones."""
    table = parse_table(text)
    return [{name: value for name, value in zip(table.names, row, strict=False) if value} for row in table.rows]


DELIMITERS = {
    "comma": ("a,b,c\n1,x,y\n2,x,z\n", ","),
    "semicolon": ("a;b;c\n1;x;y\n", ";"),
    "tab": ("a\tb\n1\tx\n2\ty\n", "\t"),
    "pipe": ("a|b\n1|x\n2|y\n", "|"),
    "a header alone": ("a;b;c\n", ";"),
    "one column": ("country\nChad\nMali\n", ""),
    "one column of sentences": ("note\nSo, it leaks.\nOil it, then wait.\nDone.\n", ""),
    "one column of texts with one comma each": ("text\none, two\nthree, four\nfive, six\n", ""),
    "two decimal commas": ("net;gross\n" + "1,50;2,50\n" * 40, ";"),
    "decimal commas, header without one": ("a;b;c;d\n" + "1,5;2,5;3,5;4,5\n" * 40, ";"),
    "commas of thousands": ("a;b\n" + "1,000,000;2,000,000\n" * 9, ";"),
    "decimal commas in tabs": ("a\tb\n" + "1,5\t2,5\n" * 9, "\t"),
    "commas of names": ("id;name\n1;Meier, Anna\n2;Huber, Jan\n3;Bo, Li\n", ";"),
    "commas in names and values": (
        "Name, Vorname;Ort, PLZ;Betrag, EUR\nMeier, Anna;Ulm, 89073;1.200,50\nHuber, Jan;Bonn, 53111;2.000,00\n",
        ";",
    ),
    "semicolons in quoted values": ('id,body\n1,"a; b; c"\n2,"d; e"\n3,f\n', ","),
    "commas in quoted values": ('a,b\n"1, 2","3, 4"\n"5, 6","7, 8"\n', ","),
    "commas then spaces": ("name, age, city\nAda, 36, London\nAlan, 41, Wilmslow\n", ","),
    "quotes after a space": ('name, city\n"Lovelace, Ada", London\n"Turing, Alan", Wilmslow\n', ","),
    "prose in semicolons": ("id;text of it\n1;So, it leaks, and so on, again.\n2;Nothing, yet.\n3;Fine\n", ";"),
    "times and dates": ("when;what\n2026-01-01 10:00;start\n2026-01-02 11:30;end\n", ";"),
    "links with semicolons": ("id,url\n1,http://x/?a;b\n2,http://x/?c;d\n3,http://x/?e\n", ","),
    "pipes in semicolons": ("id;tags\n1;a|b|c\n2;d|e\n3;f\n", ";"),
    "same number of pipes": ("id;tags;n\n1;a|b;5\n2;d|e;6\n3;f|g;7\n", ";"),
    "empty columns": ("a;b;c;d\n;;;x\n1;;;\n;2;;\n", ";"),
    "rows that end early": ("a,b,c,d,e\n1,2\n1,2,3\n1,2,3,4\n1,2,3\n1,2\n1,2,3,4,5\n", ","),
    "a ragged row": ("a,b\n" + "1,2\n" * 20 + "1,2,3,4\n", ","),
    "quoted names": ('"a";"b";"c"\n"1";"2";"3"\n', ";"),
    "JSON in a column": ('id;json\n1;"{""a"": 1, ""b"": 2}"\n2;"{""a"": 3, ""b"": 4}"\n', ";"),
    "tabs with text of many commas": ("q\ta\nWhat, why, how\tSo, so, so\nWho, when\tHe, then\n", "\t"),
    "years": ("country,2019,2020\nChad,15,16\nMali,19,20\n", ","),
    "a line above": ("Report of May\nid;name;price\n1;bolt;0,20\n2;nut;0,10\n", ";"),
    "German statement": (
        "Konto;DE00 1234\nZeitraum;01.05. - 31.05.\n\nBuchung;Text;Betrag\n" + "02.05.;Miete, Mai;-800,00\n" * 5,
        ";",
    ),
    "bytes of quotes": ('size,name\n"1/2"" pipe",a\n"3/4"" pipe",b\n', ","),
    "Chinese": ("姓名,城市\n李雷,北京\n韩梅梅,上海\n", ","),
    "Windows line ends": ("a;b\r\n1;x\r\n2;y\r\n", ";"),
    "old Macintosh line ends": ("a;b\r1;x\r2;y\r", ";"),
    "two columns, one row": ("key,value\ncolor,red\n", ","),
}


@pytest.mark.parametrize(("text", "delimiter"), DELIMITERS.values(), ids=DELIMITERS)
def test_the_delimiter_is_found(text, delimiter):
    assert parse_table(text).delimiter == delimiter


def test_a_first_line_names_the_delimiter():
    assert rows("\ufeffsep=;\r\nid;name\r\n1;bolt\r\n2;nut, hex\r\n") == [
        {"id": "1", "name": "bolt"},
        {"id": "2", "name": "nut, hex"},
    ]
    assert rows("sep=^\na^b\n1^2,3,4\n") == [{"a": "1", "b": "2,3,4"}]


def test_a_table_row_is_a_paragraph_with_its_column_names():
    (found,) = records("name;age\nAda;36\n;;\nAlan;41\nGrace;\n")
    assert found == ParsedRecord("", "name: Ada; age: 36\n\nname: Alan; age: 41\n\nname: Grace", {})


def test_columns_of_one_name_are_all_kept():
    (found,) = records('Key,Body,Comment,Comment\nP-1,"line one\n\nline two; x",first,second\n')
    assert found.text == "Key: P-1; Body: line one\nline two; x; Comment: first; Comment 2: second"
    assert parse_table("a,a,a 2,a\n1,2,3,4\n").names == ["a", "a 3", "a 2", "a 4"]


def test_lines_above_the_header_are_the_first_paragraph():
    statement = (
        "Account statement;;;\nPeriod;01.01.;31.01.;\n\nDate;Text;Amount;Balance\n"
        "02.01.;Rent, May;-800,00;1.200,50\n03.01.;Pay;2.000,00;3.200,50\n"
    )
    (found,) = records(statement)
    assert found.text.split("\n\n") == [
        "Account statement\nPeriod; 01.01.; 31.01.",
        "Date: 02.01.; Text: Rent, May; Amount: -800,00; Balance: 1.200,50",
        "Date: 03.01.; Text: Pay; Amount: 2.000,00; Balance: 3.200,50",
    ]
    first, second = records(statement, "Text")
    assert (first.key, first.text, second.key, second.text) == ("#0", "Rent, May", "#1", "Pay")
    assert first.metadata == {
        "preamble": "Account statement\nPeriod; 01.01.; 31.01.",
        "Date": "02.01.",
        "Amount": "-800,00",
        "Balance": "1.200,50",
    }


def test_a_blank_line_between_rows_is_no_end_of_a_preamble():
    assert rows("id,name\n1,a\n\n2,b\n") == [{"id": "1", "name": "a"}, {"id": "2", "name": "b"}]


@pytest.mark.parametrize(
    ("text", "names", "num_rows"),
    [
        ("1,Ada,36\n2,Alan,41\n3,Grace,85\n", [], 3),
        ("Ada,36.5\nAlan,41.25\n", [], 2),
        ("country,2019,2020\nChad,15,16\n", ["country", "2019", "2020"], 1),
        ("shift,1,2,3\nday,8,8,0\nnight,0,0,8\n", ["shift", "1", "2", "3"], 2),
        ("id,name,age\n1,Ada,36\n", ["id", "name", "age"], 1),
        ("code,amount\n", [], 1),
        ("Top 10,name\na,b\nc,d\n", ["Top 10", "name"], 2),
    ],
)
def test_a_first_row_of_data_is_no_header(text, names, num_rows):
    table = parse_table(text)
    assert (table.names, len(list(table.rows))) == (names, num_rows)


def test_a_table_without_a_header_loses_no_row():
    (found,) = records("1,Ada,36\n2,Alan,41\n3,Grace,85\n")
    assert found.text == "1; Ada; 36\n\n2; Alan; 41\n\n3; Grace; 85"
    (found,) = records("country\nChad\nMali\n")
    assert found.text == "country\n\nChad\n\nMali"


def test_ragged_rows_are_kept_whole():
    (found,) = records("id,name\n" + "".join(f"{i},n{i}\n" for i in range(50)) + "77,a,b\n1,2,\n8\n")
    paragraphs = found.text.split("\n\n")
    assert len(paragraphs) == 53
    assert paragraphs[50:] == ["id: 77; name: a; b", "id: 1; name: 2", "id: 8"]
    assert found.notes == ("some rows have more values than the header has names; these have no name",)


def test_rows_that_end_early_have_the_names_of_the_header():
    found = rows(
        "version,name,release,end,lts\n1.1,Buzz,1996\n2.0,Hamm,1998,2000\n8,Jessie,2015,2018,2020\n9,Stretch\n"
    )
    assert found[1] == {"version": "2.0", "name": "Hamm", "release": "1998", "end": "2000"}
    assert found[3] == {"version": "9", "name": "Stretch"}


def test_a_column_of_texts_makes_a_document_of_each_row():
    text = 'title,text,year\nT,"one, two",1999\nU,three,2000\n,,\nV\n'
    assert records(text) == [
        ParsedRecord("#0", "one, two", {"title": "T", "year": "1999"}),
        ParsedRecord("#1", "three", {"title": "U", "year": "2000"}),
        ParsedRecord("#2", "", {"title": "V"}),
    ]
    assert [each.text for each in records("text\none, two\nthree, four\n")] == ["one, two", "three, four"]


def test_delimiters_without_quotes_stay_in_the_text():
    first, second = records("id,text,year\n1,one, two, three,1999\n2,four,2000\n")
    assert (first.text, first.metadata) == ("one,two,three", {"id": "1", "year": "1999"})
    assert first.notes == ("some rows have more values than the header has names; they are read as part of the text",)
    assert (second.text, second.notes) == ("four", ())


def test_the_text_field_is_a_column():
    assert [each.text for each in records("id;Body\n1;one\n2;two\n", "body")] == ["one", "two"]
    with pytest.raises(
        UnreadableDocumentError, match=r"no column 'story', but id, Body; name another \(`text_field`\)"
    ):
        records("id;Body\n1;one\n", "story")


def test_threads_read_long_fields_at_once_and_restore_the_field_limit():
    limit, found = csv.field_size_limit(), []
    text = "text,n\n" + f"{'long ' * 40_000},1\n" * 5

    def read() -> None:
        found.extend(records(text))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 30
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(encoding):
    (found,) = records("name;Straße\nZoë;Müllerweg\n".encode(encoding))
    assert found.text == "name: Zoë; Straße: Müllerweg"


def words(text: str) -> list[str]:
    return "".join(char if char.isalnum() else " " for char in text).split()


def all_words(text: str) -> list[str]:
    table = parse_table(text)
    return [word for values in (table.preamble, table.names, *table.rows) for value in values for word in words(value)]


CELL = st.text(st.sampled_from("ab1 ,;\t|\"\n'é"), max_size=12)
TABLES = st.integers(2, 5).flatmap(
    lambda width: st.lists(st.lists(CELL, min_size=width, max_size=width), min_size=1, max_size=12)
)


@given(table=TABLES, delimiter=st.sampled_from(",;\t|"))
def test_no_value_is_lost_that_the_csv_module_wrote(table, delimiter):
    written = io.StringIO()
    csv.writer(written, delimiter=delimiter, lineterminator="\n").writerows(table)
    wanted = Counter(word for row in table for value in row for word in words(value))
    assert Counter("".join(wanted.elements())) <= Counter("".join(all_words(written.getvalue())))


@given(text=st.text(st.sampled_from("ab1 ,;\t|\"\n\r'=ep\x1f\u2028"), max_size=200))
def test_no_letter_of_any_text_is_lost(text):
    assert Counter("".join(words(text))) <= Counter("".join(all_words(text)))


@pytest.mark.parametrize(
    "piece", ['"', ",", ";", "\n", " ", "\t", '""', '"\n', "a,", "1;", '",', "a\n", "a b ", "sep=;\n", "x" * 999 + ","]
)
def test_odd_files_take_no_more_time_than_others(piece):
    started_s = time.process_time()
    records("a,b\n" + piece * (200_000 // len(piece)))
    assert time.process_time() - started_s < 5  # CPU time of this process


def test_the_rows_of_a_long_file_are_parsed_once(monkeypatch):
    lines = "id,name\n" + "".join(f"{number},some name\n" for number in range(60_000))
    num_parsed = 0
    next_rows = tables._next_rows

    def count(reader: object) -> list[list[str]]:
        nonlocal num_parsed
        found = next_rows(reader)
        num_parsed += len(found)
        return found

    monkeypatch.setattr(tables, "_next_rows", count)
    records(lines)
    assert num_parsed < 60_000 + 3 * 10_000  # and the beginning, for the delimiter and the header
