"""Stages of the megakernel, run by its CPU interpreter on inputs set by hand.

The schedule is that of a whole model; of its instructions those of the wanted stages are kept, and of
their waits those for one another. ``Machine.execute``, which runs a whole step for
``implementation="megakernel-interpret"``, runs them on several SMs in a random order that the counters allow.

Whatever is not set by hand is NaN, weights too: a stage that reads something else shows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np

from k3jax import K3Config
from k3jax.custom_calls.decode_megakernel.instructions import Instruction, Op
from k3jax.custom_calls.decode_megakernel.interpreter.machine import Machine, Rows, Weights
from k3jax.custom_calls.decode_megakernel.kernel import constraints
from k3jax.custom_calls.decode_megakernel.layout import pack_model
from k3jax.custom_calls.decode_megakernel.schedule import build
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.custom_calls.decode_megakernel.stages import sublayer
from k3jax.model import abstract_params

BF16 = ml_dtypes.bfloat16
SMS = 5
"""SMs that share a stage: no power of two, so that most stages give them unequal parts."""
Stage = tuple[Op, int]
"""An operation, and its sublayer: 2 l is layer l's attention, 2 l + 1 its FFN, 2 layers the output."""


class OutsideThePlanError(Exception):
    """The megakernel has no plan of these sizes; the message says why."""


def small_config(config: K3Config | None = None, **fields: Any) -> K3Config:
    """``config`` (the release) with ``fields``, and least sizes where no field is given.

    The depth is that of ``layer_types``; without it there is one layer, of KDA.
    """
    least: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "layer_types": ("kda",), "intermediate_size": 64,
        "first_k_dense_replace": 0, "attn_res_block_size": 1, "num_attention_heads": 1, "q_lora_rank": 8,
        "kv_lora_rank": 64, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 8,
        "kda_num_heads": 1, "num_experts": 2, "num_experts_per_token": 1, "num_shared_experts": 1,
        "moe_intermediate_size": 64, "routed_expert_hidden_size": 64, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    all_fields = least | fields
    all_fields["num_hidden_layers"] = len(all_fields["layer_types"])
    all_fields["kda_a_log_size"] = all_fields["kda_num_heads"]
    return dataclasses.replace(K3Config.preset("k3") if config is None else config, **all_fields)


