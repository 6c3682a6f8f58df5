"""Collectives read from a compiled module: counts, bytes, groups, and what runs beside them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest

from k3jax import mesh
from k3jax.plan_report.compile_step import lower_step
from k3jax.plan_report.schedule import Collective, array_bytes, collectives, first_group, layer_events
from support import mesh_cases

# Four devices as 2 x 2: a sum that starts before a weight is read and ends after, a gather that is
# waited for, a scatter, and an exchange in a loop.
MODULE = r"""
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x.1 = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %swap = f32[4,8]{1,0} all-to-all(%x.1), replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %swap)
}

%cond (q: (s32[], f32[4,8])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %go = pred[] constant(false)
}

ENTRY %main (w: bf16[8,8], x: f32[4,8]) -> f32[4,8] {
  %w = bf16[8,8]{1,0} parameter(0), metadata={op_name="params[\'layers\'][3][\'mlp\'][\'up_proj\']"}
  %x = f32[4,8]{1,0} parameter(1), metadata={op_name="tokens"}
  %first = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%add, metadata={op_name="jit(step)/layer3_mla/mul"}
  %sum-start = ((f32[4,8]{1,0}), f32[4,8]{1,0}) all-reduce-start(%first), replica_groups=mesh['data'=2,'tensor'=2] {'tensor'}, to_apply=%add, metadata={op_name="jit(step)/layer3_mla/psum"}
  %view = bf16[64]{0} bitcast(%w)
  %product = f32[4,8]{1,0} fusion(%view, %x), kind=kCustom, calls=%add, metadata={op_name="jit(step)/layer3_mla/dot"}
  %sum-done = f32[4,8]{1,0} all-reduce-done(%sum-start)
  %late = f32[4,8]{1,0} fusion(%sum-done, %product), kind=kLoop, calls=%add
  %all = (bf16[8,8]{1,0}, s32[8]{0}) all-gather(%late, %x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, metadata={op_name="jit(step)/layer3_mla/gather"}
  %part = f32[4,8]{1,0} reduce-scatter(%late), replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/head"}
  %zero = s32[] constant(0)
  %into = (s32[], f32[4,8]{1,0}) tuple(%zero, %part)
  %loop = (s32[], f32[4,8]{1,0}) while(%into), condition=%cond, body=%body
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_module_is_read_as_it_stands() -> None:
    assert collectives(MODULE) == [
        Collective("all-reduce", (0, 1), 128, 3, True, 1, ("mlp.up_proj",), False),
        Collective("all-gather", (0, 2), 8 * 8 * 2 + 8 * 4, 3, False, 0, (), False),
        Collective("reduce-scatter", (0, 2), 2 * 128, None, False, 0, (), False),
        Collective("all-to-all", (0, 1, 2, 3), 128, None, False, 0, (), True),
    ]


def test_a_sum_that_xla_runs_in_a_kernel_is_found() -> None:
    kernel = """
%one_shot (v: f32[4,8]) -> f32[4,8] {
  %v = f32[4,8]{1,0} parameter(0)
  ROOT %r = f32[4,8]{1,0} all-reduce(%v), replica_groups=[2,2]<=[4], to_apply=%add
}

ENTRY"""
    module = MODULE.replace("ENTRY", kernel.lstrip(), 1)
    start = module.index("%sum-start =")
    line = module[start : module.index("\n", start)]
    fused = line.replace("all-reduce-start", "fusion-start").replace("to_apply=%add", "calls=%one_shot")
    module = module.replace(line, fused).replace("all-reduce-done", "fusion-done")
    first, *others = collectives(module)
    plain = collectives(MODULE)
    assert first == dataclasses.replace(plain[0], fused=True)
    assert others == plain[1:]
    assert layer_events(module, 3) == layer_events(MODULE, 3)


def test_bytes_sent_are_those_of_a_ring() -> None:
    sent = [c.wire for c in collectives(MODULE)]
    assert sent == [2 * 128 / 2, (128 + 32) / 2, 256 / 2, 128 * 3 / 4]


def test_a_layers_events_are_its_kernels_and_exchanges_in_order() -> None:
    found = [(e.start, e.end, e.what, e.detail) for e in layer_events(MODULE, 3)]
    assert found == [
        (0, 0, "kernel", ""),
        (1, 3, "all-reduce", ""),
        (2, 2, "kernel", "mlp.up_proj"),
        (4, 4, "kernel", ""),
        (5, 5, "all-gather", ""),
    ]
    with pytest.raises(ValueError, match="layer: expected one whose collectives the module names, got 4"):
        layer_events(MODULE, 4)


def test_a_collective_that_the_entry_does_not_reach_is_no_silent_loss() -> None:
    with pytest.raises(ValueError, match="4 collectives, of which 3 are reached"):
        collectives(MODULE.replace("body=%body", "body=%elsewhere"))
    with pytest.raises(ValueError, match="found no ENTRY"):
        collectives("HloModule nothing")


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups=mesh['a'=3,'b'=4,'c'=1] {'b','c'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=3,'b'=4,'c'=1] {'a'}", (0, 4, 8)),
        ("replica_groups=[4,3]<=[3,4]T(1,0), x", (0, 4, 8)),
        ("replica_groups=[1,12]<=[12], x", tuple(range(12))),
        ("replica_groups={{0,4,8},{1,5,9}}", (0, 4, 8)),
    ],
)
def test_groups_are_read_in_every_form(text: str, group: tuple[int, ...]) -> None:
    assert first_group(text) == group


def test_an_unknown_form_of_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match="replica groups: expected a form"):
        first_group("replica_groups=new")


def test_bytes_of_shapes() -> None:
    assert (
        array_bytes("(f32[2,3]{1,0}, /*index=1*/pred[5], bf16[4]{0:T(8,128)}, s4[6], f32[])")
        == 24 + 5 + 8 + 3 + 4
    )
    assert array_bytes("f8e4m3fn[7]") == 7


@functools.cache
def compiled_text(devices: tuple[Any, ...]) -> str:
    """The small model's step as XLA compiles it for eight CPU devices."""
    c = mesh_cases.config()
    plan = mesh.for_devices(8, c, tensor=2, dispatch="gather", devices=devices)
    text = lower_step(c, plan, 4, 256).compile().as_text()
    assert text is not None
    return text


def test_the_step_that_xla_compiles_is_read_whole(cpu_devices: list[Any]) -> None:
    """The numbers that test_planned_steps counts on the text by other means."""
    c = mesh_cases.config()
    found = collectives(compiled_text(tuple(cpu_devices[:8])))
    kinds = Counter(x.kind for x in found)
    assert kinds["all-reduce"] == 1 + 2 * 4 + 3
    assert kinds["reduce-scatter"] == 3
    assert all(x.group == (0, 1) for x in found if x.kind == "all-reduce")
    scatters = [x for x in found if x.kind == "reduce-scatter"]
    assert all(x.group == (0, 2, 4, 6) for x in scatters)
    assert {x.payload for x in scatters} == {4 * c.routed_expert_hidden_size * jnp.dtype("float32").itemsize}
    assert [x.layer for x in scatters] == [1, 2, 3]
