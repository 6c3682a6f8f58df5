"""The whole step of the Pallas path: in the interpreter it is the XLA path's, on a GPU it lowers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import K3Config
from k3jax.layers.ffn import dense_ffn
from k3jax.layers.kda import kda_step
from k3jax.layers.mla import mla_step
from k3jax.layers.moe import latent_moe
from k3jax.model import abstract_params
from k3jax.pallas import fit
from k3jax.pallas import step as pallas_step
from k3jax.pallas.sublayers import Rows, dense_sublayer, kda_sublayer, mla_sublayer, moe_sublayer
from k3jax.state import STATUS_BAD_TOKEN, STATUS_FULL, abstract_state
from support.compare import assert_close
from support.pallas_ops import launches, lower_for_cuda, reset_interpreter, sds
from support.tiny_model import assert_bit_equal, assert_row_bit_equal

SUBLAYER = 1e-2
SUBLAYER_WHY = "the same bfloat16 roundings (2^-9 each) of float32 sums in another order"
STEP = 2e-2
STEP_WHY = "the sublayers' differences through all layers and the head"
KERNELS = {
    "k3_attn_res": 13,
    "k3_skinny_gemm": 18,
    "kda": 3,
    "mla_absorb": 1,
    "mla_attend": 1,
    "mla_merge": 1,
    "k3_router": 3,
    "experts_gate_up": 3,
    "experts_down": 3,
}
"""Launches of the first four layers (KDA dense, 2 KDA, MLA) and the head, by the step's own table."""


@pytest.fixture(autouse=True)
def _clean_interpreter() -> Iterator[None]:
    yield
    reset_interpreter()


@functools.cache
def nano() -> Any:
    return k3jax.load("nano", progress=False, implementation="xla")


def test_generate_with_nano_gives_the_xla_tokens() -> None:
    model = nano()
    interpreted = k3jax.Model(model.params, model.config, model.tokenizer, implementation="pallas-interpret")
    prompt = "And God said unto"
    want = model.generate(prompt, max_new_tokens=3)
    got = interpreted.generate(prompt, max_new_tokens=3)
    assert got.tokens == want.tokens
    # The first token is prefill's, XLA's under every implementation: bit for bit.
    assert got.logprobs[0][0] == want.logprobs[0][0]
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=0.1, err_msg="bfloat16 noise of the logits")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_long_generation_of_several_rows_gives_the_xla_tokens() -> None:
    model = nano()
    interpreted = k3jax.Model(model.params, model.config, model.tokenizer, implementation="pallas-interpret")
    prompts = ["And God said unto", "In the", "The king of Israel went down"]
    want = model.generate(prompts, max_new_tokens=12)
    got = interpreted.generate(prompts, max_new_tokens=12)
    assert got.tokens == want.tokens


# -- one sublayer, the same input --------------------------------------------------------


BATCH = 2


@functools.cache
def sublayer_inputs() -> tuple[Any, Any, Any, Any]:
    """x bfloat16 [8, D], a state of two rows of which the second does not run, which run, and Rows."""
    tokens = np.arange(BATCH * 5).reshape(BATCH, 5) + 65
    _, state = nano().prefill(tokens, max_length=256, logits="none")
    x = jnp.asarray(np.random.default_rng(7).standard_normal((8, 256)), jnp.bfloat16)
    run = jnp.array([True, False])
    return x, state, run, Rows(run.astype(jnp.int32), state.lengths)


def added(deltas: Any) -> np.ndarray:
    """What the next residual adds: every partial sum rounded, then added in turn; running rows."""
    total, *others = (d.sum(axis=0).astype(jnp.bfloat16) for d in deltas)
    for other in others:
        total = total + other
    return np.asarray(total)[:1]


