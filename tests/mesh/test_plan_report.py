"""``k3jax plan``: the arithmetic of its report, what it refuses, and the compilation for 72 GPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

import k3jax
from k3jax import cli, mesh
from k3jax.mesh import device_bytes
from k3jax.plan_report import compile_step, picture, projection, report
from k3jax.plan_report.command import devices_of
from k3jax.plan_report.compile_step import Compiled, Request
from k3jax.plan_report.gpus import GPUS, Gpu
from k3jax.plan_report.schedule import Collective, Event
from k3jax.sizes import expert_bytes
from support import mesh_cases

K3 = k3jax.K3Config.preset("k3")
SHARED = "block_sparse_moe.shared_experts.down_proj"
SLICE = Request("k3-slice", 4, 72, 8, 1, "auto", False, batch=72, context=8192, gpu="gb300")


def compiled(**memory: int) -> Compiled:
    """What a compiler could have said of :data:`SLICE`."""
    sizes = {"argument": 100, "output": 40, "alias": 30, "temp": 7, "code": 3} | memory
    found = (
        Collective("all-reduce", tuple(range(8)), 8000, 1, False, 0, (), False),
        Collective("all-reduce", tuple(range(8)), 4000, 1, True, 1, (SHARED,), False),
        Collective("reduce-scatter", tuple(range(0, 72, 8)), 9000, 1, False, 0, (), False),
    )  # fmt: skip
    events = (Event(0, 0, "kernel", "block_sparse_moe.gate"), Event(1, 1, "all-reduce", ""))
    return Compiled(sizes, found, events, 1, "1x18x4", 1.0, 2.0, 3, {"jax": "0"})


def test_a_named_mesh_and_a_number_agree_or_are_refused() -> None:
    assert devices_of(None, None) == devices_of("nvl72", None) == devices_of("nvl72", 72) == 72
    assert devices_of(None, 16) == 16
    with pytest.raises(ValueError, match="devices: expected 72, as mesh nvl72 has, or none, got 16"):
        devices_of("nvl72", 16)
    with pytest.raises(ValueError, match="mesh: expected one of nvl72, got 'pod'"):
        devices_of("pod", None)


@pytest.mark.parametrize(
    ("gpu", "devices", "shape"),
    [("gb300", 72, "1x18x4"), ("h200", 72, "1x9x8"), ("h200", 4, "1x1x4"), ("gb300", 6, "1x2x3")],
)
def test_devices_come_in_hosts(gpu: str, devices: int, shape: str) -> None:
    assert GPUS[gpu].topology(devices) == shape


def test_what_a_step_takes_is_counted_once() -> None:
    """Memory in place counts once; a device sends what a ring sends; apart and waited for are separate."""
    gpu = dataclasses.replace(GPUS["h200"], ceiling=1e9, link=1e6, domain=8, network=1e3)
    found = compiled().collectives
    assert compiled().peak == 100 + 40 - 30 + 7 + 3
    near = projection.exchange_seconds(found[:2], gpu, 1e-3, 1.0)
    # 2 x 7/8 of the bytes of each sum at 1e6 bytes a second.
    assert near == pytest.approx(2e-3 + 2 * 7 / 8 * 12000 / 1e6)
    # Nine devices, each of another domain: 8/9 of 9000 bytes at 1e3 bytes a second.
    assert projection.exchange_seconds(found[2:], gpu, 1e-3, 1.0) == pytest.approx(1.0 + 8.0)
    moved = projection.Traffic(dense=5 * 10**8, experts=0, state=10**8, cache=4 * 10**8, slots=0.0)
    ceiling, xla, peer = projection.project(moved, found, gpu, K3)
    assert ceiling.stream == peer.stream == pytest.approx(1.0)
    assert xla.stream == pytest.approx(1.0 / projection.XLA_SHARE)
    assert ceiling.hidden == pytest.approx(projection.NCCL_SECONDS + 7000 / 1e6)
    assert ceiling.total == pytest.approx(ceiling.stream + ceiling.exchange + ceiling.hidden)
    assert peer.exchange < ceiling.exchange


def brute_busiest(plan: mesh.MeshPlan, config: Any, ids: np.ndarray) -> int:
    place = plan.placements(config)[0]
    held: list[set[int]] = [set() for _ in range(place.ranks)]
    for row, chosen in enumerate(ids):
        for expert in chosen:
            slots = [s for s, e in enumerate(place.experts) if e == expert]
            slot = slots[row % len(slots)]
            held[slot // place.slots_per_rank].add(slot)
    return max(map(len, held))


def test_the_busiest_rank_is_that_of_drawn_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "DRAWS", 1)
    plan = mesh.nvl72()
    for batch in (1, 5, 72):
        keys = np.random.default_rng(3).random((batch, 896))
        ids = np.argsort(keys, axis=1)[:, :16]
        assert projection.busiest_slots(plan, K3, batch, seed=3) == brute_busiest(plan, K3, ids)


def test_a_step_reads_its_weights_once_and_no_embedding_table() -> None:
    plan, config = mesh.nvl72(), SLICE.config()
    held = device_bytes(plan, config, 72, 8192)
    moved = projection.traffic(plan, config, held, 72)
    assert 12 < moved.slots <= 13  # 72 rows x 16 choices over 72 ranks of 13 slots
    assert moved.experts == round(3 * moved.slots * expert_bytes(config))
    assert moved.state == 2 * held.state["KDA states"]
    assert moved.cache == held.state["latent cache"]
    whole = sum(held.weights.values()) - held.weights["routed experts"]
    table = config.vocab_size * config.hidden_size * 2 // 8
    assert moved.dense == whole - table + 8 * config.hidden_size * 2


def test_the_report_says_what_fits_and_what_would() -> None:
    small = report.make_report(SLICE, compiled())
    assert small.fits == {"gb300": True, "h200": True}
    assert small.devices_needed == {"gb300": 8, "h200": 8}
    large = report.make_report(SLICE, compiled(temp=200 * 10**9))
    assert large.fits == {"gb300": True, "h200": False}
    assert large.devices_needed["gb300"] == 8
    assert large.devices_needed["h200"] is None  # the work space alone is more than its memory
    said = report.text(large)
    assert "does not fit; no plan of up to 1152 devices with tensor=8 holds it" in said


@pytest.mark.slow
def test_the_release_needs_sixteen_h200s_or_eight_gb300s() -> None:
    whole = report.make_report(dataclasses.replace(SLICE, model="k3", layers=None, devices=8), None)
    assert whole.fits == {"gb300": True, "h200": False}
    assert whole.devices_needed == {"gb300": 8, "h200": 16}


def test_the_report_has_every_collective_and_the_overlap_and_every_assumption() -> None:
    said = report.text(report.make_report(SLICE, compiled()))
    assert "reduce-scatter           9 devices, every 8         1      0        9,000           8,000" in said
    assert "1 x all-reduce over 8 neighbours: shared_experts.down_proj" in said
    assert "the shared expert runs beside an exchange of routed outputs in 1 of 1 LatentMoE layers" in said
    assert "not measured for 72 GPUs" in said
    assert "compiled 4 layers, unrolled, for 72 gb300 (1x18x4)" in said


def bars(axes: Any) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_data_and_picture_are_of_the_same_report(tmp_path: Path) -> None:
    made = report.make_report(SLICE, compiled())
    data = json.loads(json.dumps(report.as_data(made)))
    assert compile_step.from_json(data["compiled"]) == compiled()
    assert data["projections"][0]["total"] == made.projections[0].total
    figure = picture.plot_plan(made)
    memory, exchanges, times, schedule = figure.axes
    assert sum(bar.get_height() for bar in bars(memory)) == pytest.approx(made.held.total / 1e9, rel=1e-6)
    assert exchanges.get_title().startswith("3 collectives")
    assert max(bar.get_x() + bar.get_width() for bar in bars(times)) == pytest.approx(
        max(p.total for p in made.projections) * 1e3
    )
    assert "layer 1" in schedule.get_title()
    picture.save(made, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_without_the_extra_the_command_says_what_to_install_and_still_has_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("k3jax.plan_report.command.missing", lambda: ["nvidia-nvvm"])
    assert cli.main(["plan", "--model", "k3-slice", "--layers", "4", "--batch", "9"]) == 0
    out, err = capsys.readouterr()
    assert "not compiled: needs nvidia-nvvm: pip install 'k3jax[plan]'" in err
    assert "936 slots, 13 a rank, 40 of them replicas" in out
    assert "does it fit, by arithmetic alone" in out
    monkeypatch.setattr(compile_step, "missing", lambda: ["nvidia-nvvm"])
    with pytest.raises(NotImplementedError, match=r"needs nvidia-nvvm: pip install 'k3jax\[plan\]'"):
        compile_step.compile_apart(SLICE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "tpu"], "gpu: expected one of gb300, h200, got 'tpu'"),
        (["--tensor", "9"], "tensor: expected a size that divides 72 devices"),
        (["--devices", "0"], "n: expected an integer of at least 1, got 0"),
        (["--layers", "3"], "preset 'k3' takes no num_layers"),
        (["--batch", "0"], "batch: expected at least 1, got 0"),
    ],
)
def test_what_cannot_work_ends_with_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3jax.plan_report.command.compile_apart", lambda _: pytest.fail("compiled"))
    assert cli.main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "versions", "reasons"),
    [
        ("72", {"jaxlib": "0.12.0"}, ["of 72 ranks: jaxlib 0.12.0 is not known to survive more than 32"]),
        (
            "72",
            {"jaxlib": "0.12.0", "nvidia-nccl-cu13": "2.30.7"},
            ["jaxlib 0.12.0", "; NCCL 2.30.7 (nvidia"],
        ),
        ("32", {"jaxlib": "0.12.0"}, []),
    ],
)
def test_ep03_a_ragged_exchange_that_a_step_would_refuse_is_refused_here(
    devices: str, versions: dict[str, str], reasons: list[str],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the GPUs of the plan, whatever this machine has; nothing is compiled or printed."""
    monkeypatch.setattr("k3jax.plan_report.command.compile_apart", lambda _: pytest.fail("compiled"))
    monkeypatch.setattr("k3jax.plan_report.command.missing", lambda: ["nvidia-nvvm"])
    mesh_cases.pretend_installed(monkeypatch, versions)
    asked = ["plan", "--model", "k3-slice", "--layers", "4", "--devices", devices, "--dispatch", "ragged"]
    assert cli.main(asked) == (2 if reasons else 0)
    out, err = capsys.readouterr()
    for reason in reasons:
        assert reason in err
    assert bool(out) == (not reasons)
    assert not reasons or err.startswith("k3jax: error: dispatch 'ragged': "), err


