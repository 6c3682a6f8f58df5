"""Operands of the kernel: stacked weights, one workspace, and where everything lies in it.

The kernel is one custom call on the tree of :func:`abstract_operands`. Weights that differ only by
layer are stacked, since an address is then base + place x stride; experts and states cannot be copied
into stacks, so they stay one operand per layer. Activations pass between stages through ``work``,
a single buffer cut up by :func:`workspace`; vectors lie there row after row, ``[B, columns]``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.quant import MXFP4

from .layout import attention_matrices, ffn_matrices, pack, tiling
from .shapes import MAX_BATCH, Plan

COUNTER_WORDS = 8
"""int32 words from one hand-off counter to the next: 32 bytes, so that no two share a sector."""
FAULT_WORDS = 16
"""int32 words of the fault record; word 0 is 0 or the code of the first wait that gave up."""
FAULT_FIELDS = ("code", "op", "layer", "sm", "counter", "target", "value", "epoch")
"""What the words of the fault record hold, in order."""
FAULT_TIMEOUT = 1

ALIGN = 256
_SIZES = {"int32": 4, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Field:
    """A part of the workspace: ``shape`` numbers of ``dtype`` from byte ``offset`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _SIZES[self.dtype]


def _even(count: int, to: int = 8) -> int:
    return -(-count // to) * to


def workspace_shapes(p: Plan, counters: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every field. The last axis of a bf16 vector is padded to 8 columns."""
    B, c = p.B, p.config
    bf16, f32, i32 = "bfloat16", "float32", "int32"
    out: dict[str, tuple[str, tuple[int, ...]]] = {
        "counters": (i32, (2, counters, COUNTER_WORDS)),
        "pre": (bf16, (2, B, p.D)),
        "h": (bf16, (B, p.D)),
        "h.ssq": (f32, (B, p.sms)),
        "score": (f32, (B, p.max_sources, 2, p.sms)),
        "block": (bf16, (max(1, p.max_sources - 1), B, p.D)),
        "best": (f32, (p.sms, B, 2)),
    }
    if c.num_kda_layers:
        out |= {
            "kda.proj": (bf16, (B, _even(p.kda_rows))),
            "kda.z": (bf16, (B, p.kda_heads * p.K)),
            "kda.y": (bf16, (B, p.kda_heads * p.V)),
        }
    if c.num_mla_layers:
        heads = p.mla_heads // p.head_groups
        out |= {
            "mla.proj": (bf16, (B, _even(p.mla_rows))),
            "mla.q": (bf16, (B, p.mla_heads * c.qk_head_dim)),
            "mla.row": (bf16, (B, p.C + p.R)),
            "mla.qt": (bf16, (B, p.mla_heads * p.C)),
            "mla.acc": (f32, (p.attend_units, heads, p.C)),
            "mla.stat": (f32, (p.attend_units, heads, 2)),  # peak, mass
            "mla.y": (bf16, (B, p.mla_values)),
        }
    if c.num_moe_layers:
        out |= {
            "rlogit": (f32, (B, p.E)),
            "route.ids": (i32, (B, p.A)),
            "route.slot_of": (i32, (B, p.A)),
            "route.weight": (f32, (B, p.A)),
            "route.slots": (i32, (p.slots,)),  # expert of every slot in use, ascending
            "route.count": (i32, (8,)),  # word 0: slots in use
            "latent": (bf16, (B, p.L)),
            "act.shared": (bf16, (B, _even(p.shared))),
            "hid": (bf16, (p.slots, B, _even(p.F))),
            "ey": (bf16, (p.slots, B, p.L)),
            "comb": (bf16, (B, _even(p.latent_rows))),
            "comb.ssq": (f32, (B, p.sms)),
            "shared": (f32, (B, p.D)),
        }
        if p.ways > 1:  # these the ranks exchange
            for name in ("latent", "comb", "comb.ssq"):
                del out[name]
    if p.peers:
        out |= {"give": (f32, (B, p.exchanged)), "take": (f32, (B, p.exchanged))}
    if c.first_k_dense_replace:
        out["act.dense"] = (bf16, (B, _even(p.dense)))
    return out


@functools.lru_cache(maxsize=64)
def workspace(p: Plan, counters: int, trace: int = 0) -> dict[str, Field]:
    """Every field of ``work`` by name, in address order.

    Args:
        trace: entries of an SM's program, for a build that keeps time: field "trace" then holds int32
            [SMs, entries, 4] of SM clocks: before and after the waits of an instruction, and at its end.
    """
    out: dict[str, Field] = {}
    at = 0
    shapes = workspace_shapes(p, counters)
    if trace:
        shapes["trace"] = ("int32", (p.sms, trace, 4))
    for name, (dtype, shape) in shapes.items():
        field = Field(name, dtype, shape, at)
        out[name] = field
        at = _even(at + field.nbytes, ALIGN)
    return out


def workspace_bytes(p: Plan, counters: int, trace: int = 0) -> int:
    last = list(workspace(p, counters, trace).values())[-1]
    return _even(last.offset + last.nbytes, ALIGN)


# -- packed weights ---------------------------------------------------------------------------

KDA_MATRICES = ("kda_in", "kda_decay", "kda_out")
MLA_MATRICES = ("mla_in", "mla_query", "mla_key_up", "mla_value_up", "mla_out")
MOE_MATRICES = ("router", "latent_down", "shared_in", "shared_out", "latent_up")
DENSE_MATRICES = ("dense_in", "dense_out")


def layers_with(p: Plan, name: str) -> list[int]:
    """Layers that have a stacked operand, in the order of its stack (the record's STACK word)."""
    kinds = p.config.layer_types
    if name in KDA_MATRICES or name.startswith("kda."):
        return [i for i, kind in enumerate(kinds) if kind == "kda"]
    if name in MLA_MATRICES or name.startswith("mla."):
        return [i for i, kind in enumerate(kinds) if kind == "mla"]
    if name in MOE_MATRICES or name.startswith("moe."):
        return [i for i in range(p.layers) if p.config.is_moe(i)]
    if name in DENSE_MATRICES:
        return [i for i in range(p.layers) if not p.config.is_moe(i)]
    raise ValueError(f"name: expected a stacked operand, got {name!r}")


def packed_shapes(p: Plan) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every packed operand.

    Matrices ``[layers that have it, *Tiling.packed_shape]``; a sublayer's vectors ``[2 layers + 1, D]``.
    A share also has ``moe.place``: which of the rank's experts serves a row's choice, -1 for none.
    """
    out: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in (*KDA_MATRICES, *MLA_MATRICES, *MOE_MATRICES, *DENSE_MATRICES):
        if count := len(layers_with(p, name)):
            out[name] = ("bfloat16", (count, *tiling(p, name).packed_shape))
    out["lm_head"] = ("bfloat16", (1, *tiling(p, "lm_head").packed_shape))
    out["gain"] = ("bfloat16", (2 * p.layers + 1, p.D))
    out["direction"] = ("float32", (2 * p.layers + 1, p.D))
    if kda := len(layers_with(p, "kda.")):
        channels = p.kda_heads * (2 * p.K + p.V)
        out |= {
            "kda.taps": ("float32", (kda, p.config.short_conv_kernel_size, channels)),
            "kda.rate": ("float32", (kda, p.kda_heads)),
            "kda.dt_bias": ("float32", (kda, p.kda_heads * p.K)),
            "kda.o_norm": ("float32", (kda, p.V)),
        }
    if mla := len(layers_with(p, "mla.")):
        out |= {"mla.q_gain": ("bfloat16", (mla, p.Q)), "mla.kv_gain": ("bfloat16", (mla, p.C))}
    if moe := len(layers_with(p, "moe.")):
        out |= {"moe.bias": ("float32", (moe, p.E)), "moe.gain": ("bfloat16", (moe, p.L))}
        if p.ways > 1:
            out["moe.place"] = ("int32", (moe, MAX_BATCH, p.E))
    return out


def _matrix(p: Plan, layer: Mapping[str, Any], i: int, name: str) -> Any:
    if name in KDA_MATRICES or name in MLA_MATRICES:
        return attention_matrices(layer["self_attn"], p.config.layer_types[i], p)[name]
    return ffn_matrices(layer)[name]


def _f32(x: Any) -> Any:
    return x.astype(np.float32)


def _direction(params: Mapping[str, Any], p: Plan, sub: int) -> Any:
    """norm x proj of the mixture before a sublayer; sublayer 0 has one source and is given none."""
    if sub == 2 * p.layers:
        return _f32(params["output_attn_res_norm"]) * _f32(params["output_attn_res_proj"][0])
    name = "mlp_res" if sub % 2 else "self_attention_res"
    layer = params["layers"][sub // 2]
    if sub == 0:
        return _f32(layer["input_layernorm"]) * 0
    return _f32(layer[f"{name}_norm"]) * _f32(layer[f"{name}_proj"][0])


def _gain(params: Mapping[str, Any], p: Plan, sub: int) -> Any:
    if sub == 2 * p.layers:
        return params["norm"]
    return params["layers"][sub // 2]["post_attention_layernorm" if sub % 2 else "input_layernorm"]


def packed_vector(params: Mapping[str, Any], p: Plan, name: str, i: int) -> Any:
    """Row of a stacked vector operand: of sublayer ``i`` for gain and direction, else of layer ``i``."""
    if name == "gain":
        return _gain(params, p, i)
    if name == "direction":
        return _direction(params, p, i)
    layer = params["layers"][i]
    if name.startswith("moe."):
        moe = layer["block_sparse_moe"]
        if name == "moe.place":
            return moe["place"]
        return _f32(moe["e_score_correction_bias"]) if name == "moe.bias" else moe["routed_expert_norm"]
    attn = layer["self_attn"]
    if name == "kda.taps":
        taps = [_f32(attn[f"{part}_conv1d"])[:, 0].T for part in "qkv"]
        return (jnp if isinstance(taps[0], jax.Array) else np).concatenate(taps, axis=1)
    if name == "kda.rate":
        return (jnp if isinstance(attn["A_log"], jax.Array) else np).exp(_f32(attn["A_log"]))
    source = {
        "kda.dt_bias": "dt_bias",
        "kda.o_norm": "o_norm",
        "mla.q_gain": "q_a_layernorm",
        "mla.kv_gain": "kv_a_layernorm",
    }[name]
    return _f32(attn[source]) if name.startswith("kda.") else attn[source]


def is_matrix(name: str) -> bool:
    return "." not in name and name not in ("gain", "direction")


def packed_part(params: Mapping[str, Any], p: Plan, name: str, place: int) -> Any:
    """What belongs at ``place`` of a packed operand's stack."""
    if name == "lm_head":
        return pack(params["lm_head"])
    if is_matrix(name):
        layer = layers_with(p, name)[place]
        return pack(_matrix(p, params["layers"][layer], layer, name))
    i = place if name in ("gain", "direction") else layers_with(p, name)[place]
    return packed_vector(params, p, name, i)


# -- the tree -----------------------------------------------------------------------------------


def expert_operands(moe: Mapping[str, Any]) -> dict[str, Any]:
    """The expert arrays of a layer, in the checkpoint's layout.

    Raises:
        NotImplementedError: experts that are not MXFP4.
    """
    out = {}
    for name in ("w1", "w3", "w2"):
        leaf = moe["experts"][name]
        if not isinstance(leaf, MXFP4):
            raise NotImplementedError(f"experts.{name}: the megakernel reads MXFP4 experts, got floats")
        out |= {name: leaf.codes, f"{name}_scale": leaf.scales}
    return out


def abstract_operands(
    p: Plan, counters: int, records: int, program: int, cache_rows: int, trace: int = 0
) -> dict[str, Any]:
    """Shapes and dtypes of the kernel's operands, the tree that the call takes.

    ``packed`` is :func:`packed_shapes`; ``experts`` and ``state`` are tuples over layers (experts: over
    LatentMoE layers); a share has, in place of the embedding, ``take``, what the exchange before left, and
    its ``rank``; one that exchanges in the kernel also ``peers``, the low and high words of the addresses of
    all ranks' mailboxes. ``work``, ``fault``, state arrays, ``lengths`` and ``status`` are aliased to
    results.
    """

    def of(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    c, B = p.config, p.B
    state = []
    for kind in c.layer_types:
        if kind == "kda":
            taps = c.short_conv_kernel_size - 1
            channels = p.kda_heads * (2 * p.K + p.V)
            state.append(
                {
                    "S": of("float32", B, p.kda_heads, p.V, p.K),
                    "conv": of("bfloat16", B, taps, channels),
                }
            )
        else:
            state.append({"cache": of("bfloat16", B, cache_rows, p.C + p.R)})
    experts = []
    for _ in layers_with(p, "moe."):
        one = {}
        for name, rows, columns in (("w1", p.F, p.L), ("w3", p.F, p.L), ("w2", p.L, p.F)):
            one[name] = of("uint8", p.held, rows, columns // 2)
            one[f"{name}_scale"] = of("uint8", p.held, rows, columns // 32)
        experts.append(one)
    if p.ways > 1:
        own = {"take": of("float32", B, p.exchanged), "rank": of("int32", 1)}
        own |= {"peers": of("int32", p.ways, 2)} if p.peers else {}
    else:
        own = {"embed": of("bfloat16", p.config.vocab_size, p.D)}
    return {
        "packed": {name: of(dtype, *shape) for name, (dtype, shape) in packed_shapes(p).items()},
        "experts": tuple(experts),
        **own,
        "state": tuple(state),
        "lengths": of("int32", B),
        "status": of("int32", B),
        "work": of("int32", workspace_bytes(p, counters, trace) // 4),
        "fault": of("int32", FAULT_WORDS),
        "epoch": of("int32", 1),
        "tokens": of("int32", B),
        "active": of("int32", B),
        "max_length": of("int32", 1),
        "records": of("int32", records, 32),
        "program": of("int32", program),
        "starts": of("int32", p.sms + 1),
    }


FLAGS_AT = 8
"""Words of a mailbox before its flags; word 0 counts the launches of its rank."""
FLAG_WORDS = 8
"""Words from one flag to the next: a flag for every rank and SM."""


def mailbox_data(p: Plan) -> int:
    """Word of a mailbox at which what the peers give begins: float32 [2, ranks, B, columns], in turn."""
    return _even(FLAGS_AT + FLAG_WORDS * p.ways * p.sms, 64)


def mailbox_words(p: Plan) -> int:
    """int32 words of a rank's mailbox, zeros before the first launch; it outlives every step."""
    return mailbox_data(p) + 2 * p.ways * p.B * p.exchanged


ALIASED = ("state", "lengths", "status", "work", "fault")
"""Operands that the call updates in place."""


def abstract_results(p: Plan, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes and dtypes of the call's results: the aliased operands, and three new ones, of a share four.

    ``give`` is what a share's segment gives to the exchange behind it. ``epoch`` is the operand plus one,
    in a buffer of its own: an SM that starts late must not see it.
    """

    def of(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    out = {name: operands[name] for name in ALIASED}
    if p.ways > 1 and not p.peers:
        out["give"] = of("float32", p.B, p.exchanged)
    return out | {
        "logits": of("float32", p.B, p.W),
        "token": of("int32", p.B),
        "epoch": of("int32", 1),
    }


__all__ = [
    "ALIASED",
    "COUNTER_WORDS",
    "FAULT_FIELDS",
    "FAULT_TIMEOUT",
    "FAULT_WORDS",
    "FLAGS_AT",
    "FLAG_WORDS",
    "Field",
    "abstract_operands",
    "abstract_results",
    "expert_operands",
    "is_matrix",
    "layers_with",
    "mailbox_data",
    "mailbox_words",
    "packed_part",
    "packed_shapes",
    "workspace",
    "workspace_bytes",
]
