"""Loading checkpoints in the release's format that are in order."""

import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax import checkpoints
from k3jax.checkpoints import names
from k3jax.checkpoints.place import place
from k3jax.config import K3Config
from k3jax.model import abstract_params
from k3jax.quant import MXFP4
from support.checkpoint_files import assert_same_arrays, small_config, write_small
from support.oracle import CASE_A
from support.oracle import config as case_a_config
from support.oracle import tensors as case_a_tensors
from support.random_k3 import params_from_tensors

EXPERTS = "model.layers.1.block_sparse_moe.experts"


def load(path: Path, **options):
    return checkpoints.load_params(path, progress=False, **options)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_case_a_loads_as_an_independent_reader_reads_it(dtype):
    params, config, report = load(CASE_A, dtype=dtype)
    assert_same_arrays(params, params_from_tensors(case_a_config(), case_a_tensors(), dtype))
    assert config.kda_a_log_size == 8
    assert report.tensors == len(case_a_tensors())
    assert report.skipped == ()


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_tree_has_the_shapes_and_dtypes_that_the_model_expects(tmp_path, dtype):
    config, _ = write_small(tmp_path)
    params, _, _ = load(tmp_path, dtype=dtype)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), params)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), abstract_params(config, dtype))


@pytest.mark.parametrize("options", [{"shards": 5}, {"shards": 1}, {"index": False}])
@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_ck12_text_loads_with_or_without_prefix_and_vision_is_reported_as_skipped(tmp_path, prefix, options):
    vision = {
        "vision_tower.encoder.blocks.0.wo.weight": np.ones((2, 3), np.float32),
        "mm_projector.proj.0.weight": np.ones((4, 4), np.float32),
    }
    config, tensors = write_small(tmp_path, prefix=prefix, extra=vision, **options)
    params, _, report = load(tmp_path)
    assert_same_arrays(params, params_from_tensors(config, tensors))
    assert sorted(report.skipped) == sorted(vision)
    assert report.tensors == len(tensors)


def test_ck11_legacy_attn_res_names_give_the_same_arrays(tmp_path):
    def rename(tensors):
        for name in list(tensors):
            for part in ("proj", "norm"):
                if name.endswith(f"_res_{part}.weight"):
                    tensors[name.replace(f"_{part}.weight", f".{part}_weight")] = tensors.pop(name)

    config, tensors = write_small(tmp_path, rename)
    assert "model.output_attn_res.proj_weight" in tensors
    _, released = write_small(tmp_path / "released")
    params, _, _ = load(tmp_path)
    assert_same_arrays(params, params_from_tensors(config, released))


@pytest.mark.parametrize("shape", [lambda s: (s[0], 4), lambda s: (s[0], 4, 1)])
def test_ck11_conv_weights_of_rank_two_or_channels_first_give_the_same_arrays(tmp_path, shape):
    def reshape(tensors):
        for name, value in tensors.items():
            if "_conv1d" in name:
                tensors[name] = value.reshape(shape(value.shape))

    config, _ = write_small(tmp_path, reshape)
    _, released = write_small(tmp_path / "released")
    params, _, _ = load(tmp_path)
    assert_same_arrays(params, params_from_tensors(config, released))


@pytest.mark.parametrize("size", [4, 8, 128])
def test_ck01_a_log_is_cut_to_the_heads_whatever_its_stored_length(tmp_path, size):
    def pad(tensors):
        for name in list(tensors):
            if name.endswith("A_log"):
                tensors[name] = np.concatenate([tensors[name][:4], np.zeros(size - 4, np.float32)])

    _, tensors = write_small(tmp_path, pad)
    params, config, _ = load(tmp_path)
    stored = tensors["model.layers.0.self_attn.A_log"]
    np.testing.assert_array_equal(params["layers"][0]["self_attn"]["A_log"], stored[:4])
    assert config.kda_a_log_size == size
    assert config.param_count() == sum(
        value.size * (2 if "packed" in name else 1) for name, value in tensors.items() if "scale" not in name
    )


def test_ck05_the_latent_norm_is_loaded_and_changes_the_output(tmp_path):
    import k3jax

    def gain(tensors):
        tensors["model.layers.1.block_sparse_moe.routed_expert_norm.weight"][:] = 3.0

    config = small_config(layer_types=("kda", "kda"))
    write_small(tmp_path / "plain", config=config)
    write_small(tmp_path / "gain", gain, config)
    outputs = []
    for folder in ("plain", "gain"):
        model = k3jax.load(tmp_path / folder, dtype="float32", progress=False)
        outputs.append(model.prefill([[3, 1, 2]])[0])
        norm = model.params["layers"][1]["block_sparse_moe"]["routed_expert_norm"]
    assert (np.asarray(norm) == 3.0).all()
    assert not np.allclose(outputs[0], outputs[1], atol=1e-2)


