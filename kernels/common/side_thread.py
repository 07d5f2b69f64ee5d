"""A thread for work on tensors beside the one that computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def side_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """A thread that does one thing after the other.

    On a CPU it has no OpenMP threads of its own: where there are more of them than cores, GNU's library no longer waits
    actively, and all that the computing thread shares among its own takes half as long again.

    Args:
        device: device on which the model computes.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        thread.submit(_take_one_core).result()
        # Threads that begin later, as those of backward passes, take the number that was set last.
        torch.set_num_threads(num_threads)
    return thread


def _take_one_core() -> None:
    torch.set_num_threads(1)
    # A thread that has not asked yet takes what another one sets meanwhile.
    torch.get_num_threads()
