"""``load``, ``random_model`` and ``Model`` over a plan: the same weights, tokens and contracts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import k3jax
from k3jax import checkpoints, mesh
from support import process_pair
from support.checkpoint_files import assert_same_arrays, small_config, write_small
from support.compare import assert_close
from support.generation import config as text_config
from support.generation import model as text_model


def file_config(**changes: Any) -> Any:
    """Five experts for four ranks: two slots each, three replicas."""
    sizes = {
        "num_attention_heads": 4, "num_experts": 5, "vocab_size": 64, "intermediate_size": 48,
        "num_shared_experts": 1, "moe_intermediate_size": 64, "routed_expert_hidden_size": 64,
    }  # fmt: skip
    return small_config(**(sizes | changes))


def plan_of(c: Any, cpu_devices: list[Any], n: int = 8, **options: Any) -> mesh.MeshPlan:
    return mesh.for_devices(n, c, devices=tuple(cpu_devices[:n]), **options)


def held_bytes(params: Any) -> int:
    """Bytes of the distinct parts of arrays on this process's devices, placement maps apart."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if "placement" not in jax.tree_util.keystr(path):
            total += sum({str(s.index): s.data.nbytes for s in leaf.addressable_shards}.values())
    return total


@pytest.mark.parametrize("converted", [False, True])
def test_loading_fills_the_slots_of_the_plan_and_reads_what_they_need(
    converted: bool, tmp_path: Path, cpu_devices: list[Any]
) -> None:
    """EP-05, EP-06: the bytes are those of the one-device model, moved by the plan's own map."""
    c, _ = write_small(tmp_path / "release", config=file_config())
    path = tmp_path / "release"
    if converted:
        checkpoints.convert(path, tmp_path / "orbax", progress=False)
        path = tmp_path / "orbax"
    loads = np.arange(5.0)
    plan = plan_of(c, cpu_devices, 8, tensor=4, expert_width=2, loads=loads)
    whole, c, _ = checkpoints.load_params(path, progress=False)
    params, _, report = checkpoints.load_params(path, mesh=plan, progress=False)
    assert_same_arrays(params, mesh.arrange(whole, c, plan))
    assert report.bytes == held_bytes(params)
    assert plan.placements(c)[0].copies.tolist() == [1, 1, 2, 2, 2]


@pytest.mark.parametrize("converted", [False, True])
def test_a_scale_that_cannot_be_decoded_is_named_by_its_expert_not_its_slot(
    converted: bool, tmp_path: Path, cpu_devices: list[Any]
) -> None:
    def damage(tensors: dict[str, np.ndarray]) -> None:
        name = "model.layers.1.block_sparse_moe.experts.2.w1"
        tensors[f"{name}.weight_scale"][3, 0] = 1
        tensors[f"{name}.weight_packed"][3, 3] = 0x70

    write_small(tmp_path / "release", damage, config=file_config())
    path = tmp_path / "release"
    if converted:
        checkpoints.convert(path, tmp_path / "orbax", progress=False)
        path = tmp_path / "orbax"
    plan = plan_of(file_config(), cpu_devices, 4, tensor=1, loads=[9.0, 0.1, 0.2, 8.0, 7.0])
    slot = plan.placements(file_config())[0].experts.index(2)
    assert slot != 2
    expected = r"experts.w1, scale at \[2, 3, 0\]" if converted else r"experts\.2\.w1\.weight_scale"
    with pytest.raises(checkpoints.CheckpointError, match=expected):
        checkpoints.load_params(path, mesh=plan, progress=False)


@pytest.mark.slow
def test_a_seed_gives_the_weights_of_one_device(cpu_devices: list[Any]) -> None:
    c = file_config()
    plan = plan_of(c, cpu_devices, 8, tensor=4, expert_width=2, loads=np.arange(5.0))
    many = k3jax.random_model(c, seed=4, mesh=plan)
    assert_same_arrays(many.params, mesh.arrange(k3jax.random_model(c, seed=4).params, c, plan))


@functools.cache
def planned(devices: tuple[Any, ...]) -> k3jax.Model:
    """The generation tests' model over four devices: rows in two groups, 6 experts on 4 ranks."""
    c = text_config()
    plan = mesh.MeshPlan(2, 2, devices=devices)
    return k3jax.Model(mesh.arrange(text_model().params, c, plan), c, mesh=plan)


def test_generated_tokens_are_those_of_one_device_also_for_an_odd_number_of_rows(
    cpu_devices: list[Any],
) -> None:
    many = planned(tuple(cpu_devices[:4]))
    sampling = k3jax.Sampling(temperature=0.9, top_k=40, repetition_penalty=1.3)
    prompts = ["mesh", "of four", "and a third row"]
    each = [sampling, k3jax.Sampling(), sampling]
    got = many.generate(prompts, max_new_tokens=6, sampling=each, seed=[1, 2, 3])
    want = text_model().generate(prompts, max_new_tokens=6, sampling=each, seed=[1, 2, 3])
    assert got.tokens == want.tokens
    assert got.text == want.text
    assert got.finish_reason == want.finish_reason
    mine, theirs = np.concatenate(got.logprobs), np.concatenate(want.logprobs)
    assert_close("logprobs", mine, theirs, 5e-5, "a mesh sums in another order")


