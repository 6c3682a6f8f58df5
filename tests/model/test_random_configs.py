"""The library in float32 against the float64 reference over small random architectures.

Odd depths, AttnRes blocks that do not divide the depth, last two layers MLA, key and value heads
of different sizes, one-token prompts, several dense layers or none: what one recorded case cannot
show. Rows are ragged; the reference runs each row by itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import model
from k3jax.config import K3Config
from k3jax.quant import MXFP4
from k3jax.state import State
from support.compare import assert_close, assert_routing_equal, relative_rms
from support.random_k3 import params_from_tensors, random_config, random_tensors
from support.reference import Run, forward
from support.reference_weights import Arch, weight_tree

TOL = 5e-5
WHY = "float32 against float64 through up to seven layers: below 1e-5 measured"
WEIGHT_NOISE = 1.2e-7  # relative, 2^-23: one unit in the last place of float32
STATE_NOISE = 1e-6  # relative; float32 states differ by 1e-6 to 3e-6
NO_TIE = 2e-5  # smallest gap between a chosen and a refused expert; float32 noise is below 5e-6


def with_noise(tree: Any, size: float) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x * (1 + size * rng.standard_normal(x.shape)), tree)


@dataclasses.dataclass(frozen=True)
class Case:
    """A random model, as the library and as the reference take it."""

    config: K3Config
    params: Any
    arch: Arch
    weights: dict[str, Any]

    @classmethod
    def of(cls, seed: int, **overrides: Any) -> Case:
        config = random_config(seed, **overrides)
        tensors = random_tensors(config, seed)
        arch = Arch.of(config)
        return cls(config, params_from_tensors(config, tensors, "float32"), arch, weight_tree(tensors, arch))

    @functools.cached_property
    def noisy_weights(self) -> dict[str, Any]:
        return with_noise(self.weights, WEIGHT_NOISE)

    def draw(
        self, rng: np.random.Generator, length: int, before: Run | None = None
    ) -> tuple[np.ndarray, Run]:
        """Random tokens [T] on which float32 can be held to TOL, and the reference's run of them.

        Refused are near ties between experts, and ill-conditioned tokens (a KDA read that cancels
        to nearly nothing before its norm, say): there the float64 reference itself moves when its
        weights and the state it continues carry float32 noise.
        """
        state = None if before is None else before.state
        noisy_state = with_noise(state, STATE_NOISE)
        for _ in range(50):
            tokens = rng.integers(0, self.config.vocab_size, length).astype(np.int32)
            run = forward(self.weights, self.arch, tokens[None], state)
            if run.smallest_margin(self.arch) < NO_TIE:
                continue
            moved = forward(self.noisy_weights, self.arch, tokens[None], noisy_state)
            if relative_rms(moved.logits, run.logits) < TOL / 5:
                return tokens, run
        raise AssertionError(f"fifty draws of {length} tokens were all ill-conditioned or close to a tie")


def assert_row_state(case: Case, state: State, row: int, run: Run, what: str) -> None:
    for i, kind in enumerate(case.config.layer_types):
        got, want = state.layers[i], run.state[i]
        name = f"{what}, row {row}, layer {i}"
        if kind == "kda":
            assert_close(f"{name}: S", got["S"][row], want["S"][0], TOL, WHY)
            assert_close(f"{name}: conv", got["conv"][row], want["conv"][0], TOL, WHY)
        else:
            length = want["cache"].shape[1]
            assert_close(f"{name}: cache", got["cache"][row, :length], want["cache"][0], TOL, WHY)


def check_against_reference(case: Case, lengths: Sequence[int], steps: int, chunk_size: int) -> None:
    """Ragged prefill, then decode steps in which row 0 sits out every second one."""
    config = case.config
    rng = np.random.default_rng(len(lengths))
    # Padding is not zero: nothing may depend on it.
    tokens = rng.integers(0, config.vocab_size, (len(lengths), max(lengths))).astype(np.int32)
    runs: list[Run | None] = [None] * len(lengths)
    for row, length in enumerate(lengths):
        if length:
            tokens[row, :length], runs[row] = case.draw(rng, length)
    logits, state = jax.jit(
        lambda p, t, n: model.prefill(p, t, config=config, lengths=n, chunk_size=chunk_size)
    )(case.params, tokens, np.asarray(lengths, np.int32))
    assert logits is not None
    assert np.asarray(state.lengths).tolist() == list(lengths)
    for row, (length, run) in enumerate(zip(lengths, runs, strict=True)):
        assert not np.asarray(logits[row, length:]).any(), f"row {row}: logits past its length"
        if run is not None:
            assert_close(f"prefill logits of row {row}", logits[row, :length], run.logits[0], TOL, WHY)
            assert_row_state(case, state, row, run, "after prefill")

    step = jax.jit(lambda p, s, t, a: model.decode_step(p, s, t, a, config=config))
    for i in range(steps):
        active = np.ones(len(lengths), bool)
        active[0] = i % 2 == 0
        new = np.zeros(len(lengths), np.int32)
        for row in np.flatnonzero(active):
            new[row : row + 1], runs[row] = case.draw(rng, 1, runs[row])
        before = state
        out, state = step(case.params, state, new, active)
        for row, run in enumerate(runs):
            if active[row]:
                assert run is not None
                assert_close(f"logits of step {i}, row {row}", out[row], run.logits[0, 0], TOL, WHY)
                assert_row_state(case, state, row, run, f"after step {i}")
            else:
                assert not np.asarray(out[row]).any(), f"row {row} is not active and has logits"
                old, now = (jax.tree.leaves(s.select([row]).layers) for s in (before, state))
                same = [np.array_equal(a, b) for a, b in zip(old, now, strict=True)]
                assert all(same), f"the state of inactive row {row} changed"


# (seed, fields set by hand): between them every uneven case the module's docstring names.
QUICK: list[tuple[int, dict[str, Any]]] = [
    (1, {"layer_types": ("kda", "mla", "kda", "mla", "mla"), "attn_res_block_size": 2}),
    (2, {"layer_types": ("mla", "kda", "kda"), "attn_res_block_size": 5, "first_k_dense_replace": 0}),
    (3, {"layer_types": ("kda", "kda", "mla"), "attn_res_block_size": 1, "first_k_dense_replace": 2}),
    (4, {"layer_types": ("kda",), "first_k_dense_replace": 0, "moe_renormalize": False}),
]


@pytest.mark.parametrize(("seed", "overrides"), QUICK)
def test_ragged_prefill_and_decode_match_the_reference(seed: int, overrides: dict[str, Any]) -> None:
    check_against_reference(Case.of(seed, **overrides), [37, 1, 16, 0], steps=3, chunk_size=16)


@pytest.mark.parametrize("seed", [5, 6])
def test_a_one_token_prompt_matches_the_reference(seed: int) -> None:
    check_against_reference(Case.of(seed, num_hidden_layers=3), [1], steps=2, chunk_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(106, 122))
def test_more_random_architectures_match_the_reference(seed: int) -> None:
    chunk_size = (5, 16, 64)[seed % 3]
    check_against_reference(Case.of(seed), [70, 1, 33, 0, 64], steps=4, chunk_size=chunk_size)


@pytest.mark.parametrize("seed", [7, 8])
def test_every_intermediate_matches_the_reference(seed: int) -> None:
    case = Case.of(seed, num_hidden_layers=3)
    tokens, run = case.draw(np.random.default_rng(seed), 20)
    got = jax.jit(lambda p, t: model.capture(p, t, config=case.config))(case.params, tokens[None])
    for name, value in got.items():
        layer, _, tap = name.removeprefix("layers.").partition(".")
        if tap not in ("topk_ids", "topk_w"):
            want = run.logits if name == "logits" else run.taps[f"L{layer}/{tap}" if tap else name]
            assert_close(name, value, want, TOL, WHY)
    for i in range(case.config.num_hidden_layers):
        if case.config.is_moe(i):
            assert_routing_equal(
                *(got[f"layers.{i}.{tap}"] for tap in ("topk_ids", "topk_w")),
                *(run.taps[f"L{i}/{tap}"] for tap in ("topk_ids", "topk_w", "selection")),
                tol=2e-5 * case.config.routed_scaling_factor,
                name=f"layer {i}",
            )


def test_float_experts_give_the_same_logits_as_the_packed_ones() -> None:
    case = Case.of(9, layer_types=("kda", "mla"), first_k_dense_replace=0)
    tokens, run = case.draw(np.random.default_rng(0), 6)

    def decoded(leaf: Any) -> Any:
        return leaf.decode(jnp.float32) if isinstance(leaf, MXFP4) else leaf

    floats = jax.tree.map(decoded, case.params, is_leaf=lambda leaf: isinstance(leaf, MXFP4))
    for params in (case.params, floats):
        logits, _ = jax.jit(lambda p: model.prefill(p, tokens[None], config=case.config, chunk_size=16))(
            params
        )
        assert_close("logits", logits, run.logits, TOL, WHY)
