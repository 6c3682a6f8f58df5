"""Two ranks on the emulated GPU at once, as two grids that exchange through mailboxes in the kernel."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import mesh
from k3jax.custom_calls.decode_megakernel.instructions import Exchange, Op
from k3jax.custom_calls.decode_megakernel.kernel.geometry import Geometry
from k3jax.custom_calls.decode_megakernel.operands import ALIASED, FAULT_FIELDS, mailbox_words
from k3jax.custom_calls.decode_megakernel.shapes import Target
from k3jax.custom_calls.planned import plan_of_share
from k3jax.custom_calls.tables import launch_tables
from k3jax.state import State, abstract_state
from support.compare import relative_rms
from support.emulator.step import Kernel, fields_of, operands_of
from support.megakernel_shares import local_params, local_state, run_ranks, taken, whole_layers
from support.random_k3 import params_from_tensors, random_config, random_tensors

pytestmark = pytest.mark.timeout(590)

CAPACITY, LENGTHS, SPINS = 256, (70, 0, 64), 6000
SMALL = {
    "num_hidden_layers": 2, "layer_types": ("kda", "mla"), "hidden_size": 64, "kda_num_heads": 2,
    "kda_head_dim": 128, "kda_v_head_dim": 128, "kda_a_log_size": 2, "num_attention_heads": 2,
    "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "routed_expert_hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 7,
    "num_experts_per_token": 2, "num_shared_experts": 2, "intermediate_size": 64, "vocab_size": 40,
    "first_k_dense_replace": 1, "attn_res_block_size": 1,
}  # fmt: skip
STEP = 2e-2
"""Relative RMS of logits and states of a step: bfloat16 roundings that sums in another order turn."""


class Pair:
    """Both ranks of a small model, with their mailboxes."""

    def __init__(self, batch: int, sms: int):
        self.config = random_config(1, **SMALL)
        made = params_from_tensors(self.config, random_tensors(self.config, 1), None)
        self.params = jax.tree.map(np.asarray, made)
        self.mesh = mesh.MeshPlan(1, 2)
        target = Target(f"{sms} emulated SMs", sms)
        self.plan = dataclasses.replace(plan_of_share(self.config, self.mesh, batch, target), peers=True)
        self.tables = launch_tables(self.plan)
        self.geometry = Geometry(self.tables.schedule, spins=SPINS)
        rng = np.random.default_rng(0)
        empty = abstract_state(self.config, batch, CAPACITY, jnp.bfloat16).layers
        held = tuple({n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in x.items()} for x in empty)
        lengths = np.array(LENGTHS[:batch], np.int32)
        self.state = State(held, lengths, np.zeros(batch, np.int32), CAPACITY)
        self.active = np.arange(batch) != 1
        self.mailboxes = [np.zeros(mailbox_words(self.plan), np.int32) for _ in range(2)]
        self.held: list[dict[str, Any]] = []
        for rank in range(2):
            tree = local_params(self.params, self.config, self.mesh, rank)
            state = local_state(self.state, self.config, self.mesh, rank)
            none = np.zeros(batch, np.int32)
            self.held.append(
                operands_of(self.tables.schedule, self.tables, tree, state, none, self.active, rank)
            )

    def step(self, tokens: np.ndarray, kernel: Kernel, seed: int | None = None, **changed: Any) -> Any:
        """A launch of both ranks; ``changed`` operands are the second one's."""
        dtype = self.params["embed_tokens"].dtype
        take = taken(self.plan, Exchange.EMBEDDING, [], self.params, tokens, dtype)
        given = [{**held, "take": take, "tokens": tokens.astype(np.int32)} for held in self.held]
        given[1] |= changed
        outs = kernel.launch_ranks(self.geometry, given, seed, self.mailboxes)
        for held, out in zip(self.held, outs, strict=True):
            held |= {name: out[name] for name in (*ALIASED, "epoch")}
        return outs


def assert_is_the_interpreters(
    pair: Pair, outs: Any, before: State, tokens: np.ndarray, launches: int
) -> None:
    for out in outs:
        assert not out["fault"].any(), dict(zip(FAULT_FIELDS, out["fault"].tolist(), strict=False))
    want = run_ranks(pair.params, pair.config, pair.mesh, before, tokens, pair.active)
    run = pair.active
    logits = np.concatenate([out["logits"] for out in outs], axis=1)
    assert relative_rms(logits[run], want.logits[run]) <= STEP
    for i in range(pair.config.num_hidden_layers):
        for name in want.layers[0][i]:
            whole = whole_layers(want, pair.config, pair.mesh, i, name)
            ours = [{i: {k: np.asarray(v) for k, v in out["state"][i].items()}} for out in outs]
            got = whole_layers(dataclasses.replace(want, layers=ours), pair.config, pair.mesh, i, name)
            assert relative_rms(got[run], whole[run]) <= STEP, f"layer {i}: {name}"
    # What the ranks summed, they have alike to the bit, and so what they made of it.
    fields = [fields_of(pair.geometry, out["work"]) for out in outs]
    for name in ("pre", "block", "rlogit", "route.ids"):
        a, b = (np.ascontiguousarray(f[name]).view(np.uint8) for f in fields)
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert [box[0] for box in pair.mailboxes] == [launches, launches]


