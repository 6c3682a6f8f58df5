"""Parameter and byte arithmetic of a K3 configuration, from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .config import K3Config

BF16, F32 = 2, 4
MXFP4_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class StepBytes(Mapping[str, int]):
    """Bytes one decode step moves. A mapping as well: ``b["weights"] == b.weights``."""

    weights: int
    """Stored bytes of every weight behind the step, one embedding row per sequence."""
    unused: int
    """Part of ``weights`` that no formula reads: padding of A_log, layer 0's attention mix."""
    state_read: int
    state_write: int
    cache_read: int
    cache_write: int

    @property
    def total(self) -> int:
        """What an ideal step reads and writes: everything but ``unused``."""
        return (
            self.weights
            - self.unused
            + self.state_read
            + self.state_write
            + self.cache_read
            + self.cache_write
        )

    def __getitem__(self, key: str) -> int:
        if key not in self.__dataclass_fields__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Parameters of one part of the model by stored type."""

    bf16: int = 0
    f32: int = 0

    @property
    def count(self) -> int:
        return self.bf16 + self.f32

    @property
    def bytes(self) -> int:
        return BF16 * self.bf16 + F32 * self.f32


def _kda(c: K3Config) -> _Part:
    d, k, v = c.hidden_size, c.kda_key_size, c.kda_value_size
    bf16 = 2 * k * d + 2 * v * d + d * v  # q, k; v, g; o
    bf16 += c.kda_head_dim * d + k * c.kda_head_dim + c.kda_num_heads * d  # f_a, f_b, b
    f32 = c.short_conv_kernel_size * c.conv_channels + c.kda_a_log_size + k + c.kda_v_head_dim
    return _Part(bf16, f32)


def _mla(c: K3Config) -> _Part:
    d, n = c.hidden_size, c.num_attention_heads
    values = n * c.v_head_dim
    bf16 = c.q_lora_rank * (d + 1) + n * c.qk_head_dim * c.q_lora_rank
    bf16 += (c.kv_lora_rank + c.qk_rope_head_dim) * d + c.kv_lora_rank
    bf16 += n * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    return _Part(bf16 + 2 * values * d)  # output gate and output projection


def _norms(c: K3Config) -> _Part:
    return _Part(6 * c.hidden_size)


def _dense(c: K3Config) -> _Part:
    return _Part(3 * c.hidden_size * c.intermediate_size)


def _moe(c: K3Config) -> _Part:
    """A LatentMoE without its routed experts."""
    d, latent = c.hidden_size, c.routed_expert_hidden_size
    bf16 = c.num_experts * d + 2 * latent * d + latent + 3 * d * c.shared_intermediate_size
    return _Part(bf16, c.num_experts)


def expert_params(c: K3Config) -> int:
    """Parameters of one routed expert."""
    return 3 * c.routed_expert_hidden_size * c.moe_intermediate_size


def expert_bytes(c: K3Config) -> int:
    """Stored bytes of one routed expert: 4-bit codes and one scale byte per 32 of them."""
    n = expert_params(c)
    return n // 2 + n // MXFP4_BLOCK


def _layers(c: K3Config) -> Iterator[_Part]:
    """Every part of every layer but the routed experts."""
    for layer, kind in enumerate(c.layer_types):
        yield _kda(c) if kind == "kda" else _mla(c)
        yield _norms(c)
        yield _moe(c) if c.is_moe(layer) else _dense(c)


def _head(c: K3Config) -> _Part:
    """lm_head, final norm and the final AttnRes mix."""
    return _Part(c.vocab_size * c.hidden_size + 3 * c.hidden_size)


def count_parameters(c: K3Config, *, active: bool = False) -> int:
    experts = c.num_experts_per_token if active else c.num_experts
    total = sum(p.count for p in _layers(c)) + _head(c).count
    total += c.num_moe_layers * experts * expert_params(c)
    return total if active else total + c.vocab_size * c.hidden_size


def _dense_bytes(c: K3Config) -> int:
    """Stored bytes of everything but the embedding table and the routed experts."""
    return sum(p.bytes for p in _layers(c)) + _head(c).bytes


def checkpoint_bytes(c: K3Config) -> int:
    experts = c.num_moe_layers * c.num_experts * expert_bytes(c)
    return _dense_bytes(c) + BF16 * c.vocab_size * c.hidden_size + experts


def recurrent_bytes(c: K3Config) -> int:
    """Length-independent state of one sequence: KDA states (float32) and conv taps (bf16)."""
    state = F32 * c.kda_num_heads * c.kda_head_dim * c.kda_v_head_dim
    conv = BF16 * (c.short_conv_kernel_size - 1) * c.conv_channels
    return c.num_kda_layers * (state + conv)


def cache_row_bytes(c: K3Config) -> int:
    """MLA latent cache of one token over all MLA layers, bf16."""
    return BF16 * c.num_mla_layers * (c.kv_lora_rank + c.qk_rope_head_dim)


def _check_batch(batch: int, length: int) -> None:
    if batch < 1:
        raise ValueError(f"batch: expected at least 1, got {batch}")
    if length < 0:
        raise ValueError(f"length: expected at least 0, got {length}")


def state_bytes(c: K3Config, batch: int, length: int) -> int:
    _check_batch(batch, length)
    return batch * (recurrent_bytes(c) + length * cache_row_bytes(c))


def expected_distinct_experts(c: K3Config, batch: int) -> float:
    """Expected distinct experts of one layer when ``batch`` tokens route uniformly."""
    if batch == 1:
        return float(c.num_experts_per_token)
    e = c.num_experts
    return e * (1.0 - (1.0 - c.num_experts_per_token / e) ** batch)


def _check_distinct(c: K3Config, distinct_experts: Sequence[float | int] | np.ndarray) -> None:
    for number in distinct_experts:
        if not 0 <= number <= c.num_experts:
            raise ValueError(f"distinct_experts: expected 0..{c.num_experts} per layer, got {number!r}")


def step_bytes(
    c: K3Config,
    batch: int,
    length: int,
    distinct_experts: float | int | Sequence[float | int] | np.ndarray | None,
) -> StepBytes:
    _check_batch(batch, length)
    if distinct_experts is None:
        total_experts = c.num_moe_layers * expected_distinct_experts(c, batch)
    elif isinstance(distinct_experts, (int, float, Real)):
        total_experts = c.num_moe_layers * float(distinct_experts)
        _check_distinct(c, [float(distinct_experts)])
    else:
        if len(distinct_experts) != c.num_moe_layers:
            raise ValueError(
                f"distinct_experts: expected a number or {c.num_moe_layers} numbers (one per MoE layer), "
                f"got {len(distinct_experts)}"
            )
        total_experts = float(sum(distinct_experts))
        _check_distinct(c, distinct_experts)
    weights = _dense_bytes(c) + batch * BF16 * c.hidden_size
    weights += round(total_experts * expert_bytes(c))
    # Layer 0 mixes a single source, so its two AttnRes vectors are never read.
    unused = 2 * c.hidden_size * BF16
    unused += c.num_kda_layers * (c.kda_a_log_size - c.kda_num_heads) * F32
    state = batch * recurrent_bytes(c)
    row = cache_row_bytes(c)
    return StepBytes(weights, unused, state, state, batch * length * row, batch * row)
