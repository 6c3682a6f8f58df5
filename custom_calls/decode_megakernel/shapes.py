"""Sizes a schedule is made for: a configuration, or one tensor-parallel rank's share of it."""
# ruff: noqa: N802 (sizes are named by their axis letters)

from __future__ import annotations

import dataclasses
from functools import cached_property

from k3jax.config import K3Config

ROW_GROUP = 8
"""Rows (or columns of a vector) that are never split: the unit of work, and of every row partition."""
MAX_BATCH = 8
MAX_ACTIVE = 16
"""Experts a token."""


def groups_of(count: int) -> int:
    """Row groups that hold ``count`` rows."""
    return -(-count // ROW_GROUP)


@dataclasses.dataclass(frozen=True)
class Target:
    """What one SM of the target offers, and how many there are.

    Attributes:
        sms: SMs, one thread block each.
        shared_bytes: dynamic shared memory a block can have.
        registers: 32-bit registers of an SM.
    """

    name: str = "sm_90a"
    sms: int = 132
    shared_bytes: int = 232_448
    registers: int = 65_536


H200 = Target()


def plan_faults(
    config: K3Config,
    batch: int,
    target: Target = H200,
    ways: int = 1,
    expert_ways: int = 1,
    peers: bool = False,
) -> list[str]:
    """All that keeps these from being a :class:`Plan`, each with its argument; empty if nothing does."""
    c, found = config, []
    if not 1 <= batch <= MAX_BATCH:
        found.append(f"batch: expected 1..{MAX_BATCH}, got {batch}")
    if not 1 <= c.num_experts_per_token <= MAX_ACTIVE:
        found.append(f"num_experts_per_token: expected 1..{MAX_ACTIVE}, got {c.num_experts_per_token}")
    if target.sms < 1:
        found.append(f"target.sms: expected at least 1, got {target.sms}")
    if peers and ways == 1:
        found.append("peers: expected ways of at least 2, got 1")
    if ways < 1:
        return [*found, f"ways: expected at least 1, got {ways}"]
    divided = {
        "kda_num_heads": c.kda_num_heads,
        "num_attention_heads": c.num_attention_heads,
        "intermediate_size": c.intermediate_size,
        "shared_intermediate_size": c.shared_intermediate_size,
        "routed_expert_hidden_size": c.routed_expert_hidden_size,
        "vocab_size": c.vocab_size,
    }
    if bad := [f"{name}={value}" for name, value in divided.items() if value % ways]:
        found.append(f"ways: {ways} does not divide {', '.join(bad)}")
    if expert_ways < 1 or ways % expert_ways:
        found.append(f"expert_ways: expected a divisor of ways={ways}, got {expert_ways}")
    elif c.moe_intermediate_size % (ways // expert_ways):
        found.append(
            f"ways, expert_ways: {ways} / {expert_ways} does not divide "
            f"moe_intermediate_size={c.moe_intermediate_size}"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything a schedule depends on.

    ``ways`` > 1 is one rank's share: heads, FFN widths, latent rows and the vocabulary divided;
    router, norms, f_a, q_a, kv_a whole. ``config`` is the whole model's configuration.
    ``expert_ways`` of the ranks have different experts, and the others share each expert's width: 1 is
    every expert cut by all ranks, ``ways`` is whole experts, spread.
    ``peers``: the kernel itself exchanges with the other ranks, through mailboxes in their memory; otherwise
    a share runs in segments, and what calls it exchanges between them.
    """

    config: K3Config
    batch: int
    target: Target = H200
    ways: int = 1
    expert_ways: int = 1
    peers: bool = False

    def __post_init__(self) -> None:
        given = (self.config, self.batch, self.target, self.ways, self.expert_ways, self.peers)
        if found := plan_faults(*given):
            raise ValueError("; ".join(found))

    # One letter names as in the rest of the library; all are this rank's.
    @cached_property
    def B(self) -> int:
        return self.batch

    @cached_property
    def sms(self) -> int:
        return self.target.sms

    @cached_property
    def D(self) -> int:
        return self.config.hidden_size

    @cached_property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @cached_property
    def kda_heads(self) -> int:
        return self.config.kda_num_heads // self.ways

    @cached_property
    def K(self) -> int:
        return self.config.kda_head_dim

    @cached_property
    def V(self) -> int:
        return self.config.kda_v_head_dim

    @cached_property
    def kda_rows(self) -> int:
        """Rows of kda_in: f_a | b | q | k | v | g."""
        return self.K + self.kda_heads * (1 + 2 * self.K + 2 * self.V)

    @cached_property
    def kda_first(self) -> int:
        """Leading row groups of kda_in that hold f_a and b."""
        return groups_of(self.K + self.kda_heads)

    @cached_property
    def mla_heads(self) -> int:
        return self.config.num_attention_heads // self.ways

    @cached_property
    def C(self) -> int:
        return self.config.kv_lora_rank

    @cached_property
    def R(self) -> int:
        return self.config.qk_rope_head_dim

    @cached_property
    def Q(self) -> int:
        return self.config.q_lora_rank

    @cached_property
    def mla_values(self) -> int:
        return self.mla_heads * self.config.v_head_dim

    @cached_property
    def mla_rows(self) -> int:
        """Rows of mla_in: q_a | kv_a | g."""
        return self.Q + self.C + self.R + self.mla_values

    @cached_property
    def E(self) -> int:
        return self.config.num_experts

    @cached_property
    def A(self) -> int:
        return self.config.num_experts_per_token

    @property
    def expert_width(self) -> int:
        """Ranks that share each expert's width."""
        return self.ways // self.expert_ways

    @cached_property
    def F(self) -> int:
        return self.config.moe_intermediate_size // self.expert_width

    @cached_property
    def held(self) -> int:
        """Experts that a rank holds, replicas included: physical expert slots."""
        return -(-self.E // self.expert_ways)

    @cached_property
    def L(self) -> int:
        return self.config.routed_expert_hidden_size

    @cached_property
    def latent_rows(self) -> int:
        """Rows of latent_down, columns of latent_up: L, or a rank's share of it."""
        return self.L // self.ways

    @cached_property
    def shared(self) -> int:
        return self.config.shared_intermediate_size // self.ways

    @cached_property
    def dense(self) -> int:
        return self.config.intermediate_size // self.ways

    @cached_property
    def W(self) -> int:
        return self.config.vocab_size // self.ways

    @cached_property
    def slots(self) -> int:
        """Most distinct experts of a layer on a rank: min(A * batch, those it holds)."""
        return min(self.A * self.B, self.held)

    @cached_property
    def exchanged(self) -> int:
        """Columns of ``give`` and ``take``: the widest vector that ranks exchange."""
        return max(self.D, self.L if self.config.num_moe_layers else 0)

    @cached_property
    def column_sms(self) -> int:
        """SMs that own columns of D."""
        return min(self.sms, groups_of(self.D))

    @cached_property
    def latent_sms(self) -> int:
        return min(self.sms, groups_of(self.latent_rows))

    @cached_property
    def head_sms(self) -> int:
        return min(self.sms, groups_of(self.W))

    @cached_property
    def max_sources(self) -> int:
        """Most sources of an AttnRes mixture: every snapshot and the running sum."""
        return -(-self.layers // self.config.attn_res_block_size) + 1

    @cached_property
    def head_groups(self) -> int:
        """Pieces of the attention heads that different SMs take: the fewest of at most MOST_HEADS heads."""
        return next(
            n
            for n in range(1, self.mla_heads + 1)
            if self.mla_heads % n == 0 and self.mla_heads // n <= MOST_HEADS
        )

    @cached_property
    def lanes(self) -> int:
        """Attention lanes of a row: split s of SPLIT tokens belongs to lane s % lanes."""
        return max(1, self.sms // (self.B * self.head_groups))

    @cached_property
    def attend_units(self) -> int:
        return self.B * self.lanes * self.head_groups

    def snapshots(self, sublayer: int) -> int:
        """Snapshots taken before the mixture of a sublayer (2 * layer + 1 for the FFN's)."""
        layer, second = divmod(sublayer, 2)
        block = self.config.attn_res_block_size
        return -(-layer // block) if not second else layer // block + 1


SPLIT = 64
"""Cached tokens of one attention split: a constant, so a row's sums do not depend on other rows."""
MOST_HEADS = 24
"""Heads whose absorbed queries (576 bf16 each) fit the shared memory that the ring leaves."""

__all__ = [
    "H200",
    "MAX_ACTIVE",
    "MAX_BATCH",
    "ROW_GROUP",
    "SPLIT",
    "Plan",
    "Target",
    "groups_of",
    "plan_faults",
]
