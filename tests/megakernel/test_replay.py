"""The GPU tests' comparison passes the interpreter's own numbers, and notices changed ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.custom_calls.decode_megakernel.interpreter.machine import Weights
from k3jax.custom_calls.decode_megakernel.interpreter.step import rows_of
from k3jax.custom_calls.decode_megakernel.layout import pack_model
from k3jax.custom_calls.decode_megakernel.operands import workspace_shapes
from k3jax.custom_calls.decode_megakernel.schedule import Schedule, build
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.state import State, abstract_state
from support.megakernel_replay import Snapshot, replay, run_machine
from support.random_k3 import params_from_tensors, random_config, random_tensors

BATCH, LENGTHS, SMS, CAPACITY = 3, (130, 0, 5), 5, 256
RUN = np.array([True, False, True])


@functools.cache
def model() -> tuple[Schedule, Weights]:
    config = random_config(
        1, num_hidden_layers=4, layer_types=("kda", "mla", "kda", "mla"), attn_res_block_size=2,
        moe_intermediate_size=1056, num_shared_experts=2,
    )  # fmt: skip
    tree = jax.tree.map(np.asarray, params_from_tensors(config, random_tensors(config, 1), None))
    plan = Plan(config, BATCH, Target("few SMs", SMS))
    return build(plan), Weights(tree, pack_model(tree, plan), tree["embed_tokens"].dtype)


def begin() -> tuple[State, Any]:
    config = model()[0].plan.config
    rng = np.random.default_rng(0)
    layers = tuple(
        {name: rng.standard_normal(a.shape).astype(a.dtype) for name, a in layer.items()}
        for layer in abstract_state(config, BATCH, CAPACITY, jnp.bfloat16).layers
    )
    zero = np.zeros(BATCH, np.int32)
    state = State(layers, np.array(LENGTHS, np.int32), zero, CAPACITY)
    return state, rows_of(state, np.array([3, 4, 5]), RUN, config)


def stopped(last: int) -> Snapshot:
    """What a kernel would leave that computes as the interpreter, stopped behind a sublayer."""
    schedule, weights = model()
    state, rows = begin()
    machine, values = run_machine(schedule, weights, state, rows, last)
    p = schedule.plan
    return Snapshot(
        _fields(schedule, values, machine.slots),
        tuple(_layer(p, values, i, layer) for i, layer in enumerate(state.layers)),
        values["lengths"].astype(np.int32),
        values["status"].astype(np.int32),
        values["logits"].T,
        values["token"],
        state.lengths,
    )


def _layer(p: Plan, values: Any, i: int, layer: Any) -> dict[str, np.ndarray]:
    if "S" in layer:
        S = values[f"S.{i}"].reshape(p.kda_heads, p.B, p.V, p.K).transpose(1, 0, 2, 3)
        units = values[f"conv.{i}"].reshape(p.kda_heads, p.B, -1, 2 * p.K + p.V).transpose(1, 2, 0, 3)
        parts = np.split(units, [p.K, 2 * p.K], axis=-1)
        return {"S": S, "conv": np.concatenate([x.reshape(*x.shape[:2], -1) for x in parts], axis=-1)}
    cache = np.array(layer["cache"], np.float32)
    for b in np.flatnonzero(RUN):
        cache[b, LENGTHS[b]] = values[f"cache.{i}"][b]
    return {"cache": cache}


def _fields(schedule: Schedule, values: Any, slots: list[int]) -> dict[str, np.ndarray]:
    """The interpreter's buffers where the kernel has them."""
    p = schedule.plan
    out = {
        name: np.zeros(shape, np.int32) if dtype == "int32" else np.full(shape, np.nan, np.float32)
        for name, (dtype, shape) in workspace_shapes(p, schedule.counters).items()
    }
    for name in values.keys() & out.keys():
        if values[name].ndim == 2 and values[name].shape[1] == p.B and name != "mla.row":
            out[name][:, : len(values[name])] = values[name].T
    for i in range(2):
        out["pre"][i] = values[f"pre.{i}"].T
    for j in range(p.max_sources - 1):
        out["block"][j] = values[f"block.{j}"].T
    score = values["score"].transpose(1, 2, 3, 0)
    out["score"][..., : score.shape[-1]] = score
    out["kda.y"][:] = values["kda.y"].reshape(p.kda_heads, p.B, p.V).transpose(1, 0, 2).reshape(p.B, -1)
    out["mla.row"][:] = values["mla.row"]
    out["mla.acc"][:], out["mla.stat"][:] = values["mla.part"][..., : p.C], values["mla.part"][..., p.C :]
    for name, width in (("hid", p.F), ("ey", p.L)):
        x = values[name].reshape(p.slots, width, p.B).transpose(0, 2, 1)
        out[name][..., :width] = x
    pieces = [values[name] for name in ("shared.0", "shared.1") if not np.isnan(values[name]).all()]
    if pieces:
        out["shared"][:] = pieces[-1].reshape(p.D, p.B).T
    record = values["route"][0]
    out["route.ids"][:] = np.nan_to_num(record[:, : p.A, 0])
    out["route.weight"][:] = record[:, : p.A, 1]
    out["route.count"][0], out["route.slots"][: len(slots)] = len(slots), slots
    for b in np.flatnonzero(RUN) if slots else ():
        out["route.slot_of"][b] = [slots.index(e) for e in out["route.ids"][b]]
    out["best"][: p.head_sms] = values["best"]
    with np.errstate(invalid="ignore"):
        out["best"][..., 1] = out["best"][..., 1].astype(np.int32).view(np.float32)
    return out


