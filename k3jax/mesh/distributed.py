"""Several processes as one machine, through ``jax.distributed``.

Every process runs the same program on the same arguments; each holds its devices' part of the
arrays. When a process dies, the others are ended by jax's coordination service once its heartbeats
have been missing for ``heartbeat`` seconds, or earlier by the error that a broken exchange raises.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import traceback
from collections.abc import Iterator

import jax

HEARTBEAT_SECONDS = 20
"""A process that has not been heard of for this long is dead."""

OPEN_FILES = 1 << 16
"""Open files a process may need: CPU devices of two processes hold a connection per pair."""


def raise_open_file_limit(wanted: int = OPEN_FILES) -> int:
    """Raise this process's soft limit of open files towards its hard one; returns the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return soft


def check_arguments(coordinator: str | None, num_processes: int | None, process_id: int | None) -> bool:
    """Whether the arguments ask for several processes.

    Raises:
        ValueError: some are given and some are not, or they are no process of a group.
    """
    given = [x is not None for x in (coordinator, num_processes, process_id)]
    if not any(given):
        return False
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError("coordinator, num-processes, process-id: expected all three or none")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator: expected HOST:PORT, got {coordinator!r}")
    if num_processes < 1:
        raise ValueError(f"num-processes: expected at least 1, got {num_processes}")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process-id: expected 0..{num_processes - 1}, got {process_id}")
    return True


@contextlib.contextmanager
def processes(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat: int = HEARTBEAT_SECONDS,
) -> Iterator[bool]:
    """Join a group of processes for the body; yields whether this one speaks for all (number 0).

    An error in the body ends this process at once with status 1: waiting for the others, as jax does
    at its end, would wait for processes that wait for this one.

    Args:
        coordinator: HOST:PORT of process 0; all None is a single process.
        heartbeat: seconds after which a silent process counts as dead.

    Raises:
        ValueError: see :func:`check_arguments`.
    """
    if not check_arguments(coordinator, num_processes, process_id):
        yield True
        return
    raise_open_file_limit()
    jax.distributed.initialize(
        coordinator,
        num_processes=num_processes,
        process_id=process_id,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=heartbeat,
    )
    well = False
    try:
        yield process_id == 0
        well = True
    finally:
        if not well:
            print(f"k3jax: process {process_id} of {num_processes} failed:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(1)
    jax.distributed.shutdown()


__all__ = ["HEARTBEAT_SECONDS", "check_arguments", "processes", "raise_open_file_limit"]