def test_the_target_names_the_gpu() -> None:
    said: dict[str, Gpu] = {
        name: gpu for name, gpu in GPUS.items() if f"NVIDIA {name.upper()}" in gpu.target()
    }
    assert said == GPUS
    assert "major: 10 minor: 3" in GPUS["gb300"].target()


def overlapped(found: Compiled) -> set[int | None]:
    """Layers in which the shared expert's work runs beside a collective."""
    return {c.layer for c in found.collectives if any("shared_experts" in name for name in c.beside)}


def beside_exchanges(found: Compiled) -> list[Event]:
    """Kernels of the shown layer that stand between start and end of one of its collectives."""
    spans = [(e.start, e.end) for e in found.events if e.what != "kernel"]
    return [e for e in found.events if any(start < e.start < end for start, end in spans)]


def test_work_beside_an_exchange_is_told_from_work_that_waits() -> None:
    said = compiled()
    apart, waited = said.collectives[1], said.collectives[0]
    assert overlapped(said) == {apart.layer}
    waited_for = dataclasses.replace(apart, asynchronous=False, kernels=0, beside=())
    assert overlapped(dataclasses.replace(said, collectives=(waited, waited_for))) == set()
    shared = Event(2, 2, "kernel", SHARED)
    around, before = Event(1, 3, "all-reduce", ""), Event(1, 1, "all-reduce", "")
    assert beside_exchanges(dataclasses.replace(said, events=(around, shared))) == [shared]
    assert beside_exchanges(dataclasses.replace(said, events=(before, shared))) == []


