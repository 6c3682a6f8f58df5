"""The K3 text model as a Flax NNX module: its parameters' names, shapes, dtypes and axes.

The module is for construction, training and looking at; decoding runs on the plain tree that
:meth:`K3.params` returns, because walking a module tree costs more host time per step than a
step may take. Attribute names are the released tensor names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from .axes import Axes
from .config import K3Config
from .quant import BLOCK, MXFP4


class _Maker:
    """Makes one parameter after another, drawing float values from ``rngs``."""

    def __init__(self, config: K3Config, rngs: nnx.Rngs, dtype: Any):
        self.config, self.rngs = config, rngs
        self.dtype = jnp.bfloat16 if dtype is None else dtype

    def weight(self, *shape: int, axes: tuple[str | None, ...], dtype: Any = None) -> nnx.Param:
        """Normal with the config's initializer_range, a linear or embedding weight."""
        values = jax.random.normal(self.rngs.params(), shape, jnp.float32) * self.config.initializer_range
        return nnx.Param(values.astype(dtype or self.dtype), axes=axes)

    def ones(self, size: int, axis: str | None = None, dtype: Any = None) -> nnx.Param:
        return nnx.Param(jnp.ones((size,), dtype or self.dtype), axes=(axis,))

    def zeros(self, size: int, axis: str | None = None) -> nnx.Param:
        return nnx.Param(jnp.zeros((size,), jnp.float32), axes=(axis,))


class KDA(nnx.Module):
    """Parameters of a KDA layer's attention; used by :mod:`k3jax.layers.kda`."""

    def __init__(self, c: K3Config, make: _Maker):
        d, k, v, n = c.hidden_size, c.kda_key_size, c.kda_value_size, c.kda_num_heads
        out: tuple[str | None, ...] = ("kda_heads", None)
        self.q_proj = make.weight(k, d, axes=out)
        self.k_proj = make.weight(k, d, axes=out)
        self.v_proj = make.weight(v, d, axes=out)
        self.g_proj = make.weight(v, d, axes=out)
        self.o_proj = make.weight(d, v, axes=(None, "kda_heads"))
        self.f_a_proj = make.weight(c.kda_head_dim, d, axes=(None, None))
        self.f_b_proj = make.weight(k, c.kda_head_dim, axes=out)
        self.b_proj = make.weight(n, d, axes=out)
        taps = c.short_conv_kernel_size
        conv: tuple[str | None, ...] = ("kda_heads", None, None)
        self.q_conv1d = make.weight(k, 1, taps, axes=conv, dtype=jnp.float32)
        self.k_conv1d = make.weight(k, 1, taps, axes=conv, dtype=jnp.float32)
        self.v_conv1d = make.weight(v, 1, taps, axes=conv, dtype=jnp.float32)
        self.A_log = make.zeros(n, "kda_heads")
        self.dt_bias = make.zeros(k, "kda_heads")
        self.o_norm = make.ones(c.kda_v_head_dim, dtype=jnp.float32)


class MLA(nnx.Module):
    """Parameters of an MLA layer's attention; used by :mod:`k3jax.layers.mla`."""

    def __init__(self, c: K3Config, make: _Maker):
        d, n, values = c.hidden_size, c.num_attention_heads, c.num_attention_heads * c.v_head_dim
        heads: tuple[str | None, ...] = ("mla_heads", None)
        self.q_a_proj = make.weight(c.q_lora_rank, d, axes=(None, None))
        self.q_a_layernorm = make.ones(c.q_lora_rank)
        self.q_b_proj = make.weight(n * c.qk_head_dim, c.q_lora_rank, axes=heads)
        self.kv_a_proj_with_mqa = make.weight(c.kv_lora_rank + c.qk_rope_head_dim, d, axes=(None, None))
        self.kv_a_layernorm = make.ones(c.kv_lora_rank)
        self.kv_b_proj = make.weight(n * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank, axes=heads)
        self.g_proj = make.weight(values, d, axes=heads)
        self.o_proj = make.weight(d, values, axes=(None, "mla_heads"))


class DenseFFN(nnx.Module):
    """Parameters of a SiTU-GLU feed-forward network; used by :mod:`k3jax.layers.ffn`."""

    def __init__(self, c: K3Config, width: int, make: _Maker):
        self.gate_proj = make.weight(width, c.hidden_size, axes=("width", None))
        self.up_proj = make.weight(width, c.hidden_size, axes=("width", None))
        self.down_proj = make.weight(c.hidden_size, width, axes=(None, "width"))


