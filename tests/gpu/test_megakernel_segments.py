"""Shares of the shipped model on an NVIDIA GPU, segment by segment: two ranks by turns on one, then on two.

What runs by turns on one GPU shows the kernel of a share; what runs over two shows it with real collectives.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import k3jax
from k3jax import mesh
from support.megakernel_cases import CUT, PEERS, SPREAD, KernelCase, config
from support.megakernel_gpu import host, random_state, report
from support.megakernel_share_gpu import TurnTaker, check_every_segment

pytestmark = [pytest.mark.timeout(240, method="thread")]

PROMPT = "In the beginning"


@functools.cache
def params(name: str) -> Any:
    """The shipped model, or random weights of one with wider experts; numpy."""
    if name == "nano":
        return host(k3jax.load("nano", progress=False, implementation="xla").params)
    return host(k3jax.random_model(config(name), seed=3, implementation="xla").params)


@functools.cache
def tokens_of(implementation: str, count: int) -> list[int]:
    """What the model writes on one device, greedily."""
    model = k3jax.load("nano", progress=False, implementation=implementation)
    return model.generate(PROMPT, max_new_tokens=count).tokens[0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SPREAD, *CUT], ids=str)
def test_every_segment_of_both_ranks_is_the_interpreters(case: KernelCase) -> None:
    lengths = (64, 0, 129)[: case.batch]
    state = host(random_state(config(case.model), lengths, 512, seed=case.batch, scale=0.5))
    run = TurnTaker(params(case.model), case, state)
    tokens = np.random.default_rng(case.batch).integers(0, 256, case.batch)
    live = np.arange(case.batch) != 1
    _, worst = check_every_segment(run, tokens, live, range(2))
    report(f"{case}: {len(run.share.segments)} segments, worst given {worst:.1e}")


@pytest.mark.gpu
def test_two_ranks_by_turns_write_what_one_device_writes() -> None:
    count = 24
    want = tokens_of("xla", count)
    assert tokens_of("megakernel", count) == want
    model = k3jax.load("nano", progress=False, implementation="xla")
    ids = np.array([model.tokenizer.encode(PROMPT)])
    logits, state = model.prefill(ids, max_length=512, logits="last")
    run = TurnTaker(params("nano"), SPREAD[0], host(state))
    got = [int(np.asarray(logits)[0].argmax())]
    while len(got) < count:
        _, token = run.step(np.array(got[-1:]))
        got.append(int(token[0]))
    assert got == want


@pytest.mark.gpu
def test_a_step_by_turns_gives_the_same_bits_again() -> None:
    case = CUT[0]
    state = host(random_state(config(case.model), (64,), 512, seed=1, scale=0.5))
    seen = set()
    for _ in range(2):
        logits, token = TurnTaker(params(case.model), case, state).step(np.array([5]))
        seen.add((logits.tobytes(), token.tobytes()))
    assert len(seen) == 1


@pytest.mark.multigpu
def test_two_gpus_write_what_one_writes() -> None:
    plan = mesh.for_devices(2, config("nano"), tensor=2)
    assert k3jax.supports(config("nano"), plan=plan) == ()
    model = k3jax.load("nano", mesh=plan, implementation="megakernel", progress=False)
    result = model.generate(PROMPT, max_new_tokens=24)
    assert result.tokens[0] == tokens_of("xla", 24)


@pytest.mark.multigpu
@pytest.mark.parametrize("case", [*SPREAD, *CUT], ids=str)
def test_two_gpus_give_the_bits_of_two_ranks_by_turns(case: KernelCase) -> None:
    """The sum of two numbers is the same in either order. The second row is not active."""
    c = config(case.model)
    plan = mesh.for_devices(2, c, tensor=2, expert_width=2 // case.expert_ways)
    lengths = (64, 0, 129)[: case.batch]
    state = random_state(c, lengths, 512, seed=3, scale=0.5)
    tokens, live = np.array([3, 4, 5])[: case.batch], np.arange(case.batch) != 1
    turns = TurnTaker(params(case.model), case, host(state))
    tree = mesh.arrange(params(case.model), c, plan)
    model = k3jax.Model(tree, c, mesh=plan, implementation="megakernel")
    spread = mesh.to_plan(state, c, plan)
    for _ in range(2):
        want, _ = turns.step(tokens, live)
        got, spread = model.decode_step(tokens, spread, live)
        k3jax.check(spread)
        np.testing.assert_array_equal(np.asarray(got)[live], want[live])
        assert not np.asarray(got)[~live].any()
    assert spread.lengths.tolist() == (np.asarray(lengths) + 2 * live).tolist()


@pytest.mark.multigpu
@pytest.mark.parametrize("case", PEERS, ids=str)
def test_two_gpus_that_exchange_in_the_kernel_are_those_that_exchange_between_segments(
    case: KernelCase,
) -> None:
    """Four steps, one of them made twice from the same state: mailboxes count launches, not a state's steps.
    The bits are the same, since the sum of two numbers is so in either order."""
    from k3jax.custom_calls import planned, planned_step
    from k3jax.custom_calls.mailboxes import Mailboxes

    c = config(case.model)
    plan = mesh.for_devices(2, c, tensor=2, expert_width=2 // case.expert_ways)
    model = k3jax.Model(mesh.arrange(params(case.model), c, plan), c, mesh=plan, implementation="megakernel")
    boxes = Mailboxes(c, plan, case.batch)
    assert boxes.share == case.plan
    lengths = (64, 0, 129)[: case.batch]
    begun = mesh.to_plan(random_state(c, lengths, 512, seed=3, scale=0.5), c, plan)
    live = np.arange(case.batch) != 1
    run = jax.jit(planned_step.step, static_argnames=("config", "plan", "implementation"))
    shared = {"config": c, "plan": plan, "implementation": "megakernel"}
    state = planned.with_kernel(begun, c, plan, peers=True)
    other = planned.with_kernel(begun, c, plan)
    for n, tokens in enumerate(np.random.default_rng(0).integers(0, 256, (4, case.batch))):
        got = run(model.params, state, tokens, live, mailboxes=boxes.addresses, **shared)
        if n == 1:
            got = run(model.params, state, tokens, live, mailboxes=boxes.addresses, **shared)
        want = run(model.params, other, tokens, live, **shared)
        assert not np.asarray(got.state.kernel["fault"]).any()
        np.testing.assert_array_equal(np.asarray(got.logits)[live], np.asarray(want.logits)[live])
        assert got.state.lengths.tolist() == want.state.lengths.tolist()
        state, other = got.state, want.state
