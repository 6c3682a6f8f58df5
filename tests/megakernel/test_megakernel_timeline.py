"""The script that shows where a step of the megakernel spends its time, on clocks of a simulated launch."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel.instructions import Op
from k3jax.custom_calls.decode_megakernel.kernel.geometry import SUB, WAITS
from k3jax.custom_calls.decode_megakernel.shapes import Plan
from k3jax.custom_calls.decode_megakernel.traffic import traffic
from k3jax.custom_calls.tables import launch_tables
from support import megakernel_trace as trace_of

GHZ = 1.75
RATE = 34_000.0
"""Bytes an SM reads in a microsecond."""
HAND_OFF = 1.6
"""Microseconds from the last arrival to a waiter's going on."""
CHAINED = {Op.KDA_IN, Op.MLA_IN, Op.ROUTER, Op.LATENT_DOWN, Op.GATE_UP, Op.LM_HEAD}
"""Stages that go on from one another without waiting, if they read the same vector."""


@pytest.fixture(scope="module")
def timeline():
    path = Path(__file__).parents[1] / "bench" / "megakernel_timeline.py"
    spec = importlib.util.spec_from_file_location("megakernel_timeline", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A simulated launch: the trace it leaves, and the true [begin, ready, go, end] of every entry."""

    trace: Any
    truth: np.ndarray


def simulate(plan: Plan) -> Launch:
    """Run a schedule by its records; SMs read one of eight clocks that start apart and wander."""
    tables = launch_tables(plan)
    records, sms = tables.records, plan.sms
    streamed = trace_of.plan_bytes(plan, plan.slots, 1024)
    entries = int(np.diff(tables.starts).max())
    truth = np.zeros((len(tables.program), 4))
    clocks = np.zeros((sms, entries, 4), np.int64)
    last = [0.0] * tables.counters
    now = np.random.default_rng(0).uniform(0, 1, sms).tolist()
    place = np.zeros(sms, int)
    before = np.full((sms, 2), -1)
    for at, r in enumerate(records):
        ends = []
        for sm in range(r[2], r[3]):
            waits = [r[WAITS + 1 + 2 * i] for i in range(r[WAITS])]
            chained = r[0] in CHAINED and before[sm, 0] in CHAINED and before[sm, 1] == r[SUB]
            ready = now[sm] if chained else now[sm] + 0.3
            go = ready if chained else max([ready + 0.3, *(last[w] + HAND_OFF for w in waits)])
            end = go + 0.5 + streamed[at] / RATE
            entry = tables.starts[sm] + place[sm]
            assert tables.program[entry] == at
            truth[entry] = now[sm], ready, go, end
            stamps = [0 if chained else local(sm, x) for x in (ready, go)]
            clocks[sm, place[sm], :3] = [*stamps, local(sm, end)]
            now[sm], before[sm] = end, (r[0], r[SUB])
            place[sm] += 1
            ends.append(end)
        last[r[trace_of.SIGNAL]] = max([last[r[trace_of.SIGNAL]], *ends])
    about = {"config": "k3-slice", "batch": plan.B, "ghz": GHZ, "device": "none", "date": "2026-12-01"}
    wrapped = (clocks % 2**32).astype(np.uint32).view(np.int32)
    trace = trace_of.Trace(wrapped, tables.program, tables.starts, records, streamed, about)
    truth[:, 0] = np.where(place_of(tables) == 0, 0.0, truth[:, 0])
    return Launch(trace, truth)


def place_of(tables: Any) -> np.ndarray:
    return np.arange(len(tables.program)) - np.repeat(tables.starts[:-1], np.diff(tables.starts))


def local(sm: int, at: float) -> int:
    """Reading of an SM's clock: eight of them, 1 us of wandering, two of them past 2**32 in the step."""
    clock = sm * 8 // 132
    wander = np.sin(2 * np.pi * at / 700 + clock)
    start = 2**32 - 4e5 * clock if clock in (2, 5) else 3e8 * (1 + clock)
    return round(start + 1e3 * GHZ * (at + wander))


@pytest.fixture(scope="module")
def launch() -> Launch:
    return simulate(Plan(K3Config.preset("k3-slice"), 1))


def test_times_of_wandering_clocks_are_the_true_ones(launch: Launch) -> None:
    t = trace_of.times(launch.trace)
    found = np.stack([t.begin, t.ready, t.go, t.end], 1)
    error = found - launch.truth
    error -= np.median(error)  # when the launch began is not known
    # Shifts are interpolated: where no hand-off holds SMs up for some 200 us, a clock wanders by up to 1 us
    # and the others by as much. Without shifts the errors are the starts of the clocks, seconds.
    assert np.quantile(np.abs(error[:, 1:]), 0.9) < 0.6
    assert np.abs(error[:, 1:]).max() < 2.0
    assert trace_of.clock_numbers(launch.trace).max() + 1 == 8
    assert t.late.min() > 0
    held = (t.go - t.ready > trace_of.HELD_UP) & (t.late < 20)
    assert np.median(t.late[held]) == pytest.approx(HAND_OFF, abs=0.2)


def test_constant_offsets_are_found_exactly(monkeypatch: Any) -> None:
    monkeypatch.setattr(np, "sin", lambda x: np.zeros_like(x))
    steady = simulate(Plan(K3Config.preset("k3-slice"), 1))
    t = trace_of.times(steady.trace)
    error = np.stack([t.ready, t.go, t.end], 1) - steady.truth[:, 1:]
    assert np.ptp(error) < 0.01


def test_the_shares_of_the_stages_sum_up_to_the_step(launch: Launch) -> None:
    t = trace_of.times(launch.trace)
    every = trace_of.stages(launch.trace, t)
    assert sum(len(s.rows) for s in every) == len(launch.trace.program)
    ends = [t.end[t.sm == sm].max() for sm in range(132)]
    begins = [t.begin[t.sm == sm].min() for sm in range(132)]
    assert sum(s.micros for s in every) == pytest.approx(np.mean(ends) - np.mean(begins), rel=1e-6)


def test_the_bytes_are_those_of_the_schedule(launch: Launch) -> None:
    schedule = launch_tables(Plan(K3Config.preset("k3-slice"), 1)).schedule
    want = traffic(schedule, 1024, schedule.plan.slots)
    every = trace_of.stages(launch.trace, trace_of.times(launch.trace))
    # Vectors that stay in the L2 cache, convolution windows and the new cache rows are not streamed.
    assert sum(s.bytes for s in every) == pytest.approx(want.total + want.padding, rel=1e-3)


def test_the_table_names_every_stage_and_the_floor(launch: Launch) -> None:
    lines = list(trace_of.table(launch.trace, 4.0))
    step = next(line.split() for line in lines if line.startswith("step"))
    assert float(step[1]) / 4.0 == pytest.approx(float(step[4]), rel=1e-3)
    assert float(step[2]) - float(step[4]) == pytest.approx(float(step[5]), abs=0.11)
    for name in ("KDA_IN 1/2", "SHARED_DOWN 2/2", "MLA_ATTEND", "LM_HEAD", "FINISH"):
        assert any(line.startswith(name) for line in lines), name
    assert "-- layer 1: KDA + LatentMoE" in lines
    assert "-- layer 4: output" in lines


def test_tables_of_another_schedule_are_refused(launch: Launch) -> None:
    other = launch_tables(Plan(K3Config.preset("k3-slice"), 8))
    clocks = np.roll(launch.trace.clocks, 1, axis=1)
    trace = dataclasses.replace(launch.trace, clocks=clocks, program=other.program, starts=other.starts)
    with pytest.raises(ValueError, match="do not ascend"):
        trace_of.times(trace)


def test_the_perfetto_trace_fills_every_sm_without_overlap(timeline: Any, launch: Launch) -> None:
    t = trace_of.times(launch.trace)
    events = json.loads(json.dumps(timeline.perfetto(launch.trace)))["traceEvents"]
    for sm in (0, 77, 131):
        own = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == sm)
        starts, spans = np.array(own).T
        assert starts[1:] == pytest.approx((starts + spans)[:-1], abs=1e-6)
        assert starts[-1] + spans[-1] == pytest.approx(t.end[t.sm == sm].max())
    assert {e["name"] for e in events} >= {"MIX", "wait MIX", "EXPERT_IN", "gap"}
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {f"SM {sm}" for sm in range(132)}


def test_a_saved_trace_is_shown_and_drawn_with_every_stage(
    timeline: Any, launch: Launch, tmp_path: Path, capsys: Any
) -> None:
    from matplotlib.image import imread

    launch.trace.save(tmp_path / "trace.npz")
    timeline.show(tmp_path / "trace.npz", layer=1, picture=tmp_path / "layer.png")
    assert capsys.readouterr().out.splitlines() == list(trace_of.table(launch.trace, timeline.CEILING))
    image = imread(tmp_path / "layer.png")
    left = image[:, : int(0.78 * image.shape[1]), :3]  # the legend shows the same colours
    pixels = (left * 255).round().astype(int).reshape(-1, 3)
    shown = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.unique(pixels, axis=0)}
    every = trace_of.stages(launch.trace, trace_of.times(launch.trace))
    for sub in (2, 3):
        colours = timeline._colours([s for s in every if s.layer == 1 and s.sub == sub])
        assert set(colours.values()) <= shown
    with pytest.raises(ValueError, match="layer: expected"):
        timeline.draw(launch.trace, 9, tmp_path / "none.png")
