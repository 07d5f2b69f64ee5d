"""Memory that ran out: what it went to, and which key would save how much."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import torch

from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from pretrain.data.blend import check_blend, model_vocab_size
from pretrain.errors import ConfigError, UserError
from pretrain.planning.bytes.memory import stage_bytes
from pretrain.planning.bytes.memory_parts import StageBytes
from pretrain.run.preflight import gigabytes

_LEAST_SHARE = 0.01
"""Share of what a rank needs: a change that saves less is not worth a word."""
_HOST_ALLOCATOR = "can't allocate memory"


class OutOfMemory(ConfigError):
    """The machine's memory is too small for the configuration."""


@contextmanager
def out_of_memory_explained(config: RunConfig, num_ranks: int) -> Iterator[None]:
    """Turn errors of allocators into an `OutOfMemory` that says what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(explanation(config, num_ranks, str(error))) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocator raised it: CUDA's, Python's, or PyTorch's on the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _HOST_ALLOCATOR in str(error)


def explanation(config: RunConfig, num_ranks: int, words: str) -> str:
    """Memory that a rank needs by part, that it has taken, and that single changes would save, in words."""
    with contextlib.suppress(UserError):
        vocab_size = model_vocab_size(config.model, check_blend(config.data.datasets))
        config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    needed = _fullest(config, num_ranks)
    parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in needed.by_part.items() if size)
    fixes = sorted(_savings(config, num_ranks), reverse=True)
    advice = ", ".join(f"{fix} would save about {gigabytes(saved)}" for saved, fix in fixes)
    first_line = words.strip().splitlines()[0] if words.strip() else "no more is said of it"
    return (
        f"a rank ran out of memory ({first_line}). By formula the fullest stage's ranks need {gigabytes(needed.total)}: "
        f"{parts}. "
        f"{_taken()}. Of a rank's part: {advice or 'no key would save much: use more ranks, or a smaller model'}"
    )


def _fullest(config: RunConfig, num_ranks: int) -> StageBytes:
    stages = stage_bytes(config, num_ranks, on_gpu=torch.cuda.is_available())
    return max(stages, key=lambda stage: stage.total)


def _savings(config: RunConfig, num_ranks: int) -> Iterator[tuple[float, str]]:
    """Bytes of a rank that single changes save, of those that can run."""
    train, layout = config.train, config.parallel
    keeps_streams = config.model.residual_streams is not None and train.recompute_streams is None
    changes = (
        ("train.recompute=full", replace(config, train=replace(train, recompute="full", recompute_streams=None))),
        *(
            (f"train.recompute_streams={blocks}", replace(config, train=replace(train, recompute_streams=blocks)))
            for blocks in ([2] if keeps_streams and train.recompute != "full" else [])
        ),
        *(
            (f"train.micro_batch_size={half}", replace(config, train=replace(train, micro_batch_size=half)))
            for half in [train.micro_batch_size // 2]
            if half
        ),
        *(
            (
                f"parallel.{axis}={2 * getattr(layout, axis)}",
                replace(config, parallel=replace(layout, **{axis: 2 * getattr(layout, axis)})),
            )
            for axis in ("tensor", "pipeline", "context", "memory")
        ),
        ("optimizer.value_offload=cpu", replace(config, optimizer=replace(config.optimizer, value_offload="cpu"))),
    )
    needed = _fullest(config, num_ranks).total
    for fix, changed in changes:
        with contextlib.suppress(ConfigError):
            validate(changed, num_ranks)
            saved = needed - _fullest(changed, num_ranks).total
            if saved > _LEAST_SHARE * needed:
                yield saved, fix


def _taken() -> str:
    """Memory that this process has taken, in words."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return f"The rank's process has {gigabytes(psutil.Process().memory_info().rss)} of the machine's memory"
    stats = torch.cuda.memory_stats()
    of_device = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return (
        f"On the GPU, of {gigabytes(of_device)}, tensors have {gigabytes(stats['allocated_bytes.all.current'])} (at most "
        f"{gigabytes(stats['allocated_bytes.all.peak'])}), and PyTorch has taken "
        f"{gigabytes(stats['reserved_bytes.all.current'])}"
    )
