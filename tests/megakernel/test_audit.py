"""The audit of machine code finds what was planted in a kernel made of the megakernel's own hand-offs."""

from __future__ import annotations

import functools
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax.custom_calls import audit, decode_megakernel
from k3jax.custom_calls.audit import Report, Rule, sass
from k3jax.custom_calls.audit.graph import Graph, components
from k3jax.custom_calls.audit.sass import Function, Instruction
from support.audit_faults import KINDS
from support.megakernel import needs_compiler
from support.repository import ROOT

BUILD = "import sys; from support.audit_kernel import main; main(sys.argv[1])"
needs_disassembler = pytest.mark.skipif(
    audit.disassembler_problem() is not None, reason=str(audit.disassembler_problem())
)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled kernels, a file for each kind of fault."""
    folder = tmp_path_factory.mktemp("modules")
    environment = {
        **os.environ,
        "CUTE_DSL_ARCH": "sm_90a",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
    }
    command = [sys.executable, "-c", BUILD, str(folder)]
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


@functools.cache
def report(path: Path) -> Report:
    return audit.audit(path.read_bytes())


@needs_compiler
@needs_disassembler
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_found_and_nothing_else(modules: Path, kind: str) -> None:
    found = report(modules / f"{kind}.module")
    broken = {finding.rule for finding in found.findings}
    assert broken == ({KINDS[kind]} if KINDS[kind] else set()), str(found)
    assert found.polls == 2  # before the loop that polls, and in it
    assert (found.waits, found.signals, found.bulk_copies, found.streaming_loops) == (1, 1, 1, 2)
    assert found.step_loads == 1
    assert found.fixed_loads >= 16  # the resident vector, the records


@needs_compiler
@needs_disassembler
def test_the_finding_says_where_a_load_was_moved_to(modules: Path) -> None:
    """The compiler moves a load that it takes for arithmetic out of the loop that waits for it."""
    said = {kind: report(modules / f"{kind}.module").findings for kind in ("between", "hoistable", "early")}
    assert [f.why for f in said["between"]] == ["it can run between a poll and its barrier"]
    for kind in ("hoistable", "early"):
        assert [f.why for f in said[kind]] == ["it can run behind a signal, or before the first wait"]
    (moved,), (stayed,) = said["hoistable"], said["between"]
    assert moved.address < stayed.address
    assert moved.instruction.startswith("LDG.E R")


@needs_compiler
@needs_disassembler
def test_spills_are_counted_and_the_stack_is_reported(modules: Path) -> None:
    sound, spilled = (report(modules / f"{kind}.module") for kind in ("sound", "spilled"))
    assert (sound.spills, sound.local_bytes) == (0, 0)
    assert spilled.local_bytes >= 4 * 40
    assert len(spilled.findings) >= 40
    assert {finding.instruction.split()[0][:3] for finding in spilled.findings} <= {"LDL", "STL"}


def test_what_holds_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="module: expected one kernel, got 0"):
        audit.audit(b"no code")


def test_without_a_disassembler_the_audit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "PACKAGE", "a-package-that-is-not-there")
    sass._disassembler.cache_clear()
    try:
        with pytest.raises(NotImplementedError, match="a-package-that-is-not-there is not installed"):
            sass.disassemble(b"")
    finally:
        sass._disassembler.cache_clear()


# -- sources --


def test_the_kernel_has_no_load_in_inline_assembly() -> None:
    folder = Path(str(decode_megakernel.__file__)).parent / "kernel"
    assert list(audit.inline_loads(folder)) == []


def test_a_load_in_inline_assembly_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""May say ld.global in words."""\n\nTEXT = "{ ld.global.b32 $0, [$1]; }"\n'
    )
    assert [line.split(": ")[0] for line in audit.inline_loads(tmp_path)] == ["a.py:3"]
    assert len(list(audit.inline_loads(Path(__file__).parents[1] / "support"))) == 2  # those planted above


# -- control flow --


def graph(*lines: str) -> Graph:
    """A graph of instructions written as "opcode operands", "@P0" before them; targets by number."""
    out = []
    for at, line in enumerate(lines):
        words = line.split()
        guard = words.pop(0)[1:] if words[0].startswith("@") else ""
        operands = tuple(f"{int(w[1:]) * 16:#x}" if w.startswith("#") else w for w in words[1:])
        out.append(Instruction(at * 16, guard, words[0], tuple(words[0].split(".")), operands))
    return Graph(Function("test", tuple(out)))


def test_blocks_follow_branches_and_calls_return() -> None:
    g = graph("MOV", "@P0 BRA #4", "CALL.REL.NOINC f", "BRA #5", "FADD", "@P1 EXIT", "EXIT", "RET")
    assert g.blocks == [range(2), range(2, 4), range(4, 5), range(5, 7)]
    assert g.after == [[1, 2], [3], [3], []]
    assert [ins.opcode for ins in g.unreached] == ["RET"]


def test_the_innermost_loop_with_both_kinds_is_taken() -> None:
    lines = ("NOP", "LDG", "HMMA", "@P0 BRA #2", "SYNCS", "@P1 BRA #1", "STG", "@P2 BRA #0", "EXIT")
    g = graph(*lines)
    loops = g.loops(lambda ins: ins.opcode if ins.opcode in ("HMMA", "SYNCS") else None)
    held = [sorted(at for i in loop for at in g.blocks[i]) for loop in loops]
    assert held == [[1, 2, 3, 4, 5]]


def test_components_are_the_cycles_of_the_part_that_is_asked_for() -> None:
    after = [[1], [2], [0, 3], [4], [3], [5]]
    assert sorted(map(sorted, components(range(6), after))) == [[0, 1, 2], [3, 4], [5]]
    assert sorted(map(sorted, components([0, 1, 3, 4], after))) == [[3, 4]]


def test_a_jump_through_a_table_goes_where_the_image_says_and_others_are_refused() -> None:
    g = graph("BRX R2 -0x10", "FADD", "EXIT", "BRA #1")
    assert Graph.of(Function("test", g.instructions, {0: (32, 48)})).following(0) == [2, 3]
    with pytest.raises(NotImplementedError, match="a jump to unknown places"):
        Graph.of(Function("test", g.instructions))
    value = struct.pack("<3I2I", 0x10, 0, 2, 0x40, 0x80) + struct.pack("<3I1I", 0x20, 0, 1, 0x30)
    assert sass._jumps(value) == {0x10: (0x40, 0x80), 0x20: (0x30,)}


def test_every_rule_has_a_planted_fault_or_a_reason_to_have_none() -> None:
    """Polls that acquire nothing and signals without a fence do not come out of the DSL's operations."""
    assert set(Rule) - set(KINDS.values()) == {Rule.WAIT, Rule.SIGNAL, Rule.UNREACHED}
