"""The library against the recorded oracle: end to end in float32, and every sublayer by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import model
from support import oracle
from support import oracle_checks as checks
from support.compare import assert_argmax_equal, assert_close
from support.oracle_checks import Subject, case_a

END_TO_END = 5e-5
WHY = "one-ulp noise on the weights alone moves the logits by 0.9-1.6e-5"
PREFILL, STEPS, TOTAL = 70, 6, 76
LAYERS = range(oracle.NUM_LAYERS)
TAPS = ("attn_mix", "attn_in", "attn_out", "mlp_mix", "mlp_in", "mlp_out", "prefix_sum")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return case_a()


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """Logits and states of a pass over all 76 tokens, and of a prefill of 70 and six decode steps."""

    full: jax.Array
    after_full: Any
    prefill: jax.Array
    after_prefill: Any
    steps: jax.Array
    after_steps: Any
    first_step: dict[str, jax.Array]


@pytest.fixture(scope="module")
def run(subject: Subject) -> EndToEnd:
    config, params = subject.config, subject.params
    tokens = oracle.reference()["input_ids"]

    @jax.jit
    def prefill(params: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        return model.prefill(params, tokens, config=config, lengths=lengths, max_length=128)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        taps: dict[str, jax.Array] = {}
        logits, state = model.decode_step(params, state, tokens, config=config, tap=taps.__setitem__)
        return logits, state, taps

    full, after_full = prefill(params, tokens, np.full(2, TOTAL, np.int32))
    short, after_prefill = prefill(params, tokens, np.full(2, PREFILL, np.int32))
    state, logits, first = after_prefill, [], {}
    for t in range(PREFILL, TOTAL):
        out, state, taps = step(params, state, tokens[:, t])
        first = first or taps
        logits.append(out)
    return EndToEnd(full, after_full, short, after_prefill, jnp.stack(logits, 1), state, first)


# -- end to end -------------------------------------------------------------------------


def test_float32_logits_of_the_whole_sequence_match(run: EndToEnd) -> None:
    want = oracle.reference()["full_logits"]
    assert run.full.dtype == jnp.float32
    assert_close("logits", run.full, want, END_TO_END, WHY)
    assert_argmax_equal("logits", run.full, want)


def test_float32_logits_of_a_shorter_prefill_match_and_padding_is_zero(run: EndToEnd) -> None:
    want = oracle.reference()["full_logits"][:, :PREFILL]
    assert_close("logits", run.prefill[:, :PREFILL], want, END_TO_END, WHY)
    assert not np.asarray(run.prefill[:, PREFILL:]).any()


def test_float32_cached_decode_steps_match(run: EndToEnd) -> None:
    want = oracle.reference()["step_logits"]
    assert run.steps.dtype == jnp.float32
    for i in range(STEPS):
        assert_close(f"logits of step {i}", run.steps[:, i], want[:, i], END_TO_END, WHY)
    assert_argmax_equal("step logits", run.steps, want)
    np.testing.assert_array_equal(np.asarray(run.after_steps.lengths), [TOTAL, TOTAL])
    assert not np.asarray(run.after_steps.status).any()


@pytest.mark.parametrize("phase", ["cache_prefill", "cache_final"])
def test_caches_after_prefill_and_after_the_steps_match(run: EndToEnd, phase: str) -> None:
    state, length = (run.after_prefill, PREFILL) if phase == "cache_prefill" else (run.after_steps, TOTAL)
    for layer in LAYERS:
        got = state.layers[layer]
        if layer in oracle.MLA_LAYERS:
            rows = np.asarray(got["cache"])
            checks.check_latent_rows(layer, rows[:, :length], phase, END_TO_END, WHY)
            assert not rows[:, length:].any(), f"rows past the last token of layer {layer} were written"
        else:
            want = oracle.reference()[f"{phase}/L{layer}/S_vk"]
            assert_close(f"KDA state of layer {layer}", got["S"], want, END_TO_END, WHY)
            want = oracle.conv_history(layer, phase)
            assert_close(f"KDA taps of layer {layer}", got["conv"], want, END_TO_END, WHY)


def test_states_after_one_pass_match_the_float64_record(run: EndToEnd) -> None:
    record = oracle.float64()
    assert_close("logits", run.full, record["logits"], END_TO_END, WHY)
    for layer in LAYERS:
        got = run.after_full.layers[layer]
        if layer in oracle.MLA_LAYERS:
            rows = got["cache"][:, :TOTAL]
            assert_close(f"latent rows of layer {layer}", rows, record[f"kv_L{layer}"], END_TO_END, WHY)
        else:
            assert_close(f"KDA state of layer {layer}", got["S"], record[f"S_L{layer}"], END_TO_END, WHY)


def test_every_intermediate_of_a_captured_prompt_matches(subject: Subject) -> None:
    tokens = oracle.reference()["input_ids"][:, :PREFILL]
    got = jax.jit(lambda p, t: model.capture(p, t, config=subject.config))(subject.params, tokens)
    for layer in LAYERS:
        names = (*TAPS, "routed_latent_sum") if layer in oracle.MOE_LAYERS else TAPS
        for name in names:
            want = oracle.tap(layer, name)
            assert_close(f"{name} of layer {layer}", got[f"layers.{layer}.{name}"], want, END_TO_END, WHY)
    for name in ("output_attn_res", "final_norm"):
        assert_close(name, got[name], oracle.reference()[f"prefill/{name}"], END_TO_END, WHY)
    assert_close("logits", got["logits"], oracle.reference()["full_logits"][:, :PREFILL], END_TO_END, WHY)


def test_every_intermediate_of_the_first_decode_step_matches(run: EndToEnd) -> None:
    for layer in LAYERS:
        names = (*TAPS, "routed_latent_sum") if layer in oracle.MOE_LAYERS else TAPS
        for name in names:
            want = oracle.tap(layer, name, "step0")[:, 0]
            assert_close(
                f"{name} of layer {layer}", run.first_step[f"layers.{layer}.{name}"], want, END_TO_END, WHY
            )
    for name in ("output_attn_res", "final_norm"):
        assert_close(name, run.first_step[name], oracle.reference()[f"step0/{name}"][:, 0], END_TO_END, WHY)


# -- every sublayer on its recorded input -----------------------------------------------


@pytest.mark.parametrize("layer", oracle.KDA_LAYERS)
def test_kda_matches_from_recorded_inputs(subject: Subject, layer: int) -> None:
    checks.check_kda_prefill(subject, layer)
    checks.check_kda_step(subject, layer)


@pytest.mark.parametrize("layer", oracle.MLA_LAYERS)
def test_mla_matches_from_recorded_inputs(subject: Subject, layer: int) -> None:
    checks.check_mla_prefill(subject, layer)
    checks.check_mla_step(subject, layer)
    checks.check_latent_norms(subject, layer)


def test_the_dense_ffn_matches_from_recorded_inputs(subject: Subject) -> None:
    checks.check_dense(subject)


@pytest.mark.parametrize("phase", ["prefill", "step0"])
@pytest.mark.parametrize("layer", oracle.MOE_LAYERS)
def test_routing_matches_from_recorded_inputs(subject: Subject, layer: int, phase: str) -> None:
    checks.check_routing(subject, layer, phase)


@pytest.mark.parametrize("phase", ["prefill", "step0"])
@pytest.mark.parametrize("layer", oracle.MOE_LAYERS)
def test_the_latent_moe_matches_from_recorded_inputs(subject: Subject, layer: int, phase: str) -> None:
    checks.check_moe(subject, layer, phase)


@pytest.mark.parametrize("layer", LAYERS)
def test_mixtures_and_norms_match_from_recorded_sources(subject: Subject, layer: int) -> None:
    checks.check_mixtures(subject, layer)
    checks.check_norms(subject, layer)


def test_the_output_head_matches_from_recorded_sources(subject: Subject) -> None:
    checks.check_head(subject)
