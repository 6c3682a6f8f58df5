"""Checks of the library's sublayers against the recorded oracle, each on its recorded input.

The oracle tests run them on the library as it is; the mutation tests run the same functions on a
library with one thing wrong and expect them to fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.layers import attn_res, ffn, kda, mla, moe
from k3jax.layers.norm import rms_norm
from k3jax.model import lm_head
from k3jax.state import cache_rows
from support import oracle
from support.compare import assert_close, assert_routing_equal
from support.random_k3 import params_from_tensors
from support.reference_mla import expand_rows, mla_layer

SUBLAYER = 5e-6
WHY = "one float32 sublayer against another on the same input: 1e-7 to 1.6e-6 measured"
WEIGHT = 1e-6  # of a routing weight, absolute: float32 rounding of the logits, 9e-8 measured
# Row 0, token 48 of layer 8: ranks 4 and 5 differ by 4e-6 in the record, which is rounding noise.
TIE_LAYER, TIE_TOKEN, TIE_MARGIN = 8, 48, 1e-5

Taps = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Subject:
    """Parameters, their configuration, and the library's sublayers compiled for them.

    A new Subject traces the library anew, and so sees what a test has patched.
    """

    params: Mapping[str, Any]
    config: K3Config
    kda_prefill: Callable[..., Any]
    kda_step: Callable[..., Any]
    mla_prefill: Callable[..., Any]
    mla_step: Callable[..., Any]
    moe: Callable[..., Any]
    route: Callable[..., Any]
    dense: Callable[..., Any]

    @classmethod
    def of(cls, params: Mapping[str, Any], config: K3Config) -> Subject:
        def latent_moe(p: Any, x: jax.Array, ids: jax.Array) -> tuple[jax.Array, Taps]:
            taps: Taps = {}
            return moe.latent_moe(p, x, config, ids, taps.__setitem__), taps

        return cls(
            params,
            config,
            jax.jit(lambda p, x, state, counts: kda.kda_prefill(p, x, state, counts, config)),
            jax.jit(lambda p, x, state, active: kda.kda_step(p, x, state, active, config)),
            jax.jit(
                lambda p, x, cache, starts, counts: mla.mla_prefill(p, x, cache, starts, counts, config, 1)
            ),
            jax.jit(lambda p, x, cache, lengths, active: mla.mla_step(p, x, cache, lengths, active, config)),
            jax.jit(latent_moe),
            jax.jit(lambda p, x: moe.route(p, x, config)),
            jax.jit(lambda p, x: ffn.dense_ffn(p, x, config)),
        )

    @property
    def dtype(self) -> Any:
        return self.params["embed_tokens"].dtype

    def layer(self, layer: int) -> Any:
        return self.params["layers"][layer]

    # -- sublayers on numpy inputs; everything in the compute dtype -------------------

    def cast(self, x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, self.dtype)

    def run_kda(self, layer: int, x: np.ndarray, state: Mapping[str, np.ndarray] | None = None) -> Any:
        """(output, new state) of normed x: [B,T,D] in a prefill, [B,D] in a step."""
        batch, c = x.shape[0], self.config
        if state is None:
            state = {
                "S": np.zeros((batch, c.kda_num_heads, c.kda_v_head_dim, c.kda_head_dim)),
                "conv": np.zeros((batch, 3, c.conv_channels)),
            }
        arrays = {"S": jnp.asarray(state["S"], jnp.float32), "conv": self.cast(state["conv"])}
        p = self.layer(layer)["self_attn"]
        if x.ndim == 3:
            return self.kda_prefill(p, self.cast(x), arrays, jnp.full((batch,), x.shape[1], jnp.int32))
        return self.kda_step(p, self.cast(x), arrays, jnp.ones((batch,), bool))

    def run_mla(self, layer: int, x: np.ndarray, past: np.ndarray | None = None) -> Any:
        """(output, latent rows up to the last token) of normed x after the latent rows ``past``."""
        batch, c = x.shape[0], self.config
        width = c.kv_lora_rank + c.qk_rope_head_dim
        past = np.zeros((batch, 0, width)) if past is None else past
        starts, tokens = past.shape[1], x.shape[1] if x.ndim == 3 else 1
        rows = np.zeros((batch, cache_rows(starts + tokens), width))
        rows[:, :starts] = past
        p, before = self.layer(layer)["self_attn"], jnp.full((batch,), starts, jnp.int32)
        if x.ndim == 3:
            counts = jnp.full((batch,), tokens, jnp.int32)
            out, cache = self.mla_prefill(p, self.cast(x), self.cast(rows), before, counts)
        else:
            out, cache = self.mla_step(p, self.cast(x), self.cast(rows), before, jnp.ones((batch,), bool))
        return out, cache[:, : starts + tokens]

    def run_moe(self, layer: int, x: np.ndarray, ids: np.ndarray) -> Any:
        """(output, taps) of the LatentMoE with forced expert ids."""
        return self.moe(self.layer(layer)["block_sparse_moe"], self.cast(x), jnp.asarray(ids, jnp.int32))


def case_a(dtype: str | None = "float32") -> Subject:
    """The oracle's model as the library runs it."""
    return Subject.of(params_from_tensors(oracle.config(), oracle.tensors(), dtype), oracle.config())


