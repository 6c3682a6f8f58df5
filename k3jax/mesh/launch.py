"""Several processes of one command on this host, watched: who died first, and none left behind."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from .distributed import HEARTBEAT_SECONDS

GRACE_SECONDS = 10
"""How long past the heartbeat timeout the others may take to end by themselves."""


def free_port() -> int:
    """A port of this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(command: Sequence[str], num_processes: int, heartbeat: int = HEARTBEAT_SECONDS) -> int:
    """Run ``command`` as ``num_processes`` processes on this host; returns the exit status.

    Each gets ``--coordinator``, ``--num-processes``, ``--process-id`` and ``--heartbeat`` appended.
    Number 0's output goes to stdout, all errors to stderr. When one ends with an error, the others
    have the heartbeat timeout and ten seconds to end by themselves before they are killed.

    Returns:
        0, or 1 if a process failed: stderr says which one first, and how each ended.

    Raises:
        ValueError: fewer than one process.
    """
    if num_processes < 1:
        raise ValueError(f"num-processes: expected at least 1, got {num_processes}")
    group = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(num_processes)]
    group += ["--heartbeat", str(heartbeat)]
    running = [
        subprocess.Popen(
            [*command, *group, "--process-id", str(rank)],
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        for rank in range(num_processes)
    ]
    for rank, process in enumerate(running):
        _note(f"process {rank} is pid {process.pid}")
    try:
        return _watch(running, float(heartbeat + GRACE_SECONDS))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


def _watch(running: list[subprocess.Popen[bytes]], patience: float) -> int:
    first: int | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in running):
        for rank, process in enumerate(running):
            if first is None and process.poll() not in (None, 0):
                first, deadline = rank, time.monotonic() + patience
                _note(f"process {rank} died first: {_how(process)}; waiting for the others to end")
        if time.monotonic() > deadline:
            late = [rank for rank, process in enumerate(running) if process.poll() is None]
            _note(f"processes {late} did not end within {patience:g} s; killed")
            break
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(running) if process.poll() != 0]
    if not failed:
        return 0
    for rank, process in enumerate(running):
        if process.poll() is not None:
            _note(f"process {rank} ended: {_how(process)}")
    return 1


def _how(process: subprocess.Popen[bytes]) -> str:
    status = process.returncode
    if status is not None and status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


def _note(message: str) -> None:
    print(f"k3jax launch: {message}", file=sys.stderr, flush=True)


def main(args: Sequence[str]) -> int:
    """``k3jax launch N [--heartbeat SECONDS] -- COMMAND ...``: N processes of ``k3jax COMMAND ...``."""
    parser = argparse.ArgumentParser("k3jax launch", description="Run a k3jax command as several processes.")
    parser.add_argument("num_processes", type=int, metavar="N", help="processes on this host")
    parser.add_argument("--heartbeat", type=int, default=HEARTBEAT_SECONDS, metavar="SECONDS")
    parser.add_argument("command", nargs="+", help="arguments of k3jax, after --")
    given = parser.parse_args(args)
    return launch([sys.executable, "-m", "k3jax", *given.command], given.num_processes, given.heartbeat)


__all__ = ["GRACE_SECONDS", "free_port", "launch", "main"]
