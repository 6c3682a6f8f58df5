"""Faulty checkpoints in the release's format: each refused before anything is allocated, by name."""

import json

import ml_dtypes
import numpy as np
import pytest

from k3jax import checkpoints
from k3jax.checkpoints import CheckpointError, loading
from support.checkpoint_files import edit_json, edit_shard, retag, small_config, write_small
from support.reference_weights import PREFIX

INDEX = "model.safetensors.index.json"
EXPERTS = "model.layers.1.block_sparse_moe.experts"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
A_LOG = "model.layers.0.self_attn.A_log"


@pytest.fixture(autouse=True)
def _no_allocation(monkeypatch):
    """A fault must be found before the first array is made."""

    def place(*_args, **_options):
        raise AssertionError("an array was made of a faulty checkpoint")

    monkeypatch.setattr(loading, "place", place)


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load_params(path, progress=False)
    return str(caught.value)


def shard_file(path, number=1, count=3):
    return path / f"model-{number:05d}-of-{count:06d}.safetensors"


def test_ck02_a_missing_shard_is_named_with_the_number_of_its_tensors(tmp_path):
    write_small(tmp_path, shards=3)
    shard_file(tmp_path, 2).unlink()
    message = refusal(tmp_path)
    assert "model-00002-of-000003.safetensors: missing" in message
    mapped = json.loads((tmp_path / INDEX).read_text())["weight_map"].values()
    assert f"puts {list(mapped).count(shard_file(tmp_path, 2).name)} tensors there" in message
    assert len(message.splitlines()) == 1  # not one more for each of its tensors


@pytest.mark.parametrize("cut", [1, 1000])
def test_ck02_a_shard_cut_short_is_named_with_both_sizes(tmp_path, cut):
    write_small(tmp_path, shards=3)
    file = shard_file(tmp_path, 3)
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - cut)
    message = refusal(tmp_path)
    assert (
        f"{file.name}: the file is cut short: its header needs {size} bytes, it has {size - cut}" in message
    )


@pytest.mark.parametrize("length", [0, 4, 8, 50])
def test_ck02_a_file_that_ends_inside_its_header_is_named(tmp_path, length):
    write_small(tmp_path, shards=3)
    file = shard_file(tmp_path, 1)
    file.write_bytes(file.read_bytes()[:length])
    assert f"{file.name}: no complete safetensors header in {length} bytes" in refusal(tmp_path)


def test_bytes_that_no_tensor_owns_are_refused(tmp_path):
    write_small(tmp_path, index=False)
    with (tmp_path / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")
    assert "has bytes no tensor owns" in refusal(tmp_path)


def test_several_broken_files_are_listed_together(tmp_path):
    write_small(tmp_path, shards=3)
    shard_file(tmp_path, 1).unlink()
    shard_file(tmp_path, 3).write_bytes(b"")
    message = refusal(tmp_path)
    assert shard_file(tmp_path, 1).name in message
    assert shard_file(tmp_path, 3).name in message


@pytest.mark.parametrize("half", ["weight_scale", "weight_packed"])
def test_ck03_a_tensor_missing_in_the_index_is_an_error_and_no_default(tmp_path, half):
    write_small(tmp_path, shards=1)
    name = f"{PREFIX}{EXPERTS}.7.w1.{half}"
    edit_json(tmp_path / INDEX, lambda tree: tree["weight_map"].pop(name))
    message = refusal(tmp_path)
    assert (
        f"{shard_file(tmp_path, 1, 1).name}: tensor {name}: is here, but the index puts it nowhere" in message
    )


def test_ck03_a_tensor_of_the_index_that_its_shard_lacks_is_an_error(tmp_path):
    write_small(tmp_path, shards=1)
    name = f"{PREFIX}{EXPERTS}.7.w1.weight_scale"
    edit_shard(shard_file(tmp_path, 1, 1), lambda tensors: tensors.pop(name))
    message = refusal(tmp_path)
    assert (
        f"{shard_file(tmp_path, 1, 1).name}: tensor {name}: the index puts it here, the file has no"
        in message
    )


def test_ck03_a_tensor_in_another_shard_than_the_index_says_is_an_error(tmp_path):
    write_small(tmp_path, shards=3)
    name = PREFIX + "lm_head.weight"
    edit_json(tmp_path / INDEX, lambda tree: tree["weight_map"].update({name: shard_file(tmp_path, 3).name}))
    assert f"{shard_file(tmp_path, 1).name}: tensor {name}: is here, but the index puts it" in refusal(
        tmp_path
    )


def test_a_file_beside_the_index_that_it_does_not_name_is_an_error(tmp_path):
    write_small(tmp_path, shards=1)
    (tmp_path / "extra.safetensors").write_bytes(b"")
    assert "extra.safetensors: not a safetensors file of any index" in refusal(tmp_path)


def test_ck03_a_missing_scale_is_an_error_naming_expert_and_half(tmp_path):
    write_small(tmp_path, lambda tensors: tensors.pop(f"{EXPERTS}.7.w1.weight_scale"))
    assert f"tensor {EXPERTS}.7.w1.weight_scale: missing" in refusal(tmp_path)


def test_ck04_renamed_experts_are_missing_and_unknown_not_skipped(tmp_path):
    def rename(tensors):
        for name in [name for name in tensors if ".experts." in name and "shared" not in name]:
            tensors[name.replace(".experts.", ".expert.")] = tensors.pop(name)

    write_small(tmp_path, rename)
    message = refusal(tmp_path)
    assert f"tensor {EXPERTS}.0.w1.weight_packed: missing, and those of 7 more of 8 experts" in message
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load_params(tmp_path, progress=False)
    assert sum("unknown, it fills no leaf" in fault for fault in caught.value.faults) == 2 * 8 * 3 * 2


def test_ck04_an_expert_past_the_last_is_unknown(tmp_path):
    def add(tensors):
        tensors[f"{EXPERTS}.8.w1.weight_scale"] = tensors[f"{EXPERTS}.7.w1.weight_scale"]

    write_small(tmp_path, add)
    assert f"tensor {PREFIX}{EXPERTS}.8.w1.weight_scale: unknown" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [Q_PROJ, "lm_head.weight", "model.layers.1.block_sparse_moe.routed_expert_norm.weight", A_LOG],
)
def test_ck04_any_missing_tensor_is_named(tmp_path, name):
    write_small(tmp_path, lambda tensors: tensors.pop(name))
    assert f"tensor {name}: missing, expected" in refusal(tmp_path)


