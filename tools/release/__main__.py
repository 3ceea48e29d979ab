"""Build the sdist and the wheel, check their contents, and install them as a user does: `make release-check`.

    python -m tools.release [PYTHON ...]           builds into dist/, then installs under each of the interpreters
    python -m tools.release --built [PYTHON ...]   uses the distributions in dist/
    python -m tools.release --tag v0.1.0 [--repository URL]   also checks that this tag may be released
    python -m tools.release --notes                prints the version's part of the changelog

The files of the sdist and the wheel are compared with those that git tracks, and `twine check` reads their metadata.
Each interpreter installs into a new environment. If pip finds only a PyTorch with CUDA, that takes minutes and
gigabytes. Prints a line per step. Ends with exit code 1 and the reason at the first step that fails.
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
    """Run the steps in order. Return the exit code."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.release",
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreter to install under: a name or a path")
    parser.add_argument("--built", action="store_true", help="use the distributions in dist/ instead of building")
    parser.add_argument("--tag", help="tag to check against version, changelog and repository")
    parser.add_argument("--repository", metavar="URL", help="with --tag: address of the repository that releases it")
    parser.add_argument("--notes", action="store_true", help="print this version's part of the changelog and exit")
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
        return _end([f"{DIST} has {len(built)} distributions instead of an sdist and a wheel; run without --built"])
    sdist, wheel = built
    found = find_problems(sdist, wheel, tracked())
    if found:
        return _end(found)
    print(f"sdist {_mib(sdist)}, wheel {_mib(wheel)}: all tracked files, no others, with licences")
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
