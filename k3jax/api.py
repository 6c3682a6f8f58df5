"""The model a user holds: parameters, configuration and tokenizer, with checked methods.

Methods check their arguments on the host, before anything is dispatched, and leave the state they
are given usable. The pure functions behind them are in :mod:`k3jax.model`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from . import axes, model, sharded_step
from .config import K3Config
from .implementations import choose, choose_on, resolve, step_inputs
from .layer_scan import prefer_scan
from .mesh import MeshPlan, planned_state
from .mesh.states import fit_rows
from .mesh.transfer import host
from .model import PREFILL_CHUNK, LogitsMode, Params, check_logits_mode
from .nnx_model import check_dtype
from .state import State, abstract_state, check_max_length, default_max_length

if TYPE_CHECKING:
    from .generate import GenerateResult, StreamStep
    from .sampling import Sampling
    from .tokenizer import Tokenizer


class TokenError(ValueError, TypeError):
    """Tokens that are not ids of the vocabulary."""


class CapacityError(ValueError):
    """Tokens that do not fit in a row; nothing was dispatched and the state is as it was."""


_chunk = jax.jit(
    model.prefill_chunk,
    static_argnames=("config", "logits", "num_blocks", "scan_layers"),
    donate_argnames=("state", "last"),
)
_decode = jax.jit(model.decode_step, static_argnames=("config", "implementation", "scan_layers"))
_head = jax.jit(model.lm_head)

_planned_chunk = jax.jit(
    sharded_step.prefill_chunk,
    static_argnames=("config", "plan", "logits"),
    donate_argnames=("state", "last"),
)
_planned_decode = jax.jit(sharded_step.decode_step, static_argnames=("config", "plan", "implementation"))
_planned_head = jax.jit(sharded_step.head, static_argnames="plan")


@partial(jax.jit, static_argnames=("config", "batch", "max_length", "dtype", "shardings"))
def _zeros(config: K3Config, batch: int, max_length: int, dtype: Any, shardings: Any) -> State:
    from .state import init_state

    state = init_state(config, batch, max_length, dtype)
    if shardings is None:
        return state
    return jax.tree.map(jax.lax.with_sharding_constraint, state, jax.tree.unflatten(*shardings))


class Model:
    """A K3 model: what :func:`k3jax.load` and :func:`k3jax.random_model` return.

    Attributes:
        params: the parameter tree, see :func:`k3jax.prefill`.
        config: the architecture.
        tokenizer: text to ids and back.
        mesh: the plan or device mesh that the parameters are laid out by, or None.
        plan: ``mesh`` if it is a :class:`k3jax.mesh.MeshPlan`, else None. Under a plan a state has rows
            padded to a multiple of ``plan.data``, the extra ones empty and never active.
        implementation: how decode steps run, see :mod:`k3jax.implementations`.
        auto: whether it was chosen, not given; then batches that it does not take run as "xla".
        scan_layers: whether compiled steps loop over the layers (deep, small models).
    """

    def __init__(
        self,
        params: Params,
        config: K3Config,
        tokenizer: Tokenizer | None = None,
        *,
        mesh: Mesh | MeshPlan | None = None,
        implementation: str = "auto",
    ):
        if tokenizer is None:
            from .tokenizer import ByteTokenizer

            tokenizer = ByteTokenizer()
        self.params = params
        self.config = config
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.plan = mesh if isinstance(mesh, MeshPlan) else None
        self.implementation = resolve(implementation)
        if self.plan is not None:
            _check_planned_params(params, config, self.plan)
        self.scan_layers = self.plan is None and prefer_scan(config)
        self.auto = implementation == "auto" and mesh is None
        if implementation == "auto":
            if not isinstance(mesh, Mesh):
                self.implementation = choose("auto", config, 1, params, plan=self.plan)
            return
        # What cannot run is refused before anything is packed.
        if self.plan is not None or self.implementation != "xla":
            choose(self.implementation, config, 1, self._looked_at(), plan=self.plan)
        if self.implementation == "megakernel":
            self.pack()
        elif self.implementation.startswith("pallas"):
            from .pallas.fit import check_scales  # it needs Pallas' GPU half; only where it is asked

            check_scales(params)

    def _looked_at(self) -> Params | None:
        """The parameters that an implementation is asked about: not before the megakernel's are packed."""
        return None if self.implementation.startswith("megakernel") else self.params

    def __repr__(self) -> str:
        c = self.config
        return (
            f"k3jax.Model({c.num_hidden_layers} layers, hidden {c.hidden_size}, {c.num_experts} experts, "
            f"{c.param_count():,} parameters, implementation={self.implementation!r})"
        )

    @property
    def dtype(self) -> Any:
        """Compute dtype: bfloat16, or float32 for a model loaded with dtype="float32"."""
        return self.params["embed_tokens"].dtype

    def pack(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Add the dense weights in the megakernel's layout to ``params``, made on their device.

        They take as many bytes as the dense weights do. The other implementations ignore them. A model
        whose implementation is "auto" chooses anew.

        Args:
            folder: keep them there: read if it holds this model's packed weights, else written.

        Raises:
            NotImplementedError: float32 parameters, float experts, several devices without a plan, a
                folder under a plan.
            ValueError: expert scales that the kernel does not decode exactly.
        """
        if self.plan is not None:
            from .custom_calls import planned

            if folder is not None:
                raise NotImplementedError("folder: packed weights of a plan are made anew, not kept in files")
            self.params = planned.with_packed(self._plain_params(), self.config, self.plan)
            return
        from .custom_calls.pack import with_packed

        self.params = with_packed(self.params, self.config, folder)
        if self.auto:
            self.implementation = choose("auto", self.config, 1, self.params)

    def _plain_params(self) -> Params:
        """``params`` without packed weights: what a plan's other steps take."""
        return {name: leaf for name, leaf in self.params.items() if name != "megakernel"}

    def _with_kernel(self, state: State) -> State:
        """``state`` with what the megakernel keeps between steps, if its steps are to run so."""
        if self.plan is not None and self.implementation.startswith("megakernel"):
            from .custom_calls import planned

            return planned.ready(state, self.config, self.plan, self.implementation)
        if state.kernel is not None or step_inputs(self, state.batch)[1] != "megakernel":
            return state
        from .custom_calls.step import with_kernel

        return with_kernel(state, self.config)

    def init_state(self, batch: int, max_length: int) -> State:
        """A state of ``batch`` empty rows that can hold ``max_length`` tokens each.

        Raises:
            ValueError: batch < 1 or max_length outside 1..max_position_embeddings.
        """
        if batch < 1:
            raise ValueError(f"batch: expected at least 1, got {batch}")
        limit = check_max_length(self.config, max_length)
        if self.plan is not None:
            return self._with_kernel(planned_state(self.config, self.plan, batch, limit, self.dtype))
        shardings = None
        if isinstance(self.mesh, Mesh):
            shapes = abstract_state(self.config, batch, limit, self.dtype)
            leaves, treedef = jax.tree.flatten(axes.state_shardings(self.config, self.mesh, shapes))
            shardings = (treedef, tuple(leaves))
        return self._with_kernel(_zeros(self.config, batch, limit, jnp.dtype(self.dtype), shardings))

    def prefill(
        self,
        tokens: Any,
        lengths: Any = None,
        state: State | None = None,
        max_length: int | None = None,
        logits: LogitsMode = "all",
    ) -> tuple[jax.Array | None, State]:
        """Prompts of B rows through the model.

        Args:
            tokens: integers [B, T]; row b holds ``tokens[b, :lengths[b]]``, the rest is padding.
            lengths: integers [B], 0..T; default T for every row. A row of length 0 keeps its state
                bit for bit.
            state: continue these rows; it stays usable. None starts new rows.
            max_length: tokens a row can hold in all, only with ``state=None``; default T + 256
                rounded up to 256, at most ``config.max_position_embeddings``.
            logits: "all" for float32 [B, T, W], 0 past a row's length; "last" for [B, W] at each
                row's last token; "none" or None for None.

        Returns:
            (logits, state).

        Raises:
            TokenError: tokens that are not integers within the vocabulary (a ValueError).
            CapacityError: a row would pass its capacity (a ValueError).
            ValueError: wrong shapes or arguments.
            ConsumedStateError: the state was donated.
        """
        check_logits_mode(logits)
        ids = _integers(tokens, "tokens", 2)
        batch, length = ids.shape
        if batch < 1:
            raise ValueError("tokens: expected at least one row, got none")
        counts = np.full(batch, length) if lengths is None else _integers(lengths, "lengths", 1)
        if counts.shape != (batch,) or ((counts < 0) | (counts > length)).any():
            raise ValueError(f"lengths: expected {batch} integers in 0..{length}, got {counts.tolist()}")
        counts = counts.astype(np.int64)  # an unsigned difference would wrap around
        real = np.arange(length) < counts[:, None]
        _check_ids(np.where(real, ids, 0), self.config)
        if state is None:
            limit = default_max_length(self.config, length) if max_length is None else max_length
            held = np.zeros(batch, np.int64)
        else:
            if max_length is not None:
                raise ValueError("max_length: only with state=None; a state has its own")
            state.ensure_usable()
            state = self._fitted(state, batch)
            limit, held = state.max_length, host(state.lengths)[:batch].astype(np.int64)
        _check_capacity(held, counts, check_max_length(self.config, limit))
        # The passes below update their state in place, so they get one of their own.
        own: State = self.init_state(batch, limit) if state is None else jax.tree.map(jnp.copy, state)
        ids, counts = _padded(own.batch, np.where(real, ids, 0), counts)
        out, own = self._passes(ids, counts, own, logits)
        return (None if out is None else out[:batch]), own

    def _fitted(self, state: State, batch: int) -> State:
        """``state`` if it is for ``batch`` rows; under a plan, rows that were selected are padded again."""
        if self.plan is not None:
            return fit_rows(state, batch, self.config, self.plan)
        if state.batch != batch:
            raise ValueError(f"tokens: expected {state.batch} rows, as the state has, got {batch}")
        return state

    def _passes(
        self, ids: np.ndarray, counts: np.ndarray, state: State, mode: LogitsMode
    ) -> tuple[jax.Array | None, State]:
        """The prompt in passes of PREFILL_CHUNK tokens, one program for every pass of any prompt."""
        batch, length = ids.shape
        every: LogitsMode = "all" if mode == "all" else "none"
        # On the device from the start, as every later pass has it: one program. Under a plan the host's
        # array serves all processes.
        zeros: Any = jnp.zeros if self.plan is None else np.zeros
        last = zeros((batch, self.config.hidden_size), self.dtype)
        out = []
        for start in range(0, max(int(counts.max(initial=0)), 1), PREFILL_CHUNK):
            piece = np.zeros((batch, PREFILL_CHUNK), np.int32)
            piece[:, : min(PREFILL_CHUNK, length - start)] = ids[:, start : start + PREFILL_CHUNK]
            real = np.clip(counts - start, 0, PREFILL_CHUNK).astype(np.int32)
            logits, last, state = self._pass(state, last, piece, real, every)
            out.append(logits)
        if mode == "last":
            head = _head if self.plan is None else partial(_planned_head, plan=self.plan)
            logits = head(self.params, last)
            return jnp.where(jnp.asarray(counts > 0)[:, None], logits, 0.0), state
        if mode != "all":
            return None, state
        whole = jnp.concatenate(out, axis=1)[:, :length]
        missing = length - whole.shape[1]  # columns that are padding in every row
        return jnp.pad(whole, ((0, 0), (0, missing), (0, 0))), state

    def _pass(self, state: State, last: Any, piece: np.ndarray, real: np.ndarray, every: LogitsMode) -> Any:
        if self.plan is not None:
            bare = dataclasses.replace(state, kernel=None)
            out, last, new = _planned_chunk(
                self._plain_params(), bare, last, piece, real,
                config=self.config, plan=self.plan, logits=every,
            )  # fmt: skip
            return out, last, dataclasses.replace(new, kernel=state.kernel)
        return _chunk(
            self.params, state, last, piece, real,
            config=self.config, logits=every, scan_layers=self.scan_layers,
        )  # fmt: skip

    def decode_step(self, tokens: Any, state: State, active: Any = None) -> tuple[jax.Array, State]:
        """One token per row; the state given stays usable.

        Args:
            tokens: integers [B].
            state: of B rows.
            active: bool [B]; a row that is not active keeps its state bit for bit and has logits 0.

        Returns:
            float32 logits [B, W] and the new state.

        Raises:
            TokenError, CapacityError, ValueError, ConsumedStateError: as :meth:`prefill`.
        """
        state.ensure_usable()
        ids = _integers(tokens, "tokens", 1)
        batch = ids.shape[0]
        if self.plan is None and batch != state.batch:
            raise ValueError(f"tokens: expected {state.batch} tokens, as the state has rows, got {batch}")
        state = self._fitted(state, batch)
        live = np.ones(batch, bool) if active is None else np.asarray(active)
        if live.dtype != bool or live.shape != (batch,):
            raise ValueError(f"active: expected bool [{batch}], got {live.dtype} {list(live.shape)}")
        _check_ids(np.where(live, ids, 0), self.config)
        held = host(state.lengths)[:batch].astype(np.int64)
        _check_capacity(held, live.astype(np.int64), state.max_length)
        ids = np.where(live, ids, 0).astype(np.int32)
        if self.plan is not None:
            ids, live = _padded(state.batch, ids, live)
            params, implementation = step_inputs(self, state.batch)
            logits, state = _planned_decode(
                params, self._with_kernel(state), ids, live,
                config=self.config, plan=self.plan, implementation=implementation,
            )  # fmt: skip
            return logits[:batch], state
        params, implementation = step_inputs(self, state.batch)
        return _decode(
            params, self._with_kernel(state), ids, live,
            config=self.config, implementation=implementation, scan_layers=self.scan_layers,
        )  # fmt: skip

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | Sequence[int] = 0,
    ) -> GenerateResult:
        """Continue prompts, see :func:`k3jax.generate.generate`."""
        from .generate import generate

        return generate(self, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)

    def stream(
        self,
        prompts: Any,
        max_new_tokens: int = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | Sequence[int] = 0,
    ) -> Iterator[StreamStep]:
        """Continue prompts step by step, see :func:`k3jax.generate.stream`."""
        from .generate import stream

        return stream(self, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)


