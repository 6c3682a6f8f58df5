"""Architecture and training settings of the shipped checkpoint."""

from __future__ import annotations

import dataclasses

from k3jax.config import K3Config

from .text import END_OF_TEXT


def nano_config() -> K3Config:
    """K3 with every part and few of each: 11.7 M parameters over bytes.

    Widths are multiples of 64, head sizes those of K3, so that kernels built for K3 take it.
    """
    return dataclasses.replace(
        K3Config.preset("k3"),
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=9,
        layer_types=tuple("mla" if i in (3, 7, 8) else "kda" for i in range(9)),
        intermediate_size=512,
        attn_res_block_size=3,
        num_attention_heads=2,
        q_lora_rank=128,
        kv_lora_rank=128,
        kda_num_heads=2,
        kda_a_log_size=2,
        num_experts=32,
        num_experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=64,
        routed_expert_hidden_size=128,
        max_position_embeddings=32_768,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
        pad_token_id=None,
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run trains. The rate of a step is :func:`learning_rate`."""

    seed: int = 0
    batch: int = 32
    length: int = 1024
    """Tokens of a training window; a window starts anywhere in the text, with empty states."""
    steps: int = 1700
    """Steps with float experts."""
    quantised_steps: int = 200
    """Steps after them with experts rounded to MXFP4 in the forward pass."""
    warmup: int = 150
    decay: float = 0.6
    """Part of the float steps, at their end, over which the rate falls to ``floor`` of its peak."""
    floor: float = 0.05
    rate: float = 4e-3
    quantised_rate: float = 2e-4
    """Rate at the first quantised step; it falls to 0 at the last."""
    weight_decay: float = 0.4
    hidden: float = 0.2
    """Part of the input bytes replaced by HIDDEN."""
    bias_rate: float = 2e-3
    """Step of the router's correction bias at the peak rate; it falls with the rate."""
    clip: float = 1.0
    dtype: str | None = None
    """Compute dtype: None for the released dtypes (bfloat16), or "float32"."""
    save_every: int = 300
    log_every: int = 50

    @property
    def total_steps(self) -> int:
        return self.steps + self.quantised_steps


def learning_rate(s: Settings, step: int) -> float:
    """Rate of a step (0-based): linear warm-up, constant, linear decay; then the quantised steps' decay."""
    if step >= s.steps:
        return s.quantised_rate * (1 - (step - s.steps) / s.quantised_steps)
    falling = max(1, round(s.decay * s.steps))
    left = min(1.0, (s.steps - step) / falling)
    return s.rate * min(1.0, (step + 1) / max(1, s.warmup)) * (s.floor + (1 - s.floor) * left)
