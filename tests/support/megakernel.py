"""Small megakernel setups for tests of what surrounds the kernel: parameters, states, compiled stand-ins."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from support.random_k3 import params_from_tensors, random_config, random_tensors

STAND_IN = "support.stand_in_kernel:call"
CAPACITY = 300


@functools.cache
def config() -> Any:
    """KDA with the dense FFN, MLA and KDA with a LatentMoE; widths that pack into whole and partial tiles."""
    return random_config(
        21, layer_types=("kda", "mla", "kda"), first_k_dense_replace=1, vocab_size=62, hidden_size=64,
        num_experts=6, num_experts_per_token=2, kda_num_heads=2, kda_head_dim=8, num_attention_heads=2,
        max_position_embeddings=1024,
    )  # fmt: skip


@functools.cache
def params() -> Any:
    """bfloat16, MXFP4 experts whose scales the kernel decodes."""
    return params_from_tensors(config(), random_tensors(config(), 5), None)


@functools.cache
def packed_params() -> Any:
    from k3jax.custom_calls.pack import with_packed

    return with_packed(params(), config())


def artifact(batch: int, module: bytes = b"\x7fELF no code", plan: Any = None) -> Any:
    """An artifact of the config's operands and results whose module is no kernel: for lowering alone.

    Args:
        plan: another one than that of the config and batch, such as a share's.
    """
    from k3jax.custom_calls import artifacts, ffi
    from k3jax.custom_calls.compile import CAPACITY_ROWS
    from k3jax.custom_calls.decode_megakernel import operands
    from k3jax.custom_calls.decode_megakernel.shapes import Plan
    from k3jax.custom_calls.tables import launch_tables

    plan = Plan(config(), batch) if plan is None else plan
    tables = launch_tables(plan)
    takes = operands.abstract_operands(
        plan, tables.counters, len(tables.records), len(tables.program), CAPACITY_ROWS
    )
    gives = operands.abstract_results(plan, takes)
    leaves = (artifacts.leaves_of(takes, CAPACITY_ROWS), artifacts.leaves_of(gives, CAPACITY_ROWS))
    place = {leaf.path: i for i, leaf in enumerate(leaves[0])}
    aliases = tuple(
        (place[leaf.path], i)
        for i, leaf in enumerate(leaves[1])
        if leaf.path.split("'")[1] in operands.ALIASED
    )
    about = {
        "arch": plan.target.name, "target": {"sms": plan.target.sms},
        "registers": 18, "local_bytes": 0, "code_bytes": 0, "compile_seconds": 0.0,
    }  # fmt: skip
    return artifacts.Artifact(module, b"\xff" * 32, ffi.TARGET, *leaves, aliases, about)


def state(batch: int) -> Any:
    """Empty rows, with kernel leaves."""
    import k3jax.state

    return k3jax.state.init_state(config(), batch, CAPACITY, implementation="megakernel")


def tokens(batch: int) -> np.ndarray:
    return np.arange(batch, dtype=np.int32)


needs_compiler = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("nvidia_cutlass_dsl") is None,
    reason="nvidia-cutlass-dsl is not installed",
)
