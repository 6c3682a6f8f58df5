"""Which function runs a piece of which operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..instructions import Op
from . import attention, ends, ffn
from .machine import Piece

_RUN: Mapping[Op, Callable[[Piece], None]] = {
    op: getattr(module, op.name.lower())
    for module, ops in (
        (ends, (Op.EMBED, Op.MIX, Op.LM_HEAD, Op.FINISH, Op.RESIDUAL)),
        (attention, tuple(op for op in Op if op.name.startswith(("KDA", "MLA")))),
        (ffn, tuple(op for op in Op if Op.ROUTER <= op <= Op.DENSE_DOWN and op != Op.EXCHANGE)),
    )
    for op in ops
}


def run_piece(piece: Piece) -> None:
    """Execute one SM's part of an instruction; a piece without groups does nothing, and is signalled too."""
    if piece.g0 < piece.g1:
        _RUN[piece.ins.op](piece)


__all__ = ["run_piece"]
