"""Dispatch alone, with experts that sign their work: every (token, choice) pair exactly once."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from k3jax import dispatch, mesh
from k3jax.dispatch import guard
from k3jax.plan_report.compile_step import trace_step
from support import mesh_cases

EXPERTS = 20
NAMES = ("uniform", "zipf", "one expert", "one rank", "a rank without tokens")


def plan(cpu_devices: list[Any], shape: tuple[int, int, int], **options: Any) -> mesh.MeshPlan:
    data, lanes, inner = shape
    devices = tuple(cpu_devices[: data * lanes * inner])
    return mesh.MeshPlan(data, lanes * inner, inner, devices=devices, **options)


def check(
    spread: mesh.MeshPlan, kind: str, name: str, rows: int, capacity: int = 1, live: Any = None
) -> None:
    ids = mesh_cases.routing_ids(name, rows, 2, EXPERTS, spread.expert_ranks)
    live = np.ones(rows, bool) if live is None else live
    got, want = mesh_cases.count_pairs(spread, kind, ids, live, EXPERTS, capacity)
    # Exact: sums of one product and zeros.
    np.testing.assert_array_equal(got, want)
    assert (want != 0).sum() == 2 * live.sum()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
def test_ep01_every_pair_is_computed_once_by_its_expert(name: str, kind: str, cpu_devices: list[Any]) -> None:
    """20 experts on 8 ranks: 3 slots each, 4 of 24 are replicas. Capacity 1 needs many rounds."""
    check(plan(cpu_devices, (4, 2, 1)), kind, name, rows=24)


@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (3, 2, 1)])
def test_on_meshes_of_any_shape(kind: str, shape: tuple[int, int, int], cpu_devices: list[Any]) -> None:
    check(plan(cpu_devices, shape), kind, "uniform", rows=6 * shape[0], capacity=2)


@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
def test_where_every_expert_gets_the_same_number_of_rows(kind: str, cpu_devices: list[Any]) -> None:
    ids = mesh_cases.routing_ids("even", 40, 2, EXPERTS, 8)
    assert np.bincount(ids.ravel()).tolist() == [4] * EXPERTS
    check(plan(cpu_devices, (4, 2, 1)), kind, "even", rows=40)


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 100])
def test_ep08_rows_past_a_rounds_capacity_go_in_the_next(capacity: int, cpu_devices: list[Any]) -> None:
    """6 rows a rank, all for one rank: at, below and above what a round takes."""
    check(plan(cpu_devices, (4, 2, 1)), "all_to_all", "one rank", rows=48, capacity=capacity)


@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
@pytest.mark.parametrize("alive", [[], [17], [0, 1, 2, 3, 4, 5]])
def test_ep02_ranks_that_send_or_get_nothing_neither_hang_nor_add(
    kind: str, alive: list[int], cpu_devices: list[Any]
) -> None:
    live = np.zeros(24, bool)
    live[alive] = True
    check(plan(cpu_devices, (4, 2, 1)), kind, "uniform", rows=24, live=live)


def emulated_ragged(
    operand: Any, output: Any, input_offsets: Any, send_sizes: Any, output_offsets: Any, recv_sizes: Any,
    *, axis_name: Any,
) -> Any:  # fmt: skip
    """``lax.ragged_all_to_all`` by its definition, from gathers; -999 where receive sizes are wrong."""
    me, count = lax.axis_index(axis_name), lax.axis_size(axis_name)
    sent, start, size, into = (
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(output.shape[0])
    for sender in range(count):
        first, length = into[sender, me], size[sender, me]
        inside = (row >= first) & (row < first + length)
        from_row = jnp.clip(row - first + start[sender, me], 0, operand.shape[0] - 1)
        output = jnp.where(inside[:, None], sent[sender][from_row], output)
    honest = (size[:, me] == recv_sizes).all()
    return jnp.where(honest, output, jnp.full_like(output, -999))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(4, 2, 1), (2, 2, 2)])
def test_the_ragged_exchange_sends_what_its_sizes_say(
    name: str, shape: tuple[int, int, int], cpu_devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's CPU backend has no ragged exchange: its definition stands in, and shows wrong offsets."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged)
    check(plan(cpu_devices, shape), "ragged", name, rows=24)


def test_replicas_are_used_in_turn_by_the_tokens_number() -> None:
    where = mesh.place(6, 4)  # 8 slots, two experts twice
    twice = int(np.argmax(where.copies))
    tables = {"slots": jnp.asarray(where.slot_table()), "copies": jnp.asarray(where.copies)}
    ids = jnp.full((4, 1), twice, jnp.int32)
    slots = dispatch.chosen_slots(tables, ids, jnp.array([True, True, True, False]), 5)
    own = [s for s, e in enumerate(where.experts) if e == twice]
    assert slots[:, 0].tolist() == [own[1], own[0], own[1], -1]


def installed(**versions: str) -> Any:
    return lambda name: versions.get(name.replace("-", "_"))


@pytest.mark.parametrize("ranks", [33, 64, 72])
def test_ep03_more_ranks_than_were_seen_to_work_are_refused(ranks: int) -> None:
    (fault,) = guard.ragged_faults("gpu", ranks, installed(jaxlib="0.12.0"))
    assert f"of {ranks} ranks: jaxlib 0.12.0 is not known to survive more than 32" in fault


def test_ep03_up_to_32_ranks_on_gpus_nothing_is_held_against_it() -> None:
    assert guard.ragged_faults("gpu", 32, installed(jaxlib="0.12.0", nvidia_nccl_cu13="2.30.7")) == []


def test_ep03_a_fixed_jaxlib_lifts_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FIXED_JAXLIB", "0.13.1")
    assert guard.ragged_faults("gpu", 72, installed(jaxlib="0.13.1")) == []
    assert guard.ragged_faults("gpu", 72, installed(jaxlib="0.13.0")) != []


def test_ep04_a_known_bad_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FIXED_JAXLIB", "0.1")
    (fault,) = guard.ragged_faults("gpu", 64, installed(jaxlib="0.12", nvidia_nccl_cu12="2.30.7"))
    assert fault.startswith("NCCL 2.30.7 (nvidia-nccl-cu12) breaks")


class PretendGpu:
    """A device as far as a plan looks before anything is launched."""

    platform, process_index, device_kind = "gpu", 0, "NVIDIA GB300"

    def __init__(self, number: int):
        self.id = number


@pytest.mark.parametrize(
    ("shape", "versions", "reasons"),
    [
        ((9, 8, 1), {"jaxlib": "0.12.0"}, ["of 72 ranks: jaxlib 0.12.0 is not known to survive"]),
        ((33, 1, 1), {"jaxlib": "0.12.0"}, ["of 33 ranks: jaxlib 0.12.0"]),
        (
            (8, 8, 1),
            {"jaxlib": "0.12.0", "nvidia-nccl-cu13": "2.30.7"},
            ["of 64 ranks: jaxlib 0.12.0", "NCCL 2.30.7 (nvidia-nccl-cu13) breaks"],
        ),
        ((8, 8, 2), {"jaxlib": "0.12.0"}, ["of 64 ranks"]),  # ranks that exchange, not devices, count
        ((4, 8, 2), {"jaxlib": "0.12.0", "nvidia-nccl-cu13": "2.30.7"}, []),
        ((1, 32, 1), {"jaxlib": "0.12.0", "nvidia-nccl-cu12": "2.30.7"}, []),
    ],
)
def test_ep03_a_plan_over_gpus_raises_what_is_known_to_be_bad_before_any_launch(
    shape: tuple[int, int, int], versions: dict[str, str], reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh_cases.pretend_installed(monkeypatch, versions)
    data, lanes, inner = shape
    gpus = tuple(PretendGpu(i) for i in range(data * lanes * inner))
    for kind in ("gather", "all_to_all", "auto"):
        mesh.MeshPlan(data, lanes * inner, inner, dispatch=kind, devices=gpus).check_devices()
    asked = mesh.MeshPlan(data, lanes * inner, inner, dispatch="ragged", devices=gpus)
    if not reasons:
        asked.check_devices()
        return
    with pytest.raises(NotImplementedError, match=r"^dispatch 'ragged': ") as error:
        asked.check_devices()
    assert [part for part in reasons if part not in str(error.value)] == []
    assert str(error.value).count("; ") == len(reasons) - 1


def test_ep04_a_bad_nccl_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FIXED_JAXLIB", "0.12")
    mesh_cases.pretend_installed(monkeypatch, {"jaxlib": "0.12.0", "nvidia-nccl-cu13": "2.30.7"})
    gpus = tuple(PretendGpu(i) for i in range(72))
    with pytest.raises(NotImplementedError, match=r"^dispatch 'ragged': NCCL 2\.30\.7 \(nvidia-nccl-cu13\)"):
        mesh.MeshPlan(9, 8, dispatch="ragged", devices=gpus).check_devices()
    mesh_cases.pretend_installed(monkeypatch, {"jaxlib": "0.12.0", "nvidia-nccl-cu13": "2.31.0"})
    mesh.MeshPlan(9, 8, dispatch="ragged", devices=gpus).check_devices()


def test_a_step_with_the_ragged_exchange_lowers_for_cuda_over_eight_devices(
    cpu_devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real ``lax.ragged_all_to_all``, in the whole step: XLA's CPU backend cannot compile it."""
    c = mesh_cases.config()
    spread = mesh.for_devices(8, c, tensor=2, dispatch="ragged", devices=tuple(cpu_devices[:8]))
    monkeypatch.setattr(mesh.plan, "ragged_faults", lambda *_: [])
    traced = trace_step(c, spread, 8, 256)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@ragged_all_to_all" in line]
    per_layer, rows, ranks = 4, 2 // 2, 8  # latent, experts, weights, and the outputs back
    assert len(calls) == per_layer * c.num_moe_layers
    for line in calls:
        assert "replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>" in line
    width, slots = c.routed_expert_hidden_size, c.num_experts_per_token
    sizes = Counter(size for line in calls for size in re.findall(r"\) -> tensor<(\S+)>", line))
    places = f"{ranks * rows}x"
    layers = c.num_moe_layers
    assert sizes == {
        f"{places}{width}xbf16": layers, f"{places}{slots}xi32": layers,
        f"{places}{slots}xf32": layers, f"{places}{width}xf32": layers,
    }  # fmt: skip