class Stages:
    """A model of ``config`` and ``batch`` rows: set its weights and buffers, run stages, read buffers.

    Args:
        config: of the whole model.
        run: which rows run, bool [B]; default all ``batch``.
        sms: SMs of the schedule.
        old: latent cache [B, S, C + R] of every MLA layer, by layer.

    Raises:
        OutsideThePlanError: the megakernel takes no model of these sizes.
    """

    def __init__(
        self, config: K3Config, batch: int, *, run: Any = None, sms: int = SMS, old: Any = None
    ) -> None:
        try:  # as `supports` of "megakernel-interpret" asks, for the kernel's own target
            reasons = constraints.reasons(Plan(config, batch))
        except ValueError as error:
            raise OutsideThePlanError(str(error)) from error
        if reasons:
            raise OutsideThePlanError("; ".join(reasons))
        self.plan = Plan(config, batch, Target(f"{sms} interpreted SMs", sms))
        self.params: Any = jax.tree.map(_unset, abstract_params(config))
        self.slots: list[int] = []
        runs = np.ones(batch, bool) if run is None else np.asarray(run, bool)
        none = np.zeros(batch, int)
        self._rows = Rows(none, runs, none > 0, none, {} if old is None else old)
        self._given: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._machine: Machine | None = None

    def layer(self, i: int = 0) -> Any:
        """Parameters of a layer."""
        return self.params["layers"][i]

    @staticmethod
    def set(node: Any, **leaves: Any) -> None:
        """Replace leaves of a dict of parameters by arrays of the same shape."""
        for name, value in leaves.items():
            old, new = node[name], np.asarray(value)
            if new.shape != old.shape:
                raise ValueError(f"{name}: expected {old.shape}, got {new.shape}")
            node[name] = new.astype(old.dtype)

    def put(self, buffer: str, value: Any, lo: int = 0) -> None:
        """Set units ``lo ..`` of a buffer, [units, ...] in the interpreter's shape of a unit."""
        self._given.setdefault(buffer, []).append((lo, np.asarray(value).astype(np.float32)))

    def put_columns(self, buffer: str, value: Any, lo: int = 0) -> None:
        """Set columns ``lo ..`` of a vector buffer from [rows, columns], of which the first B are taken."""
        self.put(buffer, np.asarray(value)[: self.plan.B].T, lo)

    def put_normed(self, x: Any) -> None:
        """Set the mixture so that its norm with a gain of 1 is ``x`` [rows, D]."""
        self.put_columns("h", x)
        self.put("h.ssq", self._of_unit_scale(self.plan.column_sms, self.plan.D))

    def put_latent(self, x: Any) -> None:
        """Set the experts' sum so that its norm with a gain of 1 is ``x`` [rows, L]."""
        self.put_columns("comb", x)
        self.put("comb.ssq", self._of_unit_scale(self.plan.latent_sms, self.plan.L))

    def _of_unit_scale(self, sms: int, columns: int) -> np.ndarray:
        """Sums of squares [SMs, B] with which a norm multiplies by 1: float32 mean + eps is 1."""
        eps = np.float32(self.plan.config.rms_norm_eps)
        guess = (np.float32(1) - eps) * np.float32(columns)
        near = guess + np.arange(-8, 9, dtype=np.float32) * np.spacing(guess)
        exact = near[near / np.float32(columns) + eps == 1]
        squares = np.zeros((sms, self.plan.B), np.float32)
        squares[0] = exact[0]
        return squares

    def execute(self, *stages: Stage) -> None:
        """Run stages, each whole.

        Raises:
            ForbiddenAccessError: a stage reads a buffer that is neither set nor written by the others.
        """
        schedule = build(self.plan)
        kept = [i for i in schedule.instructions if (i.op, sublayer(i.op, i.layer, i.c0)) in stages]
        missing = set(stages) - {(i.op, sublayer(i.op, i.layer, i.c0)) for i in kept}
        if missing:
            raise ValueError(f"stages: the schedule has none of {missing}")
        signals = {i.signal for i in kept}
        alone = tuple(
            dataclasses.replace(i, waits=tuple(w for w in i.waits if w.counter in signals)) for i in kept
        )
        weights = Weights(self.params, pack_model(self.params, self.plan), BF16)
        machine = Machine(dataclasses.replace(schedule, instructions=alone), weights, self._rows, seed=0)
        machine.slots = self.slots
        self._load(machine, alone)
        # exp of hostile inputs overflows, and its sigmoid is then 0; what is not set is NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            machine.execute()
        self._machine = machine

    def _load(self, machine: Machine, instructions: tuple[Instruction, ...]) -> None:
        memory = machine.memory
        versions = {a.buffer: a.version for i in reversed(instructions) for a in i.reads}
        for name, pieces in self._given.items():
            whole = memory.values[name]
            for lo, value in pieces:
                if value.shape[1:] != whole.shape[1:] or lo + len(value) > len(whole):
                    raise ValueError(f"{name}: expected {whole.shape}, got {value.shape} from {lo} on")
                whole[lo : lo + len(value)] = value
            memory.version[name] = 0 if name in memory.state else versions[name]

    @property
    def machine(self) -> Machine:
        if self._machine is None:
            raise ValueError("machine: no stage was executed")
        return self._machine

    def get(self, buffer: str) -> np.ndarray:
        """What the stages left in a buffer, float32 [units, ...]; NaN where nothing was written."""
        return self.machine.memory.values[buffer]


def _unset(leaf: Any) -> np.ndarray:
    """An array of the leaf's shape whose numbers are NaN; of packed experts the scales are (byte 255)."""
    return np.full(leaf.shape, 255 if leaf.dtype == np.uint8 else np.nan, leaf.dtype)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """``x`` as bfloat16, which must hold it exactly: no rounding that the stage left out is made here."""
    out = x.astype(BF16)
    different = (out.astype(np.float32) != x) & ~np.isnan(x)
    if different.any():
        raise AssertionError(f"the stage left numbers that are no bfloat16: {x[different][:4]}")
    return out


def three_bfloat16(x: np.ndarray) -> list[np.ndarray]:
    """Three bfloat16 arrays whose float32 sum is ``x`` (float32) exactly, in whatever order."""
    parts = []
    rest = x
    for _ in range(3):
        parts.append(rest.astype(BF16))
        rest = rest - parts[-1].astype(np.float32)
    if rest.any():
        raise ValueError("x: expected numbers well above the smallest float32")
    return parts


__all__ = [
    "BF16",
    "SMS",
    "OutsideThePlanError",
    "Stage",
    "Stages",
    "bfloat16",
    "small_config",
    "three_bfloat16",
]
