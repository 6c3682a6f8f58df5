"""Host memory of converting and loading, measured as the peak resident size of a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoint_files import small_config, write_small

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20

MEASURE = """
import json, sys
import jax
from k3jax import checkpoints
from k3jax.checkpoints.load_report import peak_host_bytes

# A small one first: the libraries' own memory is not the subject.
checkpoints.convert(sys.argv[1], sys.argv[3] + "/small", progress=False)
checkpoints.load_params(sys.argv[3] + "/small", progress=False)
peaks = [peak_host_bytes()]
checkpoints.convert(sys.argv[2], sys.argv[3] + "/large", progress=False)
peaks.append(peak_host_bytes())
params, _, report = checkpoints.load_params(sys.argv[2], progress=False, block_bytes=4 << 20)
peaks.append(peak_host_bytes())
print(json.dumps({"peaks": peaks, "bytes": report.bytes, "peak": report.peak_host_bytes}))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems count resident memory differently"
)
def test_host_memory_is_bounded_by_pieces_and_blocks_not_by_the_checkpoint(tmp_path):
    write_small(tmp_path / "small")
    config = small_config(
        layer_types=("kda",) * 12, num_experts=64, moe_intermediate_size=512, routed_expert_hidden_size=512
    )
    write_small(tmp_path / "large", config=config, shards=3)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            MEASURE,
            str(tmp_path / "small"),
            str(tmp_path / "large"),
            str(tmp_path / "converted"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    before, converted, loaded = found["peaks"]
    assert found["bytes"] > 280 * MB
    # Pieces are 9 MB; buffers that the libraries keep come to 80 MB, no more for twice as many pieces.
    assert converted - before < 128 * MB
    # On a CPU the arrays themselves are host memory: no second copy beside them.
    assert loaded - converted < found["bytes"] + 64 * MB
    assert found["peak"] <= loaded
