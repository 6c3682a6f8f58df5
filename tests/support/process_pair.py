"""Two processes of one group that run the same script, each with some virtual CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import k3jax
from k3jax.mesh import launch

# What this process imports, the others shall import too.
_PATHS = (Path(k3jax.__file__).parent.parent, Path(__file__).parents[1])


def run(script: str, *arguments: str, devices: int, timeout: float = 240) -> list[str]:
    """What each of two processes printed last.

    Args:
        script: Python text; ``sys.argv[1:]`` is coordinator, rank and ``arguments``.
        devices: virtual CPU devices of a process.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(map(str, _PATHS)),
    }
    command = [sys.executable, "-c", script, f"127.0.0.1:{launch.free_port()}"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), *arguments], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        results = [worker.communicate(timeout=timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, results, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    return [out.splitlines()[-1] for out, _ in results]
