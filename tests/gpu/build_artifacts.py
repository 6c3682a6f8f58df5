"""Compile every kernel that the GPU tests run, without a GPU: ``python tests/gpu/build_artifacts.py``.

What is in the folder already and of the present sources is left alone. On the GPU host, with the folder
carried along::

    XDG_CACHE_HOME=FOLDER K3JAX_CUDA_RUNTIME=.../libcute_dsl_runtime.so pytest tests/gpu -m gpu
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).absolute().parents[2]), str(Path(__file__).absolute().parents[1])]
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", required=True, help="what XDG_CACHE_HOME will be on the GPU host")
    parser.add_argument("--only", default="", help="compile only cases whose name begins so, such as nano-b1")
    parser.add_argument("--list", action="store_true", help="say what is there and what is not")
    given = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = given.cache

    from k3jax.custom_calls.artifacts import cache_folder
    from k3jax.custom_calls.compile import compile_artifact
    from support.megakernel_cases import CASES

    wanted: set[str] = set()
    for case in CASES:
        wanted.add(case.key.file_name)
        there = (cache_folder() / case.key.file_name).is_file()
        if there or given.list or not str(case).startswith(given.only):
            print(f"{case}: {'there' if there else 'not there'}", flush=True)
            continue
        start = time.perf_counter()
        about = compile_artifact(case.key, cache_folder()).about
        seconds = time.perf_counter() - start
        print(f"{case}: {seconds:.1f} s, {about['registers']} registers", flush=True)
    if cache_folder().is_dir():
        for old in sorted(cache_folder().glob("*.k3kernel")):
            if old.name not in wanted and not given.only:
                print(f"of other sources, deleted: {old.name}")
                old.unlink()


if __name__ == "__main__":
    main()
