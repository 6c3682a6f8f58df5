"""Whether the files of an Orbax piece are as long as its key-value store (OCDBT) says.

The store is a tree of small nodes, each with a checksum, whose entries say in which file, where and
how long the bytes of each chunk of an array are: a file that is cut short or gone shows without
reading an array.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts


def file_faults(piece: Path) -> dict[str, str]:
    """For each array of the piece that is not whole: what is wrong with a file of it.

    Raises:
        ValueError: the nodes cannot be read.
    """
    base = ts.KvStore.open(f"file://{piece.absolute()}/").result()
    faults: dict[str, str] = {}
    sizes: dict[str, int | None] = {}
    for key, file, end in _chunks(base, ts.ocdbt.dump(base).result()["versions"][-1]["root"], b""):
        if file not in sizes:
            path = piece / file
            sizes[file] = path.stat().st_size if path.is_file() else None
        size = sizes[file]
        array = key.decode().rpartition("/")[0]  # the rest is the chunk's place in the array
        if size is None:
            faults[array] = f"file {file} is missing"
        elif size < end:
            faults.setdefault(array, f"file {file} is cut short: needs at least {end} bytes, has {size}")
    return faults


def _chunks(base: Any, node: dict[str, Any], prefix: bytes) -> Iterator[tuple[bytes, str, int]]:
    """(key, file, end of its bytes) of every value below a node that lies in a file of its own."""
    for entry in ts.ocdbt.dump(base, node["location"]).result()["entries"]:
        if "location" in entry:  # an inner node: keys below it are stored without what they share
            yield from _chunks(base, entry, prefix + entry["subtree_common_prefix"])
        elif "indirect_value" in entry:
            where, offset, length = entry["indirect_value"].rsplit(":", 2)
            _, folder, name = where.split(":")
            yield prefix + entry["key"], unquote(folder) + unquote(name), int(offset) + int(length)


__all__ = ["file_faults"]