def test_the_platform_of_these_tests_has_no_ragged_exchange(cpu_devices: list[Any]) -> None:
    asked = plan(cpu_devices, (4, 2, 1), dispatch="ragged")
    with pytest.raises(NotImplementedError, match="ragged_all_to_all is not implemented on cpu"):
        asked.check_devices()


def test_the_harness_sees_a_lost_and_a_misplaced_pair(
    cpu_devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counting fails where a round is skipped, and where loader and map disagree (EP-06)."""
    from k3jax.dispatch import exchange

    spread = plan(cpu_devices, (4, 2, 1))
    ids = mesh_cases.routing_ids("one rank", 24, 2, EXPERTS, 8)
    real = exchange._pack
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "_pack", lambda q, x, s, w, start, *rest: real(q, x, s, w, start + 1, *rest))
        got, want = mesh_cases.count_pairs(spread, "all_to_all", ids, np.ones(24, bool), EXPERTS, 1)
    assert (got != want).any()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "chosen_slots", lambda table, ids, *_: ids)  # the round-robin assumption
        got, want = mesh_cases.count_pairs(spread, "gather", ids, np.ones(24, bool), EXPERTS, 1)
    assert (got != want).any()


def test_capacity_bounds_a_round_and_auto_never_takes_the_ragged_exchange() -> None:
    for rows in (1, 8, 64, 4096):
        choice = dispatch.choose("auto", None, rows=rows, lanes=8, ranks=72, slots=16)
        assert choice.kind in ("gather", "all_to_all")
        assert 1 <= choice.capacity <= -(-rows // 8)
    assert dispatch.choose("all_to_all", 3, rows=64, lanes=8, ranks=72, slots=16).capacity == 3
