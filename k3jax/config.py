"""Architecture of a Kimi K3 text model, as one frozen dataclass.

Field names are those of the release's ``config.json``; axis letters are those of
:mod:`k3jax.axes`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import _hf_config
from .sizes import StepBytes, count_parameters, step_bytes
from .sizes import checkpoint_bytes as _checkpoint_bytes
from .sizes import state_bytes as _state_bytes

LayerType = Literal["kda", "mla"]

# Options of the config file that select another function than K3's. The value K3 has
# is the only one implemented; any other is refused instead of being ignored.
_ONLY_VALUE: Mapping[str, Any] = {
    "hidden_act": "situ",
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "kda_use_full_rank_gate": True,
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "short_conv_kernel_size": 4,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class K3Config:
    """Every architecture field of a K3 text model.

    There are no defaults for structural fields: make one with :meth:`preset`,
    :meth:`from_pretrained`, or ``dataclasses.replace`` of either.

    Raises:
        ValueError: a field is out of range, or asks for a function K3 does not have.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...]
    """Attention kind of each layer, first to last: "kda" or "mla"."""
    intermediate_size: int
    """Width of the dense FFN."""
    first_k_dense_replace: int
    """How many leading layers have the dense FFN; the others have a LatentMoE."""
    attn_res_block_size: int
    """Layers per block of the block attention residuals (AttnRes)."""

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the key piece shared by all heads. K3 has no position encoding: it is not rotated."""
    v_head_dim: int

    kda_num_heads: int
    kda_head_dim: int
    """Key (and query) size of a KDA head; also the rank of the decay projection."""
    kda_v_head_dim: int
    """Value size of a KDA head; the release has it equal to ``kda_head_dim``."""
    kda_gate_lower_bound: float
    """Lower bound of the log decay (negative)."""
    kda_a_log_size: int
    """Stored length of ``A_log``; entries past ``kda_num_heads`` are zero and unused."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    """Width of the latent space in which the routed experts live."""
    moe_renormalize: bool
    routed_scaling_factor: float

    activation_situ_beta: float
    activation_situ_linear_beta: float
    rms_norm_eps: float
    max_position_embeddings: int

    latent_norm_eps: float = 1e-6
    """Epsilon of q_a_layernorm and kv_a_layernorm: a class default of the released code."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    """Stop token or tokens: the top level's inside the vocabulary, else the text config's, else None."""
    pad_token_id: int | None = None
    initializer_range: float = 0.02

    hidden_act: str = "situ"
    moe_router_activation_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    latent_moe_use_norm: bool = True
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    kda_use_full_rank_gate: bool = True
    tie_word_embeddings: bool = False
    moe_layer_freq: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    num_nextn_predict_layers: int = 0
    short_conv_kernel_size: int = 4

    ignored_keys: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Keys of the config file that this library does not know and did not use."""

    def __post_init__(self) -> None:
        for name, only in _ONLY_VALUE.items():
            value = getattr(self, name)
            if value != only:
                raise ValueError(f"K3Config.{name}: only {only!r} is implemented, got {value!r}")
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"K3Config.layer_types: expected num_hidden_layers={self.num_hidden_layers} entries, "
                f"got {len(self.layer_types)}"
            )
        if unknown := sorted(set(self.layer_types) - {"kda", "mla"}):
            raise ValueError(f"K3Config.layer_types: expected 'kda' or 'mla', got {unknown}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"K3Config.{name}: expected a positive integer, got {value!r}")
        for name in _POSITIVE_REAL:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value < math.inf:
                raise ValueError(f"K3Config.{name}: expected a positive finite number, got {value!r}")
        if not isinstance(self.moe_renormalize, bool):
            raise ValueError(
                f"K3Config.moe_renormalize: expected true or false, got {self.moe_renormalize!r}"
            )
        dense = self.first_k_dense_replace
        if not isinstance(dense, int) or isinstance(dense, bool) or not 0 <= dense <= self.num_hidden_layers:
            raise ValueError(
                f"K3Config.first_k_dense_replace: expected 0..{self.num_hidden_layers}, got {dense!r}"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"K3Config.num_experts_per_token: expected at most num_experts={self.num_experts}, "
                f"got {self.num_experts_per_token}"
            )
        if self.kda_a_log_size < self.kda_num_heads:
            raise ValueError(
                f"K3Config.kda_a_log_size: expected at least kda_num_heads={self.kda_num_heads}, "
                f"got {self.kda_a_log_size}"
            )
        bound = self.kda_gate_lower_bound
        if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not -87.0 < bound < 0.0:
            raise ValueError(
                "K3Config.kda_gate_lower_bound: expected a number in (-87, 0); an unbounded "
                f"(softplus) gate is another model and not implemented, got {bound!r}"
            )
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, tuple) and name == "eos_token_id" else (value,):
                if token is not None and (type(token) is not int or token < 0):
                    raise ValueError(f"K3Config.{name}: expected a token id or None, got {token!r}")
        for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
            if getattr(self, name) % 32:
                raise ValueError(
                    f"K3Config.{name}: expected a multiple of 32 (an MXFP4 block), got {getattr(self, name)}"
                )

    # -- making one -------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str, *, num_layers: int | None = None, num_experts: int | None = None) -> K3Config:
        """A named architecture.

        Args:
            name: "k3", the release; or "k3-slice", the first ``num_layers`` entries of the
                release's layer lists at full width.
            num_layers: k3-slice only, 1..93 (default 4).
            num_experts: k3-slice only, experts kept per layer, 16..896 (default all).

        Raises:
            ValueError: unknown name, or a number out of range.
        """
        if name == "k3":
            if num_layers is not None or num_experts is not None:
                raise ValueError("preset 'k3' takes no num_layers or num_experts; use 'k3-slice'")
            return cls(**_hf_config.RELEASE)
        if name == "k3-slice":
            release = cls(**_hf_config.RELEASE)
            layers = _integer("num_layers", 4 if num_layers is None else num_layers)
            experts = _integer("num_experts", release.num_experts if num_experts is None else num_experts)
            if not 1 <= layers <= release.num_hidden_layers:
                raise ValueError(f"num_layers: expected 1..{release.num_hidden_layers}, got {layers}")
            if not release.num_experts_per_token <= experts <= release.num_experts:
                raise ValueError(
                    f"num_experts: expected {release.num_experts_per_token}..{release.num_experts}, "
                    f"got {experts}"
                )
            return dataclasses.replace(
                release,
                num_hidden_layers=layers,
                layer_types=release.layer_types[:layers],
                num_experts=experts,
            )
        raise ValueError(f"preset: expected 'k3' or 'k3-slice', got {name!r}")

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> K3Config:
        """Read the nested ``config.json`` of a checkpoint in the release's format.

        Args:
            path: a checkpoint directory or a ``config.json``.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a structural key is missing (all missing ones are named), or has a
                value that is not implemented.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"no config.json at {file}")
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}: not valid JSON: {error}") from error
        return cls.from_hf_dict(tree, where=str(file))

    @classmethod
    def from_hf_dict(cls, tree: Any, *, where: str = "config") -> K3Config:
        """As :meth:`from_pretrained`, from a parsed ``config.json`` (nested or text part alone)."""
        return cls(**_hf_config.read(tree, where=where))

    def to_hf_dict(self) -> dict[str, Any]:
        """The ``config.json`` tree of this architecture, nested as in the release."""
        return _hf_config.write(self)

    # -- structure --------------------------------------------------------------------

    def is_moe(self, layer: int) -> bool:
        """Whether layer ``layer`` (0-based) has a LatentMoE rather than the dense FFN."""
        return layer >= self.first_k_dense_replace

    def starts_block(self, layer: int) -> bool:
        """Whether an AttnRes block starts at ``layer``: the running sum is snapshot there."""
        return layer % self.attn_res_block_size == 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The stop tokens of ``eos_token_id`` that are in the vocabulary: none, one or several."""
        eos = self.eos_token_id
        listed = eos if isinstance(eos, tuple) else () if eos is None else (eos,)
        return tuple(token for token in listed if token < self.vocab_size)

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_kda_layers(self) -> int:
        return self.layer_types.count("kda")

    @property
    def num_mla_layers(self) -> int:
        return self.layer_types.count("mla")

    @property
    def kda_key_size(self) -> int:
        """All heads' keys: kda_num_heads * kda_head_dim."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def kda_value_size(self) -> int:
        """All heads' values: kda_num_heads * kda_v_head_dim."""
        return self.kda_num_heads * self.kda_v_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the KDA short convolution, q | k | v."""
        return 2 * self.kda_key_size + self.kda_value_size

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared expert, one MLP for all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    # -- sizes ------------------------------------------------------------------------

    def param_count(self) -> int:
        """Parameters of the text model as stored (a packed MXFP4 code is one parameter)."""
        return count_parameters(self)

    def active_param_count(self) -> int:
        """Parameters behind one token: chosen experts only, head in, embedding table out."""
        return count_parameters(self, active=True)

    def checkpoint_bytes(self) -> int:
        """Bytes of the text model in the release's format, MXFP4 experts and bf16."""
        return _checkpoint_bytes(self)

    def state_bytes(self, batch: int, length: int) -> int:
        """Bytes of decode state for ``batch`` sequences of ``length`` cached tokens."""
        return _state_bytes(self, batch, length)

    def bytes_per_step(
        self,
        batch: int,
        length: int = 0,
        distinct_experts: float | int | Sequence[float | int] | np.ndarray | None = None,
    ) -> StepBytes:
        """Bytes that one decode step must move, by kind.

        Args:
            batch: rows decoded together.
            length: tokens already cached in each row.
            distinct_experts: distinct experts read per MoE layer: one number for all, or one
                per layer. None is the expectation under uniform routing,
                ``E * (1 - (1 - A / E) ** batch)``.
        """
        return step_bytes(self, batch, length, distinct_experts)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    return operator.index(value)


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "attn_res_block_size",
    "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "kda_num_heads", "kda_head_dim", "kda_v_head_dim", "kda_a_log_size", "num_experts",
    "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "routed_expert_hidden_size",
    "max_position_embeddings",
)  # fmt: skip
_POSITIVE_REAL = (
    "routed_scaling_factor", "activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps",
    "latent_norm_eps",
)  # fmt: skip

__all__ = ["K3Config", "LayerType", "StepBytes"]
