"""A state whose arrays span two processes is checked, selected, saved and restored as any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import k3jax
from support import mesh_cases, process_pair

WORKER = """
import dataclasses, json, sys
import jax, numpy as np
import k3jax
from k3jax import mesh
from k3jax.mesh.distributed import processes
from k3jax.mesh.transfer import host, spans_processes
from support import mesh_cases

coordinator, rank, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with processes(coordinator, 2, rank):
    c, one = mesh_cases.config(), mesh_cases.params()
    plan = mesh.for_devices(4, c, tensor=2)
    many = k3jax.Model(mesh.arrange(one, c, plan), c, mesh=plan)
    _, state = many.prefill(mesh_cases.tokens(3, 5), lengths=[5, 2, 4], max_length=5, logits="none")
    spans = spans_processes(state.lengths)
    k3jax.check(state)
    state.save(path)
    there = k3jax.State.restore(path).lengths.tolist()
    picked = state.select([2])
    logits, _ = many.decode_step([7], picked)
    pair, _ = many.decode_step([7, 8], state.select([2, 1]))
    again, _ = many.decode_step([0, 8, 7], k3jax.State.restore(path), active=[False, True, True])
    refused = dataclasses.replace(state, status=state.status | (state.lengths == 5).astype("int32"))
    try:
        k3jax.check(refused)
    except k3jax.StateError as error:
        message = str(error)
    print(json.dumps({
        "spans": bool(spans), "there": there, "lengths": host(picked.lengths).tolist(), "message": message,
        "logits": host(logits).tolist(), "pair": host(pair).tolist(),
        "again": host(again).tolist(),
    }))
"""


def close(found: Any, wanted: Any) -> bool:
    return bool(np.allclose(found, wanted, rtol=1e-3, atol=1e-4))


@pytest.mark.slow
def test_a_state_that_spans_processes_is_checked_selected_and_saved(tmp_path: Path) -> None:
    answers = process_pair.run(WORKER, str(tmp_path / "state"), devices=2)
    first, second = (json.loads(line) for line in answers)
    assert first == second
    assert first["spans"]
    assert first["there"] == [5, 2, 4, 0]
    assert first["lengths"] == [4]
    assert first["message"] == "row 0: the row is full (max_length=5)"
    model = k3jax.Model(mesh_cases.params(), mesh_cases.config())
    _, state = model.prefill(mesh_cases.tokens(3, 5), lengths=[5, 2, 4], max_length=5, logits="none")
    # A mesh sums in another order: differences of float32 rounding, far below these.
    assert close(first["logits"], model.decode_step([7], state.select([2]))[0])
    assert close(first["pair"], model.decode_step([7, 8], state.select([2, 1]))[0])
    assert close(first["again"][1:], first["pair"][::-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
