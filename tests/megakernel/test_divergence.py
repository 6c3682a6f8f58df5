"""No exchange between lanes or warps stands where some of them may not come by; and such places are found."""

from __future__ import annotations

import functools
import re

import pytest

from k3jax.custom_calls.decode_megakernel import kernel
from support.divergence import findings, kernel_sources
from support.repository import ROOT

FOLDER = ROOT / "custom_calls" / "decode_megakernel" / "kernel"


@functools.cache
def sources() -> dict[str, str]:
    return kernel_sources(FOLDER)


def test_the_sources_are_those_of_the_kernel() -> None:
    assert kernel.__doc__
    assert {"flow.py", "produce.py", "consume.py", "stages/kda.py", "stages/attend.py"} <= set(sources())


def test_every_exchange_is_reached_by_all() -> None:
    assert [str(f) for f in findings(sources())] == []


SEEDED = {
    "a record's word for thread 0 alone": (
        "flow.py",
        "delay(t, index + 17)",
        "delay(t, record[9] + 17)",
        r"signal, line \d+: `record\[9\]`",
    ),
    "a sum of the warp for one lane": (
        "stages/combine.py",
        "            total = warp_sum(total)\n            if t.lane == 0:\n",
        "            if t.lane == 0:\n                total = warp_sum(total)\n",
        r"combine, line \d+: `warp_sum` under `t\.lane == 0`",
    ),
    "a barrier of the block for some warps": (
        "stages/route.py",
        "    if t.warp < t.B:\n        run = t.runs(t.warp)\n",
        "    if t.warp < t.B:\n        t.sync()\n        run = t.runs(t.warp)\n",
        r"route, line \d+: the barrier `t\.sync` under `t\.warp < t\.B`",
    ),
    "an exchange in a function called for some threads": (
        "stages/narrow.py",
        "        if t.lane == 0:\n            store_shared(factor_at(t, pair, p.lanes)",
        "        if t.lane == 0:\n            signal(t, record)\n"
        "            store_shared(factor_at(t, pair, p.lanes)",
        r"lane_factors, line \d+: `signal`, which holds",
    ),
    "a loop whose length differs from lane to lane": (
        "stages/combine.py",
        "for i in cutlass.range(0, part.n, 32, unroll=1):\n            group = part.g0",
        "for i in cutlass.range(t.lane, part.n, 32, unroll=1):\n            group = part.g0",
        r"combine, line \d+: `combine_groups`, which holds an exchange, under `cutlass\.range\(t\.lane",
    ),
    "a branch on a number made from the lane": (
        "stages/residual.py",
        "            column = t.lane + 32 * half\n            value = Float32(0)\n",
        "            column = t.lane + 32 * half\n            value = Float32(0)\n"
        "            if column < 40:\n                value = warp_sum(value)\n",
        r"finish, line \d+: `warp_sum` under `column < 40`",
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_violation_is_found(name: str) -> None:
    module, old, new, message = SEEDED[name]
    text = sources()[module]
    assert text.count(old) >= 1, "the source has changed: seed the violation elsewhere"
    found = [str(f) for f in findings({**sources(), module: text.replace(old, new)})]
    assert any(re.match(message, line) for line in found), found
