"""The script for two GPUs: its arithmetic, and all of it by interpretation on two CPU devices."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import k3jax
from k3jax import mesh
from k3jax.custom_calls.decode_megakernel.instructions import Exchange, Op
from k3jax.custom_calls.decode_megakernel.shapes import Target
from k3jax.custom_calls.decode_megakernel.traffic import expected
from k3jax.custom_calls.planned import plan_of_share
from k3jax.custom_calls.tables import launch_tables
from k3jax.sizes import expert_bytes
from support import exchange_times
from support.megakernel_cases import PEERS
from support.repository import ROOT

SCRIPT = ROOT / "tests" / "bench" / "two_gpus.py"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        spec = importlib.util.spec_from_file_location("two_gpus", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected one of --out, --compile"),
        (["--out", "a", "--compile", "b"], "expected one of --out, --compile"),
        (["--out", "/nowhere/at/all/x"], "there is no folder /nowhere/at/all"),
        (["--out", "x", "--steps", "2"], "--steps: expected at least 3, got 2"),
    ],
)
def test_wrong_arguments_are_refused(
    script: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.parse(arguments)
    assert message in capsys.readouterr().err


def test_bytes_of_two_ranks_are_those_of_the_experts_that_each_reads(script: Any, cpu_devices: Any) -> None:
    """Two steps of two rows in one LatentMoE of K3's sizes, by hand."""
    config = k3jax.K3Config.preset("k3-slice", num_layers=2)
    assert config.num_moe_layers == 1
    devices = tuple(cpu_devices[:2])
    low, high = np.arange(16), 880 + np.arange(16)
    ids = np.array([[[low, low]], [[low, high]]])  # rank 0 alone holds low ones, rank 1 alone high ones
    assert ids.shape == (2, 1, 2, 16)
    one = expert_bytes(config)
    for width, both, busiest in ((2, 16 + 32, 8 + 16), (1, 16 + 32, 16 + 16)):
        plan = mesh.MeshPlan(1, 2, expert_width=width, devices=devices)
        fixed = expected(plan_of_share(config, plan, 2, Target()), 100, 0).total
        found = script.bytes_of(config, plan, ids, 100)
        # Mean of the two steps; with the width cut both ranks read half of every expert.
        assert found.both == pytest.approx(2 * fixed + both / 2 * one, rel=1e-12)
        assert found.busiest == pytest.approx(fixed + busiest / 2 * one, rel=1e-12)


def step_of(layout: str, seconds: float, gpus: int, problem: str | None = None) -> dict[str, Any]:
    agreement = {"quarter": 1e-3, "worst": 2e-3, "state": 3e-3}
    return {
        "layout": layout, "form": "megakernel", "gpus": gpus, "seconds": [seconds], "median": seconds,
        "bytes": 4e9, "bytes_of_the_busiest": 3e9, "agreement": agreement, "problem": problem,
    }  # fmt: skip


def test_rates_are_of_the_summed_ceilings_and_what_disagrees_or_is_absent_is_a_problem(script: Any) -> None:
    given = script.parse(["--out", "x"])
    steps = [step_of("one GPU", 2e-3, 1), step_of("TP2", 1e-3, 2, "logits: far away")]
    problems = script.problems_of(steps, given)
    assert problems == ["TP2, megakernel: logits: far away", "EP2: did not run"]
    report = {
        "about": {"batch": 1},
        "ceilings": [{"rate": 4e12, "source": "a"}, {"rate": 6e12, "source": "b"}],
        "collective_us": {"psum": 25.0},
        "mailbox_us": {"TP2": {"FFN": {"count": 4.0, "last": 1.5, "first": 2.5}}, "EP2": {}},
        "steps": steps, "missing": {"EP2": ["no"]}, "problems": problems,
    }  # fmt: skip
    said = script.text(report)
    one, two = (
        next(line for line in said.splitlines() if line.startswith(f"  {name} "))
        for name in ("one GPU", "TP2")
    )
    # 4 GB in 2 ms are 2 TB/s of 4; in 1 ms 4 TB/s of 10, and 3 GB in 1 ms 3 TB/s of the lower 4.
    assert one.split()[3:7] == ["2.0000", "4.0000", "50.0", "37.5"]
    assert two.split()[2:6] == ["1.0000", "4.0000", "40.0", "75.0"]
    assert "mailboxes, TP2, FFN, 4 of a step" in said
    assert "1.50 on the rank that comes last, 2.50 on the first" in said
    assert "PROBLEM: EP2: did not run" in said
    report["ceilings"][1]["rate"] = None
    assert script.text(report).count(" - ") >= 2


