"""Generation: prefill, then decode steps until every row has stopped; at once or step by step.

:func:`generate` and :func:`stream` run the same loop. What a step computes, from embedding to
chosen token, is one compiled function; the host reads three small arrays per step, and the next
step is dispatched before it does.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import model as _model
from . import sharded_step
from .implementations import step_inputs
from .mesh import MeshPlan
from .mesh.transfer import put
from .prompts import Prompts, pad_right, tokenise
from .sampling import Needs, Sampling, Settings, sample, seed_data, settings_of
from .state import State, cache_rows, raise_fault

if TYPE_CHECKING:
    from .api import Model
    from .config import K3Config
    from .tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "error"]

# The number of stop tokens is part of a compiled step's shapes: it is padded to a multiple of this.
_STOP_BLOCK = 8


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What was generated, one entry per row.

    Attributes:
        tokens: new token ids, the stop token last if there was one.
        text: their text without the stop token; invalid UTF-8 becomes U+FFFD.
        logprobs: log_softmax of the raw logits (float32) at each of ``tokens``.
        finish_reason: "stop", "length", or "error" in the result of a NonFiniteLogitsError.
    """

    tokens: list[list[int]]
    text: list[str]
    logprobs: list[list[float]]
    finish_reason: list[FinishReason]


@dataclasses.dataclass(frozen=True)
class StreamStep:
    """One step of :func:`stream`.

    Attributes:
        tokens: int32 [B], the step's token of each row; -1 for rows that had finished before.
        text: text that became complete in this step; characters of which bytes are missing wait.
        finished: bool [B], rows for which this was the last step, or an earlier one.
    """

    tokens: np.ndarray
    text: list[str]
    finished: np.ndarray


class NonFiniteLogitsError(RuntimeError):
    """Rows' logits held NaN or +inf, or banned every token; raised when the other rows had finished.

    Attributes:
        rows: the rows concerned.
        result: what was generated; ``finish_reason`` of those rows is "error".
    """

    def __init__(self, rows: list[int], result: GenerateResult):
        counts = ", ".join(f"row {row} after {len(result.tokens[row])} new tokens" for row in rows)
        super().__init__(f"logits are not finite: {counts}; what was generated is in the error's .result")
        self.rows = rows
        self.result = result


class _Rows(NamedTuple):
    """What stays the same for each row during generation."""

    settings: Settings
    keys: jax.Array  # uint32 [B, 2]
    stop: jax.Array  # int32 [B, n], padded with -1


class _Pick(NamedTuple):
    """Outcome of one step."""

    feed: jax.Array  # int32 [B], the next step's input
    active: jax.Array  # bool [B], rows that go on
    token: jax.Array  # int32 [B], -1 for rows without one
    logprob: jax.Array  # float32 [B]
    finite: jax.Array  # bool [B], False for a row whose logits are not finite
    fault: jax.Array | None = None  # int32, the megakernel's fault record


def _pick(
    logits: jax.Array,
    lengths: jax.Array,
    active: jax.Array,
    rows: _Rows,
    seen: jax.Array | None,
    needs: Needs,
) -> tuple[_Pick, jax.Array | None]:
    """Choose the active rows' tokens and decide which rows go on."""
    with jax.named_scope("sample"):
        tokens, logprobs, finite = sample(logits, rows.settings, rows.keys, lengths, seen, needs=needs)
        chosen = active & finite
        go_on = chosen & ~(tokens[:, None] == rows.stop).any(axis=-1)
        token = jnp.where(chosen, tokens, -1)
        if seen is not None:
            # -1 would count from the end; an index past it is dropped.
            column = jnp.where(chosen, tokens, seen.shape[1])
            seen = seen.at[jnp.arange(seen.shape[0]), column].set(True, mode="drop")
        pick = _Pick(jnp.where(go_on, tokens, 0), go_on, token, logprobs, finite | ~active)
    return pick, seen


def _everywhere(pick: _Pick, plan: MeshPlan | None) -> _Pick:
    """A plan's outcome whole on every device: every process reads it."""
    if plan is None:
        return pick
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, plan.sharding()), pick)


