"""Names: which tensors of the release fill which leaf of the parameter tree.

A leaf's path joined by dots is the released name without its prefix and ``.weight``; the
exceptions stand here. The experts of a layer are E tensors in the release and one leaf here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from k3jax.quant import MXFP4

if TYPE_CHECKING:
    from k3jax.config import K3Config

Path_ = tuple[str | int, ...]
"""Keys from the root of the parameter tree to a leaf."""

PREFIX = "language_model."
_VISION = ("vision_tower.", "mm_projector.")
# Parameters that are not the weight of a module.
_BARE = ("A_log", "dt_bias", "e_score_correction_bias")
# Copies made by early tools name the AttnRes parameters as members of one module.
_LEGACY = re.compile(r"\b(self_attention_res|mlp_res|output_attn_res)\.(proj|norm)_weight$")
_CONV = re.compile(r"_conv1d$")


@dataclasses.dataclass(frozen=True)
class Slot:
    """A leaf of the parameter tree and its released name.

    Attributes:
        path: keys of the leaf.
        name: released name without prefix; for experts with ``{}`` for the expert and without the
            suffix that tells packed from float.
        shape: logical shape of the leaf (experts: [E, out, in]).
        dtype: numpy name of the released dtype, of the codes for packed experts.
        expert: whether E tensors make up the leaf.
    """

    path: Path_
    name: str
    shape: tuple[int, ...]
    dtype: str
    expert: bool

    @property
    def is_conv(self) -> bool:
        return bool(_CONV.search(str(self.path[-1])))

    @property
    def is_a_log(self) -> bool:
        return self.path[-1] == "A_log"


def is_leaf(node: Any) -> bool:
    return not isinstance(node, (dict, list))


def leaves(tree: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """(path, leaf) of a parameter tree, layer by layer; an MXFP4 is one leaf."""
    if is_leaf(tree):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield from leaves(value, (*path, key))


def map_leaves(fn: Callable[[Path_, Any], Any], tree: Any, path: Path_ = ()) -> Any:
    """The same tree with ``fn(path, leaf)`` for each leaf."""
    if is_leaf(tree):
        return fn(path, tree)
    if isinstance(tree, dict):
        return {key: map_leaves(fn, value, (*path, key)) for key, value in tree.items()}
    return [map_leaves(fn, value, (*path, key)) for key, value in enumerate(tree)]


def dotted(path: Path_) -> str:
    return ".".join(map(str, path))


def release_name(path: Path_) -> str:
    """Released name of the leaf at ``path``, without prefix."""
    parts = [str(key) for key in path]
    if parts[-1] == "e_score_correction_bias":
        parts.insert(-1, "gate")
    if "experts" in parts:
        parts.insert(parts.index("experts") + 1, "{}")
        return ".".join(["model", *parts])
    if parts[-1] not in _BARE:
        parts.append("weight")
    return ".".join(parts if parts[0] == "lm_head" else ["model", *parts])


def slots(config: K3Config) -> tuple[Slot, ...]:
    """Every leaf that a checkpoint of ``config`` fills."""
    from k3jax.model import abstract_params

    found = []
    for path, leaf in leaves(abstract_params(config)):
        name = release_name(path)
        array = leaf.codes if isinstance(leaf, MXFP4) else leaf
        found.append(Slot(path, name, tuple(leaf.shape), str(array.dtype), "{}" in name))
    return tuple(found)


def canonical(name: str) -> str:
    """``name`` as the release spells it, without the prefix."""
    return _LEGACY.sub(r"\1_\2.weight", name.removeprefix(PREFIX))


def is_vision(name: str) -> bool:
    return name.startswith(_VISION)


_NUMBER = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+|(?<=blocks\.)\d+")


def pattern(name: str) -> str:
    """``name`` with layer and expert numbers replaced by ``*``."""
    return _NUMBER.sub("*", name)
