"""Importing k3jax works without CUDA and changes nothing in the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import ROOT

# Run in a fresh interpreter: what the import of k3jax adds to what jax, numpy and logging did.
PROBE = """
import json, logging, os, sys, threading, warnings
import jax
from jax._src import xla_bridge

def observe():
    maps = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
    names = {line.rsplit("/", 1)[-1] for line in maps.splitlines() if "/" in line}
    return {
        "environment": dict(os.environ),
        "jax configuration": {name: repr(value) for name, value in jax.config.values.items()},
        "warning filters": [repr(entry) for entry in warnings.filters],
        "log handlers": [repr(handler) for handler in logging.getLogger().handlers],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "working folder": sorted(os.listdir(".")),
        "backend initialised": xla_bridge.backends_are_initialized(),
        "GPU libraries": sorted(n for n in names if n.startswith(("libcuda", "_cutlass_ir", "libcute"))),
        "GPU modules": sorted({n.split(".")[0] for n in sys.modules} & {"cutlass", "cuda", "cupy", "torch"}),
    }

before = observe()
import MODULE
after = observe()
json.dump({"before": before, "after": after}, sys.stdout)
"""


def observe_import(module: str, folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROBE.replace("MODULE", module)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    return answer["before"], answer["after"]


@pytest.mark.parametrize("module", ["k3jax", "k3jax.cli"])
def test_the_import_has_no_effects_outside_its_own_modules(module: str, tmp_path: Path) -> None:
    before, after = observe_import(module, tmp_path)
    assert after == before
    assert after["backend initialised"] is False


@pytest.mark.parametrize("module", ["k3jax", "k3jax.cli"])
def test_the_import_loads_neither_cutlass_nor_cuda(module: str, tmp_path: Path) -> None:
    _, after = observe_import(module, tmp_path)
    assert after["GPU modules"] == []
    assert after["GPU libraries"] == []


def test_the_probe_sees_an_import_that_has_effects(tmp_path: Path) -> None:
    package = tmp_path / "noisy.py"
    package.write_text("import os, jax\nos.environ['K3JAX_PROBE'] = '1'\njax.devices()\n")
    before, after = observe_import(f"sys; sys.path.insert(0, {str(tmp_path)!r}); import noisy", tmp_path)
    assert after["environment"] != before["environment"]
    assert (before["backend initialised"], after["backend initialised"]) == (False, True)
