"""``k3jax bench``: alternating steps on the same inputs, agreement, what it prints and refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import cli
from k3jax.bench import contenders, run
from k3jax.bench.ceiling import Ceiling, ceiling_of
from k3jax.bench.contenders import Contender, copy_of
from k3jax.bench.report import Agreement, BatchReport, Report, Timing
from k3jax.pallas.read import read, reference
from support.compare import relative_rms
from support.pallas_ops import assert_no_races, lower_for_cuda, reset_interpreter, sds
from support.random_k3 import random_config, random_tensors, write_checkpoint
from support.tiny_model import assert_bit_equal


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that all implementations take: KDA with the dense FFN, MLA with a LatentMoE."""
    config = random_config(
        5, layer_types=("kda", "mla"), first_k_dense_replace=1, hidden_size=128, vocab_size=200,
        intermediate_size=128, kda_num_heads=1, kda_a_log_size=1, kda_head_dim=128, kda_v_head_dim=128,
        num_attention_heads=1, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=128, v_head_dim=128,
        qk_rope_head_dim=64, num_experts=16, num_experts_per_token=2, moe_intermediate_size=64,
        num_shared_experts=1, routed_expert_hidden_size=128,
    )  # fmt: skip
    return write_checkpoint(tmp_path_factory.mktemp("bench") / "small", config, random_tensors(config, 5))


def test_every_implementation_runs_and_agrees_and_what_cannot_run_is_listed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--implementations", "xla", "pallas", "pallas-interpret", "megakernel-interpret"]
    options += ["--batch", "2", "--steps", "2", "--rounds", "2", "--length", "3", "--ceiling", "0.02"]
    options += ["--json", str(tmp_path / "b.json")]
    try:
        assert cli.main(["bench", str(checkpoint), *options]) == 0
    finally:
        reset_interpreter()
    out = capsys.readouterr().out
    assert "pallas: not run: device: expected an NVIDIA GPU of compute capability 9.0, got cpu" in out
    found = json.loads((tmp_path / "b.json").read_text())
    (batch,) = found["batches"]
    assert [row["implementation"] for row in batch["rows"]] == [
        "xla",
        "pallas-interpret",
        "megakernel-interpret",
    ]
    config = k3jax.K3Config.from_pretrained(checkpoint)
    assert 2 <= batch["distinct_experts"] <= 4
    assert batch["bytes"] == config.bytes_per_step(2, 3, batch["distinct_experts"]).total
    for row in batch["rows"]:
        assert len(row["step_ms_rounds"]) == 2
        assert row["ceiling_share"] == pytest.approx(row["tb_per_s"] / 0.02)
        assert row["tokens_per_s_per_user"] == pytest.approx(1e3 / row["step_ms"])
    xla, *others = batch["rows"]
    assert xla["speedup_over_xla"] == 1
    for row in others:
        # bfloat16 through two layers; a whole step of other weights would differ by order one.
        assert 0 < row["agreement"]["median"] < 0.03
        assert row["agreement"]["compared"] == 4
        assert 0 < row["agreement"]["state"] < 0.03


@pytest.mark.slow
def test_nano_runs_under_every_implementation_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["xla", "pallas-interpret", "megakernel-interpret"]
    try:
        options = ["--implementations", *names, "--steps", "2", "--rounds", "1", "--length", "5"]
        assert cli.main(["bench", "nano", *options]) == 0
    finally:
        reset_interpreter()
    out = capsys.readouterr().out
    assert "PROBLEM" not in out
    assert "batch 1, 5 tokens cached" in out


# -- agreement -----------------------------------------------------------------------------


def test_rows_are_compared_one_by_one() -> None:
    rng = np.random.default_rng(0)
    want = [jnp.asarray(rng.standard_normal((2, 50)), jnp.float32) for _ in range(3)]
    got = [want[0], want[1] * 1.01, want[2].at[1].set(-want[2][1])]
    states = np.full((2, 3, 2), 1e-3)  # [arrays, steps, rows]
    states[1, :2, :] = 0.2
    found = run.agreement(got, states, want)
    errors = sorted(relative_rms(a[i], b[i]) for a, b in zip(got, want, strict=True) for i in range(2))
    assert found.state == 0.2
    assert found.compared == 6
    assert found.worst == pytest.approx(2.0)
    assert found.quarter == pytest.approx(errors[2])
    assert found.median == pytest.approx(errors[3])
    assert found.same_token == pytest.approx(5 / 6)
    assert found.problem is not None


def test_logits_that_are_not_finite_never_agree() -> None:
    want = [jnp.ones((1, 4))]
    found = run.agreement([jnp.full((1, 4), jnp.nan)], np.zeros((1, 1, 1)), want)
    assert found.worst == float("inf")
    assert found.problem is not None


