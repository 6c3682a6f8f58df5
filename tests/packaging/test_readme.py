"""The README's example runs as it stands, and nothing in the README is left to fill in."""

from __future__ import annotations

import re

import numpy as np

from support.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_twelve_line_example_runs() -> None:
    match = re.search(r"```python\n(import jax\n.*?)```", README, re.DOTALL)
    assert match is not None
    assert len(match[1].strip().splitlines()) == 12
    names: dict[str, object] = {}
    exec(compile(match[1], "README.md", "exec"), names)
    assert np.asarray(names["logits"]).shape == (1, 512)
    assert np.asarray(names["state"].lengths).tolist() == [7]  # type: ignore[attr-defined]


def test_no_placeholder_is_left() -> None:
    assert "@@" not in README
