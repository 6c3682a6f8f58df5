"""Where the repository is, and which files belong to it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED_FOLDERS = ("pallas", "custom_calls", "checkpoints")
SOURCE_FOLDERS = ("k3jax", *LINKED_FOLDERS)


def repository_files() -> list[Path]:
    """Paths, relative to the root, of all files that are or would be committed; links are files.

    Skips the calling test outside a git checkout, where the question has no answer.
    """
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout and the git command to list the repository's files")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = (Path(name) for name in listing.split("\0") if name)
    return sorted(path for path in paths if (ROOT / path).exists() or (ROOT / path).is_symlink())


def source_files() -> list[Path]:
    """Files of the package's four folders, by their path inside the package (``k3jax/pallas/...``)."""
    inside = []
    for path in repository_files():
        if path.parts[0] in LINKED_FOLDERS:
            inside.append(Path("k3jax") / path)
        elif path.parts[0] == "k3jax" and not (ROOT / path).is_symlink():
            inside.append(path)
    return inside
