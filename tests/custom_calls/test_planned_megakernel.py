"""The megakernel under a mesh: packed weights of every rank, the program of a step, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import k3jax
from k3jax import K3Config, checkpoints, mesh, sharded_step
from k3jax.custom_calls import artifacts, ffi, fit, planned, planned_step, support
from k3jax.custom_calls.decode_megakernel.operands import packed_part, packed_shapes
from k3jax.custom_calls.pack import PACKED
from k3jax.custom_calls.step import operands_only, target_of
from support import megakernel, mesh_cases
from support.megakernel_shares import local_params

EXPERTS = 22


@functools.cache
def config() -> K3Config:
    return mesh_cases.config(EXPERTS)


@functools.cache
def plan_of(ways: int, width: int = 1) -> mesh.MeshPlan:
    return mesh.MeshPlan(1, ways, expert_width=width, devices=tuple(jax.devices("cpu")[:ways]))


@functools.cache
def packed_params(ways: int, width: int = 1) -> Any:
    plan = plan_of(ways, width)
    tree = mesh.arrange(mesh_cases.params(EXPERTS, 64, None), config(), plan)
    return planned.with_packed(tree, config(), plan)


# -- packing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ways", "width"), [(4, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_each_rank_packs_what_it_has_and_holds_nothing_else(ways: int, width: int) -> None:
    """22 experts on 4 ranks: 6 places each, two of them replicas."""
    plan, packed = plan_of(ways, width), packed_params(ways, width)[PACKED]
    share = planned.plan_of_share(config(), plan, 1, target_of()[1])
    shapes = packed_shapes(share)
    assert set(packed) == set(shapes)
    for rank in range(ways):
        tree = local_params(mesh_cases.params(EXPERTS, 64, None), config(), plan, rank)
        for name, (dtype, shape) in shapes.items():
            leaf = packed[name]
            assert leaf.shape == (ways, *shape), name
            (shard,) = [s for s in leaf.addressable_shards if s.device == plan.mesh.devices.flat[rank]]
            assert shard.data.shape == (1, *shape), name
            want = np.stack([np.asarray(packed_part(tree, share, name, i)) for i in range(shape[0])])
            got = np.asarray(shard.data)[0].astype(want.dtype)
            # Only the rate is computed, an exponential; all else is moved.
            bound = 2e-7 if name == "kda.rate" else 0
            np.testing.assert_allclose(got, want, rtol=bound, atol=0, err_msg=name)
            assert str(leaf.dtype) == dtype


def test_a_row_and_an_expert_are_served_by_one_place_of_all_ranks() -> None:
    """The table the kernel reads is the dispatch's choice of a replica."""
    plan = plan_of(4)
    tables = np.asarray(packed_params(4)[PACKED]["moe.place"])  # [ranks, layers, rows, experts]
    assert ((tables >= 0).sum(axis=0) == 1).all()
    for layer, place in enumerate(plan.placements(config())):
        held = np.asarray(place.experts).reshape(4, -1)
        for row in range(8):
            want = place.slot_table()[np.arange(EXPERTS), row % place.copies]
            rank = tables[:, layer, row].argmax(axis=0)
            at = tables[:, layer, row].max(axis=0)
            np.testing.assert_array_equal(rank * place.slots_per_rank + at, want)
            np.testing.assert_array_equal(held[rank, at], np.arange(EXPERTS))


def test_a_matrix_is_written_into_its_stack_in_place_on_every_rank() -> None:
    plan, name = plan_of(4), "kda_in"
    share = planned.plan_of_share(config(), plan, 1, target_of()[1])
    _, shape = packed_shapes(share)[name]
    one = 2 * int(np.prod(shape[1:]))  # bytes of a rank's matrix
    stack = jax.ShapeDtypeStruct(
        (4, 1000, *shape[1:]), jnp.bfloat16, sharding=NamedSharding(plan.mesh, planned.RANKS)
    )
    source = {"self_attn": packed_params(4)["layers"][0]["self_attn"]}
    lowered = planned._put.lower(stack, source, jnp.int32(0), p=share, plan=plan, name=name, layer=0)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 1000 * one
    # The stacked rows, padded, and the tiles; XLA:CPU computes some of it in float32.
    assert memory.temp_size_in_bytes <= 6 * one


