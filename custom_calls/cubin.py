"""Registers, local memory and code size of a compiled kernel, read from the ELF headers of its GPU code."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

_MACHINE_CUDA = 190
_MAGIC = b"\x7fELF"
# Attributes of .nv.info that hold (symbol, value).
_FRAME, _REGISTERS = 0x11, 0x2F
_PAIR = 0x04


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one kernel uses.

    Attributes:
        registers: 32-bit registers a thread.
        local_bytes: local memory a thread, its stack frame: not 0 where registers were spilled.
        code_bytes: size of the instructions.
    """

    registers: int
    local_bytes: int
    code_bytes: int


def images(blob: bytes) -> list[bytes]:
    """Every GPU code image in a file that holds some, such as a compiled module."""
    found, at = [], blob.find(_MAGIC)
    while at >= 0:
        if _is_image(blob, at):
            found.append(blob[at : at + _size(blob, at)])
        at = blob.find(_MAGIC, at + 4)
    return found


def _is_image(blob: bytes, at: int) -> bool:
    return len(blob) >= at + 64 and struct.unpack_from("<H", blob, at + 18)[0] == _MACHINE_CUDA


def _size(blob: bytes, at: int) -> int:
    programs, sections = struct.unpack_from("<QQ", blob, at + 0x20)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", blob, at + 0x36)
    return max(programs + program_size * program_count, sections + section_size * section_count)


def sections(image: bytes) -> list[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_at = struct.unpack_from("<3H", image, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = image[heads[names_at][4] :]
    no_bits = 8
    return [
        (
            names[h[0] : names.index(b"\0", h[0])].decode(),
            image[h[4] : h[4] + h[5]] if h[1] != no_bits else b"",
        )
        for h in heads
    ]


def _pairs(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of the entries about a symbol."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _PAIR:
            if size == 8:
                yield attribute, struct.unpack_from("<II", info, at)[1]
            at += size


def usage(blob: bytes) -> Usage:
    """The most that any kernel of a compiled module uses, and the code of all.

    Raises:
        ValueError: there is no GPU code in it.
    """
    found = images(blob)
    if not found:
        raise ValueError("module: expected GPU code (an ELF image for CUDA), found none")
    all_sections = [section for image in found for section in sections(image)]
    pairs = [pair for name, data in all_sections if name == ".nv.info" for pair in _pairs(data)]

    def most(attribute: int) -> int:
        return max((value for key, value in pairs if key == attribute), default=0)

    code = sum(len(data) for name, data in all_sections if name.startswith(".text."))
    return Usage(most(_REGISTERS), most(_FRAME), code)


__all__ = ["Usage", "images", "sections", "usage"]
