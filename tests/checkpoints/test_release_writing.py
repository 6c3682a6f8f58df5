"""Writing parameters in the release's format."""

import json
import re

import jax
import numpy as np
import pytest
from safetensors import safe_open

from k3jax import checkpoints
from k3jax.checkpoints import CheckpointError
from support.checkpoint_files import assert_same_arrays, small_config
from support.oracle import CASE_A
from support.oracle import config as case_a_config
from support.oracle import tensors as case_a_tensors
from support.random_k3 import params_from_tensors, random_config, random_tensors


def tree(seed=3, **overrides):
    config = random_config(seed, **overrides)
    return config, params_from_tensors(config, random_tensors(config, seed))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, seed):
    config, params = tree(seed)
    checkpoints.write_release(tmp_path, config, params, max_shard_bytes=50_000)
    back, got, _ = checkpoints.load_params(tmp_path, progress=False)
    assert_same_arrays(back, params)
    if config.num_kda_layers:
        assert got == config


@pytest.mark.parametrize("by_way_of_orbax", [False, True])
def test_case_a_written_again_has_the_same_tensors_under_the_same_names(tmp_path, by_way_of_orbax):
    source = CASE_A
    if by_way_of_orbax:
        source = tmp_path / "orbax"
        checkpoints.convert(CASE_A, source, progress=False)
    params, config, _ = checkpoints.load_params(source, progress=False)
    checkpoints.write_release(tmp_path / "again", config, params)
    (file,) = (tmp_path / "again").glob("*.safetensors")
    with safe_open(file, framework="numpy") as stored:
        found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (a file)
    assert_same_arrays(found, {"language_model." + name: value for name, value in case_a_tensors().items()})


def test_an_independent_reader_reads_the_files_and_the_index_lists_them(tmp_path):
    config, params = tree(3)
    checkpoints.write_release(tmp_path, config, params, max_shard_bytes=30_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    listed, total = {}, 0
    for path in sorted(tmp_path.glob("*.safetensors")):
        assert re.fullmatch(r"model-\d{5}-of-\d{6}\.safetensors", path.name)
        with safe_open(path, framework="numpy") as stored:
            for name in stored.keys():  # noqa: SIM118 (a file)
                listed[name] = path.name
                total += stored.get_tensor(name).nbytes
    assert index["weight_map"] == listed
    assert index["metadata"]["total_size"] == total
    assert len(set(listed.values())) > 1


def test_files_keep_to_the_bound_unless_one_tensor_is_larger(tmp_path):
    config, params = tree(3)
    checkpoints.write_release(tmp_path, config, params, max_shard_bytes=20_000)
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as stored:
            sizes = [stored.get_tensor(name).nbytes for name in stored.keys()]  # noqa: SIM118 (a file)
        # The padding of A_log is not counted, and an expert's two halves go together.
        assert sum(sizes) <= 20_000 + 8 * 4 or len(sizes) <= 2


def test_tensors_are_aligned_to_their_type(tmp_path):
    config, params = tree(3)
    checkpoints.write_release(tmp_path, config, params)
    for path in tmp_path.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] % {"F32": 4, "BF16": 2, "U8": 1}[entry["dtype"]] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("norm"), "leaf norm: missing"),
        (lambda p: p.update(extra=p["norm"]), "leaf extra: unknown"),
        (
            lambda p: p.update(norm=p["norm"].astype("float32")),
            r"leaf norm: expected bfloat16 \[\d+\], got float32",
        ),
        (lambda p: p.update(norm=p["norm"][:-1]), r"leaf norm: expected bfloat16 \[\d+\], got bfloat16"),
    ],
)
def test_parameters_that_are_not_the_models_are_refused_before_a_file_is_made(tmp_path, change, message):
    config, params = tree(3)
    change(params)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.write_release(tmp_path / "new", config, params)
    assert not (tmp_path / "new").exists()


def test_a_directory_that_holds_a_checkpoint_is_not_overwritten(tmp_path):
    config, params = tree(3)
    checkpoints.write_release(tmp_path, config, params)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"expected no checkpoint there, found config\.json"):
        checkpoints.write_release(tmp_path, config, params)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_float_experts_are_written_as_float_tensors(tmp_path):
    config = small_config()
    params = params_from_tensors(config, random_tensors(config, 1))
    experts = params["layers"][1]["block_sparse_moe"]["experts"]
    experts["w2"] = experts["w2"].decode("float32")
    checkpoints.write_release(tmp_path, config, params)
    back, _, report = checkpoints.load_params(tmp_path, progress=False)
    assert_same_arrays(back, params)
    assert report.leaves == len(jax.tree.leaves(params))


def test_the_padding_of_a_log_is_written_as_zeros(tmp_path):
    params, config, _ = checkpoints.load_params(CASE_A, progress=False)
    assert config == case_a_config()
    checkpoints.write_release(tmp_path, config, params)
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="numpy") as stored:
        a_log = stored.get_tensor("language_model.model.layers.0.self_attn.A_log")
    assert a_log.shape == (8,)
    np.testing.assert_array_equal(a_log[4:], 0)
    np.testing.assert_array_equal(a_log[:4], params["layers"][0]["self_attn"]["A_log"])
