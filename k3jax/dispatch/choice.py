"""Which dispatch a step uses, by its number of tokens, and the reason in words."""

from __future__ import annotations

import dataclasses
import math

KINDS = ("auto", "gather", "all_to_all", "ragged")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A dispatch and why.

    Attributes:
        kind: "gather", "all_to_all" or "ragged".
        capacity: rows a rank can send each peer in one round.
        reason: one clause.
    """

    kind: str
    capacity: int
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def choose(wanted: str, capacity: int | None, *, rows: int, lanes: int, ranks: int, slots: int) -> Choice:
    """The dispatch for ``rows`` tokens of a data group.

    A rank sends a token at most once to a peer, so m rows at most, and under uniform routing
    ``m (1 - (1 - 1/n)^A)`` of its m rows on average. The capacity of a round is that and one
    standard deviation. When it is above m/2, an exchange moves about what a gather does, in three
    collectives for one.

    Args:
        wanted: "auto", or the dispatch to take.
        capacity: of a round; None is chosen here.
        rows: tokens of one data group; its ``lanes`` tensor ranks share them.
        ranks: n, ranks that hold experts.
        slots: A, experts per token.
    """
    own = max(1, -(-rows // lanes))
    expected = own * (1.0 - (1.0 - 1.0 / ranks) ** slots)
    fit = min(own, math.ceil(expected + math.sqrt(expected))) if capacity is None else min(own, capacity)
    facts = f"a rank has {own} rows, of which a peer expects {expected:.2g}"
    if wanted == "auto":
        if ranks == 1:
            return Choice("gather", fit, "one rank holds all experts")
        if 2 * fit > own:
            return Choice("gather", fit, f"{facts}: an exchange in rounds of {fit} would move no less")
        return Choice("all_to_all", fit, f"{facts}: rounds of {fit} move less than a gather")
    size = own if wanted == "ragged" else fit
    return Choice(wanted, size, f"asked for; {facts}")


__all__ = ["KINDS", "Choice", "choose"]
