"""``implementation="megakernel"`` on an NVIDIA GPU: nano's text, states in place, several steps, faults.

Kernels come from the cache, where ``tests/gpu/build_artifacts.py`` puts them, or from an installed compiler.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.custom_calls import compile, step
from k3jax.custom_calls.artifacts import Key, find
from support.megakernel_cases import API
from support.tiny_model import assert_bit_equal

pytestmark = pytest.mark.gpu

NEAR_TIE = 0.1
"""Difference of two logits that bfloat16 can turn: its noise on nano's logits is 0.03-0.05 each."""
PROMPTS = ["In the beginning", "And God said unto"]


@functools.cache
def model(implementation: str) -> Any:
    return k3jax.load("nano", progress=False, implementation=implementation)


@pytest.fixture(autouse=True)
def _kernels_are_there() -> None:
    config = model("xla").config
    reasons = [r for batch in (1, 2) for r in k3jax.supports(config, batch=batch)]
    assert not reasons, f"run tests/gpu/build_artifacts.py first, see there: {reasons}"


def started(batch: int, capacity: int = 512) -> Any:
    """A state with some tokens in every row, for the megakernel."""
    tokens = np.arange(batch * 7).reshape(batch, 7) + 65
    return model("megakernel").prefill(tokens, max_length=capacity, logits="none")[1]


def decode(params: Any, state: Any, tokens: Any, implementation: str = "megakernel") -> Any:
    config = model("xla").config
    return k3jax.decode_step(params, state, tokens, config=config, implementation=implementation)


def explain(prompt: str, got: list[int], want: list[int]) -> None:
    """Fail unless two greedy continuations are equal up to a near-tie of the xla logits."""
    if got == want:
        return
    at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    xla = model("xla")
    ids = [*xla.tokenizer.encode(prompt), *want[:at]]
    logits, _ = xla.prefill([ids], logits="last")
    gap = float(logits[0, want[at]] - logits[0, got[at]])
    print(f"{prompt!r}: token {at}: {got[at]} for {want[at]}, logits apart by {gap:.4f}")
    assert abs(gap) <= NEAR_TIE, f"{prompt!r}: differ at token {at}, where logits are {gap} apart"


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["1 row", "2 rows"])
def test_nanos_greedy_text_is_that_of_xla(prompts: list[str]) -> None:
    got = model("megakernel").generate(prompts, max_new_tokens=64)
    want = model("xla").generate(prompts, max_new_tokens=64)
    for prompt, mine, theirs in zip(prompts, got.tokens, want.tokens, strict=True):
        explain(prompt, mine, theirs)


def test_a_donated_state_keeps_its_buffers() -> None:
    mega = model("megakernel")
    params, state = step.operands_only(mega.params), started(2)
    run = jax.jit(decode, donate_argnums=1)
    _, state = run(params, state, jnp.array([65, 66], jnp.int32))  # compiled; buffers settle
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    _, after = run(params, state, jnp.array([66, 67], jnp.int32))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
    k3jax.check(after)
    assert after.lengths.tolist() == [9, 9]
    assert after.kernel is not None
    assert after.kernel["epoch"].tolist() == [2]


def test_without_donation_the_given_state_stays_as_it_was() -> None:
    mega, state = model("megakernel"), started(2)
    kept = jax.tree.map(np.asarray, state)
    first, _ = mega.decode_step([65, 66], state)
    again, _ = mega.decode_step([65, 66], state)
    assert_bit_equal(np.asarray(first), np.asarray(again))
    assert_bit_equal(jax.tree.map(np.asarray, state), kept)


def test_unrolled_steps_equal_single_ones_bit_for_bit() -> None:
    mega = model("megakernel")
    params, config = step.operands_only(mega.params), mega.config

    @functools.partial(jax.jit, static_argnames="count")
    def steps(params: Any, state: Any, token: Any, count: int) -> Any:
        tokens, logits = [], None
        for _ in range(count):
            logits, token, state = step.step(params, state, token, jnp.asarray(np.ones(2, bool)), config)
            tokens.append(token)
        return jnp.stack(tokens), logits, state

    token = jnp.array([65, 66], jnp.int32)
    together = steps(params, started(2), token, 4)
    state, tokens, logits = started(2), [], None
    for _ in range(4):
        (token,), logits, state = steps(params, state, token, 1)
        tokens.append(np.asarray(token))
    assert_bit_equal(np.asarray(together[0]), np.stack(tokens))
    assert_bit_equal(np.asarray(together[1]), np.asarray(logits))
    for name in ("layers", "lengths", "status"):
        assert_bit_equal(getattr(together[2], name), getattr(state, name))


def buffered_calls(folder: Path) -> int:
    """Custom calls that XLA put into command buffers, by its dumps of one compiled program.

    XLA:GPU makes command buffers of its finished list of launches ("thunks"), so the optimised program
    (``as_text``) does not show them. With ``xla_dump_to`` it writes the list as text, before and after passes
    over it (``*.thunk_sequence*.txt``), a line a launch, what a command buffer holds indented under its line
    ``kCommandBuffer``: so in jaxlib 0.11.2 and 0.12.0.1.
    """
    lists = [path.read_text() for path in folder.iterdir() if "thunk_sequence" in path.name]
    assert lists, f"XLA wrote no list of launches: {sorted(path.name for path in folder.iterdir())}"
    return max(_calls_inside(text) for text in lists)


