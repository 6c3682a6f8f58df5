"""What the megakernel keeps between steps, as leaves of the state: carried everywhere, tied to a batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.custom_calls import step
from k3jax.custom_calls.decode_megakernel.instructions import Op
from k3jax.custom_calls.decode_megakernel.operands import FAULT_FIELDS, FAULT_WORDS, workspace_bytes
from k3jax.custom_calls.tables import launch_tables
from k3jax.state import KERNEL_LEAVES, init_state
from support import generation, megakernel
from support.tiny_model import assert_bit_equal

CONFIG = megakernel.config()


def faulted(batch: int = 2) -> Any:
    record = dict.fromkeys(FAULT_FIELDS, 0) | {
        "code": 1, "op": int(Op.MLA_OUT), "layer": 1, "sm": 17, "counter": 12,
        "target": 132, "value": 90, "epoch": 5,
    }  # fmt: skip
    words = np.zeros(FAULT_WORDS, np.int32)
    words[: len(FAULT_FIELDS)] = [record[name] for name in FAULT_FIELDS]
    state = megakernel.state(batch)
    return dataclasses.replace(state, kernel={**state.kernel, "fault": jnp.asarray(words)})


def test_a_state_for_the_megakernel_has_a_zero_workspace_of_its_plan() -> None:
    state = megakernel.state(3)
    plan = step.plan_for(CONFIG, 3, step.target_of()[1])
    assert set(state.kernel) == set(KERNEL_LEAVES)
    assert state.kernel["work"].nbytes == workspace_bytes(plan, launch_tables(plan).counters)
    assert state.kernel["fault"].shape == (FAULT_WORDS,)
    assert state.kernel["epoch"].shape == (1,)
    for leaf in state.kernel.values():
        assert leaf.dtype == jnp.int32
        assert not np.asarray(leaf).any()
    assert init_state(CONFIG, 3, 300).kernel is None
    with pytest.raises(NotImplementedError, match=r"expected 1\.\.8 rows, got 9"):
        init_state(CONFIG, 9, 300, implementation="megakernel")


def test_it_is_added_to_a_state_of_another_implementation() -> None:
    state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), init_state(CONFIG, 2, 300))
    added = step.with_kernel(state, CONFIG)
    assert_bit_equal(dataclasses.replace(added, kernel=None), state)
    assert_bit_equal(added.kernel, megakernel.state(2).kernel)


def test_it_lies_for_good_where_a_placed_state_does() -> None:
    """Leaves that may move beside others that may not: the first step would be a program of its own."""
    free = init_state(CONFIG, 2, 300)
    placed = jax.device_put(free, jax.devices()[1])
    for state in (free, placed):
        leaves = step.with_kernel(state, CONFIG).kernel
        assert leaves is not None
        for leaf in leaves.values():
            assert leaf.committed == state.lengths.committed
            assert leaf.devices() == state.lengths.devices()


def test_a_state_that_no_step_could_take_is_refused() -> None:
    state = init_state(CONFIG, 2, 300)
    devices = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    cut = jax.device_put(state.lengths, jax.NamedSharding(devices, jax.P("rows")))
    with pytest.raises(NotImplementedError, match="expected on one device, got rows cut over 2"):
        step.with_kernel(dataclasses.replace(state, lengths=cut), CONFIG)
    jax.jit(lambda lengths: lengths + jnp.int32(1), donate_argnums=0)(state.lengths)
    with pytest.raises(k3jax.ConsumedStateError, match="state was consumed"):
        step.with_kernel(state, CONFIG)


def test_the_other_implementations_carry_it_along() -> None:
    state = dataclasses.replace(megakernel.state(2), kernel=marked(2))
    params = megakernel.params()

    def decode(state: Any) -> Any:
        return k3jax.decode_step(params, state, [1, 2], config=CONFIG, implementation="xla")[1].kernel

    def prefill(state: Any) -> Any:
        tokens = np.array([[1, 2], [3, 4]])
        return k3jax.prefill(params, tokens, config=CONFIG, state=state, logits="none")[1].kernel

    for step_of in (decode, prefill):
        jaxpr = jax.make_jaxpr(step_of)(state).jaxpr
        leaves = jax.tree.leaves(state)
        places = [i for i, leaf in enumerate(leaves) if any(leaf is own for own in state.kernel.values())]
        assert len(places) == len(KERNEL_LEAVES)
        passed = [jaxpr.invars[i] for i in places]
        if step_of is decode:
            assert jaxpr.outvars == passed
        assert [v.aval for v in jaxpr.outvars] == [v.aval for v in passed]


def marked(batch: int) -> dict[str, Any]:
    """Kernel leaves that are not zero (and no fault)."""
    kernel = dict(megakernel.state(batch).kernel)
    return kernel | {"epoch": jnp.array([7], jnp.int32), "work": kernel["work"] + jnp.int32(3)}


def test_it_passes_through_jit_donation_and_scan() -> None:
    state = dataclasses.replace(megakernel.state(2), kernel=marked(2))

    def body(carry: Any, _: Any) -> Any:
        kernel = {**carry.kernel, "epoch": carry.kernel["epoch"] + 1}
        return dataclasses.replace(carry, kernel=kernel), None

    run = jax.jit(lambda s: jax.lax.scan(body, s, None, length=4)[0], donate_argnums=0)
    after = run(state)
    assert after.kernel["epoch"].tolist() == [11]
    assert_bit_equal(after.kernel["work"], marked(2)["work"])
    with pytest.raises(k3jax.ConsumedStateError):
        state.ensure_usable()


def test_a_state_whose_workspace_alone_was_taken_is_consumed() -> None:
    state = megakernel.state(1)
    jax.jit(lambda work: work + jnp.int32(1), donate_argnums=0)(state.kernel["work"])
    with pytest.raises(k3jax.ConsumedStateError, match="state was consumed"):
        state.ensure_usable()


def test_a_saved_state_comes_back_with_a_fresh_workspace(tmp_path: Path) -> None:
    state = dataclasses.replace(megakernel.state(2), kernel=marked(2))
    state.save(tmp_path / "state")
    back = k3jax.State.restore(tmp_path / "state")
    assert_bit_equal(back, megakernel.state(2))
    assert (tmp_path / "state").stat().st_size < sum(x.nbytes for x in jax.tree.leaves(state))
    dataclasses.replace(state, kernel=None).save(tmp_path / "plain")
    assert k3jax.State.restore(tmp_path / "plain").kernel is None


def test_selected_and_forked_rows_leave_it_behind() -> None:
    state = megakernel.state(2)
    assert state.select([1]).kernel is None
    assert state.fork(2).kernel is None
    assert state.fork(2).batch == 4


def test_the_models_check_accepts_it_and_names_what_is_strange() -> None:
    state = megakernel.state(2)
    k3jax.state.check_state(CONFIG, state, jnp.bfloat16)
    strange = dataclasses.replace(state, kernel={"work": state.kernel["work"]})
    with pytest.raises(
        ValueError, match=r"state\.kernel: expected \['epoch', 'fault', 'work'\], got \['work'\]"
    ):
        k3jax.decode_step(megakernel.params(), strange, [1, 2], config=CONFIG)


def test_a_fault_raises_with_the_wait_that_failed_and_says_the_state_is_lost(tmp_path: Path) -> None:
    k3jax.check(megakernel.state(2))
    message = (
        r"stage MLA_OUT of layer 1, SM 17: counter 12 had 90 of 132 arrivals \(step 5\); "
        "the contents of this state are lost"
    )
    with pytest.raises(k3jax.KernelFaultError, match=message) as caught:
        k3jax.check(faulted())
    assert caught.value.record["stage"] == "MLA_OUT"
    assert caught.value.record["sm"] == 17
    for use in (lambda s: s.select([0]), lambda s: s.fork(2), lambda s: s.save(tmp_path / "state")):
        with pytest.raises(k3jax.KernelFaultError, match="are lost"):
            use(faulted())
    assert not (tmp_path / "state").exists()


def test_generate_and_stream_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a scripted model, whose states have kernel leaves and whose third step reports a fault."""
    model = generation.scripted(monkeypatch, generation.script_of([[5, 6, 7, 8, 9, 10, 11, 12]]))
    real_prefill, real_step = model.prefill, k3jax.model.decode_step

    def prefill(*args: Any, **options: Any) -> Any:
        logits, state = real_prefill(*args, **options)
        return logits, dataclasses.replace(state, kernel=megakernel.state(1).kernel)

    def decode(params: Any, state: Any, *args: Any, **options: Any) -> Any:
        logits, after = real_step(params, state, *args, **options)
        kernel: Any = after.kernel
        epoch = kernel["epoch"] + 1
        fault = jnp.where(epoch == 3, faulted().kernel["fault"], 0)
        return logits, dataclasses.replace(after, kernel={**kernel, "epoch": epoch, "fault": fault})

    monkeypatch.setattr(model, "prefill", prefill)
    monkeypatch.setattr(k3jax.model, "decode_step", decode)
    # A configuration of its own: what is compiled for other scripted models must not serve here.
    model.config = dataclasses.replace(model.config, initializer_range=0.25)
    seen = []
    with pytest.raises(k3jax.KernelFaultError, match="SM 17"):
        seen.extend(k3jax.generate.stream(model, [[1, 2, 3]], max_new_tokens=8))
    assert [step.tokens.tolist() for step in seen] == [[5], [6], [7]]
    with pytest.raises(k3jax.KernelFaultError, match="SM 17"):
        k3jax.generate.generate(model, [[1, 2, 3]], max_new_tokens=8)
    assert k3jax.generate.generate(model, [[1, 2, 3]], max_new_tokens=3).tokens == [[5, 6, 7]]
