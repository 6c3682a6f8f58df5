"""The predicted time of a schedule is bounded by its bytes and grows with what it is made of."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel.predict import Machine, predict, streamed
from k3jax.custom_calls.decode_megakernel.schedule import Schedule, build
from k3jax.custom_calls.decode_megakernel.shapes import Plan
from k3jax.custom_calls.decode_megakernel.traffic import traffic

IDEAL = Machine(4.61e12, 4.61e12, 0.0, 1e6, 1e6, 1e18)


@functools.cache
def slice4(batch: int = 1) -> Schedule:
    return build(Plan(K3Config.preset("k3-slice", num_layers=4), batch))


def test_without_latencies_the_slice_is_within_three_percent_of_its_bytes_over_the_read_rate() -> None:
    """What is left is imbalance: the ring carries an SM over the stages where it has less than others."""
    floor = traffic(slice4(), 0, 16).total / 4.61e12
    seconds = predict(slice4(), 16, machine=IDEAL).seconds
    assert floor * 0.999 < seconds < floor * 1.03


def test_the_streamed_bytes_of_all_sms_are_those_that_the_validator_counts() -> None:
    total = sum(streamed(slice4(), ins, 16, 0) * (ins.sm1 - ins.sm0) for ins in slice4().instructions)
    counted = traffic(slice4(), 0, 16)
    # The prediction leaves out the small vectors, the convolution taps and the embedding row.
    assert 0.999 < total / (counted.total + counted.padding) <= 1.0


@pytest.mark.parametrize("change", [{"handoff": 5e-6}, {"dense_rate": 3e12}, {"expert_rate": 2e12}])
def test_a_slower_machine_takes_longer(change: dict[str, float]) -> None:
    slower = dataclasses.replace(Machine(), **change)
    assert predict(slice4(), machine=slower).seconds > predict(slice4()).seconds * 1.002


def test_more_experts_and_longer_contexts_take_longer() -> None:
    few, many = (predict(slice4(8), n).seconds for n in (16, 120))
    short, long = (predict(slice4(8), 16, length).seconds for length in (0, 100_000))
    assert many - few == pytest.approx(3 * 104 * 17_547_264 / 4.05e12, rel=0.1)
    assert long - short == pytest.approx(8 * 100_000 * 1152 / 4.36e12, rel=0.1)
