"""The integer tables that the kernel walks: the schedule's, with the words only the kernel reads."""

from __future__ import annotations

import functools

from ..instructions import Tables, encode
from ..schedule import Schedule
from .geometry import STACK, kernel_words


@functools.lru_cache(maxsize=16)
def kernel_tables(schedule: Schedule) -> Tables:
    """Records, programs and starts of a schedule, complete.

    Raises:
        ValueError: a number past int32.
    """
    tables = encode(schedule.instructions, schedule.plan.sms)
    for at, ins in enumerate(schedule.instructions):
        words = kernel_words(schedule.plan, ins, int(tables.records[at, STACK]))
        for word, value in words.items():
            if not -(2**31) <= value < 2**31:
                raise ValueError(f"instruction {at}: word {word} is {value}, past int32")
            tables.records[at, word] = value
    return tables


__all__ = ["kernel_tables"]
