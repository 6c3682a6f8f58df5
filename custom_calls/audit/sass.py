"""Machine instructions of a GPU code image, by the disassembler of the package nvidia-cuda-nvdisasm."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import cubin

PACKAGE = "nvidia-cuda-nvdisasm"
INSTRUCTION_BYTES = 16
_SECONDS = 120
_SIZED = 0x04
_JUMPS = 0x34


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        address: bytes from the start of its function.
        predicate: such as "P0" or "!P0"; empty if it always runs.
        opcode: with its suffixes, such as "LDG.E.128"; ``parts`` is it, split.
        operands: in order; branch targets are addresses in hexadecimal.
    """

    address: int
    predicate: str
    opcode: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.parts[0]

    def __str__(self) -> str:
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {','.join(self.operands)}".rstrip()


@dataclasses.dataclass(frozen=True)
class Function:
    """A kernel, with the functions that it calls behind it.

    Attributes:
        name: its symbol.
        instructions: in the order of their addresses.
        jumps: for the address of each jump through a table, the addresses that it may go to.
    """

    name: str
    instructions: tuple[Instruction, ...]
    jumps: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@functools.cache
def _disassembler() -> Path:
    files = importlib.metadata.distribution(PACKAGE).files or []
    found = [Path(str(file.locate())) for file in files if file.name in ("nvdisasm", "nvdisasm.exe")]
    if not found:
        raise FileNotFoundError(f"{PACKAGE}: expected a program nvdisasm in it, found none")
    return found[0]


def disassembler_problem() -> str | None:
    """Why nothing can be disassembled here, or None."""
    try:
        _disassembler()
    except (importlib.metadata.PackageNotFoundError, FileNotFoundError) as error:
        return f"disassembler: {PACKAGE} is not installed ({error})"
    return None


def _instruction(at: int, row: dict[str, object]) -> Instruction:
    opcode = str(row["opcode"])
    text = str(row.get("operands", ""))
    return Instruction(
        at * INSTRUCTION_BYTES,
        str(row.get("predicate", "")).removeprefix("@"),
        opcode,
        tuple(opcode.split(".")),
        tuple(part.strip() for part in text.split(",")) if text else (),
    )


def jump_targets(image: bytes, name: str) -> dict[int, tuple[int, ...]]:
    """The targets of a kernel's jumps through tables, from its attributes in the image."""
    out: dict[int, tuple[int, ...]] = {}
    for section, data in cubin.sections(image):
        if section == f".nv.info.{name}":
            for attribute, value in _attributes(data):
                if attribute == _JUMPS:
                    out |= _jumps(value)
    return out


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of the entries that have a size of their own."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            yield attribute, info[at : at + size]
            at += size


def _jumps(value: bytes) -> dict[int, tuple[int, ...]]:
    """Entries of (address of the jump, unused, count, targets)."""
    out, at = {}, 0
    while at + 12 <= len(value):
        jump, _, count = struct.unpack_from("<3I", value, at)
        out[jump] = struct.unpack_from(f"<{count}I", value, at + 12)
        at += 12 + 4 * count
    return out


def disassemble(image: bytes) -> list[Function]:
    """The functions of a GPU code image.

    Raises:
        NotImplementedError: there is no disassembler here.
        ValueError: the disassembler refuses the image.
    """
    if problem := disassembler_problem():
        raise NotImplementedError(problem)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.cubin"
        path.write_bytes(image)
        command = [str(_disassembler()), "--print-code", "--emit-json", str(path)]
        result = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS)
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip()
        raise ValueError(f"image: expected code that the disassembler reads; it said: {said[-500:]}")
    _, functions = json.loads(result.stdout)
    return [
        Function(
            str(function["function-name"]),
            tuple(_instruction(at, row) for at, row in enumerate(function["sass-instructions"])),
            jump_targets(image, str(function["function-name"])),
        )
        for function in functions
    ]


__all__ = ["INSTRUCTION_BYTES", "PACKAGE", "Function", "Instruction", "disassemble", "disassembler_problem"]