def test_a_row_that_never_agrees_is_a_problem_where_the_steps_are_many() -> None:
    """A quarter of the rows agree, and so does every other figure."""
    rng = np.random.default_rng(0)
    want = [jnp.asarray(rng.standard_normal((4, 50)), jnp.float32) for _ in range(8)]
    got = [x.at[3].multiply(1.5) for x in want]
    found = run.agreement(got, np.zeros((1, 8, 4)), want)
    assert found.every_row == pytest.approx(0.5)
    assert found.problem == "logits: a row with relative RMS 5.00e-01 or more in every step, expected 0.05"
    few = run.agreement(got[:7], np.zeros((1, 7, 4)), want[:7])
    assert few.every_row is None
    assert few.problem is None


def zero_rows(logits: jax.Array, after: Any, before: Any) -> tuple[jax.Array, Any]:
    return logits.at[1:].set(0), after


def forgotten_state(logits: jax.Array, after: Any, before: Any) -> tuple[jax.Array, Any]:
    return logits, dataclasses.replace(after, layers=before.layers)


def forgotten_array(logits: jax.Array, after: Any, before: Any) -> tuple[jax.Array, Any]:
    kda, mla = after.layers
    return logits, dataclasses.replace(after, layers=({**kda, "conv": before.layers[0]["conv"]}, mla))


def lost_cache(logits: jax.Array, after: Any, before: Any) -> tuple[jax.Array, Any]:
    kda, mla = after.layers
    return logits, dataclasses.replace(after, layers=(kda, {"cache": mla["cache"] * 0}))


def louder(logits: jax.Array, after: Any, before: Any) -> tuple[jax.Array, Any]:
    return logits * 1.1, after


