"""Kimi K3's text model, top to bottom.

One token passes through here as follows. Its embedding becomes the running sum ``pre``. Each of
the 93 layers has two sublayers, attention (KDA, or MLA in every fourth layer and the last) and a
feed-forward network (dense in layer 0, LatentMoE after it). A sublayer reads an AttnRes mixture of
``pre`` and the block snapshots, normed, and adds its output to ``pre``; every 12 layers ``pre`` is
snapshot and starts anew. A last mixture, norm and matrix give the logits.

:func:`prefill` and :func:`decode_step` are pure functions of a parameter tree and a
:class:`~k3jax.state.State`, for use under your own ``jax.jit``. Layers are unrolled, for speed, or
looped over, for a short compilation (``scan_layers``). The Flax module that defines the tree is
:class:`k3jax.nnx_model.K3`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from . import implementations, layer_scan
from .config import K3Config, LayerType
from .layers.attn_res import SnapshotList, Snapshots, choose
from .layers.ffn import dense_ffn
from .layers.kda import kda_prefill, kda_step
from .layers.linear import einsum
from .layers.mla import mla_prefill, mla_step
from .layers.moe import latent_moe
from .layers.norm import rms_norm
from .nnx_model import abstract_params, param_axes
from .state import (
    CACHE_BLOCK,
    STATUS_BAD_TOKEN,
    STATUS_FULL,
    State,
    check_state,
    default_max_length,
    init_state,
)

Params = Mapping[str, Any]
LogitsMode = Literal["all", "last", "none"] | None
Tap = Callable[[str, jax.Array], None]
LayerState = Mapping[str, jax.Array]
Attention = Callable[[LayerType, Any, jax.Array, LayerState], tuple[jax.Array, LayerState]]
FeedForward = Callable[[Any, jax.Array, K3Config, Tap], jax.Array]

PREFILL_CHUNK = 64
"""Tokens per pass of prefill. Fixed, so that a prompt's first tokens meet the same program
however long the prompt is and however it is cut."""


# -- the layers -------------------------------------------------------------------------


def layer(
    p: Mapping[str, Any],
    pre: jax.Array,
    blocks: Snapshots,
    starts_block: bool | jax.Array,
    attention: Callable[[Any, jax.Array], jax.Array],
    config: K3Config,
    see: Tap,
    ffn: FeedForward,
) -> tuple[jax.Array, Snapshots]:
    """One layer: the running sum [..., D] and the snapshots before it, to those after it.

    Args:
        p: the layer's parameters.
        pre: the running sum.
        blocks: AttnRes snapshots of earlier blocks.
        starts_block: whether the running sum is snapshot, and starts anew, here.
        attention: ``(self_attn parameters, input) -> output``; it holds the state.
        see: called with a name and an array for every intermediate value, see :func:`capture`.
        ffn: ``(layer parameters, input, config, see) -> output``, the second sublayer.
    """
    eps = config.rms_norm_eps
    h = blocks.mix(pre, p["self_attention_res_norm"], p["self_attention_res_proj"], eps)
    blocks = blocks.push(pre, starts_block)  # after the mixture: a snapshot is no source of its own layer
    see("attn_mix", h)
    h = rms_norm(h, p["input_layernorm"], eps)
    see("attn_in", h)
    a = attention(p["self_attn"], h)
    see("attn_out", a)
    pre = choose(starts_block, a, pre + a)

    h = blocks.mix(pre, p["mlp_res_norm"], p["mlp_res_proj"], eps)
    see("mlp_mix", h)
    h = rms_norm(h, p["post_attention_layernorm"], eps)
    see("mlp_in", h)
    f = ffn(p, h, config, see)
    see("mlp_out", f)
    pre = pre + f
    see("prefix_sum", pre)
    return pre, blocks


def run_layers(
    params: Params,
    config: K3Config,
    pre: jax.Array,
    states: Sequence[LayerState],
    attention: Attention,
    *,
    ffn: FeedForward | None = None,
    scan_layers: bool = False,
    tap: Tap | None = None,
) -> tuple[jax.Array, tuple[LayerState, ...]]:
    """All layers and the final mixture and norm: (normed output [..., D], new layer states).

    Args:
        pre: embeddings of the tokens [..., D].
        states: one per layer.
        attention: ``(kind, self_attn parameters, input, layer state) -> (output, layer state)``.
        ffn: ``(layer parameters, input, config, see) -> output``; None is :func:`feed_forward`.
        scan_layers: run the repeating layers as a loop, see :mod:`k3jax.layer_scan`.
    """
    second = ffn or feed_forward
    eps = config.rms_norm_eps
    new_states: list[LayerState] = []
    blocks: Snapshots = SnapshotList(())

    def one(
        p: Any, kind: LayerType, start: bool | jax.Array, state: LayerState, pre: Any, blocks: Any, see: Tap
    ) -> Any:
        new: list[LayerState] = []

        def attend(p: Any, x: jax.Array) -> jax.Array:
            out, after = attention(kind, p, x, state)
            new.append(after)
            return out

        pre, blocks = layer(p, pre, blocks, start, attend, config, see, second)
        return pre, blocks, new[0]

    loop = layer_scan.find_loop(config) if scan_layers and tap is None else None
    i = 0
    while i < config.num_hidden_layers:
        if loop is not None and i == loop.first:
            pre, blocks, after = layer_scan.run(loop, params["layers"], states, one, config, pre, blocks)
            new_states += after
            i = loop.end
            continue
        kind = config.layer_types[i]
        with jax.named_scope(f"layer{i}_{kind}"):
            see = _see(tap, f"layers.{i}.")
            pre, blocks, after_one = one(
                params["layers"][i], kind, config.starts_block(i), states[i], pre, blocks, see
            )
            new_states.append(after_one)
        i += 1
    with jax.named_scope("output"):
        see = _see(tap, "")
        h = blocks.mix(pre, params["output_attn_res_norm"], params["output_attn_res_proj"], eps)
        see("output_attn_res", h)
        h = rms_norm(h, params["norm"], eps)
        see("final_norm", h)
    return h, tuple(new_states)


def _see(tap: Tap | None, prefix: str) -> Tap:
    return (lambda name, value: None) if tap is None else (lambda name, value: tap(prefix + name, value))


def feed_forward(p: Mapping[str, Any], x: jax.Array, config: K3Config, tap: Tap | None = None) -> jax.Array:
    """A layer's second sublayer: the dense FFN or the LatentMoE, whichever its parameters are."""
    if "mlp" in p:
        return dense_ffn(p["mlp"], x, config)
    return latent_moe(p["block_sparse_moe"], x, config, tap=tap)


