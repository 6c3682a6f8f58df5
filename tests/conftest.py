"""Settings of the whole test run; they must stand before the first import of jax.

Environment variables are used where jax has them, so that subprocesses of tests inherit them.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

VIRTUAL_DEVICES = 8
MOST_MAPS = 20_000
"""Memory maps from which on a test module drops its compiled programs; Linux allows 65,530 a process."""
_GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set XLA_FLAGS and its dtype rules")

HOST_HAS_GPU = any(Path(path).exists() for path in _GPU_FILES)
if HOST_HAS_GPU:
    # Several test processes share the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    device_flag = f"--xla_force_host_platform_device_count={VIRTUAL_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {device_flag}".strip()
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("MPLBACKEND", "agg")

RUNTIME_TYPE_CHECKS = all(importlib.util.find_spec(name) for name in ("jaxtyping", "beartype"))
if RUNTIME_TYPE_CHECKS:
    import jaxtyping

    if "k3jax" in sys.modules:
        raise RuntimeError("k3jax was imported before tests/conftest.py could install the type checks")
    jaxtyping.install_import_hook("k3jax", "beartype.beartype")

import jax  # noqa: E402

# The same examples in every run; the first call of a compiled function takes seconds.
hypothesis.settings.register_profile("k3jax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("k3jax")


def pytest_report_header() -> list[str]:
    return [
        f"jax {jax.__version__}, dtype promotion {os.environ['JAX_NUMPY_DTYPE_PROMOTION']}, "
        f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '(unset)')}, XLA_FLAGS={os.environ['XLA_FLAGS']}",
        "runtime type checks of k3jax: "
        + ("jaxtyping + beartype" if RUNTIME_TYPE_CHECKS else "off (jaxtyping or beartype is not installed)"),
    ]


def _gpu_count() -> int:
    if not HOST_HAS_GPU:
        return 0
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:  # jax's answer where its CUDA plugin is absent or JAX_PLATFORMS leaves the GPU out
        return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {"gpu": 1, "multigpu": 2}
    marked = [(item, name) for item in items for name in needs if item.get_closest_marker(name)]
    if not marked:
        return
    count = _gpu_count()
    for item, name in marked:
        if count < needs[name]:
            reason = f"needs {needs[name]} NVIDIA GPU(s) visible to jax, which sees {count}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def _few_memory_maps() -> Iterator[None]:
    """Drop compiled programs when they are many: each has memory maps, and LLVM crashes without more."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _unmarked_tests_compute_on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Their tolerances are those of the CPU, also where jax would choose a GPU."""
    on_gpu = any(request.node.get_closest_marker(name) for name in ("gpu", "multigpu"))
    if on_gpu or not HOST_HAS_GPU:
        yield
        return
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="session")
def cpu_devices() -> list[Any]:
    """The virtual CPU devices, for meshes; also right where jax's default device is a GPU."""
    devices = jax.devices("cpu")
    if len(devices) < VIRTUAL_DEVICES:
        pytest.fail(f"expected {VIRTUAL_DEVICES} virtual CPU devices, XLA_FLAGS gives {len(devices)}")
    return devices
