"""`ragblend init`: a settings file that says every setting, and reads back as what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragblend.cli.app import app
from ragblend.config import CONFIG_FILE, USER_FILE, USER_ONLY_SETTINGS, Settings, load_settings, user_folder
from ragblend.operations.settings_file import settings_text


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")


def uncommented(text: str) -> str:
    """Every setting that has a default, set to it."""
    return re.sub(r"^# (\w+ = .+)$", r"\1", text, flags=re.MULTILINE)


@pytest.mark.parametrize("of_user", [False, True])
def test_what_it_names_as_defaults_are_the_defaults(of_user: bool, caplog: pytest.LogCaptureFixture) -> None:
    path = user_folder() / USER_FILE if of_user else Path(CONFIG_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(uncommented(settings_text({}, of_user=of_user)))
    assert load_settings() == Settings()
    assert not caplog.records, "and none of them is ignored"


def test_it_names_every_setting_that_the_file_may_set() -> None:
    names = set(re.findall(r"^# (\w+) =", settings_text({}), re.MULTILINE))
    assert names == set(Settings.__dataclass_fields__) - set(USER_ONLY_SETTINGS)
    assert "remote" in re.findall(r"^# (\w+) =", settings_text({}, of_user=True), re.MULTILINE)


def test_init_writes_one_sets_the_model_and_touches_none_that_is_there() -> None:
    ended = CliRunner().invoke(app, ["init", "--model", 'a "quoted"\\name'])
    assert ended.exit_code == 0, ended.output
    assert load_settings().model == 'a "quoted"\\name'
    before = Path(CONFIG_FILE).read_text()
    again = CliRunner().invoke(app, ["init"])
    assert again.exit_code != 0
    assert "is there already" in str(again.exception)
    assert Path(CONFIG_FILE).read_text() == before
    assert CliRunner().invoke(app, ["init", "--user"]).exit_code == 0
    assert (user_folder() / USER_FILE).exists()
