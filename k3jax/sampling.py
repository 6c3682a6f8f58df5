"""Choosing the next token of each row from its logits: greedy or random, with the usual filters.

Rows are independent of each other: what a row draws depends on its logits, its seed and its
position, never on how many rows there are or where in the batch it stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

_FLOAT32 = np.finfo(np.float32)


def _check_number(name: str, value: Any, low: float, high: float, expected: str) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not low <= float(value) <= high:  # NaN fails every comparison
        raise ValueError(f"Sampling.{name}: expected {expected}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a row chooses its next token.

    Applied in this order: repetition penalty, temperature, top_k, top_p, min_p; then one draw from
    what is left. Attributes:
        temperature: 0 takes the largest logit (exact in float32, lowest id among equals); above 0
            the logits are divided by it.
        top_k: keep the k largest, lowest ids first among equals; 0 keeps all.
        top_p: of the mass left by top_k, keep the smallest set of most probable tokens that holds
            at least this share (0..1); one token always survives, 1 keeps all.
        min_p: drop tokens less probable than this share (0..1) of the most probable one; 0 keeps all.
        repetition_penalty: logits of tokens in the prompt or generated so far are divided by it if
            positive and multiplied by it if negative; 1 changes nothing.
        stop_tokens: ids that end a row, () for none. None is the config's stop token; a padding
            token, which is never text, then ends the row too.

    Raises:
        ValueError: a number out of its range.
    """

    temperature: float | int = 0.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    repetition_penalty: float | int = 1.0
    stop_tokens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        smallest, largest = float(_FLOAT32.tiny), float(_FLOAT32.max)
        if isinstance(self.temperature, bool) or self.temperature != 0:
            _check_number(
                "temperature", self.temperature, smallest, largest, "0 or a positive float32 number"
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, (int, np.integer)) or self.top_k < 0:
            raise ValueError(f"Sampling.top_k: expected an integer of at least 0, got {self.top_k!r}")
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number in 0..1")
        _check_number("min_p", self.min_p, 0.0, 1.0, "a number in 0..1")
        _check_number(
            "repetition_penalty", self.repetition_penalty, smallest, largest, "a positive float32 number"
        )
        # Plain types, so that equal settings are equal and hash alike.
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "top_k", int(self.top_k))
        if self.stop_tokens is not None:
            object.__setattr__(self, "stop_tokens", _check_stop_tokens(self.stop_tokens))


def _check_stop_tokens(tokens: Any) -> tuple[int, ...]:
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, (Sequence, set, frozenset)):
        raise ValueError(f"Sampling.stop_tokens: expected None or a sequence of token ids, got {tokens!r}")
    if bad := [t for t in tokens if isinstance(t, bool) or not isinstance(t, (int, np.integer)) or t < 0]:
        raise ValueError(f"Sampling.stop_tokens: expected ids of at least 0, got {bad}")
    return tuple(int(t) for t in tokens)


class Settings(NamedTuple):
    """Sampling parameters of B rows as arrays, so that no value of theirs costs a compilation."""

    temperature: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    repetition_penalty: Float32[Array, " B"]


class Needs(NamedTuple):
    """What some row of the batch asks for; static, as it decides what is compiled.

    The filters sort the vocabulary and the penalty carries a [B, W] mask: both only when needed.
    """

    random: bool
    filters: bool
    penalty: bool


def settings_of(rows: Sequence[Sampling]) -> tuple[Settings, Needs]:
    """The arrays and static needs of one :class:`Sampling` per row."""

    def column(name: str, dtype: Any) -> Any:
        return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

    # More than int32 holds is more than any vocabulary: it keeps all.
    top_k = np.array([min(row.top_k, np.iinfo(np.int32).max) for row in rows], np.int32)
    settings = Settings(
        column("temperature", np.float32),
        jnp.asarray(top_k),
        column("top_p", np.float32),
        column("min_p", np.float32),
        column("repetition_penalty", np.float32),
    )
    random = [row for row in rows if row.temperature > 0]
    needs = Needs(
        random=bool(random),
        # A greedy row takes the largest logit, which every filter keeps.
        filters=any(row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in random),
        penalty=any(row.repetition_penalty != 1 for row in rows),
    )
    return settings, needs


def seed_data(seed: Any, batch: int) -> UInt32[Array, "B 2"]:
    """Key data of each row's seed, as ``jax.random.key(seed)`` has it for seeds below 2**32.

    Args:
        seed: one integer for every row, or a sequence with one for each; 0..2**64-1.

    Raises:
        TypeError: not integers.
        ValueError: out of range, or the wrong number of them.
    """
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        seeds = [seed] * batch
    elif isinstance(seed, (Sequence, np.ndarray)) and not isinstance(seed, (str, bytes)):
        seeds = list(seed)
        if len(seeds) != batch:
            raise ValueError(f"seed: expected an integer or one for each of {batch} rows, got {len(seeds)}")
    else:
        raise TypeError(f"seed: expected an integer or a sequence of integers, got {seed!r}")
    for row, value in enumerate(seeds):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"seed: expected an integer for row {row}, got {value!r}")
        if not 0 <= value < 2**64:
            raise ValueError(f"seed: expected 0..2**64-1 for row {row}, got {value}")
    words = [(int(value) >> 32, int(value) & 0xFFFFFFFF) for value in seeds]
    return jnp.asarray(np.array(words, np.uint32).reshape(batch, 2))