def test_float_weights_and_files_are_refused() -> None:
    plan = plan_of(2)
    tree = mesh.arrange(mesh_cases.params(), mesh_cases.config(), plan)
    with pytest.raises(NotImplementedError, match="dtype: the megakernel computes in bfloat16, got float32"):
        planned.with_packed(tree, mesh_cases.config(), plan)
    model = k3jax.Model(tree, mesh_cases.config(), mesh=plan)
    with pytest.raises(NotImplementedError, match="folder: packed weights of a plan are made anew"):
        model.pack("somewhere")


def test_a_packed_model_goes_on_by_xla() -> None:
    plan = plan_of(2, 2)
    model = k3jax.Model(packed_params(2, 2), config(), mesh=plan)
    plain = k3jax.Model(model._plain_params(), config(), mesh=plan)
    assert model.implementation == "xla"
    state = model.init_state(2, 64)
    assert state.kernel is None
    got, want = (m.decode_step([1, 2], m.prefill([[3], [4]], state=state)[1])[0] for m in (model, plain))
    np.testing.assert_array_equal(got, want)


# -- the program of a step ------------------------------------------------------------------------


def lowered(
    ways: int, width: int, monkeypatch: pytest.MonkeyPatch, batch: int = 2, peers: bool = False
) -> tuple[str, Any]:
    plan = plan_of(ways, width)
    share = planned.plan_of_share(config(), plan, batch, target_of()[1])
    # Widths that a CPU can multiply are not the kernel's.
    monkeypatch.setattr(fit, "plan_reasons", lambda plan: ())
    monkeypatch.setattr(planned_step, "obtain", lambda key: megakernel.artifact(batch, plan=key.plan))
    state = mesh.planned_state(config(), plan, batch, 300, "bfloat16")
    state = planned.with_kernel(state, config(), plan, peers)

    def step(params: Any, state: Any, tokens: Any, active: Any) -> Any:
        if peers:
            out = planned_step.step(
                params, state, tokens, active, config=config(), plan=plan, implementation="megakernel",
                mailboxes=np.zeros((ways, 2), np.int32),
            )  # fmt: skip
            return out.logits, out.state
        return sharded_step.decode_step(
            params, state, tokens, active, config=config(), plan=plan, implementation="megakernel"
        )

    arguments = (operands_only(packed_params(ways, width)), state, np.arange(batch), np.ones(batch, bool))
    traced = jax.jit(step, donate_argnums=1).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text(), share