def lm_head(params: Params, x: Float[Array, "*rows d"]) -> Float[Array, "*rows w"]:
    """float32 logits [..., W] of the final normed x; no scale, no cap."""
    return einsum("...d,wd->...w", x, params["lm_head"])


# -- one decode step --------------------------------------------------------------------


def decode_step(
    params: Params,
    state: State,
    tokens: Int[Array, " batch"] | np.ndarray | Sequence[Any],
    active: Bool[Array, " batch"] | np.ndarray | None = None,
    *,
    config: K3Config,
    implementation: str = "auto",
    scan_layers: bool = False,
    tap: Tap | None = None,
) -> tuple[Float[Array, "batch w"], State]:
    """One token per row through the whole model.

    Args:
        params: parameter tree; the dtype of ``embed_tokens`` is the compute dtype.
        state: of B rows. Donate it under your own jit to update it in place.
        tokens: integer [B].
        active: bool [B]; a row that is not active keeps its state bit for bit. Default all.
        implementation: see :mod:`k3jax.implementations`. The others than "xla" know no scan_layers
            and no tap; the megakernel's take 1..8 rows.
        scan_layers: loop over the repeating layers: compiles faster, runs slower.
        tap: see :func:`capture`.

    Returns:
        float32 logits [B, W] and the new state. A row that is not active has logits 0. A row
        that is full, or whose token is not in 0..vocab_size-1, keeps its state, has NaN logits
        and a bit set in ``state.status``: see :func:`k3jax.check`.

    Raises:
        TypeError, ValueError: wrong dtype or shape; NotImplementedError: ``implementation``.
    """
    name = implementations.of_step(implementation, config, state, params)
    state.ensure_usable()
    check_state(config, state, params["embed_tokens"].dtype)
    tokens = _int32(tokens, "tokens", (state.batch,))
    live = _mask(np.ones(state.batch, bool) if active is None else active, state.batch)
    if name != "xla":
        return implementations.decode_step_of(name)(params, state, tokens, live, config, tap)
    full = state.lengths >= state.max_length
    bad = (tokens < 0) | (tokens >= config.vocab_size)
    run = live & ~full & ~bad

    def attention(kind: LayerType, p: Any, x: jax.Array, layer: LayerState) -> tuple[jax.Array, LayerState]:
        if kind == "kda":
            return kda_step(p, x, layer, run, config)
        out, cache = mla_step(p, x, layer["cache"], state.lengths, run, config)
        return out, {"cache": cache}

    x = params["embed_tokens"][jnp.where(run, tokens, 0)]
    x, layers = run_layers(params, config, x, state.layers, attention, scan_layers=scan_layers, tap=tap)
    logits = lm_head(params, x)
    refused = live & ~run
    logits = jnp.where(run[:, None], logits, jnp.where(refused[:, None], jnp.nan, 0.0))
    status = state.status | _refusal(live & full, live & bad)
    lengths = state.lengths + run.astype(jnp.int32)
    return logits, State(layers, lengths, status, state.max_length, state.kernel)


