"""``k3jax plan``: a plan's table, and what the compiler says of its decode step."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from .compile_step import Compiled, Request, compile_apart, missing
from .gpus import gpu_named
from .report import as_data, make_report, text

MESHES = {"nvl72": 72}
"""Named meshes and their devices."""


def devices_of(mesh: str | None, devices: int | None) -> int:
    """The number of devices that a mesh's name or ``devices`` gives; without either an NVL72's.

    Raises:
        ValueError: an unknown name, or two numbers.
    """
    if mesh is not None and mesh not in MESHES:
        raise ValueError(f"mesh: expected one of {', '.join(MESHES)}, got {mesh!r}")
    if devices is None:
        return MESHES[mesh or "nvl72"]
    if mesh is not None and devices != MESHES[mesh]:
        raise ValueError(f"devices: expected {MESHES[mesh]}, as mesh {mesh} has, or none, got {devices}")
    return devices


def run(request: Request, compile_step: bool, json_file: str | None, picture: str | None) -> None:
    """Print the report to stdout; write it as JSON and as a picture where asked.

    Raises:
        ValueError: a plan that cannot work, with the sizes that can.
        NotImplementedError: a dispatch that is known to fail on that many GPUs, as a step would refuse it,
            or a picture without matplotlib.
    """
    gpu_named(request.gpu)
    if request.batch < 1:
        raise ValueError(f"batch: expected at least 1, got {request.batch}")
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise NotImplementedError("picture: needs matplotlib: pip install 'k3jax[viz]'")
    config = request.config()
    # What cannot work is refused before anything is compiled.
    request.plan(config).check_exchange("gpu")
    compiled = _compiled(request) if compile_step else None
    report = make_report(request, compiled)
    print(text(report), flush=True)
    if json_file is not None:
        Path(json_file).write_text(json.dumps(as_data(report), indent=1) + "\n")
    if picture is not None:
        from .picture import save

        save(report, picture)


def _compiled(request: Request) -> Compiled | None:
    """What the compiler says; None, with what to install, where it cannot run."""
    if absent := missing():
        _note(f"not compiled: needs {', '.join(absent)}: pip install 'k3jax[plan]' (no GPU or driver needed)")
        return None
    _note(
        f"compiling the decode step for {request.devices} {request.gpu} (all 93 layers take many minutes) ..."
    )
    return compile_apart(request)


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


__all__ = ["MESHES", "devices_of", "run"]
