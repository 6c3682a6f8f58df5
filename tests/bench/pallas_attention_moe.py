"""KDA, MLA and expert kernels of the Pallas path on one GPU, at Kimi K3's shapes.

Every op is first compared with its plain jnp reference on the same inputs, then timed: calls on
several weight copies in rotation, larger together than the L2 cache, so that memory serves every
byte; a round is many calls in flight inside one compiled program, and the median over rounds counts::

    python tests/bench/pallas_attention_moe.py --read-kernel read.bin --json results.json

Bytes are what a call must read and write (weights, state, cache of the real lengths); "share" is
their rate over the read ceiling of the card, in TB/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import add_ceiling, ceiling_of, normal

from k3jax import K3Config
from k3jax.pallas import experts as experts_op
from k3jax.pallas import kda as kda_op
from k3jax.pallas import mla as mla_op
from k3jax.quant import MXFP4

K3 = K3Config.preset("k3")
BF16 = jnp.bfloat16
ROUNDS = 7


@dataclasses.dataclass
class Timed:
    """One row of the result.

    Attributes:
        op, batch, detail: what ran.
        bytes: read and written by a call.
        us: of a call, median over rounds; rounds: all of them.
        error: relative RMS against the reference of the same run.
    """

    op: str
    batch: int
    detail: str
    bytes: int
    us: float
    rounds: list[float]
    error: float

    @property
    def tb_per_s(self) -> float:
        return self.bytes / self.us * 1e-6


def error_of(got: Any, want: Any) -> float:
    """Relative RMS, the worst over the arrays of the two trees."""

    def one(g: jax.Array, w: jax.Array) -> float:
        a, b = np.asarray(g).astype(np.float64), np.asarray(w).astype(np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(one, got, want)))


def time_calls(program: Callable[..., Any], args: list[Any], calls: int, repeats: int) -> list[float]:
    """Microseconds per call: rounds of ``repeats`` dispatches of a program of ``calls`` calls.

    The program returns its donated first argument's successor, which the next dispatch takes.
    """
    compiled = jax.jit(program, donate_argnums=0).lower(*args).compile()
    state = args[0]
    state = jax.block_until_ready(compiled(state, *args[1:]))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeats):
            state = compiled(state, *args[1:])
        jax.block_until_ready(state)
        rounds.append((time.perf_counter() - start) / (repeats * calls) * 1e6)
    return rounds


def bench_kda(batch: int) -> Timed:
    heads, channels, copies = K3.kda_num_heads, K3.kda_num_heads * 128, 8
    layers = [
        {
            **{f"{n}_conv1d": normal(i, (channels, 1, 4), 0.5, jnp.float32) for i, n in enumerate("qkv")},
            "f_b_proj": normal(10 + c, (channels, 128), 0.1),
            "A_log": jnp.linspace(0.0, 2.7, heads, dtype=jnp.float32),
            "dt_bias": normal(3, (channels,), 3.0, jnp.float32),
            "o_norm": jnp.ones((128,), jnp.float32),
        }
        for c in range(copies)
    ]
    raw = [normal(20 + i, (8, channels)) for i in range(4)]
    raw += [normal(24, (8, heads)), normal(25, (8, 128))]
    active = jnp.ones((batch,), jnp.int32)

    def states(base: int) -> tuple[jax.Array, jax.Array]:
        return (
            normal(base, (batch, heads, 128, 128), 1.0, jnp.float32),
            normal(base + 1, (batch, 3, 3 * channels)),
        )

    got = jax.jit(partial(kda_op.kda, config=K3))(layers[0], *raw, *states(30), active)
    want = jax.jit(partial(kda_op.reference, config=K3))(layers[0], *raw, *states(30), active)
    error = error_of((got[0][:batch], *got[1:]), want)

    def program(carry: list[Any], layers: list[Any], raw: list[Any]) -> list[Any]:
        out = []
        for layer, (S, conv, y) in zip(layers, carry, strict=True):
            y, S, conv = kda_op.kda(layer, y, *raw[1:], S=S, conv=conv, active=active, config=K3)
            out.append((S, conv, y))
        return out

    carry = [(*states(40 + 2 * c), jnp.array(raw[0])) for c in range(copies)]
    rounds = time_calls(program, [carry, layers, raw], copies, 20)
    moved = batch * (2 * heads * 128 * 128 * 4 + 2 * 3 * 3 * channels * 2 + 5 * channels * 2)
    moved += channels * 128 * 2 + 3 * channels * 16 + channels * 4
    return Timed("kda", batch, "state and conv in place", moved, statistics.median(rounds), rounds, error)


def bench_mla(batch: int, length: int, capacity: int) -> Timed:
    heads, latent, copies = K3.num_attention_heads, K3.kv_lora_rank, 4
    layers = [
        {
            "kv_b_proj": normal(c, (heads * 256, latent), latent**-0.5),
            "kv_a_layernorm": jnp.ones((latent,), BF16),
        }
        for c in range(copies)
    ]
    q, kv = normal(50, (8, heads * 192)), normal(51, (8, latent + 64))
    gate = normal(52, (8, heads * 128))
    lengths = jnp.full((batch,), length, jnp.int32) - jnp.arange(batch, dtype=jnp.int32)
    active = jnp.ones((batch,), jnp.int32)
    got = jax.jit(partial(mla_op.mla, config=K3))(
        layers[0], q, kv, gate, normal(60, (batch, capacity, latent + 64)), lengths, active
    )
    want = jax.jit(partial(mla_op.reference, config=K3))(
        layers[0], q, kv, gate, normal(60, (batch, capacity, latent + 64)), lengths, active
    )
    error = error_of((got[0][:batch], got[1]), want)
    del got, want

    def program(carry: list[Any], layers: list[Any], q: Any, kv: Any) -> list[Any]:
        out = []
        for layer, (cache, gate) in zip(layers, carry, strict=True):
            y, cache = mla_op.mla(layer, q, kv, gate, cache, lengths, active, K3)
            out.append((cache, y))
        return out

    carry = [(normal(60 + c, (batch, capacity, latent + 64)), jnp.array(gate)) for c in range(copies)]
    rounds = time_calls(program, [carry, layers, q, kv], copies, 10)
    moved = heads * 256 * latent * 2 + int(jnp.sum(lengths + 1)) * (latent + 64) * 2
    detail = f"{length} tokens, capacity {capacity}"
    return Timed("mla", batch, detail, moved, statistics.median(rounds), rounds, error)


def random_experts(count: int, key: int) -> dict[str, MXFP4]:
    """Packed experts of the release's widths, made on the device."""
    latent, width = K3.routed_expert_hidden_size, K3.moe_intermediate_size

    def leaf(key: int, rows: int, columns: int) -> MXFP4:
        codes, scales = jax.random.split(jax.random.key(key))

        def draw(k: jax.Array, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
            return jax.random.randint(k, shape, low, high, jnp.int32).astype(jnp.uint8)

        return MXFP4(
            jax.jit(partial(draw, shape=(count, rows, columns // 2), low=0, high=256))(codes),
            jax.jit(partial(draw, shape=(count, rows, columns // 32), low=116, high=121))(scales),
        )

    return {
        "w1": leaf(key, width, latent),
        "w3": leaf(key + 1, width, latent),
        "w2": leaf(key + 2, latent, width),
    }


def routing(ids: np.ndarray, count: int) -> tuple[Any, ...]:
    """ids, weights, slots, count, slot_of as the router lists them."""
    distinct = np.unique(ids)
    slots = np.full(128, -1, np.int32)
    slots[: len(distinct)] = distinct
    weights = np.full(ids.shape, 1.0 / ids.shape[1], np.float32)
    slot_of = np.searchsorted(distinct, ids).astype(np.int32)
    arrays = (ids, weights, slots, np.asarray([len(distinct)], np.int32), slot_of)
    return tuple(jnp.asarray(a) for a in arrays)


def bench_experts(batch: int, experts: dict[str, MXFP4], count: int) -> Timed:
    rng = np.random.default_rng(batch)
    slots, copies = K3.num_experts_per_token, 6
    picks = [np.stack([rng.permutation(count)[:slots] for _ in range(batch)]) for _ in range(copies)]
    routes = [routing(ids.astype(np.int32), count) for ids in picks]
    latent = normal(70, (8, K3.routed_expert_hidden_size))

    @jax.jit
    def one(experts: Any, latent: Any, route: Any) -> jax.Array:
        return experts_op.experts(experts, latent, *route[1:], config=K3)

    got = one(experts, latent, routes[0])
    want = jax.jit(partial(experts_op.reference, config=K3))(experts, latent[:batch], *routes[0][:2])
    error = error_of(got, want)

    def program(carry: jax.Array, experts: Any, routes: list[Any]) -> jax.Array:
        for route in routes:
            y = experts_op.experts(experts, carry, *route[1:], config=K3)
            # The next call reads this one's result, so that calls run one after another.
            carry = carry.at[:batch].set((y * 1e-3).astype(BF16))
        return carry

    rounds = time_calls(program, [jnp.array(latent), experts, routes], copies, 10)
    distinct = statistics.mean(len(np.unique(ids)) for ids in picks)
    per_expert = sum(leaf.nbytes for leaf in experts.values()) // count
    detail = f"{distinct:.1f} distinct of {count}"
    return Timed(
        "experts", batch, detail, int(distinct * per_expert), statistics.median(rounds), rounds, error
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    add_ceiling(parser)
    parser.add_argument("--experts", type=int, default=224, help="resident experts (17.5 MB each)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8], help="rows of kda and experts")
    parser.add_argument("--only", choices=("kda", "mla", "experts"), help="one op alone")
    args = parser.parse_args()

    ceiling = ceiling_of(parser, args)
    jobs: list[Callable[[], Timed]] = []
    if args.only in (None, "kda"):
        jobs += [partial(bench_kda, batch) for batch in args.batch]
    if args.only in (None, "mla"):
        jobs += [
            partial(bench_mla, batch, length, capacity)
            for batch, length, capacity in (
                (1, 512, 1024),
                (1, 8000, 8192),
                (8, 1000, 1024),
                (1, 65000, 65536),
            )
        ]
    if args.only in (None, "experts"):
        resident = random_experts(args.experts, 80)
        jobs += [partial(bench_experts, batch, resident, args.experts) for batch in args.batch]
    rows, failed = [], False
    for job in jobs:
        try:
            row = job()
        except Exception as error:  # noqa: BLE001 (one op's failure is reported, the others still run)
            print(f"{job.func.__name__}{job.args[:1]}: FAILED {type(error).__name__}: {str(error)[:600]}")  # type: ignore[attr-defined]
            failed = True
            continue
        rows.append(row)
        share = row.tb_per_s / ceiling
        print(
            f"{row.op:8s} B={row.batch} {row.us:9.1f} us {row.bytes / 1e6:9.1f} MB {row.tb_per_s:6.3f} TB/s "
            f"{share:6.1%} of {ceiling}  error {row.error:.1e}  ({row.detail})",
            flush=True,
        )
        if row.error > 1e-2:
            print(f"{row.op}: error {row.error:.2e} above 1e-2: wrong numbers")
            failed = True
    if args.json:
        document = {
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "ceiling_tb_per_s": ceiling,
            "rows": [
                {**dataclasses.asdict(r), "tb_per_s": r.tb_per_s, "share": r.tb_per_s / ceiling} for r in rows
            ],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