def test_exchanges_are_timed_by_each_ranks_own_clock() -> None:
    """Clocks of another rate and start per rank, one of which turns over within an exchange."""
    plan = PEERS[0].plan
    tables = launch_tables(plan)
    starts = np.atleast_2d(tables.starts)[0]
    trace = exchange_times.traced_key(plan, "sm_90a").trace
    rates, begun = (1.5e9, 1.9e9), (2**32 - 500_000, 7)
    micros = {kind: 1.0 + int(kind) for kind in Exchange}
    clocks = np.zeros((2, 2, plan.sms, trace, 4), np.int64)
    kinds = []
    for step in range(2):
        for rank in range(2):
            for sm in range(plan.sms):
                now = begun[rank] + 0.01 * step * rates[rank]
                for place, record in enumerate(tables.program[starts[sm] : starts[sm + 1]]):
                    long = 10.0
                    if tables.records[record, 0] == Op.EXCHANGE:
                        kind = Exchange(int(tables.records[record, exchange_times.KIND]))
                        # Rank 1 waits 3 us; some SMs are late, fewer than half.
                        long = micros[kind] + 3 * rank + 50 * (sm % 3 == 0)
                        kinds.append((step, rank, record, kind))
                    clocks[step, rank, sm, place, :3] = [now, now, now + long * 1e-6 * rates[rank]]
                    now += long * 1e-6 * rates[rank]
    wrapped = (clocks % 2**32).astype(np.uint32).view(np.int32)
    found = exchange_times.exchange_micros(plan, wrapped[0], wrapped[1], 0.01)
    once = {(record, kind) for step, rank, record, kind in kinds if (step, rank) == (0, 0)}
    assert set(found) == {kind.name for _, kind in once} >= {"ATTENTION", "LATENT", "ROUTED", "FFN"}
    for name, us in found.items():
        assert us["count"] == sum(kind.name == name for _, kind in once)
        assert us["last"] == pytest.approx(micros[Exchange[name]], abs=2e-3)  # a tick or two
        assert us["first"] == pytest.approx(micros[Exchange[name]] + 3, abs=2e-3)
    with pytest.raises(ValueError, match=r"clocks: expected 0\.5 to 4 GHz"):
        exchange_times.exchange_micros(plan, wrapped[0], wrapped[0], 0.01)


def test_the_clocks_of_every_rank_are_found_in_the_state(cpu_devices: Any) -> None:
    from k3jax.custom_calls import planned

    plan = PEERS[0].plan
    over = mesh.MeshPlan(1, 2, devices=tuple(cpu_devices[:2]))
    key = exchange_times.traced_key(plan, "sm_90a")
    state = mesh.planned_state(plan.config, over, plan.B, 64, "bfloat16")
    made = planned.with_kernel(state, plan.config, over, peers=True, trace=key.trace)
    assert made.kernel is not None
    clocks = exchange_times.trace_clocks(plan, key.trace, made.kernel)
    assert clocks.shape == (2, plan.sms, key.trace, 4)
    planned.check_planned_kernel(made, plan, key.trace)
    with pytest.raises(ValueError, match=r"state\.kernel\['work'\]: expected int32"):
        planned.check_planned_kernel(made, plan)


@pytest.mark.slow
def test_the_whole_script_runs_by_interpretation_and_agrees_with_one_device(tmp_path: Path) -> None:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(Path(k3jax.__file__).parents[1]),
    }
    command = [sys.executable, str(SCRIPT), "--implementation", "megakernel-interpret", "--preset", "nano"]
    command += ["--length", "40", "--steps", "4", "--rounds", "1", "--batch", "2", "--ceiling", "0.01"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "two")], env=environment, capture_output=True, text=True,
        timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads((tmp_path / "two.json").read_text())
    assert (tmp_path / "two.txt").read_text() == done.stdout
    assert report["problems"] == []
    forms = [(s["layout"], s["form"]) for s in report["steps"]]
    assert forms == [
        ("one GPU", "xla"),
        ("one GPU", "megakernel-interpret"),
        ("TP2", "megakernel-interpret segmented"),
        ("EP2", "megakernel-interpret segmented"),
    ]
    assert all(s["agreement"]["compared"] == 8 for s in report["steps"][1:])
    assert all(us > 0 for us in report["collective_us"].values())
    assert len(report["collective_us"]) == 3
    reason = ["mailboxes: only with implementation 'megakernel'"]
    assert report["missing"] == {"TP2, in the kernel": reason, "EP2, in the kernel": reason}
    assert [c["rate"] for c in report["ceilings"]] == [1e10, 1e10]
    assert "all forms agree with one GPU" in done.stdout
