"""The tiled layout is an exact rearrangement, and puts every matrix where instructions look for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.custom_calls.decode_megakernel.layout import Tiling, group_rows, pack, pack_model, tiling, unpack
from k3jax.custom_calls.decode_megakernel.shapes import Plan
from support.tiny_model import config, model

SHAPES = [(8, 32), (1, 1), (9, 33), (130, 2048), (16, 2080), (24, 7168), (7, 12288), (40, 4100)]


def random_matrix(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng([rows, columns])
    return rng.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unpacking_gives_back_every_bit_with_numpy_and_with_jax(rows: int, columns: int) -> None:
    matrix = random_matrix(rows, columns)
    for given in (matrix, jnp.asarray(matrix)):
        packed = pack(given)
        assert isinstance(packed, jax.Array) == isinstance(given, jax.Array)
        assert tuple(packed.shape) == Tiling(rows, columns).packed_shape
        back = unpack(packed, rows, columns)
        assert np.asarray(back).tobytes() == matrix.tobytes()
    assert np.asarray(pack(jnp.asarray(matrix))).tobytes() == pack(matrix).tobytes()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_lane_finds_eight_neighbouring_columns_of_its_row(rows: int, columns: int) -> None:
    """Lane (row r, piece q) of block k of a chunk reads columns 32 k + 8 q .. + 8 of row r of the group."""
    t, matrix = Tiling(rows, columns), random_matrix(rows, columns)
    flat = pack(matrix).reshape(-1)
    rng = np.random.default_rng(0)
    for _ in range(20):
        row, column = int(rng.integers(rows)), int(rng.integers(columns))
        chunk, inside = divmod(column, t.chunk)
        block, lane_column = divmod(inside, 32)
        tile = ((row // 8) * t.chunks + chunk) * (t.tile_bytes // 2)
        assert flat[tile + block * 256 + (row % 8) * 32 + lane_column] == matrix[row, column]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_padding_is_zero_and_a_tile_fits_a_stage_of_the_ring(rows: int, columns: int) -> None:
    t = Tiling(rows, columns)
    assert t.tile_bytes <= 32_768
    assert t.chunk % 32 == 0
    packed = pack(np.ones((rows, columns), np.float32))
    assert packed.sum() == rows * columns
    assert packed.size * 2 == t.packed_bytes


def test_every_matrix_of_the_release_is_tiled_without_padding_in_large_tiles() -> None:
    from k3jax.config import K3Config

    plan = Plan(K3Config.preset("k3"), 1)
    names = [
        "kda_in",
        "kda_decay",
        "kda_out",
        "mla_in",
        "mla_query",
        "mla_key_up",
        "mla_value_up",
        "mla_out",
        "router",
        "latent_down",
        "shared_in",
        "shared_out",
        "latent_up",
        "dense_in",
        "dense_out",
        "lm_head",
    ]
    for name in names:
        t = tiling(plan, name)
        assert t.packed_bytes == t.real_bytes, name
        # Narrow matrices have small tiles, but an SM's run of groups is contiguous there.
        assert t.tile_bytes >= 24_576 or t.chunks == 1, name


def test_unpack_refuses_an_array_of_another_matrix() -> None:
    with pytest.raises(ValueError, match=r"packed: expected \[2, 1, 1, 8, 32\] for a \[9, 30\] matrix"):
        unpack(np.zeros((1, 1, 1, 8, 32), np.float32), 9, 30)


def test_the_packed_model_holds_every_dense_matrix_once() -> None:
    plan, params = Plan(config(), 2), jax.tree.map(np.asarray, model(None).params)
    packed = pack_model(params, plan)
    kda, mla = packed["layers"][0], packed["layers"][1]
    attn = params["layers"][0]["self_attn"]
    rows = group_rows(kda["kda_in"], 0, tiling(plan, "kda_in").groups, 0, 1)
    k = plan.K + plan.kda_heads + plan.kda_heads * plan.K
    assert np.array_equal(rows[: plan.K, : plan.D], attn["f_a_proj"])
    assert np.array_equal(rows[k : k + plan.kda_heads * plan.K, : plan.D], attn["k_proj"])
    kv_b = params["layers"][1]["self_attn"]["kv_b_proj"]
    t = tiling(plan, "mla_key_up")
    up = unpack(mla["mla_key_up"], t.rows, t.columns)
    head_rows = plan.config.qk_nope_head_dim + plan.config.v_head_dim
    for head in range(plan.mla_heads):
        want = kv_b[head * head_rows : head * head_rows + plan.config.qk_nope_head_dim].T
        assert np.array_equal(up[head * plan.C : (head + 1) * plan.C], want)
    t = tiling(plan, "dense_in")
    both = unpack(kda["dense_in"], t.rows, t.columns)
    assert np.array_equal(both[0::2], params["layers"][0]["mlp"]["gate_proj"])
    assert np.array_equal(both[1::2], params["layers"][0]["mlp"]["up_proj"])


def test_a_matrix_of_another_plan_is_refused_by_name() -> None:
    import dataclasses

    other = Plan(dataclasses.replace(config(), vocab_size=config().vocab_size + 1), 1)
    with pytest.raises(ValueError, match=r"lm_head: expected \[62, 32\], got \[61, 32\]"):
        pack_model(jax.tree.map(np.asarray, model(None).params), other)
