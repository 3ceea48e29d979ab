"""Build what would be published, look into it, and install it as a user does: `make release-check`.

    python -m tools.release [PYTHON ...]           builds into dist/, then tries it under every interpreter named
    python -m tools.release --built [PYTHON ...]   tries what is in dist/
    python -m tools.release --tag v0.1.0 [--repository URL]   also: may this tag be released?
    python -m tools.release --notes                that version's part of the changelog

The sdist is held against git, the wheel is built from the sdist, `twine check` reads their metadata. Each interpreter
gets an empty environment in turn: minutes and gigabytes for a PyTorch with CUDA, on a machine that
is offered no other. Prints a line per step; ends with 1 and the reason at the first that fails.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import ragblend
from tools.release.contents import ROOT, find_problems, find_tag_problems, notes, tracked
from tools.release.installing import try_wheel

DIST = ROOT / "dist"


def main(arguments: list[str] | None = None) -> int:
    """Every step in turn; the exit code."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.release",
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters: names on the PATH, or paths")
    parser.add_argument("--built", action="store_true", help="do not build: take what is in dist/")
    parser.add_argument("--tag", help="refuse where version, changelog or address do not fit it")
    parser.add_argument("--repository", metavar="URL", help="with --tag: the address that it is released from")
    parser.add_argument("--notes", action="store_true", help="print this version's part of the changelog, and end")
    chosen = parser.parse_args(arguments)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if chosen.notes:
        print(notes(changelog, ragblend.__version__))
        return 0
    today = datetime.now(UTC).date()
    found = find_tag_problems(chosen.tag, chosen.repository, changelog, today) if chosen.tag else []
    if found:
        return _end(found)
    if not chosen.built:
        shutil.rmtree(DIST, ignore_errors=True)
        if _step("built", [sys.executable, "-m", "build", "--outdir", str(DIST)]):
            return 1
    built = [*DIST.glob("*.tar.gz"), *DIST.glob("*.whl")]
    if len(built) != 2:
        return _end([f"{DIST} holds {len(built)} distributions, not an sdist and a wheel: leave --built away"])
    sdist, wheel = built
    found = find_problems(sdist, wheel, tracked())
    if found:
        return _end(found)
    print(f"sdist {_mib(sdist)}, wheel {_mib(wheel)}: all that git keeps, nothing else, licences inside")
    if _step("metadata is well formed", [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)]):
        return 1
    for python in chosen.pythons:
        start_s = perf_counter()
        try:
            print(f"{try_wheel(python, sdist, wheel)} ({perf_counter() - start_s:.0f} s)", flush=True)
        except subprocess.CalledProcessError as error:
            return _end(
                [f"{python}: {' '.join(error.cmd)} ended with {error.returncode}", (error.stderr or "")[-3000:]]
            )
        except (AssertionError, OSError) as error:
            return _end([f"{python}: {error}"])
    return 0


def _step(done: str, command: list[str]) -> int:
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        return _end([f"{' '.join(command)} ended with {ended.returncode}", (ended.stdout + ended.stderr)[-3000:]])
    print(done, flush=True)
    return 0


def _end(reasons: list[str]) -> int:
    print("\n".join(reasons), file=sys.stderr)
    return 1


def _mib(path: Path) -> str:
    return f"{path.stat().st_size / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
