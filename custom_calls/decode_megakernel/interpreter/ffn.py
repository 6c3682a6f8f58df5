"""Stages of the feed-forward networks: the dense one, and the LatentMoE."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3jax.quant import BLOCK, CODE_VALUES, MXFP4

from ..shapes import ROW_GROUP, groups_of
from .common import add_residual, end_matrix, f32, normed_input, rms_rows, sigmoid, situ
from .machine import Piece

_CODES = np.array([*CODE_VALUES, *(-v for v in CODE_VALUES)], np.float32)


def gate_up(t: Piece) -> None:
    name = "act.shared" if t.plan.config.is_moe(t.ins.layer) else "act.dense"
    width = t.plan.shared if name == "act.shared" else t.plan.dense
    y = t.product(normed_input(t))
    lo, hi = t.columns(width, ROW_GROUP // 2)
    t.write(name, lo, situ(t, y[:, 0::2], y[:, 1::2]).T[: hi - lo])


def dense_down(t: Piece) -> None:
    end_matrix(t, t.product(t.read_all("act.dense").T))


def shared_down(t: Piece) -> None:
    first = t.ins.c0 == 0
    x = np.full((t.plan.B, t.plan.shared), np.nan, np.float32)
    declared = next(a for a in t.ins.reads if a.buffer == "act.shared")
    x[:, declared.lo : declared.hi] = t.read_all("act.shared").T
    y = t.product(x).T.reshape(-1, ROW_GROUP, t.plan.B)
    if not first:
        y = t.read("shared.0", t.g0, t.g1) + y
    t.write("shared.0" if first else "shared.1", t.g0, y)


def router(t: Piece) -> None:
    lo, hi = t.columns(t.plan.E)
    t.write("rlogit", lo, t.product(normed_input(t)).T[: hi - lo])


def route(t: Piece) -> None:
    """Choose experts of every row that runs, and number the distinct ones in ascending order.

    A share numbers those that it serves itself, by their places on the rank.
    """
    p, c = t.plan, t.plan.config
    score = sigmoid(t.read_all("rlogit").T)
    order = score + f32(t.layer["block_sparse_moe"]["e_score_correction_bias"])
    ids = np.argsort(-order, axis=-1, kind="stable")[:, : p.A]
    weight = np.take_along_axis(score, ids, axis=-1)
    if c.moe_renormalize:
        weight = weight / (weight.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    weight = weight * np.float32(c.routed_scaling_factor)
    weight = np.where(np.isnan(score).any(axis=-1, keepdims=True), np.float32(np.nan), weight)
    here = ids
    if p.ways > 1:
        place = np.asarray(t.layer["block_sparse_moe"]["place"])[: p.B]
        here = np.take_along_axis(place, ids, axis=-1)
    t.m.slots = sorted(set(here[t.rows.run].ravel().tolist()) - {-1})
    record = np.full((1, p.B, p.A + 1, 2 if p.ways == 1 else 3), np.nan, np.float32)
    record[0, :, : p.A, 0], record[0, :, : p.A, 1] = ids, weight
    if p.ways > 1:
        record[0, :, : p.A, 2] = here
    record[0, :, p.A, 0] = len(t.m.slots)
    t.write("route", 0, record)


def latent_down(t: Piece) -> None:
    lo, hi = t.columns(t.plan.latent_rows)
    t.write("latent" if t.plan.ways == 1 else "give", lo, t.round(t.product(normed_input(t))).T[: hi - lo])


def _ids(t: Piece) -> np.ndarray:
    """int [B, A], of a share places on the rank; -1 in rows that do not run and for other ranks' experts."""
    ids = t.read_all("route")[0, :, : t.plan.A, 0 if t.plan.ways == 1 else 2].astype(np.int64)
    return np.where(t.rows.run[:, None], ids, -1)


def decode_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 of packed rows: codes uint8 [n, in / 2], scales uint8 [n, in / 32]; past float32, infinity."""
    values = np.stack([_CODES[codes & 15], _CODES[codes >> 4]], axis=-1)
    values = values.reshape(len(codes), -1, BLOCK).astype(np.float64)
    power = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int32) - 127))
    with np.errstate(over="ignore"):
        return (values * power[..., None]).reshape(len(codes), -1).astype(np.float32)


def _expert_rows(t: Piece, leaf: Any, expert: int, lo: int, hi: int) -> np.ndarray:
    """float32 rows of one expert; packed ones are decoded from the checkpoint's bytes."""
    if not isinstance(leaf, MXFP4):
        return f32(np.asarray(leaf[expert, lo:hi]).astype(t.m.weights.dtype))
    return t.round(decode_rows(np.asarray(leaf.codes[expert, lo:hi]), np.asarray(leaf.scales[expert, lo:hi])))


