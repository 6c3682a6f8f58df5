"""The real decode step, compiled for the devices of a plan on a machine that has none of them.

:func:`compile_apart` runs :mod:`k3jax.plan_report.worker` as a process of its own: compilation for GPUs
wants its own environment, and its memory is measured.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .gpus import gpu_named
from .schedule import Collective, Event, collectives, layer_events

NEEDS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")
"""Distributions that the compilation takes; the extra ``plan`` installs them."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compile.

    Attributes:
        model: path or preset, as the command line names models.
        layers: of preset k3-slice; None for the others.
        devices, tensor, expert_width, dispatch, split_sequence: see :func:`k3jax.mesh.for_devices`.
        batch: rows.
        context: tokens that each row can hold.
        gpu: a name of :data:`k3jax.plan_report.gpus.GPUS`.
        hlo: file for the optimised module's text, or None.
    """

    model: str
    layers: int | None
    devices: int
    tensor: int | None
    expert_width: int
    dispatch: str
    split_sequence: bool
    batch: int
    context: int
    gpu: str
    hlo: str | None = None

    def config(self) -> Any:
        """The architecture."""
        from ..cli import _config_of

        return _config_of(self.model, self.layers, None)

    def plan(self, config: Any, devices: tuple[Any, ...] | None = None) -> Any:
        """The plan, on ``devices`` or on none yet."""
        from .. import mesh

        return mesh.for_devices(
            self.devices, config, tensor=self.tensor, expert_width=self.expert_width, dispatch=self.dispatch,
            split_sequence=self.split_sequence, devices=devices,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step.

    Attributes:
        memory: bytes per device: argument, output, alias, temp, code.
        collectives: in the order of the schedule.
        events: one LatentMoE layer's kernels and collectives.
        layer: that layer.
        topology: slices x hosts x GPUs of a host.
        trace_seconds, compile_seconds: wall time.
        peak_bytes: memory of the compiling process at its highest, ptxas apart.
        versions: of the distributions that took part.
    """

    memory: dict[str, int]
    collectives: tuple[Collective, ...]
    events: tuple[Event, ...]
    layer: int
    topology: str
    trace_seconds: float
    compile_seconds: float
    peak_bytes: int
    versions: dict[str, str]

    @property
    def peak(self) -> int:
        """Bytes per device of a running step: arguments, results that are not in place, work space, code."""
        m = self.memory
        return m["argument"] + m["output"] - m["alias"] + m["temp"] + m["code"]


def missing() -> list[str]:
    """Distributions of :data:`NEEDS` that are not installed."""
    absent = []
    for name in NEEDS:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    return absent


def compile_apart(request: Request, timeout: float | None = None) -> Compiled:
    """:func:`compile_here` in a process of its own.

    Raises:
        NotImplementedError: what it takes is not installed; says what to install.
        RuntimeError: the compilation failed; ends with what the compiler said.
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
    """
    if absent := missing():
        raise NotImplementedError(
            f"compilation for GPUs needs {', '.join(absent)}: pip install 'k3jax[plan]' "
            "(no GPU or driver needed)"
        )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    environment.pop("XLA_FLAGS", None)  # virtual CPU devices and the like
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "compiled.json")
        command = [sys.executable, "-m", "k3jax.plan_report.worker"]
        command += [json.dumps(dataclasses.asdict(request)), str(answer)]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        if done.returncode or not answer.exists():
            raise RuntimeError(
                f"compilation for {request.devices} {request.gpu} ended with {done.returncode}:\n"
                f"{done.stderr[-3000:]}"
            )
        return from_json(json.loads(answer.read_text()))


def from_json(tree: dict[str, Any]) -> Compiled:
    """A :class:`Compiled` from ``dataclasses.asdict`` of one, read back from JSON."""
    tree = dict(tree)
    tree["collectives"] = tuple(
        Collective(**{**c, "group": tuple(c["group"]), "beside": tuple(c["beside"])})
        for c in tree["collectives"]
    )
    tree["events"] = tuple(Event(**event) for event in tree["events"])
    return Compiled(**tree)


def trace_step(config: Any, plan: Any, batch: int, context: int) -> Any:
    """The decode step of a plan, traced from shapes alone; the state is donated."""
    import jax
    import jax.numpy as jnp

    from .. import sharded_step
    from ..mesh.layout import planned_params
    from ..mesh.states import planned_shapes, state_shardings

    shapes = planned_shapes(config, plan, batch, context, jnp.bfloat16)
    state = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes, state_shardings(config, plan, context),
    )  # fmt: skip
    rows = plan.padded(batch), plan.sharding("batch")
    tokens = jax.ShapeDtypeStruct((rows[0],), jnp.int32, sharding=rows[1])
    active = jax.ShapeDtypeStruct((rows[0],), jnp.bool_, sharding=rows[1])
    step = jax.jit(sharded_step.decode_step, static_argnames=("config", "plan"), donate_argnames="state")
    return step.trace(planned_params(config, plan), state, tokens, active, config=config, plan=plan)


def lower_step(config: Any, plan: Any, batch: int, context: int) -> Any:
    """:func:`trace_step`, lowered for the plan's devices."""
    return trace_step(config, plan, batch, context).lower()


def compile_here(request: Request) -> Compiled:
    """The step of ``request`` compiled in this process, which needs the environment of the other one."""
    from jax.experimental import topologies

    gpu = gpu_named(request.gpu)
    shape = gpu.topology(request.devices)
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.target(), topology=shape
    ).devices
    config = request.config()
    plan = request.plan(config, tuple(devices))
    start = time.perf_counter()
    lowered = lower_step(config, plan, request.batch, request.context)
    traced = time.perf_counter()
    compiled = lowered.compile()
    finished = time.perf_counter()
    text = compiled.as_text()
    if request.hlo is not None:
        Path(request.hlo).write_text(text)
    sizes = compiled.memory_analysis()
    memory = {
        name: int(getattr(sizes, f"{name}_size_in_bytes")) for name in ("argument", "output", "alias", "temp")
    }
    layer = _shown_layer(config)
    return Compiled(
        memory={**memory, "code": int(sizes.generated_code_size_in_bytes)},
        collectives=tuple(collectives(text)),
        events=tuple(layer_events(text, layer)) if plan.num_devices > 1 else (),
        layer=layer,
        topology=shape,
        trace_seconds=traced - start,
        compile_seconds=finished - traced,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        versions={name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *NEEDS)},
    )


def _shown_layer(config: Any) -> int:
    """The LatentMoE layer whose schedule is shown: the middle one."""
    moe = [i for i in range(config.num_hidden_layers) if config.is_moe(i)] or [0]
    return moe[len(moe) // 2]


__all__ = [
    "NEEDS",
    "Compiled",
    "Request",
    "compile_apart",
    "compile_here",
    "from_json",
    "lower_step",
    "missing",
    "trace_step",
]