def differences(sub: int, change: Any = None) -> list[Any]:
    schedule, weights = model()
    state, rows = begin()
    none = np.zeros(0)
    before = Snapshot({}, state.layers, state.lengths, state.status, none, none, state.lengths)
    if sub:
        before = dataclasses.replace(before, fields=stopped(sub - 1).fields)
    after = stopped(sub)
    if change is not None:
        change(after)
    return replay(schedule, weights, rows, sub, before, after)


@pytest.mark.parametrize("sub", range(9))
def test_the_interpreters_own_numbers_are_found_equal(sub: int) -> None:
    found = differences(sub)
    assert len(found) >= (5 if sub < 8 else 7)
    wrong = [d for d in found if d.rms > (1e-5 if d.buffer == "score" else 1e-6)]
    assert not wrong, wrong


CHANGES = {
    (0, "kda.y"): lambda s: s.fields["kda.y"].__setitem__((2, 5), 9.0),
    (0, "S.0"): lambda s: s.layers[0]["S"].__setitem__((0, 1, 3, 2), 9.0),
    (0, "conv.0"): lambda s: s.layers[0]["conv"].__setitem__((2, 1, 3), 9.0),
    (2, "mla.part"): lambda s: s.fields["mla.acc"].__setitem__((0, 0, 3), 99.0),
    (2, "cache.1"): lambda s: s.layers[1]["cache"].__setitem__((0, 130, 7), 9.0),
    (2, "pre.1"): lambda s: s.fields["pre"].__setitem__((1, 0, 7), 9.0),
    (3, "slots"): lambda s: s.fields["route.slot_of"].__setitem__((0, 0), s.fields["route.slot_of"][0, 1]),
    (3, "hid"): lambda s: s.fields["hid"].__setitem__(
        (s.fields["route.slot_of"][0, 0], 0, 3), np.float32(9.0)
    ),
    (3, "shared.1"): lambda s: s.fields["shared"].__setitem__((2, 3), np.float32(99.0)),
    (4, "score"): lambda s: s.fields["score"].__setitem__((0, 0, 0, 1), np.float32(9.0)),
    (8, "logits"): lambda s: s.logits.__setitem__((0, 3), 99.0),
    (8, "token"): lambda s: s.token.__setitem__(0, 1 + s.token[0]),
}


@pytest.mark.parametrize(("sub", "buffer"), CHANGES, ids=[f"{s}-{b}" for s, b in CHANGES])
def test_a_changed_number_is_noticed_where_it_is(sub: int, buffer: str) -> None:
    found = differences(sub, CHANGES[sub, buffer])
    assert [d.buffer for d in found if d.rms > 1e-3 and d.buffer == buffer] == [buffer]


def test_rows_that_do_not_run_are_not_looked_at() -> None:
    def change(s: Snapshot) -> None:
        for name in ("kda.proj", "kda.y", "h"):
            s.fields[name][1] = np.nan

    assert all(d.rms < 1e-5 for d in differences(0, change))