@pytest.mark.parametrize(("layer", "kind"), [(0, "kda"), (3, "mla")])
def test_attention_equals_the_layers_on_the_same_input(layer: int, kind: str) -> None:
    x, state, run, rows = sublayer_inputs()
    p, before, config = nano().params["layers"][layer]["self_attn"], state.layers[layer], nano().config
    sublayer = kda_sublayer if kind == "kda" else mla_sublayer
    deltas, after = jax.jit(lambda: sublayer(p, x, before, rows, config, True))()
    if kind == "kda":
        out, want = jax.jit(lambda: kda_step(p, x[:BATCH], before, run, config))()
    else:
        out, cache = jax.jit(lambda: mla_step(p, x[:BATCH], before["cache"], state.lengths, run, config))()
        want = {"cache": cache}
    assert_close(f"{kind} output", added(deltas), np.asarray(out)[:1], SUBLAYER, SUBLAYER_WHY)
    for name, leaf in want.items():
        assert_close(f"{kind} {name}", after[name], leaf, SUBLAYER, SUBLAYER_WHY)
        assert_bit_equal(after[name][1], before[name][1], "row that does not run")
        assert not np.array_equal(np.asarray(after[name][0]), np.asarray(before[name][0]))


def test_the_dense_network_equals_the_layer_on_the_same_input() -> None:
    x, *_ = sublayer_inputs()
    p, config = nano().params["layers"][0]["mlp"], nano().config
    deltas = jax.jit(lambda: dense_sublayer(p, x, config, True))()
    want = jax.jit(lambda: dense_ffn(p, x[:BATCH], config))()
    assert_close("dense FFN", added(deltas), np.asarray(want)[:1], SUBLAYER, SUBLAYER_WHY)


def test_the_latent_moe_equals_the_layer_on_the_same_input() -> None:
    x, _, _, rows = sublayer_inputs()
    p, config = nano().params["layers"][1]["block_sparse_moe"], nano().config
    deltas, _ = jax.jit(lambda: moe_sublayer(p, x, rows, config, True))()
    want = jax.jit(lambda: latent_moe(p, x[:BATCH], config))()
    assert_close("LatentMoE", added(deltas), np.asarray(want)[:1], SUBLAYER, SUBLAYER_WHY)


# -- rows of a step ----------------------------------------------------------------------


@functools.cache
def small() -> Any:
    """Two layers, KDA with the dense FFN and MLA with a LatentMoE, one head each, 200 words."""
    config = dataclasses.replace(
        nano().config, num_hidden_layers=2, layer_types=("kda", "mla"), hidden_size=128, vocab_size=200,
        intermediate_size=128, kda_num_heads=1, kda_a_log_size=1, num_attention_heads=1, num_experts=4,
        num_experts_per_token=2, attn_res_block_size=1, eos_token_id=None, max_position_embeddings=512,
    )  # fmt: skip
    return k3jax.random_model(config, seed=3, implementation="xla")


@functools.cache
def small_step() -> tuple[Any, Any, Any, Any]:
    """(state before, pallas results, xla results): rows that run, are off, are full, have a bad token."""
    model = small()
    _, state = model.prefill(np.arange(20).reshape(4, 5), lengths=[5, 3, 5, 2], max_length=5, logits="none")
    tokens, active = jnp.array([7, 8, 9, 200]), np.array([False, True, True, True])
    state = dataclasses.replace(state, lengths=jnp.array([4, 3, 5, 2], jnp.int32))
    results = []
    for name in ("pallas-interpret", "xla"):
        run = jax.jit(k3jax.decode_step, static_argnames=("config", "implementation"))
        results.append(run(model.params, state, tokens, active, config=model.config, implementation=name))
    return state, results[0], results[1], model


def test_rows_that_do_not_run_keep_their_state_and_say_why() -> None:
    before, (logits, after), (_, expected), _ = small_step()
    assert not np.asarray(logits[0]).any()
    assert np.isnan(np.asarray(logits[2:])).all()
    assert after.status.tolist() == [0, 0, STATUS_FULL, STATUS_BAD_TOKEN] == expected.status.tolist()
    assert after.lengths.tolist() == [4, 4, 5, 2]
    for row in (0, 2, 3):
        arrays = (dataclasses.replace(s, status=before.status) for s in (after, before))
        got, want = arrays
        assert_row_bit_equal(got, row, want)


