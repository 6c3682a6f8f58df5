"""A loop over the repeating layers, for depth without a long compilation.

K3's layers repeat with period four (KDA, KDA, KDA, MLA) but for the first ones and the last. The
loop stacks the weights and states of the repeats inside the compiled step, one copy of both per
call: right for small models, tests and tracing, wrong where a step's time counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .config import K3Config
from .layers.attn_res import SnapshotBank, SnapshotList, Snapshots

MAX_PERIOD = 12

SCAN_DEPTH = 16
"""From this many layers a small model compiles faster as a loop."""
SCAN_BYTES = 256 << 20
"""A model of at most this many stored bytes is small: copying its weights costs little."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """Layers ``first`` .. ``end`` - 1 as ``groups`` repeats of ``period`` layers."""

    first: int
    period: int
    groups: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.groups


def find_loop(config: K3Config) -> Loop | None:
    """The loop that leaves the fewest layers to compile, or None if nothing repeats."""
    kinds = [(kind, config.is_moe(i)) for i, kind in enumerate(config.layer_types)]
    best: Loop | None = None
    # Layer 0 stays outside: it alone has no snapshot to mix.
    for period in range(1, MAX_PERIOD + 1):
        for first in range(1, min(len(kinds), MAX_PERIOD + 1)):
            end = first + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            loop = Loop(first, period, (end - first) // period)
            if loop.groups >= 2 and loop.end <= len(kinds) and (best is None or _saved(loop) > _saved(best)):
                best = loop
    return best


def _saved(loop: Loop) -> int:
    return (loop.groups - 1) * loop.period


def prefer_scan(config: K3Config) -> bool:
    """Whether a model held by :class:`k3jax.Model` loops over its layers: deep and small."""
    return config.num_hidden_layers >= SCAN_DEPTH and config.checkpoint_bytes() <= SCAN_BYTES


def run(
    loop: Loop,
    layers: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, jax.Array]],
    one: Callable[..., Any],
    config: K3Config,
    pre: jax.Array,
    blocks: Snapshots,
) -> tuple[jax.Array, Snapshots, list[Mapping[str, jax.Array]]]:
    """The layers of ``loop``: running sum, snapshots and new layer states after them.

    Args:
        layers, states: of the whole model.
        one: ``(parameters, kind, starts_block, state, pre, blocks, see) -> (pre, blocks, state)``.
        pre: the running sum [..., D].
        blocks: snapshots so far.
    """
    if not isinstance(blocks, SnapshotList):
        raise TypeError(f"blocks: expected a SnapshotList before the loop, got {type(blocks).__name__}")
    total = -(-config.num_hidden_layers // config.attn_res_block_size)
    taken = len(blocks.blocks)
    empty = jnp.zeros((total - taken, *pre.shape), pre.dtype)
    bank = SnapshotBank(jnp.concatenate([jnp.stack(blocks.blocks), empty]), jnp.int32(taken))

    def stacked(items: Sequence[Any], offset: int) -> Any:
        return jax.tree.map(lambda *a: jnp.stack(a), *items[loop.first + offset : loop.end : loop.period])

    def body(carry: tuple[jax.Array, SnapshotBank], x: Any) -> Any:
        pre, bank = carry
        index, params, state = x
        after = []
        for o in range(loop.period):
            kind = config.layer_types[loop.first + o]
            starts = (index + o) % config.attn_res_block_size == 0
            pre, bank, new = one(params[o], kind, starts, state[o], pre, bank, lambda name, value: None)
            after.append(new)
        return (pre, bank), after

    xs = (
        jnp.arange(loop.first, loop.end, loop.period),
        [stacked(layers, o) for o in range(loop.period)],
        [stacked(states, o) for o in range(loop.period)],
    )
    (pre, bank), after = lax.scan(body, (pre, bank), xs)
    new_states = [
        jax.tree.map(lambda a, g=g: a[g], after[o]) for g in range(loop.groups) for o in range(loop.period)
    ]
    # How many blocks have started is known: the bank goes back to a list.
    done = sum(config.starts_block(i) for i in range(loop.end))
    return pre, SnapshotList(tuple(bank.bank[:done])), new_states


__all__ = ["Loop", "find_loop", "prefer_scan", "run"]
