"""The test that every Pallas op passes, whichever implementation runs it.

A test class of an op derives from :class:`OpTests` and gives the op's cases; pytest then runs every
case on every implementation:

* "xla-reference": the plain reference through XLA;
* "pallas-interpret": the kernel in Pallas's interpreter;
* "megakernel-stage": the decode megakernel's stages of the same op, as the numpy interpreter of its
  schedule executes them; not the compiled stages, which ``tests/gpu/test_megakernel_stages.py``
  compares with that interpreter;
* "pallas": the kernel on a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from support.megakernel_stage import OutsideThePlanError

IMPLEMENTATIONS = (
    "xla-reference",
    "pallas-interpret",
    "megakernel-stage",
    pytest.param("pallas", marks=pytest.mark.gpu),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        name: shown by pytest.
        make: returns the arguments of the call (arrays and static values).
        check: given the result and the arguments, asserts what is right, with a reason.
        interpret: whether the case is small enough for a CPU; others run on a GPU only.
    """

    name: str
    make: Callable[[], tuple[Any, ...]]
    check: Callable[..., None]
    interpret: bool = True


class OpTests:
    """Derive, set ``op``, ``reference``, ``stage`` and ``cases``, and name the class Test...

    ``op(*args, interpret=...)`` is the kernel, ``reference(*args)`` its meaning in plain jnp, and
    ``stage(*args)`` what the interpreter of the megakernel's schedule makes of the op's stages
    (:mod:`support.megakernel_ops`): numpy on any device, no compiled stage.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    stage: Callable[..., Any]
    cases: tuple[Case, ...]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", type(self).cases, ids=lambda case: case.name)

    @pytest.fixture(autouse=True)
    def _clean_interpreter(self) -> Iterator[None]:
        yield
        reset_interpreter()

    def run(self, implementation: str, args: tuple[Any, ...]) -> Any:
        kind = type(self)
        if implementation == "xla-reference":
            return kind.reference(*args)
        if implementation == "megakernel-stage":
            return kind.stage(*args)
        return kind.op(*args, interpret=implementation == "pallas-interpret")

    def meant(self, result: Any, args: tuple[Any, ...]) -> Any:
        """What of a result is defined; an op whose output has rows without a meaning cuts them off."""
        return result

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_result_is_right(self, implementation: str, case: Case) -> None:
        if implementation != "pallas" and not case.interpret:
            pytest.skip("full size: on a GPU only")
        args = case.make()
        try:
            result = self.run(implementation, args)
        except OutsideThePlanError as reason:
            pytest.skip(f"outside the megakernel's plan: {reason}")
        case.check(result, *args)

    @pytest.mark.gpu
    def test_repeats_on_the_gpu_are_bit_identical(self, case: Case) -> None:
        args = case.make()
        run, arrays = _compiled(type(self).op, args)
        first, *others = (jax.tree.map(np.asarray, self.meant(run(arrays), args)) for _ in range(20))
        for other in others:
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(_bits(a), _bits(b)), first, other)


def _compiled(op: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """A compiled call of ``op``, and the arrays among ``args`` that it takes; all else is fixed."""
    leaves, tree = jax.tree.flatten(args)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    @jax.jit
    def run(arrays: list[Any]) -> Any:
        new = dict(zip(where, arrays, strict=True))
        return op(*tree.unflatten([new.get(i, leaf) for i, leaf in enumerate(leaves)]), interpret=False)

    return run, [leaves[i] for i in where]


def _bits(array: np.ndarray) -> np.ndarray:
    """Bytes, so that NaN equals NaN and -0 differs from 0."""
    return np.ascontiguousarray(array).view(np.uint8)


def reset_interpreter() -> None:
    """Forget an interrupted interpretation, which would poison the next one."""
    gpu_callbacks.reset_gpu_interpret_mode_state()


RACES = plgpu.InterpretGPUParams(detect_races=True)
"""Pass as ``interpret=``; then call :func:`assert_no_races`."""


def assert_no_races(run: Callable[[plgpu.InterpretGPUParams], Any]) -> Any:
    """``run(RACES)`` without a data race. jax 0.11.2 only records one where newer ones raise."""
    reset_interpreter()
    result = jax.block_until_ready(run(RACES))
    assert not gpu_callbacks.get_races().races_found
    return result


def lower_for_cuda(function: Callable[..., Any], *shapes: Any) -> str:
    """The lowered text of ``function`` at ``shapes``: all of Mosaic's checks that need no GPU."""
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "mosaic_gpu" in text, "no Mosaic GPU kernel was lowered"
    return text


def sds(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def launches(text: str) -> dict[str, int]:
    """Kernels of a lowered program by name, each as often as the functions it is in are called.

    Mosaic writes a kernel's name into the module of its custom call.
    """
    return occurrences(text, r"\\00(?!stable)(\w+)_mosaic_gpu\\00")


def occurrences(text: str, pattern: str) -> dict[str, int]:
    """What ``pattern`` captures in a lowered program, each as often as the functions it is in are called."""
    body: list[str] = []
    bodies: dict[str, list[str]] = {}
    for line in text.splitlines():
        if head := re.match(r"\s*func\.func (?:public|private) @(\w+)\(", line):
            bodies[head[1]] = body = []
        body.append(line)

    def total(name: str) -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        for line in bodies[name]:
            found.update(re.findall(pattern, line))
            if called := re.match(r"\s*(?:%\S+ = )?(?:func\.)?call @(\w+)\(", line):
                found += total(called[1])
        return found

    return dict(total("main"))