def test_ck04_any_unknown_tensor_is_named(tmp_path):
    write_small(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.bias": np.ones(3, np.float32)}))
    assert f"tensor {PREFIX}model.layers.0.mlp.bias: unknown" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (Q_PROJ, lambda x: x.T, "expected BF16 [{}, {}], got BF16 [{1}, {0}]"),
        (Q_PROJ, lambda x: x.astype(np.float32), "got F32"),
        (Q_PROJ, lambda x: x.astype(np.float16), "got F16"),
        ("model.layers.0.self_attn.dt_bias", lambda x: x.astype(ml_dtypes.bfloat16), "expected F32"),
        (f"{EXPERTS}.2.w2.weight_scale", lambda x: x.view(np.int8), "expected U8 or F8_E8M0"),
        (f"{EXPERTS}.2.w2.weight_packed", lambda x: x.view(np.int8), "expected U8"),
        ("model.layers.0.self_attn.k_conv1d.weight", lambda x: x.reshape(-1, 1, 2), "expected F32"),
    ],
)
def test_a_wrong_shape_or_dtype_names_file_tensor_expected_and_found(tmp_path, name, change, expected):
    def apply(tensors):
        tensors[name] = np.ascontiguousarray(change(tensors[name]))

    config, _ = write_small(tmp_path, apply, shards=1)
    sizes = (config.kda_key_size, config.hidden_size)
    expected = expected.replace("{}, {}", "{0}, {1}").format(*sizes)
    message = refusal(tmp_path)
    assert f"{shard_file(tmp_path, 1, 1).name}: tensor {PREFIX}{name}: expected" in message
    assert expected in message


def test_rt02_a_router_bias_stored_in_bfloat16_is_refused(tmp_path):
    name = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"

    def narrow(tensors):
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    write_small(tmp_path, narrow)
    assert f"tensor {PREFIX}{name}: expected F32 [8], got BF16 [8]" in refusal(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1.0, -1e-30])
def test_ck01_padding_of_a_log_that_is_not_zero_is_refused(tmp_path, bad):
    def poison(tensors):
        tensors[A_LOG][6] = bad

    write_small(tmp_path, poison, shards=1)
    message = refusal(tmp_path)
    assert (
        f"{shard_file(tmp_path, 1, 1).name}: tensor {PREFIX}{A_LOG}: expected zeros past the 4 heads"
        in message
    )
    assert "at entry 6" in message


