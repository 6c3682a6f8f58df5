"""Rows of up to 1,048,576 tokens at the release's widths: attention, the new row's place, all else unchanged.

Two rows: 2.4 GB of cache, the second row's last fifth past 2^31 bytes. Four rows: 4.8 GB, past 2^31 numbers
and 2^32 bytes. Every head finds a needle at a place of its own, borders of splits and of 32 bits among them,
so a split that is left out, read twice or taken from elsewhere turns a head's result, not a millionth of it.
Kernels: ``tests/gpu/build_artifacts.py --only slice4-e16-b``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.custom_calls.pack import with_packed
from k3jax.state import STATUS_FULL, State
from support import megakernel_long as long
from support import megakernel_wide as wide
from support.megakernel_cases import LONG, KernelCase, config
from support.megakernel_gpu import Launcher, random_state, report

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]

CAPACITY = 1 << 20
LENGTHS = (CAPACITY - 1, 1_048_000, 0, 1_048_490)
"""The last place that there is; the first place of a split; an empty row among long ones; inside a split."""
NEEDLE = 16.0
"""Score of a needle: e^16 is five times the sum of a million weights of random scores, e^(1/2) each."""


@pytest.fixture(scope="module")
def params() -> Iterator[Any]:
    c = config("slice4-e16")
    tree: dict[str, Any] = with_packed(k3jax.random_model(c, seed=1, implementation="xla").params, c)
    yield tree
    tree.clear()
    gc.collect()


def queries(c: Any, fields: Any, batch: int) -> jax.Array:
    """float32 [B, N, C + R]: every head's query for the latent, and for the piece that all heads share."""
    n = c.num_attention_heads
    shared = fields["mla.q"].reshape(batch, n, c.qk_head_dim)[..., c.qk_nope_head_dim :]
    return jnp.concatenate([fields["mla.qt"].reshape(batch, n, -1), shared], axis=-1).astype(jnp.float32)


def special_places(b: int, length: int, width: int) -> list[int]:
    """Borders of a row: its ends, splits of 64, and where bytes and numbers pass 2^31 and 2^32."""
    borders = [limit // (size * width) - b * CAPACITY for limit in (1 << 31, 1 << 32) for size in (1, 2)]
    near = [at + d for at in borders for d in (-1, 0, 1)]
    return [0, 63, 64, 127, length - 1, length - 2, length // 64 * 64 - 1, length // 64 * 64, *near]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_rows_of_a_million_tokens(params: Any, case: KernelCase) -> None:
    run, batch = Launcher(params, case), case.batch
    c = run.config
    layer, lengths = c.layer_types.index("mla"), LENGTHS[:batch]
    width, scale = c.kv_lora_rank + c.qk_rope_head_dim, jnp.float32(c.qk_head_dim**-0.5)
    assert c.max_position_embeddings == CAPACITY
    assert c.layer_types.count("mla") == 1
    tokens = np.random.default_rng(5).integers(0, c.vocab_size, batch)
    short = random_state(c, (0,) * batch, 256, seed=6)
    # A layer's queries and its new row depend on no cache: from empty rows they are those of the long ones.
    before = run(short, tokens, until=2 * layer)
    assert before.fault is None
    query = queries(c, before.fields, batch)
    rows = []
    for b, length in enumerate(lengths):
        row = long.random_rows(jax.random.key(b), jnp.int32(length), CAPACITY, width)
        if length:
            at = long.needle_places(c.num_attention_heads, length, special_places(b, length, width), b)
            row = long.with_needles(row, jnp.asarray(at), query[b], scale, jnp.float32(NEEDLE))
        rows.append(row)
    layers = list(short.layers)
    layers[layer] = {"cache": jnp.stack(rows)}
    del rows
    state = State(tuple(layers), jnp.asarray(lengths, jnp.int32), short.status, CAPACITY)
    old = state.layers[layer]["cache"]

    out = run(state, tokens, until=2 * layer)
    assert out.fault is None, out.fault
    f, new = out.fields, out.state.layers[layer]["cache"]
    for name in ("mla.q", "mla.qt", "mla.row"):
        a, b = (np.asarray(x[name]).view(np.uint8) for x in (before.fields, f))
        assert np.array_equal(a, b), f"{name} depends on the length of the row"
    merged, worst = wide._merged(c, f, batch), {}
    wrong = []
    for b, length in enumerate(lengths):
        want = long.attend(old[b], f["mla.row"][b], jnp.int32(length), query[b], scale, c.kv_lora_rank)
        live = jnp.ones(c.num_attention_heads, bool)
        errors = {"context": wide._measure(merged[b], want, live)}
        wrong += wide.problems(f"{case}, row {b} of {length} tokens", errors, worst)
        count, last = long.changed_places(old, new, b)
        assert (int(count), int(last)) == (1, length), f"row {b}: {count} places changed, the last {last}"
        assert np.array_equal(
            np.asarray(new[b, length]).view(np.uint16), np.asarray(f["mla.row"][b]).view(np.uint16)
        )
    report(f"{case}, a million tokens: context RMS {worst['context']:.1e}")
    assert not wrong, "\n".join(wrong)
    del out, new, f

    whole = run(state, tokens, fields=False)
    assert whole.fault is None, whole.fault
    assert np.isfinite(np.asarray(whole.logits)).all()
    assert whole.state.lengths.tolist() == [n + 1 for n in lengths]
    assert whole.state.status.tolist() == [0] * batch
    # The first row is full now: refused, and every place of it stays.
    kept = whole.state.layers[layer]["cache"]
    again = run(whole.state, tokens, fields=False)
    assert again.state.lengths.tolist() == [CAPACITY, *(n + 2 for n in lengths[1:])]
    assert again.state.status.tolist() == [STATUS_FULL] + [0] * (batch - 1)
    assert np.isnan(np.asarray(again.logits)[0]).all()
    count, _ = long.changed_places(kept, again.state.layers[layer]["cache"], 0)
    assert int(count) == 0
