"""The kernel's own sources, run on an emulated GPU of Python threads, make the interpreter's step.

The emulator (``support.emulator``) notices what a GPU would not: races in shared memory, addresses outside
an array, tiles read before they arrive, lanes that miss an exchange, waits that never end.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.custom_calls.decode_megakernel.interpreter.machine import Weights
from k3jax.custom_calls.decode_megakernel.interpreter.step import rows_of
from k3jax.custom_calls.decode_megakernel.kernel.geometry import Geometry
from k3jax.custom_calls.decode_megakernel.kernel.tables import kernel_tables
from k3jax.custom_calls.decode_megakernel.layout import pack_model
from k3jax.custom_calls.decode_megakernel.operands import FAULT_FIELDS
from k3jax.custom_calls.decode_megakernel.schedule import build
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.state import State, abstract_state
from support.emulator.device import DivergenceError
from support.emulator.fibers import HangError
from support.emulator.memory import AccessError, Race
from support.emulator.step import Kernel, fields_of, operands_of
from support.megakernel_replay import Snapshot, run_machine, whole
from support.random_k3 import params_from_tensors, random_config, random_tensors

pytestmark = pytest.mark.timeout(400)

CAPACITY = 256
LENGTHS = (70, 0, 64, 5, 1, 127, 128, 63)
SPINS = 3000
"""Polls after which an emulated wait gives up: a minute."""
SMALL = {
    "hidden_size": 64, "kda_num_heads": 1, "kda_head_dim": 128, "kda_v_head_dim": 128, "kda_a_log_size": 1,
    "num_attention_heads": 1, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "v_head_dim": 32, "routed_expert_hidden_size": 64, "moe_intermediate_size": 64,
    "num_experts": 16, "num_experts_per_token": 2, "num_shared_experts": 1, "intermediate_size": 64,
    "vocab_size": 40, "first_k_dense_replace": 1, "attn_res_block_size": 1,
}  # fmt: skip
"""KDA with the dense FFN, then MLA with a LatentMoE, each a block of its own: as small as may be."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A step's setup: schedule, its tables, numpy parameters and state."""

    geometry: Geometry
    tables: Any
    params: Any
    state: State
    tokens: np.ndarray
    active: np.ndarray

    def operands(self) -> dict[str, Any]:
        return operands_of(
            self.geometry.schedule, self.tables, self.params, self.state, self.tokens, self.active
        )

    def launch(self, kernel: Kernel | None = None, seed: int | None = None, **changed: Any) -> Any:
        return (kernel or Kernel()).launch(self.geometry, {**self.operands(), **changed}, seed)


@functools.cache
def setup(batch: int, sms: int, layers: tuple[str, ...] = ("kda", "mla"), **options: Any) -> Run:
    config = random_config(1, num_hidden_layers=len(layers), layer_types=layers, **(SMALL | options))
    params = jax.tree.map(np.asarray, params_from_tensors(config, random_tensors(config, 1), None))
    schedule = build(Plan(config, batch, Target(f"{sms} emulated SMs", sms)))
    rng = np.random.default_rng(0)
    empty = abstract_state(config, batch, CAPACITY, jnp.bfloat16).layers
    held = tuple({n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in x.items()} for x in empty)
    for layer in held:
        for b in range(batch if "cache" in layer else 0):
            layer["cache"][b, LENGTHS[b] :] = np.nan
    lengths = np.array(LENGTHS[:batch], np.int32)
    state = State(held, lengths, np.zeros(batch, np.int32), CAPACITY)
    tokens, active = np.arange(batch) + 3, np.arange(batch) != 2
    return Run(Geometry(schedule, spins=SPINS), kernel_tables(schedule), params, state, tokens, active)


def assert_is_the_interpreters(run: Run, out: Any) -> None:
    """Every field of the workspace, the state and the results."""
    assert not out["fault"].any(), out["fault"]
    schedule, config = run.geometry.schedule, run.geometry.plan.config
    weights = Weights(run.params, pack_model(run.params, schedule.plan), run.params["embed_tokens"].dtype)
    rows = rows_of(run.state, run.tokens, run.active, config)
    machine, _ = run_machine(schedule, weights, run.state, rows)
    after = Snapshot(
        fields_of(run.geometry, out["work"]), out["state"], out["lengths"], out["status"],
        out["logits"], out["token"], run.state.lengths,
    )  # fmt: skip
    found = whole(machine, rows.run, after)
    assert len(found) > 20
    # bfloat16 roundings that another order of sums turns, through the few sublayers of the step.
    assert not [d for d in found if not d.rms <= 5e-3], found
    for before, after_layer in zip(run.state.layers, out["state"], strict=True):
        for name in before:
            kept = (np.asarray(x[name])[~rows.run] for x in (before, after_layer))
            assert len({x.tobytes() for x in kept}) == 1, f"{name} of a row that does not run"


