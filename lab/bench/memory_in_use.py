"""Memory that this process has in use, and the most that it had, on its device."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil
import torch


def begin_peak(device: torch.device) -> int:
    """Bytes in use, from which on the peak counts."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # Memory that earlier cases have freed goes back to the system: taken again, it would not show.
    ctypes.CDLL(None).malloc_trim(0)
    # Linux takes the peak of resident memory back to what is resident.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _resident_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Most bytes in use since `begin_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident_bytes("VmHWM")


def mapped_bytes(device: torch.device) -> int:
    """Bytes of files that are resident for this process, shared memory included; none of a GPU's."""
    return 0 if device.type == "cuda" else _resident_bytes("RssFile") + _resident_bytes("RssShmem")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be asked for."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.virtual_memory().available


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
