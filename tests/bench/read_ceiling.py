"""The rate at which a card can be read: a ring of bulk copies on every SM, no arithmetic but a check.

    python tests/bench/read_ceiling.py compile --sms 132 --out read.bin       # without a GPU
    python tests/bench/read_ceiling.py run read.bin                           # on the GPU host

8.6 GB of random words pass through 6 x 32 KB of shared memory per SM; every block xors a word of each tile
into its result, which is compared with the same xor computed by XLA. The figure is bytes over the median
time of a call, ten in flight.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WORDS = 1 << 31
TILE_WORDS = 8192
TILES = WORDS // TILE_WORDS


def compile_kernel(sms: int, out: Path) -> None:
    """Compile for ``sms`` SMs of CUTE_DSL_ARCH (default sm_90a), to a ``jax.export`` artifact."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    from jax import export

    from support.read_kernel import launch

    dsl: Any = importlib.import_module("cutlass.jax")  # its names are not what a type checker sees
    result = jax.ShapeDtypeStruct((sms,), jnp.int32)
    call = dsl.cutlass_call(launch, output_shape_dtype=result, use_static_tensors=True, sms=sms, tiles=TILES)
    exported = export.export(
        jax.jit(call), platforms=["cuda"], disabled_checks=dsl.get_export_disabled_safety_checks()
    )(jax.ShapeDtypeStruct((WORDS,), jnp.int32))
    out.write_bytes(exported.serialize())


def measure(artifact: str | os.PathLike[str]) -> float:
    """TB/s that the card is read at.

    Raises:
        RuntimeError: the kernel did not read what is there.
    """
    from jax import export

    run = jax.jit(export.deserialize(bytearray(Path(artifact).read_bytes())).call)
    words = jax.jit(lambda: jax.random.bits(jax.random.key(1), (WORDS,), jnp.uint32).view(jnp.int32))()
    got = np.asarray(run(words))
    first = np.asarray(jax.jit(lambda w: w.reshape(TILES, TILE_WORDS)[:, 0])(words))
    want = [np.bitwise_xor.reduce(first[sm :: len(got)]) for sm in range(len(got))]
    if (got != np.array(want)).any():
        raise RuntimeError("read kernel: the words it saw are not the words that are there")
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready([run(words) for _ in range(10)])
        times.append((time.perf_counter() - start) / 10)
    words.delete()
    return 4 * WORDS / float(np.median(times)) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("compile")
    make.add_argument("--sms", type=int, default=132)
    make.add_argument("--out", type=Path, required=True)
    commands.add_parser("run").add_argument("artifact")
    given = parser.parse_args()
    if given.command == "compile":
        compile_kernel(given.sms, given.out)
        return
    from k3jax.custom_calls import ffi

    ffi.register()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {measure(given.artifact):.3f} TB/s")


if __name__ == "__main__":
    main()
