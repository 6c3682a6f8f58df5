"""A training run in a folder: resumes where it stopped, ends with two checkpoints.

    python -m k3jax.checkpoints.training.run --output run

In the folder: ``steps/`` (Orbax, the last two saved states), ``curve.jsonl`` (a line a step),
``settings.json``, and at the end ``float/`` (before MXFP4) and ``nano/`` (the shipped form).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from k3jax.config import K3Config

from .finish import write_checkpoint
from .initial import initial_params
from .scoring import score
from .settings import Settings, nano_config
from .step import compute_params, init_train_state, step_scalars, train_step, windows
from .text import Corpus, read_corpus

CURVE = "curve.jsonl"
SETTINGS = "settings.json"


class Run:
    """A run's folder and what it trains.

    Args:
        folder: made if missing; a folder that holds steps is resumed.
        config: architecture.
        settings: as when the folder was begun.
        runs: training tokens, see :meth:`.text.Corpus.training_runs`.
        validate: called every ``save_every`` steps with the parameters and whether experts are
            rounded; its figures go into the curve.

    Raises:
        ValueError: the folder was begun with other settings or another architecture.
    """

    def __init__(
        self,
        folder: Path,
        config: K3Config,
        settings: Settings,
        runs: list[np.ndarray],
        validate: Callable[[Any, bool], dict[str, float]] | None = None,
    ):
        self.folder, self.config, self.settings, self.validate = folder, config, settings, validate
        folder.mkdir(parents=True, exist_ok=True)
        begun = json.dumps(
            {"settings": dataclasses.asdict(settings), "config": config.to_hf_dict()}, indent=1
        )
        file = folder / SETTINGS
        if file.exists() and file.read_text("utf-8") != begun:
            raise ValueError(f"settings: {folder} was begun with others, see {file}")
        file.write_text(begun, "utf-8")
        self._data = jax.device_put(windows(runs, settings.length))
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._saved = ocp.CheckpointManager((folder / "steps").absolute(), options=options)
        self.state = init_train_state(initial_params(config, settings.seed), settings)
        self.step = self._saved.latest_step() or 0
        if self.step:
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state
            )
            self.state = self._saved.restore(self.step, args=ocp.args.StandardRestore(like))
        self._drop_lines_past(self.step)

    def close(self) -> None:
        self._saved.wait_until_finished()
        self._saved.close()

    def curve(self) -> list[dict[str, Any]]:
        """The lines of the curve so far."""
        file = self.folder / CURVE
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []

    def _drop_lines_past(self, step: int) -> None:
        """A killed run may have written lines of steps that were not saved."""
        lines = [json.dumps(line) + "\n" for line in self.curve() if line["step"] < step]
        (self.folder / CURVE).write_text("".join(lines), "utf-8")

    def train(self, until: int | None = None, progress: bool = True) -> None:
        """Train up to step ``until``, or to the end; saves on the way and at the end."""
        s = self.settings
        until = s.total_steps if until is None else min(until, s.total_steps)
        waiting: list[dict[str, Any]] = []
        began = time.monotonic()
        with tqdm(total=s.total_steps, initial=self.step, disable=not progress, desc="train") as bar:
            while self.step < until:
                scalars = step_scalars(s, self.step)
                self.state, figures = train_step(
                    self.state, self._data, scalars, config=self.config, settings=_compiled_part(s)
                )
                waiting.append({"step": self.step, "rate": float(scalars["rate"]), **figures})
                self.step += 1
                bar.update()
                if self.step == s.steps:
                    self._write("float", packed=False)
                save = self.step % s.save_every == 0 or self.step in (s.steps, until)
                if save or self.step % s.log_every == 0:
                    last = self._log(waiting, save, time.monotonic() - began)
                    waiting = []
                    bar.set_postfix(bits=f"{last['bits']:.3f}", load=f"{max(last['max_over_mean_load']):.2f}")
                if save:
                    self._saved.save(self.step, args=ocp.args.StandardSave(self.state), force=True)
        self._saved.wait_until_finished()
        if self.step == s.total_steps:
            self._write("nano", packed=True)

    def _log(self, waiting: list[dict[str, Any]], validate: bool, seconds: float) -> dict[str, Any]:
        """Append the steps' lines; the last has the router's balance over all of them."""
        load = np.sum([np.asarray(figures["load"]) for figures in waiting], axis=0)
        lines = [
            {
                "step": f["step"],
                "rate": f["rate"],
                "bits": float(f["bits"]),
                "gradient": float(f["gradient_norm"]),
            }
            for f in waiting
        ]
        lines[-1]["max_over_mean_load"] = np.round(load.max(axis=-1) / load.mean(axis=-1), 3).tolist()
        lines[-1]["distinct_experts"] = np.count_nonzero(load, axis=-1).tolist()
        lines[-1]["seconds"] = round(seconds, 1)
        if not np.isfinite(lines[-1]["bits"]):
            raise FloatingPointError(f"the loss is {lines[-1]['bits']} at step {lines[-1]['step']}")
        if validate and self.validate is not None:
            lines[-1] |= self.validate(self.state["params"], self.step > self.settings.steps)
        with (self.folder / CURVE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return lines[-1]

    def _write(self, name: str, packed: bool) -> None:
        folder = self.folder / name
        if folder.exists():
            shutil.rmtree(folder)
        write_checkpoint(folder, self.state["params"], self.config, packed=packed)


def _compiled_part(settings: Settings) -> Settings:
    """The settings that are compiled into a step, the others at their defaults: one program for them all."""
    kept = {name: getattr(settings, name) for name in ("seed", "batch", "length", "clip", "dtype")}
    return Settings(**kept)


def validator(
    corpus: Corpus, config: K3Config, dtype: str | None, batch: int
) -> Callable[[Any, bool], dict[str, float]]:
    """Bits per byte on the validation blocks, for :class:`Run`."""
    blocks = corpus.validation()

    def validate(master: Any, quantised: bool) -> dict[str, float]:
        params = compute_params(master, config, quantised, dtype)
        return {"validation_bits": score(params, config, blocks, batch=batch).bits_per_byte}

    return validate


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(
        prog="k3jax.checkpoints.training.run", description="Train the nano checkpoint."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the run")
    parser.add_argument("--text", type=Path, help="the printed text; default: ask the installed package")
    parser.add_argument("--until", type=int, help="stop after this step; run again to resume")
    parser.add_argument("--score-batch", type=int, default=32, help="windows scored at a time")
    for field in dataclasses.fields(Settings):
        kind = str if field.name == "dtype" else type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = parser.parse_args(arguments)
    return given, Settings(
        **{field.name: getattr(given, field.name) for field in dataclasses.fields(Settings)}
    )


def lines_worth_printing(curve: list[dict[str, Any]]) -> Iterator[str]:
    for line in curve:
        if "validation_bits" in line:
            yield json.dumps({k: line[k] for k in ("step", "bits", "validation_bits", "seconds")})


def main(arguments: Sequence[str]) -> None:
    given, settings = _parse(arguments)
    corpus, config = read_corpus(given.text), nano_config()
    validate = validator(corpus, config, settings.dtype, given.score_batch)
    run = Run(given.output, config, settings, corpus.training_runs(), validate)
    device = jax.devices()[0]
    print(
        f"{config.param_count():,} parameters, jax {jax.__version__} on {device.device_kind}", file=sys.stderr
    )
    try:
        run.train(given.until)
        print("\n".join(lines_worth_printing(run.curve())))
    finally:
        run.close()


if __name__ == "__main__":
    main(sys.argv[1:])
