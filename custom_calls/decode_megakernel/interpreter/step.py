"""A decode step by interpretation: the same function as ``k3jax.decode_step``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.state import STATUS_BAD_TOKEN, STATUS_FULL, State

from ..layout import pack_model
from ..schedule import Schedule, build
from ..shapes import MAX_BATCH, Plan, Target
from .machine import Machine, Rows, Weights

INTERPRETED_SMS = 4
"""SMs of the schedule that decode_step interprets: few, since every piece costs a Python call."""


@functools.cache
def _schedule(config: K3Config, batch: int, sms: int) -> Schedule:
    return build(Plan(config, batch, Target(f"{sms} interpreted SMs", sms)))


def rows_of(state: State, tokens: np.ndarray, active: np.ndarray, config: K3Config) -> Rows:
    """Which rows run, and why others do not. Arrays of the state are numpy arrays."""
    lengths = np.asarray(state.lengths)
    full = lengths >= state.max_length
    bad = (tokens < 0) | (tokens >= config.vocab_size)
    run = active & ~full & ~bad
    bits = np.where(active & full, STATUS_FULL, 0) | np.where(active & bad, STATUS_BAD_TOKEN, 0)
    old = {i: np.asarray(s["cache"]) for i, s in enumerate(state.layers) if "cache" in s}
    return Rows(np.where(run, tokens, 0), run, active & ~run, bits, old)


def _conv_units(conv: np.ndarray, plan: Plan) -> np.ndarray:
    """[B, 3, q | k | v channels] as (head, row) units [N * B, 3, 2K + V]."""
    B, taps, _ = conv.shape
    N, K = plan.kda_heads, plan.K
    parts = np.split(np.asarray(conv).astype(np.float32), [N * K, 2 * N * K], axis=-1)
    heads = np.concatenate([x.reshape(B, taps, N, -1) for x in parts], axis=-1)
    return heads.transpose(2, 0, 1, 3).reshape(N * B, taps, -1)


def _conv_channels(units: np.ndarray, plan: Plan) -> np.ndarray:
    """The inverse of :func:`_conv_units`."""
    B, N, K = plan.B, plan.kda_heads, plan.K
    heads = units.reshape(N, B, units.shape[1], -1).transpose(1, 2, 0, 3)
    parts = np.split(heads, [K, 2 * K], axis=-1)
    return np.concatenate([x.reshape(B, units.shape[1], -1) for x in parts], axis=-1)


def interpret(
    schedule: Schedule,
    weights: Weights,
    state: State,
    tokens: np.ndarray,
    active: np.ndarray,
    seed: int | None = None,
) -> tuple[np.ndarray, State, np.ndarray]:
    """One step of a schedule on numpy arrays: logits [B, W], the new state, greedy tokens [B].

    Args:
        seed: which legal order, see :class:`.machine.Machine`.
    """
    plan = schedule.plan
    rows = rows_of(state, tokens, active, plan.config)
    machine = Machine(schedule, weights, rows, seed)
    memory = machine.memory
    for i, layer in enumerate(state.layers):
        load_layer(machine, i, layer)
    memory.load_state("lengths", state.lengths)
    memory.load_state("status", state.status)
    machine.execute()
    lengths = np.asarray(state.lengths)
    layers = tuple(new_layer(machine, i, layer, lengths) for i, layer in enumerate(state.layers))
    values = memory.values
    new = State(
        layers,
        values["lengths"].astype(np.int32),
        values["status"].astype(np.int32),
        state.max_length,
    )
    return values["logits"].T.copy(), new, values["token"].astype(np.int32)


def load_layer(machine: Machine, i: int, layer: Any) -> None:
    """The state of a KDA layer to memory; a latent cache is an input, see :class:`.machine.Rows`."""
    if "S" not in layer:
        return
    plan, memory = machine.schedule.plan, machine.memory
    S = np.asarray(layer["S"]).transpose(1, 0, 2, 3)
    memory.load_state(f"S.{i}", S.reshape(-1, plan.V, plan.K))
    memory.load_state(f"conv.{i}", _conv_units(np.asarray(layer["conv"]), plan))


def new_layer(machine: Machine, i: int, layer: Any, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """A layer's state after the step, from memory.

    Args:
        lengths: int [B], before the step: where the rows' tokens go in the cache.
    """
    plan, values = machine.schedule.plan, machine.memory.values
    if "S" in layer:
        S = values[f"S.{i}"].reshape(plan.kda_heads, plan.B, plan.V, plan.K).transpose(1, 0, 2, 3)
        conv = _conv_channels(values[f"conv.{i}"], plan)
        return {"S": np.ascontiguousarray(S), "conv": conv.astype(np.asarray(layer["conv"]).dtype)}
    cache = np.array(layer["cache"])
    for b in np.flatnonzero(machine.rows.run):
        cache[b, int(lengths[b])] = values[f"cache.{i}"][b].astype(cache.dtype)
    return {"cache": cache}


def decode_step(
    params: Any, state: State, tokens: jax.Array, active: jax.Array, config: K3Config, tap: Any = None
) -> tuple[jax.Array, State]:
    """As :func:`k3jax.decode_step`, by interpretation of the megakernel's schedule in a host callback.

    Args:
        params: parameter tree; the dtype of ``embed_tokens`` is the compute dtype.
        state: of 1..8 rows.
        tokens: int32 [B].
        active: bool [B].

    Raises:
        NotImplementedError: more rows than the megakernel takes, or a tap.
    """
    if tap is not None:
        raise NotImplementedError("tap: implementation 'megakernel-interpret' shows no intermediate values")
    if not 1 <= state.batch <= MAX_BATCH:
        raise NotImplementedError(
            f"implementation 'megakernel-interpret': expected 1..{MAX_BATCH} rows, got {state.batch}"
        )
    schedule = _schedule(config, state.batch, INTERPRETED_SMS)
    out = jax.eval_shape(lambda s: (jnp.zeros((s.batch, config.vocab_size), jnp.float32), s), state)

    def host(params: Any, state: State, tokens: Any, active: Any) -> Any:
        params, state = jax.tree.map(np.asarray, (params, state))
        weights = Weights(params, pack_model(params, schedule.plan), params["embed_tokens"].dtype)
        logits, new, _ = interpret(schedule, weights, state, np.asarray(tokens), np.asarray(active))
        return logits, new

    return jax.pure_callback(host, out, params, state, tokens, active)


__all__ = ["INTERPRETED_SMS", "decode_step", "interpret", "load_layer", "new_layer", "rows_of"]
