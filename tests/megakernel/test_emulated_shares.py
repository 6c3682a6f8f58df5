"""The kernel's own sources run the shares of two ranks on the emulated GPU, segment by segment.

The ranks take turns; what they give is summed in numpy between the launches. Every segment of every rank is
the interpreter's on the same exchanged numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import mesh
from k3jax.custom_calls.decode_megakernel.instructions import Exchange
from k3jax.custom_calls.decode_megakernel.interpreter import share as shares
from k3jax.custom_calls.decode_megakernel.kernel.geometry import Geometry
from k3jax.custom_calls.decode_megakernel.kernel.tables import segment_tables
from k3jax.custom_calls.decode_megakernel.operands import ALIASED, FAULT_FIELDS
from k3jax.custom_calls.decode_megakernel.shapes import Target
from k3jax.custom_calls.planned import plan_of_share
from k3jax.state import State, abstract_state
from support.compare import relative_rms
from support.emulator.step import Kernel, fields_of, operands_of
from support.megakernel_shares import local_params, local_state, taken
from support.random_k3 import params_from_tensors, random_config, random_tensors

pytestmark = pytest.mark.timeout(500)

CAPACITY = 256
LENGTHS = (70, 0, 64, 5, 1)
SPINS = 3000
SMALL = {
    "hidden_size": 64, "kda_num_heads": 2,
    "kda_head_dim": 128, "kda_v_head_dim": 128, "kda_a_log_size": 2, "num_attention_heads": 2,
    "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "routed_expert_hidden_size": 64, "moe_intermediate_size": 128, "num_experts": 7,
    "num_experts_per_token": 2, "num_shared_experts": 1, "intermediate_size": 64, "vocab_size": 40,
    "first_k_dense_replace": 1, "attn_res_block_size": 1,
}  # fmt: skip
"""KDA with the dense FFN, then MLA with a LatentMoE of 7 experts: two ranks of 4 hold a replica."""
GIVEN = 5e-3
"""Relative RMS of what a segment gives: bfloat16 roundings that sums in another order turn."""


@functools.cache
def model(layers: tuple[str, ...] = ("kda", "mla")) -> tuple[Any, Any]:
    config = random_config(1, **SMALL | {"num_hidden_layers": len(layers), "layer_types": layers})
    return config, jax.tree.map(np.asarray, params_from_tensors(config, random_tensors(config, 1), None))


def begin(config: Any, batch: int) -> State:
    rng = np.random.default_rng(0)
    empty = abstract_state(config, batch, CAPACITY, jnp.bfloat16).layers
    held = tuple({n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in x.items()} for x in empty)
    for layer in held:
        for b in range(batch if "cache" in layer else 0):
            layer["cache"][b, LENGTHS[b] :] = np.nan
    return State(held, np.array(LENGTHS[:batch], np.int32), np.zeros(batch, np.int32), CAPACITY)


class Ranks:
    """Both ranks of a model: operands for the kernel, and the interpreter beside it."""

    def __init__(self, batch: int, width: int, sms: int = 2, layers: tuple[str, ...] = ("kda", "mla")):
        self.config, self.params = model(layers)
        self.mesh = mesh.MeshPlan(1, 2, expert_width=width)
        self.plan = plan_of_share(self.config, self.mesh, batch, Target(f"{sms} emulated SMs", sms))
        self.share = shares.share(self.plan)
        self.geometry = Geometry(self.share.schedule, spins=SPINS)
        self.tables = segment_tables(self.share.schedule)
        self.tokens, self.active = np.arange(batch) + 3, np.arange(batch) != 2
        state = begin(self.config, batch)
        self.trees = [local_params(self.params, self.config, self.mesh, rank) for rank in (0, 1)]
        self.states = [local_state(state, self.config, self.mesh, rank) for rank in (0, 1)]
        self.held = [
            operands_of(
                self.share.schedule, self.tables, self.trees[rank], self.states[rank],
                self.tokens, self.active, rank,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        self.values: list[Any] = [shares.carried(self.plan) for _ in (0, 1)]
        self.gives: list[np.ndarray] = []
        self.dtype = self.params["embed_tokens"].dtype

    def favour(self, experts: np.ndarray) -> None:
        """Every row chooses these experts, bool [E], before any other."""
        for rank, tree in enumerate(self.trees):
            for layer in tree["layers"]:
                if moe := layer.get("block_sparse_moe"):
                    moe["e_score_correction_bias"] = np.where(experts, 5.0, -5.0).astype(np.float32)
            self.held[rank] = operands_of(
                self.share.schedule, self.tables, tree, self.states[rank], self.tokens, self.active, rank
            )

    def take(self, kind: Exchange) -> np.ndarray:
        """What both ranks take from an exchange; columns that nobody reads are NaN."""
        return taken(self.plan, kind, self.gives, self.params, self.tokens, self.dtype)

    def launch(
        self, rank: int, number: int, take: np.ndarray, kernel: Kernel, **changed: Any
    ) -> dict[str, Any]:
        """One segment of a rank by the kernel; its operands of the next one are kept."""
        given = {**self.held[rank], "take": take, "starts": self.tables.starts[number], **changed}
        out = kernel.launch(self.geometry, given)
        self.held[rank] |= {name: out[name] for name in (*ALIASED, "epoch")}
        return out

    def interpret(self, rank: int, number: int, take: np.ndarray) -> tuple[np.ndarray, dict[int, Any]]:
        part = self.share.segments[number]
        tree = shares.params_of(self.trees[rank], self.plan, part)
        self.values[rank], give, layers = shares.run_segment(
            self.plan, number, rank, tree, self.values[rank], take, self.states[rank],
            self.tokens, self.active, self.dtype,
        )  # fmt: skip
        return give, layers


def step_of_both(ranks: Ranks, kernel: Kernel | None = None) -> None:
    """Run a step, comparing every segment."""
    kernel = kernel or Kernel()
    run = ranks.active
    for number, part in enumerate(ranks.share.segments):
        assert part.kind is not None
        take = ranks.take(part.kind)
        gives = []
        for rank in (0, 1):
            out = ranks.launch(rank, number, take, kernel)
            assert not out["fault"].any(), dict(zip(FAULT_FIELDS, out["fault"].tolist(), strict=False))
            assert out["epoch"].tolist() == [number + 1]
            want, layers = ranks.interpret(rank, number, take)
            there = ~np.isnan(want[run])
            name = f"rank {rank}, segment {number} ({part.kind.name} of layer {part.layer})"
            if there.any():
                assert relative_rms(out["give"][run][there], want[run][there]) <= GIVEN, name
            for i, layer in layers.items():
                for key, leaf in layer.items():
                    got = np.asarray(out["state"][i][key])
                    same = ~np.isnan(np.asarray(leaf, np.float32))
                    assert relative_rms(got[same], leaf[same]) <= GIVEN, f"{name}, {key}"
                    kept = np.asarray(ranks.states[rank].layers[i][key])
                    assert got[~run].tobytes() == kept[~run].tobytes(), f"{name}, {key}"
            if part.gives is None:
                want_logits = ranks.values[rank]["logits"].T
                assert relative_rms(out["logits"][run], want_logits[run]) <= 4 * GIVEN
                assert out["token"][run].tolist() == out["logits"][run].argmax(-1).tolist()
                assert out["lengths"].tolist() == (ranks.states[rank].lengths + run).tolist()
            gives.append(out["give"])
        ranks.gives = gives
    for rank in (0, 1):
        fields = fields_of(ranks.geometry, ranks.held[rank]["work"])
        want = ranks.values[rank]["route"][0, run, : ranks.plan.A]
        np.testing.assert_array_equal(fields["route.ids"][run], want[..., 0])
        slots = fields["route.slots"][: int(fields["route.count"][0])]
        slot_of, here = fields["route.slot_of"][run], want[..., 2].astype(int)
        assert ((slot_of < 0) == (here < 0)).all()
        np.testing.assert_array_equal(slots[slot_of[here >= 0]], here[here >= 0])


@pytest.mark.parametrize(
    ("batch", "width"),
    [
        (2, 1),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(5, 1, marks=pytest.mark.slow),
    ],
    ids=["experts spread", "widths cut, three rows", "experts spread, five rows"],
)
def test_every_segment_of_both_ranks_is_the_interpreters(batch: int, width: int) -> None:
    step_of_both(Ranks(batch, width, sms=1 if batch == 2 else 2))


@pytest.mark.slow
def test_a_second_latent_moe_layer_takes_its_own_turn_at_the_barriers_of_the_experts() -> None:
    step_of_both(Ranks(1, 1, layers=("kda", "mla", "kda")))


SEEDED = {
    "another rank's latent columns": (
        "stages.residual",
        "source = t.taken(0, t.rank * p.latent_rows)",
        "source = t.taken(0, 0 * p.latent_rows)",
    ),
    "the shared expert left out of the sum": (
        "stages.residual",
        "sums[half] + shared)",
        "sums[half])",
    ),
    "the first row's replicas for every row": (
        "stages.route",
        "t.warp * t.p.E + chosen",
        "0 * t.p.E + chosen",
    ),
    "experts of other ranks in the sum": (
        "stages.combine",
        "served = from_lane(mine, a) >= 0",
        "served = from_lane(mine, a) >= -1",
    ),
    "a mean square of the rank's own columns": (
        "stages.residual",
        "scale_of_taken(t, p.L,",
        "scale_of_taken(t, p.latent_rows,",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_in_a_share_is_noticed(name: str) -> None:
    module, old, new = SEEDED[name]
    ranks = Ranks(2, 1, sms=1)
    copies = ranks.mesh.placements(ranks.config)[0].copies
    ranks.favour(copies == copies.max())  # rows of different numbers go to different ranks
    with pytest.raises(AssertionError):
        step_of_both(ranks, Kernel({module: (old, new)}))


@pytest.mark.slow
def test_a_rank_that_no_choice_falls_on_takes_the_same_path() -> None:
    ranks = Ranks(1, 1)
    ranks.favour(ranks.trees[1]["layers"][1]["block_sparse_moe"]["place"][0] < 0)  # only rank 0 has them
    step_of_both(ranks)
    counts = [fields_of(ranks.geometry, held["work"])["route.count"][0] for held in ranks.held]
    assert counts == [ranks.plan.A, 0]


@pytest.mark.slow
def test_a_segment_that_is_given_up_leaves_the_next_ones_to_end_and_the_next_step_clean_counters() -> None:
    ranks = Ranks(1, 1)
    kernel = Kernel()
    parts = ranks.share.segments
    gives = [np.zeros((1, ranks.plan.exchanged), np.float32)] * 2
    fault: dict[str, int] = {}
    held: dict[str, Any] = {}
    out: dict[str, Any] = {}
    for number, part in enumerate(parts):
        ranks.gives = gives
        assert part.kind is not None
        take = ranks.take(part.kind)
        starts = ranks.tables.starts[number].copy()
        if number == 1:
            starts[2] = starts[1]  # the second SM has no program
        out = ranks.launch(0, number, take, kernel, starts=starts)
        gives = [np.nan_to_num(out["give"])] * 2
        if number == 1:
            fault = dict(zip(FAULT_FIELDS, out["fault"].tolist(), strict=False))
            assert (fault["code"], fault["sm"], fault["epoch"]) == (1, 0, 1)
            held = {name: out[name] for name in ("state", "lengths")}
        if number >= 1:
            assert out["fault"].tolist()[:4] == [1, fault["op"], fault["layer"], 0]
    for before, after in zip(jax.tree.leaves(held), jax.tree.leaves({n: out[n] for n in held}), strict=True):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
    assert out["lengths"].tolist() == ranks.states[0].lengths.tolist()
    fresh = Ranks(1, 1)
    ranks.states, ranks.values, ranks.gives = fresh.states, fresh.values, fresh.gives
    for rank in (0, 1):
        again = {name: fresh.held[rank][name] for name in ("state", "lengths", "status", "fault")}
        ranks.held[rank] |= again
    ranks.held[1] = fresh.held[1] | {"epoch": ranks.held[0]["epoch"].copy()}
    started = int(ranks.held[0]["epoch"][0])
    assert started == len(parts)
    kernel = Kernel()
    outs: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        assert part.kind is not None
        take = ranks.take(part.kind)
        outs = [ranks.launch(rank, number, take, kernel) for rank in (0, 1)]
        assert not any(out["fault"].any() for out in outs)
        ranks.gives = [out["give"] for out in outs]
    assert [out["lengths"].tolist() for out in outs] == [[LENGTHS[0] + 1]] * 2
