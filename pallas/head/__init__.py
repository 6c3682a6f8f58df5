"""The end of a step: float32 logits of the final normed hidden state, and the greedy token.

::

    logits = x W^T             W is lm_head, [W, D] bfloat16; no scale, no cap
    token  = argmax logits     ties go to the lowest id, a NaN is above every number
"""

from __future__ import annotations

from typing import Any

import jax

from .. import skinny_gemm as gemm
from .._launch import Interpret


def _product(weight: Any) -> gemm.Product:
    return gemm.Product((weight,), gemm.Epilogue.BEST)


def supports(x: Any, weight: Any) -> tuple[str, ...]:
    """Why the kernel does not take these arrays or shapes; () if it does."""
    return gemm.supports([x], [_product(weight)])


def reference(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same in plain jnp."""
    ((logits, tokens),) = gemm.reference([x], [_product(weight)])
    return logits, tokens


def head(
    x: jax.Array, weight: jax.Array, *, interpret: Interpret = False, sms: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(float32 logits [8, W], int32 greedy tokens [8]).

    The launch that multiplies keeps, per CTA, token and lane, the best logit's key and id; over these
    XLA picks the token (8 x 64 pairs a CTA; unused, it is not picked). Under a plan, where a device
    holds a part of the vocabulary, ids count within ``weight``.

    Args:
        x: bfloat16 [8, D], the final normed hidden states.
        weight: bfloat16 [W, D].

    Raises:
        NotImplementedError: :func:`supports` has reasons.
    """
    ((logits, tokens),) = gemm.skinny_gemm([x], [_product(weight)], interpret=interpret, sms=sms)
    return logits, tokens


def logits_of(
    x: jax.Array, weight: jax.Array, *, interpret: Interpret = False, sms: int | None = None
) -> jax.Array:
    """:func:`head`'s logits alone, bit for bit, for a step that leaves the choice to its caller."""
    product = gemm.Product((weight,), gemm.Epilogue.WIDE)
    return gemm.skinny_gemm([x], [product], interpret=interpret, sms=sms)[0]


__all__ = ["head", "logits_of", "reference", "supports"]