def test_a_row_that_runs_gets_the_xla_logits_and_state() -> None:
    _, (logits, after), (want, expected), _ = small_step()
    assert_close("logits", logits[1], want[1], STEP, STEP_WHY)
    for i, (got, layer) in enumerate(zip(after.layers, expected.layers, strict=True)):
        for name, leaf in layer.items():
            assert_close(f"layer {i}, {name}", got[name][1], leaf[1], STEP, STEP_WHY)


# -- what is refused ---------------------------------------------------------------------


def test_all_reasons_come_at_once() -> None:
    config = dataclasses.replace(
        small().config, kda_head_dim=64, kda_v_head_dim=64, num_experts_per_token=3, q_lora_rank=96
    )
    text = "; ".join(fit.supports(config, jax.devices("cpu")[0], 9, jnp.float32))
    for part in ("compute capability 9.0, got cpu", "1..8 rows, got 9", "got float32", "K = V = 128, got 64"):
        assert part in text
    assert "mla layer 1: x 0: expected K in multiples of 64, got 96" in text


def test_shapes_of_the_release_and_of_nano_are_taken() -> None:
    for config in (K3Config.preset("k3"), nano().config):
        for batch in (1, 8):
            assert fit.supports(config, batch=batch, interpret=True) == ()


def test_pallas_on_a_cpu_raises_with_reasons() -> None:
    model = small()
    with pytest.raises(NotImplementedError, match=r"expected an NVIDIA GPU .* got cpu"):
        k3jax.decode_step(
            model.params, model.init_state(1, 256), [1], config=model.config, implementation="pallas"
        )


def test_float_parameters_are_refused_with_their_reasons() -> None:
    model = k3jax.random_model(small().config, dtype="float32", implementation="xla")
    with pytest.raises(NotImplementedError, match=r"expected bfloat16 parameters .* got float32"):
        k3jax.decode_step(
            model.params, model.init_state(1, 256), [1], config=model.config,
            implementation="pallas-interpret",
        )  # fmt: skip
    trained = k3jax.K3(small().config, rngs=k3jax_rngs()).params()
    reasons = fit.supports(small().config, params=trained, interpret=True)
    assert "layer 1, experts w1: expected packed MXFP4, got bfloat16" in reasons


def k3jax_rngs() -> Any:
    from flax import nnx

    return nnx.Rngs(0)


def test_the_interpreter_is_refused_where_it_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setattr(jax, "local_devices", lambda **_: [None])
    (reason,) = fit.interpreter_reasons()
    assert "expected at least 4 host threads, XLA has 2" in reason
    monkeypatch.setenv("NPROC", "4")
    assert fit.interpreter_reasons() == ()


def test_scales_outside_the_exact_range_are_named() -> None:
    model = small()
    fit.check_scales(model.params)
    moe = model.params["layers"][1]["block_sparse_moe"]
    w3 = moe["experts"]["w3"]
    wrong = dataclasses.replace(w3, scales=w3.scales.at[1, 2, 3].set(129))
    layer = {
        **model.params["layers"][1],
        "block_sparse_moe": {**moe, "experts": {**moe["experts"], "w3": wrong}},
    }
    with pytest.raises(NotImplementedError, match=r"layer 1: .* got 129 at expert 1, row 2, block 3"):
        fit.check_scales({**model.params, "layers": [model.params["layers"][0], layer]})


# -- on a GPU, as far as a CPU can tell ----------------------------------------------------


@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_the_full_width_step_lowers_for_cuda_with_the_launches_it_lists(batch: int) -> None:
    config = K3Config.preset("k3-slice", num_layers=4)
    text = lower_for_cuda(
        lambda params, state, tokens, live: pallas_step.step(params, state, tokens, live, config),
        abstract_params(config),
        abstract_state(config, batch, 8192, jnp.bfloat16),
        sds((batch,), jnp.int32),
        sds((batch,), jnp.bool_),
    )
    assert launches(text) == KERNELS
    assert "dot_general" not in text, "a product was left to XLA"
