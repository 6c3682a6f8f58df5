"""A whole step of 93 layers at the widths of a sixteenth, all eight AttnRes blocks, beside XLA's and float32.

Every expert is active, so no choice can turn; roundings to bfloat16 grow with depth all the same, to a tenth
or three of the running sum (the library's own path on a CPU, at a hidden size of 256: 0.02 behind layer 12,
0.08 behind 48, 0.14 to 0.29 behind the last). So the step is measured in two ways: free, where the kernel may
be about as far from the float32 model as XLA's bfloat16 step is, at every depth; and block by block, XLA
beginning each block of 12 layers with the kernel's running sum and snapshots.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.custom_calls.pack import with_packed
from k3jax.layers.attn_res import mix
from k3jax.layers.norm import rms_norm
from k3jax.model import lm_head
from support.megakernel_cases import SHARD93, KernelCase, config
from support.megakernel_gpu import Launcher, random_state, report
from support.megakernel_layerwise import Layers, clean, row_errors

# XLA compiles a step of 93 unrolled layers in minutes.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600, method="thread")]

LENGTHS = (129, 4097, 0, 1)
FREE = 3.0
"""How much farther from the float32 model than XLA's bfloat16 step the kernel may be, both as RMS over rows
and as the largest so far: two draws of the same noise, in which the rows of one step differ by as much."""
FLOOR = 0.01
"""Added to it: the first layers' few roundings, 2^-9 each."""
TELLING = 0.4
"""Relative RMS of XLA's logits from float32 above which the comparison would say nothing: a snapshot left out
or two layers swapped has 0.4 to 1 at 37 layers on a CPU. The largest seen of a row of 93 layers is 0.27."""
BLOCK = 0.1
"""Relative RMS of the running sum within a block that begins with the kernel's own numbers: 12 layers of
bfloat16 reach 0.02 to 0.04 on a CPU."""


@pytest.fixture(scope="module")
def params() -> Iterator[Any]:
    tree: dict[str, Any] = with_packed(
        k3jax.random_model(config("shard93"), seed=1).params, config("shard93")
    )
    yield tree
    tree.clear()
    gc.collect()


class Step:
    """The kernel's step, and its running sum behind every layer."""

    def __init__(self, run: Launcher, state: Any, tokens: np.ndarray):
        self.config, whole = run.config, run(state, tokens)
        assert whole.fault is None, whole.fault
        self.logits, self.sums = np.asarray(whole.logits), []
        self.blocks: dict[int, jax.Array] = {}
        for i in range(run.plan.layers):
            out = run(state, tokens, until=2 * i + 1)
            assert out.fault is None, f"layer {i}: {out.fault}"
            self.sums.append(out.fields["pre"][0])
            if i + 1 < run.plan.layers and run.config.starts_block(i + 1):
                self.blocks[i + 1] = out.fields["block"]


def _xla(params: Any, c: Any, state: Any, tokens: np.ndarray) -> tuple[np.ndarray, list[jax.Array]]:
    """Logits, and the running sum behind every layer, of the library's step."""

    # Without trying out products on the device, which takes minutes and is for speed alone.
    @functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
    def step(params: Any, state: Any, tokens: Any) -> Any:
        taps: dict[str, Any] = {}
        logits, _ = k3jax.decode_step(
            params, state, tokens, config=c, implementation="xla", tap=taps.__setitem__
        )
        return logits, [taps[f"layers.{i}.prefix_sum"] for i in range(c.num_hidden_layers)]

    plain = {name: leaf for name, leaf in params.items() if name != "megakernel"}
    logits, sums = step(plain, state, jnp.asarray(tokens, jnp.int32))
    return np.asarray(logits), sums


