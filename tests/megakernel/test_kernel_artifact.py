"""The real kernel as an artifact: it compiles without a GPU, and one serves every cache capacity."""

from __future__ import annotations

import subprocess
import sys

import pytest

from k3jax.custom_calls.decode_megakernel.resources import most_registers
from k3jax.custom_calls.decode_megakernel.shapes import Target
from support.megakernel import needs_compiler
from support.repository import ROOT

pytestmark = needs_compiler

BUILD = """
import os
os.environ["CUTE_DSL_ARCH"] = "sm_90a"
from k3jax import K3Config, checkpoints
from k3jax.custom_calls import compile
from k3jax.custom_calls.artifacts import Key
from k3jax.custom_calls.decode_megakernel.shapes import Plan

key = Key(Plan(K3Config.from_pretrained(checkpoints.resolve("nano")), 2), "sm_90a")
small, large = (compile.build(key, rows) for rows in (256, 4096))
assert small.module == large.module, "the module depends on the cache capacity"
assert small.operands == large.operands
print(small.about["registers"], small.about["local_bytes"])
"""


@pytest.mark.slow
def test_one_module_serves_every_capacity() -> None:
    """Two traces of nano's kernel, with caches of 256 and of 4,096 rows, are the same bytes."""
    result = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=ROOT, capture_output=True, text=True, check=False, timeout=580
    )
    assert result.returncode == 0, result.stderr[-2000:]
    registers, local = (int(word) for word in result.stdout.split())
    assert registers <= most_registers(Target())
    assert local <= 64
