"""Elementwise pieces of the float64 reference."""

from __future__ import annotations

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Logistic function without overflow at either end."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis; a plain weight, not 1 + weight."""
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def situ_glu(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float) -> np.ndarray:
    """[beta tanh(g/beta) sigmoid(g)] * [linear_beta tanh(u/linear_beta)]."""
    return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)