@pytest.mark.parametrize("fault", [zero_rows, forgotten_state, forgotten_array, lost_cache, louder])
def test_an_implementation_with_a_fault_ends_with_status_1(
    fault: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of two equal forms has the fault, so that nothing else differs."""
    compiled = contenders._compiled

    def faulty(model: Any, name: str, options: Any) -> Any:
        step = compiled(model, name, {})
        if not options:
            return step

        def wrong(params: Any, state: Any, tokens: jax.Array) -> Any:
            before = copy_of(state)
            return fault(*step(params, state, tokens), before)

        return wrong

    monkeypatch.setattr(contenders, "_compiled", faulty)
    monkeypatch.setattr(contenders, "_options", lambda name: (("right", {}), ("wrong", {"a": 1})))
    options = ["--implementations", "xla", "--steps", "2", "--rounds", "1", "--length", "3", "--batch", "2"]
    with pytest.raises(SystemExit, match="1"):
        cli.main(["bench", str(checkpoint), *options])
    assert "PROBLEM: batch 2: xla (wrong): " in capsys.readouterr().out


def test_logits_of_the_first_form_that_are_not_finite_end_with_status_1(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = contenders._compiled

    def faulty(*args: Any) -> Any:
        step = compiled(*args)

        def wrong(params: Any, state: Any, tokens: jax.Array) -> Any:
            logits, after = step(params, state, tokens)
            return logits * jnp.nan, after

        return wrong

    monkeypatch.setattr(contenders, "_compiled", faulty)
    monkeypatch.setattr(contenders, "_options", lambda name: (("one", {}), ("other", {})))
    options = ["--implementations", "xla", "--steps", "1", "--rounds", "1", "--length", "0"]
    with pytest.raises(SystemExit, match="1"):
        cli.main(["bench", str(checkpoint), *options, "--json", str(tmp_path / "b.json")])
    assert "PROBLEM: batch 1: xla: logits that are not finite" in capsys.readouterr().out

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    found = json.loads((tmp_path / "b.json").read_text(), parse_constant=refuse)
    assert found["batches"][0]["rows"][1]["agreement"]["worst"] is None


def test_a_run_of_nothing_ends_with_status_1_and_no_picture(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("k3jax.bench.command.importlib.util.find_spec", lambda name: name)
    options = ["--implementations", "pallas", "--steps", "1", "--rounds", "1", "--length", "0"]
    picture = tmp_path / "p.png"
    with pytest.raises(SystemExit, match="1"):
        cli.main(["bench", str(checkpoint), *options, "--picture", str(picture)])
    assert "PROBLEM: batch 1: no implementation ran" in capsys.readouterr().out
    assert not picture.exists()


def test_logits_that_do_not_agree_end_with_status_1(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Agreement(0.2, 0.25, 0.3, 0.5, 4, None, 0.0)
    monkeypatch.setattr(run, "agreement", lambda got, states, want: wrong)
    monkeypatch.setattr("k3jax.bench.contenders._options", lambda name: (("one", {}), ("other", {})))
    options = ["--implementations", "xla", "--steps", "1", "--rounds", "1", "--length", "0"]
    with pytest.raises(SystemExit, match="1"):
        cli.main(["bench", str(checkpoint), *options])
    assert "PROBLEM: batch 1: xla (other): logits: relative RMS 2.00e-01" in capsys.readouterr().out


# -- inputs and rounds ---------------------------------------------------------------------


def test_every_round_starts_from_the_same_state_and_rounds_alternate() -> None:
    seen: list[tuple[str, int]] = []
    state = k3jax.State((), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), 9)

    def contender(name: str) -> Contender:
        def step(params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
            seen.append((name, int(state.lengths[0])))
            return tokens, dataclasses.replace(state, lengths=state.lengths + 1)

        return Contender(name, "", step, None, lambda state: state)

    seconds = run.alternate([contender("a"), contender("b")], state, [jnp.zeros(1)] * 2, rounds=3)
    warm = [("a", 0), ("b", 0)]
    assert seen == warm + [("a", 0), ("a", 1), ("b", 0), ("b", 1)] * 3
    assert [len(s) for s in seconds] == [3, 3]


def test_every_compared_step_starts_from_the_first_ones_state() -> None:
    """An error of one step must not pass into the next one's comparison."""
    begin = k3jax.State((), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), 9)

    def contender(add: int) -> Contender:
        def step(params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
            return state.lengths * 10, dataclasses.replace(state, lengths=state.lengths + add)

        return Contender("", "", step, None, copy_of)

    tokens = [jnp.zeros(1)] * 3
    logits, states = run.run_steps(contender(1), begin, tokens)
    assert [int(x[0]) for x in logits] == [0, 10, 20]
    assert [int(s.lengths[0]) for s in states] == [0, 1, 2, 3]
    logits, errors = run.single_steps(contender(5), states, tokens)
    assert [int(x[0]) for x in logits] == [0, 10, 20]
    assert errors.tolist() == [[[4], [4], [4]]]  # the lengths moved by 5, not by 1


def test_a_state_depends_on_its_seed_and_has_no_tokens_past_its_length(checkpoint: Path) -> None:
    config = k3jax.K3Config.from_pretrained(checkpoint)
    make = run.random_state
    state = make(config, 2, 5, 9, jnp.bfloat16, 1)
    assert_bit_equal(state, make(config, 2, 5, 9, jnp.bfloat16, 1))
    assert not np.array_equal(state.layers[0]["S"], make(config, 2, 5, 9, jnp.bfloat16, 2).layers[0]["S"])
    cache = np.asarray(state.layers[1]["cache"]).astype(np.float32)
    assert (cache[:, :5] != 0).mean() > 0.9
    assert not cache[:, 5:].any()
    assert state.lengths.tolist() == [5, 5]


def test_distinct_experts_are_counted_per_layer(checkpoint: Path) -> None:
    model = k3jax.load(checkpoint, progress=False, implementation="xla")
    one = run.random_state(model.config, 1, 3, 9, model.dtype, 0)
    assert run.distinct_experts(model, one, []) == [2.0]
    rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), one)
    same = [jnp.array([7, 7], jnp.int32)]
    assert run.distinct_experts(model, rows, same) == [2.0], "two equal rows choose the same experts"


# -- the report ------------------------------------------------------------------------------


def report(ceiling: float | None = 1e12) -> Report:
    timings = (
        Timing("xla", "slow", (0.004, 0.005, 0.003), None),
        Timing("xla", "fast", (0.002,), Agreement(5e-4, 1e-3, 2e-3, 1.0, 4, None, 1e-3)),
        Timing("pallas", "", (0.001,), Agreement(5e-4, 1e-3, 2e-3, 1.0, 4, None, 1e-3)),
    )
    batch = BatchReport(1, 7, 500_000_000, 16.0, timings, {"megakernel": ("a", "b")}, ceiling)
    return Report({"device": "GPU", "model": "m", "date": "d"}, ceiling, "given", (batch,))


def test_the_fastest_form_of_xla_is_what_others_are_compared_with() -> None:
    (batch,) = report().batches
    assert [batch.speedup(t) for t in batch.timings] == [0.5, 1.0, 2.0]
    assert [batch.share(t) for t in batch.timings] == [0.125, 0.25, 0.5]
    text = report().text()
    assert "megakernel: not run: a; b" in text
    assert "50.0%" in text
    assert "read ceiling: 1.000 TB/s (given)" in text


def test_the_picture_has_a_bar_per_implementation_and_the_time_of_the_bytes() -> None:
    pytest.importorskip("matplotlib")
    from k3jax.bench.picture import plot

    drawn: Any = plot(report())
    (axes,) = drawn.axes
    assert [bar.get_height() for bar in axes.patches] == [2.0, 1.0]  # ms, the fastest form of each
    (floor,) = [line for line in axes.lines if "TB/s" in str(line.get_label())]
    assert list(floor.get_ydata()) == [0.5, 0.5]
    _, labels = axes.get_legend_handles_labels()
    assert sorted(labels) == ["bytes at 1.00 TB/s", "pallas", "xla"]


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("k3jax.bench.command.importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", str(checkpoint), "--picture", "x.png"]) == 2
    assert "picture: needs matplotlib" in capsys.readouterr().err


