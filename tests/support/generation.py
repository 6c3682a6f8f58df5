"""A small K3 with a byte vocabulary for tests of generation, and models whose logits are scripted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from support.random_k3 import params_from_tensors, random_config, random_tensors

VOCABULARY, LIMIT = 300, 512
EOS, PAD = 257, 299


@functools.cache
def config() -> Any:
    """KDA with the dense FFN, then MLA with a LatentMoE; 512 positions; eos 257, pad 299."""
    return random_config(
        3, layer_types=("kda", "mla"), first_k_dense_replace=1, vocab_size=VOCABULARY, hidden_size=32,
        kda_num_heads=2, kda_head_dim=8, kda_v_head_dim=12, num_attention_heads=2, num_experts=6,
        num_experts_per_token=2, moe_intermediate_size=32, routed_expert_hidden_size=32,
        max_position_embeddings=LIMIT, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip


@functools.cache
def model() -> Any:
    """float32; shared, its parameters must not be donated."""
    import k3jax

    return k3jax.Model(params_from_tensors(config(), random_tensors(config(), 5), "float32"), config())


SCRIPT_STEPS = 16


class _Scripted:
    """A stand-in for ``Model`` whose logits come from a table; no layer runs.

    The table travels in ``params``, so that all scripted tests of a batch size share one program.

    Args:
        monkeypatch: pytest's; ``k3jax.model.decode_step`` is replaced for the test.
        script: float32 [B, up to SCRIPT_STEPS, W], logits of new token number ``step`` of each row.
    """

    def __init__(self, monkeypatch: Any, script: np.ndarray):
        import k3jax.model

        real = model()
        # Another hash than the real model's: what is compiled for one does not serve the other.
        self.config = dataclasses.replace(real.config, initializer_range=0.5)
        self.tokenizer, self.implementation, self.mesh = real.tokenizer, "xla", None
        self.scan_layers = real.scan_layers
        padding = [(0, 0), (0, SCRIPT_STEPS - script.shape[1]), (0, 0)]
        self.script = np.pad(script.astype(np.float32), padding, mode="edge")
        self.params: dict[str, Any] = {}
        monkeypatch.setattr(k3jax.model, "decode_step", _scripted_step)

    def prefill(self, tokens: Any, lengths: Any, max_length: int, logits: str) -> Any:
        import jax.numpy as jnp

        import k3jax.state

        self.params = {"script": jnp.asarray(self.script), "prompts": jnp.asarray(lengths, jnp.int32)}
        state = k3jax.state.init_state(self.config, len(tokens), max_length, jnp.float32)
        state = dataclasses.replace(state, lengths=jnp.asarray(lengths, jnp.int32))
        return jnp.asarray(self.script[:, 0]), state


def scripted(monkeypatch: Any, script: np.ndarray) -> Any:
    """A stand-in for ``Model`` that emits by ``script``, see :class:`_Scripted`."""
    return _Scripted(monkeypatch, script)


def _scripted_step(params: Any, state: Any, tokens: Any, active: Any, **_: Any) -> Any:
    """As ``k3jax.model.decode_step`` treats lengths and rows that are not active."""
    import jax.numpy as jnp

    lengths = state.lengths + active.astype(jnp.int32)
    step = lengths - params["prompts"]
    logits = params["script"][jnp.arange(len(step)), jnp.minimum(step, SCRIPT_STEPS - 1)]
    return jnp.where(active[:, None], logits, 0.0), dataclasses.replace(state, lengths=lengths)


def script_of(rows: list[list[int]], strength: float = 30.0) -> np.ndarray:
    """Logits that make greedy decoding emit the given tokens, the last one again and again."""
    steps = max(len(row) for row in rows)
    out = np.zeros((len(rows), steps, VOCABULARY), np.float32)
    for row, tokens in enumerate(rows):
        for step in range(steps):
            out[row, step, tokens[min(step, len(tokens) - 1)]] = strength
    return out