def skip_without_the_extra() -> None:
    if absent := compile_step.missing():
        pytest.skip(f"needs {', '.join(absent)} (the extra plan; `make check-plan` installs it)")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpu", ["gb300", "h200"])
def test_a_slice_compiles_for_72_gpus_without_one(gpu: str) -> None:
    """Two layers at full width; the arguments are the bytes that arithmetic gives."""
    skip_without_the_extra()
    request = dataclasses.replace(SLICE, layers=2, gpu=gpu, batch=9, context=256)
    found = compile_step.compile_apart(request, timeout=800.0)
    made = report.make_report(request, found)
    vectors = 1024  # tokens, lengths, status and the like
    assert abs(found.memory["argument"] - made.held.total) < 300_000 + vectors
    kinds = [c.kind for c in found.collectives]
    # Embedding; a sum after each sublayer; per LatentMoE a sum and a scatter of routed outputs.
    assert kinds.count("all-reduce") == 1 + 2 * 2 + 1
    assert kinds.count("reduce-scatter") == 1
    assert {len(c.group) for c in found.collectives} == {8, 9}
    assert made.fits == {"gb300": True, "h200": True}
    # Overlap: in each LatentMoE layer, shared expert's products stand between start and end of an exchange.
    config = request.config()
    assert overlapped(found) == {i for i in range(2) if config.is_moe(i)} == {1}
    assert any(e.what == "kernel" and "shared_experts" in e.detail for e in beside_exchanges(found))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slice_with_the_ragged_exchange_compiles_for_eight_gpus() -> None:
    """A known-good size: what XLA makes of the real ``ragged_all_to_all``."""
    skip_without_the_extra()
    request = dataclasses.replace(
        SLICE, layers=2, gpu="h200", devices=8, tensor=2, dispatch="ragged", batch=8, context=256
    )
    found = compile_step.compile_apart(request, timeout=800.0)
    ragged = [c for c in found.collectives if c.kind == "ragged-all-to-all"]
    # Latent, experts and weights there, outputs back; XLA drops the name of the layer.
    assert [(c.group, c.loop) for c in ragged] == [(tuple(range(8)), False)] * 4