@functools.partial(jax.jit, static_argnames=("needs", "plan"), donate_argnames=("seen",))
def _first_pick(
    logits: jax.Array,
    lengths: jax.Array,
    active: jax.Array,
    rows: _Rows,
    seen: jax.Array | None,
    *,
    needs: Needs,
    plan: MeshPlan | None,
) -> tuple[_Pick, jax.Array | None]:
    pick, seen = _pick(logits, lengths, active, rows, seen, needs)
    return _everywhere(pick, plan), seen


@functools.partial(
    jax.jit,
    static_argnames=("config", "implementation", "scan_layers", "needs", "plan"),
    donate_argnames=("state", "seen"),
)
def _decode_and_pick(
    params: Any, state: State, pick: _Pick, rows: _Rows, seen: jax.Array | None,
    *, config: K3Config, implementation: str, scan_layers: bool, needs: Needs, plan: MeshPlan | None,
) -> tuple[State, _Pick, jax.Array | None]:  # fmt: skip
    """The compiled step: every value that changes from step to step or call to call is an array."""
    if plan is not None:
        logits, state = sharded_step.decode_step(
            params, state, pick.feed, pick.active,
            config=config, plan=plan, implementation=implementation,
        )  # fmt: skip
    else:
        logits, state = _model.decode_step(
            params, state, pick.feed, pick.active,
            config=config, implementation=implementation, scan_layers=scan_layers,
        )  # fmt: skip
    pick, seen = _pick(logits, state.lengths, pick.active, rows, seen, needs)
    if state.kernel is not None:
        pick = pick._replace(fault=state.kernel["fault"])
    return state, _everywhere(pick, plan), seen


