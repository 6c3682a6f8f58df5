"""Kimi K3 in JAX: the text model, its checkpoints, and generation.

>>> import k3jax
>>> model = k3jax.load("nano")
>>> print(model.generate("In the beginning", max_new_tokens=40).text[0])
"""

from .api import CapacityError, Model, TokenError, load, random_model
from .config import K3Config
from .generate import GenerateResult, NonFiniteLogitsError, StreamStep
from .model import capture, decode_step, prefill
from .nnx_model import K3
from .quant import MXFP4
from .sampling import Sampling
from .state import ConsumedStateError, KernelFaultError, State, StateError, check

from .custom_calls.support import supports  # isort: skip (it uses the modules above)

__version__ = "0.1.0"

__all__ = [
    "K3",
    "MXFP4",
    "CapacityError",
    "ConsumedStateError",
    "GenerateResult",
    "K3Config",
    "KernelFaultError",
    "Model",
    "NonFiniteLogitsError",
    "Sampling",
    "State",
    "StateError",
    "StreamStep",
    "TokenError",
    "capture",
    "check",
    "decode_step",
    "load",
    "prefill",
    "random_model",
    "supports",
]