def _slot_runs(t: Piece, groups: int) -> list[tuple[int, int, int]]:
    """(slot, first, end) row groups of every slot in this piece."""
    out = []
    at = t.g0
    while at < t.g1:
        slot, first = divmod(at, groups)
        end = min(groups, first + t.g1 - at)
        out.append((slot, first, end))
        at += end - first
    return out


def _by_group(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x W^T of all rows, group by group [groups, B, 8]: as in the kernel, the shape of a product (hence
    its rounding) depends neither on which rows chose the expert nor on how many experts there are."""
    return x @ w.reshape(-1, ROW_GROUP, w.shape[1]).transpose(0, 2, 1)


def _units(y: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[groups, B, 8] as units [groups, 8, B], NaN in rows that did not choose the expert."""
    return np.where(rows, y.transpose(0, 2, 1), np.float32(np.nan))


def expert_in(t: Piece) -> None:
    p, experts = t.plan, t.layer["block_sparse_moe"]["experts"]
    groups, ids, latent = groups_of(p.F), _ids(t), t.read_all("latent" if p.ways == 1 else "take").T
    for slot, first, end in _slot_runs(t, groups):
        expert = t.m.slots[slot]
        lo, hi = first * ROW_GROUP, end * ROW_GROUP
        gate = _by_group(latent, _expert_rows(t, experts["w1"], expert, lo, hi))
        up = _by_group(latent, _expert_rows(t, experts["w3"], expert, lo, hi))
        chosen = (ids == expert).any(axis=1)
        t.write("hid", slot * groups + first, _units(situ(t, gate, up), chosen))


def expert_out(t: Piece) -> None:
    p, experts = t.plan, t.layer["block_sparse_moe"]["experts"]
    groups, inner, ids = groups_of(p.L), groups_of(p.F), _ids(t)
    for slot, first, end in _slot_runs(t, groups):
        expert = t.m.slots[slot]
        hid = t.read("hid", slot * inner, (slot + 1) * inner).reshape(-1, p.B)[: p.F].T
        w = _expert_rows(t, experts["w2"], expert, first * ROW_GROUP, end * ROW_GROUP)
        chosen = (ids == expert).any(axis=1)
        t.write("ey", slot * groups + first, _units(t.round(_by_group(hid, w)), chosen))


def combine(t: Piece) -> None:
    """Weighted sum over ranks in the order of rank: no row's sum depends on other rows' experts.

    A share's is over its own experts (or its part of their widths), and not rounded.
    """
    p = t.plan
    groups, ids = groups_of(p.L), _ids(t)
    weight = t.read_all("route")[0, :, : p.A, 1]
    lo, hi = t.columns(p.L)
    total = np.zeros((p.B, hi - lo), np.float32)
    for b in np.flatnonzero(t.rows.run):
        for a in np.flatnonzero(ids[b] >= 0):
            at = t.m.slots.index(int(ids[b, a])) * groups
            y = t.read("ey", at + t.g0, at + t.g1)[:, :, b].reshape(-1)[: hi - lo]
            total[b] += weight[b, a] * y
    if p.ways > 1:
        t.write("give", lo, total.T)
        return
    total = t.round(total)
    t.write("comb", lo, total.T)
    t.write("comb.ssq", t.sm, np.sum(total * total, axis=-1)[None])


def latent_up(t: Piece) -> None:
    p, moe = t.plan, t.layer["block_sparse_moe"]
    shared = "shared.1" if t.declares_read("shared.1") else "shared.0"
    other = t.read(shared, t.g0, t.g1).reshape(-1, p.B).T
    if p.ways > 1:  # one sum over the ranks for both, rounded once
        total = t.round(t.read_all("take").T)
        x = rms_rows(t, total, moe["routed_expert_norm"], p.config.rms_norm_eps)
        first = t.m.rank * p.latent_rows
        end_matrix(t, t.product(x[:, first : first + p.latent_rows]) + other)
        return
    mean = t.read_all("comb.ssq").sum(axis=0) / np.float32(p.L)
    x = rms_rows(t, t.read_all("comb").T, moe["routed_expert_norm"], p.config.rms_norm_eps, mean)
    add_residual(t, t.round(t.round(t.product(x)) + t.round(other)))


__all__ = [
    "combine",
    "decode_rows",
    "dense_down",
    "expert_in",
    "expert_out",
    "gate_up",
    "latent_down",
    "latent_up",
    "route",
    "router",
    "shared_down",
]
