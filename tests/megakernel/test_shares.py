"""Shares of a model: their segments, and steps of all ranks by interpretation against the whole model."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import k3jax
from k3jax import mesh
from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel.instructions import Exchange, Op
from k3jax.custom_calls.decode_megakernel.schedule import build
from k3jax.custom_calls.decode_megakernel.segments import launched, segment_problems, segments
from k3jax.custom_calls.decode_megakernel.shapes import Plan
from k3jax.custom_calls.decode_megakernel.validate import validate
from k3jax.custom_calls.tables import launch_tables
from support import mesh_cases
from support.compare import assert_close
from support.megakernel_shares import run_ranks, whole_layers

F32, WHY = 2e-5, "float32 sums in another order through four layers: below 3e-6 measured"


def stages(schedule: Any) -> list[str]:
    """Operations with their layers, in order, neighbours of one stage once."""
    names = [f"{i.op.name}.{i.layer}" for i in schedule.instructions]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


def test_the_list_of_a_whole_model_has_no_exchange_and_its_stages_in_their_order() -> None:
    """What the GPU's evidence is about."""
    config = K3Config.preset("k3-slice", num_layers=4)
    kda = "MIX KDA_IN KDA_DECAY KDA_STEP KDA_OUT MIX"
    mla = "MIX MLA_IN MLA_QUERY MLA_ROW MLA_ABSORB MLA_ATTEND MLA_VALUE MLA_OUT MIX"
    moe = "ROUTER LATENT_DOWN ROUTE GATE_UP EXPERT_IN SHARED_DOWN EXPERT_OUT SHARED_DOWN COMBINE LATENT_UP"
    layers = [
        f"{kda} GATE_UP DENSE_DOWN",
        f"{kda} {moe}",
        f"{kda} {moe}",
        f"{mla} {moe}",
        "MIX LM_HEAD FINISH",
    ]
    want = ["EMBED.0", *(f"{name}.{i}" for i, line in enumerate(layers) for name in line.split())]
    for batch in (1, 8):
        schedule = build(Plan(config, batch))
        assert stages(schedule) == want
        assert launched(schedule) == schedule.instructions
        (whole,) = segments(schedule)
        assert (whole.kind, whole.gives, whole.first, whole.last) == (
            None,
            None,
            0,
            len(schedule.instructions),
        )


@pytest.mark.parametrize(("ways", "expert_ways"), [(2, 1), (2, 2), (4, 2), (16, 16)])
def test_a_share_has_four_exchanges_a_layer_and_its_segments_are_proven(ways: int, expert_ways: int) -> None:
    config = K3Config.preset("k3-slice", num_layers=4)
    schedule = build(Plan(config, 2, ways=ways, expert_ways=expert_ways))
    assert list(segment_problems(schedule)) == []
    parts = segments(schedule)
    both = [Exchange.ATTENTION, Exchange.LATENT, Exchange.ROUTED, Exchange.FFN]
    want = [Exchange.EMBEDDING, Exchange.ATTENTION, Exchange.FFN, *both, *both, *both]
    assert [part.kind for part in parts] == want
    assert [part.gives for part in parts] == [*want[1:], None]
    ends = [schedule.instructions[part.last - 1].op for part in parts]
    moe = [Op.LATENT_DOWN, Op.COMBINE, Op.LATENT_UP]
    assert ends == [
        Op.KDA_OUT, Op.DENSE_DOWN, Op.KDA_OUT, *moe, Op.KDA_OUT, *moe, Op.MLA_OUT, *moe, Op.FINISH,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ways", "expert_ways", "batch"), [(8, 8, 1), pytest.param(16, 1, 8, marks=pytest.mark.slow)]
)
def test_all_of_k3_over_many_ranks_is_proven(ways: int, expert_ways: int, batch: int) -> None:
    """The list with its exchanges, and the launches between them."""
    schedule = build(Plan(K3Config.preset("k3"), batch, ways=ways, expert_ways=expert_ways))
    validate(schedule)
    assert len(segments(schedule)) == 1 + 2 + 92 * 4


def test_the_launches_of_a_share_run_every_instruction_but_the_exchanges_once_on_each_of_its_sms() -> None:
    plan = Plan(K3Config.preset("k3-slice", num_layers=3), 1, ways=2)
    tables = launch_tables(plan)
    instructions = tables.schedule.instructions
    parts = segments(tables.schedule)
    assert tables.starts.shape == (len(parts), plan.sms + 1)
    seen: list[tuple[int, int]] = []
    for part, starts in zip(parts, tables.starts, strict=True):
        for sm in range(plan.sms):
            mine = tables.program[starts[sm] : starts[sm + 1]].tolist()
            assert all(part.first <= at < part.last for at in mine)
            assert mine == sorted(mine)
            seen += [(at, sm) for at in mine]
    want = [
        (at, sm) for at, i in enumerate(instructions) if i.op != Op.EXCHANGE for sm in range(i.sm0, i.sm1)
    ]
    assert sorted(seen) == want
    for at, ins in enumerate(launched(tables.schedule)):
        assert tables.records[at, 10] == len(ins.waits)


