"""The random K3s of the tests are valid, well conditioned and written in the released format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from k3jax.config import K3Config
from support import oracle
from support.compare import relative_rms
from support.random_k3 import BF16, params_from_tensors, random_config, random_tensors, write_checkpoint
from support.reference import forward, load_tensors
from support.reference_weights import Arch, decode_mxfp4, weight_tree

SEEDS = range(40)


def test_configurations_cover_what_they_claim() -> None:
    configs = [random_config(seed) for seed in SEEDS]
    assert {c.num_hidden_layers for c in configs} == set(range(1, 8))
    assert all(c.kda_head_dim != c.kda_v_head_dim for c in configs)
    assert {c.first_k_dense_replace for c in configs} == {0, 1, 2}
    assert {c.num_experts_per_token for c in configs} == {1, 2, 3, 4}
    assert {c.kda_num_heads for c in configs} == {1, 2, 3, 4}
    assert {c.moe_renormalize for c in configs} == {True, False}
    assert any(c.num_hidden_layers % c.attn_res_block_size for c in configs)
    assert any(c.layer_types[-2:] == ("mla", "mla") for c in configs)
    assert any(c.kda_a_log_size > c.kda_num_heads for c in configs)


def test_a_field_set_by_hand_is_kept_and_its_dependants_follow() -> None:
    c = random_config(3, layer_types=("kda", "mla", "kda"), num_experts=5, kda_num_heads=4)
    assert c.layer_types == ("kda", "mla", "kda")
    assert c.num_hidden_layers == 3
    assert c.num_experts == 5
    assert c.kda_a_log_size >= 4


def test_the_same_seed_gives_the_same_tensors_and_another_does_not() -> None:
    c = random_config(1)
    a, b, other = random_tensors(c, 5), random_tensors(c, 5), random_tensors(c, 6)
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert not np.array_equal(a["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors_add_up_to_the_configuration(seed: int) -> None:
    c = random_config(seed)
    tensors = random_tensors(c, seed)
    packed = {k: v for k, v in tensors.items() if k.endswith("weight_packed")}
    scales = {k: v for k, v in tensors.items() if k.endswith("weight_scale")}
    others = [v for k, v in tensors.items() if k not in packed and k not in scales]
    assert len(packed) == len(scales) == 3 * c.num_experts * c.num_moe_layers
    assert sum(v.size for v in others) + sum(2 * v.size for v in packed.values()) == c.param_count()
    assert sum(v.nbytes for v in tensors.values()) == c.checkpoint_bytes()


def test_tensor_names_and_dtypes_are_those_of_the_oracle_checkpoint() -> None:
    made = random_tensors(oracle.config(), 0)
    want = oracle.tensors()
    assert {k: (v.shape, v.dtype) for k, v in made.items()} == {
        k: (v.shape, v.dtype) for k, v in want.items()
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_activations_gates_and_routing_are_well_spread(seed: int) -> None:
    c = random_config(seed)
    arch = Arch.of(c)
    rng = np.random.default_rng(seed)
    run = forward(weight_tree(random_tensors(c, seed), arch), arch, rng.integers(0, c.vocab_size, (2, 24)))
    for name, value in run.taps.items():
        assert np.isfinite(value).all(), name
        if name.endswith(("attn_out", "mlp_out")):
            assert 0.05 < np.sqrt((value * value).mean()) < 20, name
    for i, kind in enumerate(c.layer_types):
        if kind == "kda":
            g = run.taps[f"L{i}/g"] / c.kda_gate_lower_bound
            assert g.min() < 0.05
            assert g.max() > 0.8
        if c.is_moe(i):
            # More experts than one row can name: the choice depends on the token.
            assert len(np.unique(run.taps[f"L{i}/topk_ids"])) > c.num_experts_per_token


@pytest.mark.parametrize(
    ("shards", "prefix", "index"), [(1, "", False), (1, "language_model.", True), (3, "", True)]
)
def test_a_checkpoint_reads_back_bit_for_bit(tmp_path: Path, shards: int, prefix: str, index: bool) -> None:
    c = random_config(7)
    tensors = random_tensors(c, 7)
    vision = {"vision_tower.encoder.final_layernorm.weight": np.ones(8, BF16)}
    folder = write_checkpoint(tmp_path / "k3", c, tensors, shards, prefix, index, vision)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == shards
    stored = {k: v for file in files for k, v in load_file(file).items()}
    assert stored.keys() == {prefix + k for k in tensors} | vision.keys()
    assert all(np.array_equal(stored[prefix + k], v) for k, v in tensors.items())
    assert K3Config.from_pretrained(folder) == c
    index_file = folder / "model.safetensors.index.json"
    assert index_file.is_file() == index
    if index:
        tree = json.loads(index_file.read_text(encoding="utf-8"))
        assert tree["weight_map"].keys() == stored.keys()
        assert all((folder / file).is_file() for file in tree["weight_map"].values())
        assert tree["metadata"]["total_size"] == sum(v.nbytes for v in stored.values())


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    c = random_config(7, num_hidden_layers=1)
    with pytest.raises(ValueError, match="shards=2"):
        write_checkpoint(tmp_path, c, {}, shards=2, index=False)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_parameter_trees_hold_the_stored_values(dtype: str | None) -> None:
    c = random_config(11, num_hidden_layers=3, layer_types=("kda", "mla", "kda"), first_k_dense_replace=1)
    tensors = random_tensors(c, 11)
    params = params_from_tensors(c, {f"language_model.{k}": v for k, v in tensors.items()}, dtype)
    kda = params["layers"][0]["self_attn"]
    assert kda["A_log"].shape == (c.kda_num_heads,)
    assert kda["A_log"].dtype == np.float32
    assert kda["q_proj"].dtype == (np.float32 if dtype else BF16)
    assert np.array_equal(
        np.asarray(kda["q_proj"], np.float32),
        tensors["model.layers.0.self_attn.q_proj.weight"].astype(np.float32),
    )
    moe = params["layers"][2]["block_sparse_moe"]
    assert moe["e_score_correction_bias"].dtype == np.float32
    at = "model.layers.2.block_sparse_moe.experts.4.w2"
    want = decode_mxfp4(tensors[f"{at}.weight_packed"], tensors[f"{at}.weight_scale"])
    assert relative_rms(moe["experts"]["w2"].decode(np.float32)[4], want) == 0.0


def test_a_written_file_feeds_the_reference(tmp_path: Path) -> None:
    c = random_config(2)
    tensors = random_tensors(c, 2)
    folder = write_checkpoint(tmp_path, c, tensors, index=False)
    arch = Arch.from_json(folder / "config.json")
    assert arch == Arch.of(c)
    a = weight_tree(load_tensors(folder / "model.safetensors"), arch)
    tokens = np.arange(5)[None] % c.vocab_size
    assert np.array_equal(
        forward(a, arch, tokens).logits, forward(weight_tree(tensors, arch), arch, tokens).logits
    )
