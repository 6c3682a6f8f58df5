"""Execution of a schedule on the CPU: the kernel's list, piece by piece, in any order the counters allow."""

from .machine import DeadlockError, ForbiddenAccessError, Machine
from .step import decode_step

__all__ = ["DeadlockError", "ForbiddenAccessError", "Machine", "decode_step"]
