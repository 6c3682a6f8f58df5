"""``implementation="pallas"`` over plans of NVIDIA GPUs: one device's bits, and two devices' sums."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import k3jax
from k3jax import mesh, sharded_step
from support import pallas_mesh
from support.tiny_model import assert_bit_equal

pytestmark = pytest.mark.gpu


def plan_of(tensor: int, data: int = 1, **options: Any) -> mesh.MeshPlan:
    return mesh.MeshPlan(data, tensor, devices=tuple(jax.devices("gpu")[: data * tensor]), **options)


@pytest.mark.parametrize("batch", [1, 5, 8])
def test_a_plan_of_one_gpu_gives_the_bits_of_no_plan(batch: int) -> None:
    plan = plan_of(1)
    start = pallas_mesh.before(plan, batch, special=batch > 4)
    logits, after, _ = pallas_mesh.run(plan, start, "pallas")
    step = jax.jit(k3jax.decode_step, static_argnames=("config", "implementation"))
    want, expected = step(
        pallas_mesh.model().params, mesh.from_plan(start.state), start.tokens, start.active,
        config=start.config, implementation="pallas",
    )  # fmt: skip
    assert_bit_equal(np.asarray(logits), np.asarray(want), "logits")
    assert_bit_equal(mesh.from_plan(after), expected, "state")


def test_a_donated_state_is_updated_in_place() -> None:
    """S and the latent cache; the convolution's taps are joined and cut, a few kilobytes a row."""
    plan = plan_of(1)
    start = pallas_mesh.before(plan, 3)
    step = jax.jit(
        sharded_step.decode_step,
        static_argnames=("config", "plan", "implementation"),
        donate_argnames="state",
    )

    def where(state: Any) -> list[int]:
        leaves = [state.layers[0]["S"], state.layers[1]["cache"]]
        return [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in leaves]

    before = where(start.state)
    _, after = step(
        start.params, start.state, start.tokens, start.active,
        config=start.config, plan=plan, implementation="pallas",
    )  # fmt: skip
    assert where(after) == before


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("data", "tensor", "options"),
    [(1, 2, {}), (2, 1, {}), (1, 2, {"expert_width": 2}), (2, 1, {"dispatch": "all_to_all"})],
)
@pytest.mark.parametrize("batch", [1, 6])
def test_two_gpus_give_the_xla_step(data: int, tensor: int, options: dict[str, Any], batch: int) -> None:
    pallas_mesh.compare(plan_of(tensor, data, **options), batch, special=batch > 4, name="pallas")


@pytest.mark.multigpu
def test_repeats_on_two_gpus_are_bit_identical() -> None:
    plan = plan_of(2)
    start = pallas_mesh.before(plan, 5)
    first = jax.tree.map(np.asarray, pallas_mesh.run(plan, start, "pallas"))
    for _ in range(20):
        assert_bit_equal(jax.tree.map(np.asarray, pallas_mesh.run(plan, start, "pallas")), first)
