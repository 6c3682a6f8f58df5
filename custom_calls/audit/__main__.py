"""``python -m k3jax.custom_calls.audit FILE ...``: audit compiled kernels; exits with 1 on a finding."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .rules import audit


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m k3jax.custom_calls.audit", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="artifacts, cubins, or anything that holds one")
    found = 0
    for path in parser.parse_args().files:
        report = audit(path.read_bytes())
        found += len(report.findings)
        print(f"{path.name}: {report}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
