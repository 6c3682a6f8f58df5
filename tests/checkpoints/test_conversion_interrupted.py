"""Conversions killed with SIGKILL at chosen points, then resumed."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from k3jax import checkpoints
from k3jax.checkpoints import CheckpointError
from support.checkpoint_files import assert_same_arrays
from support.oracle import CASE_A

ROOT = Path(__file__).resolve().parents[2]

# Runs a conversion that kills its own process, so that no clean-up of any kind runs.
KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from k3jax import checkpoints
from k3jax.checkpoints import conversion, manifest, orbax_store

point, count, src, dst = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def after(function, n, then):
    calls = []
    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(1)
        if len(calls) == n:
            then()
        return result
    return wrapped

if point == "after pieces":
    orbax_store.Store.save = after(orbax_store.Store.save, count, die)
elif point == "inside a piece":
    # Armed after some pieces: the process dies as soon as the next one's temporary directory is there.
    def watch():
        while not list((Path(dst) / "pieces").glob("*.orbax-checkpoint-tmp*/*")):
            time.sleep(0.0002)
        die()
    orbax_store.Store.save = after(
        orbax_store.Store.save, count, lambda: threading.Thread(target=watch, daemon=True).start()
    )
elif point == "in place of a rename":
    # The count-th file that was to be renamed stays beside its name.
    replace, renames = os.replace, []
    def counted(*args):
        renames.append(args)
        die() if len(renames) == count else replace(*args)
    manifest.os.replace = counted
checkpoints.convert(src, dst, progress=False)
"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def pieces(folder: Path) -> dict[str, tuple[int, int]]:
    """Finished pieces: inode and time of change, which a rewritten one would not keep."""
    found = (folder / "pieces").glob("*") if (folder / "pieces").is_dir() else ()
    return {
        p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in found if "orbax-checkpoint-tmp" not in p.name
    }


@pytest.mark.parametrize(
    ("point", "count", "done"),
    [
        ("in place of a rename", 1, 0),  # the first record
        ("after pieces", 1, 1),
        ("inside a piece", 14, 14),
        ("after pieces", 36, 36),
        ("in place of a rename", 3, 36),  # record, config.json, then the record that says complete
    ],
)
def test_a_conversion_killed_anywhere_resumes_to_the_same_arrays(tmp_path, point, count, done):
    target = tmp_path / "dst"
    result = run(point, str(count), str(CASE_A), str(target))
    assert result.returncode == -signal.SIGKILL, result.stderr
    before = pieces(target)
    # A thread that watches for the temporary directory may see it only after it was renamed.
    assert len(before) - done in ((0, 1) if point == "inside a piece" else (0,))
    with pytest.raises((CheckpointError, FileNotFoundError), match=r"not finished|expected a checkpoint"):
        checkpoints.load_params(target, progress=False)

    # What a save under another process number or release of Orbax would have left.
    (target / "pieces" / "final.orbax-checkpoint-tmp-17").mkdir(parents=True, exist_ok=True)
    if not checkpoints.is_orbax_dir(target):
        shutil.rmtree(target / "pieces")

    report = checkpoints.convert(CASE_A, target, progress=False)
    after = pieces(target)
    assert (report.resumed, report.pieces) == (len(before), 36)
    assert before.items() <= after.items()
    leftovers = [path.name for path in target.rglob("*") if "tmp" in path.name or "partial" in path.name]
    assert leftovers == []
    params, config, _ = checkpoints.load_params(target, progress=False)
    want, want_config, _ = checkpoints.load_params(CASE_A, progress=False)
    assert_same_arrays(params, want)
    assert config == want_config


def test_a_second_conversion_into_the_same_directory_is_refused_while_one_runs(tmp_path):
    import fcntl

    target = tmp_path / "dst"
    target.mkdir()
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another conversion is writing"):
            checkpoints.convert(CASE_A, target, progress=False)
    checkpoints.convert(CASE_A, target, progress=False)
    assert not (target / ".lock").exists()
