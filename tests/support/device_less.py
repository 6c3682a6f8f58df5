"""What ptxas says of the kernels of the Pallas path, compiled for an H200 where there is none.

XLA compiles the whole decode step for a device of a topology, as :mod:`k3jax.plan_report` does: the
custom call of every Mosaic GPU kernel is taken to PTX and assembled by the ``ptxas`` of the wheel
nvidia-cuda-nvcc. With ``MOSAIC_GPU_DUMP_TO`` set, Mosaic writes per kernel its MLIR, which has the
dynamic shared memory of the launch, its PTX, which has the threads, and what ``ptxas -v`` said of it.
Compilation for GPUs wants its own environment: hence a process, ``python device_less.py BATCH``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CAPACITY = 8192
"""Tokens of latent cache that the step is compiled for."""

SNAPSHOTS, SLOTS = 8, (3, 4)
"""Of the widest mixture over depth: the last layers' of K3's 93, which the slice does not reach."""


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a kernel takes, at most of its variants.

    Attributes:
        registers: 32-bit registers of a thread.
        spill: bytes that the code stores, and loads, for want of registers, of a thread.
        shared: bytes of shared memory of a CTA, static and dynamic.
        threads: of a CTA.
        variants: programs that ptxas assembled.
    """

    registers: int
    spill: int
    shared: int
    threads: int
    variants: int


def compiled(batch: int, timeout: float) -> dict[str, Resources]:
    """The kernels, by name, of a decode step of K3's first four layers and the head.

    Raises:
        RuntimeError: the compilation failed, or what it left is not what is expected.
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # a step from the cache would not pass ptxas
            "MOSAIC_GPU_DUMP_TO": folder,
        }
        environment.pop("XLA_FLAGS", None)  # virtual CPU devices and the like
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, __file__, str(batch)], env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"compilation ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return read_dump(Path(folder))


def read_dump(folder: Path) -> dict[str, Resources]:
    """The kernels of a folder that Mosaic dumped to, by name.

    A file is named by its kernel and a number; MLIR and machine code do not share the numbers.

    Raises:
        RuntimeError: there are none, or a file does not say what is looked for.
    """
    reports: dict[str, list[Path]] = {}
    for report in sorted(folder.glob("*.ptxas")):
        reports.setdefault(_kernel_of(report), []).append(report)
    if not reports:
        raise RuntimeError("expected what ptxas said of each kernel, Mosaic dumped nothing")
    launched: dict[str, int] = {}
    for launch in folder.glob("*.before_layout_inference.txt"):
        (shared,) = _numbers(r"dynamic_shared_memory_size %c(\d+)_i32", launch)
        launched[_kernel_of(launch)] = max(shared, launched.get(_kernel_of(launch), 0))
    found = {}
    for name, files in reports.items():
        said = [_numbers(PTXAS, report) for report in files]
        static = [sum(map(int, re.findall(r"(\d+) bytes smem", report.read_text()))) for report in files]
        found[name] = Resources(
            registers=max(registers for _, _, registers in said),
            spill=max(stores + loads for stores, loads, _ in said),
            shared=launched[name] + max(static),
            threads=max(_numbers(r"\.maxntid (\d+)", file.with_suffix(".ptx"))[0] for file in files),
            variants=len(files),
        )
    return found


PTXAS = r"(?s)for 'sm_90a'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
"""What ``ptxas -v`` says of a kernel."""


def _kernel_of(file: Path) -> str:
    return file.name.split(".")[0].rpartition("_")[0]


def _numbers(pattern: str, file: Path) -> tuple[int, ...]:
    found = re.search(pattern, text := file.read_text())
    if found is None:
        raise RuntimeError(f"{file.name}: expected {pattern!r} in it, got {text[:2000]}")
    return tuple(map(int, found.groups()))


def compile_step(batch: int) -> None:
    """The decode step and the widest mixture, through ptxas; in this process."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from k3jax import K3Config
    from k3jax.model import abstract_params
    from k3jax.pallas import step
    from k3jax.pallas.attn_res import attn_res
    from k3jax.plan_report.gpus import gpu_named
    from k3jax.state import abstract_state

    gpu = gpu_named("h200")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.target(), topology=gpu.topology(1)
    )
    there = SingleDeviceSharding(topology.devices[0])

    config = K3Config.preset("k3-slice", num_layers=4)
    row = jax.ShapeDtypeStruct((8, config.hidden_size), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((config.hidden_size,), jnp.bfloat16)
    proj = jax.ShapeDtypeStruct((1, config.hidden_size), jnp.bfloat16)
    deltas = [jax.ShapeDtypeStruct((slots, 8, config.hidden_size), jnp.float32) for slots in SLOTS]
    mixture = row, deltas, [row] * SNAPSHOTS, vector, proj, vector
    inputs = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.bool_)
    state = abstract_state(config, batch, CAPACITY, jnp.bfloat16)

    def run(params: Any, state: Any, tokens: Any, live: Any, mixture: Any) -> Any:
        mixed = attn_res(*mixture, eps=config.rms_norm_eps)
        return step.step(params, state, tokens, live, config), mixed

    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
        (abstract_params(config), state, *inputs, mixture),
    )
    jax.jit(run).lower(*placed).compile()


if __name__ == "__main__":
    compile_step(int(sys.argv[1]))
