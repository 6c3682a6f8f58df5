"""The settings of tests/conftest.py and pyproject.toml are in force."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jaxtyping
import pytest

import k3jax.config
from support.repository import ROOT

GPU_TESTS = """
import jax, pytest

@pytest.mark.gpu
def test_one(): assert False

@pytest.mark.multigpu
def test_two(): assert False

def test_cpu(): assert jax.devices()[0].platform == "cpu"
"""


def test_dtype_promotion_is_strict() -> None:
    with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
        jnp.add(jnp.zeros(1, jnp.float32), jnp.zeros(1, jnp.bfloat16))


def test_warnings_are_errors() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_there_are_eight_cpu_devices(cpu_devices: list[Any]) -> None:
    assert len({device.id for device in cpu_devices}) >= 8
    assert {device.platform for device in cpu_devices} == {"cpu"}


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("jaxtyping", "beartype")),
    reason="jaxtyping or beartype is not installed",
)
def test_the_package_is_loaded_with_runtime_type_checks() -> None:
    assert type(k3jax.config.__loader__).__module__.startswith("jaxtyping")
    with pytest.raises(jaxtyping.TypeCheckError):
        k3jax.config.K3Config.preset("k3").state_bytes("two", 3)  # pyright: ignore[reportArgumentType]


def test_gpu_tests_are_skipped_with_the_reason_where_jax_sees_none(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text("utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    multigpu\n")
    (tmp_path / "test_gpus.py").write_text(GPU_TESTS)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed, 2 skipped" in result.stdout
    assert "needs 1 NVIDIA GPU(s) visible to jax, which sees 0" in result.stdout
    assert "needs 2 NVIDIA GPU(s) visible to jax, which sees 0" in result.stdout
