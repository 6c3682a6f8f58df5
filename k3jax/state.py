"""The decode state of a batch of sequences: a value, passed in and returned.

A KDA layer keeps a recurrent state and the last inputs of its short convolution, an MLA layer
one latent row per token; nothing else crosses tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .axes import Axes

if TYPE_CHECKING:
    from .config import K3Config

CACHE_BLOCK = 256
"""Latent cache rows are allocated in multiples of this many tokens."""

KERNEL_LEAVES = ("work", "epoch", "fault")
"""What ``State.kernel`` holds."""

STATUS_FULL = 1
"""Status bit: a token was refused because the row's capacity is used up."""
STATUS_BAD_TOKEN = 2
"""Status bit: a token id outside 0..vocab_size-1 was refused."""

_STATUS_TEXT = {
    STATUS_FULL: "the row is full (max_length={max_length})",
    STATUS_BAD_TOKEN: "a token id outside the vocabulary",
}


class ConsumedStateError(RuntimeError):
    """The state's buffers were donated to a step; only the state that step returned is valid."""


class KernelFaultError(RuntimeError):
    """The megakernel gave up waiting inside a step; the state's contents are lost.

    Attributes:
        record: what it waited for: ``stage``, ``layer``, ``sm``, ``counter``, ``target``, ``value``, ...
    """

    def __init__(self, message: str, record: dict[str, Any]):
        super().__init__(message)
        self.record = record


class StateError(RuntimeError):
    """A compiled step refused a row; raised by :func:`check`. ``rows`` are the rows concerned."""

    def __init__(self, message: str, rows: list[int]):
        super().__init__(message)
        self.rows = rows


def _is_consumed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


