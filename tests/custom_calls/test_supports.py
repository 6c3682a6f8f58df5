"""``k3jax.supports``: every reason at once; "auto" takes what is supported and says once what is not."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import k3jax
from k3jax import K3Config, implementations, mesh
from k3jax.custom_calls import artifacts, ffi, fit, pack, support
from k3jax.custom_calls.artifacts import Key
from k3jax.custom_calls.decode_megakernel.kernel import constraints
from k3jax.custom_calls.decode_megakernel.shapes import Target
from k3jax.custom_calls.step import plan_for, target_of
from support import megakernel

CONFIG = megakernel.config()
SMS = Target()


class Gpu:
    """A device as jax describes one."""

    platform, device_kind = "gpu", "NVIDIA H200"
    compute_capability, core_count = "9.0", 132

    def __init__(self, **other: Any):
        self.__dict__.update(other)


@pytest.fixture(autouse=True)
def _a_host_with_library_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(artifacts, "_folders", [])
    monkeypatch.setattr(ffi, "runtime_library", lambda path=None: tmp_path / ffi.LIBRARY)
    monkeypatch.setattr(support, "compiler_problem", lambda: None)
    # Widths that a CPU can multiply are not the kernel's.
    monkeypatch.setattr(fit, "plan_reasons", lambda plan: ())
    monkeypatch.setattr(fit.constraints, "reasons", lambda plan: ())
    monkeypatch.setattr(implementations, "_logged", set())


def supports(device: Any = None, batch: int = 1, **options: Any) -> tuple[str, ...]:
    return k3jax.supports(CONFIG, Gpu() if device is None else device, batch, **options)


def test_nothing_is_missing_on_a_gpu_with_packed_weights() -> None:
    assert supports() == ()
    assert supports(ways=2) == ()
    assert supports(params=megakernel.packed_params()) == ()


def test_all_reasons_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Any = None) -> Path:
        raise FileNotFoundError("CUDA runtime library: not found")

    monkeypatch.setattr(ffi, "runtime_library", absent)
    monkeypatch.setattr(support, "compiler_problem", lambda: "compiler: none is installed")
    monkeypatch.setattr(fit, "plan_reasons", lambda plan: ("latent: expected a multiple of 32",))
    wide = {**megakernel.params(), "embed_tokens": jnp.zeros((2, 2), jnp.float32)}
    reasons = supports(Gpu(compute_capability="8.0", device_kind="NVIDIA A100"), 2, params=wide)
    for reason, start in zip(
        reasons,
        ("device: .*", "dtype: ", "params['megakernel']: ", "CUDA runtime", "latent: ", "kernel: "),
        strict=True,
    ):
        assert reason.startswith(start.removesuffix(".*")), reason
    assert "NVIDIA A100 has 8.0" in reasons[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch": 9}, "batch: expected 1..8, got 9"),
        ({"batch": 0}, "batch: expected 1..8, got 0"),
        ({"dtype": jnp.float32}, "dtype: the megakernel computes in bfloat16, got float32"),
        ({"device": Gpu(platform="cpu")}, "device: expected an NVIDIA GPU, got cpu"),
        ({"params": "unpacked"}, "params['megakernel']: the weights are not packed; call Model.pack()"),
    ],
)
def test_each_reason_is_named(options: dict[str, Any], reason: str) -> None:
    if options.get("params") == "unpacked":
        options = {"params": megakernel.params()}
    (only,) = supports(**options)
    assert only.startswith(reason)


def test_ways_are_looked_at_for_the_heads_and_for_the_experts() -> None:
    whole, experts = supports(ways=3)
    assert whole.startswith("ways: 3 does not divide kda_num_heads=2, ")
    assert (
        experts
        == f"ways, expert_ways: 3 / 1 does not divide moe_intermediate_size={CONFIG.moe_intermediate_size}"
    )


def test_a_compiled_kernel_stands_in_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "compiler_problem", lambda: "compiler: none is installed")
    key = Key(plan_for(CONFIG, 2, target_of(Gpu())[1]), "sm_90a")
    (reason,) = supports(batch=2)
    assert reason == f"kernel: {key.file_name} is not in the cache, and compiler: none is installed"
    artifact = megakernel.artifact(2)
    path = artifacts.cache_folder() / key.file_name
    artifacts.write(artifact, path)
    assert supports(batch=2) == ()
    assert len(supports(Gpu(core_count=114), batch=2)) == 1  # made for 132 SMs
    artifacts.write(dataclasses.replace(artifact, about={**artifact.about, "registers": 232}), path)
    (reason,) = supports(batch=2)
    assert reason == "occupancy: the kernel takes 232 registers a thread, an SM has 168"
    artifacts.write(artifact, path)
    need = constraints.shared_bytes(key.plan)
    assert supports(Gpu(shared_memory_per_block_optin=need), batch=2) == ()
    (reason,) = supports(Gpu(shared_memory_per_block_optin=need - 1), batch=2)
    assert reason == f"occupancy: a block takes {need} bytes of shared memory, got {need - 1}"
    path.write_bytes(b"damaged")
    artifacts.load.cache_clear()
    assert "something else" in supports(batch=2)[0]


def test_the_other_implementations() -> None:
    assert supports(implementation="xla", batch=100, dtype=jnp.float32) == ()
    assert supports(implementation="megakernel-interpret", device=Gpu(platform="cpu")) == ()
    assert supports(implementation="megakernel-interpret", batch=9) == ("batch: expected 1..8, got 9",)
    for wrong in ("auto", "cuda"):
        with pytest.raises(ValueError, match=rf"expected one of xla, pallas, .*, got '{wrong}'"):
            supports(implementation=wrong)


def slice4(**changes: Any) -> K3Config:
    """Four layers of the release."""
    return dataclasses.replace(K3Config.preset("k3-slice", num_layers=4), **changes)


NARROW = "kda_head_dim: expected 128, got 64"
NINE = "batch: expected 1..8, got 9"


@pytest.fixture
def _the_real_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Undoes the other fixture but for cache, library and compiler."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(artifacts, "_folders", [])
    monkeypatch.setattr(ffi, "runtime_library", lambda path=None: tmp_path / ffi.LIBRARY)
    monkeypatch.setattr(support, "compiler_problem", lambda: None)


@pytest.mark.usefixtures("_the_real_check")
def test_plans_that_no_kernel_fits_are_refused_by_the_real_check() -> None:
    target = target_of(Gpu())[1]
    assert fit.plan_reasons(plan_for(slice4(), 1, target)) == ()
    small = dataclasses.replace(target, shared_bytes=101_376)
    assert fit.plan_reasons(plan_for(slice4(), 1, small))


@pytest.mark.usefixtures("_the_real_check")
def test_a_reason_of_one_kind_hides_none_of_another() -> None:
    assert k3jax.supports(slice4(kda_head_dim=64), Gpu(), 9) == (NINE, NARROW)
    batch, ways, width = k3jax.supports(slice4(), Gpu(), 9, ways=7)
    assert batch == NINE
    assert ways.startswith("ways: 7 does not divide kda_num_heads=96, num_attention_heads=96, ")
    assert width == "ways, expert_ways: 7 / 1 does not divide moe_intermediate_size=3072"
    both = slice4(kda_head_dim=64, num_experts_per_token=17)
    assert k3jax.supports(both, Gpu(), 0, ways=7) == (
        "batch: expected 1..8, got 0",
        "num_experts_per_token: expected 1..16, got 17",
        ways,
        width,
        NARROW,
    )
    assert k3jax.supports(both, Gpu(), 9, implementation="megakernel-interpret", ways=7) == (
        NINE,
        "num_experts_per_token: expected 1..16, got 17",
        ways,
        width,
    )


@pytest.mark.usefixtures("_the_real_check")
def test_a_missing_kernel_is_one_of_the_reasons_unless_there_can_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support, "compiler_problem", lambda: "compiler: none is installed")
    rows, kernel = k3jax.supports(slice4(), Gpu(), 9)
    assert rows == NINE
    assert kernel.startswith("kernel: sm_90a-132sm-batch8-")
    (active,) = k3jax.supports(slice4(num_experts_per_token=17), Gpu(), 1)
    assert active == "num_experts_per_token: expected 1..16, got 17"


@pytest.mark.usefixtures("_the_real_check")
def test_what_only_some_shares_have_against_them_is_not_held_against_one_that_cannot_be() -> None:
    """2,112 columns of an expert are a multiple of 64, a sixteenth of them (132) is not; 16 rows of 4,096
    are too many for the ring, of half as many they are not."""
    odd = slice4(moe_intermediate_size=2112)
    assert any("multiples of 64 columns, got 132" in reason for reason in fit.kernel_reasons(odd, 1, SMS, 16))
    wide = slice4(moe_intermediate_size=4096)
    assert any("16 rows of w2" in reason for reason in fit.kernel_reasons(wide, 1, SMS, 1))
    assert fit.kernel_reasons(odd, 1, SMS, 7) == fit.kernel_reasons(wide, 1, SMS, 7) == ()


@pytest.mark.usefixtures("_the_real_check")
def test_a_plan_of_the_mesh_is_looked_at_whole_too() -> None:
    plan = mesh.MeshPlan(1, 2)
    reasons = k3jax.supports(slice4(kda_head_dim=64), batch=9, plan=plan)
    assert {NINE, NARROW} <= set(reasons)
    reasons = k3jax.supports(slice4(kda_head_dim=64), batch=9, plan=mesh.MeshPlan(1, 7, 7))
    assert {NINE, NARROW} <= set(reasons)
    assert [r for r in reasons if "does not divide" in r] == [r for r in reasons if r.startswith("tensor=7")]


@pytest.mark.usefixtures("_the_real_check")
def test_reasons_of_tiles_and_of_resources_come_together_each_once_and_uncapped() -> None:
    odd = slice4(kda_head_dim=64, hidden_size=24_576, moe_intermediate_size=65_536, kv_lora_rank=2048)
    found = fit.plan_reasons(plan_for(odd, 8, Target("small", 132, 101_376, 32_768)))
    assert len(found) == len(set(found)) > 8
    starts = {reason.split(":")[0] for reason in found}
    assert {"kda_head_dim", "shared memory", "block", "EXPERT_OUT", "hidden_size", "kv_lora_rank"} <= starts
    assert sum(reason.startswith("shared memory") for reason in found) == 1


def test_auto_takes_the_megakernel_where_it_can_and_says_once_why_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="k3jax")
    packed = megakernel.packed_params()
    assert implementations.choose("auto", CONFIG, 8, packed, Gpu()) == "megakernel"
    assert caplog.records == []
    for _ in range(3):
        assert implementations.choose("auto", CONFIG, 9, packed, Gpu()) == "xla"
        assert implementations.choose("auto", CONFIG, 1, megakernel.params(), Gpu()) == "xla"
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps run as 'xla', not as 'megakernel': batch: expected 1..8, got 9",
        f"decode steps run as 'xla', not as 'megakernel': params[{pack.PACKED!r}]: the weights are not "
        "packed; call Model.pack()",
    ]


def test_a_name_that_was_given_stands_or_raises_with_the_reasons() -> None:
    assert implementations.choose("megakernel", CONFIG, 8, None, Gpu()) == "megakernel"
    with pytest.raises(
        NotImplementedError,
        match=r"'megakernel' is not available here: device: .*; batch: .*; available: auto, xla",
    ):
        implementations.choose("megakernel", CONFIG, 9, None, Gpu(platform="cpu"))


def test_a_model_of_auto_uses_the_kernel_once_its_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_device", lambda device: Gpu())
    model = k3jax.Model(megakernel.params(), CONFIG)
    assert model.implementation == "xla"
    assert model.init_state(2, 300).kernel is None
    model.pack()
    assert model.implementation == "megakernel"
    assert set(model.init_state(2, 300).kernel or ()) == {"work", "epoch", "fault"}
    assert model.init_state(9, 300).kernel is None
    params, name = implementations.step_inputs(model, 2)
    assert name == "megakernel"
    assert "lm_head" not in params
    assert implementations.step_inputs(model, 9) == (model.params, "xla")
    given = k3jax.Model(megakernel.params(), CONFIG, implementation="megakernel")
    assert pack.PACKED in given.params
    assert implementations.step_inputs(given, 9)[1] == "megakernel"  # which then refuses the batch


def test_ways_are_those_of_a_plan_where_there_is_one() -> None:
    plan = mesh.MeshPlan(1, 2)
    for name in implementations.AVAILABLE:
        with pytest.raises(ValueError, match="ways: expected at least 1, and none with a plan, got 4"):
            k3jax.supports(CONFIG, implementation=name, ways=4, plan=plan)
        with pytest.raises(ValueError, match=r"ways: expected at least 1, .* got 0"):
            k3jax.supports(CONFIG, implementation=name, ways=0)
