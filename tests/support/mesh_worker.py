"""Runs cases of :mod:`support.mesh_cases` on more virtual CPU devices than the tests' process has.

``python -m support.mesh_worker '{"devices": 72, "cases": [...]}'`` prints one JSON line per case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import k3jax

# What this process imports, the other one shall import too.
_PACKAGE, _TESTS = Path(k3jax.__file__).parent, Path(__file__).parents[1]


def run(devices: int, cases: list[dict[str, Any]], timeout: float) -> list[dict[str, Any]]:
    """The results of ``cases`` in a process of its own with ``devices`` virtual CPU devices.

    Args:
        cases: each with ``plan`` (arguments of ``for_devices``) and either ``compare`` (arguments of
            ``compare`` but the plan) or ``pairs`` (kind, rows, routing, capacity).
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(str(path) for path in (_PACKAGE.parent, _TESTS)),
    }
    work = json.dumps({"devices": devices, "cases": cases})
    done = subprocess.run(
        [sys.executable, "-m", "support.mesh_worker", work],
        env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"the worker ended with {done.returncode}:\n{done.stderr[-4000:]}")
    if "rematerialization" in done.stderr:
        raise AssertionError(f"XLA moved whole arrays between devices:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _run_case(devices: int, case: dict[str, Any]) -> dict[str, Any]:
    from k3jax import mesh
    from support import mesh_cases

    if "compare" in case:
        arguments = case["compare"]
        experts = arguments.get("num_experts", 20)
        plan = mesh.for_devices(devices, mesh_cases.config(experts), **case["plan"])
        return mesh_cases.compare(plan, **arguments)
    pairs = case["pairs"]
    plan = mesh.for_devices(devices, mesh_cases.config(pairs["num_experts"]), **case["plan"])
    ids = mesh_cases.routing_ids(
        pairs["routing"], pairs["rows"], pairs["slots"], pairs["num_experts"], plan.expert_ranks
    )
    live = [row % 5 != 4 for row in range(pairs["rows"])]
    import numpy as np

    got, want = mesh_cases.count_pairs(
        plan, pairs["kind"], ids, np.array(live), pairs["num_experts"], pairs["capacity"]
    )
    return {"wrong": int((got != want).sum()), "pairs": int((want != 0).sum())}


def main() -> None:
    work = json.loads(sys.argv[1])
    for case in work["cases"]:
        print(json.dumps(_run_case(work["devices"], case)), flush=True)


if __name__ == "__main__":
    main()
