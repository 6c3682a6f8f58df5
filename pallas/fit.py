"""What the Pallas path takes: every reason against a model, a batch, a device or a plan at once."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..config import K3Config
from ..dispatch import ragged_faults
from ..mesh.layout import device_params
from ..mesh.plan import MeshPlan
from ..nnx_model import abstract_params
from ..quant import MXFP4
from . import attn_res, experts, head, kda, mla, router, skinny_gemm
from ._launch import batch_reasons, device_reasons
from .sublayers import KDA_INPUTS, MLA_INPUTS, ROWS, gated, moe_inputs, partial_sums, rounded


def supports(
    config: K3Config,
    device: Any = None,
    batch: int = 1,
    dtype: Any = jnp.bfloat16,
    *,
    interpret: bool = False,
    params: Mapping[str, Any] | None = None,
    plan: MeshPlan | None = None,
) -> tuple[str, ...]:
    """Why the Pallas path cannot run a decode step; () if it can.

    Args:
        config: the architecture.
        device: a jax device, None is the default one, or those of a plan that names some; not looked at
            with ``interpret``.
        batch: rows of the step, over all devices.
        dtype: compute dtype of the model.
        interpret: whether the kernels are to run in the interpreter.
        params: a parameter tree, looked at for dtype and packed experts; None leaves that out.
        plan: how the model lies on many devices; None is one device.
    """
    reasons: list[str] = []
    platform = "cpu"
    if interpret:
        reasons += interpreter_reasons(1 if plan is None else plan.num_devices)
    else:
        named = () if plan is None or plan.devices is None else plan.devices
        devices = [device] if device is not None else named or [default_device()]
        platform = devices[0].platform
        reasons += dict.fromkeys(reason for d in devices for reason in device_reasons(d))
    if params is not None:
        dtype = params["embed_tokens"].dtype
        reasons += _float_experts(params)
    reasons += batch_reasons(batch) if plan is None else _plan_reasons(config, plan, batch, platform)
    if jnp.dtype(dtype) != jnp.bfloat16:
        reasons.append(f"dtype: expected bfloat16 parameters (the release's), got {jnp.dtype(dtype)}")
    if plan is not None and plan.faults(config):
        return tuple(reasons)  # no shapes to look at
    return (*reasons, *_shape_reasons(config, plan))


def _plan_reasons(config: K3Config, plan: MeshPlan, batch: int, platform: str) -> Iterator[str]:
    """Reasons in the plan and in how many rows it gives a device."""
    yield from (f"mesh: {fault}" for fault in plan.faults(config))
    if plan.dispatch == "ragged":
        yield from (f"mesh: {fault}" for fault in ragged_faults(platform, plan.expert_ranks))
    if plan.split_sequence:
        yield "mesh: split_sequence: the attention kernels read whole rows of the latent cache"
    if not 1 <= batch <= ROWS * plan.data:
        groups = "" if plan.data == 1 else f" ({ROWS} for each of {plan.data} data groups)"
        yield f"batch: expected 1..{ROWS * plan.data} rows{groups}, got {batch}"


INTERPRETER_THREADS = 4
"""XLA's host threads that two interpreted warpgroups need: each may block one, as their callers do."""


def interpreter_reasons(devices: int = 1) -> tuple[str, ...]:
    """Why the interpreter would hang here: XLA's pool has a thread per core, and may be too small.

    A pool's size cannot be asked for; this is XLA's own rule, and fixed when jax first computes.

    Args:
        devices: of a mesh; all but the one that interprets wait, each on a thread.
    """
    given = os.environ.get("NPROC", "")
    threads = int(given) if given.isdecimal() else len(os.sched_getaffinity(0))
    threads = max(threads, len(jax.local_devices(backend="cpu")))
    needed = INTERPRETER_THREADS + min(devices, len(jax.local_devices(backend="cpu"))) - 1
    if threads >= needed:
        return ()
    return (
        f"interpreter: expected at least {needed} host threads, XLA has {threads}; "
        f"set the environment variable NPROC={max(8, needed)} before jax starts",
    )


