"""The one custom call of a lowered program: its attributes, and which of the program its arrays are."""

from __future__ import annotations

import dataclasses
import re
from typing import Any


class CallSiteError(ValueError):
    """A program that is more, or less, than one custom call on its own arguments."""


@dataclasses.dataclass(frozen=True)
class CallSite:
    """A custom call.

    Attributes:
        target: its name.
        attributes: bytes by name.
        operands: for each operand, which argument of the program it is.
        results: for each result, which result of the program it is.
        aliases: (operand, result) pairs that share a buffer.
    """

    target: str
    attributes: dict[str, bytes]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class _Traced:
    operation: Any
    operands: tuple[int, ...]  # arguments of the function
    returned: tuple[int, ...]  # for each returned value, the result of the custom call


_ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")


def call_site(lowered: Any) -> CallSite:
    """The custom call of a ``jax.stages.Lowered`` that does nothing else.

    Raises:
        CallSiteError: it does.
    """
    functions = {
        operation.attributes["sym_name"].value: operation
        for operation in lowered.compiler_ir("stablehlo").body.operations
        if operation.operation.name == "func.func"
    }
    traced = _trace(functions["main"], functions)
    operation = traced.operation
    config = operation.attributes["mhlo.backend_config"]
    results = sorted(range(len(traced.returned)), key=lambda i: traced.returned[i])
    if sorted(traced.returned) != list(range(len(operation.results))):
        raise CallSiteError(f"expected every result of the custom call once, got {list(traced.returned)}")
    pairs = [_ALIAS.search(str(alias)) for alias in operation.attributes["output_operand_aliases"]]
    return CallSite(
        operation.attributes["call_target_name"].value,
        {config[i].name: config[i].attr.value_bytes for i in range(len(config))},
        traced.operands,
        tuple(results),
        tuple((int(pair[2]), int(pair[1] or 0)) for pair in pairs if pair is not None),
    )


def _trace(function: Any, functions: dict[str, Any]) -> _Traced:
    """A function that is one custom call, or one call of such a function."""
    *body, end = function.regions[0].blocks[0].operations
    if len(body) != 1:
        names = [operation.operation.name for operation in body]
        raise CallSiteError(f"expected one custom call and nothing else, got {', '.join(names) or 'nothing'}")
    (operation,) = body
    arguments = tuple(_argument(value) for value in operation.operands)
    returned = tuple(_result_of(operation, value) for value in end.operands)
    if operation.operation.name == "func.call":
        inner = _trace(functions[operation.attributes["callee"].value], functions)
        return _Traced(
            inner.operation,
            tuple(arguments[i] for i in inner.operands),
            tuple(inner.returned[i] for i in returned),
        )
    if operation.operation.name != "stablehlo.custom_call":
        raise CallSiteError(f"expected a custom call, got {operation.operation.name}")
    return _Traced(operation, arguments, returned)


def _argument(value: Any) -> int:
    number = getattr(value, "arg_number", None)
    if number is None:
        raise CallSiteError("expected the program's arguments as operands, got a computed value")
    return number


def _result_of(operation: Any, value: Any) -> int:
    for i, result in enumerate(operation.results):
        if result == value:
            return i
    raise CallSiteError("expected the custom call's results to be returned, got another value")


__all__ = ["CallSite", "CallSiteError", "call_site"]
