"""Where a decode step of the megakernel spends its time: every stage on every SM, by the SMs' own clocks.

A build of the kernel with ``Geometry(trace=n)`` stores an SM's clock before and after the waits of each
instruction and at its end (``kernel.flow.stamp``). Usage::

    python tests/bench/megakernel_timeline.py compile k3-slice --batch 1 --out KERNELS    # no GPU needed
    python tests/bench/megakernel_timeline.py record k3-slice --batch 1 --out TRACE.npz [--kernels KERNELS]
    python tests/bench/megakernel_timeline.py show TRACE.npz [--layer 1 --picture P.png] [--perfetto P.json]

What the columns of the table mean, and how the clocks are aligned: tests/support/megakernel_trace.py.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.custom_calls.tables import launch_tables

sys.path.append(str(Path(__file__).absolute().parents[1]))
from support.megakernel_trace import Stage, Times, Trace, layer_kind, plan_bytes, stages, table, times

WARM_UP = 10
"""Launches before those that are timed."""
MOST_SECONDS = 2.0
"""Time between two readings of a 32-bit clock of up to 2 GHz that tells its rate."""
CEILING = 4.61
"""TB/s that one H200 was measured to read (custom_calls/FACTS.md)."""

_Name = Annotated[str, tyro.conf.Positional]
_File = Annotated[Path, tyro.conf.Positional]


# -- pictures -----------------------------------------------------------------------------------

COLOURS = ("4477aa", "ee6677", "228833", "ccbb44", "66ccee", "aa3377", "dd7711", "117755", "8866cc", "994433")


def _colours(here: list[Stage]) -> dict[str, str]:
    """A colour per operation; both parts of one have the same."""
    ops = dict.fromkeys(s.name.split()[0] for s in here)
    return {op: f"#{COLOURS[i % len(COLOURS)]}" for i, op in enumerate(ops)}


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
            boxes = list(np.stack([[x0, y], [x1, y], [x1, y + 1], [x0, y + 1]]).transpose(2, 0, 1))
            axes.add_collection(PolyCollection(boxes, facecolors=[tuple(shade)], linewidths=0))
        wait, work = (t.go - t.ready)[s.rows].mean(), (t.end - t.go)[s.rows].mean()
        handles.append(Patch(color=tuple(colour), label=f"{s.name}  wait {wait:.1f}, work {work:.1f} us"))
        middle = float(np.median((t.go + t.end)[s.rows])) / 2 - start
        if work > 0.07 * (end - start) and len(y) > sms // 2:
            dark = tuple(0.8 * colour)
            axes.text(middle, sms + 1, s.name, ha="center", va="bottom", fontsize=8, color=dark)
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
            at = int(t.record[i])
            args = {"layer": s.layer, "instruction": at, "bytes": float(trace.bytes[at])}
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

    from k3jax.custom_calls import artifacts, step

    if kernels is not None:
        artifacts.add_folder(kernels)
    config = config_named(name, layers, experts)
    arch, target = step.target_of()
    plan = step.plan_for(config, batch, target)
    clocks, distinct, ghz = run(plan, traced_key(plan, arch), length, steps)
    held = length + WARM_UP + steps - 1
    given = ((layers, "layers"), (experts, "experts"))
    about = {
        "config": ", ".join([name, *(f"{n} {what}" for n, what in given if n is not None)]),
        "batch": batch,
        "length": held,
        "distinct": distinct,
        "ghz": round(ghz, 4),
        "device": jax.devices()[0].device_kind,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "jax": jax.__version__,
        "command": f"python {shlex.join(sys.argv)}",
    }
    tables = launch_tables(plan)
    count = plan_bytes(plan, distinct, held)
    trace = Trace(clocks, tables.program, tables.starts, tables.records, count, about)
    trace.save(out)
    print("\n".join(table(trace, CEILING)))


def run(plan: Plan, key: Any, length: int, steps: int) -> tuple[np.ndarray, int, float]:
    """(clocks of the last of ``steps`` steps, experts of its last LatentMoE layer, GHz of SM 0's clock)."""
    import jax
    import jax.numpy as jnp

    import k3jax
    from k3jax.custom_calls import step
    from k3jax.custom_calls.compile import obtain
    from k3jax.custom_calls.decode_megakernel.operands import workspace
    from k3jax.state import check_fault, init_state

    config, batch, artifact = plan.config, plan.batch, obtain(key)
    model = k3jax.random_model(config)
    model.pack()
    params = step.operands_only(model.params)
    del model
    fields = workspace(plan, launch_tables(plan).counters, key.trace)
    state = init_state(config, batch, length + WARM_UP + steps, jnp.bfloat16)
    state = dataclasses.replace(state, lengths=jnp.full(batch, length, jnp.int32))
    state = step.with_kernel(state, config, plan.target, key.trace)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, batch), jnp.int32)

    def one(params: Any, state: Any) -> Any:
        return step.step(params, state, tokens, jnp.ones(batch, bool), config, artifact).state

    launch = jax.jit(one, donate_argnames="state")

    def advance(state: Any, count: int) -> tuple[Any, float]:
        for _ in range(count):
            state = launch(params, state)
        jax.block_until_ready(state)
        return state, time.perf_counter()

    def read(state: Any, name: str) -> np.ndarray:
        f, work = fields[name], state.kernel["work"]
        return np.asarray(work[f.offset // 4 : (f.offset + f.nbytes) // 4]).reshape(f.shape)

    state, _ = advance(state, WARM_UP - 1)
    read(state, "trace")  # compiled outside the time that is measured
    state, began = advance(state, 1)
    first = int(read(state, "trace")[0, 0, 0])
    state, ended = advance(state, steps)
    check_fault(state)
    if ended - began > MOST_SECONDS:
        raise ValueError(f"steps: {steps} took {ended - began:.1f} s; the clock turns over, expected fewer")
    clocks = read(state, "trace")
    distinct = int(read(state, "route.count")[0]) if config.num_moe_layers else 0
    return clocks, distinct, (int(clocks[0, 0, 0]) - first) % 2**32 / (ended - began) / 1e9


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