def load(
    path_or_name: str | os.PathLike[str],
    dtype: str | None = None,
    mesh: Mesh | MeshPlan | None = None,
    implementation: str = "auto",
    progress: bool = True,
) -> Model:
    """Load a checkpoint: a directory in the release's format, one made by ``k3jax convert``, or a
    name that ships with the library.

    Args:
        path_or_name: for example "nano".
        dtype: None keeps the released dtypes; "float32" computes everything in float32.
        mesh: lay the parameters out by a plan, see :mod:`k3jax.mesh`; or shard them over a
            ``jax.sharding.Mesh``, where the compiler places the communication, see :mod:`k3jax.axes`.
        implementation: "auto" or a name of :mod:`k3jax.implementations`; "megakernel" packs the weights.
        progress: show progress, time and peak host memory on stderr.

    Raises:
        FileNotFoundError: no such checkpoint; lists the accepted forms.
        ValueError: a dtype or mesh that is not accepted, or a faulty checkpoint (names file and tensor).
        NotImplementedError: an implementation that is not available, with every reason.
    """
    from . import checkpoints
    from .tokenizer import load_tokenizer

    check_dtype(dtype)
    mesh = _accepted(mesh)
    resolve(implementation)
    path = checkpoints.resolve(path_or_name)
    choose_on(implementation, K3Config.from_pretrained(path), mesh)  # before any weight is read
    params, config = checkpoints.load(path, dtype=dtype, mesh=mesh, progress=progress)
    tokenizer = load_tokenizer(path, config)
    return Model(params, config, tokenizer, mesh=mesh, implementation=implementation)


