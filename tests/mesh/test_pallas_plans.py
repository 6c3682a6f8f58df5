"""``implementation="pallas"`` over a plan: interpreted it is the XLA path's step, and it lowers for a GPU."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import K3Config, implementations, mesh, sharded_step
from k3jax.cli import main
from k3jax.mesh.layout import device_params, planned_params
from k3jax.mesh.states import planned_shapes
from k3jax.pallas import fit
from k3jax.pallas.experts.rank import listed
from support import mesh_cases, pallas_mesh
from support.pallas_ops import launches, occurrences, reset_interpreter, sds
from support.tiny_model import assert_bit_equal


@pytest.fixture(autouse=True)
def _clean_interpreter() -> Iterator[None]:
    yield
    reset_interpreter()


def plan_for(cpu_devices: list[Any], n: int, **options: Any) -> mesh.MeshPlan:
    return mesh.for_devices(n, pallas_mesh.config(), devices=tuple(cpu_devices[:n]), **options)


def two_ways(cpu_devices: list[Any]) -> mesh.MeshPlan:
    """Tensor parallel over two devices, for the smaller model of the quick tests."""
    return mesh.MeshPlan(1, 2, devices=tuple(cpu_devices[:2]))


SMALL = pallas_mesh.config(2)


# -- a step ------------------------------------------------------------------------------


def test_a_tensor_parallel_step_is_the_xla_step_with_rows_that_do_not_run(cpu_devices: list[Any]) -> None:
    pallas_mesh.compare(two_ways(cpu_devices), 4, special=True, ways=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "options", "batch", "special"),
    [
        (2, {"tensor": 2}, 1, False),
        (4, {"tensor": 4}, 3, False),
        (4, {"tensor": 4}, 5, True),
        (4, {"tensor": 1}, 5, True),
        (4, {"tensor": 1}, 1, False),
        (4, {"tensor": 2, "expert_width": 2}, 3, False),
        (4, {"tensor": 2, "expert_width": 2}, 6, True),
        (4, {"tensor": 2}, 3, False),
        (4, {"tensor": 2}, 16, True),  # 16 rows meet at the experts: two blocks of eight
        (4, {"tensor": 2, "dispatch": "all_to_all", "capacity": 1}, 7, True),
        (4, {"tensor": 1, "dispatch": "all_to_all"}, 9, False),
        (1, {}, 3, False),
    ],
)
def test_a_step_over_a_plan_is_the_xla_step(
    n: int, options: dict[str, Any], batch: int, special: bool, cpu_devices: list[Any]
) -> None:
    plan = plan_for(cpu_devices, n, **options)
    copies = plan.placements(pallas_mesh.config())[0].copies
    assert (copies.max() > 1) == (plan.expert_ranks == 4)  # six experts in eight slots
    pallas_mesh.compare(plan, batch, special)


@pytest.mark.slow
def test_a_plan_of_one_device_gives_the_bits_of_no_plan(cpu_devices: list[Any]) -> None:
    plan = plan_for(cpu_devices, 1)
    start = pallas_mesh.before(plan, 5, special=True)
    logits, after, _ = pallas_mesh.run(plan, start, "pallas-interpret")
    step = jax.jit(k3jax.decode_step, static_argnames=("config", "implementation"))
    want, expected = step(
        pallas_mesh.model().params, mesh.from_plan(start.state), start.tokens, start.active,
        config=pallas_mesh.config(), implementation="pallas-interpret",
    )  # fmt: skip
    assert_bit_equal(np.asarray(logits), np.asarray(want), "logits")
    assert_bit_equal(mesh.from_plan(after), expected, "state")


# -- the experts of a rank ---------------------------------------------------------------


def _through_lists(expert: Any) -> Any:
    """A rank's choices as its kernels find them: by their place in the list of a block of eight rows."""
    found = []
    for start in range(0, expert.shape[0], 8):
        slots, _, slot_of = listed(expert[start : start + 8])
        found.append(jnp.where(slot_of >= 0, slots[slot_of], -1))
    return jnp.concatenate(found)


@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
@pytest.mark.parametrize("name", ["uniform", "one expert", "one rank", "a rank without tokens"])
def test_every_pair_is_computed_once_through_the_lists(kind: str, name: str, cpu_devices: list[Any]) -> None:
    """20 experts in 24 slots of 8 ranks, 24 rows: three blocks of eight a rank."""
    plan = mesh.MeshPlan(4, 2, devices=tuple(cpu_devices))
    ids = mesh_cases.routing_ids(name, 24, 2, 20, plan.expert_ranks)
    live = np.arange(24) % 5 != 4
    got, want = mesh_cases.count_pairs(plan, kind, ids, live, 20, capacity=2, seen_as=_through_lists)
    np.testing.assert_array_equal(got, want)
    assert (want != 0).sum() == 2 * live.sum()


