"""A K3 small enough to train in seconds, and a text for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from k3jax.checkpoints.training.settings import Settings, nano_config


def small_config() -> Any:
    """Three layers (KDA, KDA, MLA), two of them LatentMoE with 8 experts, hidden 64."""
    return dataclasses.replace(
        nano_config(),
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=("kda", "kda", "mla"),
        intermediate_size=64,
        attn_res_block_size=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        kda_head_dim=32,
        kda_v_head_dim=32,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        max_position_embeddings=1024,
    )


def small_settings(**changes: Any) -> Settings:
    """A run of 24 steps in float32 that saves every 6th."""
    start = Settings(
        batch=4,
        length=48,
        steps=18,
        quantised_steps=6,
        warmup=4,
        rate=1e-2,
        dtype="float32",
        save_every=6,
        log_every=4,
    )
    return dataclasses.replace(start, **changes)


def small_runs() -> list[np.ndarray]:
    """Two stretches of tokens with words in them, uint16."""
    rng = np.random.default_rng(0)
    words = [b"light ", b"and ", b"the ", b"waters ", b"were ", b"deep ", b"upon ", b"day "]
    text = b"".join(words[i] for i in rng.integers(0, len(words), 1500))
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    return [tokens[:3000], tokens[3000:]]
