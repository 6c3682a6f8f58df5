"""K3 over two GPUs of one host: what an exchange takes, and whole steps against one GPU.

    python tests/bench/two_gpus.py --out tests/bench/results/two_h200            # about 120 GB of GPU 0

The first layers of the release at full width, random weights, all 896 experts (nano: the shipped weights).
Three layouts: one GPU; TP2, everything cut in two, experts too; EP2, whole experts spread over the two, the
rest cut. The two are run as segments with collectives between them, and with the exchange in the kernel,
through mailboxes. Logits and states of every form are compared with those of one GPU, as ``k3jax bench`` does
it; a form that does not agree ends the run with 1. Rates are the bytes that both GPUs must read and write, as
percent of the sum of what each was measured to read in this run. Written: OUT.json and OUT.txt. An exchange
in the kernel is timed by a build of it that keeps time (tests/support/exchange_times.py).

Kernels are compiled where there is a compiler; ``--compile DIR`` only does that, without a GPU, and
``--kernels DIR`` uses them. ``--implementation megakernel-interpret --preset nano`` runs the same anywhere:
its times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import k3jax
from k3jax import mesh
from k3jax.bench import run as benching
from k3jax.bench.ceiling import Ceiling, ceiling_of
from k3jax.bench.contenders import Contender, contenders, copy_of
from k3jax.checkpoints import resolve
from k3jax.config import K3Config
from k3jax.custom_calls import artifacts, planned, planned_step
from k3jax.custom_calls.compile import compile_artifact, obtain
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.custom_calls.decode_megakernel.traffic import expected
from k3jax.custom_calls.mailboxes import Mailboxes, mailbox_problems
from k3jax.mesh.plan import TENSOR_PARALLEL
from k3jax.mesh.random import random_planned
from k3jax.model import decode_step
from k3jax.random_params import random_params
from k3jax.sizes import expert_bytes
from k3jax.state import check

sys.path.append(str(Path(__file__).absolute().parents[1]))
from support.exchange_times import exchange_micros, trace_clocks, traced_key

LAYOUTS = {"TP2": 2, "EP2": 1}
"""Layout -> ways that each expert's width is cut."""
CHAIN = 64
"""Collectives in a row, each of what the one before gave: their time is that of one, 64 times."""
Note = Callable[[str], None]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="path of the results, without suffix")
    parser.add_argument("--preset", choices=("k3-slice", "nano"), default="k3-slice")
    parser.add_argument("--layers", type=int, default=4, help="of k3-slice")
    parser.add_argument(
        "--implementation", choices=("megakernel", "megakernel-interpret"), default="megakernel"
    )
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    for name, default in (("batch", 1), ("length", 512), ("steps", 16), ("rounds", 7), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ceiling", default="measured", help="TB/s of one GPU, instead of measuring it")
    parser.add_argument("--read-kernel", help="what `read_ceiling.py compile` wrote")
    parser.add_argument("--kernels", type=Path, help="folder that --compile wrote")
    parser.add_argument("--compile", type=Path, help="compile the kernels to this folder, and nothing else")
    parser.add_argument("--sms", type=int, default=132, help="of the GPUs, for --compile")
    given = parser.parse_args(arguments)
    for name, least in (("batch", 1), ("length", 0), ("steps", 3), ("rounds", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name}: expected at least {least}, got {getattr(given, name)}")
    if (given.out is None) == (given.compile is None):
        parser.error("expected one of --out, --compile")
    if given.out is not None and not given.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {given.out.absolute().parent}")
    return given


def config_of(given: argparse.Namespace) -> K3Config:
    if given.preset == "nano":
        return K3Config.from_pretrained(resolve("nano"))
    return K3Config.preset("k3-slice", num_layers=given.layers)


def compile_all(given: argparse.Namespace) -> None:
    """The kernels of one GPU and of both layouts: by segments, with mailboxes, and that keeping time."""
    config, target = config_of(given), Target("sm_90a", sms=given.sms)
    keys = [artifacts.Key(Plan(config, given.batch, target), "sm_90a")]
    for name in given.layouts:
        share = Plan(config, given.batch, target, ways=2, expert_ways=2 // LAYOUTS[name])
        peers = dataclasses.replace(share, peers=True)
        keys += [artifacts.Key(share, "sm_90a"), artifacts.Key(peers, "sm_90a"), traced_key(peers, "sm_90a")]
    for key in keys:
        seconds = compile_artifact(key, given.compile).about["compile_seconds"]
        print(f"{key.file_name}: {seconds} s", flush=True)


def weights(given: argparse.Namespace, config: K3Config, plan: mesh.MeshPlan | None) -> Any:
    """The model's parameters: on one GPU, or the same ones laid out by ``plan``."""
    if given.preset == "nano":
        return k3jax.load("nano", implementation="xla", mesh=plan, progress=False).params
    if plan is None:
        return random_params(config, given.seed)
    return random_planned(config, plan, given.seed)


# -- bytes -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What a step must move, mean over the steps: on both GPUs, and on the busier one of each layer."""

    both: float
    busiest: float


def routes(model: Any, state: Any, tokens: list[jax.Array]) -> np.ndarray:
    """int [steps, LatentMoE layers, B, A], experts that one GPU's "xla" steps choose."""
    config = model.config
    params = {name: leaf for name, leaf in model.params.items() if name != "megakernel"}

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        seen: dict[str, jax.Array] = {}
        _, after = decode_step(
            params, state, tokens, config=config, implementation="xla", tap=seen.__setitem__
        )
        return [value for name, value in seen.items() if name.endswith("topk_ids")], after

    state, found = copy_of(state), []
    for row in tokens:
        ids, state = step(params, state, row)
        found.append(np.stack([np.asarray(layer) for layer in ids]))
    return np.stack(found)


def bytes_of(config: K3Config, plan: mesh.MeshPlan, ids: np.ndarray, length: int) -> Bytes:
    """Bytes of a step over ``plan``: each rank reads the experts of its own that a row chose once.

    Args:
        ids: of :func:`routes`.
        length: tokens cached in a row.
    """
    share = planned.plan_of_share(config, plan, ids.shape[2], Target())
    fixed = expected(share, length, 0).total
    expert = expert_bytes(config) / plan.expert_width
    counts = np.zeros((len(ids), config.num_moe_layers, plan.expert_ranks))
    rows = np.arange(ids.shape[2])[:, None]
    for layer, place in enumerate(plan.placements(config)):
        table, copies = place.slot_table(), np.asarray(place.copies)
        for step, chosen in enumerate(ids[:, layer]):
            slots = np.unique(table[chosen, rows % copies[chosen]])
            counts[step, layer] = np.bincount(slots // place.slots_per_rank, minlength=plan.expert_ranks)
    all_ranks = plan.expert_width * counts.sum(axis=(1, 2)).mean()
    busier = counts.max(axis=2).sum(axis=1).mean()
    return Bytes(plan.tensor * fixed + all_ranks * expert, fixed + busier * expert)


# -- exchanges -------------------------------------------------------------------------------------


def collective_micros(config: K3Config, plan: mesh.MeshPlan, batch: int, rounds: int) -> dict[str, float]:
    """Microseconds of one collective as the segmented step has them: the median of rounds."""

    def total(x: jax.Array) -> jax.Array:
        return lax.psum(x, TENSOR_PARALLEL) * 0.5

    def whole(x: jax.Array) -> jax.Array:
        each = x.shape[1] // plan.tensor
        mine = lax.dynamic_slice_in_dim(x, lax.axis_index(TENSOR_PARALLEL) * each, each, axis=1)
        return lax.all_gather(mine, TENSOR_PARALLEL, axis=1, tiled=True) + 1

    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    forms = {
        f"psum, float32 [{batch}, {hidden}]": (total, hidden, jnp.float32),
        f"psum, float32 [{batch}, {latent}]": (total, latent, jnp.float32),
        f"all_gather, bfloat16 [{batch}, {latent}]": (whole, latent, jnp.bfloat16),
    }
    out = {}
    for name, (one, width, dtype) in forms.items():

        def chain(x: jax.Array, one: Any = one) -> jax.Array:
            for _ in range(CHAIN):
                x = one(x)
            return x

        # Every rank has its own numbers, or XLA would know that the sum is twice them.
        ranks = PartitionSpec(TENSOR_PARALLEL)
        run = jax.jit(
            jax.shard_map(
                lambda x, chain=chain: chain(x[0])[None], mesh=plan.mesh, in_specs=ranks, out_specs=ranks,
                check_vma=False,
            )
        )  # fmt: skip
        x = jax.device_put(np.ones((plan.tensor, batch, width), dtype), NamedSharding(plan.mesh, ranks))
        jax.block_until_ready(run(x))
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            jax.block_until_ready([run(x) for _ in range(8)])
            seconds.append((time.perf_counter() - start) / (8 * CHAIN))
        out[name] = 1e6 * statistics.median(seconds)
    return out


def mailbox_micros(
    config: K3Config, plan: mesh.MeshPlan, params: Any, boxes: Mailboxes, begin: Any, tokens: Any
) -> dict[str, dict[str, float]]:
    """Microseconds of the exchanges in the kernel by kind, as ``exchange_micros`` says."""
    key = traced_key(boxes.share, planned.target_of_plan(plan)[0])
    artifact = obtain(key)
    state = mesh.to_plan(begin, config, plan)
    state = planned.with_kernel(state, config, plan, peers=True, trace=key.trace)
    live = jnp.ones(begin.batch, bool)

    @partial(jax.jit, donate_argnames="state")
    def step(params: Any, state: Any, row: jax.Array) -> Any:
        return planned_step.step(
            params, state, row, live, config=config, plan=plan, implementation="megakernel",
            artifact=artifact, mailboxes=boxes.addresses,
        ).state  # fmt: skip

    state = step(params, state, tokens[0])  # compiled outside the time that is measured
    trace_clocks(boxes.share, key.trace, state.kernel)
    state = jax.block_until_ready(step(params, state, tokens[1]))
    start = time.perf_counter()
    clocks = [trace_clocks(boxes.share, key.trace, state.kernel)]
    for row in tokens[2:]:
        state = step(params, state, row)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    check(state)
    clocks.append(trace_clocks(boxes.share, key.trace, state.kernel))
    return exchange_micros(boxes.share, clocks[0], clocks[1], seconds)


# -- forms of a step -------------------------------------------------------------------------------


def two_gpu_forms(
    config: K3Config, plan: mesh.MeshPlan, params: Any, implementation: str, batch: int, boxes: Any
) -> Iterator[Contender]:
    """The step by segments, and that with the exchange in the kernel where there are mailboxes."""
    every: list[tuple[str, Any]] = [("segmented", None)]
    if boxes is not None:
        every.append(("in the kernel", boxes.addresses))
    for form, addresses in every:
        peers = addresses is not None

        def adopt(state: Any, peers: bool = peers) -> Any:
            spread = mesh.to_plan(state, config, plan)
            if implementation != "megakernel":
                return spread
            return planned.with_kernel(spread, config, plan, peers=peers)

        def step(params: Any, state: Any, tokens: jax.Array, addresses: Any = addresses) -> Any:
            out = planned_step.step(
                params, state, tokens, jnp.ones(batch, bool), config=config, plan=plan,
                implementation=implementation, mailboxes=addresses,
            )  # fmt: skip
            return out.logits, out.state

        yield Contender(implementation, form, jax.jit(step, donate_argnums=1), params, adopt)


def gathered(contender: Contender) -> Contender:
    """A form whose results lie on one device, as those that they are compared with."""

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        logits, after = contender.step(params, state, tokens)
        check(after)
        return jnp.asarray(np.asarray(logits)), mesh.from_plan(after)

    return dataclasses.replace(contender, step=step)


# -- the run ---------------------------------------------------------------------------------------


def ceilings(given: argparse.Namespace, devices: list[Any]) -> list[Ceiling]:
    """Of each device, measured alone."""
    found = []
    for device in devices:
        with jax.default_device(device):
            found.append(ceiling_of(given.ceiling, given.read_kernel))
    return found


def again(found: list[Ceiling], devices: list[Any]) -> list[Ceiling]:
    out = []
    for ceiling, device in zip(found, devices, strict=True):
        with jax.default_device(device):
            out.append(ceiling.after())
    return out


def entry(name: str, form: str, seconds: list[float], agreed: Any, moved: Bytes, gpus: int) -> dict[str, Any]:
    return {
        "layout": name,
        "form": form,
        "gpus": gpus,
        "seconds": seconds,
        "median": statistics.median(seconds),
        "bytes": moved.both,
        "bytes_of_the_busiest": moved.busiest,
        "agreement": None if agreed is None else dataclasses.asdict(agreed),
        "problem": None if agreed is None else agreed.problem,
    }


def one_gpu(given: argparse.Namespace, config: K3Config, begin: Any, tokens: Any, note: Note) -> Any:
    """(entries, logits and states that others are compared with, experts chosen, why forms did not run)."""
    model = k3jax.Model(weights(given, config, None), config, implementation="xla")
    ids = routes(model, begin, tokens)
    middle = given.length + (given.steps - 1) // 2
    distinct = [float(np.mean([len(np.unique(s)) for s in ids[:, i]])) for i in range(ids.shape[1])]
    moved = config.bytes_per_step(given.batch, middle, distinct).total
    running: list[tuple[Contender, Any]] = []
    missing: dict[str, list[str]] = {}
    logits, states = [], []
    for found in contenders(model, ("xla", given.implementation), given.batch):
        if isinstance(found, tuple):
            missing[f"one GPU, {found[0]}"] = list(found[1])
            continue
        note(f"one GPU: {found.implementation} {found.form}")
        if not logits:
            logits, states = benching.run_steps(found, begin, tokens)
            running.append((found, None))
        else:
            running.append((found, benching.agreement(*benching.single_steps(found, states, tokens), logits)))
    times = benching.alternate([c for c, _ in running], begin, tokens, given.rounds)
    entries = [
        entry("one GPU", f"{c.implementation} {c.form}".strip(), s, agreed, Bytes(moved, moved), 1)
        for (c, agreed), s in zip(running, times, strict=True)
    ]
    return entries, (logits, states), ids, missing


def two_gpus(
    given: argparse.Namespace, config: K3Config, name: str, reference: Any, ids: np.ndarray, begin: Any,
    tokens: Any, note: Note,
) -> dict[str, Any]:  # fmt: skip
    """Entries, exchange times and what did not run of one layout."""
    plan = mesh.MeshPlan(1, 2, expert_width=LAYOUTS[name], devices=tuple(jax.devices()[:2]))
    out: dict[str, Any] = {"steps": [], "mailbox": {}, "missing": {}}
    kernel = given.implementation == "megakernel"
    if reasons := planned.planned_problems(config, plan, given.batch, None, "megakernel-interpret"):
        out["missing"][name] = reasons
        return out
    note(f"{name}: weights")
    params = weights(given, config, plan)
    if kernel:
        params = planned.with_packed(params, config, plan)
        if reasons := planned.planned_problems(config, plan, given.batch, params, "megakernel"):
            out["missing"][name] = reasons
            return out
    problems = mailbox_problems(plan) if kernel else ["mailboxes: only with implementation 'megakernel'"]
    boxes = None if problems else Mailboxes(config, plan, given.batch)
    if problems:
        out["missing"][f"{name}, in the kernel"] = problems
    everywhere = NamedSharding(plan.mesh, PartitionSpec())
    spread = [jax.device_put(np.asarray(row), everywhere) for row in tokens]
    forms = list(two_gpu_forms(config, plan, params, given.implementation, given.batch, boxes))
    agreed = []
    logits, states = reference
    for form in forms:
        note(f"{name}: {form.form}")
        agreed.append(benching.agreement(*benching.single_steps(gathered(form), states, spread), logits))
    times = benching.alternate(forms, begin, spread, given.rounds)
    middle = given.length + (given.steps - 1) // 2
    moved = bytes_of(config, plan, ids, middle)
    for form, seconds, found in zip(forms, times, agreed, strict=True):
        out["steps"].append(entry(name, f"{form.implementation} {form.form}", seconds, found, moved, 2))
    if boxes is not None:
        note(f"{name}: exchanges in the kernel")
        out["mailbox"] = mailbox_micros(config, plan, params, boxes, begin, spread)
    return out


def measure(given: argparse.Namespace, note: Note) -> dict[str, Any]:
    """All figures.

    Raises:
        RuntimeError: fewer than two devices.
    """
    devices = jax.devices()[:2]
    if len(devices) < 2:
        raise RuntimeError(f"devices: expected 2, jax sees {len(devices)} {devices[0].platform}")
    if given.kernels is not None:
        artifacts.add_folder(given.kernels)
    config = config_of(given)
    note("read ceilings")
    rates = ceilings(given, devices)
    begin = benching.random_state(
        config, given.batch, given.length, given.length + given.steps, jnp.bfloat16, given.seed
    )
    drawn = np.random.default_rng([given.seed, given.batch])
    rows = drawn.integers(0, config.vocab_size, (given.steps, given.batch)).astype(np.int32)
    tokens = [jnp.asarray(row) for row in rows]
    steps, reference, ids, missing = one_gpu(given, config, begin, tokens, note)
    plan = mesh.MeshPlan(1, 2, devices=tuple(devices))
    note("collectives")
    collectives = collective_micros(config, plan, given.batch, given.rounds)
    mailbox = {}
    for name in given.layouts:
        gc.collect()  # the weights before are gone
        found = two_gpus(given, config, name, reference, ids, begin, tokens, note)
        steps += found["steps"]
        missing |= found["missing"]
        mailbox[name] = found["mailbox"]
    rates = again(rates, devices)
    return {
        "about": {
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "devices": [d.device_kind for d in devices],
            "versions": f"jax {jax.__version__}, {devices[0].client.platform_version}".replace("\n", " "),
            "command": " ".join(["python", *sys.argv]),
            "model": f"{given.preset}: {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
            f"{config.num_experts} experts",
            "batch": given.batch, "length": given.length, "steps": given.steps, "rounds": given.rounds,
        },
        "ceilings": [{"rate": c.rate, "source": c.source} for c in rates],
        "collective_us": collectives,
        "mailbox_us": mailbox,
        "steps": steps,
        "missing": missing,
        "problems": problems_of(steps, given),
    }  # fmt: skip


def problems_of(steps: list[dict[str, Any]], given: argparse.Namespace) -> list[str]:
    """What does not agree with one GPU, and layouts that did not run at all."""
    found = [f"{s['layout']}, {s['form']}: {s['problem']}" for s in steps if s["problem"]]
    ran = {s["layout"] for s in steps}
    return found + [f"{name}: did not run" for name in ("one GPU", *given.layouts) if name not in ran]


def text(report: dict[str, Any]) -> str:
    """The report as text."""
    about, rates = report["about"], [c["rate"] for c in report["ceilings"]]
    lines = [f"{key}: {value}" for key, value in about.items()]
    for device, c in enumerate(report["ceilings"]):
        rate = "none" if c["rate"] is None else f"{c['rate'] * 1e-12:.3f} TB/s"
        lines.append(f"read ceiling of GPU {device}: {rate}, {c['source']}")
    lines += ["", "an exchange between the two, us:"]
    lines += [f"  {name:<58} {us:9.2f}" for name, us in report["collective_us"].items()]
    for layout, kinds in report["mailbox_us"].items():
        for kind, us in kinds.items():
            first, last = us["first"], us["last"]
            name = f"mailboxes, {layout}, {kind}, {us['count']:.0f} of a step"
            lines.append(f"  {name:<58} {last:9.2f} on the rank that comes last, {first:.2f} on the first")
    lines += ["", "a step:"]
    lines.append(
        f"  {'layout':<8} {'form':<32} {'ms':>9} {'GB':>9} {'% of':>7} {'% of the':>9}  logits, state"
    )
    lines.append(f"  {'':<8} {'':<32} {'':>9} {'':>9} {'ceiling':>7} {'busiest':>9}")
    for s in report["steps"]:
        known = [r for r in rates[: s["gpus"]] if r is not None]
        summed, own = ["-", "-"] if len(known) < s["gpus"] else [
            f"{100 * s['bytes'] / (sum(known) * s['median']):.1f}",
            f"{100 * s['bytes_of_the_busiest'] / (min(known) * s['median']):.1f}",
        ]  # fmt: skip
        a = s["agreement"]
        agreed = "compared with" if a is None else f"{a['quarter']:.1e} {a['worst']:.1e}, {a['state']:.1e}"
        lines.append(
            f"  {s['layout']:<8} {s['form']:<32} {s['median'] * 1e3:9.4f} {s['bytes'] * 1e-9:9.4f} "
            f"{summed:>7} {own:>9}  {agreed}"
        )
    lines += [
        "",
        "% of ceiling: the bytes of both over the time and the GPUs' summed read ceilings; % of the",
    ]
    lines += [
        "busiest: the bytes of the busier GPU of each layer over the time and the lower ceiling (EP2's own"
    ]
    lines += [
        "bound). Logits: relative RMS that a quarter of the rows stay below, the worst; state likewise."
    ]
    for name, reasons in report["missing"].items():
        lines.append(f"did not run: {name}: {'; '.join(reasons)}")
    lines += [f"PROBLEM: {problem}" for problem in report["problems"]] or ["all forms agree with one GPU"]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.compile is not None:
        compile_all(given)
        return 0
    report = measure(given, lambda message: print(message, file=sys.stderr, flush=True))
    said = text(report)
    print(said, flush=True)
    given.out.with_name(given.out.name + ".txt").write_text(said + "\n", encoding="utf-8")
    data = json.dumps(report, indent=1, allow_nan=False)
    given.out.with_name(given.out.name + ".json").write_text(data + "\n", encoding="utf-8")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
