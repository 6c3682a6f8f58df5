"""Small random K3s: configurations, tensors as released, checkpoint files, parameter trees.

None of it goes through the library's loader or initialiser, so tests of those can use it.
Tensor names here carry no ``language_model.`` prefix; ``write_checkpoint`` adds it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.reference_weights import BF16, PREFIX

MXFP4_BLOCK = 32
# Root mean square of the sixteen E2M1 values, for scaling uniformly random codes.
_CODE_RMS = 2.926


def random_config(seed: int, **overrides: Any) -> Any:
    """A small valid K3Config with uneven sizes; ``overrides`` are fields set by hand.

    Key and value head sizes always differ, widths are odd multiples of small numbers, AttnRes
    blocks usually do not divide the depth. A field that depends on an overridden one follows it.
    """
    from k3jax.config import K3Config

    rng = np.random.default_rng([seed, 0xC0])

    def pick(name: str, *choices: Any) -> Any:
        value = choices[int(rng.integers(len(choices)))]  # drawn even when overridden: the rest stays
        return overrides.get(name, value)

    if "layer_types" in overrides:
        overrides.setdefault("num_hidden_layers", len(overrides["layer_types"]))
    depth = pick("num_hidden_layers", *range(1, 8))
    heads = pick("kda_num_heads", 1, 2, 3, 4)
    key = pick("kda_head_dim", 8, 12, 16, 24)
    experts = pick("num_experts", *range(5, 17))
    vocab = pick("vocab_size", *range(40, 301))
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": pick("hidden_size", 32, 40, 48, 64, 96),
        "num_hidden_layers": depth,
        "layer_types": _layer_types(rng, depth),
        "intermediate_size": pick("intermediate_size", 48, 80, 104),
        "first_k_dense_replace": min(pick("first_k_dense_replace", 1, 1, 1, 0, 2), depth),
        "attn_res_block_size": pick("attn_res_block_size", 1, 2, 3, 4, 5),
        "num_attention_heads": pick("num_attention_heads", 1, 2, 3, 4),
        "q_lora_rank": pick("q_lora_rank", 20, 24, 40),
        "kv_lora_rank": pick("kv_lora_rank", 12, 16, 24),
        "qk_nope_head_dim": pick("qk_nope_head_dim", 8, 12, 16),
        "qk_rope_head_dim": pick("qk_rope_head_dim", 4, 6, 8),
        "v_head_dim": pick("v_head_dim", 10, 14, 20),
        "kda_num_heads": heads,
        "kda_head_dim": key,
        "kda_v_head_dim": pick("kda_v_head_dim", *(v for v in (8, 10, 16, 20) if v != key)),
        "kda_gate_lower_bound": pick("kda_gate_lower_bound", -5.0, -5.0, -3.0),
        "kda_a_log_size": pick("kda_a_log_size", heads, heads + 3, 2 * heads),
        "num_experts": experts,
        "num_experts_per_token": min(pick("num_experts_per_token", 1, 2, 3, 4), experts),
        "num_shared_experts": pick("num_shared_experts", 1, 2, 3),
        "moe_intermediate_size": pick("moe_intermediate_size", 32, 64, 96),
        "routed_expert_hidden_size": pick("routed_expert_hidden_size", 32, 64, 96),
        "moe_renormalize": pick("moe_renormalize", True, True, False),
        "routed_scaling_factor": pick("routed_scaling_factor", 1.0, 2.5),
        "activation_situ_beta": pick("activation_situ_beta", 4.0, 3.0),
        "activation_situ_linear_beta": pick("activation_situ_linear_beta", 25.0, 10.0),
        "rms_norm_eps": pick("rms_norm_eps", 1e-5, 1e-5, 1e-4),
        "max_position_embeddings": pick("max_position_embeddings", 512, 1024),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return K3Config(**fields | overrides)


def _layer_types(rng: np.random.Generator, depth: int) -> tuple[str, ...]:
    """Mostly KDA; both kinds from two layers on; half of the deeper ones end in two MLA layers."""
    kinds = ["mla" if rng.random() < 0.3 else "kda" for _ in range(depth)]
    if depth >= 3 and rng.random() < 0.5:
        kinds[-2:] = ["mla", "mla"]
    if depth >= 2 and len(set(kinds)) == 1:
        kinds[int(rng.integers(depth))] = "mla" if kinds[0] == "kda" else "kda"
    return tuple(kinds)


def random_tensors(config: Any, seed: int) -> dict[str, np.ndarray]:
    """Every text tensor of a checkpoint of ``config``: released names, shapes and dtypes.

    Magnitudes keep activations of order one while the gates (decay, beta, output, SiTU) run over
    their whole range and the router spreads its choices; A_log is zero padded to its stored length.
    """
    rng = np.random.default_rng([seed, 0x7E])
    c = config
    out: dict[str, np.ndarray] = {
        "lm_head.weight": _linear(rng, c.vocab_size, c.hidden_size),
        "model.embed_tokens.weight": (0.5 * rng.standard_normal((c.vocab_size, c.hidden_size))).astype(BF16),
        "model.norm.weight": _gamma(rng, c.hidden_size).astype(BF16),
    }
    out |= _attn_res(rng, "model.output_attn_res", c.hidden_size)
    for i, kind in enumerate(c.layer_types):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{name}.weight"] = _gamma(rng, c.hidden_size).astype(BF16)
        out |= _attn_res(rng, f"{at}self_attention_res", c.hidden_size)
        out |= _attn_res(rng, f"{at}mlp_res", c.hidden_size)
        attention = _kda(rng, c) if kind == "kda" else _mla(rng, c)
        out |= {f"{at}self_attn.{name}": value for name, value in attention.items()}
        if c.is_moe(i):
            out |= {f"{at}block_sparse_moe.{name}": value for name, value in _moe(rng, c).items()}
        else:
            out |= {f"{at}mlp.{name}": v for name, v in _mlp(rng, c.hidden_size, c.intermediate_size).items()}
    return out


def _linear(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    return (gain * columns**-0.5 * rng.standard_normal((rows, columns))).astype(BF16)


def _gamma(rng: np.random.Generator, size: int) -> np.ndarray:
    return 1.0 + 0.1 * rng.standard_normal(size)


def _attn_res(rng: np.random.Generator, name: str, hidden: int) -> dict[str, np.ndarray]:
    # A projection of 1.5/sqrt(D) on unit-RMS sources gives scores of order one: the mix is neither
    # uniform nor one-hot. A gamma far from one shows whether the score uses it.
    return {
        f"{name}_norm.weight": (1.0 + 0.5 * rng.standard_normal(hidden)).astype(BF16),
        f"{name}_proj.weight": (1.5 * hidden**-0.5 * rng.standard_normal((1, hidden))).astype(BF16),
    }


def _kda(rng: np.random.Generator, c: Any) -> dict[str, np.ndarray]:
    d, keys, values = c.hidden_size, c.kda_key_size, c.kda_value_size
    a_log = np.zeros(c.kda_a_log_size, np.float32)
    a_log[: c.kda_num_heads] = rng.uniform(-0.7, 1.2, c.kda_num_heads)
    out = {
        "q_proj.weight": _linear(rng, keys, d),
        "k_proj.weight": _linear(rng, keys, d),
        "v_proj.weight": _linear(rng, values, d),
        "g_proj.weight": _linear(rng, values, d, 2.0),
        "o_proj.weight": _linear(rng, d, values, 1.5),
        "f_a_proj.weight": _linear(rng, c.kda_head_dim, d),
        "f_b_proj.weight": _linear(rng, keys, c.kda_head_dim),
        "b_proj.weight": _linear(rng, c.kda_num_heads, d, 2.0),
        "A_log": a_log,
        # From almost no decay to the lower bound.
        "dt_bias": rng.uniform(-5.0, 2.5, keys).astype(np.float32),
        "o_norm.weight": _gamma(rng, c.kda_v_head_dim).astype(np.float32),
    }
    for name, channels in (("q", keys), ("k", keys), ("v", values)):
        out[f"{name}_conv1d.weight"] = (0.5 * rng.standard_normal((channels, 1, 4))).astype(np.float32)
    return out


def _mla(rng: np.random.Generator, c: Any) -> dict[str, np.ndarray]:
    d, n = c.hidden_size, c.num_attention_heads
    return {
        "q_a_proj.weight": _linear(rng, c.q_lora_rank, d),
        "q_a_layernorm.weight": _gamma(rng, c.q_lora_rank).astype(BF16),
        "q_b_proj.weight": _linear(rng, n * c.qk_head_dim, c.q_lora_rank, 2.0),
        "kv_a_proj_with_mqa.weight": _linear(rng, c.kv_lora_rank + c.qk_rope_head_dim, d),
        "kv_a_layernorm.weight": _gamma(rng, c.kv_lora_rank).astype(BF16),
        "kv_b_proj.weight": _linear(rng, n * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "g_proj.weight": _linear(rng, n * c.v_head_dim, d, 2.0),
        "o_proj.weight": _linear(rng, d, n * c.v_head_dim, 1.5),
    }


def _mlp(rng: np.random.Generator, hidden: int, width: int) -> dict[str, np.ndarray]:
    # Gains put gate and up well into the saturation of their tanh.
    return {
        "gate_proj.weight": _linear(rng, width, hidden, 2.0),
        "up_proj.weight": _linear(rng, width, hidden, 6.0),
        "down_proj.weight": _linear(rng, hidden, width, 0.3),
    }


def _moe(rng: np.random.Generator, c: Any) -> dict[str, np.ndarray]:
    d, latent, width = c.hidden_size, c.routed_expert_hidden_size, c.moe_intermediate_size
    out = {
        "gate.weight": _linear(rng, c.num_experts, d, 1.5),
        "gate.e_score_correction_bias": rng.uniform(-0.3, 0.3, c.num_experts).astype(np.float32),
        "routed_expert_down_proj.weight": _linear(rng, latent, d),
        "routed_expert_up_proj.weight": _linear(rng, d, latent),
        "routed_expert_norm.weight": _gamma(rng, latent).astype(BF16),
    }
    shared = _mlp(rng, d, c.shared_intermediate_size)
    out |= {f"shared_experts.{name}": value for name, value in shared.items()}
    for expert in range(c.num_experts):
        for name, rows, columns, gain in (
            ("w1", width, latent, 2.0),
            ("w3", width, latent, 6.0),
            ("w2", latent, width, 0.3),
        ):
            codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
            middle = 127 + round(np.log2(gain * columns**-0.5 / _CODE_RMS))
            scales = rng.integers(middle - 2, middle + 2, (rows, columns // MXFP4_BLOCK)).astype(np.uint8)
            out[f"experts.{expert}.{name}.weight_packed"] = codes
            out[f"experts.{expert}.{name}.weight_scale"] = scales
    return out


def write_checkpoint(
    path: str | os.PathLike[str],
    config: Any,
    tensors: Mapping[str, np.ndarray],
    shards: int = 1,
    prefix: str = PREFIX,
    index: bool = True,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a checkpoint directory in release format and return its path.

    Args:
        shards: number of files; with ``index`` they are named and listed as in the release.
        prefix: put before every name of ``tensors``; "" for none.
        index: False writes one ``model.safetensors`` without an index.
        extra: more tensors under their full names (vision, say), in the last file.
    """
    if not index and shards != 1:
        raise ValueError(f"write_checkpoint: without an index there is one file, got shards={shards}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf_dict(), indent=1), encoding="utf-8")
    named = {prefix + name: np.ascontiguousarray(value) for name, value in tensors.items()}
    names = list(named)
    edges = [round(i * len(names) / shards) for i in range(shards + 1)]
    parts = [{n: named[n] for n in names[a:b]} for a, b in itertools.pairwise(edges)]
    parts[-1] |= dict(extra or {})
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors" if index else "model.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if index:
        total = sum(value.nbytes for part in parts for value in part.values())
        tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(tree, indent=1), encoding="utf-8")
    return folder


