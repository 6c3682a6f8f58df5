"""The integer tables that the kernel walks: the schedule's, with the words only the kernel reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from ..instructions import Exchange, Op, Tables, encode
from ..schedule import Schedule
from ..segments import launched, segments
from .geometry import STACK, TURN, kernel_words


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


def _turns(schedule: Schedule, launches: Iterable[tuple[int, int]]) -> dict[int, int]:
    """TURN of every EXPERT_IN of a share, by instruction: LatentMoE layers before it in its launch.

    Args:
        launches: first and last instruction of each.
    """
    out: dict[int, int] = {}
    for first, last in launches:
        layers: list[int] = []
        for at in range(first, last):
            ins = schedule.instructions[at]
            if ins.op == Op.EXPERT_IN:
                layers += [] if ins.layer in layers else [ins.layer]
                out[at] = layers.index(ins.layer) & 1
    return out


@functools.lru_cache(maxsize=16)
def segment_tables(schedule: Schedule) -> Tables:
    """The tables of a share's launches: as :func:`kernel_tables`, with ``starts`` [segments, SMs + 1].

    An instruction belongs to one segment, so records (without waits for earlier segments) and programs are
    the same arrays for all launches; a launch is told by its ``starts`` which of the program to run.
    """
    tables = kernel_tables(dataclasses.replace(schedule, instructions=launched(schedule)))
    parts = segments(schedule)
    for at, turn in _turns(schedule, ((part.first, part.last) for part in parts)).items():
        tables.records[at, TURN] = turn
    sms = schedule.plan.sms
    program: list[int] = []
    starts = []
    for part in parts:
        first = [len(program)]
        for sm in range(sms):
            listed = range(part.first, part.last)
            program += [
                at for at in listed if schedule.instructions[at].sm0 <= sm < schedule.instructions[at].sm1
            ]
            first.append(len(program))
        starts.append(first)
    return dataclasses.replace(tables, program=np.array(program, np.int32), starts=np.array(starts, np.int32))


@functools.lru_cache(maxsize=16)
def peer_tables(schedule: Schedule) -> Tables:
    """The tables of a share that exchanges in the kernel: the whole list but for the embedding's exchange,
    which is over when the launch begins.
    """
    given = [i for i in schedule.instructions if i.op == Op.EXCHANGE and i.c0 == Exchange.EMBEDDING]
    over = {ins.signal for ins in given}
    instructions = tuple(
        dataclasses.replace(ins, waits=tuple(w for w in ins.waits if w.counter not in over))
        for ins in schedule.instructions
        if ins not in given
    )
    left = dataclasses.replace(schedule, instructions=instructions)
    tables = kernel_tables(left)
    for at, turn in _turns(left, ((0, len(instructions)),)).items():
        tables.records[at, TURN] = turn
    return tables


__all__ = ["kernel_tables", "peer_tables", "segment_tables"]
