"""Running a benchmark: inputs, agreement, alternating rounds."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from ..api import Model
from ..config import K3Config
from ..model import decode_step
from ..sampling import seed_data
from ..state import State, abstract_state, check
from .ceiling import Ceiling
from .contenders import Contender, contenders, copy_of
from .report import ROW_STEPS, Agreement, BatchReport, Report, Timing


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        implementations: in this order; the first that runs is what the others are compared with.
        batches: rows of a step.
        length: tokens cached in every row at the first step.
        steps: of a round, all in flight together.
        rounds: of every form.
        seed: of states and tokens, 0..2**64-1.

    Raises:
        ValueError: a number out of its range, or none where one is needed.
    """

    implementations: tuple[str, ...] = ("xla", "pallas", "megakernel")
    batches: tuple[int, ...] = (1,)
    length: int = 512
    steps: int = 16
    rounds: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("steps", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batch: expected numbers of at least 1, got {list(self.batches)}")
        if not self.implementations:
            raise ValueError("implementations: expected at least one, got none")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: expected 0..2**64-1, got {self.seed}")


def bench(
    model: Model,
    settings: Settings,
    ceiling: Ceiling,
    name: str = "",
    note: Callable[[str], None] = lambda message: None,
) -> Report:
    """Run all implementations on one model.

    Args:
        model: made with implementation "xla".
        ceiling: what the rates are compared with; one that was measured is measured again after the steps.
        name: of the model, for the report.
        note: called with a line now and then.

    Raises:
        ValueError: an unknown implementation, or more tokens than a row can hold.
    """
    batches = [_batch(model, settings, batch, note) for batch in settings.batches]
    ceiling = ceiling.after()
    with_rate = tuple(dataclasses.replace(report, ceiling=ceiling.rate) for report in batches)
    return Report(about(model, settings, name), ceiling.rate, ceiling.source, with_rate)


def about(model: Model, settings: Settings, name: str) -> dict[str, Any]:
    """Device, versions, command and model."""
    device = jax.devices()[0]
    versions = (
        f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}, Python {platform.python_version()}"
    )
    c = model.config
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "versions": f"{versions}, {device.client.platform_version}".replace("\n", " "),
        "command": " ".join(["k3jax", *sys.argv[1:]]),
        "model": f"{name}: {c.num_hidden_layers} layers, hidden {c.hidden_size}, {c.num_experts} experts, "
        f"{np.dtype(model.dtype).name}",
        "steps in flight": settings.steps,
        "rounds": settings.rounds,
    }


def _batch(model: Model, settings: Settings, batch: int, note: Callable[[str], None]) -> BatchReport:
    """Figures of one batch size, without a ceiling."""
    limit = model.config.max_position_embeddings
    if settings.length + settings.steps > limit:
        raise ValueError(
            f"length, steps: expected at most {limit} together (max_position_embeddings), got "
            f"{settings.length} and {settings.steps}"
        )
    state = random_state(
        model.config, batch, settings.length, settings.length + settings.steps, model.dtype, settings.seed
    )
    rng = np.random.default_rng([settings.seed, batch])
    drawn = rng.integers(0, model.config.vocab_size, (settings.steps, batch)).astype(np.int32)
    tokens = [jnp.asarray(row) for row in drawn]
    missing: dict[str, tuple[str, ...]] = {}
    running: list[tuple[Contender, Agreement | None]] = []
    reference: list[jax.Array] = []
    states: list[State] = []
    for found in contenders(model, settings.implementations, batch):
        if isinstance(found, tuple):
            missing[found[0]] = found[1]
            continue
        note(f"batch {batch}: compiling and checking {found.implementation} {found.form}")
        if not reference:
            reference, states = run_steps(found, state, tokens)
            running.append((found, None))
        else:
            running.append((found, agreement(*single_steps(found, states, tokens), reference)))
    faults = ["no implementation ran"] if not running else []
    if not all(bool(jnp.isfinite(logits).all()) for logits in reference):
        faults.append(f"{running[0][0].implementation}: logits that are not finite")
    del states
    seconds = alternate([c for c, _ in running], state, tokens, settings.rounds)
    timings = tuple(
        Timing(c.implementation, c.form, tuple(s), agreed)
        for (c, agreed), s in zip(running, seconds, strict=True)
    )
    distinct = distinct_experts(model, state, tokens)
    middle = settings.length + (settings.steps - 1) // 2
    moved = model.config.bytes_per_step(batch, middle, distinct).total
    return BatchReport(
        batch, settings.length, moved, float(np.mean(distinct or [0])), timings, missing, None, tuple(faults)
    )  # fmt: skip


# -- inputs ----------------------------------------------------------------------------------


def random_state(config: K3Config, batch: int, length: int, max_length: int, dtype: Any, seed: int) -> State:
    """A state that holds ``length`` tokens in every row: normal numbers, cache rows past them zero."""
    shapes = abstract_state(config, batch, max_length, dtype)
    key = jax.random.wrap_key_data(seed_data(seed, 1)[0], impl="threefry2x32")
    layers = []
    for i, layer in enumerate(shapes.layers):
        keys = jax.random.split(jax.random.fold_in(key, i), len(layer))
        layers.append(
            {
                name: _drawn(k, leaf.shape, jnp.dtype(leaf.dtype).name, length if name == "cache" else None)
                for k, (name, leaf) in zip(keys, sorted(layer.items()), strict=True)
            }
        )
    lengths = jnp.full((batch,), length, jnp.int32)
    state = State(tuple(layers), lengths, jnp.zeros((batch,), jnp.int32), max_length)
    # Committed to its device, as what a step returns is: else the first step is another program.
    return jax.device_put(state, jax.devices()[0])


