"""Every sublayer of a step that the kernel makes, by jax.numpy on the device and by the float32 model.

A step is stopped behind each sublayer, see :mod:`support.megakernel_gpu`; what its stages left is computed
again from the fields they read (:mod:`support.megakernel_wide`), and the sublayer by the library's float32
model from the same normed input, with the kernel's choice of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from . import megakernel_wide as wide
from .megakernel_gpu import Launcher, last_sublayer, report


def check_every_sublayer(
    name: str,
    run: Launcher,
    state: Any,
    tokens: Any,
    active: Any,
    bounds: Mapping[str, wide.Bound] | None = None,
) -> None:
    """Assert every stage of every sublayer, and report the largest errors.

    Args:
        state: before the step; tokens: int [B]; active: bool [B].
        bounds: those that hold in place of ``megakernel_wide.BOUNDS``, by name.
    """
    c, p, params = run.config, run.plan, run.whole
    live, wrong, worst = jnp.asarray(active), [], {}
    for sub in range(last_sublayer(run) + 1):
        last = sub == last_sublayer(run)
        out = run(state, tokens, active, until=None if last else sub)
        assert out.fault is None, f"sublayer {sub}: {out.fault}"
        f, layer = out.fields, sub // 2
        starts = jnp.asarray(not sub % 2 and not last and c.starts_block(layer))
        key = "output_attn_res" if last else "mlp_res" if sub % 2 else "self_attention_res"
        tree = params if last else params["layers"][layer]
        errors = wide.mixture(
            c, f, f["pre"][sub % 2], jnp.int32(p.snapshots(sub)), starts,
            tree[f"{key}_norm"], tree[f"{key}_proj"], live,
        )  # fmt: skip
        if last:
            head = {n: params[n] for n in ("norm", "lm_head")}
            errors |= wide.output(c, head, f, out.logits, live)
        elif sub % 2:
            errors |= wide.feed_forward(c, c.is_moe(layer), tree, f, live)
        else:
            errors |= wide.attention(
                c, c.layer_types[layer], tree, f, state.layers[layer], out.state.layers[layer],
                state.lengths, starts, live,
            )  # fmt: skip
        wrong += wide.problems(f"{name}, layer {layer}{', FFN' if sub % 2 else ''}", errors, worst, bounds)
    report(f"{name}: RMS " + ", ".join(f"{n} {v:.1e}" for n, v in sorted(worst.items())))
    assert not wrong, "\n".join(wrong[:40])


__all__ = ["check_every_sublayer"]