def _calls_inside(thunks: str) -> int:
    found, within = 0, None
    for line in thunks.splitlines():
        depth = len(line) - len(line.lstrip())
        if within is not None and depth <= within:
            within = None
        if within is None and "kCommandBuffer" in line:
            within = depth
        elif within is not None and "kCustomCall" in line:
            found += 1
    return found


def test_steps_in_a_command_buffer_equal_those_outside(tmp_path: Path) -> None:
    """XLA records custom calls into a CUDA graph, and replays it from the second run on, or does not."""
    mega, config = model("megakernel"), model("megakernel").config
    params, on, count = step.operands_only(mega.params), jnp.ones(2, bool), 3

    def steps(params: Any, state: Any, token: Any) -> Any:
        logits = None
        for _ in range(count):
            logits, token, state = step.step(params, state, token, on, config)
        return logits, token, state

    folders = {name: tmp_path / name for name in ("plain", "graph")}
    for folder in folders.values():
        folder.mkdir()
    kinds = {"plain": "", "graph": "FUSION,CUSTOM_CALL"}
    options: dict[str, Any] = {
        name: {
            "xla_gpu_enable_command_buffer": kinds[name],
            "xla_gpu_graph_min_graph_size": 1,
            "xla_dump_to": str(folder),
        }
        for name, folder in folders.items()
    }
    token = jnp.array([65, 66], jnp.int32)
    state = other = started(2)
    plain, graph = (
        jax.jit(steps, compiler_options=options[name]).lower(params, state, token).compile()
        for name in ("plain", "graph")
    )
    assert buffered_calls(folders["plain"]) == 0
    assert buffered_calls(folders["graph"]) == count
    for _ in range(4):
        logits, following, state = plain(params, state, token)
        same, again, other = graph(params, other, token)
        assert_bit_equal(np.asarray(same), np.asarray(logits))
        assert_bit_equal(np.asarray(again), np.asarray(following))
        token = following
    k3jax.check(other)
    for name in ("layers", "lengths", "status"):
        assert_bit_equal(getattr(other, name), getattr(state, name))


def test_one_kernel_serves_every_capacity() -> None:
    logits = []
    for capacity in (256, 257, 4096):
        mega = model("megakernel")
        logits.append(np.asarray(mega.decode_step([65], started(1, capacity))[0]))
    for other in logits[1:]:
        assert_bit_equal(other, logits[0])


def test_it_runs_under_shard_map_and_scan() -> None:
    mega, token = model("megakernel"), jnp.array([65, 66], jnp.int32)
    params = step.operands_only(mega.params)
    want, _ = jax.jit(decode)(params, started(2), token)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    whole = jax.sharding.PartitionSpec()
    mapped = jax.jit(jax.shard_map(decode, mesh=mesh, in_specs=whole, out_specs=whole))
    assert_bit_equal(np.asarray(mapped(params, started(2), token)[0]), np.asarray(want))

    @jax.jit
    def scanned(params: Any, state: Any) -> Any:
        def body(state: Any, _: Any) -> Any:
            logits, state = decode(params, state, token)
            return state, logits

        return jax.lax.scan(body, state, None, length=3)

    after, logits = scanned(params, started(2))
    k3jax.check(after)
    assert after.lengths.tolist() == [10, 10]
    assert_bit_equal(np.asarray(logits[0]), np.asarray(want))


def test_a_wait_that_gives_up_raises_where_and_the_next_step_touches_nothing() -> None:
    mega = model("megakernel")
    plan = step.plan_for(mega.config, 1, step.target_of()[1])
    key = Key(plan, step.target_of()[0], options=API[0].options)
    if find(key) is None and compile.compiler_problem() is not None:
        pytest.fail(f"run tests/gpu/build_artifacts.py first: no {key.file_name}")
    artifact = compile.obtain(key)
    params, on = step.operands_only(mega.params), jnp.ones(1, bool)
    token = jnp.array([65], jnp.int32)
    out = step.step(params, started(1), token, on, mega.config, artifact)
    with pytest.raises(k3jax.KernelFaultError, match=r"gave up .*: stage [A-Z_]+ of layer") as caught:
        k3jax.check(out.state)
    record = caught.value.record
    assert 0 <= record["value"] < record["target"]
    assert 0 <= record["sm"] < plan.sms
    after = step.step(params, out.state, token, on, mega.config)
    with pytest.raises(k3jax.KernelFaultError):
        k3jax.check(after.state)
    assert_bit_equal(after.state.layers, out.state.layers)
    assert_bit_equal(after.state.lengths, out.state.lengths)
    # A new state is none the worse for it.
    fresh = step.step(params, started(1), token, on, mega.config)
    k3jax.check(fresh.state)


def test_generate_raises_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = step.plan_for(model("xla").config, 1, step.target_of()[1])
    artifact = compile.obtain(Key(plan, step.target_of()[0], options=API[0].options))
    monkeypatch.setattr(step, "obtain", lambda key: artifact)
    jax.clear_caches()  # programs with the patient kernel
    try:
        with pytest.raises(k3jax.KernelFaultError, match="gave up"):
            model("megakernel").generate(PROMPTS[0], max_new_tokens=4)
    finally:
        jax.clear_caches()
