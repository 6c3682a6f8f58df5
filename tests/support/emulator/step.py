"""A decode step by the kernel's own sources on the emulated GPU.

The sources are loaded anew with the stand-ins in place of cutlass and ptx, so nothing here needs cutlass,
and modules of the same names that others have imported are left alone.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.custom_calls.decode_megakernel import operands as _operands
from k3jax.custom_calls.decode_megakernel.kernel.geometry import CONSUMERS, Geometry
from k3jax.custom_calls.decode_megakernel.operands import Field, abstract_operands, abstract_results
from k3jax.custom_calls.decode_megakernel.resources import RING_STAGE_BYTES, RING_STAGES, THREADS
from k3jax.custom_calls.decode_megakernel.schedule import Schedule

from .device import Device
from .memory import Global
from .numbers import BF16, Int64
from .stand_ins import Modules

KERNEL = "k3jax.custom_calls.decode_megakernel.kernel"
_OWN = ("geometry", "tables", "constraints_attention", "constraints_moe", "constraints")
"""Modules of the kernel's package that need no stand-ins, and are not loaded anew."""


class Operand:
    """An array in global memory as the kernel sees it: its address and its shape."""

    def __init__(self, address: int, shape: tuple[int, ...]):
        self.address, self.shape = address, shape

    @property
    def iterator(self) -> Operand:
        return self

    def toint(self) -> Int64:
        return Int64(self.address)


@contextmanager
def in_place_of(table: Mapping[str, Any]) -> Iterator[None]:
    """The stand-ins as modules, the kernel's modules absent, import hooks of tests out of the way."""
    mine = {
        name for name in sys.modules
        if name in table or name.split(".")[0] in ("cutlass", "cuda") or _is_kernels(name)
    }  # fmt: skip
    kept = {name: sys.modules.pop(name) for name in mine}
    finders = list(sys.meta_path)
    sys.meta_path[:] = [f for f in finders if f in _standard_finders() or "editable" in type(f).__module__]
    sys.modules.update(table)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n in table or _is_kernels(n)]:
            del sys.modules[name]
        sys.modules.update(kept)
        sys.meta_path[:] = finders


