"""A state belongs to the model that made it: another one's is refused by name, before dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.state import init_state
from support import tiny_model


def _with_layer(state: Any, index: int, **arrays: Any) -> Any:
    layers = list(state.layers)
    layers[index] = {**layers[index], **arrays}
    return dataclasses.replace(state, layers=tuple(layers))


def _foreign() -> dict[str, tuple[Any, str]]:
    config = tiny_model.config()
    own = init_state(config, 3, 512, jnp.float32)
    bfloat16 = init_state(config, 3, 512, jnp.bfloat16)
    shallow = dataclasses.replace(own, layers=own.layers[:2])
    turned = _with_layer(own, 0, S=jnp.swapaxes(own.layers[0]["S"], 2, 3))
    other_kind = dataclasses.replace(own, layers=(own.layers[1], own.layers[0], own.layers[2]))
    return {
        "bfloat16": (bfloat16, "layer 0, conv: expected float32"),
        "shallow": (shallow, "3 layers"),
        "keys and values turned": (turned, "layer 0, S: expected"),
        "another kind of layer": (other_kind, "layer 0: expected"),
    }


@pytest.mark.parametrize("which", sorted(_foreign()))
def test_a_state_of_another_model_is_refused(which: str) -> None:
    model = tiny_model.model()
    state, message = _foreign()[which]
    with pytest.raises(ValueError, match=message):
        model.decode_step(np.zeros(3, np.int32), state)
    with pytest.raises(ValueError, match=message):
        model.prefill(np.zeros((3, 2), np.int32), state=state)
    with pytest.raises(ValueError, match=message):
        k3jax.decode_step(model.params, state, np.zeros(3, np.int32), config=model.config)
    assert np.asarray(state.lengths).tolist() == [0, 0, 0], "the state given is still there"


def test_a_state_shows_itself_also_when_it_was_consumed() -> None:
    state = init_state(tiny_model.config(), 2, 64, jnp.float32)
    assert repr(state) == "State(lengths=[0 0], max_length=64, 3 layers)"
    state.lengths.delete()
    assert repr(state) == "State(consumed, max_length=64)"


@pytest.mark.parametrize("n", [0, 2.0, True])
def test_fork_takes_whole_numbers_from_one_on(n: Any) -> None:
    state = init_state(tiny_model.config(), 2, 64, jnp.float32)
    with pytest.raises((ValueError, TypeError)):
        state.fork(n)


def test_saving_to_a_folder_or_into_none_leaves_nothing_behind(tmp_path: Any) -> None:
    state = init_state(tiny_model.config(), 1, 64, jnp.float32)
    with pytest.raises(IsADirectoryError):
        state.save(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        state.save(tmp_path / "missing" / "state")
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob("*.partial"))