def test_held_experts_and_slots_are_those_of_the_rank() -> None:
    config = K3Config.preset("k3")
    spread = Plan(config, 8, ways=16, expert_ways=16)
    assert (spread.held, spread.slots, spread.F) == (56, 56, 3072)
    cut = Plan(config, 8, ways=16)
    assert (cut.held, cut.slots, cut.F) == (896, 128, 192)
    both = Plan(config, 1, ways=8, expert_ways=4)
    assert (both.held, both.slots, both.F) == (224, 16, 1536)
    with pytest.raises(ValueError, match=r"expert_ways: expected a divisor of ways=4, got 3"):
        Plan(config, 1, ways=4, expert_ways=3)


# -- steps --------------------------------------------------------------------------------------


@functools.cache
def begun(experts: int, batch: int, width: int = 64) -> Any:
    c = mesh_cases.config(experts, width)
    one = k3jax.Model(mesh_cases.params(experts, width), c)
    return one.prefill(mesh_cases.tokens(batch, 5), max_length=256, logits="none")[1]


@pytest.mark.parametrize(
    ("ways", "width", "experts", "batch"),
    [
        (4, 1, 22, 3),
        pytest.param(4, 2, 20, 3, marks=pytest.mark.slow),
        pytest.param(2, 2, 20, 3, marks=pytest.mark.slow),
        pytest.param(4, 4, 20, 1, marks=pytest.mark.slow),
        pytest.param(2, 1, 20, 3, marks=pytest.mark.slow),
        pytest.param(4, 1, 22, 8, marks=pytest.mark.slow),
        pytest.param(8, 1, 20, 1, marks=pytest.mark.slow),
    ],
)
def test_steps_of_all_ranks_are_the_models_and_every_choice_is_served_once(
    ways: int, width: int, experts: int, batch: int
) -> None:
    of = (experts, 32 * max(2, width))
    c, params = mesh_cases.config(*of), mesh_cases.params(*of)
    plan = mesh.MeshPlan(1, ways, expert_width=width)
    state = begun(experts, batch, of[1])
    tokens = mesh_cases.tokens(batch, 1, seed=1)[:, 0]
    seen: dict[str, Any] = {}
    want, after = k3jax.decode_step(params, state, tokens, config=c, tap=seen.__setitem__)
    run = run_ranks(params, c, plan, state, tokens, np.ones(batch, bool), seed=batch)
    assert_close("logits", run.logits, want, F32, WHY)
    for i, layer in enumerate(after.layers):
        for name, leaf in layer.items():
            assert_close(f"layer {i}: {name}", whole_layers(run, c, plan, i, name), leaf, F32, WHY)
    assert sorted(run.routes) == [1, 2, 3]
    for layer, ranks in run.routes.items():
        chosen = np.asarray(seen[f"layers.{layer}.topk_ids"])
        place = plan.placements(c)[layer - 1]
        held = np.asarray(place.experts).reshape(place.ranks, -1)
        served = np.zeros_like(chosen)
        for rank, (ids, here) in enumerate(ranks):
            np.testing.assert_array_equal(ids, chosen)
            mine = here >= 0
            np.testing.assert_array_equal(held[rank // width][here[mine]], ids[mine])
            served += mine
        assert (served == width).all()  # the ranks that share a width serve a choice together


def test_rows_that_sit_out_are_left_alone_by_every_rank() -> None:
    c, params = mesh_cases.config(), mesh_cases.params()
    plan = mesh.MeshPlan(1, 2)
    state = begun(20, 5)
    lengths = np.asarray(state.lengths).copy()
    lengths[2] = state.max_length
    state = k3jax.State(state.layers, lengths, state.status, state.max_length)
    tokens = np.array([3, 4, 5, c.vocab_size, 7], np.int32)
    active = np.array([True, False, True, True, True])
    want, after = jax.jit(functools.partial(k3jax.decode_step, config=c))(params, state, tokens, active)
    run = run_ranks(params, c, plan, state, tokens, active)
    assert not run.logits[1].any()
    assert np.isnan(run.logits[[2, 3]]).all()
    assert_close("logits", run.logits[[0, 4]], np.asarray(want)[[0, 4]], F32, WHY)
    for i, layer in enumerate(after.layers):
        for name, leaf in layer.items():
            got = whole_layers(run, c, plan, i, name)
            assert_close(f"layer {i}: {name}", got, leaf, F32, WHY)
            np.testing.assert_array_equal(got[1:4], np.asarray(state.layers[i][name])[1:4])
