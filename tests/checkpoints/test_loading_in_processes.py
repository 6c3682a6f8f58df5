"""Loading onto a mesh that spans processes: each reads what its own devices need."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from k3jax import checkpoints
from support.checkpoint_files import write_small
from support.oracle import CASE_A

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh

port, rank, axis, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
from k3jax import checkpoints

devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
assert len(devices) == 4, devices
mesh = Mesh(np.array(devices).reshape(2, 2), ("expert", "tensor"))
if axis == "tensor":
    mesh = Mesh(np.array(devices).reshape(2, 2).T, ("expert", "tensor"))
whole, _, _ = checkpoints.load_params(paths[0], progress=False)
reports = []
for path in paths:
    try:
        params, _, report = checkpoints.load_params(path, mesh=mesh, progress=False)
    except checkpoints.CheckpointError as error:
        reports.append({"error": str(error)})
        continue
    needed = 0
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        want = np.asarray(want)
        boxes = set()
        for shard in got.addressable_shards:
            assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes()
            box = tuple((s.start or 0, s.stop or n) for s, n in zip(shard.index, want.shape, strict=True))
            if box not in boxes:
                needed += np.asarray(shard.data).nbytes
            boxes.add(box)
    reports.append({"bytes": report.bytes, "needed": needed})
print(json.dumps(reports))
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(axis: str, paths: list[Path]) -> list[list[dict[str, Any]]]:
    """For each of two processes the reports of its loads."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    port = str(_free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, port, str(rank), axis, *map(str, paths)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, err) in zip(workers, results, strict=True):
        assert worker.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


def _subnormal_scale(tensors):
    name = "model.layers.1.block_sparse_moe.experts.7.w1"
    tensors[f"{name}.weight_scale"][2, 0] = 1
    tensors[f"{name}.weight_packed"][2, 3] = 0x70


# Which mesh axis crosses the processes: cuts between experts, or inside matrices. What is left
# whole (everything but experts, or norms and experts) bounds what a process can save.
@pytest.mark.parametrize(("axis", "share"), [("expert", 0.85), ("tensor", 0.75)])
def test_each_of_two_processes_gets_its_shards_and_reads_only_their_bytes(tmp_path, axis, share):
    checkpoints.convert(CASE_A, tmp_path / "converted", progress=False)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(checkpoints.load_params(CASE_A, progress=False)[0]))
    write_small(tmp_path / "bad", _subnormal_scale)
    checkpoints.convert(tmp_path / "bad", tmp_path / "converted bad", progress=False)
    paths = [CASE_A, tmp_path / "converted", tmp_path / "converted bad"]
    processes = _run(axis, paths)
    for release, converted, bad in processes:
        # Codes and scales lie in both processes; each sees the one byte that bfloat16 cannot decode.
        assert "experts.w1, scale at [7, 2, 0]: scale byte 1 " in bad["error"]
        assert release["bytes"] == release["needed"] == converted["bytes"]
        assert release["bytes"] < share * total
    assert sum(release["bytes"] for release, *_ in processes) >= total
