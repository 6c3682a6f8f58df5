"""The ranks of a model on one NVIDIA GPU, by turns: its launches, and sums between them on the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import mesh
from k3jax.custom_calls import ffi, step
from k3jax.custom_calls.compile import obtain
from k3jax.custom_calls.decode_megakernel.instructions import Exchange
from k3jax.custom_calls.decode_megakernel.interpreter import share as shares
from k3jax.custom_calls.decode_megakernel.operands import ALIASED, abstract_results
from k3jax.custom_calls.decode_megakernel.stages import exchange_columns
from k3jax.custom_calls.tables import launch_tables
from k3jax.state import State

from .compare import relative_rms
from .emulator.step import operands_of
from .megakernel_cases import KernelCase
from .megakernel_shares import local_params, local_state

GIVEN = 5e-3
"""Relative RMS of what a segment gives, against the interpreter on the same exchanged numbers: bfloat16
roundings within the segment's few stages that sums in another order turn."""
LOGITS = 0.03
"""The same of a whole step's logits, whose segments go on from the kernel's own numbers."""


class TurnTaker:
    """All ranks of a share on the default device.

    Args:
        params: numpy tree of the whole model.
        case: the share's kernel.
        state: of one device, numpy, of the case's rows.
    """

    def __init__(self, params: Mapping[str, Any], case: KernelCase, state: State):
        ffi.register()
        self.plan, self.config = case.plan, case.plan.config
        self.share = shares.share(self.plan)
        self.tables = launch_tables(self.plan)
        self.artifact = obtain(case.key)
        self.mesh = mesh.MeshPlan(1, case.ways, expert_width=case.ways // case.expert_ways)
        self.params = params
        ranks = range(case.ways)
        self.trees = [local_params(params, self.config, self.mesh, rank) for rank in ranks]
        self.states = [local_state(state, self.config, self.mesh, rank) for rank in ranks]
        none = np.zeros(self.plan.B, np.int32)
        self.held = [
            jax.tree.map(
                jnp.asarray,
                operands_of(
                    self.tables.schedule, self.tables, self.trees[rank], self.states[rank], none, none, rank
                ),
            )
            for rank in ranks
        ]
        self.embed = jnp.asarray(params["embed_tokens"])
        self._call = jax.jit(self._launch, donate_argnums=1)
        self._exchange = jax.jit(self._sum, static_argnums=0)

    def _launch(self, fixed: Any, moving: Any, take: Any, starts: Any) -> dict[str, Any]:
        operands = {**fixed, **moving, "take": take, "starts": starts}
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        return step.call(self.artifact, operands, abstract_results(self.plan, like))

    def _wide(self, taken: jax.Array) -> jax.Array:
        """Columns that nobody may read are NaN."""
        extra = ((0, 0), (0, self.plan.exchanged - taken.shape[1]))
        return jnp.pad(taken, extra, constant_values=np.nan)

    def _sum(self, kind: Exchange, gives: list[jax.Array]) -> jax.Array:
        parts = [give[:, : exchange_columns(self.plan, kind)[0]] for give in gives]
        if kind == Exchange.LATENT:
            return self._wide(jnp.concatenate(parts, axis=1))
        return self._wide(functools.reduce(jnp.add, parts))

    def take(self, kind: Exchange, gives: list[jax.Array], tokens: np.ndarray) -> jax.Array:
        """What an exchange leaves: sums in the order of rank."""
        if kind == Exchange.EMBEDDING:
            known = (tokens >= 0) & (tokens < self.config.vocab_size)
            return self._wide(self.embed[np.where(known, tokens, 0)].astype(jnp.float32))
        return self._exchange(kind, gives)

    def segment(
        self, rank: int, number: int, take: jax.Array, tokens: np.ndarray, active: np.ndarray
    ) -> dict[str, Any]:
        """One launch of a rank; what it updates is kept for the next one."""
        held = self.held[rank]
        moving = {name: held[name] for name in ALIASED}
        fixed = {name: leaf for name, leaf in held.items() if name not in (*ALIASED, "take", "starts")}
        fixed |= {"tokens": jnp.asarray(tokens, jnp.int32), "active": jnp.asarray(active, jnp.int32)}
        out = self._call(fixed, moving, take, jnp.asarray(self.tables.starts[number]))
        held |= {name: out[name] for name in (*ALIASED, "epoch")}
        return out

    def step(self, tokens: np.ndarray, active: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A whole step of all ranks: logits [B, W], and the greedy tokens [B] by the ranks' own choices."""
        live = np.ones(self.plan.B, bool) if active is None else active
        gives: list[jax.Array] = []
        outs: list[dict[str, Any]] = []
        for number, part in enumerate(self.share.segments):
            assert part.kind is not None
            take = self.take(part.kind, gives, tokens)
            outs = [self.segment(rank, number, take, tokens, live) for rank in range(self.plan.ways)]
            gives = [out["give"] for out in outs]
        for out in outs:
            assert not np.asarray(out["fault"]).any(), np.asarray(out["fault"])
        logits = np.concatenate([out["logits"] for out in outs], axis=1)
        own = np.stack([np.asarray(out["token"]) + r * self.plan.W for r, out in enumerate(outs)])
        best = np.take_along_axis(logits, own.T, axis=1).argmax(axis=1)
        return logits, own[best, np.arange(self.plan.B)]


def check_every_segment(
    run: TurnTaker, tokens: np.ndarray, live: np.ndarray, interpreted: Sequence[int]
) -> tuple[np.ndarray, float]:
    """A step of all ranks; fail unless every segment of the ``interpreted`` ranks is the interpreter's.

    Returns:
        float32 logits of the whole vocabulary [B, W], and the largest error of what a segment gave.
    """
    p, dtype = run.plan, run.params["embed_tokens"].dtype
    lengths = np.asarray(run.states[0].lengths)
    values: dict[int, Any] = {rank: shares.carried(p) for rank in interpreted}
    gives: list[jax.Array] = []
    outs: list[dict[str, Any]] = []
    worst = 0.0
    for number, part in enumerate(run.share.segments):
        assert part.kind is not None
        take = run.take(part.kind, gives, tokens)
        outs = [run.segment(rank, number, take, tokens, live) for rank in range(p.ways)]
        gives = [out["give"] for out in outs]
        for rank, out in enumerate(outs):
            assert not np.asarray(out["fault"]).any(), (rank, number, np.asarray(out["fault"]))
        for rank in interpreted:
            out, tree = outs[rank], shares.params_of(run.trees[rank], p, part)
            with np.errstate(all="ignore"):  # rows that do not run hold anything
                values[rank], want, layers = shares.run_segment(
                    p, number, rank, tree, values[rank], np.asarray(take), run.states[rank], tokens, live,
                    dtype,
                )  # fmt: skip
            name = f"rank {rank}, segment {number} ({part.kind.name} of layer {part.layer})"
            there = ~np.isnan(want[live])
            if there.any():
                error = relative_rms(np.asarray(out["give"])[live][there], want[live][there])
                worst = max(worst, error)
                assert error <= GIVEN, f"{name}: {error:.2e}"
            for i, layer in layers.items():
                for key, leaf in layer.items():
                    got = np.asarray(out["state"][i][key])
                    same = ~np.isnan(np.asarray(leaf, np.float32))
                    assert relative_rms(got[same], leaf[same]) <= GIVEN, f"{name}, {key}"
                    kept = np.asarray(run.states[rank].layers[i][key])
                    assert got[~live].tobytes() == kept[~live].tobytes(), f"{name}, {key}"
            if part.gives is None:
                logits = values[rank]["logits"].T
                assert relative_rms(np.asarray(out["logits"])[live], logits[live]) <= LOGITS, name
                assert not np.asarray(out["logits"])[~live].any(), name
                assert out["lengths"].tolist() == (lengths + live).tolist(), name
    return np.concatenate([np.asarray(out["logits"]) for out in outs], axis=1), worst


__all__ = ["GIVEN", "LOGITS", "TurnTaker", "check_every_segment"]