class _RowText:
    """Text of one row, complete characters only."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pieces: list[str] = []

    def add(self, tokens: list[int], final: bool) -> str:
        piece = self._decoder.decode(self._tokenizer.decode_bytes(tokens), final)
        self.pieces.append(piece)
        return piece


def _padding_token(config: K3Config, tokenizer: Tokenizer) -> int | None:
    """The padding token, unless its id stands for text: some configs name an ordinary id by default."""
    pad = config.pad_token_id
    usable = pad is not None and 0 <= pad < config.vocab_size and not tokenizer.is_text(pad)
    return pad if usable else None


def _stop_tokens(row: int, sampling: Sampling, config: K3Config, pad: int | None) -> frozenset[int]:
    if sampling.stop_tokens is None:
        return frozenset(config.stop_token_ids if pad is None else (*config.stop_token_ids, pad))
    if bad := [t for t in sampling.stop_tokens if t >= config.vocab_size]:
        raise ValueError(
            f"sampling: row {row}: stop_tokens: expected ids in 0..{config.vocab_size - 1}, got {bad}"
        )
    return frozenset(sampling.stop_tokens)


def _sampling_rows(sampling: Any, batch: int) -> list[Sampling]:
    if sampling is None:
        return [Sampling()] * batch
    if isinstance(sampling, Sampling):
        return [sampling] * batch
    if isinstance(sampling, (str, bytes)) or not isinstance(sampling, Sequence):
        raise TypeError(f"sampling: expected a Sampling or one for each row, got {type(sampling).__name__}")
    if len(sampling) != batch:
        raise ValueError(
            f"sampling: expected a Sampling or one for each of {batch} rows, got {len(sampling)}"
        )
    if bad := [row for row in sampling if not isinstance(row, Sampling)]:
        raise TypeError(f"sampling: expected Sampling for each row, got {type(bad[0]).__name__}")
    return list(sampling)


def _check_new_tokens(max_new_tokens: Any, prompts: list[list[int]], limit: int) -> int:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, (int, np.integer)):
        raise TypeError(f"max_new_tokens: expected an integer, got {max_new_tokens!r}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected at least 0, got {max_new_tokens}")
    for row, ids in enumerate(prompts):
        if len(ids) + max_new_tokens > limit:
            raise ValueError(
                f"prompts: row {row}: {len(ids)} prompt tokens and max_new_tokens={max_new_tokens} exceed "
                f"max_position_embeddings={limit}"
            )
    return int(max_new_tokens)


class _Generation:
    """One call of generate or stream: checked input, and what the rows have generated so far."""

    def __init__(
        self, model: Model, prompts: Prompts, max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None, seed: int | Sequence[int],
    ):  # fmt: skip
        config, tokenizer = model.config, model.tokenizer
        self.model = model
        self.prompts = tokenise(prompts, tokenizer, config.vocab_size)
        batch = len(self.prompts)
        self.plan = model.mesh if isinstance(model.mesh, MeshPlan) else None
        self.padding = 0 if self.plan is None else self.plan.padded(batch) - batch
        self.max_new_tokens = _check_new_tokens(max_new_tokens, self.prompts, config.max_position_embeddings)
        sampling_rows = _sampling_rows(sampling, batch)
        self.pad = _padding_token(config, tokenizer)
        self.stop = [_stop_tokens(row, s, config, self.pad) for row, s in enumerate(sampling_rows)]
        settings, self.needs = settings_of(sampling_rows)
        self.rows = self._pad(_Rows(settings, seed_data(seed, batch), self._stop_table()))
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.logprobs: list[list[float]] = [[] for _ in range(batch)]
        self.text = [_RowText(tokenizer) for _ in range(batch)]
        self.reason: list[FinishReason | None] = [None] * batch

    def _stop_table(self) -> jax.Array:
        longest = max(1, max(len(stop) for stop in self.stop))
        width = -(-longest // _STOP_BLOCK) * _STOP_BLOCK
        table = np.full((len(self.stop), width), -1, np.int32)
        for row, stop in enumerate(self.stop):
            table[row, : len(stop)] = sorted(stop)
        return jnp.asarray(table)

    def _pad(self, tree: Any) -> Any:
        """Under a plan, arrays of the rows with the last row repeated for the padding rows, on the host."""
        if self.plan is None:
            return tree

        def pad(array: Any) -> np.ndarray:
            return np.pad(np.asarray(array), [(0, self.padding)] + [(0, 0)] * (array.ndim - 1), mode="edge")

        return jax.tree.map(pad, tree)

    def _seen(self) -> jax.Array | None:
        """bool [B, W], the prompts' tokens, if a row has a repetition penalty."""
        if not self.needs.penalty:
            return None
        seen = np.zeros((len(self.prompts), self.model.config.vocab_size), bool)
        for row, ids in enumerate(self.prompts):
            seen[row, ids] = True
        return jnp.asarray(seen) if self.plan is None else put(self._pad(seen), self.plan.sharding())

    def _prefill(self) -> tuple[State, _Pick, jax.Array | None]:
        limit = self.model.config.max_position_embeddings
        batch = len(self.prompts)
        tokens, lengths = pad_right([*self.prompts, *([[]] * self.padding)])
        max_length = min(cache_rows(int(lengths.max()) + self.max_new_tokens), limit)
        logits, state = self.model.prefill(tokens, lengths=lengths, max_length=max_length, logits="last")
        active = np.arange(len(lengths)) < batch
        pick, seen = _first_pick(
            logits, state.lengths, active, self.rows, self._seen(), needs=self.needs, plan=self.plan
        )
        self.step_inputs = step_inputs(self.model, len(lengths))
        return state, pick._replace(fault=self._no_fault(state)), seen

    @staticmethod
    def _no_fault(state: State) -> jax.Array | None:
        """Of the first pick, which no step of the megakernel made; so that all picks are one tree."""
        return None if state.kernel is None else jnp.zeros_like(state.kernel["fault"])

    def _advance(
        self, state: State, pick: _Pick, seen: jax.Array | None
    ) -> tuple[State, _Pick, jax.Array | None]:
        model = self.model
        params, implementation = self.step_inputs
        return _decode_and_pick(
            params, state, pick, self.rows, seen,
            config=model.config, implementation=implementation, scan_layers=model.scan_layers,
            needs=self.needs, plan=self.plan,
        )  # fmt: skip

    def _record(self, pick: _Pick) -> StreamStep:
        """Wait for a step and add its outcome to the rows."""
        count = len(self.prompts)
        token, logprob, finite = (x[:count] for x in jax.device_get((pick.token, pick.logprob, pick.finite)))
        if pick.fault is not None:
            raise_fault(np.asarray(pick.fault))
        pieces = [""] * len(token)
        for row, value in enumerate(token.tolist()):
            if self.reason[row] is not None:
                continue
            if not finite[row]:
                self.reason[row] = "error"
            else:
                self.tokens[row].append(value)
                self.logprobs[row].append(float(logprob[row]))
                if value in self.stop[row]:
                    self.reason[row] = "stop"
                elif len(self.tokens[row]) == self.max_new_tokens:
                    self.reason[row] = "length"
            hidden = not finite[row] or value in self.stop[row] or value == self.pad
            pieces[row] = self.text[row].add([] if hidden else [value], final=self.reason[row] is not None)
        return StreamStep(token.astype(np.int32), pieces, np.array([r is not None for r in self.reason]))

    def _finished(self) -> bool:
        return None not in self.reason

    def _loop(self) -> Iterator[StreamStep]:
        if self.max_new_tokens == 0:
            self.reason = ["length"] * len(self.prompts)
            return
        state, pick, seen = self._prefill()
        yield self._record(pick)  # before the decode step is compiled
        if self._finished():
            return
        state, pick, seen = self._advance(state, pick, seen)
        for step in range(2, self.max_new_tokens + 1):
            ahead = None
            if step < self.max_new_tokens:
                # Dispatched before the host reads this step, so that the device does not wait for it.
                # At the end one step may run in vain: it has no active row and touches nothing.
                state, ahead, seen = self._advance(state, pick, seen)
            yield self._record(pick)
            if ahead is None or self._finished():
                return
            pick = ahead

    def steps(self) -> Iterator[StreamStep]:
        """The loop; at its end raises for rows whose logits were not finite."""
        yield from self._loop()
        if bad := [row for row, reason in enumerate(self.reason) if reason == "error"]:
            raise NonFiniteLogitsError(bad, self.result())

    def result(self) -> GenerateResult:
        reasons: list[FinishReason] = [reason for reason in self.reason if reason is not None]
        text = ["".join(row.pieces) for row in self.text]
        return GenerateResult(self.tokens, text, self.logprobs, reasons)