def penalise(
    logits: Float32[Array, "B W"], seen: Bool[Array, "B W"], penalty: Float32[Array, " B"]
) -> Float32[Array, "B W"]:
    """``logits / penalty`` where positive and ``logits * penalty`` where negative, for seen tokens.

    Args:
        logits: float32 [B, W].
        seen: bool [B, W], tokens of the row's prompt and of what it generated.
        penalty: float32 [B].
    """
    factor = penalty[:, None]
    changed = jnp.where(logits > 0, logits / factor, logits * factor)
    # A penalty far below 1 may overflow; +inf would turn into NaN further on.
    changed = jnp.minimum(changed, jnp.float32(_FLOAT32.max))
    return jnp.where(seen & (factor != 1), changed, logits)


def _kept(scaled: Array, settings: Settings) -> Array:
    """Which tokens of one row survive top_k, top_p and min_p; ``scaled`` [W] has its maximum at 0."""
    size = scaled.shape[0]
    ids = jnp.arange(size, dtype=jnp.int32)
    falling, order = jax.lax.sort((-scaled, ids), num_keys=1, is_stable=True)
    falling = -falling
    rank = ids
    keep = (settings.top_k == 0) | (rank < settings.top_k)
    weight = jnp.where(keep, jnp.exp(falling), 0.0)
    share = weight / jnp.sum(weight)
    before = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(share)[:-1]])
    # Rounding may bring the running sum to 1 before the last token: top_p = 1 asks nothing of it.
    keep &= (settings.top_p >= 1) | (before < settings.top_p)
    keep &= jnp.exp(falling) >= settings.min_p
    keep |= rank == 0
    return jnp.zeros(size, bool).at[order].set(keep, unique_indices=True)


def _draw(scaled: Array, key_data: Array, position: Array) -> Array:
    """A token of one row, with probability ``softmax(scaled)``, by the Gumbel maximum over [W]."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), position)
    # mode "high": with float32's 24 bits a token rarer than 6e-8 would never, or too often, be drawn.
    noise = jax.random.gumbel(key, scaled.shape, jnp.float32, mode="high")
    # A token that cannot be drawn stays so whatever its noise.
    return jnp.argmax(jnp.where(scaled > -jnp.inf, scaled + noise, -jnp.inf)).astype(jnp.int32)


def sample(
    logits: Float32[Array, "B W"],
    settings: Settings,
    keys: UInt32[Array, "B 2"],
    positions: Int32[Array, " B"],
    seen: Bool[Array, "B W"] | None = None,
    *,
    needs: Needs,
) -> tuple[Int32[Array, " B"], Float32[Array, " B"], Bool[Array, " B"]]:
    """The next token of every row.

    ``argmax(z)`` at temperature 0, else ``argmax(where(kept, (z - max z) / temperature, -inf) + g)``
    with z the penalised logits and g standard Gumbel noise of the key ``fold_in(seed, position)``.

    Args:
        logits: float32 [B, W]; -inf bans a token.
        settings: parameters of each row, see :func:`settings_of`.
        keys: uint32 [B, 2], see :func:`seed_data`.
        positions: int32 [B], tokens in the row before the one to choose.
        seen: bool [B, W], tokens that the penalty concerns; needed if ``needs.penalty``.
        needs: static, see :func:`settings_of`.

    Returns:
        tokens int32 [B]; logprobs float32 [B], log_softmax of the raw logits at the tokens; finite
        bool [B], False where the row's logits hold NaN or +inf or are all -inf: no token of such a
        row may be used, and -1 stands there.
    """
    finite = ~jnp.isnan(logits).any(axis=-1) & jnp.isfinite(logits.max(axis=-1))
    z = logits
    if needs.penalty:
        if seen is None:
            raise ValueError(
                "seen: expected the mask of seen tokens, as a row has a repetition penalty; got None"
            )
        z = penalise(z, seen, settings.repetition_penalty)
    tokens = jnp.argmax(z, axis=-1).astype(jnp.int32)
    if needs.random:
        hot = settings.temperature > 0
        temperature = jnp.where(hot, settings.temperature, 1.0)[:, None]
        # The maximum goes first: a small temperature cannot overflow then.
        scaled = (z - z.max(axis=-1, keepdims=True)) / temperature
        if needs.filters:
            scaled = jnp.where(jax.vmap(_kept)(scaled, settings), scaled, -jnp.inf)
        tokens = jnp.where(hot, jax.vmap(_draw)(scaled, keys, positions), tokens)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    logprobs = chosen - jax.scipy.special.logsumexp(logits, axis=-1)
    return jnp.where(finite, tokens, -1), jnp.where(finite, logprobs, jnp.nan), finite


__all__ = ["Needs", "Sampling", "Settings", "penalise", "sample", "seed_data", "settings_of"]
