"""``implementation="megakernel-interpret"``, for states and parameters of any implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from k3jax.config import K3Config
from k3jax.state import State

from .decode_megakernel import interpreter
from .pack import PACKED


def decode_step(
    params: Mapping[str, Any],
    state: State,
    tokens: jax.Array,
    live: jax.Array,
    config: K3Config,
    tap: Any = None,
) -> tuple[jax.Array, State]:
    """As :func:`k3jax.decode_step`; the kernel's own leaves and packed weights are passed by."""
    plain = {name: leaf for name, leaf in params.items() if name != PACKED}
    bare = dataclasses.replace(state, kernel=None)
    logits, new = interpreter.decode_step(plain, bare, tokens, live, config, tap)
    return logits, dataclasses.replace(new, kernel=state.kernel)


__all__ = ["decode_step"]
