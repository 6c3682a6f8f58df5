"""Reading and writing the release's ``config.json`` as fields of K3Config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import K3Config

# Structural keys of text_config that become the field of the same name.
_SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "first_k_dense_replace",
    "attn_res_block_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "num_experts", "num_shared_experts", "moe_intermediate_size",
    "routed_expert_hidden_size", "moe_renormalize", "routed_scaling_factor", "activation_situ_beta",
    "activation_situ_linear_beta", "rms_norm_eps", "max_position_embeddings", "hidden_act",
    "moe_router_activation_func", "topk_method", "latent_moe_use_norm", "mla_use_nope",
    "mla_use_output_gate", "tie_word_embeddings", "moe_layer_freq", "num_expert_group", "topk_group",
)  # fmt: skip
_MODEL_TYPES = ("kimi_k3", "kimi_linear")
# Both spellings are in use for the number of chosen experts.
_TOP_K_KEYS = ("num_experts_per_token", "num_experts_per_tok")
_LINEAR = {
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "gate_lower_bound": "kda_gate_lower_bound",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "use_full_rank_gate": "kda_use_full_rank_gate",
}
# Optional: absent in the release, where values are as wide as keys / A_log is padded.
_LINEAR_OPTIONAL = {"v_head_dim": "kda_v_head_dim", "a_log_size": "kda_a_log_size"}
_OPTIONAL = ("num_nextn_predict_layers", "initializer_range")

# Known keys without influence on the text model's function: Hugging Face bookkeeping,
# generation defaults, the vision part.
_INERT = frozenset((
    "_name_or_path", "activation_fn", "add_cross_attention", "architectures", "attn_implementation",
    "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "head_dim", "id2label", "ignore_index",
    "image_placeholder", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length",
    "media_placeholder_token_id", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "problem_type", "pruned_heads", "quantization_config",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "rope_theta",
    "rope_scaling", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "text_config",
    "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
    "use_grouped_topk", "vision_config",
))  # fmt: skip


def _pow2_at_least(n: int) -> int:
    return 1 << (n - 1).bit_length()


def read(tree: Any, *, where: str) -> dict[str, Any]:
    """Fields of K3Config from a parsed config.json."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(tree).__name__}")
    text = tree.get("text_config", tree)
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: text_config: expected an object, got {type(text).__name__}")
    linear = text.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ValueError(f"{where}: linear_attn_config: expected an object, got {type(linear).__name__}")

    missing = [k for k in (*_SAME, "num_key_value_heads") if k not in text]
    if not any(k in text for k in _TOP_K_KEYS):
        missing.append(_TOP_K_KEYS[0])
    missing += [
        f"linear_attn_config.{k}" for k in (*_LINEAR, "kda_layers", "full_attn_layers") if k not in linear
    ]
    if missing:
        raise ValueError(f"{where}: missing structural keys, none has a default: {', '.join(missing)}")
    for key in ("vocab_size", "num_hidden_layers"):
        _positive_integer(text[key], f"{where}: {key}")
    _positive_integer(linear["num_heads"], f"{where}: linear_attn_config.num_heads")
    _refuse_contradictions(tree, text, where)

    fields: dict[str, Any] = {k: text[k] for k in _SAME}
    fields |= {k: text[k] for k in _OPTIONAL if text.get(k) is not None}
    fields["num_experts_per_token"] = next(text[k] for k in _TOP_K_KEYS if k in text)
    fields |= {field: linear[key] for key, field in _LINEAR.items()}
    fields["kda_v_head_dim"] = linear.get("v_head_dim", linear["head_dim"])
    fields["kda_a_log_size"] = linear.get("a_log_size", _pow2_at_least(linear["num_heads"]))
    fields["layer_types"] = _layer_types(text["num_hidden_layers"], linear, where)
    for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
        fields[name] = _token_id(tree, text, name, where)

    known = (
        _INERT
        | set(_SAME)
        | set(_TOP_K_KEYS)
        | set(_OPTIONAL)
        | {"linear_attn_config", "num_key_value_heads"}
    )
    ignored = [k for k in text if k not in known]
    if text is not tree:
        # A structural key has no meaning outside the text config.
        ignored += [k for k in tree if k not in _INERT]
    known_linear = {*_LINEAR, *_LINEAR_OPTIONAL, "kda_layers", "full_attn_layers"}
    ignored += [f"linear_attn_config.{k}" for k in linear if k not in known_linear]
    # Inert while empty: this model has no position encoding to scale.
    ignored += [k for k in ("rope_scaling",) if text.get(k) is not None]
    fields["ignored_keys"] = tuple(sorted(set(ignored)))
    return fields


