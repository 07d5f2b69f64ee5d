"""Reading a checkpoint in full, to see whether it is what was written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pretrain.checkpoint.newest import damaged_files
from pretrain.checkpoint.store.coverage import coverage_problem
from pretrain.checkpoint.store.torch_dist import open_torch_dist
from pretrain.convert.compare import Counter, nonfinite_tensors
from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.huggingface.sums import changed_files
from pretrain.convert.resources import Resources
from pretrain.errors import CheckpointError


def problems_of(
    checkpoint: OpenedCheckpoint,
    resources: Resources,
    *,
    finite: bool,
    on_start: Callable[[str, int], Callable[[int], None]],
) -> list[str]:
    """Problems of a checkpoint, in words.

    Args:
        finite: also look for NaN and infinities.
        on_start: told of a phase's name and bytes when it begins; returns what is told of its progress.
    """
    problems = []
    if checkpoint.saved is not None:
        total = sum(file.num_bytes for file in checkpoint.saved.files.values())
        problems += damaged_files(checkpoint.path, on_bytes=Counter(on_start("hash", total)))
        problems += _misplaced_parts(checkpoint)
    if checkpoint.sums is not None:
        total = sum(path.stat().st_size for name in checkpoint.sums if (path := checkpoint.path / name).is_file())
        problems += changed_files(checkpoint.path, checkpoint.sums, Counter(on_start("hash", total)))
    if problems:
        # Further problems would follow from these.
        return problems
    if finite or checkpoint.saved is None:
        found = _read_all(checkpoint, resources, on_start)
        problems += found if finite else []
    return problems


def _read_all(
    checkpoint: OpenedCheckpoint, resources: Resources, on_start: Callable[[str, int], Callable[[int], None]]
) -> list[str]:
    """Read every tensor; what is not finite, in words."""
    reader = checkpoint.reader
    names = list(reader.tensors)
    total = sum(reader.tensors[name].num_bytes for name in names)
    tell = Counter(on_start("read", total))
    with ThreadPoolExecutor(resources.num_workers) as pool:
        found = pool.map(lambda name: list(nonfinite_tensors(reader, [name], resources.piece_bytes, tell)), names)
        return [f"{each.name} {each.text}" for of_tensor in found for each in of_tensor]


def _misplaced_parts(checkpoint: OpenedCheckpoint) -> list[str]:
    """Tensors of one of our checkpoints whose parts are not all of them, or not where the index says."""
    stored = open_torch_dist(checkpoint.path)
    problems = []
    for name, info in stored.tensors.items():
        parts = stored.parts(name)
        problem = coverage_problem(info, [part.region for part in parts])
        if problem is not None:
            problems.append(f"{name}: {problem}")
        for part in parts:
            try:
                stored.item(part)
            except CheckpointError as error:
                problems.append(str(error))
    return problems
