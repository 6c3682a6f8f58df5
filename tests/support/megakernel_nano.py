"""The shipped model under the GPU tests: its launchers, its step replayed, and the tolerances of a stage."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import k3jax
from k3jax.custom_calls.decode_megakernel.interpreter.machine import Weights
from k3jax.custom_calls.decode_megakernel.interpreter.step import rows_of
from k3jax.custom_calls.decode_megakernel.layout import pack_model
from k3jax.custom_calls.pack import with_packed
from k3jax.state import State

from .megakernel_cases import KernelCase, config
from .megakernel_gpu import Launched, Launcher, host, last_sublayer, report
from .megakernel_replay import Difference, Snapshot, replay


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest relative RMS error of a stage's results, largest single error, and why.

    The single error is over its value or, if that is larger, the RMS of all.
    """

    rms: float
    worst: float
    why: str

    def allows(self, d: Difference) -> bool:
        return d.rms <= self.rms and d.worst <= self.worst


_ROUNDED = Tolerance(
    2e-3,
    0.06,
    "one to three roundings to bfloat16 (2^-9): a sum in another order turns a few, by 2^-8 of themselves "
    "each, and a product of several turns with each of them",
)
_SUMS = Tolerance(2e-5, 1e-3, "float32 sums in another order, and approximate exponentials of 2^-22")
_FROM_NORMED = Tolerance(
    5e-4,
    5e-3,
    "float32 sums over a vector that the stage norms itself: an approximate square root turns some of its "
    "roundings to bfloat16 (2^-9 of a term)",
)
_FROM_ROUNDED = Tolerance(
    1e-4,
    2e-2,
    "float32 sums over q, k and v that the stage rounds itself: one that turns moves a row or column of the "
    "state by 2^-8 of a term, and terms are up to some ten times the RMS",
)
_EXACT = Tolerance(0.0, 0.0, "copied, or a choice")

_BY_NAME = {
    "pre": _ROUNDED,
    "h": _ROUNDED,
    "block": _EXACT,
    "kda": _ROUNDED,
    "mla": _ROUNDED,
    "latent": _ROUNDED,
    "act": _ROUNDED,
    "hid": _ROUNDED,
    "ey": _ROUNDED,
    "comb": _ROUNDED,
    "cache": _ROUNDED,
    "S": _FROM_ROUNDED,
    "conv": _EXACT,
    "rlogit": _FROM_NORMED,
    "shared": _SUMS,
    "logits": _FROM_NORMED,
    "score": Tolerance(2e-4, 5e-3, "sums that cancel: their terms are hundreds of times the result"),
    "best": _FROM_NORMED,
    "route": Tolerance(2e-5, 1e-4, "ids equal; weights differ by approximate exponentials"),
    "slots": _EXACT,
    "token": _EXACT,
    "lengths": _EXACT,
    "status": _EXACT,
}
"""By the first part of a buffer's name."""


def tolerance(buffer: str) -> Tolerance:
    """That of a buffer of the interpreter."""
    return _SUMS if buffer.endswith(".ssq") else _BY_NAME[buffer.split(".")[0]]


def assert_stages_agree(name: str, run: Launcher, state: State, tokens: Any, active: Any = None) -> None:
    """Fail unless every stage of a step is the interpreter's; report the largest errors."""
    found = replay_step(run, state, tokens, active)
    report(f"{name}: {worst_of(found)}")
    wrong = [d for d in found if not tolerance(d.buffer).allows(d)]
    assert not wrong, "\n".join(
        f"{d.stage} {d.buffer}: RMS {d.rms:.2e}, worst {d.worst:.2e}; {tolerance(d.buffer)}" for d in wrong
    )


@functools.cache
def params() -> Any:
    """The shipped model's parameters with packed weights."""
    return with_packed(k3jax.load("nano", progress=False).params, config("nano"))


@functools.cache
def launcher(case: KernelCase) -> Launcher:
    """A compiled kernel on the shipped model."""
    return Launcher(params(), case)


def replay_step(run: Launcher, state: State, tokens: Any, active: Any = None) -> list[Difference]:
    """Differences of every stage of a step from the interpreter on the kernel's own inputs."""
    tokens = np.asarray(tokens)
    live = np.ones(len(tokens), bool) if active is None else np.asarray(active)
    begin = host(dataclasses.replace(state, kernel=None))
    rows = rows_of(begin, tokens, live, run.config)
    weights = interpreter_weights(run)
    none = np.zeros(0)
    before = Snapshot({}, begin.layers, begin.lengths, begin.status, none, none, begin.lengths)
    found = []
    for sub in range(last_sublayer(run) + 1):
        out = run(state, tokens, live, until=sub if sub < last_sublayer(run) else None)
        if out.fault is not None:
            raise AssertionError(f"sublayer {sub}: the step gave up: {out.fault}")
        after = snapshot(out, begin.lengths)
        found += replay(run.schedule, weights, rows, sub, before, after)
        # The state is that before the step: every launch begins with it.
        before = dataclasses.replace(before, fields=after.fields)
    return found


def interpreter_weights(run: Launcher) -> Weights:
    """A launcher's weights as the interpreter takes them."""
    tree = host({name: leaf for name, leaf in run.whole.items() if name != "megakernel"})
    return Weights(tree, pack_model(tree, run.plan), tree["embed_tokens"].dtype)


def snapshot(out: Launched, positions: np.ndarray) -> Snapshot:
    """A launch's results in numpy."""
    layers, lengths, status = host((out.state.layers, out.state.lengths, out.state.status))
    logits, token = host((out.logits, out.token))
    return Snapshot(host(out.fields), layers, lengths, status, logits, token, positions)


def worst_of(found: list[Difference]) -> str:
    """The worst difference of every buffer that is not exact, as a line."""
    worst: dict[str, Difference] = {}
    for d in found:
        if d.buffer not in worst or d.rms > worst[d.buffer].rms:
            worst[d.buffer] = d
    named: dict[str, float] = {}
    for name, d in worst.items():
        stem = name if not name.rsplit(".", 1)[-1].isdigit() else name.rsplit(".", 1)[0]
        named[stem] = max(named.get(stem, 0.0), d.rms)
    shown = [f"{name} {rms:.1e}" for name, rms in sorted(named.items()) if rms]
    return f"{len(found)} results; " + (", ".join(shown) or "all bit for bit")


def check_state_of_other_rows(before: State, out: Launched, runs: np.ndarray) -> None:
    """Fail unless rows that do not run kept every bit of their state."""
    for i, (a, b) in enumerate(zip(host(before.layers), host(out.state.layers), strict=True)):
        for name in a:
            old, new = (np.ascontiguousarray(x[name][~runs]).view(np.uint8) for x in (a, b))
            assert np.array_equal(old, new), f"layer {i}: {name} of a row that did not run changed"


def tree_with(tree: Any, change: Any) -> Any:
    """A parameter tree with ``change(layer index, layer dict copy)`` applied to every layer, packed anew."""
    layers = []
    for i, layer in enumerate(tree["layers"]):
        layers.append(change(i, jax.tree.map(lambda x: x, dict(layer))) or layer)
    plain = {name: leaf for name, leaf in tree.items() if name != "megakernel"} | {"layers": layers}
    return with_packed(plain, config("nano"))


__all__ = [
    "Tolerance",
    "assert_stages_agree",
    "check_state_of_other_rows",
    "interpreter_weights",
    "launcher",
    "params",
    "replay_step",
    "snapshot",
    "tolerance",
    "tree_with",
    "worst_of",
]