# -- the model, generation and the command -------------------------------------------------


@pytest.mark.slow
def test_generated_tokens_are_those_of_xla_over_the_same_plan(cpu_devices: list[Any]) -> None:
    nano = k3jax.load("nano", progress=False, implementation="xla")
    plan = mesh.for_devices(2, nano.config, devices=tuple(cpu_devices[:2]))
    prompts = ["And God said unto", "In the"]
    models = [
        k3jax.load("nano", progress=False, mesh=plan, implementation=name)
        for name in ("xla", "pallas-interpret")
    ]
    want, got = (m.generate(prompts, max_new_tokens=3) for m in models)
    assert got.tokens == want.tokens
    # The first token is prefill's, XLA's under every implementation: bit for bit.
    assert [row[0] for row in got.logprobs] == [row[0] for row in want.logprobs]
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=0.1, err_msg="bfloat16 noise of the logits")


@pytest.mark.slow
def test_the_command_generates_over_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "nano", "And God said", "--max-new-tokens", "2", "--devices", "2", "--tensor", "2"]
    assert main([*common, "--implementation", "xla"]) == 0
    want = capsys.readouterr().out
    assert main([*common, "--implementation", "pallas-interpret"]) == 0
    assert capsys.readouterr().out == want


def test_a_model_over_a_plan_decodes_by_the_implementation_it_was_given(cpu_devices: list[Any]) -> None:
    """Traced, not run: every launch is one callback to the host, and the XLA step has none."""
    plan = two_ways(cpu_devices)
    params = mesh.arrange(pallas_mesh.model(2).params, SMALL, plan)
    from k3jax.api import _planned_decode

    for name, expected in (("xla", False), ("pallas-interpret", True)):
        model = k3jax.Model(params, SMALL, mesh=plan, implementation=name)
        assert model.implementation == name
        state = model.init_state(1, 256)
        traced = _planned_decode.trace(
            params, state, np.zeros(1, np.int32), np.ones(1, bool),
            config=model.config, plan=plan, implementation=model.implementation,
        )  # fmt: skip
        assert ("pure_callback" in str(traced.jaxpr)) == expected


# -- what is refused -----------------------------------------------------------------------


def test_all_reasons_against_a_plan_come_at_once(cpu_devices: list[Any]) -> None:
    plan = plan_for(cpu_devices, 4, tensor=2, split_sequence=True, dispatch="ragged")
    reasons = k3jax.supports(
        pallas_mesh.config(), batch=17, dtype=jnp.float32, implementation="pallas", plan=plan
    )
    text = "; ".join(reasons)
    for part in (
        "compute capability 9.0, got cpu",
        "batch: expected 1..16 rows (8 for each of 2 data groups), got 17",
        "split_sequence: the attention kernels read whole rows",
        "ragged_all_to_all is not implemented on cpu",
        "expected bfloat16 parameters",
    ):
        assert part in text
    assert len(reasons) == 5
    (fault,) = k3jax.supports(
        pallas_mesh.config(), implementation="pallas-interpret", plan=mesh.MeshPlan(1, 3)
    )
    assert "tensor=3 does not divide" in fault


def test_shares_that_no_kernel_takes_are_named() -> None:
    """K3's experts cut four ways have 768 columns: padding them would copy hundreds of megabytes a step."""
    k3 = K3Config.preset("k3")
    assert fit.supports(k3, batch=72, interpret=True, plan=mesh.nvl72()) == fit.interpreter_reasons(72)
    for fine in (mesh.MeshPlan(1, 8), mesh.MeshPlan(2, 4), mesh.MeshPlan(4, 2, 2)):
        reasons = fit.supports(k3, batch=8, interpret=True, plan=fine)
        assert reasons == fit.interpreter_reasons(8)
    text = "; ".join(fit.supports(k3, batch=8, interpret=True, plan=mesh.MeshPlan(1, 8, 4)))
    assert "w2: expected a multiple of 512 columns, got 768" in text
    by_ways = k3jax.supports(k3, batch=8, implementation="pallas-interpret", ways=8)
    assert by_ways == fit.interpreter_reasons(8)
    assert device_params(k3, mesh.MeshPlan(1, 8))["lm_head"].shape == (k3.vocab_size // 8, k3.hidden_size)


def test_the_interpreter_counts_the_threads_that_waiting_devices_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))
    monkeypatch.setattr(jax, "local_devices", lambda **_: [None] * 8)
    assert fit.interpreter_reasons(5) == ()
    (reason,) = fit.interpreter_reasons(8)
    assert "at least 11 host threads, XLA has 8; set the environment variable NPROC=11" in reason
    monkeypatch.setenv("NPROC", "11")
    assert fit.interpreter_reasons(8) == ()


