"""The KDA sublayer: prefill, decode step and their state, against the float64 reference."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.kda import kda_prefill, kda_step
from support.compare import assert_close
from support.random_k3 import params_from_tensors, random_config, random_tensors
from support.reference_kda import kda_layer
from support.reference_weights import Arch, weight_tree
from support.tiny_model import assert_bit_equal, bits

B, T = 3, 20
CONFIG = random_config(
    2, layer_types=("kda",), kda_num_heads=3, kda_head_dim=8, kda_v_head_dim=12, kda_a_log_size=5
)
TENSORS = random_tensors(CONFIG, 2)
ARCH = Arch.of(CONFIG)
WEIGHTS = weight_tree(TENSORS, ARCH)["layers"][0]["self_attn"]
PARAMS = params_from_tensors(CONFIG, TENSORS, "float32")["layers"][0]["self_attn"]
ROUNDING = "float32 rounding; 1e-6 measured"

prefill = jax.jit(functools.partial(kda_prefill, config=CONFIG))
step = jax.jit(functools.partial(kda_step, config=CONFIG))


def drawn(length: int = T, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, length, CONFIG.hidden_size)).astype(np.float32)


def empty() -> dict[str, jax.Array]:
    c = CONFIG
    return {
        "S": jnp.zeros((B, c.kda_num_heads, c.kda_v_head_dim, c.kda_head_dim)),
        "conv": jnp.zeros((B, 3, c.conv_channels)),
    }


def started(seed: int = 1) -> dict[str, jax.Array]:
    """A state after a few tokens: nothing in it is zero."""
    return prefill(PARAMS, jnp.asarray(drawn(seed=seed)), empty(), jnp.full((B,), T, jnp.int32))[1]


def counted(counts: Any) -> jax.Array:
    return jnp.asarray(counts, jnp.int32)


def reference(x: np.ndarray, state: Any = None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    wide = None if state is None else {k: np.asarray(v).astype(np.float64) for k, v in state.items()}
    out, new, _ = kda_layer(WEIGHTS, ARCH, x.astype(np.float64), wide)
    return out, new


def test_prefill_equals_the_reference_from_an_empty_and_from_a_used_state() -> None:
    """KDA-05: more than one token does not mean a new prompt."""
    x = drawn()
    for state in (empty(), started()):
        out, new = prefill(PARAMS, jnp.asarray(x), state, counted([T] * B))
        want, want_state = reference(x, state)
        assert_close("output", out, want, 1e-5, ROUNDING)
        for name in ("S", "conv"):
            assert_close(name, new[name], want_state[name], 1e-5, ROUNDING)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5])
def test_decode_after_a_short_prompt_sees_the_whole_convolution_window(length: int) -> None:
    """KDA-03: prompts shorter than the window, from an empty and from a used state."""
    x = drawn(T + 6, seed=2)
    for first in (empty(), started()):
        # The prompt is padded: the same program for every length.
        out, state = prefill(PARAMS, jnp.asarray(x[:, :T]), first, counted([length] * B))
        rows = [out[:, :length]]
        for t in range(length, length + 6):
            y, state = step(PARAMS, jnp.asarray(x[:, t]), state, jnp.ones(B, bool))
            rows.append(y[:, None])
        want, want_state = reference(x[:, : length + 6], first)
        assert_close("outputs", jnp.concatenate(rows, axis=1), want, 1e-5, ROUNDING)
        for name in ("S", "conv"):
            assert_close(name, state[name], want_state[name], 1e-5, ROUNDING)


def test_the_convolution_window_shifts_by_as_many_tokens_as_came() -> None:
    """KDA-03: old entries move up, they do not vanish."""
    x, first = drawn(), started()
    raw = np.asarray(prefill(PARAMS, jnp.asarray(x), empty(), counted([3] * B))[1]["conv"])
    for count in (0, 1, 2, 3):
        _, new = prefill(PARAMS, jnp.asarray(x), first, counted([count] * B))
        want = np.concatenate([np.asarray(first["conv"]), raw[:, :count]], axis=1)[:, count:]
        assert bits(new["conv"]) == bits(want)


def test_padding_leaves_no_trace_whatever_it_holds() -> None:
    """NUM-05, MLA-07's kind: zeros, large numbers and NaN in the padding give the same bits."""
    counts = [7, 0, T]
    results = []
    for filler in (0.0, 1e4, np.nan, np.inf):
        x = drawn()
        for row, count in enumerate(counts):
            x[row, count:] = filler
        out, new = prefill(PARAMS, jnp.asarray(x), started(), counted(counts))
        real = [np.asarray(out)[row, :count] for row, count in enumerate(counts)]
        results.append((real, new))
    for real, new in results[1:]:
        assert_bit_equal(real, results[0][0], "outputs")
        assert_bit_equal(new, results[0][1], "state")


