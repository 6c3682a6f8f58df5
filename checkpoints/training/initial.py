"""Initial parameters for training: float32, every expert a float array."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.checkpoints import names
from k3jax.config import K3Config
from k3jax.model import abstract_params

EMBEDDING_STD = 0.3
SLOWEST, FASTEST = 2e-3, 1.0
"""Range of -g, the log decay per token, that the KDA channels start with."""


def initial_params(config: K3Config, seed: int) -> Any:
    """The parameter tree of ``config`` in float32.

    Linear weights are normal with variance 1 / fan-in, halved in standard deviation where they
    write to the residual sums; AttnRes queries start at 0 (an even mixture); decay rates start
    spread evenly on a logarithmic scale, from a memory of one token to 500.
    """
    root = jax.random.key(seed)

    def make(path: names.Path_, leaf: Any) -> jax.Array:
        shape = tuple(leaf.shape)
        key = jax.random.fold_in(root, zlib.crc32(names.dotted(path).encode()))
        return _draw(key, str(path[-1]), shape, config)

    return names.map_leaves(make, abstract_params(config))


def _draw(key: jax.Array, name: str, shape: tuple[int, ...], config: K3Config) -> jax.Array:
    if name.endswith("norm"):
        return jnp.ones(shape, jnp.float32)
    if name in ("A_log", "e_score_correction_bias") or name.endswith("_res_proj"):
        return jnp.zeros(shape, jnp.float32)
    if name == "dt_bias":
        # g = bound * sigmoid(dt_bias) while A_log and the decay logits are 0.
        low, high = jnp.log(SLOWEST), jnp.log(FASTEST)
        part = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high)) / -config.kda_gate_lower_bound
        return jnp.log(part) - jnp.log1p(-part)
    values = jax.random.normal(key, shape, jnp.float32)
    if name == "embed_tokens":
        return values * EMBEDDING_STD
    if name.endswith("conv1d"):
        return values * 0.5
    writes = name in ("o_proj", "down_proj", "w2", "routed_expert_up_proj", "lm_head")
    return values * (shape[-1] ** -0.5 * (0.5 if writes else 1.0))
