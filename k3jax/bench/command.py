"""``k3jax bench`` on the command line."""

from __future__ import annotations

import importlib.util
import json as json_format
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..implementations import AVAILABLE

_Path = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
_Numbers = Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]")]
_Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="{" + ",".join(AVAILABLE) + "} [...]")]
_Ceiling = Annotated[str, tyro.conf.arg(metavar="{measured,TB/S}")]

PRESETS = ("k3", "k3-slice")
FORMATS = (".png", ".svg", ".pdf")


def command(
    path: _Path,
    /,
    batch: _Numbers = (1,),
    implementations: _Names = ("xla", "pallas", "megakernel"),
    steps: int = 16,
    rounds: int = 7,
    length: int = 512,
    ceiling: _Ceiling = "measured",
    read_kernel: str | None = None,
    kernels: str | None = None,
    cuda_runtime: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
    seed: int = 0,
    json: str | None = None,
    picture: str | None = None,
) -> None:
    """Time decode steps of several implementations on the same weights and inputs, and compare their results.

    Exit status 1 if logits or states do not agree or are not finite, or if nothing ran. For large models set
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.

    Args:
        path: checkpoint directory, the name of a shipped checkpoint, or a preset, which gets random weights.
        batch: rows of a step; all is run for each number given.
        implementations: what to run; what cannot run here is listed with its reasons.
        steps: steps of a round, all in flight together.
        rounds: rounds of every implementation, alternating.
        length: tokens cached in every row at first.
        ceiling: read rate to compare with: measured here, or a number in TB/s.
        read_kernel: file of an exported read kernel to measure it with; default a Pallas kernel.
        kernels: folder of kernels that ``k3jax compile`` made, looked into before the cache.
        cuda_runtime: path of libcute_dsl_runtime.so; default K3JAX_CUDA_RUNTIME or an installed one.
        layers: of preset k3-slice.
        experts: of preset k3-slice.
        seed: of random weights, states and tokens, 0..2**64-1.
        json: file for all figures.
        picture: file for a picture (PNG, SVG or PDF); needs matplotlib.
    """
    from .ceiling import ceiling_of
    from .run import Settings, bench

    settings = Settings(implementations, batch, length, steps, rounds, seed)
    _check_names(implementations)
    _check_files(json, picture)
    if kernels is not None:
        from ..custom_calls.artifacts import add_folder

        add_folder(kernels)
    if cuda_runtime is not None:
        from ..custom_calls.ffi import register

        register(cuda_runtime)
    rate = ceiling_of(ceiling, read_kernel)  # before the weights take the memory
    report = bench(_model(path, layers, experts, seed), settings, rate, _name(path), _note)
    print(report.text(), flush=True)
    if json is not None:
        text = json_format.dumps(report.to_json(), indent=1, allow_nan=False)
        Path(json).write_text(text + "\n", encoding="utf-8")
    if picture is not None and any(batch.timings for batch in report.batches):
        from .picture import plot

        plot(report).savefig(picture, dpi=150)
    if report.problems():
        raise SystemExit(1)


def _check_files(json: str | None, picture: str | None) -> None:
    """Refuse, before anything runs, files that could not be written after it."""
    for name, file in (("json", json), ("picture", picture)):
        if file is None:
            continue
        if not Path(file).absolute().parent.is_dir():
            raise FileNotFoundError(f"{name}: there is no folder {Path(file).absolute().parent}")
        if not file or Path(file).is_dir():
            raise ValueError(f"{name}: expected a file, got {file or 'nothing'!r}")
    if picture is None:
        return
    if Path(picture).suffix.lower() not in FORMATS:
        raise ValueError(f"picture: expected a name that ends in {', '.join(FORMATS)}, got {picture!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise NotImplementedError("picture: needs matplotlib: pip install 'k3jax[viz]'")


def _check_names(implementations: tuple[str, ...]) -> None:
    for name in implementations:
        if name not in AVAILABLE:
            raise ValueError(f"implementations: expected of {', '.join(AVAILABLE)}, got {name!r}")
    if len(set(implementations)) < len(implementations):
        raise ValueError(f"implementations: expected each once, got {', '.join(implementations)}")


def _model(path: str, layers: int | None, experts: int | None, seed: int) -> Any:
    """The model that all implementations run."""
    import k3jax

    if path in PRESETS:
        config = k3jax.K3Config.preset(path, num_layers=layers, num_experts=experts)
        return k3jax.random_model(config, seed, implementation="xla")
    if layers is not None or experts is not None:
        raise ValueError(f"layers, experts: only with preset k3-slice, got {path!r}")
    return k3jax.load(path, implementation="xla")


def _name(path: str) -> str:
    return f"{path}, random weights" if path in PRESETS else os.path.basename(os.path.normpath(path))


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


__all__ = ["command"]