@dataclasses.dataclass(frozen=True, repr=False)
class State:
    """State of B rows; a pytree whose arrays may be donated.

    Attributes:
        layers: one dict per layer. KDA: ``S`` float32 [B, N, V, K], the recurrent state with
            values first, and ``conv`` [B, 3, q | k | v channels], the last three raw inputs of the
            short convolution, oldest first. MLA: ``cache`` [B, S, C + R], latent rows [c | r].
        lengths: int32 [B], tokens each row holds.
        status: int32 [B], 0 or the STATUS_ bits of refusals since the row began.
        max_length: tokens a row can hold in all (static).
        kernel: None, or what the megakernel keeps between steps, int32: ``work`` (workspace and hand-off
            counters), ``epoch`` [1] (steps so far) and ``fault`` (0, or why a step gave up). Made for a
            batch size; ``work`` and ``epoch`` hold nothing of the sequences.
    """

    # Any: transformations also rebuild the tree around shapes, shardings and axis names.
    layers: tuple[Mapping[str, Any], ...]
    lengths: Any
    status: Any
    max_length: int
    kernel: Any = None

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def __repr__(self) -> str:
        if _is_consumed(self.lengths):
            return f"State(consumed, max_length={self.max_length})"
        return f"State(lengths={self.lengths}, max_length={self.max_length}, {len(self.layers)} layers)"

    def ensure_usable(self) -> None:
        """Raise ConsumedStateError if a step has taken this state's buffers."""
        if any(_is_consumed(leaf) for leaf in (self.lengths, *self._layer_leaves())):
            raise ConsumedStateError("state was consumed; use the returned one")

    def _layer_leaves(self) -> list[jax.Array]:
        kernel = [] if self.kernel is None else list(self.kernel.values())
        return [array for layer in self.layers for array in layer.values()] + kernel

    def select(self, rows: Sequence[int] | np.ndarray | jax.Array) -> State:
        """A new state of the given rows, in that order; repeats are allowed.

        It has no kernel leaves, which belong to a batch size: methods of Model add them where needed,
        under your own jit :func:`k3jax.custom_calls.step.with_kernel` does.

        Args:
            rows: integer [B'], each in 0..B-1.

        Raises:
            KernelFaultError: the contents are lost.
            IndexError: a row that does not exist.
            TypeError: not integers.
            ValueError: no rows.
        """
        self.ensure_usable()
        index = np.asarray(rows)
        if index.size == 0:
            raise ValueError("rows: expected at least one row, got none")
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
            raise TypeError(f"rows: expected a sequence of integers, got {rows!r}")
        if ((index < 0) | (index >= self.batch)).any():
            raise IndexError(f"rows: expected 0..{self.batch - 1}, got {index.tolist()}")
        index = index.astype(np.int32)
        check_fault(self)
        from .mesh.transfer import take_rows

        rows_alone = dataclasses.replace(self, kernel=None)
        return jax.tree.map(lambda array: take_rows(array, index), rows_alone)

    def fork(self, n: int) -> State:
        """Each row ``n`` times, copies of a row side by side: rows b*n .. b*n+n-1 continue row b.

        Raises:
            ValueError: n < 1.
        """
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ValueError(f"n: expected an integer of at least 1, got {n!r}")
        return self.select(np.repeat(np.arange(self.batch), n))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to ``path``, one file (safetensors); read it with :meth:`restore`.

        The contents of the kernel's workspace are not kept: a restored state has a fresh one. Where the
        state spans processes, all call together, process 0 writes, and all return when it has.

        Raises:
            KernelFaultError: the contents are lost.
            FileNotFoundError: there is no folder for it; IsADirectoryError: ``path`` is a folder.
        """
        from safetensors.numpy import save_file

        from .mesh.transfer import host, spans_processes, wait_for_all

        self.ensure_usable()
        check_fault(self)
        tensors = {name: np.ascontiguousarray(host(leaf)) for name, leaf in self._named().items()}
        meta = {
            "format": "k3jax.State",
            "max_length": str(self.max_length),
            "layers": json.dumps(len(self.layers)),
        }
        if self.kernel is not None:
            meta["kernel"] = json.dumps({name: leaf.shape[0] for name, leaf in self.kernel.items()})
        target = Path(path)
        if target.is_dir():
            raise IsADirectoryError(f"path: expected a file, got the folder {target}")
        if not target.parent.is_dir():
            raise FileNotFoundError(f"path: there is no folder {target.parent}")
        partial = target.with_name(target.name + ".partial")
        together = spans_processes(self.lengths)
        if not together or jax.process_index() == 0:
            save_file(tensors, partial, metadata=meta)
            os.replace(partial, target)
        if together:
            wait_for_all(f"k3jax.State.save {target.name}")

    @classmethod
    def restore(cls, path: str | os.PathLike[str]) -> State:
        """Read a state that :meth:`save` wrote, bit for bit.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a saved state.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"no saved state at {os.fspath(path)}")
        try:
            opened = safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise ValueError(f"{os.fspath(path)}: expected a file written by State.save: {error}") from error
        with opened as file:
            meta = file.metadata() or {}
            if meta.get("format") != "k3jax.State" or not {"layers", "max_length"} <= set(meta):
                raise ValueError(f"{os.fspath(path)}: expected a file written by State.save")
            layers: list[dict[str, jax.Array]] = [{} for _ in range(int(meta["layers"]))]
            top: dict[str, jax.Array] = {}
            for key in file.keys():  # noqa: SIM118 (a file, not a dict)
                array = jnp.asarray(file.get_tensor(key))
                if key.startswith("layers."):
                    _, layer, name = key.split(".")
                    layers[int(layer)][name] = array
                else:
                    top[key] = array
        sizes = json.loads(meta["kernel"]) if "kernel" in meta else None
        kernel = None if sizes is None else {name: jnp.zeros(n, jnp.int32) for name, n in sizes.items()}
        return cls(tuple(layers), top["lengths"], top["status"], int(meta["max_length"]), kernel)

    def _named(self) -> dict[str, jax.Array]:
        named = {f"layers.{i}.{k}": v for i, layer in enumerate(self.layers) for k, v in layer.items()}
        return {"lengths": self.lengths, "status": self.status, **named}


