"""Bandwidth of the Pallas ops at K3's shapes on a GPU, each checked against XLA in the same run.

    python tests/bench/pallas_ops.py --read-kernel read.bin --out results.json
    python tests/bench/pallas_ops.py --ceiling 4.5 --cases kda_in --configs 2x64x128x6 1x64x256x6 --xla

Every case calls its op ``--calls`` times in one jitted function, on weight copies in rotation that
together exceed the L2 cache, and reports the median of ``--rounds`` of ``--repeats`` such functions
in flight: time per call (launch included), TB/s of weights, and the share of the read ceiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import add_ceiling, ceiling_of, normal

from k3jax.pallas import attn_res, router
from k3jax.pallas.skinny_gemm import Config, Epilogue, Product, configs, reference, skinny_gemm

L2_BYTES = 50 << 20
ROUND, WIDE, SITU, PARTIAL = Epilogue.ROUND, Epilogue.WIDE, Epilogue.SITU, Epilogue.PARTIAL

GEMMS: dict[str, tuple[list[int], list[tuple[int, Epilogue, int]]]] = {
    # name: (inner widths, [(rows, epilogue, which input)])
    "kda_in": ([7168], [(12288, ROUND, 0)] * 4 + [(128, ROUND, 0), (96, ROUND, 0)]),
    "kda_out": ([12288], [(7168, PARTIAL, 0)]),
    "mla_in": ([7168], [(1536, ROUND, 0), (576, ROUND, 0), (12288, ROUND, 0)]),
    "mla_q_b": ([1536], [(18432, ROUND, 0)]),
    "moe_in": ([7168], [(896, WIDE, 0), (3584, ROUND, 0), (6144, SITU, 0)]),
    "moe_out": ([3584, 6144], [(7168, PARTIAL, 0), (7168, PARTIAL, 1)]),
    "dense_in": ([7168], [(33792, SITU, 0)]),
    "dense_out": ([33792], [(7168, PARTIAL, 0)]),
    "head": ([7168], [(163840, WIDE, 0)]),
}
SMALL = ("attn_res", "router")
DEFAULT_CONFIGS = ("2x64x128x6",)


@dataclasses.dataclass(frozen=True)
class Timing:
    """What the command line asks for."""

    calls: int
    repeats: int
    rounds: int
    ceiling: float


def median_seconds(run: Callable[[], Any], timing: Timing) -> float:
    """Median seconds of one of ``timing.calls`` calls that ``run`` makes."""
    jax.block_until_ready(run())
    jax.block_until_ready(run())
    seconds = []
    for _ in range(timing.rounds):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(timing.repeats)])
        seconds.append((time.perf_counter() - start) / (timing.repeats * timing.calls))
    return statistics.median(seconds)


def chained(one: Callable[[Any, int], Any], inputs: Any, calls: int) -> list[Any]:
    """Results of ``one(inputs, i)``; each call waits for the one before, and none are merged."""
    results: list[Any] = []
    for i in range(calls):
        inputs, results = jax.lax.optimization_barrier((inputs, results))
        results = [*results, one(inputs, i)]
    return results


def products_of(name: str, weights: Sequence[jax.Array]) -> list[Product]:
    """The launch's products, taking weights off the list in order."""
    rest, products = list(weights), []
    for _, epilogue, x in GEMMS[name][1]:
        count = 2 if epilogue is SITU else 1
        products.append(Product(tuple(rest.pop(0) for _ in range(count)), epilogue, x))
    return products


def relative_error(name: str, got: Sequence[jax.Array], want: Sequence[jax.Array]) -> float:
    """Largest difference over the largest value, over all products."""
    worst = 0.0
    for (_, epilogue, _), a, b in zip(GEMMS[name][1], got, want, strict=True):
        if epilogue is PARTIAL:
            a, b = a.sum(axis=0), b.sum(axis=0)
        a, b = (np.asarray(v.astype(jnp.float32)) for v in (a, b))
        error = np.abs(a - b).max() / np.abs(b).max()
        # NaN must not pass for small: max() would drop it.
        worst = max(worst, float(error) if np.isfinite(error) else float("inf"))
    return worst


