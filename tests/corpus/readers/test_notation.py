"""Raised and lowered text, footnote marks and equations on one line, the same in every format."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from time import process_time

import pytest
from document_files import only
from hypothesis import given
from hypothesis import strategies as st
from office_files import make_docx, make_epub, make_odf, make_pptx, make_xlsx
from pdf_files import make_pdf

from ragblend.corpus.documents import read_documents
from ragblend.corpus.readers.html import parse_html
from ragblend.corpus.readers.notation.equations import read_equation
from ragblend.corpus.readers.notation.scripts import END, LOWERED, RAISED, write_scripts
from ragblend.corpus.readers.opendocument import read_odt
from ragblend.corpus.readers.types import ParsedRecord
from ragblend.corpus.readers.word import read_docx
from ragblend.corpus.readers.xml_text import strip_markup

# --- raised and lowered text ---


def write(markup: str) -> str:
    return write_scripts(
        markup.replace("<sup>", RAISED).replace("<sub>", LOWERED).replace("</sup>", END).replace("</sub>", END)
    )


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("6.022 x 10<sup>23</sup> mol<sup>-1</sup>", "6.022 x 10^23 mol^-1"),
        ("5<sup>2</sup>, x<sup>2</sup>y, m<sup>2</sup>.", "5^2, x^2y, m^2."),
        ("10<sup>2</sup><sup>3</sup> and x<sup> 2 </sup>y", "10^23 and x^2 y"),  # programs divide words
        ("e<sup>x+1</sup> e<sup>-x</sup> e<sup>(x + 1)</sup> 2<sup>0.5</sup>", "e^(x+1) e^-x e^(x + 1) 2^0.5"),
        ("H<sub>2</sub>O, SO<sub>4</sub><sup>2-</sup>, Na<sup>+</sup>", "H_2O, SO_4^2-, Na^+"),
        ("log<sub>10</sub>2, a<sub>i</sub>b, 10<sup>2</sup>.5", "log_(10)2, a_(i)b, 10^(2).5"),  # nothing grows
        ("x<sub>i,j</sub><sup>T</sup> and x<sup>a<sup>b</sup></sup>", "x_(i,j)^T and x^(a^b)"),
        ("(a+b)<sup>2</sup>, sin<sup>2</sup>x, T<sub>surface</sub><sup>4</sup>", "(a+b)^2, sin^2x, T_surface^4"),
        ("the <sup>14</sup>C and <sup>14</sup><sub>6</sub>C method", "the ^14C and ^14_6C method"),
        ("3<sup>1</sup>/<sub>2</sub> or <sup>3</sup>\u2044<sub>4</sub> cups", "3 1/2 or 3/4 cups"),
        # footnote marks
        (
            "due.<sup>1</sup> monthly<sup>2</sup> (Smith)<sup>3</sup> law<sup>4</sup>",
            "due.[1] monthly[2] (Smith)[3] law[4]",
        ),
        (
            "Smith<sup>a,b</sup> Lee<sup>1,*</sup> text<sup>[5]</sup> 2019<sup>[6]</sup>",
            "Smith[a,b] Lee[1,*] text[5] 2019[6]",
        ),
        ("<sup>1</sup>Paid monthly", "[1] Paid monthly"),
        ("条件<sup>1</sup>は", "条件[1]は"),
        # text that is read as if it were on the line
        ("1<sup>st</sup> 2<sup>nd</sup> n<sup>th</sup> XIX<sup>e</sup> 1<sup>er</sup>", "1st 2nd nth XIXe 1er"),
        ("M<sup>me</sup> Curie, D<sup>r</sup> Roux, N<sup>o</sup> 5", "Mme Curie, Dr Roux, Nº 5"),
        ("Foo<sup>TM</sup> Bar<sup>®</sup> 20<sup>°</sup>C", "Foo™ Bar® 20°C"),
        ("pump <sup>NEW</sup> x<sup></sup>", "pump NEW x"),
        ("<sub>Figure 1</sub>" + "a" + "<sup>small print </sup>" * 9, "Figure 1a" + "small print " * 9),
        ("x<sup>2", "x^2"),
        ("a</sup>b</sub>", "ab"),
    ],
)
def test_scripts_are_written_on_the_line(markup, text):
    assert write(markup) == text


@given(st.text(alphabet=f"{RAISED}{LOWERED}{END}a1 .+(", max_size=40))
def test_no_character_is_lost_and_no_mark_stays(text):
    written = write_scripts(text)
    assert not set(written) & {RAISED, LOWERED, END}
    assert Counter(re.findall(r"[a1.]", written)) == Counter(re.findall(r"[a1.]", text))


@pytest.mark.parametrize("piece", [RAISED, f"{RAISED}2{END}", f"{RAISED}2", f"x{LOWERED}a{END}{RAISED}", END])
def test_scripts_take_linear_time(piece):
    start = process_time()
    write_scripts(piece * (300_000 // len(piece)))
    assert process_time() - start < 3


# --- equations ---

TEX = "<semantics><mi>x</mi><annotation encoding='{}'>{}</annotation></semantics>"
OFFICE = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'


def math(content: str) -> str:
    return read_equation(ElementTree.fromstring(f"<math>{content}</math>"))


def office(content: str) -> str:
    """The text of an equation of Office. content: XML without prefixes; words outside of elements are runs."""
    content = re.sub(r"(?<=>)([^<>]+)(?=<)", r"<r><t>\1</t></r>", f"<oMath>{content}</oMath>")
    return read_equation(
        ElementTree.fromstring(content.replace(" val=", " m:val=").replace("<oMath>", f"<oMath {OFFICE}>"))
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("<mi>E</mi><mo>=</mo><mi>m</mi><msup><mi>c</mi><mn>2</mn></msup>", "E=mc^2"),
        ("<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mi>c</mi></mfrac>", "(a+b)/(c)"),
        ("<msqrt><mi>x</mi><mo>+</mo><mn>1</mn></msqrt><mroot><mi>x</mi><mn>3</mn></mroot>", "sqrt(x+1) root(3)(x)"),
        ("<msup><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></msup>", "(a+b)^2"),
        ("<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup><mi>y</mi>", "x_i^2y"),
        ("<mn>2</mn><mo>\u2062</mo><mi>x</mi><mi>sin</mi><mo>\u2061</mo><mi>y</mi>", "2x sin y"),
        ("<mn>2</mn><mn>3</mn><mi>x</mi><mn>2</mn>", "2 3x 2"),
        (
            "<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>i</mi>",
            "∑_(i=1)^n i",
        ),
        ("<mover><mi>x</mi><mo>¯</mo></mover><mover><mi>v</mi><mo>→</mo></mover>", "bar(x) vec(v)"),
        ("<mtable><mtr><mtd/><mtd><mi>b</mi></mtd></mtr><mtr><mtd><mi>c</mi></mtd></mtr></mtable>", "[, b; c]"),
        ("<mo>(</mo><mfrac linethickness='0'><mi>n</mi><mi>k</mi></mfrac><mo>)</mo>", "(n choose k)"),
        ("<mmultiscripts><mi>C</mi><none/><none/><mprescripts/><mn>6</mn><mn>14</mn></mmultiscripts>", "_6^14C"),
        ("<msup><mi>f</mi><mo>′</mo></msup><mfenced><mi>x</mi><mi>y</mi></mfenced>", "f′(x,y)"),
        ("<mi>\U0001d465</mi><mphantom><mi>y</mi></mphantom>", "x"),
        (TEX.format("application/x-tex", "{\\displaystyle x^{2}}"), "x^{2}"),
        (TEX.format("LaTeX", "x^{2}"), "x^{2}"),
        (TEX.format("StarMath 5.0", "x over y"), "x"),
        ("<msup><mi>x</mi></msup><mfrac><mi>a</mi><mi>b</mi><mi>c</mi></mfrac>", "x abc"),  # damaged
        ("<mrow>" * 300 + "<mi>z</mi>" + "</mrow>" * 300, "z"),
    ],
)  # fmt: skip
def test_equations_of_mathml(content, text):
    assert math(content) == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("<f><num>a+b</num><den>c</den></f>", "(a+b)/(c)"),
        ("<f><fPr><type val='noBar'/></fPr><num>n</num><den>k</den></f>", "n choose k"),
        ("<rad><deg/><e>x</e></rad><rad><deg>3</deg><e>x</e></rad>", "sqrt(x) root(3)(x)"),
        ("<sSup><e>x</e><sup>2</sup></sSup>+<sSub><e>a</e><sub>i j</sub></sSub>", "x^2+a_(i j)"),
        ("<sPre><sub>6</sub><sup>14</sup><e>C</e></sPre>", "_6^14C"),
        ("<nary><naryPr><chr val='∑'/></naryPr><sub>i=1</sub><sup>n</sup><e>i</e></nary>", "∑_(i=1)^n i"),
        ("<nary><sub>0</sub><sup>1</sup><e>f dx</e></nary>", "∫_0^1 f dx"),
        (
            "<d><e>x</e></d><d><dPr><begChr val='['/><sepChr val=','/><endChr val=''/></dPr><e>a</e><e>b</e></d>",
            "(x)[a,b",
        ),
        ("<m><mr><e>a</e><e>b</e></mr><mr><e>c</e><e>d</e></mr></m>", "[a, b; c, d]"),
        ("<d><dPr><begChr val='{'/><endChr val=''/></dPr><e><eqArr><e>x</e><e>-x</e></eqArr></e></d>", "{x; -x"),
        ("<func><fName>sin</fName><e>x</e></func><func><fName>cos</fName><e>x+1</e></func>", "sin x cos(x+1)"),
        ("<func><fName><limLow><e>lim</e><lim>x→0</lim></limLow></fName><e>f</e></func>", "lim_(x→0) f"),
        ("<acc><e>x</e></acc><bar><barPr><pos val='top'/></barPr><e>y</e></bar>", "hat(x) bar(y)"),
        ("\U0001d465<del>z</del>", "x"),
    ],
)
def test_equations_of_office(content, text):
    assert office(content) == text


def test_a_deep_equation_takes_neither_recursion_nor_quadratic_time():
    root = below = ElementTree.Element("math")
    for _ in range(50_000):
        below = ElementTree.SubElement(below, "msqrt")
        ElementTree.SubElement(below, "mi").text = "x"
    start = process_time()
    assert read_equation(root).count("x") == 50_000
    assert process_time() - start < 2


# --- every format ---

TEXT = "6.022 x 10^23, H_2O, due[1]"
LINEAR = "where x=(a+b)/(sqrt(c)) holds"
MATHML = "<mi>x</mi><mo>=</mo><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><msqrt><mi>c</mi></msqrt></mfrac>"
OMML = (
    f"<m:oMath {OFFICE}><m:r><m:t>x=</m:t></m:r><m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num><m:den><m:rad><m:deg/>"
    "<m:e><m:r><m:t>c</m:t></m:r></m:e></m:rad></m:den></m:f></m:oMath>"
)
HTML = f"<p>6.022 x 10<sup>23</sup>, H<sub>2</sub>O, due<SUP class=x>1</SUP><p>where <math>{MATHML}</math> holds</p>"
XHTML = f"<p>6.022 x 10<sup>23</sup>, H<sub>2</sub>O, due<sup>1</sup></p><p>where <math>{MATHML}</math> holds</p>"
XML = (
    "<a><p>6.022 x 10<sup>23</sup>, H<subscript>2</subscript>O, due<xref><sup>1</sup></xref></p>\n"
    "<p>where " + re.sub("(</?)", r"\1mml:", f"<math>{MATHML}</math>") + " holds</p></a>"
)


def docx() -> bytes:
    def run(text: str, properties: str = "") -> str:
        return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'

    raised, own_style = '<w:vertAlign w:val="superscript"/>', '<w:rStyle w:val="Mark"/>'
    text = run("6.022 x 10") + run("2", raised) + run("3", raised) + run(", H") + run("2", '<w:position w:val="-6"/>')
    style = '<w:style w:styleId="Mark"><w:rPr><w:vertAlign w:val="superscript"/></w:rPr></w:style>'
    equation = f"<w:p>{run('where ')}{OMML}{run(' holds')}</w:p>"
    return make_docx(f"<w:p>{text}{run('O, due')}{run('1', own_style)}</w:p>{equation}", styles=style)


def odf(kind: str) -> bytes:
    styles = "".join(
        f'<style:style style:name="{name}" style:family="text" style:parent-style-name="{parent}">'
        f'<style:text-properties style:text-position="{position}"/></style:style>'
        for name, parent, position in (("T1", "", "super 58%"), ("T2", "", "-33% 58%"), ("T3", "T1", ""))
    )

    def span(style: str, text: str) -> str:
        return f'<text:span text:style-name="{style}">{text}</text:span>'

    text = f"<text:p>6.022 x 10{span('T1', '23')}, H{span('T2', '2')}O, due{span('T3', '1')}</text:p>"
    link = '<draw:frame><draw:object xlink:href="./Object 1" xmlns:xlink="x"/></draw:frame>'
    text += f"<text:p>where {link} holds</text:p>"
    part = (
        f"<math><semantics><mrow>{MATHML}</mrow><annotation encoding='StarMath 5.0'>x</annotation></semantics></math>"
    )
    slide = f"<draw:page><draw:frame><draw:text-box>{text}</draw:text-box></draw:frame></draw:page>"
    return make_odf(slide if kind == "presentation" else text, kind, styles, {"Object 1/content.xml": part})


def pptx() -> bytes:
    def run(text: str, baseline: int = 0) -> str:
        return f'<a:r><a:rPr baseline="{baseline}"/><a:t>{text}</a:t></a:r>'

    text = run("6.022 x 10") + run("23", 30000) + run(", H") + run("2", -25000) + run("O, due") + run("1", 30000)
    choice = f"<mc:Choice><a14:m xmlns:a14='a14'>{OMML}</a14:m></mc:Choice><mc:Fallback>{run('?')}</mc:Fallback>"
    equation = f"{run('where ')}<mc:AlternateContent xmlns:mc='mc'>{choice}</mc:AlternateContent>{run(' holds')}"
    return make_pptx({"s": f"<p:sp><p:txBody><a:p>{text}</a:p><a:p>{equation}</a:p></p:txBody></p:sp>"}, ["s"])


def xlsx() -> bytes:
    parts = ["6.022 x 10", "<vertAlign val='superscript'/>23", ", H", "<vertAlign val='subscript'/>2", "O, due"]
    runs = (
        re.sub(r"(<.*/>)?(.*)", r"<r><rPr>\1</rPr><t xml:space='preserve'>\2</t></r>", part, count=1) for part in parts
    )
    mark = "<r><rPr><vertAlign val='superscript'/></rPr><t>1</t></r>"
    return make_xlsx({"S": f'<row r="1"><c r="A1" t="inlineStr"><is>{"".join(runs)}{mark}</is></c></row>'})


def rtf() -> bytes:
    equation = (
        r"{\mmath{\*\moMath{\mr\mscr0\msty2 x=}{\mf{\mfPr{\mtype bar}}{\mnum{\mr a+b}}{\mden{\mrad"
        r"{\mradPr{\mdegHide 1}}{\mdeg}{\me{\mr c}}}}}}}"
    )
    text = r"6.022 x 10{\super 23}, H\sub 2\nosupersub O, due{\up6 1}"
    return rf"{{\rtf1 {text}\par where {equation} holds\par}}".encode()


def pdf() -> bytes:
    parts = (("6.022 x 10", 0), ("23", 5), (", H", 0), ("2", -2), ("O, due", 0), ("1", 5))
    operators = (f"/F1 {7 if rise else 12} Tf {rise} Ts ({text}) Tj" for text, rise in parts)
    return make_pdf(f"BT 20 350 Td {' '.join(operators)} ET")


FILES = {
    "html": HTML.encode(),
    "xhtml": b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body>'
    + XHTML.encode()
    + b"</body></html>",
    "epub": make_epub({"c": XHTML}, '<itemref idref="c"/>'),
    "eml": b"Subject: a\nContent-Type: text/html\n\n" + HTML.encode(),
    "docx": docx(),
    "odt": odf("text"),
    "odp": odf("presentation"),
    "pptx": pptx(),
    "rtf": rtf(),
    "xml": XML.encode(),
    "xlsx": xlsx(),
    "pdf": pdf(),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_format_has_the_same_text(kind):
    (document,) = read_documents(f"/a.{kind}", FILES[kind]).documents
    assert document.text.startswith(TEXT) or f"\n{TEXT}" in document.text
    assert LINEAR in document.text or kind in ("xlsx", "pdf")  # they have pictures of equations


# --- HTML ---

KATEX = (
    f'<span class="katex"><span class="katex-mathml"><math>{TEX.format("application/x-tex", "x^2")}</math></span>'
    '<span class="katex-html" aria-hidden="true"><b>x</b>2</span></span>'
)
WIKI = (
    f'<span class="mwe-math-element"><math>{TEX.format("application/x-tex", "x^2")}</math>'
    '<img class="mwe-math-fallback-image-inline" alt="{\\displaystyle x^2}"></span>'
)
MATHJAX = (
    '<span class="MathJax_Preview">x2</span><span class="MathJax"><b>x2</b></span><script type="math/tex">x^2</script>'
)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (f"<p>let {KATEX} be", "let x^2 be"),
        (f"<p>let {WIKI} be", "let x^2 be"),
        (f"<p>let {MATHJAX} be", "let x^2 be"),
        ("<p>a<script type='math/tex; mode=display'>% <![CDATA[\nx < 2 %]]></script>b", "a\n\nx < 2\n\nb"),
        (f"a<math display='block'>{MATHML}</math>b", "a\n\nx=(a+b)/(sqrt(c))\n\nb"),
        ("<math><mi>a</mi><mspace width='1em'/><mo>+</mo><mi>b</mi></math>", "a+b"),
        ("10<span style='font-size:60%; vertical-align: super'>23</span>", "10^23"),
        ("H<span style='vertical-align:sub'>2</span>O", "H_2O"),
        # a link makes a footnote's mark of any raised number
        ("in 2019<sup><a href='#fn1'>1</a></sup> and <a href='#fn2'><sup>2</sup></a>.", "in 2019[1] and [2]."),
        ("x<sup class=footnote><a href=#a>[3]</a></sup><a epub:type='noteref' href='n.html#4'>4</a>", "x[3][4]"),
        ("in 2019<sup><a href='#r1'>1</a>,<a href='#r2'>2</a></sup>", "in 2019[1,2]"),
        ("10<sup><a href='/exponents'>5</a></sup>", "10^5"),
        ("<h2>H<sub>2</sub>O</h2><pre>x<sup>2</sup>\ny</pre>", "## H_2O\n\n```\nx^2\ny\n```"),
        ("<table><tr><td>Area<td>10 m<sup>2</sup></table>", "Area | 10 m^2"),
    ],
)  # fmt: skip
def test_scripts_and_equations_of_pages(page, text):
    assert parse_html(page).text == text


def test_shapes_of_a_drawing_do_not_cost_the_page_its_tables():
    assert parse_html("<svg>" + "<path d='x'/>" * 2000 + "</svg><table><tr><td>a<td>b</table>").text == "a | b"


# --- Office ---


def test_a_word_note_has_scripts_and_its_own_mark_is_not_repeated():
    raised = '<w:rPr><w:vertAlign w:val="superscript"/></w:rPr>'
    reference = f'<w:r>{raised}<w:footnoteReference w:customMarkFollows="1" w:id="2"/><w:t>*</w:t></w:r>'
    note = f'<w:footnote w:id="2"><w:p><w:r><w:t>10</w:t></w:r><w:r>{raised}<w:t>3</w:t></w:r></w:p></w:footnote>'
    record = only(read_docx(make_docx(f"<w:p><w:r><w:t>Rent</w:t></w:r>{reference}</w:p>", footnotes=note)))
    assert record.text == "Rent[1]\n\n[1] 10^3"


def test_equations_of_a_word_paragraph_of_their_own_are_lines():
    body = f"<w:p><m:oMathPara {OFFICE}>{OMML}{OMML}</m:oMathPara></w:p>"
    assert only(read_docx(make_docx(body))).text == "x=(a+b)/(sqrt(c))\nx=(a+b)/(sqrt(c))"


def test_an_opendocument_equation_may_be_written_in_place():
    record: ParsedRecord = only(read_odt(make_odf(f"<text:p>a <math>{MATHML}</math> b</text:p>")))
    assert record.text == "a x=(a+b)/(sqrt(c)) b"


def test_xml_without_an_end_of_an_equation_is_read():
    assert strip_markup("<a><math><mi>x</mi> <sub/>y <suppliers>z</suppliers></a>") == "x\ny z"
