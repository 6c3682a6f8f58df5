"""Skinny GEMM: matrices times at most 8 tokens, read once at memory speed, several in one launch.

::

    y[b, n] = sum_k x[b, k] W[n, k]        W as in the parameter tree, [out, in] bfloat16
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...layers.linear import einsum
from .._apart import axes_of
from .._launch import Interpret, launch, require, sm_count
from . import best, configs, kernel
from .configs import ROWS, SWIZZLED_COLUMNS, TOKENS, Config
from .kernel import Epilogue, Plan, Refs
from .partition import partition

SITU_CONSTANTS = (4.0, 25.0)
"""K3's activation_situ_beta and activation_situ_linear_beta."""


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["epilogue", "x"])
@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix of a launch, or a gate and an up matrix.

    Attributes:
        weights: bfloat16 [N, K]; two of them, gate then up, with SITU.
        epilogue: ROUND gives bfloat16 [8, N], WIDE float32 [8, N], BEST that and int32 [8], the lowest
            id of each row's greatest as ``lax.argmax`` has it, SITU bfloat16 [8, N], PARTIAL
            float32 [slots, 8, N] whose sum over slots, in order, is the product.
        x: index of the activations it reads.
    """

    weights: tuple[Any, ...]
    epilogue: Epilogue = Epilogue.ROUND
    x: int = 0


def supports(xs: Sequence[Any], products: Sequence[Product]) -> tuple[str, ...]:
    """Why the kernel does not take these shapes and dtypes; () if it does.

    Args:
        xs: arrays or shapes [8, K].
        products: weights as arrays or shapes.
    """
    reasons = []
    for i, x in enumerate(xs):
        if len(x.shape) != 2 or x.shape[0] != TOKENS or x.dtype != jnp.bfloat16:
            reasons.append(f"x {i}: expected bfloat16 [8, K], got {x.dtype} {tuple(x.shape)}")
        elif x.shape[1] % SWIZZLED_COLUMNS:
            reasons.append(f"x {i}: expected K in multiples of 64, got {x.shape[1]}")
    if misfits := _misfits(len(xs), products):
        return (*reasons, *misfits)
    partial_sums = {product.epilogue is Epilogue.PARTIAL for product in products}
    if len(partial_sums) > 1:
        reasons.append("products: expected PARTIAL for all or none")
    if sum(product.epilogue is Epilogue.BEST for product in products) > 1:
        reasons.append("products: expected at most one BEST")
    if partial_sums == {False} and len({xs[product.x].shape[-1] for product in products}) > 1:
        reasons.append("products: expected one inner width K unless all are PARTIAL")
    for i, product in enumerate(products):
        for w in product.weights:
            if len(w.shape) != 2 or w.dtype != jnp.bfloat16 or w.shape[1] != xs[product.x].shape[-1]:
                k = xs[product.x].shape[-1]
                reasons.append(f"product {i}: expected bfloat16 [N, {k}], got {w.dtype} {tuple(w.shape)}")
        n, *others = (w.shape[0] for w in product.weights)
        if n < 1 or any(rows != n for rows in others):
            reasons.append(f"product {i}: expected equal numbers of rows, at least 1, got {[n, *others]}")
        if product.epilogue is Epilogue.PARTIAL and n % ROWS:
            reasons.append(f"product {i}: expected N in multiples of 64 for PARTIAL, got {n}")
    return tuple(reasons)


def _misfits(inputs: int, products: Sequence[Product]) -> list[str]:
    """Reasons in how many weights and inputs there are, with which no shape can be looked at."""
    found = [] if products else ["products: expected at least one, got none"]
    for i, product in enumerate(products):
        wanted = 2 if product.epilogue is Epilogue.SITU else 1
        if len(product.weights) != wanted:
            found.append(f"product {i}: expected {wanted} weights, got {len(product.weights)}")
        if not 0 <= product.x < inputs:
            found.append(f"product {i}: expected x in 0..{inputs - 1}, got {product.x}")
    return found


def reference(
    xs: Sequence[jax.Array], products: Sequence[Product], situ: tuple[float, float] = SITU_CONSTANTS
) -> tuple[Any, ...]:
    """The results in plain jnp; PARTIAL has one slot."""
    results = []
    for product in products:
        sums = [einsum("bk,nk->bn", xs[product.x], w) for w in product.weights]
        match product.epilogue:
            case Epilogue.ROUND:
                results.append(sums[0].astype(jnp.bfloat16))
            case Epilogue.WIDE:
                results.append(sums[0])
            case Epilogue.BEST:
                results.append((sums[0], best.greedy(sums[0])))
            case Epilogue.PARTIAL:
                results.append(sums[0][None])
            case Epilogue.SITU:
                b, c = situ
                g, u = (s.astype(jnp.bfloat16).astype(jnp.float32) for s in sums)
                y = b * jnp.tanh(g / b) * jax.nn.sigmoid(g) * (c * jnp.tanh(u / c))
                results.append(y.astype(jnp.bfloat16))
    return tuple(results)


def skinny_gemm(
    xs: Sequence[jax.Array],
    products: Sequence[Product],
    situ: tuple[float, float] = SITU_CONSTANTS,
    *,
    interpret: Interpret = False,
    sms: int | None = None,
    config: Config | None = None,
) -> tuple[Any, ...]:
    """All products in one launch; float32 sums over k in a fixed order.

    Args:
        xs: bfloat16 [8, K] activations; rows past the batch are multiplied like any other.
        products: what to compute; see :class:`Product`.
        situ: b and c of SiTU ``b tanh(g/b) sigmoid(g) c tanh(u/c)``.
        config: tile sizes; default :func:`configs.choose`.

    Returns:
        one array per product, two of a BEST one.

    Raises:
        NotImplementedError: :func:`supports` has reasons.
    """
    require("skinny_gemm", supports(xs, products))
    # A padded weight is made just before the launch: it must not be read before that is over.
    constant = all(_padded_rows(w.shape[0]) == w.shape[0] for product in products for w in product.weights)
    dependent = constant and not interpret
    plan = make_plan(xs, products, situ, sm_count(interpret, sms), config, dependent=dependent)
    counts = [len(product.weights) for product in products]
    scored = [i for i, product in enumerate(products) if product.epilogue is Epilogue.BEST]

    def run(*refs: Any, **ring: Any) -> None:
        flat = list(refs)
        x = [flat.pop(0) for _ in xs]
        w = [[flat.pop(0) for _ in range(count)] for count in counts]
        kernel.body(plan, Refs(x=x, w=w, out=flat, **ring))

    axes = [axes_of(xs[p.x]).union(*map(axes_of, p.weights)) for p in products]
    weights = [_padded(w) for product in products for w in product.weights]
    outs = launch(
        run,
        [*xs, *weights],
        out_type=(*(_result(plan, i) for i in range(len(products))), *_kept(plan)),
        scratch_types=kernel.scratch(plan),
        ctas=plan.partition.ctas,
        interpret=interpret,
        name="k3_skinny_gemm",
        out_axes=[*axes, *[axes[i] for i in scored] * 2],
    )
    results: list[Any] = [
        out if out.shape[-1] == n else out[..., :n] for out, n in zip(outs, plan.ids, strict=False)
    ]
    for i in scored:
        results[i] = (results[i], best.pick(*outs[-2:]))
    return tuple(results)


def make_plan(
    xs: Sequence[Any],
    products: Sequence[Product],
    situ: tuple[float, float],
    ctas: int,
    config: Config | None = None,
    *,
    dependent: bool = True,
) -> Plan:
    """What the kernel is specialised to, for arrays or shapes.

    Args:
        ctas: CTAs that share the weights.
        config: as in :func:`skinny_gemm`.
        dependent: whether ``config.overlap`` can be had; the interpreter knows no launches.
    """
    gated = any(product.epilogue is Epilogue.SITU for product in products)
    split = products[0].epilogue is Epilogue.PARTIAL
    rows = tuple(_padded_rows(product.weights[0].shape[0]) for product in products)
    widths = [x.shape[1] for x in xs]
    # Split sums of two overlapping blocks would not be cut at the same columns.
    whole_pairs = not split or all(n % (2 * ROWS) == 0 for n in rows)
    config = configs.choose(widths) if config is None else config
    config = configs.fit(
        config,
        widths,
        blocks=2 if gated else config.blocks if whole_pairs else 1,
        best=any(product.epilogue is Epilogue.BEST for product in products),
    )
    tiles = tuple(
        -(-n // (ROWS * (1 if product.epilogue is Epilogue.SITU else config.blocks)))
        for n, product in zip(rows, products, strict=True)
    )
    chunks = tuple(widths[product.x] // config.columns for product in products)
    return Plan(
        config=config,
        partition=partition(tiles, chunks, ctas, split),
        epilogues=tuple(product.epilogue for product in products),
        inputs=tuple(product.x for product in products),
        rows=rows,
        ids=tuple(product.weights[0].shape[0] for product in products),
        situ=situ,
        dependent=dependent and config.overlap,
    )


def _result(plan: Plan, p: int) -> jax.ShapeDtypeStruct:
    shape: tuple[int, ...] = (TOKENS, plan.rows[p])
    if plan.epilogues[p] is Epilogue.PARTIAL:
        return jax.ShapeDtypeStruct((plan.partition.slots(p), *shape), jnp.float32)
    wide = plan.epilogues[p] in (Epilogue.WIDE, Epilogue.BEST)
    return jax.ShapeDtypeStruct(shape, jnp.float32 if wide else jnp.bfloat16)


def _kept(plan: Plan) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of a BEST product, keys and ids of the best of each CTA's lanes."""
    kept = jax.ShapeDtypeStruct((plan.partition.ctas, TOKENS, ROWS), jnp.int32)
    return (kept, kept) if plan.best else ()


def _padded_rows(n: int) -> int:
    return max(ROWS, -(-n // 8) * 8)


def _padded(w: jax.Array) -> jax.Array:
    """The matrix with rows that TMA can address: a copy for fewer than 64 rows or no multiple of 8.

    At K3's widths no matrix needs one; b_proj of small models and of shards does.
    """
    extra = _padded_rows(w.shape[0]) - w.shape[0]
    return jnp.pad(w, ((0, extra), (0, 0))) if extra else w


__all__ = [
    "SITU_CONSTANTS",
    "Config",
    "Epilogue",
    "Product",
    "make_plan",
    "reference",
    "skinny_gemm",
    "supports",
]
