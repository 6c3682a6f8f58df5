"""The tiled layout of dense bf16 matrices: what an SM reads is one contiguous run, in the order it reads it.

A packed matrix is ``[group, chunk, block, 8, 32]``: groups of 8 rows; the columns of a group in chunks
of at most 1,920 (30 KB); a chunk in blocks of 32 columns, so that 32 lanes reading 16 bytes each (8 rows
x 4 pieces) read 512 contiguous bytes of shared memory without a bank conflict, and each lane's 8 numbers
feed two k16 matrix instructions. Rows and columns are padded with zeros to whole groups and chunks.
Matrices that read the same vector are stacked by rows, so a stage is one matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .instructions import Op
from .shapes import ROW_GROUP, Plan, groups_of

BLOCK_COLUMNS = 32
MOST_COLUMNS = 1920
"""Columns of the largest chunk: 8 x 1,920 bf16 are 30 KB, one stage of the ring."""

Packed = Float[jax.Array, "g c k 8 32"] | Float[np.ndarray, "g c k 8 32"]
Dense = Float[jax.Array, "rows cols"] | Float[np.ndarray, "rows cols"]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a [rows, columns] matrix is cut."""

    rows: int
    columns: int

    @functools.cached_property
    def groups(self) -> int:
        return groups_of(self.rows)

    @functools.cached_property
    def chunk(self) -> int:
        """Columns of a chunk: a multiple of 32 up to 1,920 that cuts evenly, if one of half does."""
        whole = -(-self.columns // BLOCK_COLUMNS)
        if whole * BLOCK_COLUMNS <= MOST_COLUMNS:
            return whole * BLOCK_COLUMNS
        most = MOST_COLUMNS // BLOCK_COLUMNS
        even = max(n for n in range(1, most + 1) if whole % n == 0)
        if even * 2 >= most:
            return even * BLOCK_COLUMNS
        pieces = -(-whole // most)
        return -(-whole // pieces) * BLOCK_COLUMNS

    @functools.cached_property
    def chunks(self) -> int:
        return -(-self.columns // self.chunk)

    @functools.cached_property
    def packed_shape(self) -> tuple[int, int, int, int, int]:
        return self.groups, self.chunks, self.chunk // BLOCK_COLUMNS, ROW_GROUP, BLOCK_COLUMNS

    @functools.cached_property
    def tile_bytes(self) -> int:
        """bf16 bytes of one chunk of one group."""
        return 2 * ROW_GROUP * self.chunk

    @functools.cached_property
    def group_bytes(self) -> int:
        return self.chunks * self.tile_bytes

    @functools.cached_property
    def packed_bytes(self) -> int:
        return self.groups * self.group_bytes

    @functools.cached_property
    def real_bytes(self) -> int:
        return 2 * self.rows * self.columns

    def group_real_bytes(self, lo: int, hi: int) -> int:
        """Unpadded bf16 bytes of groups ``lo .. hi``."""
        rows = min(hi * ROW_GROUP, self.rows) - min(lo * ROW_GROUP, self.rows)
        return 2 * rows * self.columns


def _xp(array: Any) -> Any:
    return jnp if isinstance(array, jax.Array) else np


def pack(matrix: Dense) -> Packed:
    """The tiled form of a matrix; numpy in, numpy out, jax in, jax out.

    Args:
        matrix: [rows, columns].

    Returns:
        [groups, chunks, chunk / 32, 8, 32], of :class:`Tiling`'s ``packed_shape``.
    """
    rows, columns = matrix.shape
    t = Tiling(rows, columns)
    g, n, k, r, b = t.packed_shape
    padded = _xp(matrix).pad(matrix, ((0, g * r - rows), (0, n * t.chunk - columns)))
    return padded.reshape(g, r, n, k, b).transpose(0, 2, 3, 1, 4)


def unpack(packed: Packed, rows: int, columns: int) -> Dense:
    """The matrix that :func:`pack` was given, exactly.

    Raises:
        ValueError: ``packed`` is not of the shape that [rows, columns] has.
    """
    want = Tiling(rows, columns).packed_shape
    if tuple(packed.shape) != want:
        raise ValueError(
            f"packed: expected {list(want)} for a [{rows}, {columns}] matrix, got {list(packed.shape)}"
        )
    g, n, k, r, b = want
    return packed.transpose(0, 3, 1, 2, 4).reshape(g * r, n * k * b)[:rows, :columns]


def group_rows(packed: Any, lo: int, hi: int, c0: int, c1: int) -> Any:
    """Groups ``lo .. hi``, chunks ``c0 .. c1`` as rows [8 (hi - lo), columns of the chunks]."""
    part = packed[lo:hi, c0:c1]
    g, n, k, r, b = part.shape
    return part.transpose(0, 3, 1, 2, 4).reshape(g * r, n * k * b)


# -- which matrices, and which instruction reads which -------------------------------------

MATRIX_OF: Mapping[Op, str] = {
    Op.KDA_IN: "kda_in",
    Op.KDA_DECAY: "kda_decay",
    Op.KDA_OUT: "kda_out",
    Op.MLA_IN: "mla_in",
    Op.MLA_QUERY: "mla_query",
    Op.MLA_ABSORB: "mla_key_up",
    Op.MLA_VALUE: "mla_value_up",
    Op.MLA_OUT: "mla_out",
    Op.ROUTER: "router",
    Op.LATENT_DOWN: "latent_down",
    Op.SHARED_DOWN: "shared_out",
    Op.LATENT_UP: "latent_up",
    Op.DENSE_DOWN: "dense_out",
    Op.LM_HEAD: "lm_head",
}
"""The packed matrix an instruction streams. GATE_UP streams shared_in or dense_in, EXPERT_IN the
experts' w1 and w3 and EXPERT_OUT their w2 in the checkpoint's own layout, 8 rows of each a group."""


def matrix_name(plan: Plan, op: Op, layer: int) -> str | None:
    """Name of the packed matrix that a stage of a layer streams, or None."""
    if op == Op.GATE_UP:
        return "shared_in" if plan.config.is_moe(layer) else "dense_in"
    return MATRIX_OF.get(op)


@functools.lru_cache(maxsize=1024)
def tiling(plan: Plan, name: str) -> Tiling:
    """Rows and columns of a packed matrix."""
    p, c = plan, plan.config
    sizes = {
        "kda_in": (p.kda_rows, p.D),
        "kda_decay": (p.kda_heads * p.K, p.K),
        "kda_out": (p.D, p.kda_heads * p.V),
        "mla_in": (p.mla_rows, p.D),
        "mla_query": (p.mla_heads * c.qk_head_dim, p.Q),
        "mla_key_up": (p.mla_heads * p.C, c.qk_nope_head_dim),
        "mla_value_up": (p.mla_values, p.C),
        "mla_out": (p.D, p.mla_values),
        "router": (p.E, p.D),
        "latent_down": (p.latent_rows, p.D),
        "shared_in": (2 * p.shared, p.D),
        "shared_out": (p.D, p.shared),
        "latent_up": (p.D, p.latent_rows),
        "dense_in": (2 * p.dense, p.D),
        "dense_out": (p.D, p.dense),
        "lm_head": (p.W, p.D),
    }
    return Tiling(*sizes[name])


def _stack(*parts: Any) -> Any:
    return _xp(parts[0]).concatenate(parts, axis=0)


def _interleave(gate: Any, up: Any) -> Any:
    """Row 2i is gate i, row 2i + 1 is up i: both meet in one lane, which applies SiTU."""
    return _xp(gate).stack([gate, up], axis=1).reshape(-1, gate.shape[1])


def _key_up(kv_b: Any, plan: Plan) -> Any:
    """W_UK per head, transposed: row n * C + c, column k."""
    w = kv_b.reshape(plan.mla_heads, -1, plan.C)[:, : plan.config.qk_nope_head_dim]
    return w.transpose(0, 2, 1).reshape(plan.mla_heads * plan.C, -1)


def _value_up(kv_b: Any, plan: Plan) -> Any:
    """W_UV per head: row n * V + v, column c."""
    w = kv_b.reshape(plan.mla_heads, -1, plan.C)[:, plan.config.qk_nope_head_dim :]
    return w.reshape(-1, plan.C)


def attention_matrices(attn: Mapping[str, Any], kind: str, plan: Plan) -> dict[str, Any]:
    """Unpacked stage matrices of a layer's ``self_attn``, by name."""
    if kind == "kda":
        order = ("f_a_proj", "b_proj", "q_proj", "k_proj", "v_proj", "g_proj")
        return {
            "kda_in": _stack(*(attn[name] for name in order)),
            "kda_decay": attn["f_b_proj"],
            "kda_out": attn["o_proj"],
        }
    return {
        "mla_in": _stack(attn["q_a_proj"], attn["kv_a_proj_with_mqa"], attn["g_proj"]),
        "mla_query": attn["q_b_proj"],
        "mla_key_up": _key_up(attn["kv_b_proj"], plan),
        "mla_value_up": _value_up(attn["kv_b_proj"], plan),
        "mla_out": attn["o_proj"],
    }


def ffn_matrices(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Unpacked stage matrices of a layer's feed-forward network, by name."""
    if "mlp" in layer:
        mlp = layer["mlp"]
        return {"dense_in": _interleave(mlp["gate_proj"], mlp["up_proj"]), "dense_out": mlp["down_proj"]}
    moe = layer["block_sparse_moe"]
    shared = moe["shared_experts"]
    return {
        "router": moe["gate"],
        "latent_down": moe["routed_expert_down_proj"],
        "shared_in": _interleave(shared["gate_proj"], shared["up_proj"]),
        "shared_out": shared["down_proj"],
        "latent_up": moe["routed_expert_up_proj"],
    }


def pack_model(params: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Every dense matrix of a parameter tree, packed: ``{"layers": [{name: packed}], "lm_head": packed}``.

    One matrix is packed at a time, so extra memory is the packed copy and one stacked matrix.

    Raises:
        ValueError: the plan is a rank's share (slice the tree first), or a matrix is not the plan's.
    """
    if plan.ways != 1:
        raise ValueError(f"plan.ways: expected 1, got {plan.ways}; a rank's share is packed by pack_stages")
    layers = []
    for i, layer in enumerate(params["layers"]):
        named = attention_matrices(layer["self_attn"], plan.config.layer_types[i], plan) | ffn_matrices(layer)
        layers.append({name: _checked_pack(plan, name, matrix) for name, matrix in named.items()})
    return {"layers": layers, "lm_head": _checked_pack(plan, "lm_head", params["lm_head"])}


def pack_stages(
    params: Mapping[str, Any], plan: Plan, stages: Mapping[int, frozenset[str]]
) -> dict[str, Any]:
    """The packed matrices of some stages of a rank's share.

    Args:
        params: the share's tree, of which only these layers need be there; ``layers`` by number.
        stages: names of matrices by layer; "lm_head" belongs to the layer past the last.

    Returns:
        as :func:`pack_model`, with a dict by number for ``layers``.
    """
    out: dict[str, Any] = {"layers": {}}
    for i, names in stages.items():
        if "lm_head" in names:
            out["lm_head"] = _checked_pack(plan, "lm_head", params["lm_head"])
            continue
        layer = params["layers"][i]
        named: dict[str, Any] = {}
        if names & {"kda_in", "kda_decay", "kda_out", "mla_in", "mla_query", "mla_out"}:
            named |= attention_matrices(layer["self_attn"], plan.config.layer_types[i], plan)
        if names - named.keys():
            named |= ffn_matrices(layer)
        out["layers"][i] = {name: _checked_pack(plan, name, named[name]) for name in names}
    return out


def _checked_pack(plan: Plan, name: str, matrix: Any) -> Any:
    t = tiling(plan, name)
    if tuple(matrix.shape) != (t.rows, t.columns):
        raise ValueError(f"{name}: expected [{t.rows}, {t.columns}], got {list(matrix.shape)}")
    return pack(matrix)


__all__ = [
    "BLOCK_COLUMNS",
    "MOST_COLUMNS",
    "Tiling",
    "attention_matrices",
    "ffn_matrices",
    "group_rows",
    "matrix_name",
    "pack",
    "pack_model",
    "pack_stages",
    "tiling",
    "unpack",
]