def test_what_cannot_run_is_refused_before_any_launch(
    cpu_devices: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = two_ways(cpu_devices)
    start = pallas_mesh.before(plan, 9, ways=2)
    given = start.params, start.state, jnp.asarray(start.tokens), jnp.asarray(start.active)
    step = functools.partial(sharded_step.decode_step, *given, config=SMALL, plan=plan)
    with pytest.raises(NotImplementedError, match=r"batch: expected 1\.\.8 rows, got 9"):
        step(implementation="pallas-interpret")
    with pytest.raises(NotImplementedError, match=r"9\.0, got cpu; batch: expected 1\.\.8 rows, got 9"):
        step(implementation="pallas")
    with pytest.raises(NotImplementedError, match=r"'megakernel' is not available here: .*expected 1\.\.8"):
        step(implementation="megakernel")
    with pytest.raises(ValueError, match="implementation: expected one of auto, xla"):
        step(implementation="cuda")
    model = k3jax.Model(start.params, SMALL, mesh=plan, implementation="pallas-interpret")
    monkeypatch.setattr(model, "prefill", lambda *_, **__: pytest.fail("dispatched"))
    with pytest.raises(NotImplementedError, match=r"batch: expected 1\.\.8 rows, got 9"):
        model.generate([[1]] * 9, max_new_tokens=2)
    assert main(["generate", "nano", "x", "--devices", "2", "--implementation", "pallas"]) == 2
    assert "'pallas' is not available here: device: expected an NVIDIA GPU" in capsys.readouterr().err


def test_auto_over_a_plan_is_xla_with_one_logged_line(
    cpu_devices: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementations, "_logged", set())
    plan = two_ways(cpu_devices)
    params = mesh.arrange(pallas_mesh.model(2).params, SMALL, plan)
    with caplog.at_level(logging.INFO, logger="k3jax"):
        models = [k3jax.Model(params, SMALL, mesh=plan) for _ in range(2)]
    assert [m.implementation for m in models] == ["xla", "xla"]
    (line,) = [r.getMessage() for r in caplog.records]
    assert "run as 'xla', not as 'megakernel': mesh: over a plan only by its name, got a plan of 2" in line


# -- on GPUs, as far as a CPU can tell -----------------------------------------------------


@pytest.mark.parametrize(
    ("options", "batch", "experts"),
    [
        ({"tensor": 8}, 1, 3),
        pytest.param({"tensor": 8}, 8, 3, marks=pytest.mark.slow),
        pytest.param({"tensor": 4, "expert_width": 2}, 6, 3, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "dispatch": "gather"}, 32, 12, marks=pytest.mark.slow),
        pytest.param({"tensor": 1, "dispatch": "all_to_all", "capacity": 2}, 64, 6, marks=pytest.mark.slow),
    ],
)
def test_a_ranks_program_at_full_widths_lowers_for_cuda(
    options: dict[str, Any], batch: int, experts: int, cpu_devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers of K3 on eight devices: the launches of one device, the experts' once per eight rows."""
    monkeypatch.setattr(fit, "device_reasons", lambda _: ())
    config = K3Config.preset("k3-slice", num_layers=4)
    plan = mesh.for_devices(8, config, devices=tuple(cpu_devices), **options)
    step = functools.partial(sharded_step.decode_step, config=config, plan=plan, implementation="pallas")
    shapes = planned_shapes(config, plan, batch, 8192, jnp.bfloat16)
    inputs = planned_params(config, plan), shapes, sds((batch,), jnp.int32), sds((batch,), jnp.bool_)
    text = jax.jit(step).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert launches(text) == {
        "k3_attn_res": 13, "k3_skinny_gemm": 18, "kda": 3, "mla_absorb": 1, "mla_attend": 1, "mla_merge": 1,
        "k3_router": 3, "experts_gate_up": experts, "experts_down": experts,
    }  # fmt: skip
    assert "dot_general" not in text, "a product was left to XLA"
    crossing = occurrences(text, r"stablehlo\.(all_\w+|reduce_scatter)")
    if options.get("dispatch") == "all_to_all":
        # Three exchanges out and one back, in the loop of rounds of each of three LatentMoEs.
        assert crossing["all_to_all"] == 4 * 3
    else:
        # The embedding, a sum after each sublayer, two around each LatentMoE's experts; and gathers of
        # latents, and over data of latents, choices and weights.
        assert crossing == {"all_reduce": 1 + 2 * 4 + 3, "reduce_scatter": 3, "all_gather": 3 * (1 + 3)}
