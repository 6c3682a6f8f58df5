"""The numbers of the model card, on the held-out text.

    python -m k3jax.checkpoints.training.evaluate                 # the shipped checkpoint
    python -m k3jax.checkpoints.training.evaluate --run run       # and the float one it came from

Prints the card's table; ``--plot`` draws the run's learning curve.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3jax.checkpoints.loading import load_params
from k3jax.checkpoints.locate import resolve

from .baselines import ngram_bits_per_byte, xz_bits_per_byte
from .finish import packed_params
from .plot import draw_curve
from .run import CURVE
from .scoring import Score, score
from .text import Corpus, read_corpus


def evaluate(
    checkpoint: Path, run: Path | None, corpus: Corpus, batch: int, progress: bool
) -> dict[str, Any]:
    """Bits per byte of the baselines and the checkpoints, and the shipped one's router use."""
    blocks, known = corpus.held_out(), corpus.not_held_out()

    def of(params: Any, config: Any) -> Score:
        return score(params, config, blocks, batch=batch, progress=progress)

    numbers: dict[str, Any] = {
        "held_out_bytes": sum(map(len, blocks)),
        "ngram": ngram_bits_per_byte(known, blocks),
        "xz": xz_bits_per_byte(known, blocks),
    }
    if run is not None:
        params, config, _ = load_params(run / "float", progress=False)
        numbers["before_mxfp4"] = of(params, config).bits_per_byte
        numbers["mxfp4_without_fine_tuning"] = of(packed_params(params), config).bits_per_byte
    params, config, _ = load_params(checkpoint, progress=False)
    shipped = of(params, config)
    numbers["mxfp4_after_fine_tuning"] = shipped.bits_per_byte
    numbers["of_each_block"] = [round(bits, 5) for bits in shipped.of_each_block]
    numbers["distinct_experts"] = shipped.distinct_experts
    numbers["max_over_mean_load"] = [round(value, 3) for value in shipped.max_over_mean_load]
    return numbers


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="k3jax.checkpoints.training.evaluate", description="Score the nano checkpoint."
    )
    parser.add_argument("--checkpoint", default="nano", help="name or folder of the packed checkpoint")
    parser.add_argument(
        "--run", type=Path, help="folder of the training run: scores its float checkpoint too"
    )
    parser.add_argument("--text", type=Path, help="the printed text; default: ask the installed package")
    parser.add_argument("--batch", type=int, default=8, help="windows at a time")
    parser.add_argument("--plot", type=Path, help="draw the run's learning curve there (PNG)")
    given = parser.parse_args(arguments)
    if given.plot is not None and given.run is None:
        parser.error("--plot: expected --run with it, the folder whose curve to draw")
    numbers = evaluate(
        resolve(given.checkpoint), given.run, read_corpus(given.text), given.batch, progress=True
    )
    print(json.dumps(numbers, indent=1))
    if given.plot is not None:
        lines = [json.loads(line) for line in (given.run / CURVE).read_text("utf-8").splitlines()]
        draw_curve(lines, numbers["ngram"], numbers["xz"], given.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
