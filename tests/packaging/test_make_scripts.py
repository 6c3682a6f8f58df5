"""The scripts behind the Makefile: how a Python is found, and how stages are run."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import ROOT

TOOLS = ("sh", "bash", "sed", "cat", "dirname")


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def forward(path: Path) -> Path:
    """A command at ``path`` that runs the Python of the tests."""
    return executable(path, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A PATH folder with the tools the scripts use and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (path,) = [p for d in os.defpath.split(":") if (p := Path(d, tool)).exists()][:1]
        (folder / tool).symlink_to(path)
    return folder


def run(script: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_new_enough_python_on_the_path_is_found(commands: Path, tmp_path: Path) -> None:
    executable(
        commands / "python3.13", "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n"
    )
    forward(commands / "python3")
    result = run("find-python", [], PATH=str(commands), HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == sys.executable


@pytest.mark.parametrize("variable", ["HOME", "PYENV_ROOT"])
def test_a_pyenv_version_is_found_without_its_shims(variable: str, commands: Path, tmp_path: Path) -> None:
    home = tmp_path / "somewhere"
    root = home / ".pyenv" if variable == "HOME" else home
    executable(root / "versions" / "3.11.9" / "bin" / "python", "#!/bin/sh\necho 'is 3.11' >&2; exit 1\n")
    forward(root / "versions" / "3.12.4" / "bin" / "python")
    result = run("find-python", [], PATH=str(commands), **{variable: str(home)})
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == sys.executable


def test_the_pyenv_whose_shims_are_on_the_path_is_searched(commands: Path, tmp_path: Path) -> None:
    executable(
        tmp_path / "pyenv" / "shims" / "python3", "#!/bin/sh\necho 'is 3.11, older than 3.12'\nexit 1\n"
    )
    forward(tmp_path / "pyenv" / "versions" / "3.13.1" / "bin" / "python")
    result = run("find-python", [], PATH=f"{tmp_path / 'pyenv' / 'shims'}:{commands}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == sys.executable


def test_without_a_python_the_message_says_what_was_looked_at(commands: Path, tmp_path: Path) -> None:
    executable(commands / "python3", "#!/bin/sh\necho 'is 3.9, older than 3.12'\nexit 1\n")
    result = run("find-python", [], PATH=str(commands), HOME=str(tmp_path))
    assert result.returncode == 1
    assert result.stdout == ""
    assert "No Python >= 3.12 found" in result.stderr
    assert "python3.13: not on PATH" in result.stderr
    assert f"{commands}/python3: is 3.9, older than 3.12" in result.stderr
    assert f"{tmp_path}/.pyenv/versions/*/bin/python" in result.stderr


def test_a_failed_stage_is_reported_and_the_later_ones_still_run(commands: Path) -> None:
    make = executable(commands / "fake-make", '#!/bin/sh\necho "ran $2"\ntest "$2" != lint\n')
    result = run("run-stages", ["lint", "quick"], PATH=str(commands), MAKE=str(make))
    assert result.returncode == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("ran")] == [
        "ran env",
        "ran lint",
        "ran quick",
    ]
    assert re.search(r"^ +lint +\d+ s +FAILED$", result.stdout, re.MULTILINE)
    assert re.search(r"^ +quick +\d+ s +ok$", result.stdout, re.MULTILINE)


def test_nothing_runs_without_the_environment(commands: Path) -> None:
    make = executable(commands / "fake-make", '#!/bin/sh\necho "ran $2"\nexit 1\n')
    result = run("run-stages", ["lint", "quick"], PATH=str(commands), MAKE=str(make))
    assert result.returncode == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("ran")] == ["ran env"]


def test_stages_that_all_pass_give_status_zero(commands: Path) -> None:
    make = executable(commands / "fake-make", "#!/bin/sh\nexit 0\n")
    result = run("run-stages", ["quick"], PATH=str(commands), MAKE=str(make))
    assert result.returncode == 0, result.stderr
    assert "FAILED" not in result.stdout