def check_free(
    name: str, c: Any, params: Any, state: Any, tokens: np.ndarray, logits: np.ndarray, sums: list[jax.Array]
) -> None:
    """Fail where the kernel's step is farther from the float32 model than bfloat16 explains.

    Args:
        logits, sums: the kernel's, the running sum behind every layer.
    """
    live = np.ones(len(tokens), bool)
    theirs, their_sums = _xla(params, c, state, tokens)
    exact = Layers(params, c, state, live, wide=True)
    stream = exact.begin(tokens)
    most, shown, wrong = 0.0, [], []
    for i in range(c.num_hidden_layers):
        stream = exact(i, stream)
        mine, other = (float(np.sqrt(np.mean(row_errors(x[i], stream[0]) ** 2))) for x in (sums, their_sums))
        most = max(most, other)
        if not mine <= FREE * most + FLOOR:
            wrong.append(f"layer {i}: {mine:.3f} from the float32 model, XLA {other:.3f}, at most {most:.3f}")
        if i % c.attn_res_block_size == c.attn_res_block_size - 1 or i == c.num_hidden_layers - 1:
            shown.append(f"{i}: {mine:.3f} ({other:.3f})")
    apart = row_errors(logits, theirs)
    pre, blocks, _ = stream
    out = {n: params[n].astype(jnp.float32) for n in ("norm", "lm_head", "output_attn_res_norm",
                                                      "output_attn_res_proj")}  # fmt: skip
    h = mix((*blocks, pre), out["output_attn_res_norm"], out["output_attn_res_proj"], c.rms_norm_eps)
    want = lm_head(out, rms_norm(h, out["norm"], c.rms_norm_eps))
    far = [float(np.sqrt(np.mean(row_errors(x, want) ** 2))) for x in (logits, theirs)]
    report(f"{name}, whole step: layer: kernel (XLA) from float32: {', '.join(shown)}")
    report(f"{name}, logits: {np.round(apart, 3)} from XLA, {far[0]:.3f} ({far[1]:.3f}) from float32")
    assert not wrong, "\n".join(wrong[:20])
    assert far[0] <= FREE * far[1] + FLOOR
    assert far[1] <= TELLING
    assert np.sqrt(np.mean(apart**2)) <= FREE * far[1] + FLOOR, apart


def check_blocks(
    name: str, c: Any, params: Any, state: Any, tokens: np.ndarray, sums: list[jax.Array], blocks: Any
) -> None:
    """Fail where a block's layers leave another running sum than XLA's from the same begin.

    Args:
        sums: as in :func:`check_free`; blocks: the kernel's snapshots [J, B, D] before the first layer of
            every block but the first.
    """
    layers = Layers(params, c, state, np.ones(len(tokens), bool), wide=False)
    stream, worst, taken = layers.begin(tokens), np.zeros(len(tokens)), 0
    for i in range(c.num_hidden_layers):
        if i and c.starts_block(i):
            held = jnp.arange(len(stream[1])) < taken
            kept = blocks[i][: len(stream[1])]
            stream = sums[i - 1], jnp.where(held[:, None, None], kept, jnp.zeros((), kept.dtype)), taken
        stream = layers(i, stream)
        taken = stream[2]
        error = row_errors(sums[i], stream[0])
        worst = np.maximum(worst, error)
        assert (error <= BLOCK).all(), f"{name}, layer {i}: {error} from XLA's in its block, at most {BLOCK}"
    assert taken == -(-c.num_hidden_layers // c.attn_res_block_size)
    report(f"{name}, from each block's begin: running sum at most {np.round(worst, 3)} from XLA's")


@pytest.mark.parametrize("case", SHARD93, ids=str)
def test_the_whole_step_of_93_layers_follows_xla(params: Any, case: KernelCase) -> None:
    run = Launcher(params, case)
    state = random_state(run.config, LENGTHS[: case.batch], 4200, seed=3)
    tokens = np.random.default_rng(7).integers(0, run.config.vocab_size, case.batch)
    step = Step(run, state, tokens)
    check_blocks(str(case), run.config, params, state, tokens, step.sums, step.blocks)
    check_free(str(case), run.config, params, clean(state), tokens, step.logits, step.sums)