def _load_edited(name: str, old: str, new: str) -> None:
    """A module from its source with one text replaced; modules imported later see it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"edits: no module {name}")
    text = Path(spec.origin).read_text()
    if text.count(old) < 1:
        raise ValueError(f"edits: {name} does not hold {old!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(text.replace(old, new), spec.origin, "exec"), vars(module))


def _standard_finders() -> tuple[Any, ...]:
    machinery = importlib.machinery
    return machinery.BuiltinImporter, machinery.FrozenImporter, machinery.PathFinder


def _is_kernels(name: str) -> bool:
    own = name.removeprefix(f"{KERNEL}.")
    return own != name and own not in _OWN


class Kernel:
    """The kernel's sources, loaded with stand-ins.

    Args:
        edits: (text, its replacement) in the source of a module, by the module's name within the kernel's
            package: for seeding faults.
    """

    def __init__(self, edits: Mapping[str, tuple[str, str]] | None = None):
        self.modules = Modules()
        with in_place_of(self.modules.table(KERNEL)):
            for name, edit in (edits or {}).items():
                _load_edited(f"{KERNEL}.{name}", *edit)
            self.entry = importlib.import_module(f"{KERNEL}.entry")
            self.context: Any = importlib.import_module(f"{KERNEL}.context")

    def launch(
        self, geometry: Geometry, operands: Mapping[str, Any], seed: int | None = None
    ) -> dict[str, Any]:
        """One launch on numpy arrays: the tree of ``abstract_results`` as numpy arrays.

        Args:
            operands: numpy arrays, the tree of ``abstract_operands``.
            seed: order of the threads, see :class:`.fibers.Scheduler`.
        """
        return self.launch_ranks(geometry, [operands], seed)[0]

    def launch_ranks(
        self,
        geometry: Geometry,
        operands: Sequence[Mapping[str, Any]],
        seed: int | None = None,
        mailboxes: Sequence[np.ndarray] = (),
    ) -> list[dict[str, Any]]:
        """As :meth:`launch`, of several ranks at once, each on SMs of its own; they share global memory.

        Args:
            mailboxes: int32, one of each rank, updated in place; the operand ``peers`` is made of where
                they lie.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(operands[0]))
        fresh = {
            name: _poison(leaf)
            for name, leaf in abstract_results(geometry.plan, shapes).items()
            if name not in _operands.ALIASED
        }
        leaves = jax.tree.leaves((operands, [fresh] * len(operands), list(mailboxes)))
        memory = Global(sum(x.nbytes + 8192 for x in leaves) + 8192)
        boxes = [memory.place(f"mailbox {rank}", box) for rank, box in enumerate(mailboxes)]
        peers = {"peers": np.array([[box & 0xFFFFFFFF, box >> 32] for box in boxes], np.int32)}
        placed: list[dict[str, Any]] = []
        new: list[dict[str, Operand]] = []
        for rank, tree in enumerate(operands):
            named = dict(tree) | (peers if boxes else {})
            placed.append(
                jax.tree_util.tree_map_with_path(
                    lambda path, x, rank=rank: Operand(
                        memory.place(f"rank {rank}: {jax.tree_util.keystr(path)}", x), x.shape
                    ),
                    named,
                )
            )
            new.append(
                {name: Operand(memory.place(f"rank {rank}: {name}", x), x.shape) for name, x in fresh.items()}
            )
        stages = {
            geometry.small_at + self.context.FULL_AT + 8 * i: (i * RING_STAGE_BYTES, RING_STAGE_BYTES)
            for i in range(RING_STAGES)
        }
        shared_bytes = -(-geometry.shared_bytes // 16) * 16
        # A step that is given up says so in these, from any thread, and only once.
        flags = [geometry.small_at + self.context.DEAD_AT]
        flags += [geometry.small_at + self.context.RUN_AT + 4 * b for b in range(geometry.plan.B)]
        sms = geometry.plan.sms
        blocks = sms * len(operands)
        device = Device(memory, blocks, THREADS, CONSUMERS, shared_bytes, seed, stages, flags, sms)
        self.modules.device = device

        def body() -> None:
            rank = device.me.block.number // sms
            moving = {name: placed[rank][name] for name in _operands.ALIASED}
            fixed = {name: leaf for name, leaf in placed[rank].items() if name not in _operands.ALIASED}
            self.entry.step(fixed, moving, new[rank], geometry)

        device.run(body)

        def back(operand: Any, like: Any) -> np.ndarray:
            data = memory.bytes[operand.address : operand.address + like.nbytes]
            return data.view(like.dtype).reshape(like.shape).copy()

        for box, address in zip(mailboxes, boxes, strict=True):
            box[...] = memory.bytes[address : address + box.nbytes].view(box.dtype)
        outs = []
        for rank, tree in enumerate(operands):
            moved = {
                name: jax.tree.map(back, placed[rank][name], tree[name], is_leaf=_is_operand)
                for name in _operands.ALIASED
            }
            outs.append(moved | {name: back(new[rank][name], fresh[name]) for name in new[rank]})
        return outs


def _is_operand(x: Any) -> bool:
    return isinstance(x, Operand)


def _poison(leaf: Any) -> np.ndarray:
    """An array of NaN, or of a large number."""
    return np.full(leaf.shape, np.nan if leaf.dtype == np.float32 else 0x7FC07FC0, leaf.dtype)


# -- operands -------------------------------------------------------------------------------------


def operands_of(
    schedule: Schedule,
    tables: Any,
    params: Mapping[str, Any],
    state: Any,
    tokens: Any,
    active: Any,
    rank: int = 0,
) -> dict[str, Any]:
    """The operands of a step, or of a share's first segment, as numpy arrays; the workspace is NaN but for
    its counters.

    Args:
        tables: ``kernel.tables.kernel_tables`` of the schedule, of a share ``segment_tables``.
        params: numpy tree; state: a State of numpy arrays; of a share the rank's own.
    """
    p = schedule.plan
    packed = {}
    for name, (dtype, shape) in _operands.packed_shapes(p).items():
        parts = [np.asarray(_operands.packed_part(params, p, name, i)) for i in range(shape[0])]
        packed[name] = np.stack(parts).astype(BF16 if dtype == "bfloat16" else dtype)
    work = np.full(_operands.workspace_bytes(p, schedule.counters) // 4, 0x7FC07FC0, np.int32)
    counters = _operands.workspace(p, schedule.counters)["counters"]
    work[counters.offset // 4 : (counters.offset + counters.nbytes) // 4] = 0
    experts = tuple(
        {
            name: np.asarray(leaf)
            for name, leaf in _operands.expert_operands(layer["block_sparse_moe"]).items()
        }
        for layer in params["layers"]
        if "block_sparse_moe" in layer
    )
    if p.ways > 1:
        take = np.full((p.B, p.exchanged), np.nan, np.float32)
        own = {"take": take, "rank": np.array([rank], np.int32)}
        own |= {"peers": np.zeros((p.ways, 2), np.int32)} if p.peers else {}
    else:
        own = {"embed": params["embed_tokens"]}
    out = {
        "packed": packed,
        "experts": experts,
        **own,
        "state": tuple({name: np.asarray(x) for name, x in layer.items()} for layer in state.layers),
        "lengths": np.asarray(state.lengths, np.int32),
        "status": np.asarray(state.status, np.int32),
        "work": work,
        "fault": np.zeros(_operands.FAULT_WORDS, np.int32),
        "epoch": np.zeros(1, np.int32),
        "tokens": np.asarray(tokens, np.int32),
        "active": np.asarray(active).astype(np.int32),
        "max_length": np.array([state.max_length], np.int32),
        "records": tables.records,
        "program": tables.program,
        "starts": tables.starts if tables.starts.ndim == 1 else tables.starts[0],
    }
    rows = next((s["cache"].shape[1] for s in out["state"] if "cache" in s), 0)
    want = abstract_operands(p, schedule.counters, len(tables.records), len(tables.program), rows)
    jax.tree.map(_check, want, out)
    return out


def _check(want: Any, have: Any) -> None:
    if tuple(want.shape) != have.shape or np.dtype(want.dtype) != have.dtype:
        raise ValueError(f"operands: expected {want.dtype} {want.shape}, got {have.dtype} {have.shape}")


def fields_of(geometry: Geometry, work: np.ndarray) -> dict[str, np.ndarray]:
    """The workspace by field."""
    return {name: _cut(field, work) for name, field in geometry.fields.items()}


def _cut(field: Field, work: np.ndarray) -> np.ndarray:
    data = work.view(np.uint8)[field.offset : field.offset + field.nbytes]
    return data.view(BF16 if field.dtype == "bfloat16" else field.dtype).reshape(field.shape)


__all__ = ["KERNEL", "Kernel", "fields_of", "in_place_of", "operands_of"]
