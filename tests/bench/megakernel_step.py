"""Time of a whole decode step of a full-width slice: the megakernel against the XLA path, in one process.

    python tests/bench/megakernel_step.py --batch 1 2 4 8 --read-kernel FILE --json OUT     # on the GPU host

The same weights, states and tokens for all. Steps follow one another on the device, the state donated, and
are timed in groups; the figure is the median of the groups. XLA runs with its layers unrolled, with and
without Triton products, and its faster form counts. Bytes are `K3Config.bytes_per_step` with the distinct
experts that the last LatentMoE layer read; the roofline is the read ceiling, measured in the same process
by `tests/bench/read_ceiling.py` (`--read-kernel` takes what its `compile` wrote) or given (`--ceiling`).
Before timing, both paths' logits of one step are compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path[:0] = [str(Path(__file__).absolute().parents[1]), str(Path(__file__).absolute().parent)]

import read_ceiling  # noqa: E402

import k3jax  # noqa: E402
from k3jax.custom_calls import ffi  # noqa: E402
from k3jax.custom_calls import step as megakernel  # noqa: E402
from k3jax.state import init_state  # noqa: E402

STEPS, GROUPS, CAPACITY = 12, 7, 1024


def seconds(step: Any, params: Any, state: Any, tokens: jax.Array, steps: int) -> tuple[float, Any, Any]:
    """Median time of a step, its logits and the last state."""
    logits, state = step(params, state, tokens)
    jax.block_until_ready((logits, state))
    times = []
    for _ in range(GROUPS):
        start = time.perf_counter()
        for _ in range(steps):
            logits, state = step(params, state, tokens)
        jax.block_until_ready((logits, state))
        times.append((time.perf_counter() - start) / steps)
    return float(np.median(times)), logits, state


def relative(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2)))


def measure(model: k3jax.Model, batch: int, forms: dict[str, Any], ceiling: float) -> dict[str, Any]:
    config = model.config
    rng = np.random.default_rng(batch)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, batch), jnp.int32)
    live = jnp.ones((batch,), bool)

    def kernel_step(params: Any, state: Any, tokens: Any) -> Any:
        out = megakernel.step(params, state, tokens, live, config)
        return out.logits, out.state

    fast = jax.jit(kernel_step, donate_argnums=1)
    state = megakernel.with_kernel(init_state(config, batch, CAPACITY), config)
    one, state = fast(megakernel.operands_only(model.params), state, tokens)
    time_kernel, _, state = seconds(fast, megakernel.operands_only(model.params), state, tokens, STEPS)
    k3jax.check(state)
    distinct = _distinct(config, batch, state)
    moved = config.bytes_per_step(batch, length=STEPS * GROUPS // 2, distinct_experts=distinct).total
    row: dict[str, Any] = {"batch": batch, "bytes": moved, "distinct_experts": distinct}
    row["megakernel_us"] = time_kernel * 1e6
    row["TB/s"] = moved / time_kernel / 1e12
    row["percent_of_ceiling"] = 100 * row["TB/s"] / ceiling
    plain = {name: leaf for name, leaf in model.params.items() if name != "megakernel"}
    for name, options in forms.items():
        xla = jax.jit(
            functools.partial(k3jax.decode_step, config=config, implementation="xla"),
            donate_argnums=1,
            compiler_options=options,
        )
        first, other = xla(plain, init_state(config, batch, CAPACITY), tokens)
        row[f"{name}_us"] = seconds(xla, plain, other, tokens, 4)[0] * 1e6
        row[f"{name}_logits_differ"] = relative(one, first)
    if forms:
        fastest = min(row[f"{name}_us"] for name in forms)
        row["times_faster_than_xla"] = fastest / row["megakernel_us"]
    return row


def _distinct(config: k3jax.K3Config, batch: int, state: Any) -> int:
    """Experts that the last LatentMoE layer of the last step read, from the kernel's workspace."""
    from k3jax.custom_calls.decode_megakernel.operands import workspace
    from k3jax.custom_calls.tables import launch_tables

    plan = megakernel.plan_for(config, batch, megakernel.target_of()[1])
    field = workspace(plan, launch_tables(plan).counters)["route.count"]
    return int(state.kernel["work"][field.offset // 4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--forms", nargs="*", default=["triton", "no_triton"], choices=["triton", "no_triton"]
    )
    parser.add_argument("--read-kernel", help="jax.export artifact of the bulk-copy read kernel")
    parser.add_argument("--ceiling", type=float, default=4.61, help="TB/s, where --read-kernel is not given")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ffi.register()
    ceiling = read_ceiling.measure(given.read_kernel) if given.read_kernel else given.ceiling
    known = {
        "triton": {"xla_gpu_enable_triton_gemm": True},
        "no_triton": {"xla_gpu_enable_triton_gemm": False},
    }
    forms = {name: known[name] for name in given.forms}
    print(
        jax.devices()[0].device_kind, "jax", jax.__version__, f"read ceiling {ceiling:.3f} TB/s", flush=True
    )
    model = k3jax.random_model(k3jax.K3Config.preset("k3-slice", num_layers=given.layers), seed=0)
    model.pack()
    rows = []
    for batch in given.batch:
        rows.append(measure(model, batch, forms, ceiling))
        print(json.dumps(rows[-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps({"ceiling": ceiling, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
