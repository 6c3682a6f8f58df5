"""A small bfloat16 K3 whose shares the Pallas kernels take, over a plan: "pallas-interpret" against "xla"."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import k3jax
from k3jax import checkpoints, mesh, sharded_step
from k3jax.state import STATUS_BAD_TOKEN, STATUS_FULL, init_state
from support.compare import assert_close
from support.tiny_model import assert_row_bit_equal

MAX_LENGTH = 256
STEP = 2e-2
STEP_WHY = "the same bfloat16 roundings (2^-9 each) of float32 sums in another order, through all layers"
WEIGHT = 5e-3
"""Largest difference of a mixing weight: bfloat16 noise of the router's input, sigmoid's slope 1/4."""


@functools.cache
def config(ways: int = 4) -> Any:
    """Two layers, KDA with the dense FFN and MLA with a LatentMoE; what a mesh cuts divides by ``ways``.

    Every width is the least that the kernels take of a share; experts are one or two more than ranks.
    """
    nano = k3jax.K3Config.from_pretrained(checkpoints.resolve("nano"))
    return dataclasses.replace(
        nano, num_hidden_layers=2, layer_types=("kda", "mla"), hidden_size=128, vocab_size=50 * ways,
        intermediate_size=64 * ways, kda_num_heads=ways, kda_a_log_size=ways, num_attention_heads=ways,
        num_experts=ways + ways // 2, num_shared_experts=2, moe_intermediate_size=32 * ways,
        routed_expert_hidden_size=64 * ways, num_experts_per_token=2, attn_res_block_size=1,
        eos_token_id=None, max_position_embeddings=512,
    )  # fmt: skip


@functools.cache
def model(ways: int = 4) -> Any:
    """On one device."""
    return k3jax.random_model(config(ways), seed=11, implementation="xla")


@functools.cache
def step() -> Any:
    names = ("config", "plan", "implementation", "routing")
    return jax.jit(sharded_step.decode_step, static_argnames=names)


@dataclasses.dataclass(frozen=True)
class Before:
    """A state over a plan and what a step is given.

    Attributes:
        config: the architecture.
        params, state: of the plan.
        tokens: int32 [padded rows]; active: bool [padded rows].
        runs: the rows that take their token.
    """

    config: Any
    params: Any
    state: Any
    tokens: np.ndarray
    active: np.ndarray
    runs: list[int]


def before(plan: mesh.MeshPlan, batch: int, special: bool = False, ways: int = 4) -> Before:
    """Rows of 0..130 tokens, random all through.

    Args:
        special: row 1 is not active, row 2 is full, row 3's token is not in the vocabulary.
        ways: of :func:`config`.
    """
    c, rng = config(ways), np.random.default_rng([17, batch])
    state = init_state(c, batch, MAX_LENGTH, jnp.bfloat16)
    layers = jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32), a.dtype), state.layers
    )
    lengths = np.array([5, 0, 130, 64, 3, 127], np.int32)[np.arange(batch) % 6]
    rows = plan.padded(batch)
    tokens = np.pad(rng.integers(0, c.vocab_size, batch).astype(np.int32), (0, rows - batch))
    active = np.arange(rows) < batch
    runs = set(range(batch))
    if special:
        active[1], lengths[2], tokens[3] = False, MAX_LENGTH, c.vocab_size
        runs -= {1, 2, 3}
    state = dataclasses.replace(state, layers=layers, lengths=jnp.asarray(lengths))
    params = mesh.arrange(model(ways).params, c, plan)
    return Before(c, params, mesh.to_plan(state, c, plan), tokens, active, sorted(runs))


def run(plan: mesh.MeshPlan, start: Before, implementation: str) -> Any:
    """(logits, state, routing), compiled."""
    return step()(
        start.params, start.state, start.tokens, start.active,
        config=start.config, plan=plan, implementation=implementation, routing=True,
    )  # fmt: skip


def compare(
    plan: mesh.MeshPlan, batch: int, special: bool = False, ways: int = 4, name: str = "pallas-interpret"
) -> None:
    """Fail unless a step is that of "xla": logits, states, routing, and the rows that do not run."""
    start = before(plan, batch, special, ways)
    want, expected, chose = run(plan, start, "xla")
    got, after, chosen = run(plan, start, name)
    runs = start.runs
    assert_close("logits", np.asarray(got)[runs], np.asarray(want)[runs], STEP, STEP_WHY)
    assert np.array_equal(np.asarray(after.lengths), np.asarray(expected.lengths))
    assert np.array_equal(np.asarray(after.status), np.asarray(expected.status))
    for i, layer in enumerate(expected.layers):
        for leaf_name, leaf in layer.items():
            mine, theirs = (np.asarray(a)[runs] for a in (after.layers[i][leaf_name], leaf))
            assert_close(f"layer {i}, {leaf_name}", mine, theirs, STEP, STEP_WHY)
            if leaf_name == "cache":
                at = (runs, np.asarray(start.state.lengths)[runs])
                mine, theirs = (np.asarray(a)[at] for a in (after.layers[i][leaf_name], leaf))
                assert_close(f"layer {i}, the row written", mine, theirs, STEP, STEP_WHY)
    assert chosen.keys() == chose.keys() == {"layers.1.topk_ids", "layers.1.topk_w"}
    ids = [np.sort(np.asarray(x["layers.1.topk_ids"])[runs], axis=-1) for x in (chosen, chose)]
    assert np.array_equal(ids[0], ids[1])
    weights = [np.asarray(x["layers.1.topk_w"])[runs] for x in (chosen, chose)]
    assert np.abs(weights[0] - weights[1]).max() <= WEIGHT
    if special:
        check_rows_that_do_not_run(start, np.asarray(got), after)


def check_rows_that_do_not_run(start: Before, logits: np.ndarray, after: Any) -> None:
    assert not logits[1].any()
    assert np.isnan(logits[2:4]).all()
    assert np.asarray(after.status)[1:4].tolist() == [0, STATUS_FULL, STATUS_BAD_TOKEN]
    kept = dataclasses.replace(after, status=jnp.zeros_like(start.state.status))
    for row in (1, 2, 3):
        assert_row_bit_equal(kept, row, start.state)