def _positive_integer(value: Any, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what}: expected a positive integer, got {value!r}")


def _refuse_contradictions(tree: Mapping[str, Any], text: Mapping[str, Any], where: str) -> None:
    for part in (tree, text):
        kind = part.get("model_type")
        if kind is not None and kind not in _MODEL_TYPES:
            raise ValueError(f"{where}: model_type: expected one of {', '.join(_MODEL_TYPES)}, got {kind!r}")
    if tree.get("tie_word_embeddings") and not text["tie_word_embeddings"]:
        raise ValueError(
            f"{where}: tie_word_embeddings: {tree['tie_word_embeddings']!r} at the top level and "
            f"{text['tie_word_embeddings']!r} in text_config"
        )
    if text["num_key_value_heads"] != text["num_attention_heads"]:
        raise ValueError(
            f"{where}: num_key_value_heads: expected num_attention_heads="
            f"{text['num_attention_heads']}, got {text['num_key_value_heads']}"
        )
    both = [text[k] for k in _TOP_K_KEYS if k in text]
    if len(set(both)) > 1:
        raise ValueError(f"{where}: {' and '.join(_TOP_K_KEYS)} disagree: {both}")


def _layer_types(depth: int, linear: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The two 1-based lists of layers, as one 0-based tuple of kinds."""
    kda, mla = linear["kda_layers"], linear["full_attn_layers"]
    for name, layers in (("kda_layers", kda), ("full_attn_layers", mla)):
        if not isinstance(layers, (list, tuple)) or any(type(i) is not int for i in layers):
            raise ValueError(
                f"{where}: linear_attn_config.{name}: expected a list of integers, got {layers!r}"
            )
    kda, mla = list(kda), list(mla)
    if sorted(kda + mla) != list(range(1, depth + 1)):
        raise ValueError(
            f"{where}: linear_attn_config.kda_layers and full_attn_layers: expected every layer "
            f"1..{depth} exactly once in one of them, got kda_layers={kda}, full_attn_layers={mla}"
        )
    return tuple("kda" if layer in set(kda) else "mla" for layer in range(1, depth + 1))


def _token_id(
    tree: Mapping[str, Any], text: Mapping[str, Any], name: str, where: str
) -> int | tuple[int, ...] | None:
    """The top level's ids that are inside the vocabulary, else the text config's, else None."""
    for source in (tree, text):
        value = source.get(name)
        ids: list[Any] = [] if value is None else [value]
        if isinstance(value, (list, tuple)) and name == "eos_token_id":
            ids = list(value)
        if wrong := [i for i in ids if type(i) is not int]:
            more = " or a list of them" if name == "eos_token_id" else ""
            raise ValueError(f"{where}: {name}: expected a token id{more}, got {wrong[0]!r}")
        inside = [i for i in ids if 0 <= i < text["vocab_size"]]
        if inside:
            return tuple(inside) if len(inside) > 1 else inside[0]
    return None


def write(c: K3Config) -> dict[str, Any]:
    """The nested config.json tree of ``c``, with the release's quantisation block."""
    linear: dict[str, Any] = {key: getattr(c, field) for key, field in _LINEAR.items()}
    linear["kda_layers"] = [i + 1 for i, t in enumerate(c.layer_types) if t == "kda"]
    linear["full_attn_layers"] = [i + 1 for i, t in enumerate(c.layer_types) if t == "mla"]
    if c.kda_v_head_dim != c.kda_head_dim:
        linear["v_head_dim"] = c.kda_v_head_dim
    if c.kda_a_log_size != _pow2_at_least(c.kda_num_heads):
        linear["a_log_size"] = c.kda_a_log_size
    ids = {k: getattr(c, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if isinstance(c.eos_token_id, tuple):
        ids["eos_token_id"] = list(c.eos_token_id)
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        **{k: getattr(c, k) for k in (*_SAME, *_OPTIONAL)},
        "num_key_value_heads": c.num_attention_heads,
        "num_experts_per_token": c.num_experts_per_token,
        "use_grouped_topk": True,
        "linear_attn_config": linear,
        "quantization_config": QUANTIZATION,
        **ids,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
    }


QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}

RELEASE: dict[str, Any] = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    # MLA at 0-based layers 3, 7, ..., 91 and at the last one, 92.
    "layer_types": tuple("mla" if i % 4 == 3 or i == 92 else "kda" for i in range(93)),
    "intermediate_size": 33792,
    "first_k_dense_replace": 1,
    "attn_res_block_size": 12,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kda_num_heads": 96,
    "kda_head_dim": 128,
    "kda_v_head_dim": 128,
    "kda_gate_lower_bound": -5.0,
    "kda_a_log_size": 128,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
}