# -- KDA --------------------------------------------------------------------------------


def check_kda_prefill(subject: Subject, layer: int) -> None:
    out, state = subject.run_kda(layer, oracle.tap(layer, "attn_in"))
    assert_close(f"KDA output of layer {layer}", out, oracle.tap(layer, "attn_out"), SUBLAYER, WHY)
    want = oracle.reference()[f"cache_prefill/L{layer}/S_vk"]
    assert_close(f"KDA state of layer {layer}", state["S"], want, SUBLAYER, WHY)
    assert_close(f"KDA taps of layer {layer}", state["conv"], oracle.conv_history(layer), SUBLAYER, WHY)


def check_kda_step(subject: Subject, layer: int) -> None:
    before = {
        "S": oracle.reference()[f"cache_prefill/L{layer}/S_vk"],
        "conv": oracle.conv_history(layer),
    }
    out, state = subject.run_kda(layer, oracle.tap(layer, "attn_in", "step0")[:, 0], before)
    want = oracle.tap(layer, "attn_out", "step0")[:, 0]
    assert_close(f"KDA step output of layer {layer}", out, want, SUBLAYER, WHY)
    np.testing.assert_array_equal(np.asarray(state["conv"])[:, :-1], before["conv"][:, 1:])


# -- MLA --------------------------------------------------------------------------------


def check_mla_prefill(subject: Subject, layer: int) -> None:
    out, rows = subject.run_mla(layer, oracle.tap(layer, "attn_in"))
    assert_close(f"MLA output of layer {layer}", out, oracle.tap(layer, "attn_out"), SUBLAYER, WHY)
    check_latent_rows(layer, np.asarray(rows), "cache_prefill", SUBLAYER, WHY)


def check_latent_rows(layer: int, rows: np.ndarray, phase: str, tol: float, why: str) -> None:
    """Latent rows [B,S,C+R] against the record, which keeps expanded keys and values."""
    w = oracle.weights()["layers"][layer]["self_attn"]
    for name, got in zip(("key", "value"), expand_rows(w, oracle.arch(), rows), strict=True):
        want = oracle.reference()[f"{phase}/L{layer}/{name}"].transpose(0, 2, 1, 3)
        assert_close(f"MLA {name} of layer {layer}", got, want, tol, why)


def check_mla_step(subject: Subject, layer: int) -> None:
    past = oracle.float64()[f"kv_L{layer}"][:, :70]
    out, rows = subject.run_mla(layer, oracle.tap(layer, "attn_in", "step0")[:, 0], past)
    want = oracle.tap(layer, "attn_out", "step0")[:, 0]
    # The cached rows come from a float64 run of the whole model, the input from the float32 one.
    assert_close(f"MLA step output of layer {layer}", out, want, 5e-5, "inputs of two runs, 1e-5 apart")
    np.testing.assert_array_equal(np.asarray(rows)[:, :70], past.astype(np.float32))


def check_latent_norms(subject: Subject, layer: int) -> None:
    """Inputs so small that the latent norms' epsilon shows: its mean squares are near 1e-4."""
    x = 0.01 * oracle.tap(layer, "attn_in").astype(np.float32)
    w = oracle.weights()["layers"][layer]["self_attn"]
    want, state, _ = mla_layer(w, oracle.arch(), x.astype(np.float64))
    out, rows = subject.run_mla(layer, x)
    assert_close(f"MLA latent rows of layer {layer}, small input", rows, state["cache"], SUBLAYER, WHY)
    assert_close(f"MLA output of layer {layer}, small input", out, want, SUBLAYER, WHY)


# -- FFN --------------------------------------------------------------------------------


def check_dense(subject: Subject, layer: int = 0) -> None:
    for phase in ("prefill", "step0"):
        got = subject.dense(subject.layer(layer)["mlp"], subject.cast(oracle.tap(layer, "mlp_in", phase)))
        want = oracle.tap(layer, "mlp_out", phase)
        assert_close(f"dense FFN output of layer {layer} in {phase}", got, want, SUBLAYER, WHY)