def _refusal(full: jax.Array, bad: jax.Array) -> jax.Array:
    """int32 status bits of rows refused for being full and for a bad token."""
    return jnp.where(full, STATUS_FULL, 0) | jnp.where(bad, STATUS_BAD_TOKEN, 0)


# -- prefill ----------------------------------------------------------------------------


def forward(
    params: Params,
    tokens: Int[Array, "batch tokens"],
    state: State,
    counts: Int[Array, " batch"],
    *,
    config: K3Config,
    num_blocks: int | jax.Array,
    scan_layers: bool = False,
    tap: Tap | None = None,
) -> tuple[Float[Array, "batch tokens d"], State]:
    """T tokens of each row in one pass: final normed hidden states [B, T, D] and the new state.

    Args:
        tokens: int32 [B, T], ids in range; row b's first ``counts[b]`` are real.
        counts: int32 [B], 0..T and within the row's capacity.
        num_blocks: blocks of latent cache that attention reads, see
            :func:`k3jax.layers.mla.mla_prefill`.
    """

    def attention(kind: LayerType, p: Any, x: jax.Array, layer: LayerState) -> tuple[jax.Array, LayerState]:
        if kind == "kda":
            return kda_prefill(p, x, layer, counts, config)
        out, cache = mla_prefill(p, x, layer["cache"], state.lengths, counts, config, num_blocks)
        return out, {"cache": cache}

    x = params["embed_tokens"][tokens]
    x, layers = run_layers(params, config, x, state.layers, attention, scan_layers=scan_layers, tap=tap)
    return x, State(layers, state.lengths + counts, state.status, state.max_length, state.kernel)


def prefill_chunk(
    params: Params,
    state: State,
    last: Float[Array, "batch d"],
    tokens: Int[Array, "batch chunk"],
    counts: Int[Array, " batch"],
    *,
    config: K3Config,
    logits: LogitsMode,
    num_blocks: int | None = None,
    scan_layers: bool = False,
) -> tuple[jax.Array | None, Float[Array, "batch d"], State]:
    """One pass of prefill: (logits [B, chunk, W] or None, hidden state of each row's last token, state).

    Args:
        last: [B, D], the hidden states so far; a row with tokens here replaces its own.
        num_blocks: None stops at the longest row; a number is differentiable.
    """
    check_state(config, state, params["embed_tokens"].dtype)
    if num_blocks is None:
        needed = jnp.max(state.lengths + counts, initial=0)
        blocks: int | jax.Array = (needed + CACHE_BLOCK - 1) // CACHE_BLOCK
    else:
        blocks = num_blocks
    x, state = forward(
        params, tokens, state, counts, config=config, num_blocks=blocks, scan_layers=scan_layers
    )
    index = jnp.maximum(counts - 1, 0)
    mine = jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
    last = jnp.where((counts > 0)[:, None], mine, last)
    if logits != "all":
        return None, last, state
    real = jnp.arange(tokens.shape[1]) < counts[:, None]
    return jnp.where(real[..., None], lm_head(params, x), 0.0), last, state


