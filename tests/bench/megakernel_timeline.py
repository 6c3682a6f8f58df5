"""Where a decode step of the megakernel spends its time: every stage on every SM, by the SMs' own clocks.

A build of the kernel with ``Geometry(trace=n)`` stores an SM's clock before and after the waits of each
instruction and at its end (``kernel.flow.stamp``). Usage::

    python tests/bench/megakernel_timeline.py compile k3-slice --batch 1 --out KERNELS    # no GPU needed
    python tests/bench/megakernel_timeline.py record k3-slice --batch 1 --out TRACE.npz [--kernels KERNELS]
    python tests/bench/megakernel_timeline.py show TRACE.npz [--layer 1 --picture P.png] [--perfetto P.json]

The table's columns: *gap*, from the end of the SM's instruction before to the first clock of this one (its
code and records are fetched); *wait*, for hand-offs; *work*, the rest, waiting for the ring included. *us* is
the time of all SMs from the end of the instruction before to the end of this one, over the number of SMs:
these sum up to the step. Rates are the schedule's bytes over *us*; since the producers run ahead, a short
stage after a long wait can be faster than the memory.

SMs read one clock per cluster of 16 to 18 SMs. These clocks neither start together nor run at one rate: on
an H200 they wander apart by 2 us within 300. They are aligned by the hand-offs: SMs that were held up by the
same counters go on together, so at each such hand-off a clock is shifted to the median of all, and in between
the shift is interpolated. What is left is printed: whether any SM seems to go on before the arrivals that it
waited for. Durations within an SM need no alignment; the shifts change them by up to 1 %.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel.instructions import MAX_WAITS, Op
from k3jax.custom_calls.decode_megakernel.kernel.geometry import SUB, WAITS
from k3jax.custom_calls.decode_megakernel.predict import streamed
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.custom_calls.tables import launch_tables

SIGNAL = 9
"""Word of a record: the counter that its stage signals, one of its own per stage."""
HELD_UP = 1.0
"""Microseconds of waiting from which on an SM counts as held up; a poll that finds all there takes 0.3."""
APART = 20.0
"""Microseconds between the first clocks of SMs that do not read the same clock."""
WARM_UP = 10
"""Launches before those that are timed."""
CEILING = 4.61
"""TB/s that one H200 was measured to read (custom_calls/FACTS.md)."""

_Name = Annotated[str, tyro.conf.Positional]
_File = Annotated[Path, tyro.conf.Positional]


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a launch left.

    Attributes:
        clocks: int32 [SMs, entries, 4], clock before the waits, after them, at the end, and 0; both of the
            first are 0 where a stage went on from the one before without waiting.
        program, starts, records: the tables it ran (``instructions.Tables``).
        bytes: float64 [records], what one SM streams in an instruction, on average.
        about: config, batch, length, distinct (experts a layer), ghz, device, date, versions.
    """

    clocks: np.ndarray
    program: np.ndarray
    starts: np.ndarray
    records: np.ndarray
    bytes: np.ndarray
    about: dict[str, Any]

    def save(self, path: Path) -> None:
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "about"}
        np.savez_compressed(path, about=np.array(json.dumps(self.about)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Trace:
        with np.load(path) as f:
            arrays = {k.name: f[k.name] for k in dataclasses.fields(cls) if k.name != "about"}
            return cls(**arrays, about=json.loads(str(f["about"])))


def plan_bytes(plan: Plan, distinct: int, length: int) -> np.ndarray:
    """Bytes, padding included, that one SM streams in each instruction of a plan, on average."""
    schedule = launch_tables(plan).schedule
    return np.array([streamed(schedule, ins, distinct, length) for ins in schedule.instructions])


# -- clocks to times ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Times:
    """One row per instruction and SM, microseconds since the first SM began.

    Attributes:
        sm, record: which SM ran which instruction.
        begin: the end of the SM's instruction before; ready, go: before and after the waits; end.
        late: from the last arrival that an SM waited for to its going on; inf where it waited for none. Below
            0 the alignment of the clocks is wrong by as much.
    """

    sm: np.ndarray
    record: np.ndarray
    begin: np.ndarray
    ready: np.ndarray
    go: np.ndarray
    end: np.ndarray
    late: np.ndarray


def times(trace: Trace) -> Times:
    """Decode and align the clocks of a trace.

    Raises:
        ValueError: clocks that do not ascend: not a whole step, or not these tables.
    """
    counts = np.diff(trace.starts)
    sm = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(trace.program)) - np.repeat(trace.starts[:-1], counts)
    raw = trace.clocks[sm, place].astype(np.int64)
    base = trace.clocks[sm, 0, 0].astype(np.int64)
    # 32-bit clocks: differences are right modulo 2**32, a few seconds.
    ticks = ((raw[:, :3] - base[:, None]) % 2**32).astype(float)
    before = np.where(place > 0, np.roll(ticks[:, 2], 1), 0.0)
    went_on = (raw[:, 0] == 0) & (raw[:, 1] == 0) & (place > 0)
    ready, go = (np.where(went_on, before, ticks[:, i]) for i in (0, 1))
    if bad := int(((ready < before) | (go < ready) | (ticks[:, 2] < go)).sum()):
        raise ValueError(f"clocks: {bad} of {len(sm)} do not ascend; expected a trace of these tables")
    scale = 1e-3 / trace.about["ghz"]
    columns = [scale * x for x in (before, ready, go, ticks[:, 2])]
    columns = _aligned(trace, sm, columns)
    start = columns[0].min()
    begin, ready, go, end = (x - start for x in columns)
    return Times(sm, trace.program, begin, ready, go, end, _late(trace, go, end))


def _aligned(trace: Trace, sm: np.ndarray, columns: list[np.ndarray]) -> list[np.ndarray]:
    """Times of SMs since their first clock, on one clock."""
    first = (trace.clocks[:, 0, 0].astype(np.int64) % 2**32) * 1e-3 / trace.about["ghz"]
    clock = _clock_of(trace)
    earliest = np.array([first[clock == c].min() for c in range(int(clock.max()) + 1)])
    columns = [x + (first - earliest[clock])[sm] for x in columns]
    clock, knots, shifts = _shifts(trace, sm, columns[1], columns[2])
    out = []
    for x in columns:
        moved = x.copy()
        for c, shift in enumerate(shifts):
            mine = clock[sm] == c
            moved[mine] += np.interp(x[mine], knots - shift, shift)
        out.append(moved)
    return out


def _clock_of(trace: Trace) -> np.ndarray:
    """Number of the clock that each SM reads: those of one cluster of SMs started together."""
    base = trace.clocks[:, 0, 0].astype(np.int64) % 2**32
    order = np.argsort(base)
    apart = np.diff(base[order]) > APART * 1e3 * trace.about["ghz"]
    out = np.empty(len(base), int)
    out[order] = np.concatenate([[0], np.cumsum(apart)])
    return out


def _shifts(
    trace: Trace, sm: np.ndarray, ready: np.ndarray, go: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What to add to each clock's times: (clock of every SM, knots [n], shifts [clocks, n] at the knots).

    A knot is a hand-off for which SMs of most clocks were held up; between knots shifts are interpolated.
    """
    clock = _clock_of(trace)
    waits = trace.records[trace.program, WAITS : WAITS + 1 + 2 * MAX_WAITS]
    event = np.unique(waits, axis=0, return_inverse=True)[1].reshape(-1)
    held = (go - ready > HELD_UP) & (waits[:, 0] > 0)
    clocks = int(clock.max()) + 1
    seen = np.full((int(event.max()) + 1, clocks), np.nan)
    for e, c in np.unique(np.stack([event[held], clock[sm[held]]], 1), axis=0):
        who = held & (event == e) & (clock[sm] == c)
        if who.sum() >= 3:
            seen[e, c] = np.median(go[who])
    seen = seen[np.isfinite(seen).sum(1) * 2 > clocks]
    if not len(seen):
        raise ValueError("clocks: hand-offs held up too few SMs, so the clocks cannot be aligned")
    seen = seen[np.argsort(np.nanmedian(seen, 1))]
    shifts = np.zeros_like(seen)
    for _ in range(20):
        common = np.nanmedian(seen + shifts, 1)
        for c in range(clocks):
            known = np.isfinite(seen[:, c])
            if known.any():
                shifts[:, c] = np.interp(common, common[known], (common - seen[:, c])[known])
    return clock, common, shifts.T


def _late(trace: Trace, go: np.ndarray, end: np.ndarray) -> np.ndarray:
    """As ``Times.late``."""
    records = trace.records[trace.program]
    last = np.full(int(records[:, SIGNAL].max()) + 1, -np.inf)
    np.maximum.at(last, records[:, SIGNAL], end)
    late = np.full(len(go), np.inf)
    for i in range(MAX_WAITS):
        waits = records[:, WAITS] > i
        late[waits] = np.minimum(late[waits], go[waits] - last[records[waits, WAITS + 1 + 2 * i]])
    return late


# -- stages -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stage:
    """All SMs' runs of a stage.

    Attributes:
        rows: places in :class:`Times`.
        bytes: streamed by all SMs; micros: share of the step, see the table.
    """

    name: str
    layer: int
    sub: int
    rows: np.ndarray
    bytes: float
    micros: float


def stages(trace: Trace, t: Times) -> list[Stage]:
    """Every stage in the order of the schedule; one that comes twice in a sublayer is numbered."""
    records = trace.records[t.record]
    sms = len(trace.starts) - 1
    firsts = [np.flatnonzero(records[:, SIGNAL] == c) for c in np.unique(records[:, SIGNAL])]
    firsts.sort(key=lambda rows: int(t.record[rows].min()))
    heads = [tuple(records[rows[0], [0, 1, SUB]].tolist()) for rows in firsts]
    out = []
    for at, (rows, (op, layer, sub)) in enumerate(zip(firsts, heads, strict=True)):
        alike = [i for i, head in enumerate(heads) if head == heads[at]]
        name = Op(op).name + (f" {alike.index(at) + 1}/{len(alike)}" if len(alike) > 1 else "")
        micros = float((t.end[rows] - t.begin[rows]).sum()) / sms
        out.append(Stage(name, layer, sub, rows, float(trace.bytes[t.record[rows]].sum()), micros))
    return out


def table(trace: Trace, ceiling: float) -> Iterator[str]:
    """Lines of the report."""
    t = times(trace)
    yield from (f"{key}: {value}" for key, value in trace.about.items())
    held = t.late[(t.go - t.ready > HELD_UP) & (t.late < HELD_UP * 20)]
    yield (
        f"{int(_clock_of(trace).max()) + 1} clocks; once aligned, an SM goes on at most "
        f"{max(0.0, -float(t.late.min())):.2f} us before the last arrival that it waited for"
    )
    yield (
        "hand-off, from the end of the last SM's work to a held-up SM's going on: "
        f"median {np.median(held):.2f} us, 9 of 10 below {np.quantile(held, 0.9):.2f}"
    )
    head = "min/mean/max"
    yield f"{'stage':17s} {'SMs':>3s} {'gap':>5s} {'wait ' + head:>19s} {'work ' + head:>21s}" + (
        f" {'MB':>8s} {'us':>7s} {'TB/s':>5s} {'floor':>6s} {'lost':>6s}"
    )
    every = stages(trace, t)
    for layer in sorted({s.layer for s in every}):
        here = [s for s in every if s.layer == layer]
        yield f"-- layer {layer}: {layer_kind(here)}"
        for s in here:
            gap, wait, work = t.ready - t.begin, t.go - t.ready, t.end - t.go
            parts = [f"{x[s.rows].min():5.1f}/{x[s.rows].mean():6.1f}/{x[s.rows].max():6.1f}" for x in (wait, work)]
            left = f"{s.name:17s} {len(s.rows):3d} {gap[s.rows].mean():5.1f} {parts[0]:>19s} {parts[1]:>21s}"
            yield f"{left} {_figures(s.bytes, s.micros, ceiling)}"
        yield f"{'sum':67s} {_figures(sum(s.bytes for s in here), sum(s.micros for s in here), ceiling)}"
    total, sms = float(t.end.max()), len(trace.starts) - 1
    done = sum(s.micros for s in every)
    yield f"SMs that are done wait for the last one: {total - done:.1f} us; {sms} SMs"
    yield f"{'step':67s} {_figures(sum(s.bytes for s in every), total, ceiling)}"


def _figures(count: float, micros: float, ceiling: float) -> str:
    """MB, us, TB/s, us at the ceiling, us above it."""
    floor = count / ceiling / 1e6
    return f"{count / 1e6:8.1f} {micros:7.1f} {count / micros / 1e6:5.2f} {floor:6.1f} {micros - floor:6.1f}"


def layer_kind(here: list[Stage]) -> str:
    """What a layer's stages make it."""
    names = {s.name.split()[0] for s in here}
    if not names & {"KDA_IN", "MLA_IN"}:
        return "output"
    attention = "KDA" if "KDA_IN" in names else "MLA"
    return f"{attention} + {'LatentMoE' if 'EXPERT_IN' in names else 'dense FFN'}"


# -- pictures -----------------------------------------------------------------------------------

COLOURS = (
    "#4477aa #ee6677 #228833 #ccbb44 #66ccee #aa3377 #dd7711 #117755 #8866cc #994433 #5599dd #77aa33".split()
)


def _colours(here: list[Stage]) -> dict[str, str]:
    """A colour per operation; both parts of one have the same."""
    ops = dict.fromkeys(s.name.split()[0] for s in here)
    return {op: COLOURS[i % len(COLOURS)] for i, op in enumerate(ops)}


def draw(trace: Trace, layer: int, path: Path) -> None:
    """One layer's schedule over the SMs: work in the stage's colour, waits the same but pale, gaps white.

    Raises:
        ValueError: no such layer.
    """
    from matplotlib.figure import Figure

    t = times(trace)
    here = [s for s in stages(trace, t) if s.layer == layer]
    if not here:
        raise ValueError(f"layer: expected one of the trace, got {layer}")
    subs = sorted({s.sub for s in here})
    figure = Figure(figsize=(13, 1.0 + 4.6 * len(subs)), dpi=110, layout="constrained")
    a = trace.about
    figure.suptitle(
        f"Layer {layer} ({layer_kind(here)}) of a decode step: {a['config']}, batch {a['batch']}, "
        f"{a['device']}, {a['date']}\n"
        "a line per SM; full colour: work, pale: waiting for a hand-off, white: between two instructions",
        fontsize=10,
    )
    for sub, axes in zip(subs, np.atleast_1d(figure.subplots(len(subs), 1)), strict=True):
        part = [s for s in here if s.sub == sub]
        _draw_part(axes, t, part, len(trace.starts) - 1)
        kind = layer_kind(here).split(" + ")[sub % 2] if len(subs) > 1 else layer_kind(here)
        axes.set_title(f"{kind}: {sum(s.micros for s in part):.0f} us", loc="left", fontsize=10, pad=18)
    figure.savefig(path)


def _draw_part(axes: Any, t: Times, part: list[Stage], sms: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    rows = np.concatenate([s.rows for s in part])
    start, end = float(t.begin[rows].min()), float(t.end[rows].max())
    colours = _colours(part)
    handles = []
    for s in part:
        colour = np.array(to_rgb(colours[s.name.split()[0]]))
        y = t.sm[s.rows]
        for left, right, shade in ((t.ready, t.go, 0.75 + 0.25 * colour), (t.go, t.end, colour)):
            x0, x1 = left[s.rows] - start, right[s.rows] - start
            boxes = np.stack([[x0, y], [x1, y], [x1, y + 1], [x0, y + 1]]).transpose(2, 0, 1)
            axes.add_collection(PolyCollection(boxes, facecolors=[tuple(shade)], linewidths=0))
        wait, work = (t.go - t.ready)[s.rows].mean(), (t.end - t.go)[s.rows].mean()
        handles.append(Patch(color=tuple(colour), label=f"{s.name}  wait {wait:.1f}, work {work:.1f} us"))
        middle = float(np.median((t.go + t.end)[s.rows])) / 2 - start
        if work > 0.07 * (end - start) and len(y) > sms // 2:
            axes.text(middle, sms + 1, s.name, ha="center", va="bottom", fontsize=8, color=tuple(0.8 * colour))
    axes.set_xlim(0, end - start)
    axes.set_ylim(0, sms)
    axes.set_xlabel("us", fontsize=8)
    axes.set_ylabel("SM", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(handles=handles, fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def perfetto(trace: Trace) -> dict[str, Any]:
    """The step in the trace event format that ui.perfetto.dev and chrome://tracing read; a thread per SM."""
    t = times(trace)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": sm, "args": {"name": f"SM {sm}"}}
        for sm in range(len(trace.starts) - 1)
    ]
    for s in stages(trace, t):
        for i in s.rows.tolist():
            common = {"ph": "X", "pid": 0, "tid": int(t.sm[i]), "cat": f"layer {s.layer}"}
            args = {"layer": s.layer, "instruction": int(t.record[i]), "bytes": float(trace.bytes[t.record[i]])}
            parts = (("gap", t.begin, t.ready), (f"wait {s.name}", t.ready, t.go), (s.name, t.go, t.end))
            events += [
                common | {"name": name, "ts": float(a[i]), "dur": float(b[i] - a[i]), "args": args}
                for name, a, b in parts
                if b[i] > a[i]
            ]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": trace.about}


# -- the commands -------------------------------------------------------------------------------


def config_named(name: str, layers: int | None, experts: int | None) -> K3Config:
    """A preset, or the configuration of a checkpoint that ships."""
    from k3jax.checkpoints import resolve

    if name in ("k3", "k3-slice"):
        return K3Config.preset(name, num_layers=layers, num_experts=experts)
    return K3Config.from_pretrained(resolve(name))


def traced_key(plan: Plan, arch: str) -> Any:
    """The build that keeps time: room for the longest program of an SM."""
    from k3jax.custom_calls.artifacts import Key

    return Key(plan, arch, options=(("trace", int(np.diff(launch_tables(plan).starts).max())),))


def compile_(
    name: _Name,
    /,
    out: Path,
    batch: int = 1,
    layers: int | None = None,
    experts: int | None = None,
    target: str = "sm_90a",
    sms: int = 132,
) -> None:
    """Compile the build that keeps time, without a GPU, to folder ``out``."""
    from k3jax.custom_calls.compile import compile_artifact

    plan = Plan(config_named(name, layers, experts), batch, Target(target, sms=sms))
    key = traced_key(plan, target)
    print(f"{key.file_name}: {compile_artifact(key, out).about['compile_seconds']} s")


def record(
    name: _Name,
    /,
    out: Path,
    batch: int = 1,
    length: int = 1024,
    steps: int = 100,
    layers: int | None = None,
    experts: int | None = None,
    kernels: Path | None = None,
) -> None:
    """Record the last of ``steps`` decode steps of random weights on the GPU.

    Args:
        name: preset k3-slice, or a checkpoint that ships (its configuration).
        length: tokens that every row holds when the first step begins.
        kernels: folder that ``compile`` wrote; else the cache, or it is compiled here.
    """
    import jax
    import jax.numpy as jnp

    import k3jax
    from k3jax.custom_calls import artifacts, step
    from k3jax.custom_calls.compile import obtain
    from k3jax.custom_calls.decode_megakernel.operands import workspace
    from k3jax.state import check_fault, init_state

    if kernels is not None:
        artifacts.add_folder(kernels)
    config = config_named(name, layers, experts)
    arch, target = step.target_of()
    plan = step.plan_for(config, batch, target)
    key = traced_key(plan, arch)
    artifact = obtain(key)
    model = k3jax.random_model(config)
    model.pack()
    params = step.operands_only(model.params)
    del model
    tables = launch_tables(plan)
    fields = workspace(plan, tables.counters, key.trace)
    state = init_state(config, batch, length + WARM_UP + steps, jnp.bfloat16)
    state = dataclasses.replace(state, lengths=jnp.full(batch, length, jnp.int32))
    state = step.with_kernel(state, config, target, key.trace)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, batch), jnp.int32)
    live = jnp.ones(batch, bool)

    def one(params: Any, state: Any) -> Any:
        return step.step(params, state, tokens, live, config, artifact).state

    launch = jax.jit(one, donate_argnames="state")

    def read(state: Any, field: str) -> np.ndarray:
        f, work = fields[field], state.kernel["work"]
        return np.asarray(work[f.offset // 4 : (f.offset + f.nbytes) // 4]).reshape(f.shape)

    def advance(state: Any, count: int) -> tuple[Any, float]:
        for _ in range(count):
            state = launch(params, state)
        jax.block_until_ready(state)
        return state, time.perf_counter()

    state, began = advance(state, WARM_UP)
    first = int(read(state, "trace")[0, 0, 0])
    state, ended = advance(state, steps)
    clocks = read(state, "trace")
    check_fault(state)
    # The clock's rate: cycles of SM 0 from one launch to another, over the time between their ends.
    ghz = (int(clocks[0, 0, 0]) - first) % 2**32 / (ended - began) / 1e9
    distinct = int(read(state, "route.count")[0]) if config.num_moe_layers else 0
    held = length + WARM_UP + steps - 1
    about = {
        "config": name if layers is None and experts is None else f"{name} layers={layers} experts={experts}",
        "batch": batch,
        "length": held,
        "distinct": distinct,
        "ghz": round(ghz, 4),
        "device": jax.devices()[0].device_kind,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "jax": jax.__version__,
        "command": f"python {shlex.join(sys.argv)}",
    }
    trace = Trace(
        clocks, tables.program, tables.starts, tables.records, plan_bytes(plan, distinct, held), about
    )
    trace.save(out)
    print("\n".join(table(trace, CEILING)))


def show(
    file: _File,
    /,
    ceiling: float = CEILING,
    layer: int = 1,
    picture: Path | None = None,
    perfetto_json: Path | None = None,
) -> None:
    """Print the table of a recorded step; draw it.

    Args:
        ceiling: TB/s that the device reads, for the floor.
        layer: the layer of the picture.
        picture: PNG to write; perfetto_json: trace for ui.perfetto.dev to write.
    """
    trace = Trace.load(file)
    print("\n".join(table(trace, ceiling)))
    if picture is not None:
        draw(trace, layer, picture)
    if perfetto_json is not None:
        perfetto_json.write_text(json.dumps(perfetto(trace)), encoding="utf-8")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"compile": compile_, "record": record, "show": show})