def test_a_row_without_tokens_keeps_its_state_bit_for_bit() -> None:
    """NUM-05: beta of a zero input is 0.5, not 0; only a mask makes it a no-op."""
    before = started()
    before["S"] = before["S"].at[1, 0, 0, 0].set(-0.0)  # not even the sign of a zero changes
    _, after = prefill(PARAMS, jnp.zeros((B, T, CONFIG.hidden_size)), before, counted([T, 0, T]))
    _, stepped = step(PARAMS, jnp.zeros((B, CONFIG.hidden_size)), before, jnp.asarray([True, False, True]))
    for new in (after, stepped):
        for name in ("S", "conv"):
            assert bits(new[name][1]) == bits(before[name][1])
            assert bits(new[name][0]) != bits(before[name][0])


def test_a_ragged_row_equals_the_row_alone() -> None:
    counts = [5, 16, 17]
    x, first = drawn(), started()
    out, new = prefill(PARAMS, jnp.asarray(x), first, counted(counts))
    for row, count in enumerate(counts):
        only = {name: value[row : row + 1] for name, value in first.items()}
        want, want_state = reference(x[row : row + 1, :count], only)
        assert_close("output", out[row : row + 1, :count], want, 1e-5, ROUNDING)
        assert_close("S", new["S"][row : row + 1], want_state["S"], 1e-5, ROUNDING)


def test_a_log_is_per_head() -> None:
    """Swapping two heads' A_log changes those heads' states and no other's."""
    x = jnp.asarray(drawn())
    swapped = PARAMS | {"A_log": PARAMS["A_log"][jnp.array([1, 0, 2])]}
    assert PARAMS["A_log"].shape == (3,)
    _, a = prefill(PARAMS, x, empty(), counted([T] * B))
    _, b = prefill(swapped, x, empty(), counted([T] * B))
    assert bits(a["S"][:, 2]) == bits(b["S"][:, 2])
    for head in (0, 1):
        assert not np.allclose(a["S"][:, head], b["S"][:, head], rtol=1e-2)


def test_a_nan_in_one_row_stays_in_it() -> None:
    """SG-01"""
    x, first = jnp.asarray(drawn()), started()
    poisoned = first | {"S": first["S"].at[1].set(jnp.nan)}
    for got, want in (
        (prefill(PARAMS, x, poisoned, counted([T] * B)), prefill(PARAMS, x, first, counted([T] * B))),
        (step(PARAMS, x[:, 0], poisoned, jnp.ones(B, bool)), step(PARAMS, x[:, 0], first, jnp.ones(B, bool))),
    ):
        assert np.isnan(np.asarray(got[0])[1]).all()
        for row in (0, 2):
            pick = functools.partial(jax.tree.map, lambda a, row=row: a[row])
            assert_bit_equal(pick(got), pick(want), f"row {row}")


def test_the_output_gate_follows_the_norm() -> None:
    """MLA-08: KDA gates after its per-head norm; gate weights of 0 halve the output exactly."""
    x = jnp.asarray(drawn())
    counts = counted([T] * B)
    zero = PARAMS | {"g_proj": jnp.zeros_like(PARAMS["g_proj"])}
    half, _ = prefill(zero, x, empty(), counts)
    # Before the norm, a factor of one half would vanish: the norm divides it out.
    doubled, _ = prefill(zero | {"o_norm": 2 * PARAMS["o_norm"]}, x, empty(), counts)
    assert_close("output", doubled, 2 * np.asarray(half), 1e-6, "exact up to float32 rounding")
    ungated, _ = reference_without_gate(np.asarray(x))
    assert_close("output", half, 0.5 * ungated, 1e-5, ROUNDING)


def reference_without_gate(x: np.ndarray) -> tuple[np.ndarray, Any]:
    out, state, _ = kda_layer(
        WEIGHTS | {"g_proj": np.zeros_like(WEIGHTS["g_proj"]), "o_norm": 2 * WEIGHTS["o_norm"]},
        ARCH,
        x.astype(np.float64),
    )
    return out, state
