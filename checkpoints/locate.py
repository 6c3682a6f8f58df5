"""From what a user names to a checkpoint directory."""

from __future__ import annotations

import os
from pathlib import Path

from .manifest import is_orbax_dir
from .release_files import CONFIG, INDEX, SINGLE, is_release_dir

SHIPPED = Path(__file__).resolve().parent
"""Checkpoints that come with the library are folders here."""


def shipped_names() -> list[str]:
    """Names that :func:`resolve` takes besides paths."""
    return sorted(entry.name for entry in SHIPPED.iterdir() if is_release_dir(entry))


def resolve(path_or_name: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint: a path, or the name of one that ships. Nothing is downloaded.

    Raises:
        FileNotFoundError: neither; lists the accepted forms.
    """
    path = Path(path_or_name)
    if is_release_dir(path) or is_orbax_dir(path):
        return path
    given = os.fspath(path_or_name)
    if given in shipped_names():
        return SHIPPED / given
    if path.is_dir():
        found = "the directory has neither"
    else:
        found = "it is a file" if path.exists() else "there is no such directory"
    raise FileNotFoundError(
        f"no checkpoint {given!r} ({found}). Expected a directory in the release's format ({CONFIG} with "
        f"{INDEX} or {SINGLE}), a directory made by `k3jax convert`, or a name that ships: "
        f"{', '.join(shipped_names()) or 'none in this installation'}. Nothing is downloaded."
    )
