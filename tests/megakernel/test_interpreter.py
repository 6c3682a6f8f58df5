"""The schedule, executed piece by piece on the CPU, is k3jax.decode_step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import model as k3
from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel.instructions import Instruction, Op, decode, encode
from k3jax.custom_calls.decode_megakernel.interpreter import DeadlockError, ForbiddenAccessError, Machine
from k3jax.custom_calls.decode_megakernel.interpreter.ffn import decode_rows
from k3jax.custom_calls.decode_megakernel.interpreter.machine import Weights
from k3jax.custom_calls.decode_megakernel.interpreter.memory import Memory
from k3jax.custom_calls.decode_megakernel.interpreter.step import interpret, rows_of
from k3jax.custom_calls.decode_megakernel.layout import pack_model
from k3jax.custom_calls.decode_megakernel.schedule import Schedule, build
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.quant import MXFP4
from k3jax.state import State, abstract_state
from support.compare import assert_close
from support.random_k3 import params_from_tensors, random_config, random_tensors
from support.tiny_model import bits

F32 = 2e-5
WHY_F32 = "float32 sums in another order through up to seven layers: below 3e-6 measured"
BF16 = 0.08
WHY_BF16 = (
    "bfloat16 roundings that flip with the order of sums, through up to seven layers: below 0.04 measured"
)
CAPACITY = 512


@dataclasses.dataclass(frozen=True)
class Case:
    config: K3Config
    params: Any
    host: Any
    packed: Any

    def weights(self) -> Weights:
        return Weights(self.host, self.packed, self.host["embed_tokens"].dtype)

    def schedule(self, batch: int, sms: int = 3) -> Schedule:
        return build(Plan(self.config, batch, Target(f"{sms} SMs", sms)))


@functools.cache
def case(seed: int, dtype: str | None = "float32") -> Case:
    overrides: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ("kda", "mla", "kda", "mla")}
    if seed == 1:  # shared expert wide enough for two column chunks, blocks of two, one dense layer
        overrides |= {"moe_intermediate_size": 1056, "num_shared_experts": 2, "attn_res_block_size": 2}
    if seed == 2:  # every layer dense but the last; one expert a token
        overrides |= {"first_k_dense_replace": 3, "num_experts_per_token": 1, "num_experts": 16}
    if seed == 3:  # all experts are chosen, no dense layer, no renormalisation
        overrides |= {"first_k_dense_replace": 0, "num_experts": 4, "num_experts_per_token": 4}
    config = random_config(seed, **overrides)
    params = params_from_tensors(config, random_tensors(config, seed), dtype)
    host = jax.tree.map(np.asarray, params)
    return Case(config, params, host, pack_model(host, Plan(config, 1)))


def state_of(c: Case, lengths: list[int], seed: int = 0) -> State:
    """A state of random numbers that holds ``lengths`` tokens in its rows."""
    rng = np.random.default_rng(seed)
    dtype = c.host["embed_tokens"].dtype
    empty = abstract_state(c.config, len(lengths), CAPACITY, dtype)
    layers = tuple(
        {name: rng.standard_normal(a.shape).astype(a.dtype) for name, a in layer.items()}
        for layer in empty.layers
    )
    zero = np.zeros(len(lengths), np.int32)
    return State(layers, np.array(lengths, np.int32), zero, CAPACITY)


def assert_same_step(c: Case, got: tuple[Any, State], want: tuple[Any, State], tol: float, why: str) -> None:
    assert_close("logits", got[0], want[0], tol, why)
    for i, (a, b) in enumerate(zip(got[1].layers, want[1].layers, strict=True)):
        for name in b:
            assert np.asarray(a[name]).dtype == np.asarray(b[name]).dtype
            assert_close(f"layer {i}: {name}", a[name], b[name], tol, why)
    assert np.array_equal(got[1].lengths, want[1].lengths)
    assert np.array_equal(got[1].status, want[1].status)


@functools.cache
def xla(c: Any) -> Any:
    return jax.jit(functools.partial(k3.decode_step, config=c))


@pytest.mark.parametrize(
    ("seed", "lengths"),
    [
        (1, [5]),
        (2, [130, 0]),
        (3, [1, 63, 64, 65]),
        (2, [127, 128, 129]),
        (1, [300, 3, 0, 17, 1, 256, 255, 40]),
    ],
)
def test_a_float32_step_is_that_of_the_model(seed: int, lengths: list[int]) -> None:
    c = case(seed)
    state = state_of(c, lengths)
    tokens = np.arange(len(lengths), dtype=np.int32) + 3
    active = np.ones(len(lengths), bool)
    want = xla(c.config)(c.params, state, tokens, active)
    got = interpret(c.schedule(len(lengths)), c.weights(), state, tokens, active, seed=seed)
    assert_same_step(c, got[:2], want, F32, WHY_F32)
    assert got[2].tolist() == np.asarray(want[0]).argmax(-1).tolist()


@pytest.mark.parametrize("seed", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_bfloat16_step_is_that_of_the_model(seed: int) -> None:
    c = case(seed, None)
    state = state_of(c, [130, 0, 40])
    tokens, active = np.array([3, 4, 5], np.int32), np.ones(3, bool)
    want = xla(c.config)(c.params, state, tokens, active)
    got = interpret(c.schedule(3), c.weights(), state, tokens, active, seed=0)
    assert_same_step(c, got[:2], want, BF16, WHY_BF16)


def test_every_legal_order_gives_the_same_bits() -> None:
    c = case(1)
    state, tokens = state_of(c, [129, 0, 5]), np.array([7, 8, 9], np.int32)
    schedule, seen = c.schedule(3, sms=6), set()
    for seed in (None, *range(6)):
        logits, new, best = interpret(schedule, c.weights(), state, tokens, np.ones(3, bool), seed=seed)
        seen.add((bits(logits), bits(best), *(bits(x) for x in jax.tree.leaves(new))))
    assert len(seen) == 1


def test_the_decoded_integer_tables_run_as_the_list_they_came_from() -> None:
    c = case(1)
    state, tokens, active = state_of(c, [5]), np.array([7], np.int32), np.ones(1, bool)
    schedule = c.schedule(1)
    again = dataclasses.replace(
        schedule, instructions=decode(encode(schedule.instructions, schedule.plan.sms))
    )
    logits = [interpret(s, c.weights(), state, tokens, active)[0] for s in (schedule, again)]
    assert bits(logits[0]) == bits(logits[1])


def test_a_row_does_not_depend_on_what_the_other_rows_hold() -> None:
    c = case(1)
    schedule, seen = c.schedule(3), set()
    mine = state_of(c, [200, 1, 1])
    for seed, lengths in enumerate(([200, 1, 1], [200, 300, 0], [200, 0, 131])):
        other = state_of(c, lengths, seed + 1)
        layers = tuple(
            {name: np.concatenate([a[name][:1], b[name][1:]]) for name in a}
            for a, b in zip(mine.layers, other.layers, strict=True)
        )
        state = State(layers, other.lengths, other.status, other.max_length)
        tokens = np.array([7, 11 * seed, 5 + seed], np.int32)
        active = np.array([True, True, seed != 1])
        logits, new, _ = interpret(schedule, c.weights(), state, tokens, active)
        seen.add((bits(logits[0]), *(bits(x[0]) for x in jax.tree.leaves(new))))
    assert len(seen) == 1


def test_rows_that_sit_out_or_are_refused_keep_their_state_and_set_the_rules_bits() -> None:
    c = case(3)
    state = state_of(c, [5, CAPACITY, 9, 4])
    tokens = np.array([3, 4, c.config.vocab_size, 6], np.int32)
    active = np.array([False, True, True, True])
    want = xla(c.config)(c.params, state, tokens, active)
    got = interpret(c.schedule(4), c.weights(), state, tokens, active, seed=1)
    assert not got[0][0].any()
    assert np.isnan(got[0][1:3]).all()
    assert_close("logits of the row that runs", got[0][3], want[0][3], F32, WHY_F32)
    assert np.array_equal(got[1].lengths, want[1].lengths)
    assert np.array_equal(got[1].status, want[1].status)
    assert got[1].status.tolist() == [0, 1, 2, 0]
    for before, after in zip(state.layers, got[1].layers, strict=True):
        for name in before:
            assert bits(before[name][:3]) == bits(after[name][:3]), name
            assert bits(before[name][3]) != bits(after[name][3]), name


def test_a_batch_without_any_active_row_ends_and_changes_nothing() -> None:
    c = case(2)
    state = state_of(c, [5, 6])
    logits, new, _ = interpret(
        c.schedule(2), c.weights(), state, np.array([1, 2], np.int32), np.zeros(2, bool)
    )
    assert not logits.any()
    assert all(bits(a) == bits(b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True))


def test_the_schedule_for_132_sms_runs_too() -> None:
    c = case(1)
    state, tokens, active = state_of(c, [140]), np.array([7], np.int32), np.ones(1, bool)
    want = xla(c.config)(c.params, state, tokens, active)
    got = interpret(c.schedule(1, sms=132), c.weights(), state, tokens, active, seed=3)
    assert_same_step(c, got[:2], want, F32, WHY_F32)


# -- through the public function ----------------------------------------------------------


def test_decode_step_with_megakernel_interpret_follows_xla_for_several_steps_under_jit() -> None:
    c = case(1)
    states = [state_of(c, [3, 0])] * 2
    steps = [
        jax.jit(lambda p, s, t, impl=impl: k3.decode_step(p, s, t, config=c.config, implementation=impl))
        for impl in ("xla", "megakernel-interpret")
    ]
    for token in (4, 5, 6):
        tokens = np.array([token, token + 1], np.int32)
        out = [step(c.params, s, tokens) for step, s in zip(steps, states, strict=True)]
        assert_same_step(c, out[1], out[0], F32, WHY_F32)
        states = [o[1] for o in out]


def test_nano_writes_the_same_text_with_xla_and_with_the_interpreter() -> None:
    import k3jax

    results = [
        k3jax.load("nano", implementation=impl).generate("In the beginning", max_new_tokens=24)
        for impl in ("xla", "megakernel-interpret")
    ]
    assert results[0].tokens == results[1].tokens
    assert len(results[0].tokens[0]) == 24


def test_more_rows_than_the_megakernel_takes_and_taps_are_refused() -> None:
    c = case(2)
    step = functools.partial(k3.decode_step, config=c.config, implementation="megakernel-interpret")
    with pytest.raises(NotImplementedError, match=r"expected 1\.\.8 rows, got 9"):
        step(c.params, jax.tree.map(jnp.asarray, state_of(c, [1] * 9)), np.zeros(9, np.int32))
    with pytest.raises(NotImplementedError, match="tap"):
        step(
            c.params,
            jax.tree.map(jnp.asarray, state_of(c, [1])),
            np.zeros(1, np.int32),
            tap=lambda name, value: None,
        )


# -- what the interpreter itself catches --------------------------------------------------


def run_changed(change: Any) -> np.ndarray:
    """Logits of a step of a changed schedule."""
    c = case(1)
    schedule = c.schedule(1, sms=4)
    changed = dataclasses.replace(schedule, instructions=tuple(map(change, schedule.instructions)))
    state = state_of(c, [5])
    machine = Machine(changed, c.weights(), rows_of(state, np.array([7]), np.ones(1, bool), c.config), 0)
    return _run(machine, state)


def _run(machine: Machine, state: State) -> np.ndarray:
    return interpret(machine.schedule, machine.weights, state, np.array([7]), np.ones(1, bool), 0)[0]


def test_an_undeclared_read_is_forbidden() -> None:
    def change(ins: Instruction) -> Instruction:
        if ins.op != Op.KDA_DECAY:
            return ins
        return dataclasses.replace(ins, reads=tuple(a for a in ins.reads if a.buffer != "kda.proj"))

    with pytest.raises(ForbiddenAccessError, match=r"kda\.proj"):
        run_changed(change)


def test_a_counter_that_is_never_reached_is_a_deadlock_with_names() -> None:
    def change(ins: Instruction) -> Instruction:
        wait = tuple(dataclasses.replace(w, target=w.target + 1) for w in ins.waits)
        return dataclasses.replace(ins, waits=wait) if ins.op == Op.KDA_OUT else ins

    with pytest.raises(DeadlockError, match="KDA_OUT"):
        run_changed(change)


def test_a_stage_that_does_not_wait_reads_poison_or_a_wrong_lifetime() -> None:
    def change(ins: Instruction) -> Instruction:
        return dataclasses.replace(ins, waits=()) if ins.op == Op.LATENT_UP else ins

    try:
        logits = run_changed(change)
    except ForbiddenAccessError:
        return
    assert np.isnan(logits).any()


def test_the_first_write_of_a_lifetime_leaves_the_rest_of_the_buffer_poisoned() -> None:
    memory = Memory(case(1).schedule(1))
    memory.write("latent", 3, 0, np.ones((8, 1), np.float32))
    memory.write("latent", 3, 8, np.ones((8, 1), np.float32))
    assert np.isnan(memory.read("latent", 3, 0, 32)).sum() == 16
    memory.write("latent", 5, 8, np.zeros((8, 1), np.float32))
    assert np.isnan(memory.read("latent", 5, 0, 32)).sum() == 24
    with pytest.raises(ForbiddenAccessError, match=r"holds v5, v3 was to be read"):
        memory.read("latent", 3, 0, 8)
    with pytest.raises(ForbiddenAccessError, match=r"holds v5, v3 was to be written"):
        memory.write("latent", 3, 0, np.ones((8, 1), np.float32))


def test_a_share_of_a_model_is_not_run_without_its_peers() -> None:
    c = case(1)
    plan = Plan(
        dataclasses.replace(c.config, vocab_size=64, kda_num_heads=2, num_attention_heads=2), 1, ways=2
    )
    rows = rows_of(state_of(c, [5]), np.array([7]), np.ones(1, bool), c.config)
    with pytest.raises(NotImplementedError, match="a share of 2 exchanges with its peers"):
        Machine(build(plan), c.weights(), rows).execute()


def test_scale_bytes_over_their_whole_range_decode_as_in_the_library() -> None:
    """All 16 codes under all 256 scale bytes."""
    byte = np.arange(256, dtype=np.uint8)
    codes = np.tile(byte[:16] | (15 - byte[:16]) << 4, (256, 1))
    want = np.asarray(MXFP4(jnp.asarray(codes), jnp.asarray(byte[:, None])).decode(jnp.float32))
    got = decode_rows(codes, byte[:, None])
    assert np.isnan(got[255]).all()
    assert np.isnan(want[255]).all()
    assert np.array_equal(got[:255], want[:255])