def params_from_tensors(config: Any, tensors: Mapping[str, np.ndarray], dtype: str | None = None) -> Any:
    """The library's parameter tree of jax arrays, made without its loader.

    Args:
        tensors: names with or without prefix.
        dtype: None keeps the stored dtypes; "float32" widens every float leaf (MXFP4 stays packed).
    """
    import jax.numpy as jnp

    from k3jax.quant import MXFP4

    if dtype not in (None, "float32"):
        raise ValueError(f"params_from_tensors: dtype: expected None or 'float32', got {dtype!r}")

    def leaf(value: np.ndarray) -> Any:
        return jnp.asarray(value.astype(np.float32) if dtype == "float32" else value)

    tree: dict[str, Any] = {"layers": [{} for _ in config.layer_types]}
    stored = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
    for name, parts in _paths(stored):
        node: Any = tree
        for part in parts[:-1]:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        value = stored[name]
        node[parts[-1]] = leaf(value[: config.kda_num_heads] if parts[-1] == "A_log" else value)
    for i in range(config.num_hidden_layers):
        if not config.is_moe(i):
            continue
        at = f"model.layers.{i}.block_sparse_moe.experts"
        tree["layers"][i]["block_sparse_moe"]["experts"] = {
            w: MXFP4(
                *(
                    jnp.asarray(np.stack([stored[f"{at}.{e}.{w}.{half}"] for e in range(config.num_experts)]))
                    for half in ("weight_packed", "weight_scale")
                )
            )
            for w in ("w1", "w2", "w3")
        }
    return tree


def _paths(names: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """(stored name, path in the tree) of everything but the routed experts."""
    for name in names:
        parts = name.removeprefix("model.").removesuffix(".weight").split(".")
        if "experts" in parts:
            continue
        if parts[-1] == "e_score_correction_bias":
            del parts[-2]  # stored below the router weight, which is a leaf in the tree
        yield name, parts