def random_model(
    config: K3Config,
    seed: int = 0,
    dtype: str | None = None,
    mesh: Mesh | MeshPlan | None = None,
    implementation: str = "auto",
) -> Model:
    """A model with random weights in the released dtypes, made on the device.

    Args:
        config: for example ``K3Config.preset("k3-slice", num_layers=4)``.
        seed, dtype, mesh, implementation: as :func:`load`.
    """
    from .mesh.random import random_planned
    from .random_params import random_params

    check_dtype(dtype)
    mesh = _accepted(mesh)
    choose_on(implementation, config, mesh)
    if isinstance(mesh, MeshPlan):
        params = random_planned(config, mesh, seed, dtype)
    else:
        params = random_params(config, seed, dtype, mesh)
    return Model(params, config, mesh=mesh, implementation=implementation)


def _accepted(mesh: Any) -> Mesh | MeshPlan | None:
    if isinstance(mesh, MeshPlan):
        mesh.check_devices()  # before any weight is read
        return mesh
    return None if mesh is None else axes.auto_mesh(mesh)


def _check_planned_params(params: Any, config: K3Config, plan: MeshPlan) -> None:
    plan.check(config)
    for i, layer in enumerate(params["layers"]):
        moe = layer.get("block_sparse_moe")
        if moe is not None and "placement" not in moe:
            raise ValueError(
                f"params: layer {i}: expected a tree laid out by the plan (k3jax.mesh.arrange), "
                "got one without placement"
            )


