"""What a release rests on: one version, files that say it, a changelog in its form, workflows that hold together."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from datetime import date
from pathlib import Path

import pytest
import yaml

import ragblend
from tools.release import address, contents

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
VERSION_TAG, NO_ADDRESS = f"v{ragblend.__version__}", "https://github.com/owner/nothing"
RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is not in git")


def check_output(*command: str | Path) -> None:
    """Run a command that has to succeed, and say what it printed if it does not."""
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_schema(name: str, *files: Path) -> None:
    check_output(sys.executable, "-m", "check_jsonschema", "--builtin-schema", name, *files)


# --- version and papers ---


def test_the_version_is_written_in_one_place_of_the_package():
    assert "version" not in PROJECT
    assert "version" in PROJECT["dynamic"]
    pages = [ROOT / "pyproject.toml", *(ROOT / "ragblend").rglob("*.py")]
    saying = [path.name for path in pages if f'version__ = "{ragblend.__version__}"' in path.read_text("utf-8")]
    assert saying == ["__init__.py"]


def test_the_citation_is_of_this_version_and_names_the_paper():
    check_schema("vendor.citation-file-format", ROOT / "CITATION.cff")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ragblend.__version__
    assert citation["license"] == PROJECT["license"]
    assert "2405.16444" in citation["references"][0]["url"]


def test_the_changelog_keeps_its_form():
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert headings[1].startswith(f"[{ragblend.__version__}] - ")
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)) <= KINDS
    assert "- " in contents.notes(CHANGELOG, ragblend.__version__)


def test_a_version_s_notes_end_where_the_next_version_begins():
    text = "# C\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-02\n\n### Added\n- new\n\n## [0.1.0] - 2026-12-01\n- old\n"
    assert contents.notes(text, "0.2.0") == "### Added\n- new"
    assert contents.notes(text, "0.1.0") == "- old"
    assert contents.notes(text, "0.3.0") == ""


@pytest.mark.parametrize(
    ("tag", "url", "heading", "refused"),
    [
        (VERSION_TAG, None, "2026-12-01", ""),
        ("v9.9.9", None, "2026-12-01", "the tag is v9.9.9"),
        (VERSION_TAG, None, "not yet released", "no dated heading"),
        (VERSION_TAG, None, "2027-12-01", "no dated heading"),
        (VERSION_TAG, NO_ADDRESS, "2026-12-01", f"python -m tools.release.address {NO_ADDRESS}"),
    ],
)
def test_a_release_needs_its_version_a_dated_changelog_and_its_address(tag, url, heading, refused):
    changelog = f"## [Unreleased]\n\n## [{ragblend.__version__}] - {heading}\n"
    found = contents.find_tag_problems(tag, url, changelog, date(2026, 12, 2))
    assert refused in "\n".join(found)
    assert bool(found) == bool(refused)


# --- sdist and wheel ---


@in_git
def test_sdist_and_wheel_hold_what_git_keeps(tmp_path):
    check_output(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path)
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    kept = contents.tracked(others=True)  # a checkout in use has files that are not added yet
    assert contents.find_problems(sdist, wheel, kept) == []
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    assert f"\nVersion: {ragblend.__version__}\n" in metadata
    description = metadata.partition("\n\n")[2]
    assert "prefills RAG chunks when documents are ingested" in description, "README.md is what PyPI shows"
    # Both are found out when they do not.
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "data" / "questions" / "README.md").unlink()
    (folder / "left.log").touch()
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(folder, folder.name)
    found = "\n".join(contents.find_problems(sdist, wheel, kept))
    assert "lacks data/questions/README.md" in found
    assert "has left.log, which git does not track" in found


# --- the address, written once it is known ---


def test_the_address_goes_into_every_file_and_can_be_changed(tmp_path):
    for name in ("pyproject.toml", "README.md", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    length = len((tmp_path / "README.md").read_text().splitlines())
    had = PROJECT["urls"].get("Repository")
    for owner in ("first", "Second-Owner"):
        changed = address.write(f"https://github.com/{owner}/ragblend", tmp_path)
        assert changed == ["pyproject.toml", "README.md", "CITATION.cff"]
    assert address.write("https://github.com/Second-Owner/ragblend/", tmp_path) == []
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert not [name for name, text in texts.items() if "github.com/first" in text]
    project = tomllib.loads(texts["pyproject.toml"])
    assert project["project"]["urls"]["Repository"] == "https://github.com/Second-Owner/ragblend"
    assert "Paper" in project["project"]["urls"]
    assert len(texts["README.md"].splitlines()) == length + (had is None)
    check_schema("vendor.citation-file-format", tmp_path / "CITATION.cff")
    # What PyPI shows leads out of the tree.
    shown = texts["README.md"]
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    assert "](https://github.com/Second-Owner/ragblend/blob/main/docs/start.md)" in shown
    assert 'src="https://raw.githubusercontent.com/Second-Owner/ragblend/main/docs/idea-light.svg"' in shown
    assert not re.findall(r"\]\((?!https?:|#)[^)]+\)", shown)


@pytest.mark.parametrize("wrong", ["ragblend", "https://github.com/ragblend", "https://example.org/a/b"])
def test_what_is_no_address_is_refused(wrong, tmp_path):
    with pytest.raises(ValueError, match=re.escape("https://github.com/OWNER/NAME")):
        address.write(wrong, tmp_path)


# --- workflows ---


def test_the_workflows_are_valid_and_safe():
    check_schema("vendor.github-workflows", *WORKFLOWS)
    check_schema("vendor.dependabot", ROOT / ".github" / "dependabot.yml")
    zizmor = Path(sys.executable).parent / "zizmor"
    check_output(zizmor, "--offline", "--format", "plain", ROOT / ".github")


def test_the_test_workflow_makes_what_ci_makes():
    plan = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    made = re.findall(r"\b(?:make|run_tests) ([\w-]+)", re.sub(r"#.*", "", (ROOT / ".ci" / "run").read_text()))
    assert sorted(plan["jobs"]["test"]["strategy"]["matrix"]["target"]) == sorted(made)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = re.findall(r"run: make ([\w-]+)", "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS))
    assert set(made) | set(called) <= {word for line in targets for word in line.split()} | {"test"}


def test_the_workflow_of_newest_releases_runs_weekly_and_fails_with_its_tests():
    text = (ROOT / ".github" / "workflows" / "newest.yml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)[True]["schedule"]  # YAML reads the key `on` as a boolean
    assert "run: make test-newest\n" in text
    assert "continue-on-error" not in text


def test_the_classifiers_name_no_python_that_a_release_does_not_try():
    plan = yaml.safe_load(RELEASE)
    named = {found[1] for each in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", each))}
    assert named <= set(plan["jobs"]["install"]["strategy"]["matrix"]["python"])
    assert f">={min(named, key=lambda each: int(each[2:]))}" == PROJECT["requires-python"]


def test_only_the_job_that_publishes_may_ask_for_an_identity():
    plan = yaml.safe_load(RELEASE)
    assert plan["permissions"] == {"contents": "read"}
    asking = [name for name, job in plan["jobs"].items() if "id-token" in job.get("permissions", {})]
    assert asking == ["publish"]
    assert plan["jobs"]["publish"]["needs"] == "install"
    assert "secrets." not in RELEASE
