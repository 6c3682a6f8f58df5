"""MXFP4 bytes on their way from file to weight: formats, special scale bytes, quantiser."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import checkpoints
from k3jax.checkpoints import CheckpointError
from k3jax.checkpoints.safetensors_file import Reader
from k3jax.checkpoints.sources import ScaleSource
from k3jax.quant import MXFP4, dequantize, quantize
from support.checkpoint_files import assert_same_arrays, edit_shard, retag, small_config, write_small
from support.random_k3 import params_from_tensors

SCALE = "model.layers.1.block_sparse_moe.experts.5.w2.weight_scale"
CODES = SCALE.replace("scale", "packed")
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def load(path, dtype=None):
    return checkpoints.load_params(path, dtype=dtype, progress=False)[0]


def write_block(path, byte, code, at=(3, 1)):
    """A checkpoint with scale ``byte`` and all codes ``code`` in one block of one expert."""
    config = small_config(routed_expert_hidden_size=64, moe_intermediate_size=64)

    def change(tensors):
        tensors[SCALE][at] = byte
        tensors[CODES][at[0], 16 * at[1] : 16 * (at[1] + 1)] = code | code << 4

    write_small(path, change, config)


def decoded_block(path, dtype, at=(3, 1)):
    w2 = load(path, dtype)["layers"][1]["block_sparse_moe"]["experts"]["w2"]
    return np.asarray(w2[5].decode(dtype or "bfloat16"))[at[0], 32 * at[1] : 32 * (at[1] + 1)]


@pytest.mark.parametrize("stored", ["U8", "F8_E8M0"])
def test_qz01_scale_bytes_mean_the_same_under_either_dtype(tmp_path, stored):
    config = small_config()

    def set_scales(tensors):
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name][:] = 120
            if name.endswith("weight_packed"):
                tensors[name][:] = 0x22

    _, tensors = write_small(tmp_path, set_scales, config, index=False)
    scales = [name for name in tensors if name.endswith("weight_scale")]
    retag(tmp_path / "model.safetensors", scales, stored)
    params = load(tmp_path)
    assert_same_arrays(params, params_from_tensors(config, tensors))
    w1 = params["layers"][1]["block_sparse_moe"]["experts"]["w1"]
    assert (np.asarray(w1.decode("float32")) == 2.0**-7).all()


def test_qz02_byte_127_is_one(tmp_path):
    write_block(tmp_path, byte=127, code=2)
    assert (decoded_block(tmp_path, None) == 1.0).all()


@pytest.mark.parametrize("byte", [31, 32, 126])
def test_qz03_small_scales_are_fractions(tmp_path, byte):
    write_block(tmp_path, byte, code=7)
    assert (decoded_block(tmp_path, "float32") == 6 * 2.0 ** (byte - 127)).all()


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("code", [0, 1, 8, 15])
def test_qz04_byte_255_is_refused_naming_tensor_and_offset(tmp_path, dtype, code):
    write_block(tmp_path, 255, code)
    blocks = 64 // 32
    with pytest.raises(CheckpointError, match="byte 255 is NaN") as caught:
        load(tmp_path, dtype)
    assert f"{SCALE}, byte {3 * blocks + 1} (row 3, block 1)" in str(caught.value)


@pytest.mark.parametrize("code", [0, 7])
def test_qz04_a_part_of_a_leaf_is_judged_by_its_own_codes(tmp_path, code):
    # Block 1 of row 3 of expert 5, read in a box that starts there; every other code is zero (or not).
    write_block(tmp_path, 1, code)
    other = 7 - code

    def fill(tensors):
        codes = tensors["language_model." + CODES]
        codes[:, :16] = other | other << 4

    edit_shard(tmp_path / "model-00001-of-000001.safetensors", fill)
    leaf = checkpoints.preflight(tmp_path).leaves["layers", 1, "block_sparse_moe", "experts", "w2"]
    box = (slice(5, 6), slice(3, 4), slice(1, 2))
    with Reader() as reader:
        if code == 0:
            assert ScaleSource(leaf, "bfloat16").read(reader, box).tolist() == [[[1]]]
            return
        with pytest.raises(CheckpointError, match=r"byte 7 \(row 3, block 1\): scale byte 1 scales nonzero"):
            ScaleSource(leaf, "bfloat16").read(reader, box)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("byte", [0, 1, 253, 254])
def test_qz04_special_bytes_over_zero_codes_give_signed_zeros(tmp_path, dtype, byte):
    write_block(tmp_path, byte, code=8)
    block = decoded_block(tmp_path, dtype)
    assert (block == 0).all()
    assert np.signbit(block).all()


@pytest.mark.parametrize("code", [1, 7, 15])
@pytest.mark.parametrize("byte", [0, 1])
def test_qz04_subnormal_scales_are_refused_in_bfloat16_and_exact_in_float32(tmp_path, byte, code):
    write_block(tmp_path, byte, code)
    with pytest.raises(CheckpointError, match=f"byte {byte} scales nonzero codes below the normal") as caught:
        load(tmp_path)
    assert SCALE in str(caught.value)
    assert "dtype='float32'" in str(caught.value)
    want = np.float32(VALUES[code] * 2.0 ** (byte - 127))
    assert want != 0
    assert (decoded_block(tmp_path, "float32").view(np.uint32) == want.view(np.uint32)).all()


@pytest.mark.parametrize(
    ("byte", "code", "fits"),
    [(252, 7, True), (253, 5, True), (253, 6, False), (253, 7, False), (254, 3, True), (254, 4, False)],
)
def test_qz04_large_scales_are_accepted_exactly_where_the_value_is_finite(tmp_path, byte, code, fits):
    write_block(tmp_path, byte, code)
    if byte > 252:
        with pytest.raises(CheckpointError, match=f"byte {byte} scales nonzero codes past"):
            load(tmp_path)
    if not fits:
        with pytest.raises(CheckpointError, match=f"byte {byte} scales nonzero codes past"):
            load(tmp_path, "float32")
        return
    assert (decoded_block(tmp_path, "float32") == VALUES[code] * 2.0 ** (byte - 127)).all()


@pytest.mark.parametrize("byte", [2, 252])
def test_qz04_every_code_of_the_outermost_safe_bytes_is_exact_in_bfloat16(tmp_path, byte):
    write_block(tmp_path, byte, code=1)
    assert (decoded_block(tmp_path, None).astype(np.float64) == 0.5 * 2.0 ** (byte - 127)).all()


def test_qz04_conversion_keeps_the_bytes_and_the_load_after_it_refuses_the_same(tmp_path):
    write_block(tmp_path / "src", 1, code=7)
    checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.block_sparse_moe\.experts\.w2, scale at \[5, 3, 1\]"
    ):
        load(tmp_path / "dst")
    assert_same_arrays(load(tmp_path / "dst", "float32"), load(tmp_path / "src", "float32"))


def test_qz04_conversion_refuses_byte_255(tmp_path):
    write_block(tmp_path / "src", 255, code=7)
    with pytest.raises(CheckpointError, match="byte 255 is NaN"):
        checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)


@pytest.mark.parametrize("peak", [0.0, 1e-40, 2.0**-126, 0.999 * 2**-3, 6.0, 3e38])
def test_qz05_a_quantised_block_is_finite_and_within_half_a_step(peak):
    block = np.linspace(-1, 1, 32)[None] * np.float32(peak)
    packed = quantize(block.astype(np.float32))
    back = np.asarray(dequantize(jnp.asarray(packed.codes), jnp.asarray(packed.scales)), np.float64)
    scale = 2.0 ** (packed.scales.astype(np.float64) - 127)
    assert (packed.scales < 255).all()
    assert np.isfinite(back).all()
    # The widest gap between codes is 2 (from 4 to 6), so half a step is one scale.
    assert (np.abs(back - block) <= scale).all()


def test_qz06_the_even_column_is_the_low_nibble_and_negative_zero_survives(tmp_path):
    config = small_config()

    def change(tensors):
        tensors[SCALE][:] = 127
        tensors[CODES][:] = 0x21
        tensors[CODES][0] = 0x08

    write_small(tmp_path, change, config)
    w2 = np.asarray(load(tmp_path)["layers"][1]["block_sparse_moe"]["experts"]["w2"][5].decode("float32"))
    assert (w2[1:, 0::2] == 0.5).all()
    assert (w2[1:, 1::2] == 1.0).all()
    assert np.signbit(w2[0, 0::2]).all()
    assert not np.signbit(w2[0, 1::2]).any()


def test_qz09_codes_pass_through_conversion_byte_for_byte_under_their_layout_tag(tmp_path):
    config, tensors = write_small(tmp_path / "src")
    checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)
    assert_same_arrays(load(tmp_path / "dst"), params_from_tensors(config, tensors))
    record = tmp_path / "dst" / "k3jax.json"
    text = record.read_text()
    assert text.count('"mxfp4-pack-quantized"') == 3 * 2
    record.write_text(text.replace("mxfp4-pack-quantized", "mxfp4-interleaved"))
    with pytest.raises(
        CheckpointError, match="layout: expected 'mxfp4-pack-quantized', got 'mxfp4-interleaved'"
    ):
        load(tmp_path / "dst")


def test_a_quantised_leaf_written_as_a_checkpoint_is_read_back_exactly(tmp_path):
    config, tensors = write_small(tmp_path / "src")
    params = params_from_tensors(config, tensors)
    experts = params["layers"][1]["block_sparse_moe"]["experts"]
    weight = np.asarray(experts["w1"].decode("float32"))
    experts["w1"] = MXFP4(*(np.asarray(half) for half in (quantize(weight).codes, quantize(weight).scales)))
    checkpoints.write_release(tmp_path / "again", config, params)
    back = load(tmp_path / "again")["layers"][1]["block_sparse_moe"]["experts"]["w1"]
    np.testing.assert_array_equal(np.asarray(back.decode("float32")), weight)