def _padded(rows: int, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays with zero rows at the end, ``rows`` in all."""
    return tuple(np.pad(a, [(0, rows - a.shape[0])] + [(0, 0)] * (a.ndim - 1)) for a in arrays)


def _integers(value: Any, name: str, ndim: int) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{name}: expected a rectangular integer array, got rows of different lengths"
        ) from error
    if array.size == 0:
        array = array.astype(np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise TokenError(f"{name}: expected integers, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(
            f"{name}: expected {ndim} dimension{'s' * (ndim > 1)}, got shape {list(array.shape)}"
        )
    return array


def _check_ids(ids: np.ndarray, config: K3Config) -> None:
    wrong = (ids < 0) | (ids >= config.vocab_size)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise TokenError(
            f"tokens: expected ids in 0..{config.vocab_size - 1}, got {ids[where]} at {list(where)}"
        )


def _check_capacity(held: np.ndarray, new: np.ndarray, limit: int) -> None:
    over = np.flatnonzero((held + new > limit) & (new > 0))
    if over.size:
        row = int(over[0])
        raise CapacityError(
            f"row {row} holds {held[row]} of max_length={limit} tokens: {new[row]} more do not fit"
        )


__all__ = ["CapacityError", "Model", "TokenError", "load", "random_model"]