@partial(jax.jit, static_argnames=("shape", "dtype", "length"))
def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: str, length: int | None) -> jax.Array:
    values = jax.random.normal(key, shape, jnp.float32)
    if length is not None:
        values = jnp.where(jnp.arange(shape[1])[:, None] < length, values, 0.0)
    return values.astype(dtype)


def distinct_experts(model: Model, state: State, tokens: Sequence[jax.Array]) -> list[float]:
    """Distinct experts of every LatentMoE layer per step: the mean over the steps, by the "xla" path."""
    config = model.config
    if state.batch == 1:
        return [float(config.num_experts_per_token)] * config.num_moe_layers

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, state: State, tokens: jax.Array) -> tuple[list[jax.Array], State]:
        seen: dict[str, jax.Array] = {}
        _, after = decode_step(
            params, state, tokens, config=config, implementation="xla", tap=seen.__setitem__
        )
        return [value for name, value in seen.items() if name.endswith("topk_ids")], after

    state, counts = jax.tree.map(lambda leaf: leaf.copy(), state), []
    params = {name: leaf for name, leaf in model.params.items() if name != "megakernel"}
    for row in tokens:
        ids, state = step(params, state, row)
        counts.append([len(np.unique(np.asarray(layer))) for layer in ids])
    return np.mean(counts, axis=0).tolist()


# -- agreement and time ------------------------------------------------------------------------


def run_steps(
    contender: Contender, state: State, tokens: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[State]]:
    """Logits of steps that follow one another, float32 [B, W] each, and the states from first to last.

    Raises:
        StateError, KernelFaultError: a step refused a row or gave up.
    """
    state, out, states = contender.adopt(state), [], []
    for row in tokens:
        states.append(dataclasses.replace(copy_of(state), kernel=None))
        logits, state = contender.step(contender.params, state, row)
        out.append(logits)
    check(state)
    return out, [*states, dataclasses.replace(state, kernel=None)]


def single_steps(
    contender: Contender, states: Sequence[State], tokens: Sequence[jax.Array]
) -> tuple[list[jax.Array], np.ndarray]:
    """A step from each of the given states but the last: no step inherits the roundings of another.

    Returns:
        logits, float32 [B, W] each, and how far each array of the new states is from the given ones', as
        :attr:`Agreement.state` measures it, [arrays, steps, B].

    Raises:
        StateError, KernelFaultError: a step refused a row or gave up.
    """
    out, errors = [], []
    for before, after, row in zip(states[:-1], states[1:], tokens, strict=True):
        logits, state = contender.step(contender.params, contender.adopt(before), row)
        check(state)
        out.append(logits)
        errors.append(np.asarray(_compare_states(dataclasses.replace(state, kernel=None), after, before)))
    return out, np.stack(errors, axis=1)


@jax.jit
def _compare_states(got: State, want: State, before: State) -> jax.Array:
    """float32 [arrays, B]: of each array's rows, |got - want| over |want - before|."""

    def apart(a: jax.Array, b: jax.Array) -> jax.Array:
        difference = a.astype(jnp.float32) - b.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(difference**2, axis=tuple(range(1, a.ndim))))

    def rows(got: jax.Array, want: jax.Array, before: jax.Array) -> jax.Array:
        error = apart(got, want)
        return jnp.where(error == 0, 0.0, error / apart(want, before))

    trees = [(state.layers, state.lengths) for state in (got, want, before)]
    return jnp.stack(jax.tree.leaves(jax.tree.map(rows, *trees)))


@jax.jit
def _compare(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    error = jnp.linalg.norm(got - want, axis=-1) / jnp.linalg.norm(want, axis=-1)
    return error, jnp.argmax(got, axis=-1) == jnp.argmax(want, axis=-1)


def agreement(got: Sequence[jax.Array], states: np.ndarray, want: Sequence[jax.Array]) -> Agreement:
    """Two implementations' logits and states of the same steps; what is not finite is infinitely far.

    Args:
        states: of :func:`single_steps`.
    """
    pairs = [_compare(a, b) for a, b in zip(got, want, strict=True)]
    errors = np.stack([np.asarray(error) for error, _ in pairs])
    errors, states = (np.where(np.isfinite(x), x, np.inf) for x in (errors, states))
    same = np.concatenate([np.asarray(same) for _, same in pairs])
    quarter, half = np.quantile(errors, (0.25, 0.5), method="higher")
    every_row = float(errors.min(axis=0).max()) if len(errors) >= ROW_STEPS else None
    arrays = np.quantile(states, 0.25, axis=(1, 2), method="higher")
    return Agreement(
        float(quarter), float(half), float(errors.max()), float(same.mean()), errors.size, every_row,
        float(arrays.max()),
    )  # fmt: skip


def alternate(
    running: Sequence[Contender], begin: State, tokens: Sequence[jax.Array], rounds: int
) -> list[list[float]]:
    """Seconds per step of every contender, a number per round; rounds alternate between them.

    Raises:
        StateError, KernelFaultError: a step refused a row or gave up.
    """
    seconds: list[list[float]] = [[] for _ in running]
    for contender in running:  # XLA's forms have taken 14 s in a first round, long after they were compiled
        _, state = contender.step(contender.params, contender.adopt(begin), tokens[0])
        check(state)
    for _ in range(rounds):
        for contender, mine in zip(running, seconds, strict=True):
            state = jax.block_until_ready(contender.adopt(begin))
            start = time.perf_counter()
            logits = None
            for row in tokens:
                logits, state = contender.step(contender.params, state, row)
            jax.block_until_ready((logits, state))
            mine.append((time.perf_counter() - start) / len(tokens))
            check(state)
    return seconds


__all__ = [
    "Settings",
    "about",
    "agreement",
    "alternate",
    "bench",
    "distinct_experts",
    "random_state",
    "run_steps",
    "single_steps",
]