def generate(
    model: Model,
    prompts: Prompts,
    max_new_tokens: int = 64,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | Sequence[int] = 0,
) -> GenerateResult:
    """Continue each prompt until a stop token or ``max_new_tokens`` new tokens.

    Args:
        model: what ``k3jax.load`` or ``k3jax.random_model`` returned.
        prompts: a string, a sequence of token ids, or a sequence (or array [B, T]) of those. Nothing
            is prepended to them.
        max_new_tokens: at least 0; a prompt with it must fit max_position_embeddings.
        sampling: for every row, or a sequence with one for each; None is ``Sampling()``, greedy.
        seed: for every row, or a sequence with one for each, 0..2**64-1. A row's random numbers
            depend on its seed and position alone.

    Returns:
        Lists with one entry per row, also for a single prompt.

    Raises:
        TypeError, ValueError: wrong input; nothing was dispatched then.
        NonFiniteLogitsError: after the other rows have finished.
        KernelFaultError: the megakernel gave up in a step.
    """
    generation = _Generation(model, prompts, max_new_tokens, sampling, seed)
    for _ in generation.steps():
        pass
    return generation.result()


def stream(
    model: Model,
    prompts: Prompts,
    max_new_tokens: int = 64,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | Sequence[int] = 0,
) -> Iterator[StreamStep]:
    """As :func:`generate`, one :class:`StreamStep` at a time; each row's pieces of text add up to its text.

    Wrong input raises here, before the first step is asked for; NonFiniteLogitsError comes after
    the last step.
    """
    return _Generation(model, prompts, max_new_tokens, sampling, seed).steps()


__all__ = ["FinishReason", "GenerateResult", "NonFiniteLogitsError", "StreamStep", "generate", "stream"]
