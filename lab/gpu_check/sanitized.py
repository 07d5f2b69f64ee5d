"""`python -m lab.gpu_check.sanitized N`: a short training on N GPUs under PyTorch's CUDA sanitizer.

The sanitizer ends a rank whose kernels use a tensor on two streams without an order between them, and says where. It is
what `TORCH_CUDA_SANITIZER=1` asks for, but begins in each rank: the variable would start CUDA in the process that forks
the ranks, and before their environment is settled.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lab.gpu_check.plan import quickstart, with_keys
from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from tools.common.words import plural

NUM_STEPS = 3


def sanitized_config(num_ranks: int) -> RunConfig:
    """A few steps of the quickstart's model in bf16; on several ranks its tables are split over them."""
    config = with_keys(quickstart(), f"train.num_steps={NUM_STEPS}", "optimizer.warmup_steps=0", "train.precision=bf16")
    return with_keys(config, f"parallel.memory={num_ranks}") if num_ranks > 1 else config


def pass_over_sparse_tensors() -> None:
    """Keep the sanitizer from asking sparse tensors for the storage that they lack: gradients of tables are such, and empty."""
    from torch.cuda._sanitizer import ArgumentHandler

    handle = ArgumentHandler._handle_argument

    def handle_dense(self: ArgumentHandler, value: Any, *args: Any, **kwargs: Any) -> None:
        if not (isinstance(value, torch.Tensor) and value.is_sparse):
            handle(self, value, *args, **kwargs)

    ArgumentHandler._handle_argument = handle_dense  # type: ignore[method-assign]


def run_sanitized(config: RunConfig) -> bool:
    """Train on one rank; whether there was a GPU, whose streams the sanitizer has seen. Collective."""
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    from lab.gpu_check.trial import train
    from pretrain.engine.session import session

    with session(config) as groups:
        on_gpu = groups.device.type == "cuda"
        if on_gpu:
            pass_over_sparse_tensors()
            enable_cuda_sanitizer()
        train(config, groups)
    return on_gpu


def main(num_ranks: int) -> int:
    """Train on ranks of this machine; 0 if the sanitizer has found nothing."""
    from parallel.machine.devices import keep_cuda_out_of_this_process
    from parallel.processes.launch import launch_ranks
    from tools.common.quiet import quiet_engine

    quiet_engine()
    # Ranks are forked from this process.
    keep_cuda_out_of_this_process()
    config = sanitized_config(num_ranks)
    on_gpu = all(launch_ranks(lambda: run_sanitized(config), num_ranks))
    where = "on a stream of their own" if memory_runs_beside(config) else "on the common stream"
    found = "no two uses of a tensor without an order" if on_gpu else "no GPU, and so no streams to look at"
    print(f"{NUM_STEPS} steps on {plural(num_ranks, 'rank')}, memories {where}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
