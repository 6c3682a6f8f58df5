"""The GPUs that a plan is reported for: what the compiler must know of them, and their rates."""

from __future__ import annotations

import dataclasses

from ..mesh.table import HBM_BYTES

USABLE = 0.95
"""Share of a GPU's memory that arrays and work space may take; the rest is the driver's and NCCL's."""

MEASURED_SHARE = 4.61 / 4.8
"""Read ceiling over sold bandwidth, measured on an H200 (custom_calls/FACTS.md)."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU and the machines it comes in.

    Attributes:
        name: as ``k3jax plan --gpu`` takes it.
        memory: bytes.
        ceiling: bytes per second that a kernel can read.
        ceiling_source: where ``ceiling`` is from.
        link: bytes per second and direction to the other GPUs of the same NVLink domain.
        domain: GPUs in an NVLink domain.
        network: bytes per second and direction of a GPU's network adapter, to other domains.
        per_host: GPUs of a host.
        capability: CUDA compute capability, major and minor.
        cores: streaming multiprocessors.
        bandwidth: bytes per second of the memory, as sold.
        l2: bytes of the L2 cache.
        clock: GHz.
    """

    name: str
    memory: int
    ceiling: float
    ceiling_source: str
    link: float
    domain: int
    network: float
    per_host: int
    capability: tuple[int, int]
    cores: int
    bandwidth: float
    l2: int
    clock: float

    @property
    def usable(self) -> int:
        """Bytes that arrays and work space may take."""
        return int(USABLE * self.memory)

    def target(self) -> str:
        """XLA's description of the GPU (a ``GpuTargetConfigProto`` in text), for compilation without one."""
        major, minor = self.capability
        title = f"NVIDIA {self.name.upper()}"
        limits = {
            "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
            "shared_memory_per_core": 233472, "threads_per_core_limit": 2048, "core_count": self.cores,
            "fpus_per_core": 128, "block_dim_limit_x": 2147483647, "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535, "memory_bandwidth": int(self.bandwidth), "l2_cache_size": self.l2,
            "clock_rate_ghz": self.clock, "device_memory_size": self.memory,
            "shared_memory_per_block_optin": 232448, "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536, "thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64, "device_address_bits": 64,
        }  # fmt: skip
        text = {
            "device_vendor": "NVIDIA Corporation", "platform_version": f"Compute Capability {major}.{minor}a",
            "name": title, "driver_version": "13.0.0", "runtime_version": "12.8.0",
            "compile_time_toolkit_version": "12.8.0", "dnn_version": "9.15.0",
        }  # fmt: skip
        fields = [f"{key}: {value}" for key, value in limits.items()]
        fields += [f'{key}: "{value}"' for key, value in text.items()]
        fields.append(
            f"cuda_compute_capability {{ major: {major} minor: {minor} "
            "feature_extension: ACCELERATED_FEATURES }"
        )
        fields.append("device_interconnect_info { active_links: 18 }")
        return (
            f"gpu_device_info {{ {' '.join(fields)} }}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 15 patch: 0 }\n"
            f'device_description_str: "{title}"\n'
        )

    def topology(self, devices: int) -> str:
        """``devices`` of these GPUs as XLA's slices x hosts x GPUs of a host."""
        per_host = next(n for n in range(min(self.per_host, devices), 0, -1) if devices % n == 0)
        return f"1x{devices // per_host}x{per_host}"


GPUS = {
    "gb300": Gpu(
        name="gb300", memory=HBM_BYTES["GB300"], ceiling=8.0e12 * MEASURED_SHARE,
        ceiling_source="assumed: the 8.0 TB/s it is sold with times the share an H200 was measured to reach",
        link=900e9, domain=72, network=100e9, per_host=4, capability=(10, 3), cores=152, bandwidth=7.928e12,
        l2=135_528_448, clock=2.07,
    ),
    "h200": Gpu(
        name="h200", memory=HBM_BYTES["H200"], ceiling=4.61e12,
        ceiling_source="measured (custom_calls/FACTS.md)",
        link=450e9, domain=8, network=50e9, per_host=8, capability=(9, 0), cores=132, bandwidth=4.8e12,
        l2=52_428_800, clock=1.98,
    ),
}  # fmt: skip
"""The GPUs by name. NVLink and network rates are the vendor's, per direction."""


def gpu_named(name: str) -> Gpu:
    """The GPU of this name.

    Raises:
        ValueError: none; lists those that are.
    """
    if name not in GPUS:
        raise ValueError(f"gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name]


__all__ = ["GPUS", "USABLE", "Gpu", "gpu_named"]
