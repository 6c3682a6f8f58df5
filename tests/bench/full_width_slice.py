"""The figures of ``results/slice4_h200``: every implementation on the first four layers at full width.

    python tests/bench/full_width_slice.py --read-kernel read.bin        # on a GPU host, 80 GB of its memory

All 896 experts, random weights, batch 1, 2, 4 and 8, by ``k3jax bench``, which checks that logits agree.
``read.bin`` is made by ``python tests/bench/read_ceiling.py compile --out read.bin``, without a GPU. What
else is given (``--kernels``, ``--cuda-runtime``, ``--batch``, ...) goes to ``k3jax bench`` as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

from k3jax import cli

RESULTS = Path(__file__).absolute().parent / "results"
OPTIONS = (
    *("bench", "k3-slice", "--layers", "4", "--batch", "1", "2", "4", "8"),
    *("--implementations", "xla", "pallas", "megakernel"),
    *("--steps", "16", "--rounds", "7", "--length", "512"),
)


def main() -> int:
    out = RESULTS / "slice4_h200"
    sys.argv = ["k3jax", *OPTIONS, "--json", f"{out}.json", "--picture", f"{out}.png", *sys.argv[1:]]
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
