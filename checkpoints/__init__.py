"""Checkpoints: the release's safetensors format, conversion to Orbax, loading either onto a mesh.

>>> from k3jax import checkpoints
>>> params, config, report = checkpoints.load_params(checkpoints.resolve("nano"))
"""

from .conversion import ConvertReport, convert
from .errors import CheckpointError
from .inspection import inspect_report
from .load_report import LoadReport
from .loading import load, load_params
from .locate import SHIPPED, resolve, shipped_names
from .manifest import is_orbax_dir
from .plan import preflight
from .release_files import is_release_dir
from .writer import write_release

__all__ = [
    "SHIPPED",
    "CheckpointError",
    "ConvertReport",
    "LoadReport",
    "convert",
    "inspect_report",
    "is_orbax_dir",
    "is_release_dir",
    "load",
    "load_params",
    "preflight",
    "resolve",
    "shipped_names",
    "write_release",
]
