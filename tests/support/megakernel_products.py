"""The products of a skinny GEMM as stages of the megakernel: the stage with the same epilogue.

=========  ==========================================================================================
KDA_IN     the six inputs of a KDA layer, q | k | v | g | f_a | b, one matrix
ROUND      LATENT_DOWN, or rows of MLA_IN where the experts' latent cannot have so many
WIDE       ROUTER: float32 logits
SITU       GATE_UP of the shared expert
PARTIAL    SHARED_DOWN: float32 sums, in two pieces of the columns where there are several chunks
=========  ==========================================================================================

Products of one sublayer that read the same activations are one model's, and their stages share its SMs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from k3jax.custom_calls.decode_megakernel.instructions import Op
from k3jax.custom_calls.decode_megakernel.stages import shared_pieces, sublayer
from k3jax.pallas.skinny_gemm import Epilogue, Product
from support.megakernel_stage import OutsideThePlanError, Stage, Stages, bfloat16, small_config

KDA_WIDTH = 128
LATENT_ROWS = 64
"""Rows of LATENT_DOWN come in multiples of it."""


@dataclasses.dataclass(frozen=True)
class Role:
    """The stage that a product is.

    Attributes:
        fields: sizes of the model in which the product has its rows and columns.
        put: given the model and the activations, sets them and the product's weights.
        get: the product's result.
    """

    op: Op
    fields: Mapping[str, Any]
    put: Callable[[Stages, Any], None]
    get: Callable[[Stages], Any]

    @property
    def stage(self) -> Stage:
        return self.op, sublayer(self.op, 0)


def _router(weight: Any) -> Role:
    def put(s: Stages, x: Any) -> None:
        _put_input(s, x)
        s.set(s.layer()["block_sparse_moe"], gate=weight)

    fields = {"hidden_size": weight.shape[1], "num_experts": len(weight)}
    return Role(Op.ROUTER, fields, put, lambda s: s.get("rlogit").T)


def _gate_up(gate: Any, up: Any) -> Role:
    def put(s: Stages, x: Any) -> None:
        _put_input(s, x)
        s.set(s.layer()["block_sparse_moe"]["shared_experts"], gate_proj=gate, up_proj=up)

    fields = {"hidden_size": gate.shape[1], "moe_intermediate_size": len(gate)}
    return Role(Op.GATE_UP, fields, put, lambda s: bfloat16(s.get("act.shared").T))


def _latent_down(weight: Any) -> Role:
    def put(s: Stages, x: Any) -> None:
        _put_input(s, x)
        s.set(s.layer()["block_sparse_moe"], routed_expert_down_proj=weight)

    fields = {"hidden_size": weight.shape[1], "routed_expert_hidden_size": len(weight)}
    return Role(Op.LATENT_DOWN, fields, put, lambda s: bfloat16(s.get("latent").T))


def _mla_in(weight: Any) -> Role:
    def put(s: Stages, x: Any) -> None:
        _put_input(s, x)
        s.set(s.layer()["self_attn"], q_a_proj=weight)

    fields = {"hidden_size": weight.shape[1], "layer_types": ("mla",), "q_lora_rank": len(weight)}
    return Role(Op.MLA_IN, fields, put, lambda s: bfloat16(s.get("mla.proj")[: len(weight)].T))


def _shared_down(weight: Any) -> Role:
    def put(s: Stages, x: Any) -> None:
        s.put_columns("act.shared", x)
        s.set(s.layer()["block_sparse_moe"]["shared_experts"], down_proj=weight)

    def get(s: Stages) -> np.ndarray:
        groups = s.get(f"shared.{shared_pieces(s.plan) - 1}")
        return groups.reshape(len(weight), s.plan.B).T[None]

    fields = {"hidden_size": len(weight), "moe_intermediate_size": weight.shape[1]}
    return Role(Op.SHARED_DOWN, fields, put, get)


def _role(product: Product) -> Role:
    weights = product.weights
    match product.epilogue:
        case Epilogue.WIDE:
            return _router(*weights)
        case Epilogue.SITU:
            return _gate_up(*weights)
        case Epilogue.PARTIAL:
            return _shared_down(*weights)
        case Epilogue.BEST:
            raise OutsideThePlanError("the head's stage is an op of its own: support.megakernel_ops.head")
        case Epilogue.ROUND:
            return _mla_in(*weights) if len(weights[0]) % LATENT_ROWS else _latent_down(*weights)


def _put_input(s: Stages, x: Any) -> None:
    """``x`` as the normed mixture of layer 0's sublayers."""
    ones = np.ones(s.plan.D)
    s.set(s.layer(), input_layernorm=ones, post_attention_layernorm=ones)
    s.put_normed(x)


def _together(products: Sequence[Product], roles: Sequence[Role]) -> list[list[int]]:
    """Indices of products that are stages of one model."""
    groups: list[list[int]] = []
    for i, (product, role) in enumerate(zip(products, roles, strict=True)):
        for group in groups:
            first = group[0]
            one_input = products[first].x == product.x and roles[first].stage[1] == role.stage[1]
            if one_input and role.op not in {roles[j].op for j in group}:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def products(xs: Sequence[Any], products: Sequence[Product]) -> list[Any]:
    """As :func:`k3jax.pallas.skinny_gemm.skinny_gemm`; a PARTIAL result has one slot."""
    if _is_kda(products):
        return _kda(xs[products[0].x], products)
    roles = [_role(product) for product in products]
    results: dict[int, Any] = {}
    for group in _together(products, roles):
        x = xs[products[group[0]].x]
        fields = {name: value for i in group for name, value in roles[i].fields.items()}
        s = Stages(small_config(**fields), len(x))
        for i in group:
            roles[i].put(s, x)
        s.execute(*(roles[i].stage for i in group))
        results |= {i: roles[i].get(s) for i in group}
    return [results[i] for i in range(len(products))]


def _is_kda(products: Sequence[Product]) -> bool:
    """q, k, v and g of N heads, then f_a and b."""
    rows = [len(product.weights[0]) for product in products]
    plain = all(product.epilogue is Epilogue.ROUND and product.x == products[0].x for product in products)
    return plain and len(rows) == 6 and rows == [KDA_WIDTH * rows[5]] * 4 + [KDA_WIDTH, rows[5]]


def _kda(x: Any, products: Sequence[Product]) -> list[np.ndarray]:
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    weights = {name: product.weights[0] for name, product in zip(names, products, strict=True)}
    s = Stages(small_config(hidden_size=x.shape[1], kda_num_heads=len(weights["b_proj"])), len(x))
    _put_input(s, x)
    s.set(s.layer()["self_attn"], **weights)
    s.execute((Op.KDA_IN, 0))
    sizes = [len(weights[name]) for name in ("f_a_proj", "b_proj", "q_proj", "k_proj", "v_proj")]
    f_a, b, *rest = np.split(bfloat16(s.get("kda.proj").T), np.cumsum(sizes), axis=1)
    return [*rest, f_a, b]


__all__ = ["products"]
