"""The process that compiles: ``python -m k3jax.plan_report.worker REQUEST ANSWER``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from .compile_step import Request, compile_here


def main(arguments: list[str]) -> None:
    """Compile what the JSON text REQUEST says; write the result to ANSWER, a JSON file."""
    request, answer = Request(**json.loads(arguments[0])), Path(arguments[1])
    answer.write_text(json.dumps(dataclasses.asdict(compile_here(request))))


if __name__ == "__main__":
    main(sys.argv[1:])
