"""Release-format tensors as a tree of float64 numpy arrays.

Part of the float64 reference: numpy only, and nothing of the library under test, so that the
reference can judge it. The MXFP4 decode here is the reference's own.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

PREFIX = "language_model."
BF16 = ml_dtypes.bfloat16  # importing it also lets safetensors.numpy read bfloat16
# E2M1: sign in bit 3, magnitude code in bits 0..2.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)


@dataclasses.dataclass(frozen=True)
class Arch:
    """What the reference needs to know of an architecture that tensor shapes do not tell."""

    layer_types: tuple[str, ...]
    dense_layers: int
    block_size: int
    kda_heads: int
    gate_lower_bound: float
    mla_heads: int
    nope: int
    rope: int
    top_k: int
    renormalize: bool
    routed_scale: float
    situ_beta: float
    situ_linear_beta: float
    eps: float
    latent_eps: float = 1e-6

    @classmethod
    def from_json(cls, file: str | os.PathLike[str]) -> Arch:
        """Read a nested config.json, without the library's reader."""
        text: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))["text_config"]
        linear = text["linear_attn_config"]
        kda = set(linear["kda_layers"])
        return cls(
            layer_types=tuple("kda" if i + 1 in kda else "mla" for i in range(text["num_hidden_layers"])),
            dense_layers=text["first_k_dense_replace"],
            block_size=text["attn_res_block_size"],
            kda_heads=linear["num_heads"],
            gate_lower_bound=linear["gate_lower_bound"],
            mla_heads=text["num_attention_heads"],
            nope=text["qk_nope_head_dim"],
            rope=text["qk_rope_head_dim"],
            top_k=text["num_experts_per_token"],
            renormalize=text["moe_renormalize"],
            routed_scale=text["routed_scaling_factor"],
            situ_beta=text["activation_situ_beta"],
            situ_linear_beta=text["activation_situ_linear_beta"],
            eps=text["rms_norm_eps"],
        )

    @classmethod
    def of(cls, config: Any) -> Arch:
        """The same from an object with the fields of K3Config."""
        return cls(
            layer_types=tuple(config.layer_types),
            dense_layers=config.first_k_dense_replace,
            block_size=config.attn_res_block_size,
            kda_heads=config.kda_num_heads,
            gate_lower_bound=config.kda_gate_lower_bound,
            mla_heads=config.num_attention_heads,
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            top_k=config.num_experts_per_token,
            renormalize=config.moe_renormalize,
            routed_scale=config.routed_scaling_factor,
            situ_beta=config.activation_situ_beta,
            situ_linear_beta=config.activation_situ_linear_beta,
            eps=config.rms_norm_eps,
            latent_eps=config.latent_norm_eps,
        )


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 [..., out, in] of codes uint8 [..., out, in/2] and E8M0 scales uint8 [..., out, in/32].

    The low nibble is the even column; a scale byte b means 2^(b-127) for 32 columns.
    """
    if packed.dtype != np.uint8 or scale.dtype != np.uint8:
        raise ValueError(f"decode_mxfp4: expected uint8 and uint8, got {packed.dtype} and {scale.dtype}")
    if (scale == 255).any():
        raise ValueError("decode_mxfp4: scale byte 255 is NaN")
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    blocks = _E2M1[codes].reshape(*scale.shape, 32)
    return (blocks * np.ldexp(1.0, scale.astype(int) - 127)[..., None]).reshape(codes.shape)


def load_tensors(file: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Tensors of one safetensors file, names without the ``language_model.`` prefix."""
    return {k.removeprefix(PREFIX): v for k, v in load_file(os.fspath(file)).items()}


def weight_tree(tensors: Mapping[str, np.ndarray], arch: Arch) -> dict[str, Any]:
    """Nested float64 dicts, leaf names as released without prefix and ``.weight``.

    Experts are stacked and decoded to [E, out, in]. ``A_log`` is cut to the first
    ``kda_heads`` entries: it is per head, and stored with zero padding.
    """
    tree: dict[str, Any] = {"layers": [{} for _ in arch.layer_types]}
    experts: dict[tuple[int, str], dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        parts = name.removeprefix(PREFIX).removeprefix("model.").removesuffix(".weight").split(".")
        if parts[-1] == "weight_scale":
            continue
        if parts[-1] == "e_score_correction_bias":
            del parts[-2]  # stored below the router weight, which is a leaf here
        if parts[-1] == "weight_packed":
            scale = tensors[name.removesuffix("weight_packed") + "weight_scale"]
            layer, index, which = int(parts[1]), int(parts[4]), parts[5]
            experts.setdefault((layer, which), {})[index] = decode_mxfp4(value, scale)
            continue
        node: Any = tree
        for part in parts[:-1]:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[parts[-1]] = value.astype(np.float64)
    for (layer, which), found in experts.items():
        stack = np.stack([found[i] for i in range(len(found))])
        tree["layers"][layer]["block_sparse_moe"].setdefault("experts", {})[which] = stack
    for layer in tree["layers"]:
        if "A_log" in layer["self_attn"]:
            layer["self_attn"]["A_log"] = layer["self_attn"]["A_log"][: arch.kda_heads]
    return tree