def test_states_have_padded_rows_and_selected_rows_go_on(cpu_devices: list[Any]) -> None:
    many, one = planned(tuple(cpu_devices[:4])), text_model()
    ids = np.array([[5, 6, 7], [8, 9, 10], [11, 12, 13]], np.int32)
    logits, state = many.prefill(ids, lengths=[3, 2, 3])
    want, alone = one.prefill(ids, lengths=[3, 2, 3])
    bound, why = 5e-5, "a mesh sums in another order: the bound for float32"
    assert_close("prefill", logits, want, bound, why)
    assert state.batch == 4
    assert state.lengths.tolist() == [3, 2, 3, 0]
    step, after = many.decode_step([4, 5, 6], state, active=[True, True, False])
    expected, alone = one.decode_step([4, 5, 6], alone, active=[True, True, False])
    assert_close("step", step, expected, bound, why)
    assert after.lengths.tolist() == [4, 3, 3, 0]
    assert state.lengths.tolist() == [3, 2, 3, 0]  # the state passed in stays valid
    picked, _ = many.decode_step([7], after.select([1]))
    assert_close("selected", picked, one.decode_step([7], alone.select([1]))[0], bound, why)
    more, _ = many.prefill(ids[:, :2], state=after)
    assert_close("continued", more, one.prefill(ids[:, :2], state=alone)[0], bound, why)


def test_the_contracts_of_a_model_hold_over_a_plan(cpu_devices: list[Any]) -> None:
    many = planned(tuple(cpu_devices[:4]))
    state = many.init_state(3, 300)
    with pytest.raises(ValueError, match=r"expected as many rows as the state has, 4 \(data=2 pads\), got 2"):
        many.decode_step([1, 2], state)
    with pytest.raises(k3jax.TokenError, match=r"tokens: expected ids in 0\.\.299, got 300"):
        many.decode_step([1, 300, 2], state)
    with pytest.raises(k3jax.CapacityError, match="row 0 holds 0 of max_length=300 tokens: 301 more"):
        many.prefill(np.zeros((3, 301), np.int32), state=state)
    _, full = many.prefill(np.zeros((3, 4), np.int32), lengths=[4, 1, 1], max_length=4, logits="none")
    with pytest.raises(k3jax.CapacityError, match="row 0 holds 4 of max_length=4"):
        many.decode_step([1, 2, 3], full)


def test_what_cannot_run_over_a_plan_is_refused_before_any_weight_is_read(
    cpu_devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: pytest.fail("read"))
    c = text_config()
    few, apart = (mesh.MeshPlan(*sizes, devices=tuple(cpu_devices[:2])) for sizes in ((1, 2), (2, 1)))
    for make in (lambda **k: k3jax.load("nano", **k), lambda **k: k3jax.random_model(c, **k)):
        with pytest.raises(NotImplementedError, match=r"expected data=1 .*, got data=2, tensor=1"):
            make(mesh=apart, implementation="megakernel-interpret")
        with pytest.raises(NotImplementedError, match="device: expected NVIDIA GPUs, got cpu"):
            make(mesh=few, implementation="megakernel")
        with pytest.raises(NotImplementedError, match="ragged_all_to_all is not implemented on cpu"):
            make(mesh=mesh.MeshPlan(1, 2, dispatch="ragged", devices=tuple(cpu_devices[:2])))
        with pytest.raises(ValueError, match=r"mesh: expected 4096 devices, jax sees \d+"):
            make(mesh=mesh.MeshPlan(2048, 2))
    with pytest.raises(ValueError, match="tensor=4 does not divide num_attention_heads=2"):
        k3jax.random_model(c, mesh=mesh.MeshPlan(1, 4, devices=tuple(cpu_devices[:4])))


WORKER = """
import json, sys
import jax
from k3jax import checkpoints, mesh
from k3jax.mesh.distributed import processes

coordinator, rank, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with processes(coordinator, 2, rank):
    config = checkpoints.load_params(path, progress=False)[1]
    plan = mesh.for_devices(8, config, tensor=2)
    params, _, report = checkpoints.load_params(path, mesh=plan, progress=False)
    need = 0
    for where, leaf in jax.tree_util.tree_leaves_with_path(params):
        if "placement" not in jax.tree_util.keystr(where):
            need += sum({str(s.index): s.data.nbytes for s in leaf.addressable_shards}.values())
    print(json.dumps({"bytes": report.bytes, "needed": need}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("converted", [False, True])
def test_each_of_two_processes_reads_only_the_bytes_of_its_devices(converted: bool, tmp_path: Path) -> None:
    c, _ = write_small(tmp_path / "release", config=file_config(num_experts=24))
    path = tmp_path / "release"
    if converted:
        checkpoints.convert(path, tmp_path / "orbax", progress=False)
        path = tmp_path / "orbax"
    found = [json.loads(line) for line in process_pair.run(WORKER, str(path), devices=4)]
    experts = c.num_moe_layers * 24 * 3 * 64 * 64 * (16 + 1) // 32
    for report in found:
        assert report["bytes"] == report["needed"]
    # Experts are half in each process: the two together read them once and the rest twice.
    assert abs(found[0]["bytes"] - found[1]["bytes"]) < 0.01 * experts
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(checkpoints.load_params(path, progress=False)[0]))
    assert found[0]["bytes"] <= whole - experts // 2
