"""The kernel of K3 and of small models compiles for every architecture, fits an SM, and passes the audit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from k3jax import K3Config, checkpoints
from k3jax.custom_calls import audit
from k3jax.custom_calls.artifacts import Key
from k3jax.custom_calls.compile import compile_artifact
from k3jax.custom_calls.decode_megakernel.kernel import constraints
from k3jax.custom_calls.decode_megakernel.resources import most_registers
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from support.megakernel import needs_compiler

TARGETS = {"sm_90a": Target(), "sm_100a": Target("sm_100a", 148), "sm_103a": Target("sm_103a", 152)}
"""H200, B200 and GB300: 227 KB of shared memory and 65,536 registers an SM all three."""


def config(name: str) -> K3Config:
    """K3, or nano whole, or its KDA and dense layers alone."""
    if name == "k3":
        return K3Config.preset("k3")
    nano = K3Config.from_pretrained(checkpoints.resolve("nano"))
    if name == "nano":
        return nano
    return dataclasses.replace(nano, num_hidden_layers=2, layer_types=("kda", "kda"), first_k_dense_replace=2)


@needs_compiler
@pytest.mark.skipif(audit.disassembler_problem() is not None, reason=str(audit.disassembler_problem()))
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "arch", "batch", "stages"),
    [
        ("k3", "sm_90a", 1, 16),
        ("nano", "sm_100a", 1, 16),
        ("nano", "sm_103a", 1, 16),
        pytest.param("kda", "sm_90a", 3, 7, marks=pytest.mark.slow),
        pytest.param("k3", "sm_90a", 8, 16, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_fits_an_sm_and_keeps_the_rules_of_its_machine_code(
    tmp_path: Path, name: str, arch: str, batch: int, stages: int
) -> None:
    """``stages``: bodies that wait and signal, each inlined once."""
    plan = Plan(config(name), batch, TARGETS[arch])
    assert constraints.reasons(plan) == ()
    assert constraints.shared_bytes(plan) <= plan.target.shared_bytes
    artifact = compile_artifact(Key(plan, arch), tmp_path)
    report = audit.audit(artifact.module)
    print(report)
    assert report.findings == (), str(report)
    assert report.registers <= most_registers(plan.target) == 168
    assert report.registers == artifact.about["registers"]
    assert min(report.waits, report.signals) >= stages
    assert report.polls >= 2 * report.waits
    assert report.step_loads > 20
    assert report.fixed_loads > 20
    assert report.streaming_loops >= stages - 2
    assert report.bulk_copies >= 2


@needs_compiler
@pytest.mark.skipif(audit.disassembler_problem() is not None, reason=str(audit.disassembler_problem()))
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layers", "batch", "ways", "expert_ways", "peers"),
    [
        (4, 1, 8, 8, False),
        (4, 1, 2, 2, True),
        pytest.param(4, 1, 2, 2, False, marks=pytest.mark.slow),
        pytest.param(4, 8, 2, 1, False, marks=pytest.mark.slow),
        pytest.param(4, 1, 4, 4, False, marks=pytest.mark.slow),
        pytest.param(4, 1, 16, 1, False, marks=pytest.mark.slow),
        pytest.param(93, 8, 16, 16, False, marks=pytest.mark.slow),
        pytest.param(93, 1, 8, 4, False, marks=pytest.mark.slow),
        pytest.param(93, 8, 8, 8, True, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_of_a_share_of_k3_fits_an_sm_and_keeps_the_rules_of_its_machine_code(
    tmp_path: Path, layers: int, batch: int, ways: int, expert_ways: int, peers: bool
) -> None:
    k3 = K3Config.preset("k3-slice", num_layers=layers) if layers < 93 else K3Config.preset("k3")
    plan = Plan(k3, batch, Target(), ways, expert_ways, peers)
    assert constraints.reasons(plan) == ()
    artifact = compile_artifact(Key(plan, "sm_90a"), tmp_path)
    report = audit.audit(artifact.module)
    print(report)
    assert report.findings == (), str(report)
    assert report.registers <= most_registers(plan.target)
    assert min(report.waits, report.signals) >= 17 + peers  # a whole model's, RESIDUAL, EXCHANGE
    names = {leaf.path for leaf in artifact.operands}
    assert {"['take']", "['rank']", "['packed']['moe.place']"} <= names
    assert "['embed']" not in names
    assert ("['give']" in {leaf.path for leaf in artifact.results}) != peers
    assert ("['peers']" in names) == peers


CHANGES: dict[str, tuple[dict[str, object], int]] = {
    "kda_head_dim: expected 128, got 64": ({"kda_head_dim": 64}, 132),
    "hidden_size: a vector of 9216 columns takes 144 registers a lane": ({"hidden_size": 9216}, 148),
    "hidden_size: an SM ends a sublayer on at most 64 columns, so at most 6400 on 100 SMs, got 7168": (
        {},
        100,
    ),
    "attn_res_block_size: a mixture has at most 16 sources, 93 layers in blocks of 4 have 25": (
        {"attn_res_block_size": 4},
        132,
    ),
    "q_lora_rank: a vector of 8192 columns takes 128 registers a lane": ({"q_lora_rank": 8192}, 132),
    "hidden_size: the kernel reads 8 columns at a time, got 7172": ({"hidden_size": 7172}, 132),
    "kv_lora_rank: 2048, above 1024": ({"kv_lora_rank": 2048}, 132),
    "num_experts: the kernel chooses among at most 1024, got 2048": ({"num_experts": 2048}, 132),
    "target: at most 1024 SMs, got 2000": ({}, 2000),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_plan_that_the_kernel_cannot_run_is_refused_by_name(reason: str) -> None:
    changes, sms = CHANGES[reason]
    plan = Plan(dataclasses.replace(K3Config.preset("k3"), **changes), 1, Target("some", sms))
    found = constraints.reasons(plan)
    assert any(line.startswith(reason) for line in found), found


def test_more_ranks_than_a_warp_has_lanes_do_not_exchange_in_the_kernel() -> None:
    k3 = K3Config.preset("k3")
    wide = dataclasses.replace(
        k3, num_attention_heads=128, kda_num_heads=128, kda_a_log_size=128, intermediate_size=32768
    )
    found = [constraints.reasons(Plan(wide, 1, Target(), 64, 64, peers)) for peers in (False, True)]
    reason = "ways: at most 32 ranks exchange in the kernel, a lane of a warp each, got 64"
    assert (reason in found[0], reason in found[1]) == (False, True)
    with pytest.raises(ValueError, match="peers: expected ways of at least 2, got 1"):
        Plan(k3, 1, peers=True)


def test_all_reasons_come_at_once_and_shared_memory_is_one_of_them() -> None:
    small = Target("sm_120a", 132, shared_bytes=101_376)
    found = constraints.reasons(Plan(dataclasses.replace(K3Config.preset("k3"), kda_head_dim=64), 1, small))
    names = {line.split(":")[0] for line in found}
    assert {"kda_head_dim", "shared memory"} <= names


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sms", [132, 148, 152])
def test_k3_and_nano_are_not_refused(batch: int, sms: int) -> None:
    for name in ("k3", "nano", "kda"):
        assert constraints.reasons(Plan(config(name), batch, Target("some", sms))) == ()


def test_twelve_warps_leave_168_registers_a_thread() -> None:
    """Three warps on one scheduler share a quarter of the SM's registers, in units of 8 a thread."""
    assert most_registers(Target()) == 168
    assert 3 * 32 * 168 <= Target().registers // 4 < 3 * 32 * 176
