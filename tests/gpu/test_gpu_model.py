"""The XLA path on an NVIDIA GPU: the oracle, the shipped checkpoint, and K3's full widths."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.layers.ffn import dense_ffn
from k3jax.layers.kda import kda_step
from k3jax.layers.mla import mla_step
from k3jax.layers.moe import latent_moe
from k3jax.model import decode_step
from support import oracle
from support.compare import assert_argmax_equal, assert_close
from support.oracle_checks import case_a
from support.random_k3 import params_from_tensors

pytestmark = pytest.mark.gpu

BFLOAT16_SUBLAYER = 2e-2
BFLOAT16_WHY = "bfloat16 rounds at 2^-9 = 2e-3 at every one of a sublayer's four to eight rounding points"


def test_float32_logits_on_the_gpu_equal_the_oracle() -> None:
    """NUM-07: TF32 products would miss this tolerance by far."""
    config = case_a().config
    model = k3jax.Model(params_from_tensors(config, oracle.tensors(), "float32"), config)
    assert next(iter(model.params["norm"].devices())).platform == "gpu"
    tokens = oracle.reference()["input_ids"]
    why = "one-ulp noise on the weights alone moves the logits by 0.9-1.6e-5"
    logits, _ = model.prefill(tokens)
    assert_close("logits", logits, oracle.reference()["full_logits"], 5e-5, why)
    assert_argmax_equal("logits", logits, oracle.reference()["full_logits"])
    _, state = model.prefill(tokens[:, :70], logits="none")
    for i in range(3):
        step, state = model.decode_step(tokens[:, 70 + i], state)
        assert_close(f"decode step {i}", step, oracle.reference()["step_logits"][:, i], 5e-5, why)


def test_greedy_text_of_the_shipped_checkpoint_is_that_of_the_cpu() -> None:
    prompt = "And God said unto"
    on_gpu = k3jax.load("nano", dtype="float32", progress=False).generate(prompt, max_new_tokens=100)
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = k3jax.load("nano", dtype="float32", progress=False).generate(prompt, max_new_tokens=100)
    assert on_gpu.tokens == on_cpu.tokens
    np.testing.assert_allclose(on_gpu.logprobs[0], on_cpu.logprobs[0], atol=1e-3)


@pytest.fixture(scope="module")
def full_width() -> Any:
    """(params, config, taps of one decode step of three rows from empty states) at K3's widths, bf16."""
    config = k3jax.K3Config.preset("k3-slice", num_layers=4, num_experts=64)
    config = dataclasses.replace(config, vocab_size=8192, bos_token_id=None, eos_token_id=None)
    params = k3jax.random_model(config, seed=1).params

    @jax.jit
    def step(params: Any, state: k3jax.State, tokens: jax.Array) -> Any:
        taps: dict[str, jax.Array] = {}
        logits, state = decode_step(params, state, tokens, config=config, tap=taps.__setitem__)
        return taps, logits

    state = k3jax.Model(params, config).init_state(3, 256)
    taps, logits = step(params, state, jnp.array([5, 77, 8191]))
    assert np.isfinite(np.asarray(logits)).all()
    return params, config, taps


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda a: a if a.dtype == jnp.uint8 else a.astype(jnp.float32), tree)


@pytest.mark.parametrize("layer", range(4))
def test_full_width_sublayers_in_bfloat16_equal_float32_on_the_same_input(
    full_width: Any, layer: int
) -> None:
    """KDA with the dense FFN, KDA and MLA with LatentMoE; expert ids are those that bfloat16 chose."""
    params, config, taps = full_width
    at, p = f"layers.{layer}", params["layers"][layer]
    x = taps[f"{at}.attn_in"].astype(jnp.float32)
    state = k3jax.Model(params, config).init_state(3, 256)
    wide_state = _wide(state.layers[layer])
    on = jnp.ones(3, bool)
    if config.layer_types[layer] == "kda":
        want, _ = kda_step(_wide(p["self_attn"]), x, wide_state, on, config)
    else:
        want, _ = mla_step(_wide(p["self_attn"]), x, wide_state["cache"], state.lengths, on, config)
    assert_close(f"{at} attention", taps[f"{at}.attn_out"], want, BFLOAT16_SUBLAYER, BFLOAT16_WHY)
    x = taps[f"{at}.mlp_in"].astype(jnp.float32)
    if config.is_moe(layer):
        moe = jax.jit(lambda p, x, ids: latent_moe(p, x, config, ids))
        want = moe(_wide(p["block_sparse_moe"]), x, taps[f"{at}.topk_ids"])
    else:
        want = dense_ffn(_wide(p["mlp"]), x, config)
    assert_close(f"{at} feed-forward", taps[f"{at}.mlp_out"], want, BFLOAT16_SUBLAYER, BFLOAT16_WHY)
