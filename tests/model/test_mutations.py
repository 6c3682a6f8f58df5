"""Every mistake in tests/support/mutations.py makes the oracle check that guards it fail.

The checks are those of test_oracle_case_a.py, run here on a mutated library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from k3jax import model
from support import oracle
from support import oracle_checks as checks
from support.compare import relative_rms
from support.mutations import CONTROLS, MUTATIONS, Apply
from support.oracle_checks import Subject, case_a

KDA, MLA, MOE = 0, 3, 1  # a layer of each kind

GUARDS: dict[str, Callable[[Subject], None]] = {
    "KDA prefill": lambda subject: checks.check_kda_prefill(subject, KDA),
    "KDA step": lambda subject: checks.check_kda_step(subject, KDA),
    "MLA prefill": lambda subject: checks.check_mla_prefill(subject, MLA),
    "MLA step": lambda subject: checks.check_mla_step(subject, MLA),
    "latent norms": lambda subject: checks.check_latent_norms(subject, MLA),
    "dense FFN": checks.check_dense,
    "MoE prefill": lambda subject: checks.check_moe(subject, MOE),
    "MoE step": lambda subject: checks.check_moe(subject, MOE, "step0"),
    "routing": lambda subject: checks.check_routing(subject, MOE),
    "routing step": lambda subject: checks.check_routing(subject, MOE, "step0"),
    "mixtures": lambda subject: checks.check_mixtures(subject, KDA + 1),
}

_KDA = ("KDA prefill", "KDA step")
_MLA = ("MLA prefill", "MLA step")
_MOE = ("MoE prefill", "MoE step")
# Each mutation with the checks that must notice it.
GUARDED_BY: dict[str, tuple[str, ...]] = {
    "nibble swap": _MOE,
    "softplus gate": _KDA,
    "clamp gate": _KDA,
    "bias after scale": _KDA,
    "A_log per channel": _KDA,
    "read before update": _KDA,
    "delta before decay": _KDA,
    "error of the undecayed state": _KDA,
    "no q scale": _KDA,
    "no l2norm": _KDA,
    "silu gate": _KDA,
    "reversed conv taps": _KDA,
    "no linear_beta": ("dense FFN", *_MOE),
    "SwiGLU": ("dense FFN", *_MOE),
    "AttnRes without gamma": ("mixtures",),
    "normalised values mixed": ("mixtures",),
    "plain residual sum": ("mixtures",),
    "router bias in weights": ("routing", "routing step", *_MOE),
    "bias ignored": ("routing",),
    "no latent norm": _MOE,
    "no MLA gate": _MLA,
    "MLA scale of the nope part": _MLA,
    "no renormalisation": ("routing", "routing step", *_MOE),
    "latent eps 1e-5": ("latent norms",),
}
CONTROLLED_BY: dict[str, tuple[str, ...]] = {
    "recurrence": _KDA,
    "decay": _KDA,
    "KDA output": _KDA,
    "MLA output": _MLA,
    "SiTU": ("dense FFN", *_MOE),
    "router": ("routing", *_MOE),
    "mixture": ("mixtures",),
}


@functools.cache
def right() -> Subject:
    return case_a()


def mutated(apply: Apply, patch: pytest.MonkeyPatch) -> Subject:
    return Subject.of(*apply(right().params, right().config, patch))


def test_every_mutation_has_a_guard_and_every_rewritten_function_a_control() -> None:
    assert GUARDED_BY.keys() == MUTATIONS.keys()
    assert CONTROLLED_BY.keys() == CONTROLS.keys()


@pytest.mark.parametrize("guard", GUARDS)
def test_the_library_as_it_is_passes(guard: str) -> None:
    GUARDS[guard](right())


@pytest.mark.parametrize(
    ("control", "guard"), [(c, g) for c, guards in CONTROLLED_BY.items() for g in guards]
)
def test_a_rewritten_function_without_the_mistake_passes(
    control: str, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    GUARDS[guard](mutated(CONTROLS[control], monkeypatch))


@pytest.mark.parametrize(("mutation", "guard"), [(m, g) for m, guards in GUARDED_BY.items() for g in guards])
def test_a_mistake_is_noticed(mutation: str, guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = mutated(MUTATIONS[mutation], monkeypatch)
    with pytest.raises(AssertionError, match=r"relative RMS error|weight .* expected|other experts"):
        GUARDS[guard](subject)


# Relative RMS error and argmax agreement on the whole case, as others measured them with an
# implementation of their own: the mistakes here are the mistakes meant there.
DOCUMENTED: dict[str, tuple[float, float]] = {
    "nibble swap": (1.29, 0.02),
    "softplus gate": (1.17, 0.09),
    "clamp gate": (1.17, 0.09),
    "bias after scale": (0.98, 0.13),
    "A_log per channel": (1.07, 0.13),
    "read before update": (1.30, 0.01),
    "delta before decay": (1.27, 0.02),
    "no q scale": (1.04, 0.12),
    "no l2norm": (1.17, 0.05),
    "silu gate": (1.28, 0.01),
    "reversed conv taps": (1.32, 0.01),
    "no linear_beta": (0.34, 0.67),
    "SwiGLU": (0.84, 0.19),
    "AttnRes without gamma": (0.86, 0.18),
    "normalised values mixed": (1.09, 0.08),
    "plain residual sum": (1.31, 0.03),
    "router bias in weights": (0.87, 0.26),
    "bias ignored": (1.11, 0.06),
    "no latent norm": (1.0, 0.12),
    "no MLA gate": (0.69, 0.31),
    "MLA scale of the nope part": (0.40, 0.57),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", DOCUMENTED)
def test_a_mistake_moves_the_logits_as_documented(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, config = MUTATIONS[mutation](right().params, right().config, monkeypatch)
    tokens, want = oracle.reference()["input_ids"], oracle.reference()["full_logits"]
    got = jax.jit(lambda p, t: model.capture(p, t, config=config)["logits"])(params, tokens)
    error, agreement = DOCUMENTED[mutation]
    # Printed to two decimals; a mutated model is chaotic, and the two runs round differently.
    assert relative_rms(got, want) == pytest.approx(error, abs=0.02)
    assert np.mean(np.asarray(got).argmax(-1) == want.argmax(-1)) == pytest.approx(agreement, abs=0.02)
