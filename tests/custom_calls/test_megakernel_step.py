"""``implementation="megakernel"`` as a program: one custom call, no matrix product, everything in place."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import k3jax
from k3jax.custom_calls import ffi, pack, step
from k3jax.custom_calls.artifacts import ArtifactError
from support import megakernel

CONFIG = megakernel.config()


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "obtain", lambda key: megakernel.artifact(key.plan.batch))


def decode(params: Any, state: Any, tokens: Any, active: Any = None) -> Any:
    return k3jax.decode_step(params, state, tokens, active, config=CONFIG, implementation="megakernel")


def lowered(fn: Callable[..., Any], *args: Any, donate: Any = ()) -> str:
    return jax.jit(fn, donate_argnums=donate).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def operations(text: str) -> list[str]:
    return re.findall(r"= \"?(stablehlo\.\w+)", text)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_step_is_one_custom_call_and_no_product(batch: int) -> None:
    text = lowered(decode, megakernel.packed_params(), megakernel.state(batch), megakernel.tokens(batch))
    assert text.count("stablehlo.custom_call") == 1
    assert f"@{ffi.TARGET}(" in text
    assert "NoCudaGraph" not in text
    assert not [name for name in operations(text) if "dot" in name or "conv_" in name or "reduce" in name]


def test_unrolled_steps_are_as_many_calls() -> None:
    def three(params: Any, state: Any, token: Any) -> Any:
        for _ in range(3):
            out = step.step(params, state, token, jnp.ones(2, bool), CONFIG)
            state, token = out.state, out.token
        return token, state

    text = lowered(three, megakernel.packed_params(), megakernel.state(2), megakernel.tokens(2), donate=1)
    assert text.count("stablehlo.custom_call") == 3
    assert "while" not in text


def test_a_donated_state_is_updated_in_place() -> None:
    state = megakernel.state(2)
    text = lowered(decode, megakernel.packed_params(), state, megakernel.tokens(2), donate=1)
    leaves = len(jax.tree.leaves(state))
    # Every array of the state keeps its buffer; only the epoch is a new array within the call.
    assert text.count("tf.aliasing_output") == leaves
    assert text.count("#stablehlo.output_operand_alias") == leaves - 1
    kept = lowered(decode, megakernel.packed_params(), state, megakernel.tokens(2))
    assert kept.count("tf.aliasing_output") == 0


def test_each_result_lies_on_the_operand_of_its_name() -> None:
    artifact = megakernel.artifact(2)
    text = lowered(decode, megakernel.packed_params(), megakernel.state(2), megakernel.tokens(2))
    pairs = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text)
    names = {(artifact.results[int(r)].path, artifact.operands[int(o)].path) for r, o in pairs}
    assert all(result == operand for result, operand in names)
    assert {path for path, _ in names} == {
        leaf.path for leaf in artifact.results if leaf.path not in ("['logits']", "['token']", "['epoch']")
    }


def test_the_returned_state_is_one_the_next_step_takes() -> None:
    state = megakernel.state(3)
    logits, after = jax.eval_shape(decode, megakernel.packed_params(), state, megakernel.tokens(3))
    assert logits.shape == (3, CONFIG.vocab_size)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_only_what_the_kernel_reads_need_be_handed_over() -> None:
    whole = megakernel.packed_params()
    part = step.operands_only(whole)
    text = lowered(decode, part, megakernel.state(2), megakernel.tokens(2))
    assert text.count("stablehlo.custom_call") == 1
    state_leaves = len(jax.tree.leaves(megakernel.state(2)))
    read = len(jax.tree.leaves(part)) + state_leaves + 1
    assert len(re.findall(r"%arg\d+: ", text.split("->")[0])) == read
    assert len(jax.tree.leaves(part)) < len(jax.tree.leaves(whole)) / 2


def test_any_capacity_runs_with_the_same_artifact() -> None:
    for max_length in (1, 256, 257, 1000):
        state = k3jax.state.init_state(CONFIG, 2, max_length, implementation="megakernel")
        logits, after = jax.eval_shape(decode, megakernel.packed_params(), state, megakernel.tokens(2))
        assert logits.shape == (2, CONFIG.vocab_size)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_vmap_says_what_to_do_instead() -> None:
    def one(token: Any) -> Any:
        return decode(megakernel.packed_params(), megakernel.state(1), token[None])[0]

    for fn in (one, jax.jit(one)):
        with pytest.raises(NotImplementedError, match=r"vmap: .*give it the rows as a batch \(1\.\.8\)"):
            jax.eval_shape(jax.vmap(fn), jax.ShapeDtypeStruct((2,), jnp.int32))


def test_it_stays_one_call_under_shard_map_on_one_device(cpu_devices: list[Any]) -> None:
    mesh = Mesh(np.array(cpu_devices[:1]), ("x",))
    whole = PartitionSpec()
    for check in (True, False):
        mapped = jax.shard_map(decode, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=check)
        text = lowered(
            mapped, step.operands_only(megakernel.packed_params()), megakernel.state(2), jnp.arange(2)
        )
        calls = [name for name in re.findall(r"custom_call @(\w+)", text) if name != "Sharding"]
        assert calls == [ffi.TARGET]


def test_what_is_missing_or_of_another_size_is_named() -> None:
    params, state, tokens = megakernel.packed_params(), megakernel.state(2), megakernel.tokens(2)
    with pytest.raises(
        NotImplementedError, match=r"params\['megakernel'\]: the weights are not packed; call Model\.pack"
    ):
        jax.eval_shape(decode, megakernel.params(), state, tokens)
    bare = k3jax.state.init_state(CONFIG, 2, 300)
    with pytest.raises(ValueError, match=r"state\.kernel: absent; make the state with init_state"):
        jax.eval_shape(decode, params, bare, tokens)
    other = k3jax.State(bare.layers, bare.lengths, bare.status, 300, megakernel.state(1).kernel)
    with pytest.raises(ValueError, match=r"state\.kernel\['work'\]: expected int32 .* for 2 rows on 132 SMs"):
        jax.eval_shape(decode, params, other, tokens)
    nine = k3jax.state.init_state(CONFIG, 9, 300)
    with pytest.raises(NotImplementedError, match=r"batch: expected 1\.\.8, got 9"):
        jax.eval_shape(decode, params, nine, megakernel.tokens(9))
    short = {**params, pack.PACKED: {**params[pack.PACKED], "gain": params[pack.PACKED]["gain"][:-1]}}
    with pytest.raises(ValueError, match=r"params\['megakernel'\]\['gain'\]: expected bfloat16"):
        jax.eval_shape(decode, short, state, tokens)
    floats = {**params, "layers": [*params["layers"]]}
    moe = floats["layers"][1]["block_sparse_moe"]
    experts = {name: weight.decode() for name, weight in moe["experts"].items()}
    floats["layers"][1] = {"block_sparse_moe": {"experts": experts}}
    with pytest.raises(NotImplementedError, match="reads MXFP4 experts, got floats"):
        jax.eval_shape(decode, floats, state, tokens)
    with pytest.raises(NotImplementedError, match="tap: implementation 'megakernel' shows no"):
        k3jax.decode_step(
            params, state, tokens, config=CONFIG, implementation="megakernel", tap=lambda name, value: None
        )


def test_an_artifact_of_other_operands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "obtain", lambda key: megakernel.artifact(3))
    with pytest.raises(ArtifactError, match=r"operands\['active'\]: expected int32 \[3\].* got int32 \[2\]"):
        decode(megakernel.packed_params(), megakernel.state(2), megakernel.tokens(2))


class Gpu:
    """A device as jax describes one."""

    platform, device_kind = "gpu", "NVIDIA H200"
    compute_capability, core_count = "9.0", 132
    shared_memory_per_block_optin = 232_448

    def __init__(self, **other: Any):
        self.__dict__.update(other)


MADE = {"arch": "sm_90a", "target": {"sms": 132}, "registers": 168}


@pytest.mark.parametrize(
    ("device", "made", "reason"),
    [
        ({}, {}, None),
        ({"shared_memory_per_block_optin": 220_000}, {}, r"occupancy: a block takes \d+ bytes .* got 220000"),
        ({}, {"registers": 232}, "occupancy: the kernel takes 232 registers a thread, an SM has 168"),
        ({}, {"arch": "sm_100a"}, "device: the kernel is compiled for 132 SMs of sm_100a, got 132 of sm_90a"),
        ({}, {"target": {"sms": 148}}, "compiled for 148 SMs of sm_90a, got 132 of sm_90a"),
        (
            {"shared_memory_per_block_optin": 220_000},
            {"registers": 232},
            "takes 232 registers.*; occupancy: a block takes",
        ),
    ],
)
def test_a_gpu_that_cannot_hold_the_kernel_is_refused_before_a_launch(
    device: dict[str, Any], made: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel found on disk and one that is given, by the function alone: no Model, no ``supports``."""
    artifact = dataclasses.replace(megakernel.artifact(2), about={**MADE, **made})
    registered: list[None] = []
    monkeypatch.setattr(step, "obtain", lambda key: artifact)
    monkeypatch.setattr(step, "_device", lambda: Gpu(**device))
    monkeypatch.setattr(ffi, "register", lambda: registered.append(None))
    args = (megakernel.packed_params(), megakernel.state(2), megakernel.tokens(2))
    found = functools.partial(decode)  # another function each time: jax would remember the last trace
    given = functools.partial(step.step, live=jnp.ones(2, bool), config=CONFIG, artifact=artifact)
    for run in (found, given):
        registered.clear()
        if reason is None:
            assert jax.eval_shape(run, *args)[0].shape == (2, CONFIG.vocab_size)
            assert registered == [None]
        else:
            with pytest.raises(NotImplementedError, match=f"'megakernel' is not available here: .*{reason}"):
                jax.eval_shape(run, *args)
            assert registered == []
