"""The end of a step: float32 logits of the final normed hidden state, and the greedy token.

::

    logits = x W^T             W is lm_head, [W, D] bfloat16; no scale, no cap
    token  = argmax logits     ties go to the lowest id
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import skinny_gemm as gemm
from .._launch import Interpret


def _product(weight: Any) -> gemm.Product:
    return gemm.Product((weight,), gemm.Epilogue.WIDE)


def supports(x: Any, weight: Any) -> tuple[str, ...]:
    """Why the kernel does not take these arrays or shapes; () if it does."""
    return gemm.supports([x], [_product(weight)])


def greedy(logits: jax.Array) -> jax.Array:
    """int32 [rows], the lowest id of the largest logit of each row [rows, W]."""
    return lax.argmax(logits, 1, jnp.int32)


def reference(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same in plain jnp."""
    (logits,) = gemm.reference([x], [_product(weight)])
    return logits, greedy(logits)


def head(
    x: jax.Array, weight: jax.Array, *, interpret: Interpret = False, sms: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(float32 logits [8, W], int32 greedy tokens [8]).

    The argmax is XLA's own reduction over the logits, 0.2 % of the matrix's bytes; unused, it is
    not computed.

    Args:
        x: bfloat16 [8, D], the final normed hidden states.
        weight: bfloat16 [W, D].

    Raises:
        NotImplementedError: :func:`supports` has reasons.
    """
    (logits,) = gemm.skinny_gemm([x], [_product(weight)], interpret=interpret, sms=sms)
    return logits, greedy(logits)


__all__ = ["greedy", "head", "reference", "supports"]