def test_without_a_ceiling_there_is_no_share() -> None:
    assert report(None).batches[0].share(report(None).batches[0].timings[0]) is None
    json.dumps(report(None).to_json())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--implementations", "cuda"], "implementations: expected of xla, .* got 'cuda'"),
        (["--implementations", "xla", "xla"], "expected each once"),
        (["--batch", "0"], "batch: expected numbers of at least 1"),
        (["--steps", "0"], "steps: expected at least 1"),
        (["--ceiling", "fast"], "ceiling: expected 'measured' or a rate in TB/s, got 'fast'"),
        (["--layers", "2"], "only with preset k3-slice"),
        (["--json", "no/such/folder/x.json"], "json: there is no folder"),
        (["--json", "."], "json: expected a file, got '.'"),
        (["--picture", "."], "picture: expected a file"),
        (["--picture", "p.bmp"], r"picture: expected a name that ends in \.png, \.svg, \.pdf, got 'p.bmp'"),
        (["--seed", "-1"], r"seed: expected 0\.\.2\*\*64-1, got -1"),
        (["--length", "500"], "length, steps: expected at most 512 together .* got 500 and 16"),
        (["--read-kernel", "no_such_file"], "read_kernel: no file"),
        (["--ceiling", "4", "--read-kernel", "x"], "read_kernel: only where the ceiling is measured"),
    ],
)
def test_wrong_options_are_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["bench", str(checkpoint), *options]) == 2
    assert re.search(message, capsys.readouterr().err)


# -- the ceiling -----------------------------------------------------------------------------


def test_the_ceiling_is_given_or_measured_on_a_gpu_only() -> None:
    assert ceiling_of("4.61").rate == pytest.approx(4.61e12)
    measured = ceiling_of("measured")
    assert measured.rate is None
    assert "got cpu" in measured.source


def test_a_measured_ceiling_is_the_higher_of_two_measurements() -> None:
    higher = Ceiling(4.3e12, "measured", lambda: 4.5e12).after()
    assert (higher.rate, higher.source) == (4.5e12, "measured: 4.300 before the steps, 4.500 after them")
    assert Ceiling(4.5e12, "measured", lambda: 4.3e12).after().rate == 4.5e12
    given = Ceiling(4.61e12, "given")
    assert given.after() == given

    def full() -> float:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    alone = Ceiling(4.5e12, "measured", full).after()
    assert alone.rate == 4.5e12
    assert alone.source.endswith(
        "before the steps, not measured after them: RESOURCE_EXHAUSTED: out of memory"
    )


def test_a_bench_measures_its_ceiling_again_after_the_steps(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Ceiling(1e9, "measured", lambda: 2e9)
    monkeypatch.setattr("k3jax.bench.ceiling.ceiling_of", lambda wanted, read_kernel: measured)
    options = ["--implementations", "xla", "--steps", "1", "--rounds", "1", "--length", "0"]
    assert cli.main(["bench", str(checkpoint), *options, "--json", str(tmp_path / "b.json")]) == 0
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["ceiling_tb_per_s"] == pytest.approx(0.002)
    (row,) = found["batches"][0]["rows"]
    assert row["ceiling_share"] == pytest.approx(row["tb_per_s"] / 0.002)


@pytest.mark.parametrize("boxes", [1, 3, 25])
def test_the_read_kernel_visits_every_box_once(boxes: int) -> None:
    rng = np.random.default_rng(boxes)
    x = jnp.asarray(rng.integers(-1000, 1000, (32 * boxes, 256)), jnp.int32)
    sums = assert_no_races(lambda races: read(x, interpret=races))
    np.testing.assert_array_equal(np.asarray(sums).sum(axis=0), np.asarray(reference(x)))


def test_the_read_kernel_lowers_for_cuda() -> None:
    lower_for_cuda(read, sds((1 << 21, 256), jnp.int32))


@pytest.mark.gpu
def test_the_read_kernel_on_the_gpu_reads_every_box_and_nears_the_memory_rate() -> None:
    x = jax.random.randint(jax.random.key(0), (1 << 21, 256), -1000, 1000, jnp.int32)
    np.testing.assert_array_equal(np.asarray(read(x)).sum(axis=0), np.asarray(reference(x)))
    rate = ceiling_of("measured").rate
    assert rate is not None
    assert 3.5e12 < rate < 4.9e12, "an H200 is sold with 4.8 TB/s and was measured to read 4.61"