@pytest.mark.slow
def test_two_steps_of_two_ranks_are_the_interpreters() -> None:
    """The second step finds the mailboxes as the first one left them."""
    pair, kernel = Pair(1, 1), Kernel()
    state = pair.state
    for launches in (1, 2):
        tokens = np.array([launches + 3])
        outs = pair.step(tokens, kernel, seed=launches)
        assert_is_the_interpreters(pair, outs, state, tokens, launches)
        layers = tuple(
            {
                name: whole_layers(
                    dataclasses.replace(
                        run_ranks(pair.params, pair.config, pair.mesh, state, tokens, pair.active),
                        layers=[{i: {k: np.asarray(v) for k, v in out["state"][i].items()}} for out in outs],
                    ),
                    pair.config, pair.mesh, i, name,
                )
                for name in state.layers[i]
            }
            for i in range(2)
        )  # fmt: skip
        state = State(layers, outs[0]["lengths"], outs[0]["status"], CAPACITY)


@pytest.mark.slow
def test_three_rows_on_two_sms_a_rank() -> None:
    pair = Pair(3, 2)
    tokens = np.array([3, 4, 5])
    assert_is_the_interpreters(pair, pair.step(tokens, Kernel(), seed=7), pair.state, tokens, 1)


@pytest.mark.slow
def test_a_peer_that_never_gives_ends_the_step_with_a_record_that_names_it() -> None:
    """The second rank has no program: the first gives up at its first exchange, and ends without states."""
    pair = Pair(1, 1)
    outs = pair.step(np.array([3]), Kernel(), starts=np.zeros_like(pair.tables.starts))
    fault = dict(zip(FAULT_FIELDS, outs[0]["fault"].tolist(), strict=False))
    assert (fault["code"], fault["op"], fault["layer"]) == (1, int(Op.EXCHANGE), 0)
    assert fault["counter"] == 1  # the rank
    assert (fault["target"], fault["value"]) == (int(Exchange.ATTENTION) + 1, 0)
    assert outs[0]["lengths"].tolist() == pair.state.lengths.tolist()
    after, before = outs[0]["state"][1]["cache"], pair.held[1]["state"][1]["cache"]
    assert after.tobytes() == before.tobytes()


SEEDED = {
    "flags of the peers not awaited": (
        'poll_at(t, op, layer, t.tid, theirs, sequence, "sys")',
        "pass",
    ),
    "flags of an earlier launch taken": (
        "launches * (4 * p.layers + 1) + number + 1",
        "number + 1",
    ),
    "one peer's results for all": (
        "source = slot(t, t.rank, turn, rank, b, column)",
        "source = t.given(b, column)",
    ),
    "latent rows in another order": (
        "t.taken(b, rank * p.latent_rows + column)",
        "t.taken(b, (p.ways - 1 - rank) * p.latent_rows + column)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_of_the_exchange_is_noticed(name: str) -> None:
    """By the results of two steps: of the second one where flags of the first are there."""
    assert two_steps(Kernel({"stages.exchange": SEEDED[name]})) != two_steps(Kernel())


def two_steps(kernel: Kernel) -> list[bytes]:
    """Logits of both ranks in two steps, as bits."""
    pair = Pair(1, 1)
    outs = [pair.step(np.array([3]), kernel, seed) for seed in (1, 2)]
    return [out["logits"].tobytes() for both in outs for out in both]


def test_the_list_of_a_share_that_exchanges_itself_is_whole() -> None:
    pair = Pair(1, 2)
    instructions = pair.tables.schedule.instructions
    exchanges = [i for i in instructions if i.op == Op.EXCHANGE and i.c0 != Exchange.EMBEDDING]
    listed = pair.tables.records[pair.tables.records[:, 0] == int(Op.EXCHANGE)]
    assert len(listed) == len(exchanges) == len(pair.tables.records[pair.tables.records[:, 0] == 16])
    assert (listed[:, 6] != Exchange.EMBEDDING).all()
    assert (listed[:, 10] > 0).all()  # each waits for what it gives
    numbers = [4 * i.layer + i.c0 for i in exchanges]
    order = list(dict.fromkeys(numbers))
    assert all((a ^ b) & 1 for a, b in itertools.pairwise(order)), "neighbours take turns"