def test_a_whole_step_is_the_interpreters() -> None:
    """Two rows on two SMs: hand-offs, the ring, every kind of stage, snapshots and the token."""
    run, kernel = setup(2, 2), Kernel()
    out = run.launch(kernel)
    assert_is_the_interpreters(run, out)
    assert kernel.modules.device.prefetched > 0
    assert out["epoch"].tolist() == [1]
    assert out["lengths"].tolist() == [71, 1]
    assert out["token"].tolist() == out["logits"].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "sms", "seed"), [(1, 1, None), (3, 3, 1), (3, 2, 2), (8, 2, None)])
def test_steps_of_other_batches_and_orders_are_the_interpreters(batch: int, sms: int, seed: Any) -> None:
    run = setup(batch, sms)
    assert_is_the_interpreters(run, run.launch(seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kv_lora_rank": 192, "num_attention_heads": 3, "v_head_dim": 64, "q_lora_rank": 64},
        {"routed_expert_hidden_size": 192, "moe_intermediate_size": 320, "num_experts_per_token": 5},
        {"hidden_size": 192, "vocab_size": 72, "intermediate_size": 96},
    ],
    ids=["three heads", "wide experts", "wide model"],
)
def test_steps_of_other_widths_are_the_interpreters(options: dict[str, int]) -> None:
    run = setup(2, 3, **options)
    assert_is_the_interpreters(run, run.launch())


SEEDED: dict[str, tuple[str, str, str, type[Exception] | tuple[type[Exception], ...]]] = {
    "a barrier left out": (
        "stages.resident",
        "        t.sync()\n        slot",
        "        slot",
        Race,
    ),
    "a word of the record read by one lane": (
        "flow",
        "delay(t, index + 17)",
        "delay(t, record[9] + 17)",
        (DivergenceError, HangError),
    ),
    "an address past the array": (
        "stages.mixture",
        "column = 8 * (part.g0 + i - b * part.n)",
        "column = 8 * (part.g0 + 4096 * 4096 + i - b * part.n)",
        AccessError,
    ),
    "lanes at different exchanges": (
        "stages.mixture",
        "        total = warp_sum(total)\n",
        "        total = warp_sum(total) if t.lane < 16 else warp_max(total)\n",
        DivergenceError,
    ),
    "tiles asked for past the matrix": (
        "produce",
        "most = cutlass.min(tiles.total - n, Int32(AHEAD))",
        "most = Int32(4096)",
        RuntimeError,
    ),
    "a tile that no warp gives back": (
        "flow",
        "        if t.lane == 0:\n            cute.arch.mbarrier_arrive(t.barrier(EMPTY_AT)",
        "        if (t.lane == 0) & (t.warp != 3):\n"
        "            cute.arch.mbarrier_arrive(t.barrier(EMPTY_AT)",
        HangError,
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_is_noticed(name: str) -> None:
    module, old, new, error = SEEDED[name]
    run = setup(1, 1)
    with pytest.raises(error, match="prefetch" if module == "produce" else None):
        run.launch(Kernel({module: (old, new)}))


@pytest.mark.slow
def test_a_wait_for_an_sm_that_never_arrives_is_recorded_and_the_state_stays() -> None:
    run = setup(1, 2)
    starts = run.tables.starts.copy()
    starts[2] = starts[1]  # the second SM has no program
    out = run.launch(starts=starts)
    fault = dict(zip(FAULT_FIELDS, out["fault"].tolist(), strict=False))
    assert (fault["code"], fault["sm"], fault["epoch"]) == (1, 0, 0)
    assert 0 <= fault["value"] < fault["target"]
    assert out["lengths"].tolist() == run.state.lengths.tolist()
    for before, after in zip(run.state.layers, out["state"], strict=True):
        for name in before:
            assert before[name].tobytes() == after[name].tobytes(), name


def test_importing_the_kernel_for_the_emulator_leaves_no_stand_in_behind() -> None:
    import sys

    before = {name for name in sys.modules if name.split(".")[0] in ("cutlass", "cuda")}
    Kernel()
    assert {name for name in sys.modules if name.split(".")[0] in ("cutlass", "cuda")} == before
    assert "k3jax.custom_calls.decode_megakernel.kernel.flow" not in sys.modules
