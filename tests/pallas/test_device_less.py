"""Registers, spills and shared memory of the kernels of a Pallas step at K3's shapes, as ptxas has them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from k3jax.plan_report import compile_step
from support.device_less import Resources, compiled, read_dump

REGISTERS = 65536
"""Of a CTA: the register file of an SM of compute capability 9.0."""

SHARED = 232448
"""Bytes of shared memory of a CTA, at most (227 KiB)."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a kernel may take.

    Attributes:
        registers: of a thread: what it took, rounded up to the 8 in which they are given out, and 8 more
            where the CTA's threads leave them.
        shared: bytes of a CTA: what it took, rounded up to KiB.
        why: what the numbers come from.
        spill: bytes stored and loaded.
    """

    registers: int
    shared: int
    why: str
    spill: int = 0


KIB = 1024
LIMITS = {
    "k3_attn_res": Limit(72, 25 * KIB, "7 warpgroups of 128 threads leave 72 registers each"),
    "k3_skinny_gemm": Limit(56, 211 * KIB, "a ring of 6 x 34 KiB, tiles on their way out"),
    "kda": Limit(200, 115 * KIB, "64 x 128 float32 of the state, and products with it, in registers"),
    "mla_absorb": Limit(40, 77 * KIB, "128 x 256 bfloat16 of W_UK, and a row's latent"),
    "mla_attend": Limit(
        255, 220 * KIB,
        "all that a thread can have: sums of 64 heads and half of the latent are 128 registers, scores and "
        "the product being added 32 each, weights 16",
        spill=1088,
    ),
    "mla_merge": Limit(255, 135 * KIB, "64 x 128 float32 at a time of products with W_UV"),
    "k3_router": Limit(56, 44 * KIB, "8 warpgroups; scores of 8 rows, and what each reduction spaces out"),
    "experts_gate_up": Limit(104, 222 * KIB, "4 warpgroups with tiles in flight, activations, scales"),
    "experts_down": Limit(104, 198 * KIB, "4 warpgroups with tiles in flight, activations, scales"),
}  # fmt: skip
"""By the name of the launch. Taken with jax 0.12.0.1 and ptxas 13.5 at batch 1 and 8, 2026-12-01: registers
72, 48, 192, 30, 255, 245, 47, 96, 95; mla_attend spilled 600 + 456 bytes at batch 1, 1,076 at batch 8."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("batch", [1, 8])
def test_every_kernel_of_the_step_stays_within_its_registers_and_shared_memory(batch: int) -> None:
    """The step of four layers and the head, and the widest mixture, for an H200; needs no GPU."""
    if absent := compile_step.missing():
        pytest.skip(f"needs {', '.join(absent)} (the extra plan)")
    found = compiled(batch, timeout=800.0)
    assert found.keys() == LIMITS.keys()
    over = [text for name, limit in LIMITS.items() for text in excess(name, found[name], limit)]
    assert not over, "\n".join(over)


def excess(name: str, took: Resources, limit: Limit) -> list[str]:
    """What of a kernel is over its limit, or over the GPU's."""
    sizes = (
        ("registers of a thread", took.registers, limit.registers),
        ("bytes spilled", took.spill, limit.spill),
        ("bytes of shared memory", took.shared, min(limit.shared, SHARED)),
        ("registers of a CTA", -(-took.registers // 8) * 8 * took.threads, REGISTERS),
    )
    return [f"{name}: {had} {what}, at most {most}: {limit.why}" for what, had, most in sizes if had > most]


PTXAS_SAYS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k3_some_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for k3_some_mosaic_gpu_kernel
    240 bytes stack frame, 600 bytes spill stores, 456 bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers, 1 bytes smem
"""


def dump(folder: Path, variants: dict[int, int], shared: dict[int, int], said: str = PTXAS_SAYS) -> Path:
    """A folder as Mosaic leaves it: registers of programs, bytes of launches, by their numbers."""
    for i, registers in variants.items():
        (folder / f"k3_some_{i}.ptxas").write_text(said.format(registers=registers))
        (folder / f"k3_some_{i}.ptx").write_text(".visible .entry k3_some()\n.maxntid 256, 1, 1\n")
    for i, size in shared.items():
        text = f"threads(%a) in (%b = %c256) dynamic_shared_memory_size %c{size}_i32 {{"
        (folder / f"k3_some_{i}.before_layout_inference.txt").write_text(text)
    return folder


def test_the_most_of_a_kernels_variants_is_read(tmp_path: Path) -> None:
    """MLIR and programs have numbers of their own: equal programs are assembled once."""
    found = read_dump(dump(tmp_path, {0: 40, 12: 255}, {0: 1024, 3: 4096, 4: 2048}))
    assert found == {"k3_some": Resources(registers=255, spill=1056, shared=4097, threads=256, variants=2)}


def test_a_dump_that_says_nothing_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Mosaic dumped nothing"):
        read_dump(tmp_path)
    dump(tmp_path, {0: 40}, {0: 1024}, said=PTXAS_SAYS.replace("sm_90a", "sm_80"))
    with pytest.raises(RuntimeError, match=r"k3_some_0\.ptxas: expected .*sm_90a"):
        read_dump(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"registers": 49}, "49 registers of a thread, at most 48: reason"),
        ({"spill": 4}, "4 bytes spilled, at most 0: reason"),
        ({"shared": 2049}, "2049 bytes of shared memory, at most 2048: reason"),
        ({"threads": 1408}, "67584 registers of a CTA, at most 65536: reason"),
    ],
)
def test_what_is_over_a_limit_is_named(change: dict[str, int], text: str) -> None:
    within = Resources(registers=48, spill=0, shared=2048, threads=1024, variants=1)
    limit = Limit(48, 2048, "reason")
    assert excess("kernel", within, limit) == []
    assert excess("kernel", dataclasses.replace(within, **change), limit) == [f"kernel: {text}"]