def prefill(
    params: Params,
    tokens: Int[Array, "batch tokens"] | np.ndarray | Sequence[Any],
    *,
    config: K3Config,
    lengths: Int[Array, " batch"] | np.ndarray | Sequence[int] | None = None,
    state: State | None = None,
    max_length: int | None = None,
    logits: LogitsMode = "all",
    chunk_size: int | None = PREFILL_CHUNK,
    implementation: str = "auto",
    scan_layers: bool = False,
) -> tuple[jax.Array | None, State]:
    """Prompts of B rows through the model; pure and, with ``state=None``, differentiable.

    Args:
        params: parameter tree; the dtype of ``embed_tokens`` is the compute dtype.
        tokens: integer [B, T]; row b holds ``tokens[b, :lengths[b]]``, the rest is padding.
        lengths: integer [B], 0..T; default T for every row.
        state: continue at ``state.lengths``; None starts new rows.
        max_length: tokens a row can hold in all, only with ``state=None``; default T + 256
            rounded up to 256, at most ``max_position_embeddings``.
        logits: "all" for float32 [B, T, W] (0 past a row's length), "last" for [B, W] at each
            row's last token (0 for a row without tokens), "none" or None for None.
        chunk_size: tokens per pass; None is a single pass (training).
        implementation: as in :func:`decode_step`; prefill is the XLA path under every name.
        scan_layers: loop over the repeating layers: compiles faster, runs slower.

    Returns:
        logits and the new state. A row whose tokens do not fit, or are not in
        0..vocab_size-1, keeps its state, has NaN logits and a bit set in ``state.status``.

    Raises:
        TypeError, ValueError: wrong dtype, shape or argument; NotImplementedError: ``implementation``.
    """
    if implementation != "auto":
        implementations.choose(implementation, config)
    tokens = _int32(tokens, "tokens", (None, None))
    batch, length = tokens.shape
    lengths = jnp.full((batch,), length, jnp.int32) if lengths is None else _counts(lengths, batch, length)
    check_logits_mode(logits)
    chunk = _chunk(chunk_size, length)
    passes = -(-length // chunk)
    dtype = params["embed_tokens"].dtype
    blocks = None
    if state is None:
        limit = default_max_length(config, length) if max_length is None else max_length
        state = init_state(config, batch, limit, dtype)
        # Static, hence differentiable: no row reaches past the prompt.
        blocks = min(-(-passes * chunk // CACHE_BLOCK), -(-limit // CACHE_BLOCK))
    elif max_length is not None:
        raise ValueError("max_length: only with state=None; a state has its own")
    elif state.batch != batch:
        raise ValueError(f"tokens: expected {state.batch} rows, as the state has, got {batch}")
    else:
        state.ensure_usable()
        check_state(config, state, dtype)

    full, bad = _refused_rows(tokens, lengths, state, config)
    run = jnp.where(full | bad, 0, lengths)
    padded = jnp.pad(tokens, ((0, 0), (0, passes * chunk - length)))
    padded = jnp.where(jnp.arange(passes * chunk) < run[:, None], padded, 0)
    xs = jnp.moveaxis(padded.reshape(batch, passes, chunk), 1, 0), jnp.arange(passes) * chunk

    def step(carry: tuple[State, jax.Array], x: tuple[jax.Array, jax.Array]) -> Any:
        state, last = carry
        piece, start = x
        counts = jnp.clip(run - start, 0, chunk)
        out, last, state = prefill_chunk(
            params, state, last, piece, counts,
            config=config, logits=logits, num_blocks=blocks, scan_layers=scan_layers,
        )  # fmt: skip
        return (state, last), out

    last = jnp.zeros((batch, config.hidden_size), dtype)
    (state, last), out = lax.scan(step, (state, last), xs)
    status = state.status | _refusal(full, bad)
    state = State(state.layers, state.lengths, status, state.max_length, state.kernel)
    return _prefill_logits(params, out, last, run, lengths, full | bad, logits, length), state


def _prefill_logits(
    params: Params,
    out: jax.Array | None,
    last: jax.Array,
    run: jax.Array,
    lengths: jax.Array,
    refused: jax.Array,
    logits: LogitsMode,
    length: int,
) -> jax.Array | None:
    """Logits in the form asked for: NaN in refused rows, 0 where there is no token."""
    if logits in ("none", None):
        return None
    if logits == "last":
        result = jnp.where((run > 0)[:, None], lm_head(params, last), 0.0)
        return jnp.where((refused & (lengths > 0))[:, None], jnp.nan, result)
    if out is None:
        raise AssertionError("a pass with logits='all' returns logits")
    batch, vocab = out.shape[1], out.shape[-1]
    result = jnp.moveaxis(out, 0, 1).reshape(batch, -1, vocab)[:, :length]
    lost = refused[:, None] & (jnp.arange(length) < lengths[:, None])
    return jnp.where(lost[..., None], jnp.nan, result)


def _refused_rows(
    tokens: jax.Array, lengths: jax.Array, state: State, config: K3Config
) -> tuple[jax.Array, jax.Array]:
    """bool [B], bool [B]: rows whose tokens do not fit, rows with a token outside the vocabulary."""
    full = state.lengths + lengths > state.max_length
    real = jnp.arange(tokens.shape[1]) < lengths[:, None]
    bad = jnp.any(real & ((tokens < 0) | (tokens >= config.vocab_size)), axis=1)
    return full, bad


def _chunk(chunk_size: int | None, length: int) -> int:
    if chunk_size is None:
        return max(1, length)
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected a positive integer or None, got {chunk_size}")
    return chunk_size


# -- looking inside ---------------------------------------------------------------------


def capture(
    params: Params, tokens: Int[Array, "batch tokens"] | np.ndarray, *, config: K3Config
) -> dict[str, jax.Array]:
    """Every intermediate value of a prompt, by name.

    For layer i, ``layers.{i}.`` attn_mix, attn_in, attn_out, mlp_mix, mlp_in, mlp_out,
    prefix_sum [B, T, D]; LatentMoE layers also topk_ids int32 and topk_w float32 [B, T, A] and
    routed_latent_sum [B, T, L] (float32, before its norm). Then ``output_attn_res``,
    ``final_norm`` and ``logits``.

    Args:
        tokens: integer [B, T], T in 1..max_position_embeddings, in one pass.

    Raises:
        ValueError: a length out of range, or an id outside 0..vocab_size-1 (under a jit, where ids
            are not known, the row's logits are NaN instead).
    """
    tokens = _int32(tokens, "tokens", (None, None))
    batch, length = tokens.shape
    if batch < 1 or not 1 <= length <= config.max_position_embeddings:
        raise ValueError(
            f"tokens: expected at least one row of 1..{config.max_position_embeddings} tokens, "
            f"got shape {[batch, length]}"
        )
    wrong = (tokens < 0) | (tokens >= config.vocab_size)
    if not isinstance(tokens, jax.core.Tracer) and bool(wrong.any()):
        raise ValueError(f"tokens: expected ids in 0..{config.vocab_size - 1}, got {int(tokens[wrong][0])}")
    seen: dict[str, jax.Array] = {}
    state = init_state(config, batch, length, params["embed_tokens"].dtype)
    counts = jnp.full((batch,), length, jnp.int32)
    x, _ = forward(
        params, jnp.where(wrong, 0, tokens), state, counts,
        config=config, num_blocks=-(-length // CACHE_BLOCK), tap=seen.__setitem__,
    )  # fmt: skip
    lost = wrong.any(axis=1)[:, None, None]
    return {**seen, "logits": jnp.where(lost, jnp.nan, lm_head(params, x))}


# -- arguments --------------------------------------------------------------------------


def _int32(value: Any, name: str, shape: tuple[int | None, ...]) -> jax.Array:
    """``value`` as int32 [shape]; None in the expected shape is any size."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        value = jnp.asarray(value)  # also a list of traced numbers, as jit makes of a list
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.size == 0 and not isinstance(value, (jax.Array, np.ndarray)):
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    fits = array.ndim == len(shape) and all(
        e is None or e == s for e, s in zip(shape, array.shape, strict=True)
    )
    if not fits:
        want = "[" + ", ".join("any" if e is None else str(e) for e in shape) + "]"
        raise ValueError(f"{name}: expected shape {want}, got {list(array.shape)}")
    if not isinstance(array, jax.Array) and array.size:
        info = np.iinfo(np.int32)
        if array.min() < info.min or array.max() > info.max:
            raise ValueError(f"{name}: expected int32 values, got {array.min()}..{array.max()}")
    return jnp.asarray(array).astype(jnp.int32)


def _counts(value: Any, batch: int, length: int) -> jax.Array:
    """``lengths`` as int32 [batch]; values known on the host must be in 0..length."""
    counts = _int32(value, "lengths", (batch,))
    known = np.asarray([] if isinstance(value, jax.Array) else value)
    if ((known < 0) | (known > length)).any():
        raise ValueError(f"lengths: expected {batch} integers in 0..{length}, got {known.tolist()}")
    return counts


def _mask(value: Any, batch: int) -> jax.Array:
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.dtype != bool or array.shape != (batch,):
        raise ValueError(f"active: expected bool [{batch}], got {array.dtype} {list(array.shape)}")
    return jnp.asarray(array)


def check_logits_mode(logits: LogitsMode) -> None:
    if logits not in ("all", "last", "none", None):
        raise ValueError(f"logits: expected 'all', 'last' or 'none', got {logits!r}")


__all__ = [
    "PREFILL_CHUNK", "Params", "abstract_params", "capture", "decode_step", "feed_forward", "forward",
    "layer", "lm_head", "param_axes", "prefill", "prefill_chunk", "run_layers",
]  # fmt: skip
