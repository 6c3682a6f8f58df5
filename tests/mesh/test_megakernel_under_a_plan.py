"""``implementation="megakernel-interpret"`` over a mesh: real collectives between interpreted segments."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import mesh, sharded_step
from k3jax.state import STATUS_BAD_TOKEN, STATUS_FULL, State
from support import mesh_cases
from support.compare import assert_close, relative_rms

F32, WHY_F32 = 2e-5, "float32 sums in another order through four layers: below 3e-6 measured"
BF16 = 0.05
WHY_BF16 = "bfloat16 roundings that flip with the order of sums, through four layers: below 0.02 measured"
INTERPRET = "megakernel-interpret"


@functools.cache
def step() -> Any:
    return jax.jit(sharded_step.decode_step, static_argnames=("config", "plan", "routing", "implementation"))


@functools.cache
def alone() -> Any:
    return jax.jit(k3jax.decode_step, static_argnames="config")


def filled(c: Any, lengths: list[int], dtype: Any) -> State:
    """A state of one device with random contents."""
    rng = np.random.default_rng(7)
    empty = k3jax.state.init_state(c, len(lengths), 256, dtype)
    layers = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape).astype(a.dtype)), empty.layers)
    return State(layers, jnp.asarray(lengths, jnp.int32), empty.status, 256)


LENGTHS = {1: [70], 3: [5, 0, 130], 5: [5, 70, 256, 0, 64]}


def compare(devices: list[Any], ways: int, width: int, experts: int, batch: int, dtype: str | None) -> None:
    """A step against the XLA step of the same plan and against one device.

    Of five rows the second is not active, the third full, and the fourth has a token past the vocabulary.
    """
    of = (experts, 32 * max(2, width))
    c, params = mesh_cases.config(*of), mesh_cases.params(*of, dtype)
    plan = mesh.MeshPlan(1, ways, expert_width=width, devices=tuple(devices[:ways]))
    many = mesh.arrange(params, c, plan)
    state = filled(c, LENGTHS[batch], params["embed_tokens"].dtype)
    spread = mesh.to_plan(state, c, plan)
    tokens = mesh_cases.tokens(batch, 1, seed=2)[:, 0]
    active = np.ones(batch, bool)
    if batch == 5:
        active[1], tokens[3] = False, c.vocab_size
    bound, why = (F32, WHY_F32) if dtype == "float32" else (BF16, WHY_BF16)
    got, after = step()(many, spread, tokens, active, config=c, plan=plan, implementation=INTERPRET)
    want, theirs = step()(many, spread, tokens, active, config=c, plan=plan)
    one, mine = alone()(params, state, tokens, active, config=c)
    run = active & (np.asarray(state.lengths) < 256) & (tokens < c.vocab_size)
    assert_close("logits and xla's", np.asarray(got)[run], np.asarray(want)[run], bound, why)
    # A rounding may turn a choice of experts between XLA's own steps; then they are as far apart.
    alike = [b for b in np.flatnonzero(run) if relative_rms(np.asarray(want)[b], np.asarray(one)[b]) <= bound]
    assert len(alike) == run.sum() if dtype == "float32" else alike
    assert_close("logits and one device's", np.asarray(got)[alike], np.asarray(one)[alike], bound, why)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.asarray(got)[~active], 0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), theirs
    )
    np.testing.assert_array_equal(after.lengths, mine.lengths)
    np.testing.assert_array_equal(after.status, mine.status)
    back = mesh.from_plan(after, batch)
    others = mine if dtype == "float32" else mesh.from_plan(theirs, batch)
    for i, (new, other, old) in enumerate(zip(back.layers, others.layers, state.layers, strict=True)):
        for name, leaf in other.items():
            assert_close(f"layer {i}: {name}", new[name], leaf, bound, why)
            still = ~run
            np.testing.assert_array_equal(np.asarray(new[name])[still], np.asarray(old[name])[still])
    if batch == 5:
        assert after.status.tolist() == [0, 0, STATUS_FULL, STATUS_BAD_TOKEN, 0]
        assert np.isnan(np.asarray(got)[[2, 3]]).all()


def test_experts_spread_over_half_the_ranks_and_cut_by_the_others(cpu_devices: list[Any]) -> None:
    compare(cpu_devices, 4, 2, 20, 5, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "width", "experts", "batch", "dtype"),
    [
        (1, 1, 20, 3, "float32"),
        (2, 2, 20, 3, "float32"),
        (2, 2, 20, 1, None),
        (4, 4, 20, 5, "float32"),
        (4, 4, 20, 3, None),
        (2, 1, 20, 5, "float32"),
        (2, 1, 20, 3, None),
        (4, 1, 22, 5, "float32"),
        (4, 1, 22, 1, "float32"),
        (4, 1, 22, 3, None),
        (4, 2, 22, 1, None),
        (8, 1, 22, 3, "float32"),
    ],
)
def test_steps_of_every_layout_are_those_of_xla_and_of_one_device(
    ways: int, width: int, experts: int, batch: int, dtype: str | None, cpu_devices: list[Any]
) -> None:
    compare(cpu_devices, ways, width, experts, batch, dtype)


@pytest.mark.slow
def test_the_greedy_token_is_that_of_the_whole_vocabulary_and_the_lowest_on_ties(
    cpu_devices: list[Any],
) -> None:
    from k3jax.custom_calls import planned_step

    c, params = mesh_cases.config(), mesh_cases.params()
    head = np.asarray(params["lm_head"]).copy()
    head[41] = head[23]  # of another rank
    head[22] *= 0
    params = {**params, "lm_head": head}
    plan = mesh.MeshPlan(1, 2, devices=tuple(cpu_devices[:2]))
    many = mesh.arrange(params, c, plan)
    spread = mesh.to_plan(filled(c, [5, 0, 130], jnp.float32), c, plan)
    tokens, active = mesh_cases.tokens(3, 1)[:, 0], np.ones(3, bool)
    run = jax.jit(planned_step.step, static_argnames=("config", "plan", "implementation"))
    out = run(many, spread, tokens, active, config=c, plan=plan, implementation=INTERPRET)
    np.testing.assert_array_equal(out.token, np.asarray(out.logits).argmax(axis=-1))
    # Every row's best: the same direction in both ranks' parts of the vocabulary.
    wide = np.concatenate([head[:32], head[:32]])
    many = mesh.arrange({**params, "lm_head": wide}, c, plan)
    out = run(many, spread, tokens, active, config=c, plan=plan, implementation=INTERPRET)
    assert (np.asarray(out.token) < 32).all()
    np.testing.assert_array_equal(out.token, np.asarray(out.logits).argmax(axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_nano_over_two_devices_writes_the_text_of_one(width: int, cpu_devices: list[Any]) -> None:
    want = k3jax.load("nano", progress=False).generate("In the beginning", max_new_tokens=24)
    config = k3jax.load("nano", progress=False).config
    plan = mesh.for_devices(2, config, tensor=2, expert_width=width, devices=tuple(cpu_devices[:2]))
    model = k3jax.load("nano", mesh=plan, implementation=INTERPRET, progress=False)
    assert model.implementation == INTERPRET
    assert model.generate("In the beginning", max_new_tokens=24).tokens == want.tokens


def test_a_state_keeps_the_kernels_leaves_through_prefill_and_loses_them_when_rows_are_selected(
    cpu_devices: list[Any],
) -> None:
    from k3jax.custom_calls import planned

    c = mesh_cases.config()
    plan = mesh.MeshPlan(1, 2, devices=tuple(cpu_devices[:2]))
    model = k3jax.Model(mesh.arrange(mesh_cases.params(), c, plan), c, mesh=plan)
    state = planned.with_kernel(model.init_state(2, 64), c, plan)
    _, after = model.prefill(mesh_cases.tokens(2, 3), state=state, logits="none")
    assert after.kernel is not None
    assert jax.tree.map(jnp.shape, after.kernel) == jax.tree.map(jnp.shape, state.kernel)
    assert after.lengths.tolist() == [3, 3]
    for name, where in planned.KERNEL_SPECS.items():
        assert after.kernel[name].sharding.spec == where
    assert after.select([1, 0]).kernel is None
    assert dataclasses.replace(after, kernel=None).batch == 2


@pytest.mark.slow
def test_the_command_generates_over_two_devices_by_interpretation(capsys: pytest.CaptureFixture[str]) -> None:
    from k3jax import cli

    texts = []
    for options in ([], ["--devices", "2", "--tensor", "2", "--implementation", INTERPRET]):
        assert cli.main(["generate", "nano", "The sun rises", "--max-new-tokens", "12", *options]) == 0
        texts.append(capsys.readouterr())
    assert texts[1].out == texts[0].out
    assert "attention tensor parallel 2 x data parallel 1" in texts[1].err


def test_the_command_says_what_a_plan_may_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    from k3jax import cli

    common = ["generate", "nano", "The sun", "--devices", "2", "--implementation", INTERPRET]
    assert cli.main([*common, "--tensor", "1"]) == 2
    assert "expected data=1 and tensor as many as there are devices, got data=2, tensor=1" in (
        capsys.readouterr().err
    )
    assert cli.main([*common, "--tensor", "2", "--dispatch", "all_to_all"]) == 2
    assert "expected 'auto' or 'gather', got 'all_to_all'" in capsys.readouterr().err
    assert cli.main(["compile", "nano", "--ways", "2", "--expert-width", "3"]) == 2
    assert "expert-width: expected a divisor of ways=2, got 3" in capsys.readouterr().err
    assert cli.main(["compile", "nano", "--ways", "2", "--expert-width", "2"]) in (1, 2)
    assert "in multiples of 64 columns, got 32" in capsys.readouterr().err
    assert cli.main(["generate", "nano", "The sun", "--expert-width", "2"]) == 2
    assert "only with devices" in capsys.readouterr().err