def check_routing(subject: Subject, layer: int, phase: str = "prefill") -> None:
    p, x = subject.layer(layer)["block_sparse_moe"], oracle.tap(layer, "mlp_in", phase)
    ids, weights = subject.route(p, subject.cast(x))
    w = oracle.weights()["layers"][layer]["block_sparse_moe"]
    logits = x.astype(np.float64) @ w["gate"].T
    selection = 1 / (1 + np.exp(-logits)) + w["e_score_correction_bias"]
    ids, weights, want, want_w = (
        np.asarray(a)
        for a in (ids, weights, oracle.tap(layer, "topk_ids", phase), oracle.tap(layer, "topk_w", phase))
    )
    tie = np.zeros(want.shape[:2], bool)
    if layer == TIE_LAYER and phase == "prefill":
        tie[0, TIE_TOKEN] = True
    for rows, margin in ((~tie, 0.0), (tie, TIE_MARGIN)):
        assert_routing_equal(
            ids[rows],
            weights[rows],
            want[rows],
            want_w[rows],
            selection[rows],
            WEIGHT,
            tie_margin=margin,
            name=f"routing of layer {layer} in {phase}",
        )


def check_moe(subject: Subject, layer: int, phase: str = "prefill") -> None:
    """The LatentMoE with the recorded choice of experts."""
    ids = oracle.tap(layer, "topk_ids", phase)
    out, taps = subject.run_moe(layer, oracle.tap(layer, "mlp_in", phase), ids)
    where = f"of layer {layer} in {phase}"
    np.testing.assert_array_equal(np.asarray(taps["topk_ids"]), ids)
    want = oracle.tap(layer, "routed_latent_sum", phase)
    assert_close(f"routed latent sum {where}", taps["routed_latent_sum"], want, SUBLAYER, WHY)
    assert_close(f"MoE output {where}", out, oracle.tap(layer, "mlp_out", phase), SUBLAYER, WHY)


# -- residuals, norms, head -------------------------------------------------------------


def sources(layer: int, before: str, phase: str = "prefill") -> list[np.ndarray]:
    """Recorded AttnRes sources before layer ``layer``'s "attn" or "mlp" sublayer, or the "output"."""
    if before == "output":
        return [*_blocks(layer, phase), oracle.tap(layer, "prefix_sum", phase)]
    embed = oracle.reference()[f"{phase}/embed"]
    pre = embed if layer == 0 else oracle.tap(layer - 1, "prefix_sum", phase)
    if before == "attn":
        return [*(_blocks(layer - 1, phase) if layer else []), pre]
    start = layer % oracle.arch().block_size == 0
    a = oracle.tap(layer, "attn_out", phase)
    return [*_blocks(layer, phase), a if start else pre + a]


def _blocks(layer: int, phase: str) -> list[np.ndarray]:
    return list(np.moveaxis(oracle.tap(layer, "blocks", phase), 2, 0))


def _mix(subject: Subject, p: Any, name: str, found: list[np.ndarray]) -> jax.Array:
    arrays = [subject.cast(s) for s in found]
    return attn_res.mix(arrays, p[f"{name}_norm"], p[f"{name}_proj"], subject.config.rms_norm_eps)


def check_mixtures(subject: Subject, layer: int) -> None:
    p = subject.layer(layer)
    if layer:
        got = _mix(subject, p, "self_attention_res", sources(layer, "attn"))
        assert_close(f"attention mixture of layer {layer}", got, oracle.tap(layer, "attn_mix"), SUBLAYER, WHY)
    got = _mix(subject, p, "mlp_res", sources(layer, "mlp"))
    assert_close(f"FFN mixture of layer {layer}", got, oracle.tap(layer, "mlp_mix"), SUBLAYER, WHY)


def check_norms(subject: Subject, layer: int) -> None:
    for norm, tap in (("input_layernorm", "attn"), ("post_attention_layernorm", "mlp")):
        x = subject.cast(oracle.tap(layer, f"{tap}_mix"))
        got = rms_norm(x, subject.layer(layer)[norm], subject.config.rms_norm_eps)
        assert_close(f"{norm} of layer {layer}", got, oracle.tap(layer, f"{tap}_in"), SUBLAYER, WHY)


def check_head(subject: Subject) -> None:
    p, record = subject.params, oracle.reference()
    got = _mix(subject, p, "output_attn_res", sources(oracle.NUM_LAYERS - 1, "output"))
    assert_close("output mixture", got, record["prefill/output_attn_res"], SUBLAYER, WHY)
    x = subject.cast(record["prefill/output_attn_res"])
    got = rms_norm(x, p["norm"], subject.config.rms_norm_eps)
    assert_close("final norm", got, record["prefill/final_norm"], SUBLAYER, WHY)
    got = lm_head(p, subject.cast(record["prefill/final_norm"]))
    assert_close("logits of the final norm", got, record["full_logits"][:, :70], SUBLAYER, WHY)
