"""How often does the batch size change a greedy token?

Prompts are continued greedily one at a time. Then each runs again in batches of 2 to 8 with other
prompts beside it, fed the tokens of its first run, so that every position is compared on its own and
a difference does not spread. A flip is a position where the largest logit is another token's. In the
same way the largest change of a logit is measured. Usage::

    python tests/bench/flip_rate.py CHECKPOINT [--tokens 2048] [--dtypes released float32]
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

PROMPT_TOKENS = 24
BATCHES = tuple(range(2, 9))


@dataclasses.dataclass(frozen=True)
class Flips:
    """Outcome for one batch size: positions compared, flips, largest logit change and smallest lead."""

    batch: int
    positions: int
    flips: int
    change: float
    """Largest change of any logit."""
    lead: float
    """Largest lead, in the first run, of a token that lost it."""


def prompts_from(text: str, tokenizer: Any, count: int) -> list[list[int]]:
    """``count`` stretches of the text, evenly spread, of PROMPT_TOKENS tokens each."""
    ids = tokenizer.encode(text)
    if len(ids) < PROMPT_TOKENS + count:
        raise ValueError(f"text: expected at least {PROMPT_TOKENS + count} tokens, got {len(ids)}")
    starts = np.linspace(0, len(ids) - PROMPT_TOKENS, count).astype(int)
    return [ids[start : start + PROMPT_TOKENS] for start in starts]


def run(model: Any, prompts: list[list[int]], new: int, forced: np.ndarray | None) -> np.ndarray:
    """Logits float32 [B, new, W]; ``forced`` int [B, new] feeds those tokens instead of the largest."""
    logits, state = model.prefill(prompts, max_length=len(prompts[0]) + new, logits="last")
    out = [np.asarray(logits)]
    for step in range(new - 1):
        tokens = out[-1].argmax(-1) if forced is None else forced[:, step]
        logits, state = model.decode_step(tokens, state)
        out.append(np.asarray(logits))
    return np.stack(out, axis=1)


def compare(model: Any, prompts: list[list[int]], new: int, batches: Sequence[int] = BATCHES) -> list[Flips]:
    """Every prompt alone, then in each batch size, the batch filled up with the prompts after it."""
    alone = np.concatenate([run(model, [prompt], new, None) for prompt in prompts])
    tokens = alone.argmax(-1)
    result = []
    for batch in batches:
        flips, change, lead = 0, 0.0, 0.0
        for start in range(0, len(prompts), batch):
            rows = [(start + i) % len(prompts) for i in range(batch)]
            fresh = min(batch, len(prompts) - start)  # the rest of the rows only fill the batch
            logits = run(model, [prompts[r] for r in rows], new, tokens[rows])[:fresh]
            first = alone[rows[:fresh]]
            change = max(change, float(np.abs(logits - first).max()))
            flipped = logits.argmax(-1) != tokens[rows[:fresh]]
            flips += int(flipped.sum())
            if flipped.any():
                winner = logits.argmax(-1)[flipped][:, None]
                lost = first[flipped].max(-1) - np.take_along_axis(first[flipped], winner, 1)[:, 0]
                lead = max(lead, float(lost.max()))
        result.append(Flips(batch, tokens.size, flips, change, lead))
    return result


def main(
    checkpoint: Annotated[str, tyro.conf.Positional],
    /,
    tokens: int = 2048,
    new: int = 128,
    text: Path = Path(__file__),
    dtypes: tuple[str, ...] = ("released", "float32"),
    implementation: str = "auto",
) -> None:
    """Print the flip rate of a checkpoint per dtype and batch size.

    Args:
        checkpoint: what k3jax.load accepts.
        tokens: positions to compare per batch size, about.
        new: tokens generated per prompt.
        text: file whose stretches are the prompts.
        dtypes: "released" and "float32".
        implementation: how a decode step runs.
    """
    import k3jax

    device = jax.devices()[0]
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC")
    print(f"device: {device.device_kind} ({device.platform}), {platform.machine()}")
    print(
        f"versions: k3jax {k3jax.__version__}, jax {jax.__version__}, jaxlib {version('jaxlib')}, "
        f"Python {platform.python_version()}"
    )
    for dtype in dtypes:
        start = time.perf_counter()
        model = k3jax.load(
            checkpoint,
            dtype=None if dtype == "released" else dtype,
            implementation=implementation,
            progress=False,
        )
        prompts = prompts_from(text.read_text(encoding="utf-8"), model.tokenizer, max(1, round(tokens / new)))
        outcome = compare(model, prompts, new)
        print(f"dtype {dtype}: batch 1 against")
        for o in outcome:
            print(
                f"  batch {o.batch}: {o.flips} of {o.positions} tokens flip ({o.flips / o.positions:.2e}), "
                f"logits change by up to {o.change:.2e}, a flipped token had led by up to {o.lead:.2e}"
            )
        flips, positions = sum(o.flips for o in outcome), sum(o.positions for o in outcome)
        print(f"  all: {flips} of {positions} ({flips / positions:.2e}), {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    tyro.cli(main)
