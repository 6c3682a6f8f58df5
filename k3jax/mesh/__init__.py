"""K3 over many devices: plans, where experts lie, and how parameters and states are cut.

>>> from k3jax import mesh
>>> plan = mesh.nvl72()
>>> print(mesh.table(plan, K3Config.preset("k3"), batch=72, context=8192))
"""

from .layout import arrange, planned_params
from .placement import Placement, place
from .plan import MeshPlan, for_devices, nvl72, tensor_sizes
from .states import from_plan, planned_shapes, planned_state, to_plan
from .table import DeviceBytes, device_bytes, table

__all__ = [
    "DeviceBytes",
    "MeshPlan",
    "Placement",
    "arrange",
    "device_bytes",
    "for_devices",
    "from_plan",
    "nvl72",
    "place",
    "planned_params",
    "planned_shapes",
    "planned_state",
    "table",
    "tensor_sizes",
    "to_plan",
]
