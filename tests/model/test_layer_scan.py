"""The loop over repeating layers computes what the unrolled layers compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from k3jax import K3Config
from k3jax.layer_scan import Loop, find_loop, prefer_scan
from k3jax.model import decode_step, prefill
from k3jax.random_params import random_params
from support.compare import relative_rms

RELEASE = K3Config.preset("k3")
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "kda_num_heads": 2, "kda_head_dim": 8, "kda_v_head_dim": 12, "kda_a_log_size": 2, "num_experts": 8,
    "num_experts_per_token": 2, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def test_the_release_loops_over_its_period_of_four() -> None:
    """93 layers: one dense, then K K M, K K K M ..., a last M; the best loop covers 88 of them."""
    assert find_loop(RELEASE) == Loop(first=1, period=4, groups=22)
    assert not prefer_scan(RELEASE), "a model whose step time counts must be unrolled"


def test_a_model_without_repeats_has_no_loop() -> None:
    config = dataclasses.replace(RELEASE, **SMALL, num_hidden_layers=2, layer_types=("kda", "mla"))
    assert find_loop(config) is None


@pytest.mark.parametrize("block", [3, 4])
def test_loop_and_unrolled_layers_agree(block: int) -> None:
    """Snapshots fall inside and between the loop's groups (block 3 does not divide period 4)."""
    # Dense layers: a routing flip from rounding would hide a real difference behind chaos.
    config = dataclasses.replace(
        RELEASE, **SMALL, num_hidden_layers=10, layer_types=RELEASE.layer_types[:10],
        attn_res_block_size=block, first_k_dense_replace=9,
    )  # fmt: skip
    loop = find_loop(config)
    assert loop is not None
    assert loop.groups >= 2
    params = random_params(config, 0, "float32")
    tokens = np.random.default_rng(0).integers(0, 64, (2, 9))
    run = jax.jit(prefill, static_argnames=("config", "scan_layers", "logits"))
    step = jax.jit(decode_step, static_argnames=("config", "scan_layers"))
    want, want_state = run(params, tokens[:, :8], config=config, scan_layers=False)
    got, got_state = run(params, tokens[:, :8], config=config, scan_layers=True)
    # float32 rounding of another order of fusions, amplified over ten layers: 1e-6 measured.
    assert relative_rms(got, want) < 2e-5
    for a, b in zip(jax.tree.leaves(got_state), jax.tree.leaves(want_state), strict=True):
        assert a.shape == b.shape
        assert relative_rms(a, b) < 2e-5 or not np.any(np.asarray(b))
    want_step, _ = step(params, want_state, tokens[:, 8], config=config, scan_layers=False)
    got_step, _ = step(params, want_state, tokens[:, 8], config=config, scan_layers=True)
    assert relative_rms(got_step, want_step) < 2e-5
