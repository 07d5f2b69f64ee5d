"""The figures of a machine that estimates of time and fit need. `configs/hardware` has some, with their sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Le
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from megamem.config.base import Config
from pretrain.config.loader import load_as
from pretrain.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "configs" / "hardware"
Fraction = Annotated[PositiveFloat, Le(1)]


@dataclass(frozen=True)
class Hardware(Config):
    """GPUs of one kind in equal nodes. Bandwidths are of one GPU, in one direction; GB are 10^9 bytes."""

    memory_gb: PositiveFloat = 80.0
    """Device memory."""
    reserve_gb: NonNegativeFloat = 4.0
    """Device memory that no tensor gets: context, communication buffers, fragments."""
    peak_bf16_tflops: PositiveFloat = 989.0
    """Dense bf16 products of matrices, 10^12 per second."""
    matmul_fraction: Fraction = 0.72
    """Share of the peak that products of a training step reach."""
    attention_fraction: Fraction = 0.34
    """Share of it that causal attention reaches, whose backward counts twice its forward."""
    memory_bandwidth_gb_per_s: PositiveFloat = 3350.0
    """Bandwidth of device memory, reads and writes together."""
    stream_fraction: Fraction = 0.87
    """Share of it that streaming kernels reach."""
    gather_fraction: Fraction = 0.8
    """Share of it that gathers of table rows reach."""
    row_sm_share: Fraction = 0.5
    """Share of the multiprocessors with which kernels of table rows reach their bandwidth."""
    nvlink_gb_per_s: PositiveFloat = 450.0
    """Bandwidth to GPUs of the same node."""
    nvlink_fraction: Fraction = 0.75
    """Share of it that collectives reach."""
    network_gb_per_s: PositiveFloat = 50.0
    """Bandwidth to GPUs of other nodes."""
    network_fraction: Fraction = 0.8
    """Share of it that collectives reach."""
    host_link_gb_per_s: PositiveFloat = 50.0
    """Bandwidth between device and host memory, one direction (optimizer.value_offload)."""
    host_memory_gb_per_s: PositiveFloat = 40.0
    """Bandwidth of host memory, one GPU's share of its node's."""
    host_memory_gb: PositiveFloat = 2000.0
    """Host memory of a node; what is saved and tables that are stepped on the host may take nine tenths of it."""
    storage_gb_per_s: PositiveFloat = 2.0
    """Bandwidth between a node and the file system that checkpoints are on."""
    start_s: NonNegativeFloat = 120.0
    """Seconds until a job's first collective: imports, rendezvous, process groups, kernels from their cache."""
    gpus_per_node: PositiveInt = 8
    """GPUs that NVLink connects."""
    launch_us: NonNegativeFloat = 45.0
    """Host time per kernel of a step, with autograd and Megatron around it."""
    kernel_us: NonNegativeFloat = 2.0
    """Device time that a kernel takes beside its work: to begin, and to end."""
    issue_g_per_s: PositiveFloat = 927.0
    """Instructions of warps that all multiprocessors issue together, 10^9 per second."""
    row_skew: NonNegativeFloat = 0.0
    """Exponent of Zipf's law by which reads are spread over the rows of a table; 0: evenly, where most rows move. Of the
    data, not the machine: a plan's `--skew` sets it."""

    @property
    def usable_bytes(self) -> float:
        return (self.memory_gb - self.reserve_gb) * 1e9

    @property
    def host_bytes(self) -> float:
        """Host memory that one GPU's rank may take."""
        return 0.9 * self.host_memory_gb * 1e9 / self.gpus_per_node

    @property
    def flops_per_s(self) -> float:
        return self.peak_bf16_tflops * 1e12 * self.matmul_fraction

    @property
    def attention_flops_per_s(self) -> float:
        return self.peak_bf16_tflops * 1e12 * self.attention_fraction

    @property
    def stream_bytes_per_s(self) -> float:
        return self.memory_bandwidth_gb_per_s * 1e9 * self.stream_fraction

    @property
    def gather_bytes_per_s(self) -> float:
        return self.memory_bandwidth_gb_per_s * 1e9 * self.gather_fraction

    @property
    def nvlink_bytes_per_s(self) -> float:
        return self.nvlink_gb_per_s * 1e9 * self.nvlink_fraction

    @property
    def network_bytes_per_s(self) -> float:
        return self.network_gb_per_s * 1e9 * self.network_fraction


def hardware_file(name: str) -> Path:
    """A file of `configs/hardware` by its name, or a path as it is.

    Raises:
        ConfigError: no file has that name.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    path = FOLDER / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
        raise ConfigError(f"{name} is not a known kind of hardware: choose one of {known}, or give a YAML file")
    return path


def load_hardware(name: str) -> Hardware:
    """The figures of a file, see `hardware_file`.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    return load_as(Hardware, hardware_file(name))