class PackedWeight(nnx.Module):
    """An expert weight [E, out, in] as MXFP4 bytes, zero (code 0, scale 1) until loaded."""

    def __init__(self, experts: int, out: int, into: int):
        axes = ("expert", None, None)
        self.codes = nnx.Param(jnp.zeros((experts, out, into // 2), jnp.uint8), axes=axes)
        self.scales = nnx.Param(jnp.full((experts, out, into // BLOCK), 127, jnp.uint8), axes=axes)


class Experts(nnx.Module):
    """All routed experts of a layer: w1 (gate), w3 (up), w2 (down), packed or float."""

    def __init__(self, c: K3Config, make: _Maker, packed: bool):
        e, f, latent = c.num_experts, c.moe_intermediate_size, c.routed_expert_hidden_size
        for name, out, into in (("w1", f, latent), ("w3", f, latent), ("w2", latent, f)):
            axes = ("expert", None, None)
            weight = PackedWeight(e, out, into) if packed else make.weight(e, out, into, axes=axes)
            setattr(self, name, weight)


class LatentMoE(nnx.Module):
    """Parameters of a LatentMoE; used by :mod:`k3jax.layers.moe`."""

    def __init__(self, c: K3Config, make: _Maker, packed: bool):
        d, latent = c.hidden_size, c.routed_expert_hidden_size
        self.gate = make.weight(c.num_experts, d, axes=(None, None))
        self.e_score_correction_bias = make.zeros(c.num_experts)
        self.routed_expert_down_proj = make.weight(latent, d, axes=("latent", None))
        self.routed_expert_up_proj = make.weight(d, latent, axes=(None, "latent"))
        self.routed_expert_norm = make.ones(latent)
        self.shared_experts = DenseFFN(c, c.shared_intermediate_size, make)
        self.experts = Experts(c, make, packed)


class Layer(nnx.Module):
    """Parameters of one layer: attention, feed-forward, norms and AttnRes queries."""

    def __init__(self, c: K3Config, index: int, make: _Maker, packed: bool):
        d = c.hidden_size
        self.input_layernorm = make.ones(d)
        self.post_attention_layernorm = make.ones(d)
        self.self_attention_res_norm = make.ones(d)
        self.self_attention_res_proj = make.weight(1, d, axes=(None, None))
        self.mlp_res_norm = make.ones(d)
        self.mlp_res_proj = make.weight(1, d, axes=(None, None))
        self.self_attn = KDA(c, make) if c.layer_types[index] == "kda" else MLA(c, make)
        if c.is_moe(index):
            self.block_sparse_moe = LatentMoE(c, make, packed)
        else:
            self.mlp = DenseFFN(c, c.intermediate_size, make)


class K3(nnx.Module):
    """The K3 text model.

    Args:
        config: the architecture.
        rngs: draws the initial weights (normal, ``initializer_range``; norms 1, biases 0).
        dtype: of the bfloat16 tensors of the release; None is bfloat16. Tensors the release has in
            float32 are float32 always.
        packed_experts: experts as zero MXFP4 bytes (to be loaded) instead of float arrays (to be
            trained: gradients flow through them).
    """

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs, dtype: Any = None, packed_experts: bool = False):
        make = _Maker(config, rngs, dtype)
        d, w = config.hidden_size, config.vocab_size
        self.config = config
        self.embed_tokens = make.weight(w, d, axes=("vocab", None))
        self.layers = nnx.List(
            [Layer(config, i, make, packed_experts) for i in range(config.num_hidden_layers)]
        )
        self.output_attn_res_norm = make.ones(d)
        self.output_attn_res_proj = make.weight(1, d, axes=(None, None))
        self.norm = make.ones(d)
        self.lm_head = make.weight(w, d, axes=("vocab", None))

    def __call__(self, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens w"]:
        """Logits of whole sequences in a single pass, differentiable.

        Args:
            tokens: integer [B, T], 0..vocab_size-1.
        """
        from .model import prefill

        length = tokens.shape[1]
        logits, _ = prefill(
            self.params(), tokens, config=self.config, max_length=max(1, length), chunk_size=None
        )
        assert logits is not None  # logits="all"
        return logits

    def params(self) -> dict[str, Any]:
        """The parameters as a pure tree, see :func:`k3jax.prefill`."""
        return _tree(nnx.to_pure_dict(nnx.state(self, nnx.Param)))

    def update(self, params: Mapping[str, Any]) -> None:
        """Replace the parameters by those of a pure tree (an MXFP4 or float expert leaf each)."""
        for path, param in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            leaf: Any = params
            for key in path:
                if key in ("codes", "scales") and not isinstance(leaf, MXFP4):
                    raise TypeError(
                        f"params: expected MXFP4 at {'.'.join(map(str, path[:-1]))} (packed_experts=True), "
                        f"got {type(leaf).__name__}"
                    )
                leaf = getattr(leaf, str(key)) if isinstance(leaf, MXFP4) else leaf[key]
            param.set_value(leaf)


def _tree(node: Any) -> Any:
    """Flax's pure dict as our tree: lists for numbered dicts, MXFP4 for codes and scales."""
    if not isinstance(node, Mapping):
        return node
    if set(node) == {"codes", "scales"}:
        return MXFP4(node["codes"], node["scales"])
    if node and all(isinstance(key, int) for key in node):
        return [_tree(node[i]) for i in range(len(node))]
    return {key: _tree(value) for key, value in node.items()}


@functools.lru_cache(maxsize=16)
def _abstract(config: K3Config) -> nnx.State:
    """The module's parameters as shapes, nothing allocated."""
    module = nnx.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0), packed_experts=True))
    return nnx.state(module, nnx.Param)


def abstract_params(config: K3Config, dtype: str | None = None) -> dict[str, Any]:
    """The parameter tree of ``config`` as ``jax.ShapeDtypeStruct`` leaves, experts packed.

    Args:
        dtype: None for the released dtypes, "float32" for float32 everywhere (packed bytes stay).
    """
    wide = check_dtype(dtype) is not None

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if wide and floating else leaf.dtype)

    return _tree(jax.tree.map(shape, nnx.to_pure_dict(_abstract(config))))


def param_axes(config: K3Config) -> dict[str, Any]:
    """The parameter tree of ``config`` with the logical axis names of each array."""
    state = _abstract(config)
    flat = {path: Axes(tuple(param.get_metadata("axes"))) for path, param in nnx.to_flat_state(state)}
    tree: dict[Any, Any] = {}
    for path, axes in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = axes
    return _tree(tree)


def check_dtype(dtype: str | None) -> str | None:
    """``dtype`` if it is one the library takes: None or "float32"."""
    if dtype is None or dtype == "float32":
        return dtype
    raise ValueError(f"dtype: expected None (released dtypes) or 'float32', got {dtype!r}")


__all__ = ["K3", "abstract_params", "check_dtype", "param_axes"]
