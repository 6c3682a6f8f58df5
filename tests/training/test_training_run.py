"""A training run on the CPU: the loss falls, and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import k3jax
from k3jax.checkpoints import load_params
from k3jax.checkpoints.training.finish import packed_params
from k3jax.checkpoints.training.run import CURVE, Run
from k3jax.checkpoints.training.scoring import score
from k3jax.checkpoints.training.step import compute_params
from support.repository import ROOT
from support.small_training import small_config, small_runs, small_settings

CONFIG = small_config()
BLOCKS = [b"and the waters were upon the deep light and the day were deep and light upon waters "]


def validate(master: Any, quantised: bool) -> dict[str, float]:
    params = compute_params(master, CONFIG, quantised, "float32")
    return {"validation_bits": score(params, CONFIG, BLOCKS, window=48, batch=4).bits_per_byte}


def bits(run: Run) -> list[float]:
    return [line["bits"] for line in run.curve()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that nothing interrupted."""
    run = Run(tmp_path_factory.mktemp("whole"), CONFIG, small_settings(), small_runs(), validate)
    run.train(progress=False)
    yield run
    run.close()


def test_the_loss_falls(whole: Run) -> None:
    curve = bits(whole)
    assert len(curve) == 24
    # A uniform guess over 512 ids has 9 bits, the text's bytes have about 4 by themselves.
    assert curve[0] > 7.5
    assert np.mean(curve[-4:]) < 4.5
    scores = [line["validation_bits"] for line in whole.curve() if "validation_bits" in line]
    assert len(scores) == 4
    assert scores[-1] < scores[0] - 0.5


def test_the_curve_has_the_router_s_balance(whole: Run) -> None:
    lines = [line for line in whole.curve() if "max_over_mean_load" in line]
    assert [line["step"] for line in lines] == [3, 5, 7, 11, 15, 17, 19, 23]
    for line in lines:
        assert len(line["max_over_mean_load"]) == len(line["distinct_experts"]) == 2
        assert all(1 <= ratio <= 8 / 2 for ratio in line["max_over_mean_load"])


class StopError(Exception):
    pass


def test_a_run_stopped_between_two_saves_goes_on_with_the_same_losses(whole: Run, tmp_path: Path) -> None:
    def stop_at_the_second_save(master: Any, quantised: bool) -> dict[str, float]:
        calls.append(quantised)
        if len(calls) == 2:
            raise StopError  # steps 6 to 11 are done and not saved, some of them are in the curve
        return validate(master, quantised)

    calls: list[bool] = []
    first = Run(tmp_path, CONFIG, small_settings(), small_runs(), stop_at_the_second_save)
    with pytest.raises(StopError):
        first.train(progress=False)
    first.close()
    assert len(bits(first)) > 6

    second = Run(tmp_path, CONFIG, small_settings(), small_runs(), validate)
    assert second.step == 6
    second.train(progress=False)
    second.close()
    assert bits(second) == bits(whole)  # the same program on the same numbers: bit for bit


KILLED = """
import os, signal
from pathlib import Path
from k3jax.checkpoints.training.run import Run
from support.small_training import small_config, small_runs, small_settings

def kill_at_the_third_save(master, quantised, calls=[]):
    calls.append(quantised)
    if len(calls) == 3:  # the save before the last is on disk by now; the last may still be on its way
        os.kill(os.getpid(), signal.SIGKILL)
    return {}

run = Run(Path(FOLDER), small_config(), small_settings(), small_runs(), kill_at_the_third_save)
run.train(progress=False)
"""


@pytest.mark.slow
def test_a_killed_process_s_run_goes_on_with_the_same_losses(whole: Run, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / ".dev"), str(ROOT / "tests")])
    code = KILLED.replace("FOLDER", repr(str(tmp_path)))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    run = Run(tmp_path, CONFIG, small_settings(), small_runs(), validate)
    assert run.step in (6, 12)
    run.train(progress=False)
    run.close()
    np.testing.assert_allclose(bits(run), bits(whole), rtol=1e-6)


def test_a_folder_of_other_settings_is_refused(whole: Run) -> None:
    with pytest.raises(ValueError, match=r"settings: .* was begun with others"):
        Run(whole.folder, CONFIG, small_settings(rate=0.5), small_runs())


def test_the_run_ends_with_a_float_and_a_packed_checkpoint(whole: Run) -> None:
    loose, config, _ = load_params(whole.folder / "float", dtype="float32", progress=False)
    assert config == CONFIG
    shipped = k3jax.load(whole.folder / "nano", dtype="float32", progress=False)
    leaf = shipped.params["layers"][1]["block_sparse_moe"]["experts"]["w1"]
    assert isinstance(leaf, k3jax.MXFP4)
    # Quantised steps follow the float checkpoint: better than rounding it, on text it was trained on.
    rounded = score(packed_params(loose), CONFIG, BLOCKS, window=48, batch=4).bits_per_byte
    tuned = score(shipped.params, CONFIG, BLOCKS, window=48, batch=4).bits_per_byte
    assert tuned < rounded


def test_the_packed_checkpoint_scores_as_training_s_rounding_did(whole: Run) -> None:
    params = load_params(whole.folder / "nano", progress=False)[0]
    trained = compute_params(whole.state["params"], CONFIG, True)
    got = score(params, CONFIG, BLOCKS, window=48, batch=4).bits_per_byte
    # The same bfloat16 numbers, experts decoded instead of rounded: the same program but for that.
    assert got == pytest.approx(score(trained, CONFIG, BLOCKS, window=48, batch=4).bits_per_byte, rel=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, CONFIG, small_settings(), small_runs())
    run.state["params"]["norm"] = run.state["params"]["norm"] * np.float32(np.nan)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 3"):
        run.train(progress=False)
    run.close()
    assert json.loads((tmp_path / "settings.json").read_text())["settings"]["seed"] == 0
    assert (tmp_path / CURVE).read_text() == ""
