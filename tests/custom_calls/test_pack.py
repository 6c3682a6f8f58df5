"""Packed weights: every byte in its place, one matrix of extra memory, scales that the kernel can decode."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import k3jax
from k3jax.custom_calls import pack
from k3jax.custom_calls.decode_megakernel.operands import is_matrix, packed_part, packed_shapes
from k3jax.quant import MXFP4
from support import megakernel
from support.tiny_model import bits

CONFIG = megakernel.config()
PLAN = pack.plan_of(CONFIG)


def with_scales(change: Any, layer: int = 1, name: str = "w3") -> dict[str, Any]:
    """The parameters with other scale bytes (numpy, changed in place) in one matrix."""
    params = megakernel.params()
    layers = list(params["layers"])
    moe = dict(layers[layer]["block_sparse_moe"])
    weight = moe["experts"][name]
    codes, scales = np.array(weight.codes), np.array(weight.scales)
    change(codes, scales)
    moe["experts"] = {**moe["experts"], name: MXFP4(jnp.asarray(codes), jnp.asarray(scales))}
    layers[layer] = {**layers[layer], "block_sparse_moe": moe}
    return {**params, "layers": layers}


def test_every_stack_holds_every_layer_in_the_kernels_layout() -> None:
    params, packed = megakernel.params(), megakernel.packed_params()[pack.PACKED]
    want = packed_shapes(PLAN)
    assert set(packed) == set(want)
    for name, (dtype, shape) in want.items():
        assert packed[name].dtype == jnp.dtype(dtype)
        assert packed[name].shape == shape
        for place in range(shape[0]):
            part = np.asarray(packed_part(params, PLAN, name, place)).astype(dtype)
            assert bits(packed[name][place]) == bits(part), f"{name}[{place}]"


def test_a_matrix_is_written_into_its_stack_in_place() -> None:
    name = next(n for n in packed_shapes(PLAN) if n == "kda_in")
    _, shape = packed_shapes(PLAN)[name]
    stack = jax.ShapeDtypeStruct((1000, *shape[1:]), jnp.bfloat16)
    layer = pack.dense_of_layer(megakernel.params()["layers"][0])
    compiled = pack._put.lower(stack, layer, jnp.int32(0), plan=PLAN, name=name).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    one = 2 * int(np.prod(shape[1:]))
    assert memory.alias_size_in_bytes == 1000 * one
    # The stacked rows, padded, and the tiles; XLA:CPU computes some of it in float32.
    assert memory.temp_size_in_bytes <= 6 * one


def test_the_library_goes_on_with_packed_parameters() -> None:
    plain = k3jax.Model(megakernel.params(), CONFIG)
    model = k3jax.Model(megakernel.params(), CONFIG)
    model.pack()
    assert pack.PACKED not in plain.params
    assert pack.PACKED in model.params
    assert model.implementation == "xla"  # no GPU here
    state = model.init_state(2, 300)
    assert state.kernel is None
    assert bits(model.decode_step([1, 2], state)[0]) == bits(plain.decode_step([1, 2], state)[0])


def test_the_interpreter_takes_packed_parameters_and_kernel_leaves() -> None:
    state = megakernel.state(2)
    arguments: Any = {"config": CONFIG, "implementation": "megakernel-interpret"}
    logits, after = k3jax.decode_step(megakernel.packed_params(), state, [1, 2], **arguments)
    bare = dataclasses.replace(state, kernel=None)
    want, _ = k3jax.decode_step(megakernel.params(), bare, [1, 2], **arguments)
    assert bits(logits) == bits(want)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_scales_the_kernel_would_not_decode_exactly_are_refused_by_name() -> None:
    def at_the_ends(codes: np.ndarray, scales: np.ndarray) -> None:
        codes[:], scales[:] = 0x11, 120
        scales[0, 0, 0], scales[1, 0, 0] = pack.LEAST_SCALE, pack.MOST_SCALE

    pack.check_scales(with_scales(at_the_ends), CONFIG)

    def outside(codes: np.ndarray, scales: np.ndarray) -> None:
        at_the_ends(codes, scales)
        scales[2, 1, 0], scales[3, 1, 0], scales[3, 2, 0] = 104, 129, 129

    with pytest.raises(ValueError, match=r"105\.\.128.*got layer 1, w3: bytes 104, 129 in 3 blocks"):
        pack.check_scales(with_scales(outside), CONFIG)
    with pytest.raises(ValueError, match="layer 1, w3"):
        pack.pack(with_scales(outside), CONFIG)


def test_a_block_of_zeros_may_have_any_scale() -> None:
    def zeros(codes: np.ndarray, scales: np.ndarray) -> None:
        codes[:] = 0x80  # +0 and -0
        scales[:] = 255

    pack.check_scales(with_scales(zeros), CONFIG)

    def one_number(codes: np.ndarray, scales: np.ndarray) -> None:
        zeros(codes, scales)
        codes[4, 3, -1] = 0x10

    with pytest.raises(ValueError, match="layer 2, w2: bytes 255 in 1 blocks"):
        pack.check_scales(with_scales(one_number, 2, "w2"), CONFIG)


def test_what_the_kernel_does_not_take_is_refused_with_every_reason(cpu_devices: list[Any]) -> None:
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, megakernel.params()
    )
    moe = wide["layers"][1]["block_sparse_moe"]
    moe["experts"] = {name: weight.decode() for name, weight in moe["experts"].items()}
    with pytest.raises(NotImplementedError, match=r"bfloat16, got float32; experts: .* got floats"):
        pack.pack(wide, CONFIG)
    mesh = Mesh(np.array(cpu_devices[:2]), ("tp",))
    spread = jax.device_put(megakernel.params(), NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(NotImplementedError, match="one device, got parameters on 2"):
        pack.pack(spread, CONFIG)


def test_packed_weights_are_stored_and_found_again(tmp_path: Path) -> None:
    model = k3jax.Model(megakernel.params(), CONFIG)
    model.pack(tmp_path / "packed")
    again = k3jax.Model(megakernel.params(), CONFIG)
    again.pack(tmp_path / "packed")
    packed, read = model.params[pack.PACKED], again.params[pack.PACKED]
    assert set(read) == set(packed)
    for name, array in packed.items():
        assert bits(read[name]) == bits(array), name
        assert read[name].dtype == array.dtype


def test_stored_weights_of_another_model_or_layout_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack.save_packed(tmp_path / "packed", megakernel.packed_params()[pack.PACKED], CONFIG)
    with pytest.raises(FileExistsError, match="exists"):
        pack.save_packed(tmp_path / "packed", {}, CONFIG)
    other = dataclasses.replace(CONFIG, vocab_size=77)
    with pytest.raises(ValueError, match=r"another configuration or version \(arrays differ\)"):
        pack.load_packed(tmp_path / "packed", other)
    with pytest.raises(FileNotFoundError, match="no packed weights at"):
        pack.load_packed(tmp_path, CONFIG)
    monkeypatch.setattr(pack, "_layout_digest", lambda: "tiles of another shape")
    with pytest.raises(ValueError, match=r"\(layout differ\)"):
        pack.load_packed(tmp_path / "packed", CONFIG)


def test_the_names_of_matrices_and_vectors_do_not_overlap() -> None:
    shapes = packed_shapes(PLAN)
    assert {name for name in shapes if is_matrix(name)} == {n for n, (_, s) in shapes.items() if len(s) == 6}