@pytest.mark.parametrize(("ways", "width"), [(4, 1), (4, 2), (2, 2)])
def test_a_step_is_a_custom_call_for_each_segment_and_the_collectives_between_them(
    ways: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, _ = lowered(ways, width, monkeypatch)
    seen = Counter(re.findall(r"= \"?(stablehlo\.\w+|call @one|func\.call @one)", text))
    calls = seen["call @one"] + seen["func.call @one"]
    # The embedding; an attention and a dense layer's two exchanges, three LatentMoE layers' four.
    assert calls == 1 + 2 + 3 * 4
    functions = re.findall(r"func\.func private @one\w*", text)
    assert text.count(f"@{ffi.TARGET}(") == seen["stablehlo.custom_call"] == len(functions) <= 2
    assert seen["stablehlo.all_reduce"] == 1 + 4 + 4 + 3
    assert seen["stablehlo.all_gather"] == 3 + 1  # latent rows, and the fault record
    assert not [name for name in seen if "dot" in name or "convolution" in name or "while" in name]


def test_a_step_that_exchanges_in_the_kernel_is_one_custom_call(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = lowered(4, 1, monkeypatch, peers=True)
    seen = Counter(re.findall(r"= \"?(stablehlo\.\w+|call @one|func\.call @one)", text))
    assert seen["call @one"] + seen["func.call @one"] == 1
    assert text.count(f"@{ffi.TARGET}(") == 1
    assert seen["stablehlo.all_reduce"] == 1  # of the embedding
    assert seen["stablehlo.all_gather"] == 1  # of the fault record
    assert not [name for name in seen if "dot" in name]


def test_mailboxes_are_refused_where_there_are_no_gpus() -> None:
    from k3jax.custom_calls.mailboxes import Mailboxes, address_words

    with pytest.raises(NotImplementedError, match="mailboxes: expected NVIDIA GPUs, got cpu"):
        Mailboxes(config(), plan_of(2), 1)
    with pytest.raises(NotImplementedError, match=r"at least 2 devices, got 1; .*got cpu"):
        Mailboxes(config(), plan_of(1), 1)
    words = address_words([0x7F12_89AB_CDEF_0100, 0x1_0000])
    assert words.dtype == np.int32
    low, high = (int(x) & 0xFFFFFFFF for x in words[0])
    assert (high << 32 | low, words[1].tolist()) == (0x7F12_89AB_CDEF_0100, [0x10000, 0])


def test_a_donated_state_is_updated_in_place_but_for_what_the_mesh_keeps_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, _ = lowered(2, 2, monkeypatch)
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text)
    calls = text.count(f"@{ffi.TARGET}(")
    # S and conv of two KDA layers, two caches, work, fault, lengths and status.
    assert len(aliases) == calls * (2 * 2 + 2 + 2 + 2)


def test_one_device_is_one_segment_without_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    text, share = lowered(1, 1, monkeypatch)
    assert share.ways == 1
    assert text.count(f"@{ffi.TARGET}(") == 1
    seen = Counter(re.findall(r"= \"?(stablehlo\.\w+)", text))
    assert seen["stablehlo.all_reduce"] == 0


def test_gpus_that_cannot_hold_a_ranks_kernel_are_refused_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, registered = plan_of(2, 2), list[None]()
    share = planned.plan_of_share(config(), plan, 2, target_of()[1])
    artifact = megakernel.artifact(2, plan=share)
    monkeypatch.setattr(fit, "plan_reasons", lambda plan: ())
    monkeypatch.setattr(ffi, "register", lambda: registered.append(None))
    monkeypatch.setattr(mesh.MeshPlan, "platform", "gpu")
    state = planned.with_kernel(mesh.planned_state(config(), plan, 2, 300, "bfloat16"), config(), plan)

    def step(registers: int) -> Any:
        given = dataclasses.replace(artifact, about={**artifact.about, "registers": registers})
        run = functools.partial(
            planned_step.step, config=config(), plan=plan, implementation="megakernel", artifact=given
        )
        return jax.eval_shape(
            run, operands_only(packed_params(2, 2)), state, jnp.arange(2), jnp.ones(2, bool)
        )

    reason = (
        "not available here: occupancy: the kernel takes 176 registers a thread, an SM has 168; available"
    )
    with pytest.raises(NotImplementedError, match=reason):
        step(176)
    assert registered == []
    assert step(168).token.shape == (2,)
    assert registered == [None]


def test_a_state_without_or_with_other_kernel_leaves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(2, 2)
    monkeypatch.setattr(fit, "plan_reasons", lambda plan: ())
    monkeypatch.setattr(planned_step, "obtain", lambda key: megakernel.artifact(2, plan=key.plan))
    step = functools.partial(
        planned_step.step, operands_only(packed_params(2, 2)), tokens=jnp.arange(2), active=jnp.ones(2, bool),
        config=config(), plan=plan, implementation="megakernel",
    )  # fmt: skip
    bare = mesh.planned_state(config(), plan, 2, 300, "bfloat16")
    with pytest.raises(ValueError, match=r"state\.kernel: absent"):
        step(state=bare)
    one = planned.with_kernel(mesh.planned_state(config(), plan, 1, 300, "bfloat16"), config(), plan)
    with pytest.raises(
        ValueError, match=r"state\.kernel\['work'\]: expected .* for 2 rows on 2 ranks of 132"
    ):
        step(state=dataclasses.replace(bare, kernel=one.kernel))
    with pytest.raises(ValueError, match=r"state\.kernel: expected None, as this step under a plan"):
        sharded_step.decode_step(
            {name: leaf for name, leaf in packed_params(2, 2).items() if name != PACKED},
            dataclasses.replace(bare, kernel=one.kernel), jnp.arange(2), jnp.ones(2, bool),
            config=config(), plan=plan,
        )  # fmt: skip


# -- what is refused ------------------------------------------------------------------------------


def found(plan: mesh.MeshPlan, batch: int = 1, **options: Any) -> list[str]:
    return list(support.supports(config(), batch=batch, plan=plan, **options))


def test_everything_that_speaks_against_a_plan_is_said_at_once() -> None:
    wrong = mesh.MeshPlan(
        2, 4, dispatch="all_to_all", split_sequence=True, devices=tuple(jax.devices("cpu")[:8])
    )
    reasons = found(wrong, 9, implementation="megakernel-interpret")
    starts = (
        "mesh: .*data=1.*got data=2, tensor=4",
        "split_sequence",
        "dispatch: .*got 'all_to_all'",
        "batch",
    )
    assert len(reasons) == len(starts)
    for pattern, reason in zip(starts, reasons, strict=True):
        assert re.match(pattern, reason), reason
    assert found(plan_of(4), 8, implementation="megakernel-interpret") == []
    assert found(plan_of(4), 8, implementation="xla") == []


def test_the_kernel_under_a_plan_needs_gpus_the_library_and_a_kernel_of_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(artifacts, "_folders", [])
    monkeypatch.setattr(support, "compiler_problem", lambda: "no compiler")
    nano = K3Config.from_pretrained(checkpoints.resolve("nano"))
    reasons = list(support.supports(nano, batch=2, plan=plan_of(2)))
    assert reasons[0] == "device: expected NVIDIA GPUs, got cpu"
    assert re.match(
        r"kernel: sm_90a-132sm-batch2-ways2-experts2-\w+\.k3kernel is not in the cache", reasons[-1]
    )
    with pytest.raises(NotImplementedError, match="device: expected NVIDIA GPUs, got cpu"):
        k3jax.load("nano", mesh=plan_of(2), implementation="megakernel", progress=False)


@pytest.mark.parametrize("batch", [1, 8])
def test_the_kernel_takes_shares_of_nano_and_of_the_release(batch: int) -> None:
    """What the mesh, the parameters' kinds and the kernel's tiles have against it: nothing."""
    nano = K3Config.from_pretrained(checkpoints.resolve("nano"))
    assert planned.planned_problems(nano, plan_of(2), batch, None, "megakernel") == []
    assert planned.planned_problems(nano, plan_of(2, 2), batch, None, "megakernel") == [
        "moe_intermediate_size: the kernel reads experts in multiples of 64 columns, got 32"
    ]
    k3 = K3Config.preset("k3")
    for ways, width in ((2, 1), (2, 2), (8, 1), (8, 2), (8, 8), (16, 16), (16, 1), (32, 2)):
        assert planned.planned_problems(k3, mesh.MeshPlan(1, ways, width), batch, None, "megakernel") == []


def test_ways_and_a_plan_together_are_an_error() -> None:
    with pytest.raises(ValueError, match="ways: expected at least 1, and none with a plan"):
        support.supports(config(), ways=2, plan=plan_of(2))


def test_more_rows_than_the_megakernel_takes_are_refused_before_anything_runs() -> None:
    plan = plan_of(2, 2)
    tree = mesh.arrange(mesh_cases.params(EXPERTS, 64, None), config(), plan)
    model = k3jax.Model(tree, config(), mesh=plan, implementation="megakernel-interpret")
    with pytest.raises(NotImplementedError, match=r"batch: expected 1\.\.8, got 9"):
        model.init_state(9, 64)
    with pytest.raises(NotImplementedError, match=r"batch: expected 1\.\.8, got 9"):
        model.generate([[1]] * 9, max_new_tokens=2)
    state = mesh.planned_state(config(), plan_of(2, 2), 9, 64, model.dtype)
    with pytest.raises(NotImplementedError, match=r"batch: expected 1\.\.8, got 9"):
        model.decode_step(np.zeros(9, np.int32), state)
    with pytest.raises(NotImplementedError, match="data=1"):
        k3jax.Model(
            tree, config(), mesh=mesh.MeshPlan(2, 2, devices=tuple(jax.devices("cpu")[:4])),
            implementation="megakernel-interpret",
        )  # fmt: skip
