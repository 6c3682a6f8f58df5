"""SiTU-GLU and the dense feed-forward network."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..config import K3Config
from .linear import Project, linear


def situ(
    gate: Float[Array, "*rows f"], up: Float[Array, "*rows f"], config: K3Config
) -> Float[Array, "*rows f"]:
    """``[b tanh(g/b) sigmoid(g)] * [c tanh(u/c)]`` with b, c = 4, 25; float32 inside, one rounding.

    Args:
        gate, up: [..., F].
    """
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    activated = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g)
    return (activated * (linear_beta * jnp.tanh(u / linear_beta))).astype(gate.dtype)


def dense_ffn(
    p: Mapping[str, jax.Array], x: Float[Array, "*rows d"], config: K3Config, project: Project = linear
) -> Float[Array, "*rows d"]:
    """``down(SiTU(gate x, up x))``; layer 0's FFN and the shared expert are this.

    Args:
        p: gate_proj, up_proj [F, D] and down_proj [D, F].
        x: [..., D].
        project: the last product; a device that holds a part of F sums over the others here.
    """
    hidden = situ(linear(x, p["gate_proj"]), linear(x, p["up_proj"]), config)
    return project(hidden, p["down_proj"])