def test_ck01_an_a_log_that_is_not_finite_is_refused(tmp_path):
    def poison(tensors):
        tensors[A_LOG][2] = np.nan

    write_small(tmp_path, poison)
    assert f"tensor {PREFIX}{A_LOG}: expected 4 finite numbers" in refusal(tmp_path)


@pytest.mark.parametrize("change", [lambda x: x[:3], lambda x: x.reshape(2, 4), lambda x: x.reshape(8, 1)])
def test_ck01_an_a_log_too_short_or_of_another_rank_is_refused(tmp_path, change):
    def cut(tensors):
        tensors[A_LOG] = change(tensors[A_LOG])

    write_small(tmp_path, cut)
    assert f"tensor {PREFIX}{A_LOG}: expected F32 [4], got F32" in refusal(tmp_path)


def test_ck01_lengths_of_a_log_that_differ_between_layers_are_refused(tmp_path):
    def cut(tensors):
        tensors[A_LOG] = tensors[A_LOG][:4]

    write_small(tmp_path, cut)
    assert "A_log: expected one length in every layer, got [4, 8]" in refusal(tmp_path)


def test_ck11_both_spellings_of_a_parameter_are_refused(tmp_path):
    def both(tensors):
        tensors["model.layers.1.mlp_res.norm_weight"] = tensors["model.layers.1.mlp_res_norm.weight"].copy()

    write_small(tmp_path, both)
    message = refusal(tmp_path)
    assert "model.layers.1.mlp_res.norm_weight" in message
    assert "model.layers.1.mlp_res_norm.weight" in message
    assert "expected one spelling" in message


def test_ck12_a_tensor_with_and_without_prefix_is_refused(tmp_path):
    config, tensors = write_small(tmp_path / "donor")
    write_small(tmp_path / "both", extra={"lm_head.weight": tensors["lm_head.weight"]}, config=config)
    assert "tensor lm_head.weight: the same parameter as language_model.lm_head.weight" in refusal(
        tmp_path / "both"
    )


def test_ck10_an_mla_layer_with_its_projections_fused_is_refused_not_filled_with_placeholders(tmp_path):
    def fuse(tensors):
        at = "model.layers.1.self_attn."
        parts = [tensors.pop(at + name) for name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")]
        tensors[at + "fused_qkv_a_proj_with_mqa.weight"] = np.concatenate(parts)

    write_small(tmp_path, fuse)
    message = refusal(tmp_path)
    assert "model.layers.1.self_attn.kv_a_proj_with_mqa.weight: missing" in message
    assert "fused_qkv_a_proj_with_mqa.weight: unknown" in message


def test_experts_float_beside_packed_in_one_leaf_are_refused(tmp_path):
    def mix(tensors):
        shape = tensors[f"{EXPERTS}.3.w1.weight_packed"].shape
        for half in ("weight_packed", "weight_scale"):
            del tensors[f"{EXPERTS}.3.w1.{half}"]
        tensors[f"{EXPERTS}.3.w1.weight"] = np.zeros((shape[0], 2 * shape[1]), np.float32)

    write_small(tmp_path, mix)
    message = refusal(tmp_path)
    assert f"tensor {PREFIX}{EXPERTS}.3.w1.weight: float beside packed experts" in message


def test_qz07_experts_as_wide_as_the_hidden_size_are_refused(tmp_path):
    config = small_config(hidden_size=128, routed_expert_hidden_size=64)

    def widen(tensors):
        for name in [n for n in tensors if n.startswith(EXPERTS) and ".w1." in n]:
            tensors[name] = np.repeat(tensors[name], 2, axis=1)

    write_small(tmp_path, widen, config)
    message = refusal(tmp_path)
    width = config.moe_intermediate_size
    assert f"{EXPERTS}.0.w1.weight_packed: expected U8 [{width}, 32], got U8 [{width}, 64]" in message
    assert f"{EXPERTS}.0.w1.weight_scale: expected U8 or F8_E8M0 [{width}, 2], got U8 [{width}, 4]" in message


def _quantization(tree):
    return tree["text_config"]["quantization_config"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q.update(format="nvfp4-pack-quantized"), "format: expected 'mxfp4-pack-quantized'"),
        (lambda q: q.pop("format"), "format: expected 'mxfp4-pack-quantized', got None"),
        (lambda q: q.update(quant_method="modelopt_mixed"), "quant_method: expected 'compressed-tensors'"),
        (lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=16), "group_size: expected 32"),
        (
            lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8),
            "num_bits: expected 4, got 8",
        ),
        (lambda q: q["config_groups"]["group_0"]["weights"].update(type="int"), "type: expected 'float'"),
    ],
)
def test_qz02_another_declared_quantisation_is_refused(tmp_path, change, message):
    write_small(tmp_path)
    edit_json(tmp_path / "config.json", lambda tree: change(_quantization(tree)))
    assert f"config.json: quantization_config.{message}" in refusal(tmp_path).replace(
        "config_groups.group_0.weights.", ""
    )


