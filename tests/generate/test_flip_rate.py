"""The script that measures how often the batch size changes a greedy token."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from support.generation import VOCABULARY, model


@pytest.fixture(scope="module")
def flip_rate():
    path = Path(__file__).parents[1] / "bench" / "flip_rate.py"
    spec = importlib.util.spec_from_file_location("flip_rate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class NoisyModel:
    """Logits are a function of the last token alone, but in batches of 3 one token loses its lead of 0.5."""

    tokenizer = model().tokenizer

    def prefill(self, prompts, max_length, logits):
        return self.decode_step(np.array([p[-1] for p in prompts]), None)

    def decode_step(self, tokens, state):
        out = np.zeros((len(tokens), VOCABULARY), np.float32)
        out[np.arange(len(tokens)), (tokens + 1) % 10] = 2.0
        out[tokens == 4, 9] = 1.5 + (len(tokens) == 3)
        return out, state


def test_flips_are_counted_once_for_each_position_without_spreading(flip_rate):
    prompts = [[1, 2], [3, 4], [5, 6], [7, 8], [8, 9]]
    two, three = flip_rate.compare(NoisyModel(), prompts, 5, batches=(2, 3))
    assert (two.positions, two.flips, two.change, two.lead) == (25, 0, 0.0, 0.0)
    # From 2: 3 4 5 6 7; from 4: 5 6 7 8 9; ... the step after token 4 flips wherever it occurs.
    fed = [[(p[-1] + i) % 10 for i in range(5)] for p in prompts]
    assert (three.positions, three.flips) == (25, sum(row.count(4) for row in fed))
    assert (three.change, three.lead) == (1.0, 0.5)


def test_in_float32_no_token_of_the_small_model_flips(flip_rate):
    text = Path(flip_rate.__file__).read_text(encoding="utf-8")
    prompts = flip_rate.prompts_from(text, model().tokenizer, 4)
    assert [len(p) for p in prompts] == [24] * 4
    (three,) = flip_rate.compare(model(), prompts, 6, batches=(3,))
    assert (three.positions, three.flips) == (24, 0)
    # The accuracy of float32 logits that the library states; they are of order one.
    assert three.change < 1e-4