def _flatten(state: State) -> tuple[tuple[Any, ...], int]:
    # Every jit boundary flattens its arguments, so this is where reuse of a donated state is
    # caught with our words instead of an error that names an array.
    if _is_consumed(state.lengths):
        raise ConsumedStateError("state was consumed; use the returned one")
    return (state.layers, state.lengths, state.status, state.kernel), state.max_length


def _flatten_with_keys(state: State) -> tuple[tuple[Any, ...], int]:
    children, max_length = _flatten(state)
    names = ("layers", "lengths", "status", "kernel")
    return tuple((jax.tree_util.GetAttrKey(n), c) for n, c in zip(names, children, strict=True)), max_length


def _unflatten(max_length: int, children: Any) -> State:
    layers, lengths, status, kernel = children
    return State(layers, lengths, status, max_length, kernel)


jax.tree_util.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)


def cache_rows(max_length: int) -> int:
    """Latent cache rows allocated for a capacity of ``max_length`` tokens."""
    return -(-max_length // CACHE_BLOCK) * CACHE_BLOCK


def default_max_length(config: K3Config, length: int) -> int:
    """Capacity for a prompt of ``length`` tokens: 256 more, rounded up to 256, within the model's limit."""
    return min(cache_rows(length + 256), config.max_position_embeddings)


def check_max_length(config: K3Config, max_length: int) -> int:
    if isinstance(max_length, bool) or not isinstance(max_length, (int, np.integer)):
        raise TypeError(f"max_length: expected an integer, got {max_length!r}")
    if not 1 <= max_length <= config.max_position_embeddings:
        raise ValueError(
            f"max_length: expected 1..{config.max_position_embeddings} (max_position_embeddings), "
            f"got {max_length}"
        )
    return int(max_length)


def abstract_state(config: K3Config, batch: int, max_length: int, dtype: Any) -> State:
    """Shapes and dtypes of a state, as ``jax.ShapeDtypeStruct``.

    Args:
        dtype: of the convolution taps and the latent cache, the model's compute dtype.
    """
    if batch < 0:
        raise ValueError(f"batch: expected at least 0, got {batch}")
    check_max_length(config, max_length)
    c = config

    def layer(kind: str) -> dict[str, Any]:
        if kind == "kda":
            heads = (batch, c.kda_num_heads, c.kda_v_head_dim, c.kda_head_dim)
            taps = (batch, c.short_conv_kernel_size - 1, c.conv_channels)
            return {"S": jax.ShapeDtypeStruct(heads, jnp.float32), "conv": jax.ShapeDtypeStruct(taps, dtype)}
        rows = (batch, cache_rows(max_length), c.kv_lora_rank + c.qk_rope_head_dim)
        return {"cache": jax.ShapeDtypeStruct(rows, dtype)}

    vector = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return State(tuple(layer(kind) for kind in c.layer_types), vector, vector, int(max_length))


def init_state(
    config: K3Config,
    batch: int,
    max_length: int,
    dtype: Any = jnp.bfloat16,
    implementation: str = "xla",
) -> State:
    """A state of ``batch`` empty rows: all zeros.

    Args:
        max_length: tokens a row can hold, 1..max_position_embeddings.
        dtype: the model's compute dtype (bfloat16 or float32).
        implementation: "megakernel" adds the kernel's leaves; the other implementations need none, and
            carry them along.

    Raises:
        ValueError: batch or max_length out of range; NotImplementedError: a batch the kernel does not take.
    """
    state = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_state(config, batch, max_length, dtype)
    )
    if implementation != "megakernel":
        return state
    from .custom_calls.step import with_kernel

    return with_kernel(state, config)