def default_device() -> Any:
    """The device that a computation without a device of its own runs on."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return jax.devices()[0] if chosen is None else chosen


def check_scales(params: Mapping[str, Any]) -> None:
    """Raise unless the experts' scales are ones the kernels decode exactly; for the time of loading.

    Raises:
        NotImplementedError: names the layer, weight, expert, row and block of the first other one.
    """
    for i, layer in enumerate(params["layers"]):
        if "block_sparse_moe" not in layer:
            continue
        try:
            experts.check_scales(layer["block_sparse_moe"]["experts"])
        except NotImplementedError as error:
            raise NotImplementedError(f"layer {i}: {error}") from error


def _float_experts(params: Mapping[str, Any]) -> list[str]:
    for i, layer in enumerate(params["layers"]):
        for name, leaf in layer.get("block_sparse_moe", {}).get("experts", {}).items():
            if not isinstance(leaf, MXFP4):
                return [f"layer {i}, experts {name}: expected packed MXFP4, got {leaf.dtype}"]
    return []


@functools.lru_cache(maxsize=32)
def _shape_reasons(config: K3Config, plan: MeshPlan | None) -> tuple[str, ...]:
    """Reasons in the shapes that a device holds: each layer kind once, at one row in bfloat16."""
    params = abstract_params(config) if plan is None else device_params(config, plan)
    heads = config if plan is None else plan.local_config(config)
    found: dict[str, None] = {}  # in order, each once
    seen: set[tuple[str, bool]] = set()
    for i, layer in enumerate(params["layers"]):
        kind = (config.layer_types[i], config.is_moe(i))
        if kind in seen:
            continue
        seen.add(kind)
        attention = (_kda if kind[0] == "kda" else _mla)(layer["self_attn"], heads)
        found.update(dict.fromkeys(f"{kind[0]} layer {i}: {reason}" for reason in attention))
        ffn = _moe(layer["block_sparse_moe"], config) if kind[1] else _dense(layer["mlp"])
        name = "LatentMoE" if kind[1] else "dense FFN"
        found.update(dict.fromkeys(f"{name} of layer {i}: {reason}" for reason in ffn))
    found.update(dict.fromkeys(f"residual: {reason}" for reason in _residual(config)))
    found.update(
        dict.fromkeys(f"head: {reason}" for reason in head.supports(_row(config), params["lm_head"]))
    )
    return tuple(found)


def _row(config: K3Config, width: int | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((ROWS, width or config.hidden_size), jnp.bfloat16)


def _kda(p: Mapping[str, Any], config: K3Config) -> Iterator[str]:
    yield from skinny_gemm.supports([_row(config)], rounded(p, KDA_INPUTS))
    yield from kda.supports(config, 1, jnp.bfloat16)
    yield from skinny_gemm.supports([_row(config, config.kda_value_size)], partial_sums(p["o_proj"]))


def _mla(p: Mapping[str, Any], config: K3Config) -> Iterator[str]:
    low = _row(config, config.q_lora_rank)
    yield from skinny_gemm.supports([_row(config)], rounded(p, MLA_INPUTS))
    yield from attn_res.supports(low, [], [], p["q_a_layernorm"])
    yield from skinny_gemm.supports([low], rounded(p, ["q_b_proj"]))
    # Caches come in multiples of 256 tokens and up to max_position_embeddings.
    yield from mla.supports(config, 1, -(-config.max_position_embeddings // 256) * 256, jnp.bfloat16)
    values = _row(config, config.num_attention_heads * config.v_head_dim)
    yield from skinny_gemm.supports([values], partial_sums(p["o_proj"]))


def _dense(p: Mapping[str, Any]) -> Iterator[str]:
    width, hidden = p["gate_proj"].shape
    x, inner = (jax.ShapeDtypeStruct((ROWS, n), jnp.bfloat16) for n in (hidden, width))
    yield from skinny_gemm.supports([x], [gated(p)])
    yield from skinny_gemm.supports([inner], partial_sums(p["down_proj"]))


def _moe(p: Mapping[str, Any], config: K3Config) -> Iterator[str]:
    latent = config.routed_expert_hidden_size
    yield from skinny_gemm.supports([_row(config)], moe_inputs(p))
    yield from router.supports(1, config.num_experts, config.num_experts_per_token)
    yield from experts.supports(p["experts"], 1, jnp.bfloat16)
    total = jax.ShapeDtypeStruct((1, ROWS, latent), jnp.float32)
    yield from attn_res.supports(None, [total], [], p["routed_expert_norm"])
    weights = p["routed_expert_up_proj"], p["shared_experts"]["down_proj"]
    inputs = [_row(config, weight.shape[1]) for weight in weights]
    yield from skinny_gemm.supports(inputs, partial_sums(*weights))


def _residual(config: K3Config) -> tuple[str, ...]:
    """Reasons against the last mixture, the one with most snapshots."""
    blocks = sum(config.starts_block(i) for i in range(config.num_hidden_layers))
    gain = jax.ShapeDtypeStruct((config.hidden_size,), jnp.bfloat16)
    return attn_res.supports(_row(config), [], [_row(config)] * blocks, gain)


__all__ = ["INTERPRETER_THREADS", "check_scales", "default_device", "interpreter_reasons", "supports"]