def test_qz02_packed_experts_without_a_declared_format_are_refused(tmp_path):
    write_small(tmp_path)
    edit_json(tmp_path / "config.json", lambda tree: tree["text_config"].pop("quantization_config"))
    assert "config.json: quantization_config: missing" in refusal(tmp_path)


def test_qz08_a_global_scale_beside_the_block_scales_is_refused_never_folded_in(tmp_path):
    name = f"{EXPERTS}.0.w1.weight_scale_2"
    write_small(tmp_path, lambda tensors: tensors.update({name: np.full(1, 8.65e-5, np.float32)}))
    assert f"tensor {PREFIX}{name}: unknown" in refusal(tmp_path)


def test_an_index_that_points_out_of_the_directory_is_refused(tmp_path):
    write_small(tmp_path, shards=1)
    edit_json(
        tmp_path / INDEX,
        lambda tree: tree["weight_map"].update({PREFIX + "lm_head.weight": "../other.safetensors"}),
    )
    assert "expected a file name, got '../other.safetensors'" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    write_small(tmp_path, shards=1)
    (tmp_path / INDEX).write_text(content)
    assert INDEX in refusal(tmp_path)


def test_a_header_whose_sizes_contradict_its_shapes_is_refused(tmp_path):
    write_small(tmp_path, index=False)
    retag(tmp_path / "model.safetensors", ["lm_head.weight"], "F32")
    assert f"tensor {PREFIX}lm_head.weight: F32" in refusal(tmp_path)


def test_ck09_a_missing_structural_key_is_refused(tmp_path):
    write_small(tmp_path)
    edit_json(tmp_path / "config.json", lambda tree: tree["text_config"].pop("num_attention_heads"))
    with pytest.raises(ValueError, match=r"missing structural keys.*num_attention_heads"):
        checkpoints.load_params(tmp_path, progress=False)


def test_many_faults_are_counted_and_the_message_stays_short(tmp_path):
    def drop(tensors):
        for name in list(tensors):
            if "model.layers" in name and ".experts." not in name:
                del tensors[name]

    write_small(tmp_path, drop)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load_params(tmp_path, progress=False)
    assert len(caught.value.faults) > 40
    assert len(str(caught.value).splitlines()) == 22
    assert f"and {len(caught.value.faults) - 20} more" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"null", b"5", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"x": 1}}',
     b'{"weight_map": {"x": ".."}}', b'{"weight_map": {"x": ""}}', b"\xef\xbb\xbf{}", b"\xff\xfe", b""],
)  # fmt: skip
def test_an_index_of_another_structure_is_refused_by_name(tmp_path, content):
    write_small(tmp_path, shards=3)
    (tmp_path / INDEX).write_bytes(content)
    assert INDEX in refusal(tmp_path)


QUANTIZATION = ("text_config", "quantization_config")
GROUP = (*QUANTIZATION, "config_groups", "group_0")


@pytest.mark.parametrize(
    ("keys", "value", "got"),
    [
        (QUANTIZATION, [1], "list [1]"),
        (QUANTIZATION, "mxfp4", "str 'mxfp4'"),
        (GROUP[:-1], [{}], "list [{}]"),
        (GROUP, 4, "int 4"),
        ((*GROUP, "weights"), "4 bits", "str '4 bits'"),
        ((*GROUP, "weights"), [4], "list [4]"),
    ],
)
def test_a_quantization_block_of_another_structure_is_refused_by_its_key(tmp_path, keys, value, got):
    def change(tree):
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    write_small(tmp_path)
    edit_json(tmp_path / "config.json", change)
    refused = refusal(tmp_path)
    assert f"config.json: {'.'.join(keys[1:])}: expected an object, got {got}" in refused
    assert len(refused.splitlines()) == 1


@pytest.mark.parametrize("content", [b"[]", b"5", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"text_config": [1]}'])
def test_a_broken_config_beside_a_given_one_is_refused_by_name(tmp_path, content):
    config, _ = write_small(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoints.preflight(tmp_path, config)