def test_rt02_router_biases_keep_their_float32_values(tmp_path):
    # Evenly spaced over the range seen in practice: in bfloat16 nine of 896 values would remain.
    bias = np.linspace(6.817, 7.063, 896, dtype=np.float32)
    config = small_config(num_experts=896, layer_types=("kda", "mla"), routed_expert_hidden_size=32)

    def spread(tensors):
        tensors["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"] = bias

    write_small(tmp_path, spread, config)
    params, _, _ = load(tmp_path)
    stored = np.asarray(params["layers"][1]["block_sparse_moe"]["e_score_correction_bias"])
    assert stored.dtype == np.float32
    assert len(set(stored.tolist())) == 896


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float32])
def test_experts_stored_in_float_become_a_float_leaf_and_others_stay_packed(tmp_path, kind):
    weights = np.random.default_rng(0).standard_normal((8, 64, 96)).astype(kind)
    config = small_config(moe_intermediate_size=64, routed_expert_hidden_size=96)

    def unpack(tensors):
        for expert in range(8):
            for half in ("weight_packed", "weight_scale"):
                del tensors[f"{EXPERTS}.{expert}.w3.{half}"]
            tensors[f"{EXPERTS}.{expert}.w3.weight"] = weights[expert]

    write_small(tmp_path, unpack, config)
    experts = load(tmp_path)[0]["layers"][1]["block_sparse_moe"]["experts"]
    assert isinstance(experts["w1"], MXFP4)
    assert_same_arrays([experts["w3"]], [weights])


@pytest.mark.parametrize("block_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize(
    "spec", [P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y"), None, None), P(None, None, ("y", "x"))]
)
def test_an_array_is_placed_as_it_is_read_in_blocks_of_any_size_each_byte_once(
    cpu_devices, spec, block_bytes
):
    values = np.arange(16 * 12 * 8, dtype=np.float32).reshape(16, 12, 8)
    mesh = Mesh(np.array(cpu_devices).reshape(4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, spec)
    times_read = np.zeros(values.shape, int)

    def read(box):
        times_read[box] += 1
        return values[box].copy()

    placed = place(read, values.shape, values.dtype, sharding, block_bytes=block_bytes)
    assert placed.sharding == sharding
    np.testing.assert_array_equal(placed, values)
    assert (times_read == 1).all()


@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 2)])
def test_a_mesh_reads_every_byte_once_also_of_replicated_leaves(cpu_devices, shape):
    mesh = Mesh(np.array(cpu_devices).reshape(shape), ("expert", "tensor") if len(shape) == 2 else ("all",))
    params, _, report = load(CASE_A, mesh=mesh)
    assert_same_arrays(params, params_from_tensors(case_a_config(), case_a_tensors()))
    assert report.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    shard = params["layers"][1]["block_sparse_moe"]["experts"]["w1"].codes.addressable_shards[0].data
    assert shard.size < params["layers"][1]["block_sparse_moe"]["experts"]["w1"].codes.size


def test_host_memory_of_a_large_leaf_is_bounded_by_the_block(cpu_devices):
    rows, block = 4096, 1 << 20
    sharding = jax.sharding.SingleDeviceSharding(cpu_devices[0])
    seen = []

    def read(box):
        out = np.full([s.stop - s.start for s in box], 7, np.uint8)
        seen.append(out.nbytes)
        return out

    place(read, (8, 4096), np.uint8, sharding, block_bytes=block)  # compiled outside the measurement
    tracemalloc.start()
    array = place(read, (rows, 16384), np.uint8, sharding, block_bytes=block)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert array.nbytes == 64 * block
    assert max(seen) <= block
    # Two blocks alive at a time, and half a one for everything else that Python allocates.
    assert peak <= 2.5 * block
    assert int(np.asarray(array, np.int64).sum()) == 7 * array.size


def test_the_report_gives_bytes_time_and_peak_memory_and_is_printed_with_progress(capfd):
    _, _, report = load(CASE_A)
    assert capfd.readouterr() == ("", "")
    _, _, report = checkpoints.load_params(CASE_A, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert str(report) in err
    assert report.bytes > 3_900_000
    assert report.seconds > 0
    assert report.peak_host_bytes > report.bytes
    assert report.gb_per_second == pytest.approx(report.bytes / 1e9 / report.seconds)
    for part in ("GB/s", "peak host memory", f"{report.tensors} tensors"):
        assert part in str(report)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", np.float32])
def test_only_the_two_dtypes_are_accepted(dtype):
    with pytest.raises(Exception, match="dtype"):
        load(CASE_A, dtype=dtype)


def test_a_config_given_by_the_caller_is_insisted_on(tmp_path):
    config, _ = write_small(tmp_path)
    other = small_config(vocab_size=config.vocab_size + 1)
    with pytest.raises(checkpoints.CheckpointError, match=rf"expected BF16 \[{other.vocab_size}, "):
        load(tmp_path, config=other)


def test_every_leaf_has_one_released_name_and_every_name_one_leaf():
    config = K3Config.preset("k3-slice", num_layers=8, num_experts=16)
    slots = names.slots(config)
    assert len({slot.path for slot in slots}) == len(slots) == len({slot.name for slot in slots})
    for slot in slots:
        name = slot.name.format(3) + (".weight_scale" if slot.expert else "")
        assert names.canonical("language_model." + name) == name
    released = {slot.name for slot in slots}
    assert {"lm_head.weight", "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"} <= released
    assert {"model.layers.0.self_attn.A_log", "model.layers.7.block_sparse_moe.experts.{}.w2"} <= released
