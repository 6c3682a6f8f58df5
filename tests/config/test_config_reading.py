"""Reading and writing config.json: nothing structural is guessed, nothing unknown goes unseen."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from k3jax import K3Config, _hf_config
from support.random_k3 import random_config


def release_tree() -> dict[str, Any]:
    return K3Config.preset("k3").to_hf_dict()


STRUCTURAL = sorted(
    set(release_tree()["text_config"])
    - {
        # Bookkeeping and ids, which the text model's function does not depend on.
        *("architectures", "model_type", "dtype", "use_grouped_topk", "quantization_config"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "num_nextn_predict_layers"),
        "linear_attn_config",
    }
)
LINEAR = sorted(release_tree()["text_config"]["linear_attn_config"])


@pytest.mark.parametrize("key", STRUCTURAL)
def test_a_missing_structural_key_is_named_and_has_no_default(key: str) -> None:
    """CK-09"""
    tree = release_tree()
    del tree["text_config"][key]
    with pytest.raises(ValueError, match=rf"missing structural keys.*\b{key}\b"):
        K3Config.from_hf_dict(tree)


@pytest.mark.parametrize("key", LINEAR)
def test_a_missing_key_of_linear_attn_config_is_named(key: str) -> None:
    """NUM-03: a missing gate_lower_bound is no "unbounded" by default."""
    tree = release_tree()
    del tree["text_config"]["linear_attn_config"][key]
    with pytest.raises(ValueError, match=rf"linear_attn_config\.{key}\b"):
        K3Config.from_hf_dict(tree)


def test_all_missing_keys_are_named_at_once() -> None:
    tree = release_tree()
    for key in ("hidden_size", "kv_lora_rank"):
        del tree["text_config"][key]
    del tree["text_config"]["linear_attn_config"]
    with pytest.raises(ValueError, match=r"hidden_size.*kv_lora_rank.*linear_attn_config\.num_heads"):
        K3Config.from_hf_dict(tree)


def test_the_structural_keys_are_those_of_the_release() -> None:
    # Guards the two lists above against being emptied by a change of the writer.
    assert len(STRUCTURAL) == 34
    assert len(LINEAR) == 7


def test_unknown_keys_are_listed_wherever_they_stand() -> None:
    tree = release_tree()
    tree["surprise_top"] = 1
    tree["hidden_size"] = 1  # a structural key has no meaning at the top level
    tree["text_config"]["surprise_text"] = 2
    tree["text_config"]["linear_attn_config"]["surprise_linear"] = 3
    config = K3Config.from_hf_dict(tree)
    assert config.ignored_keys == (
        "hidden_size",
        "linear_attn_config.surprise_linear",
        "surprise_text",
        "surprise_top",
    )
    assert config == K3Config.preset("k3")
    assert hash(config) == hash(K3Config.preset("k3"))


def test_the_release_has_no_unknown_key() -> None:
    assert K3Config.from_hf_dict(release_tree()).ignored_keys == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("moe_router_activation_func", "softmax"),
        ("topk_method", "greedy"),
        ("latent_moe_use_norm", False),
        ("num_expert_group", 8),
        ("topk_group", 4),
        ("moe_layer_freq", 2),
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("tie_word_embeddings", True),
        ("num_nextn_predict_layers", 1),
    ],
)
def test_an_option_that_is_not_implemented_is_refused(key: str, value: Any) -> None:
    """RT-13: no router option is accepted and ignored."""
    tree = release_tree()
    tree["text_config"][key] = value
    with pytest.raises(ValueError, match=rf"{key}: only .* is implemented, got"):
        K3Config.from_hf_dict(tree)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("short_conv_kernel_size", 5, "short_conv_kernel_size"),  # KDA-03
        ("use_full_rank_gate", False, "kda_use_full_rank_gate"),
        ("gate_lower_bound", None, "kda_gate_lower_bound"),  # NUM-03
        ("gate_lower_bound", 0.0, "kda_gate_lower_bound"),
        ("gate_lower_bound", 5.0, "kda_gate_lower_bound"),
        ("gate_lower_bound", -90.0, "kda_gate_lower_bound"),
    ],
)
def test_a_kda_option_that_is_not_implemented_is_refused(key: str, value: Any, named: str) -> None:
    tree = release_tree()
    tree["text_config"]["linear_attn_config"][key] = value
    # Where runtime type checks are installed they refuse None before the class does.
    with pytest.raises((ValueError, TypeError), match=named):
        K3Config.from_hf_dict(tree)


@pytest.mark.parametrize("key", ["num_experts_per_token", "num_experts_per_tok"])
def test_both_spellings_of_the_number_of_chosen_experts_are_read(key: str) -> None:
    """CK-09"""
    tree = release_tree()
    del tree["text_config"]["num_experts_per_token"]
    tree["text_config"][key] = 8
    config = K3Config.from_hf_dict(tree)
    assert config.num_experts_per_token == 8
    assert config.ignored_keys == ()


def test_two_spellings_that_disagree_are_refused() -> None:
    tree = release_tree()
    tree["text_config"]["num_experts_per_tok"] = 8
    with pytest.raises(ValueError, match=r"disagree: \[16, 8\]"):
        K3Config.from_hf_dict(tree)


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [
        (163586, 2, 163586),
        (163586, None, 163586),
        (163840, 2, 2),  # outside the vocabulary of 163840
        (-1, 2, 2),
        (None, 2, 2),
        (163840, 163840, None),
        (None, None, None),
        (163840, None, None),
        ([163586, 5], 2, (163586, 5)),
        ([163840, 5], 2, 5),
        ([163840], [7, 8], (7, 8)),
    ],
)
def test_eos_is_the_top_level_id_if_in_the_vocabulary_else_the_text_configs_else_none(
    top: int | list[int] | None, text: int | list[int] | None, expected: int | tuple[int, ...] | None
) -> None:
    tree = release_tree()
    for part, value in ((tree, top), (tree["text_config"], text)):
        part.pop("eos_token_id")
        if value is not None:
            part["eos_token_id"] = value
    config = K3Config.from_hf_dict(tree)
    assert config.eos_token_id == expected
    listed = expected if isinstance(expected, tuple) else () if expected is None else (expected,)
    assert config.stop_token_ids == listed
    assert K3Config.from_hf_dict(config.to_hf_dict()) == config


@pytest.mark.parametrize("value", ["5", 5.0, True, [5, "6"]])
def test_an_eos_that_is_no_token_id_is_refused(value: Any) -> None:
    tree = release_tree()
    tree["eos_token_id"] = value
    with pytest.raises(ValueError, match="eos_token_id: expected a token id"):
        K3Config.from_hf_dict(tree)


def test_a_stop_token_outside_the_vocabulary_stops_nothing_and_a_negative_one_is_refused() -> None:
    config = dataclasses.replace(K3Config.preset("k3-slice"), vocab_size=300)
    assert config.stop_token_ids == ()
    assert dataclasses.replace(config, eos_token_id=(7, 300)).stop_token_ids == (7,)
    with pytest.raises(ValueError, match="bos_token_id: expected a token id"):
        dataclasses.replace(config, bos_token_id=-5)


@pytest.mark.parametrize("tree", [[], None, 5, "text"])
def test_a_config_that_is_no_object_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match="expected a JSON object"):
        _hf_config.read(tree, where="config.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("vocab_size",), "32"),
        (("num_hidden_layers",), None),
        (("linear_attn_config", "num_heads"), "96"),
        (("linear_attn_config", "kda_layers"), None),
        (("linear_attn_config", "full_attn_layers"), ["1"]),
        (("model_type",), "llama"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_key(path: tuple[str, ...], value: Any) -> None:
    tree = release_tree()
    part = tree["text_config"]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ValueError, match=path[-1]):
        K3Config.from_hf_dict(tree)


def test_a_top_level_that_ties_the_embeddings_contradicts_the_text_config() -> None:
    tree = release_tree()
    tree["tie_word_embeddings"] = True
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        K3Config.from_hf_dict(tree)


def test_a_position_scaling_is_listed_as_ignored() -> None:
    tree = release_tree()
    tree["text_config"]["rope_scaling"] = {"factor": 4.0}
    assert "rope_scaling" in K3Config.from_hf_dict(tree).ignored_keys


@pytest.mark.parametrize("seed", range(20))
def test_a_config_survives_being_written_and_read(seed: int, tmp_path: Any) -> None:
    config = random_config(seed)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_dict()))
    for path in (tmp_path, str(tmp_path / "config.json")):
        read = K3Config.from_pretrained(path)
        assert read == config
        assert read.ignored_keys == ()


def test_the_text_config_alone_is_read_too() -> None:
    assert K3Config.from_hf_dict(release_tree()["text_config"]) == K3Config.preset("k3")


def test_contradicting_layer_lists_are_refused() -> None:
    for kda, mla in (([1, 2], [2, 3, 4]), ([1, 2], [4]), ([1, 2, 5], [3, 4]), ([0, 1, 2], [3])):
        tree = K3Config.preset("k3-slice", num_layers=4).to_hf_dict()
        tree["text_config"]["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": mla}
        with pytest.raises(ValueError, match=r"every layer 1\.\.4 exactly once"):
            K3Config.from_hf_dict(tree)


def test_key_and_value_head_counts_of_mla_must_agree() -> None:
    tree = release_tree()
    tree["text_config"]["num_key_value_heads"] = 8
    with pytest.raises(ValueError, match="num_key_value_heads: expected num_attention_heads=96, got 8"):
        K3Config.from_hf_dict(tree)


def test_a_missing_or_broken_file_is_named(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        K3Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        K3Config.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: expected a positive integer"),
        ({"vocab_size": True}, "vocab_size: expected a positive integer"),
        ({"num_experts_per_token": 897}, "num_experts_per_token: expected at most num_experts=896"),
        ({"kda_a_log_size": 95}, "kda_a_log_size: expected at least kda_num_heads=96"),
        ({"first_k_dense_replace": 94}, r"first_k_dense_replace: expected 0\.\.93"),
        ({"num_hidden_layers": 92}, "layer_types: expected num_hidden_layers=92 entries, got 93"),
        ({"layer_types": ("kda",) * 92 + ("gqa",)}, "layer_types: expected 'kda' or 'mla'"),
        ({"moe_intermediate_size": 3073}, "moe_intermediate_size: expected a multiple of 32"),
        ({"routed_expert_hidden_size": 16}, "routed_expert_hidden_size: expected a multiple of 32"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: expected a positive finite number"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: expected a positive finite"),
        ({"activation_situ_beta": -4.0}, "activation_situ_beta: expected a positive finite number"),
    ],
)
def test_a_field_out_of_range_is_named_with_what_came(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(K3Config.preset("k3"), **changes)


@pytest.mark.parametrize("value", [None, "false", 1])
def test_moe_renormalize_must_be_a_truth_value_in_the_file(value: Any) -> None:
    tree = release_tree()
    tree["text_config"]["moe_renormalize"] = value
    # Where runtime type checks are installed they refuse it before the class does.
    with pytest.raises((ValueError, TypeError), match="moe_renormalize"):
        K3Config.from_hf_dict(tree)


def test_a_config_is_frozen_and_hashable() -> None:
    config = random_config(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    again = copy.deepcopy(config)
    assert again == config
    assert hash(again) == hash(config)
    assert hash(dataclasses.replace(config, vocab_size=config.vocab_size + 1)) != hash(config)


def test_presets_refuse_what_they_do_not_have() -> None:
    with pytest.raises(ValueError, match="expected 'k3' or 'k3-slice', got 'k4'"):
        K3Config.preset("k4")
    with pytest.raises(ValueError, match="takes no num_layers"):
        K3Config.preset("k3", num_layers=3)
    for layers in (0, 94):
        with pytest.raises(ValueError, match=rf"num_layers: expected 1\.\.93, got {layers}"):
            K3Config.preset("k3-slice", num_layers=layers)
    for experts in (15, 897):
        with pytest.raises(ValueError, match=rf"num_experts: expected 16\.\.896, got {experts}"):
            K3Config.preset("k3-slice", num_experts=experts)


def test_a_slice_is_the_first_layers_of_the_release_at_full_width() -> None:
    whole = K3Config.preset("k3")
    part = K3Config.preset("k3-slice", num_layers=13, num_experts=64)
    assert part.layer_types == whole.layer_types[:13]
    changed = {f.name for f in dataclasses.fields(part) if getattr(part, f.name) != getattr(whole, f.name)}
    assert changed == {"num_hidden_layers", "layer_types", "num_experts"}
    assert [part.is_moe(i) for i in range(3)] == [False, True, True]
    assert [i for i in range(13) if part.starts_block(i)] == [0, 12]


def test_the_release_has_its_layer_pattern_and_context_length() -> None:
    """LC-06"""
    config = K3Config.preset("k3")
    mla = [i for i, kind in enumerate(config.layer_types) if kind == "mla"]
    assert mla == [*range(3, 92, 4), 92]
    assert (config.num_kda_layers, config.num_mla_layers, config.num_moe_layers) == (69, 24, 92)
    assert [i for i in range(93) if config.starts_block(i)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert config.max_position_embeddings == 1_048_576
    assert config.qk_head_dim == 192
    assert config.eos_token_id == 163586
