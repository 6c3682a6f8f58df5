"""No file of the repository depends on one machine or names a package registry."""

from __future__ import annotations

import re

import pytest

from support.repository import ROOT, repository_files

# Composed, so that this file does not match itself.
REGISTRIES = (
    "pypi" + r"\.org",
    "pythonhosted" + r"\.org",
    "npmjs" + r"\.(org|com)",
    "conda" + r"\.anaconda\.org",
)
MACHINE_FOLDERS = ("root", "home", "Users", "work", "tmp", "opt", "mnt", "scratch")
HOSTS = re.compile("|".join(REGISTRIES), re.IGNORECASE)
# An absolute path: the slash starts a word. Relative paths (a/home/b) and addresses do not match.
MACHINE_PATHS = re.compile(rf"(?<![\w.\-~/)}}])/(?:{'|'.join(MACHINE_FOLDERS)})/\w")


def matches(text: str) -> list[str]:
    lines = enumerate(text.splitlines(), start=1)
    return [
        f"line {n}: {line.strip()[:120]}"
        for n, line in lines
        if HOSTS.search(line) or MACHINE_PATHS.search(line)
    ]


@pytest.mark.parametrize("line", ["open('{}root/data')", "cd {}tmp/a", "see files.{}.org/x"])
def test_the_check_finds_machine_paths_and_registries(line: str) -> None:
    line = line.format("pythonhosted" if "files" in line else "/")
    assert len(matches(f"first\n{line}\n")) == 1


@pytest.mark.parametrize("line", ["tests/home/x", "https://example.org/home/page", "a / work / b", "~/tmp/x"])
def test_the_check_leaves_other_text_alone(line: str) -> None:
    assert matches(line) == []


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    found: dict[str, list[str]] = {}
    checked = 0
    for path in repository_files():
        if (ROOT / path).is_symlink():
            continue
        content = (ROOT / path).read_bytes()
        if b"\0" in content[:4096]:  # binary: tensors, pictures
            continue
        checked += 1
        if lines := matches(content.decode("utf-8")):
            found[str(path)] = lines
    assert checked > 10
    assert not found


def test_constraints_are_plain_version_pins() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 50
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._\-]+==[A-Za-z0-9.!+]+", line)] == []
    plugins = [line for line in pins if re.match(r"jax[-_](cuda|rocm)|nvidia[-_](cublas|cudnn|nccl)", line)]
    assert plugins == []
