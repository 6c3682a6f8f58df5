"""EXCHANGE: the ranks of a model exchange through mailboxes in one another's memory; in the kernel itself.

::

    take[b, d] = sum_r give_r[b, d]                     in the order of the ranks r: the same bits on all
    take[b, r latent_rows + l] = give_r[b, l]           LATENT

Every rank runs the same list, so SM s of each has the same columns of ``give``. It writes them to its place
in the mailboxes of the others, publishes that with a flag of its own there (the number of the exchange since
the mailboxes were made), waits for the flags of the same SM of the others, and adds what they wrote.

A mailbox has two places for what a rank gives, taken in turn: a rank gives to exchange n + 2 only when it has
taken from n + 1, which each peer gave to when it had taken from n on all its SMs. Kinds of a layer alternate:
the numbers of neighbouring exchanges are odd and even.

Constraints: peers reach one another's memory; columns in whole groups of 8; ranks at most as many as a warp
has lanes.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...instructions import Exchange
from ...operands import FLAG_WORDS, FLAGS_AT, mailbox_data
from .. import geometry as g
from ..context import Part
from ..flow import poll_at, signal, wait
from ..ptx import gmem, load, load4, store, store4


def flag(t, owner, giver):
    """Address of the flag of rank ``giver`` and this SM in a rank's mailbox."""
    word = FLAGS_AT + FLAG_WORDS * (giver * t.p.sms + t.sm)
    return t.mailbox(owner) + Int64(4 * word)


def slot(t, owner, turn, giver, b, column):
    """Address of ``[b, column]`` of what rank ``giver`` wrote into a rank's mailbox."""
    p = t.p
    at = ((turn * p.ways + giver) * p.B + b) * p.exchanged + column
    return t.mailbox(owner) + Int64(4 * mailbox_data(p)) + Int64(4 * at)


def count_launch(t):
    """Once a launch, when all exchanges of it are over."""
    launches = t.mailbox(t.rank)
    store(launches, Int32, load(launches, Int32) + 1)


@cute.jit
def exchange(t, record):
    """This SM's columns of all rows."""
    p = t.p
    part = Part(t, record)
    op, layer, kind = record[0], record[1], record[6]
    number = 4 * layer + kind
    turn = number & 1
    wait(t, record)
    launches = load(t.mailbox(t.rank), Int32)
    sequence = launches * (4 * p.layers + 1) + number + 1
    pieces = 2 * part.n  # 4 columns each
    for i in cutlass.range(t.tid, t.B * pieces, g.CONSUMERS, unroll=1):
        b = i // pieces
        column = 8 * part.g0 + 4 * (i - b * pieces)
        words = load4(t.given(b, column))
        for peer in cutlass.range(p.ways, unroll=1):
            if peer != t.rank:
                store4(slot(t, peer, turn, t.rank, b, column), words)
    t.sync()
    if (t.tid < p.ways) & (t.tid != t.rank):
        mine = gmem(flag(t, t.tid, t.rank), Int32)
        cute.arch.store(mine, sequence, sem="release", scope="sys")
        theirs = gmem(flag(t, t.rank, t.tid), Int32)
        poll_at(t, op, layer, t.tid, theirs, sequence, "sys")
    t.sync()
    for i in cutlass.range(t.tid, t.B * pieces, g.CONSUMERS, unroll=1):
        b = i // pieces
        column = 8 * part.g0 + 4 * (i - b * pieces)
        total = cute.make_rmem_tensor(4, Float32)
        for j in cutlass.range_constexpr(4):
            total[j] = Float32(0)
        for rank in cutlass.range(p.ways, unroll=1):
            source = t.given(b, column)
            if rank != t.rank:
                source = slot(t, t.rank, turn, rank, b, column)
            words = load4(source, Float32)
            if kind == int(Exchange.LATENT):
                values = [words[j] for j in range(4)]
                store4(t.taken(b, rank * p.latent_rows + column), values, Float32)
            for j in cutlass.range_constexpr(4):
                total[j] = total[j] + words[j]
        if kind != int(Exchange.LATENT):
            store4(t.taken(b, column), [total[j] for j in range(4)], Float32)
    signal(t, record)


__all__ = ["count_launch", "exchange"]
