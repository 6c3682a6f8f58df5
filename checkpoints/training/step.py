"""One training step as a pure function: windows of text, loss, AdamW, router balancing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from k3jax import model
from k3jax.checkpoints import names
from k3jax.config import K3Config
from k3jax.layers.linear import linear
from k3jax.quant import MXFP4
from k3jax.state import CACHE_BLOCK, init_state

from .fake_quant import fake_quantize
from .settings import Settings, learning_rate
from .text import HIDDEN

_EXPERTS = ("w1", "w2", "w3")
BETA1, BETA2 = 0.9, 0.95


def compute_params(
    master: Any, config: K3Config, quantised: jax.Array | bool, dtype: str | None = None
) -> Any:
    """The float32 ``master`` tree in the dtypes a checkpoint has; experts rounded to MXFP4 if ``quantised``.

    Args:
        master: float32 leaves, experts as float arrays [E, out, in].
        quantised: bool scalar, may be traced.
        dtype: None for the released dtypes, "float32".
    """
    expected = dict(names.leaves(model.abstract_params(config, dtype)))

    def cast(path: names.Path_, leaf: jax.Array) -> jax.Array:
        like = expected[path]
        if not isinstance(like, MXFP4):
            return leaf.astype(like.dtype)
        rounded = jnp.where(quantised, fake_quantize(leaf), leaf)
        return rounded.astype(jnp.float32 if dtype == "float32" else jnp.bfloat16)

    return names.map_leaves(cast, master)


def logits_and_routes(
    params: Any, tokens: Int[Array, "batch tokens"], config: K3Config, counted: jax.Array | None = None
) -> tuple[Float[Array, "batch tokens w"], Int[Array, "layers e"]]:
    """float32 logits [B, T, W] and how many tokens chose each expert, int32 [MoE layers, E].

    Args:
        counted: bool [B, T], the tokens whose choice counts; None is all.
    """
    batch, length = tokens.shape
    chosen: list[jax.Array] = []

    def tap(name: str, value: jax.Array) -> None:
        if name.endswith("topk_ids"):
            hit = jnp.any(value[..., None] == jnp.arange(config.num_experts), axis=-2)  # [B, T, E]
            hit = hit if counted is None else hit & counted[..., None]
            chosen.append(jnp.sum(hit, axis=(0, 1), dtype=jnp.int32))

    table = params["embed_tokens"]
    # The gradient of a look-up adds up thousands of rows of a byte in the compute dtype and, on a GPU,
    # in no fixed order. As a product it is a float32 sum; then every position has a row of its own.
    rows = linear(jax.nn.one_hot(tokens.reshape(-1), config.vocab_size, dtype=table.dtype), table.T)
    position = jnp.arange(batch * length).reshape(batch, length)
    state = init_state(config, batch, length, table.dtype)
    counts = jnp.full((batch,), length, jnp.int32)
    blocks = -(-length // CACHE_BLOCK)
    x, _ = model.forward(
        {**params, "embed_tokens": rows}, position, state, counts, config=config, num_blocks=blocks, tap=tap
    )
    return model.lm_head(params, x), jnp.stack(chosen)


def bits_of(
    logits: Float[Array, "batch tokens w"], targets: Int[Array, "batch tokens"]
) -> Float[Array, "batch tokens"]:
    """float32 [B, T]: ``-log2 p(target)``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets) / np.float32(np.log(2))


def is_decayed(path: names.Path_) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases, convolutions and AttnRes queries."""
    name = str(path[-1])
    return (
        name in _EXPERTS
        or name in ("embed_tokens", "lm_head", "gate")
        or ("_proj" in name and not name.endswith("_res_proj"))
    )


def optimiser(clip: float) -> optax.GradientTransformation:
    """Clipped gradients through Adam's moments; rate and decay are applied in :func:`train_step`."""
    return optax.chain(optax.clip_by_global_norm(clip), optax.scale_by_adam(BETA1, BETA2))


def init_train_state(params: Any, settings: Settings) -> dict[str, Any]:
    """What a step changes: float32 parameters and Adam's moments."""
    return {"params": params, "optimiser": optimiser(settings.clip).init(params)}