def check_state(config: K3Config, state: State, dtype: Any) -> None:
    """Raise unless ``state`` is one of the model's: its layers, shapes and dtypes.

    Args:
        dtype: the model's compute dtype.

    Raises:
        ValueError: names the array, what was expected and what came.
    """
    want = abstract_state(config, state.batch, state.max_length, dtype)
    if state.batch < 1 or len(state.layers) != len(want.layers):
        raise ValueError(
            f"state: expected at least one row and {len(want.layers)} layers, "
            f"got {state.batch} rows and {len(state.layers)} layers"
        )
    for i, (have, expected) in enumerate(zip(state.layers, want.layers, strict=True)):
        if set(have) != set(expected):
            raise ValueError(f"state: layer {i}: expected {sorted(expected)}, got {sorted(have)}")
        for name, leaf in expected.items():
            array = have[name]
            if array.shape != leaf.shape or array.dtype != leaf.dtype:
                raise ValueError(
                    f"state: layer {i}, {name}: expected {leaf.dtype} {list(leaf.shape)}, as this model "
                    f"has it, got {array.dtype} {list(array.shape)}"
                )
    if state.kernel is not None and set(state.kernel) != set(KERNEL_LEAVES):
        raise ValueError(f"state.kernel: expected {sorted(KERNEL_LEAVES)}, got {sorted(state.kernel)}")


def state_axes(config: K3Config, max_length: int, kernel: bool = False) -> State:
    """Logical axis names of every state array, see :mod:`k3jax.axes`.

    Args:
        kernel: for a state with kernel leaves; they are whole on every device.
    """

    def layer(kind: str) -> dict[str, Any]:
        if kind == "kda":
            return {"S": Axes(("batch", "kda_heads", None, None)), "conv": Axes(("batch", None, None))}
        return {"cache": Axes(("batch", None, None))}

    vector: Any = Axes(("batch",))
    whole = {name: Axes((None,)) for name in KERNEL_LEAVES} if kernel else None
    return State(tuple(layer(kind) for kind in config.layer_types), vector, vector, max_length, whole)


def check_fault(state: State) -> None:
    """Raise if a step of the megakernel gave up; waits for the state. Traced states are not looked at.

    Raises:
        KernelFaultError: says which wait was not satisfied.
    """
    if state.kernel is not None and not isinstance(state.kernel["fault"], jax.core.Tracer):
        raise_fault(np.asarray(state.kernel["fault"]))


def raise_fault(record: np.ndarray) -> None:
    """Raise for a fault record, int32 [FAULT_WORDS], that is not zero.

    Raises:
        KernelFaultError: names the stage, layer, SM and counter.
    """
    if not record[0]:
        return
    from .custom_calls.decode_megakernel.instructions import Op
    from .custom_calls.decode_megakernel.operands import FAULT_FIELDS

    found: dict[str, Any] = dict(zip(FAULT_FIELDS, (int(word) for word in record), strict=False))
    ops = {int(op): op.name for op in Op}
    found["stage"] = ops.get(found["op"], f"operation {found['op']}")
    raise KernelFaultError(
        f"the megakernel gave up (code {found['code']}): stage {found['stage']} of layer {found['layer']}, "
        f"SM {found['sm']}: counter {found['counter']} had "
        f"{found['value']} of {found['target']} arrivals (step {found['epoch']}); the contents of this state "
        "are lost, start its rows anew",
        found,
    )


def check(state: State) -> None:
    """Raise for every row that a compiled step refused; waits for the state.

    Where the state spans processes, all must ask together.

    Raises:
        KernelFaultError: the megakernel gave up; the state's contents are lost.
        StateError: names the rows and why; the rows' states are as they were before the refusal.
        ConsumedStateError: the state was donated.
    """
    from .mesh.transfer import host

    state.ensure_usable()
    check_fault(state)
    status = host(state.status)
    rows = np.flatnonzero(status).tolist()
    if rows:
        why = [
            f"row {row}: " + " and ".join(t for bit, t in _STATUS_TEXT.items() if status[row] & bit)
            for row in rows
        ]
        raise StateError("; ".join(why).format(max_length=state.max_length), rows)


__all__ = [
    "KERNEL_LEAVES", "STATUS_BAD_TOKEN", "STATUS_FULL", "ConsumedStateError", "KernelFaultError", "State",
    "StateError", "abstract_state", "cache_rows", "check", "check_fault", "check_max_length", "check_state",
    "default_max_length", "init_state", "raise_fault", "state_axes",
]  # fmt: skip
