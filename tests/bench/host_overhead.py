"""Host time per decode step: what Python and the runtime add before the device has work.

Three ways to hand the same weights to a compiled function that does almost nothing, so that what is
timed is the call: the pure tree that the library uses, the Flax module through ``nnx.jit``, and the
module split on every call. Run alone on the machine::

    python tests/bench/host_overhead.py [--layers 93] [--json results/host_overhead.json]

Times of a shared CPU mean little by themselves; their ratio, from one run, is what counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax
import jax
from flax import nnx

from k3jax import K3, K3Config
from k3jax.state import init_state

WIDTHS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kda_num_heads": 1,
    "kda_head_dim": 8, "kda_v_head_dim": 8, "kda_a_log_size": 1, "num_experts": 4, "num_experts_per_token": 2,
    "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def make_config(layers: int) -> K3Config:
    """The release's first ``layers`` layers at widths so small that only the tree's size counts."""
    release = K3Config.preset("k3-slice", num_layers=layers)
    return dataclasses.replace(release, **WIDTHS)


# keep_unused: by default jit drops the arguments that the traced function does not read.
@partial(jax.jit, donate_argnums=1, keep_unused=True)
def tree_call(params: Any, state: Any) -> Any:
    del params
    return state


@nnx.jit
def module_call(module: K3, lengths: jax.Array) -> jax.Array:
    return lengths + module.norm[0].astype(lengths.dtype)


@jax.jit
def split_call(leaves: Any, lengths: jax.Array) -> jax.Array:
    return lengths + leaves["norm"][0].astype(lengths.dtype)


def per_call(call: Callable[[], Any], repeats: int, inner: int) -> float:
    """Median over ``repeats`` of the seconds a call takes, from ``inner`` calls in a row."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(inner)][-1])
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times)


def measure(layers: int, repeats: int, inner: int) -> dict[str, Any]:
    config = make_config(layers)
    module = K3(config, rngs=nnx.Rngs(0), packed_experts=True)
    params = module.params()
    holder = [init_state(config, 1, 256)]

    def pure() -> Any:
        holder[0] = tree_call(params, holder[0])
        return holder[0].lengths

    lengths = init_state(config, 1, 256).lengths

    def split() -> Any:
        return split_call(nnx.to_pure_dict(nnx.state(module, nnx.Param)), lengths)

    before = [leaf.copy() for leaf in jax.tree.leaves(holder[0])]
    seconds = {
        "pure tree, state donated": per_call(pure, repeats, inner),
        "module split at every call": per_call(split, repeats, max(1, inner // 10)),
        "nnx.jit on the module": per_call(lambda: module_call(module, lengths), repeats, max(1, inner // 10)),
    }
    for a, b in zip(before, jax.tree.leaves(holder[0]), strict=True):
        if not (a == b).all():
            raise SystemExit("the state changed on its way through calls that return it")
    return {
        "layers": layers,
        "parameter_leaves": len(jax.tree.leaves(params)),
        "state_leaves": len(before),
        "seconds_per_call": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=93)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inner", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args.layers, args.repeats, args.inner)
    result |= {
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }
    base = result["seconds_per_call"]["pure tree, state donated"]
    leaves = f"{result['parameter_leaves']} parameter and {result['state_leaves']} state arrays"
    print(f"{result['layers']} layers, {leaves}")
    for name, seconds in result["seconds_per_call"].items():
        print(f"{name:30s} {seconds * 1e3:8.3f} ms/call   {seconds / base:6.1f} x")
    print(*(f"{k}={result[k]}" for k in ("device", "python", "jax", "flax", "date", "command")))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