def bench_gemm(
    name: str, variants: dict[str, Config], timing: Timing, batch: int, with_xla: bool
) -> list[dict[str, Any]]:
    widths, rows = GEMMS[name]
    xs = [normal(i, (8, k)).at[batch:].set(0) for i, k in enumerate(widths)]
    shapes = [(n, widths[x]) for n, e, x in rows for _ in range(2 if e is SITU else 1)]
    size = 2 * sum(n * k for n, k in shapes)
    copies = max(2, -(-4 * L2_BYTES // size))
    weights = [[normal(100 * c + i, shape) for i, shape in enumerate(shapes)] for c in range(copies)]

    def repeated(one: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda xs, ws: chained(lambda xs, i: one(xs, ws[i % copies]), xs, timing.calls))

    def xla(xs: Any, ws: Any) -> Any:
        return reference(xs, products_of(name, ws))

    want = jax.jit(xla)(xs, weights[1])
    results = []
    if with_xla:
        run = repeated(xla)
        seconds = median_seconds(lambda: run(xs, weights), timing)
        results.append(row(name, "xla", size, seconds, timing, 0.0))
    for label, config in variants.items():

        def pallas(xs: Any, ws: Any, config: Config = config) -> Any:
            return skinny_gemm(xs, products_of(name, ws), config=config)

        run = repeated(pallas)
        got = run(xs, weights)[1]
        error = relative_error(name, got, want)
        seconds = median_seconds(lambda run=run: run(xs, weights), timing)
        results.append(row(name, label, size, seconds, timing, error))
    return results


def row(name: str, label: str, size: int, seconds: float, timing: Timing, error: float) -> dict[str, Any]:
    rate = size / seconds / 1e12
    result = {
        "case": name,
        "config": label,
        "bytes": size,
        "microseconds": round(seconds * 1e6, 2),
        "tb_per_s": round(rate, 3),
        "ceiling_share": round(rate / timing.ceiling, 3),
        "relative_error": error,
    }
    print(
        f"{name:10s} {label:20s} {size / 1e6:9.1f} MB {result['microseconds']:9.2f} us "
        f"{rate:6.3f} TB/s {result['ceiling_share']:6.1%} error {error:.1e}",
        flush=True,
    )
    return result


def bench_small(name: str, timing: Timing, batch: int) -> dict[str, Any]:
    """The ops between matrices: time is what counts."""
    if name == "attn_res":
        d, bf = 7168, jnp.bfloat16
        pre, gain, norm = normal(0, (8, d)), normal(1, (d,)), normal(2, (d,))
        proj = normal(3, (1, d)) * bf(0.02)
        snapshots = [normal(10 + i, (8, d)) for i in range(8)]
        deltas = [normal(20 + i, (3, 8, d), dtype=jnp.float32) for i in range(2)]
        args: tuple[Any, ...] = (pre, deltas, snapshots, norm, proj, gain, 1e-5)
        op, plain = attn_res.attn_res, attn_res.reference
        arrays, static = args[:6], args[6:]
    else:
        logits = normal(0, (8, 896), dtype=jnp.float32)
        bias = normal(1, (896,), dtype=jnp.float32)
        arrays, static = (logits, bias, jnp.ones((batch,), jnp.int32)), (16,)
        op, plain = router.route, router.reference

    @jax.jit
    def chain(*arrays: Any) -> Any:
        return chained(lambda arrays, _: op(*arrays, *static), arrays, timing.calls)

    got = jax.tree.leaves(chain(*arrays)[0])
    want = jax.tree.leaves(jax.jit(lambda *a: plain(*a, *static))(*arrays))
    error = 0.0
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a.astype(jnp.float32)), np.asarray(b.astype(jnp.float32))
        difference = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        error = max(error, float(difference) if np.isfinite(difference) else float("inf"))
    seconds = median_seconds(lambda: chain(*arrays), timing)
    size = sum(a.nbytes for a in jax.tree.leaves(arrays))
    return row(name, f"batch {batch}", size, seconds, timing, error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[*GEMMS, *SMALL], choices=[*GEMMS, *SMALL])
    parser.add_argument("--configs", nargs="*", default=DEFAULT_CONFIGS, choices=list(configs.VARIANTS))
    parser.add_argument("--batch", type=int, default=1, help="rows that are not zero, 1..8")
    parser.add_argument("--calls", type=int, default=8, help="calls in one jitted function")
    parser.add_argument("--repeats", type=int, default=12, help="such functions in flight in a round")
    parser.add_argument("--rounds", type=int, default=9)
    add_ceiling(parser)
    parser.add_argument("--xla", action="store_true", help="also time XLA's own products")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    if device.platform != "gpu":
        parser.error(f"needs a GPU, jax sees {device.platform}")
    timing = Timing(args.calls, args.repeats, args.rounds, ceiling_of(parser, args))
    variants = {name: configs.VARIANTS[name] for name in args.configs}
    rows: list[dict[str, Any]] = []
    for name in args.cases:
        if name in SMALL:
            rows.append(bench_small(name, timing, args.batch))
        else:
            rows += bench_gemm(name, variants, timing, args.batch, args.xla)
    report = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "batch": args.batch,
        "calls": args.calls,
        "repeats": args.repeats,
        "rounds": args.rounds,
        "date": datetime.date.today().isoformat(),
        "ceiling_tb_per_s": timing.ceiling,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [r for r in rows if not r["relative_error"] < 1e-2]
    for r in wrong:
        print(f"WRONG: {r['case']} {r['config']}: relative error {r['relative_error']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