def step_scalars(settings: Settings, step: int) -> dict[str, np.generic]:
    """The numbers of a step that are not compiled into it, so that every step runs one program."""
    rate = learning_rate(settings, step)
    quantised = step >= settings.steps
    share = rate / (settings.quantised_rate if quantised else settings.rate)
    scalars = {
        "rate": np.float32(rate),
        "weight_decay": np.float32(settings.weight_decay),
        "hidden": np.float32(settings.hidden),
        "bias_rate": np.float32(settings.bias_rate * share * (0.1 if quantised else 1.0)),
    }
    return {**scalars, "quantised": np.bool_(quantised), "step": np.int32(step)}


def windows(runs: list[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """The tokens of all runs and every place where ``length + 1`` of them lie in one run, for the device.

    Raises:
        ValueError: every run is too short.
    """
    starts, at = [], 0
    for run in runs:
        starts.append(np.arange(at, at + max(0, len(run) - length), dtype=np.int32))
        at += len(run)
    where = np.concatenate(starts)
    if not where.size:
        raise ValueError(f"length: expected less than the longest run, {max(map(len, runs))}, got {length}")
    return {"tokens": np.concatenate(runs).astype(np.int32), "starts": where}


@partial(jax.jit, static_argnames=("config", "settings"), donate_argnames="state")
def train_step(
    state: dict[str, Any],
    data: dict[str, jax.Array],
    scalars: dict[str, Any],
    *,
    config: K3Config,
    settings: Settings,
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """One step on windows drawn by the step's number: the new state and its figures.

    The router's correction bias moves by the sign rule: up by ``bias_rate`` for an expert with
    less than the mean load in this batch, down for one with more. There is no auxiliary loss.

    Args:
        state: of :func:`init_train_state`; donated.
        data: of :func:`windows`.
        scalars: of :func:`step_scalars`.
        settings: its seed, batch, length, clip and dtype are compiled in.

    Returns:
        new state; ``bits`` (mean per target), ``gradient_norm`` and ``load`` int32 [MoE layers, E].
    """
    draw, hide = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), scalars["step"]))
    picked = jax.random.choice(draw, data["starts"], (settings.batch,))
    text = data["tokens"][picked[:, None] + jnp.arange(settings.length + 1)]
    hidden = jax.random.uniform(hide, (settings.batch, settings.length)) < scalars["hidden"]
    inputs = jnp.where(hidden, HIDDEN, text[:, :-1])

    def loss(master: Any) -> tuple[jax.Array, jax.Array]:
        params = compute_params(master, config, scalars["quantised"], settings.dtype)
        logits, load = logits_and_routes(params, inputs, config)
        return jnp.mean(bits_of(logits, text[:, 1:])), load

    (bits, load), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
    with jax.numpy_dtype_promotion("standard"):  # optax mixes an integer count with floats
        updates, moments = optimiser(settings.clip).update(gradients, state["optimiser"])
    flat = dict(names.leaves(updates))

    def move(path: names.Path_, value: jax.Array) -> jax.Array:
        decay = scalars["weight_decay"] * value if is_decayed(path) else jnp.zeros_like(value)
        return value - scalars["rate"] * (flat[path] + decay)

    params = balance(names.map_leaves(move, state["params"]), load, scalars["bias_rate"])
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    figures = {"bits": bits, "gradient_norm": norm, "load": load}
    return {"params": params, "optimiser": moments}, figures


def balance(params: Any, load: Int[Array, "layers e"], rate: jax.Array) -> Any:
    """``params`` with every MoE layer's correction bias moved by ``rate * sign(mean load - load)``."""
    mean = jnp.mean(load.astype(jnp.float32), axis=-1, keepdims=True)
    moves = iter(rate * jnp.sign(mean - load.astype(jnp.float32)))

    def move(path: names.Path_, value: jax.Array) -> jax.Array:
        return value + next(moves) if path[-1] == "e_score_correction_bias" else value

    return names.map_leaves(move, params)
