"""compute-sanitizer over a small launch of the megakernel: ``python tests/gpu/sanitize_megakernel.py``.

Runs memcheck, then racecheck, over a step of the shipped model's widths (random weights, batch 2), in the
build in which every lane arrives on the ring's barriers. Exits with 1 if either reports anything.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
TOOLS = ("memcheck", "racecheck")


def launch() -> None:
    """One step, in the process that compute-sanitizer watches."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import k3jax
    from k3jax.custom_calls.pack import with_packed
    from support.megakernel_cases import SANITIZER, config
    from support.megakernel_gpu import Launcher, random_state

    case = SANITIZER[0]
    params = with_packed(k3jax.random_model(config(case.model), seed=1).params, config(case.model))
    run = Launcher(params, case)
    out = run(random_state(run.config, (70, 0), 256, seed=1), (65, 66))
    print(f"token {out.token.tolist()}, lengths {out.state.lengths.tolist()}, fault {out.fault}", flush=True)
    if out.fault is not None or out.state.lengths.tolist() != [71, 1]:
        raise SystemExit("the step under the sanitizer did not end as it should")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launch", action="store_true", help="only the launch, without a sanitizer")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=float, default=250, help="limit of each tool")
    given = parser.parse_args()
    if given.launch:
        launch()
        return
    failed = []
    for tool in given.tools.split(","):
        command = [
            "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20",
            "--kernel-regex", "kns=cutlass", "--target-processes", "all",
            sys.executable, str(Path(__file__).absolute()), "--launch",
        ]  # fmt: skip
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        result = subprocess.run(command, env=environment, timeout=given.seconds, check=False)
        print(f"{tool}: exit status {result.returncode}", flush=True)
        if result.returncode:
            failed.append(tool)
    if failed:
        raise SystemExit(f"compute-sanitizer: {', '.join(failed)}")


if __name__ == "__main__":
    main()
