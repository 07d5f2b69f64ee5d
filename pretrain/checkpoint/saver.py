"""Saving a run in three phases: stage, write, finalise.

1. Stage: ranks divide the writing among them, and each gets hold of the data of its part.
2. Write: threads of every rank write and hash its files.
3. Finalise: rank 0 collects the list of written files, writes the index and `state.json`, gives the folder its name,
   and removes the checkpoints that the retention rules no longer keep.

A synchronous save is these three back to back, and writes the live tensors. An asynchronous one stages copies in host
memory and returns; the ranks go on training. The number of ranks that have written is part of an all-reduce that every
step has anyway (`SaveProgress`), so all ranks take the next phase after the same step and none waits for another; rank 0
finalises in a thread. At most one save is in flight.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.machine.refusals import describe_error
from pretrain.checkpoint import folder as folders
from pretrain.checkpoint.hashes import RecordedFile
from pretrain.checkpoint.index import INDEX_FILE
from pretrain.checkpoint.index_writer import pickled_index
from pretrain.checkpoint.item_files import FileWriters, HashedFile, SaveAbandonedError, WrittenItemFile
from pretrain.checkpoint.staging import StagingBuffer
from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.checkpoint.write_plan import data_of, held_shards, plan_writes
from pretrain.config.loader import to_dict
from pretrain.config.schema import RunConfig
from pretrain.engine.save_progress import NO_SAVE, SaveProgress
from pretrain.errors import CheckpointError
from pretrain.state import RunState

# As Megatron's `dist_checkpointing` wants them to be there.
_FORMAT_FILE = "metadata.json"
_FORMAT = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'
_COMMON_FILE = "common.pt"


@dataclass(frozen=True)
class SaveReport:
    """A save that is complete.

    Attributes:
        step: step that was saved.
        stall_s: seconds in which the ranks did not train for it.
        save_s: seconds from its begin until it was known to be complete.
        num_bytes: bytes of all files.
    """

    step: int
    stall_s: float
    save_s: float
    num_bytes: int

    def __str__(self) -> str:
        size = f"{self.num_bytes / 1e9:.3g} GB" if self.num_bytes >= 1e9 else f"{self.num_bytes / 1e6:.3g} MB"
        return f"saved step {self.step}: stalled {self.stall_s:.3g} s, written in {self.save_s:.3g} s, {size}"


@dataclass
class _Save:
    """A save in flight, on one rank.

    Attributes:
        content: content of `state.json`, besides the files.
        tensors: shapes and dtypes of the tensors of all ranks, by name.
        writers: writers of this rank's files; there until all ranks have written theirs.
        finish: rank 0's last phase, once it has begun; None before, and on other ranks.
        is_written: all ranks have written, and said so.
    """

    config: RunConfig
    step: int
    folder: Path
    content: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    writers: FileWriters
    started_s: float
    stall_s: float = 0.0
    finish: Future[int] | None = None
    is_written: bool = False

    @property
    def path(self) -> Path:
        return folders.writing_folder(self.folder, self.step)


class Saver:
    """Writes a run's checkpoints, one at a time. Its methods are called on all ranks alike.

    Attributes:
        reports: reports of saves that are complete, for whoever takes them.
    """

    def __init__(self) -> None:
        self.reports: list[SaveReport] = []
        self._staging = StagingBuffer()
        self._save: _Save | None = None
        # Ranks that are done, and that have failed, by the latest step.
        self._of_ranks = (0, 0)

    def start(self, config: RunConfig, state: RunState, entries: Any, folder: Path) -> None:
        """Begin to save; with `checkpoint.asynchronous` the rest goes on beside training. Collective.

        A save in flight is finished first.

        Args:
            config: configuration of the run.
            state: counters of the run.
            entries: sharded state dict to write.
            folder: the run's checkpoints.

        Raises:
            CheckpointError: on all ranks: this save, or the one in flight, cannot be written. Earlier ones are intact.
        """
        started_s = time.perf_counter()
        self.finish()
        path = folders.writing_folder(folder, state.step)
        _agree(path, _on_main(lambda: folders.start_writing(folder, state.step)))
        data, tensors = self._stage(entries, copy=config.checkpoint.asynchronous)
        self._save = _Save(
            config=config,
            step=state.step,
            folder=folder,
            content=_content(config, state),
            tensors=tensors,
            writers=FileWriters(path, dist.get_rank(), data, config.checkpoint.writer_threads),
            started_s=started_s,
        )
        if not config.checkpoint.asynchronous:
            self.finish()
        else:
            self._save.stall_s = time.perf_counter() - started_s

    @property
    def progress(self) -> SaveProgress:
        """This rank's part of a save in flight, which the next step adds up over the ranks."""
        save = self._save
        if save is None:
            return NO_SAVE
        if not save.is_written:
            return SaveProgress(save.writers.are_done, save.writers.failure is not None)
        if save.finish is None:
            return SaveProgress(done=True)
        return SaveProgress(save.finish.done(), save.finish.done() and save.finish.exception() is not None)

    def note_ranks(self, num_done: int, num_failed: int) -> None:
        """Take note of how many ranks are done with their part, and how many have failed, as a step has added them up."""
        self._of_ranks = (num_done, num_failed)

    def advance(self) -> None:
        """Take the next phase, if all ranks are ready for it, as the step just taken says. Collective if so.

        Raises:
            CheckpointError: on all ranks: a rank could not write. Earlier checkpoints are intact.
        """
        num_done, num_failed = self._of_ranks
        self._of_ranks = (0, 0)
        save = self._save
        if save is None or not (num_failed or num_done == dist.get_world_size()):
            return
        started_s = time.perf_counter()
        if not save.is_written:
            if num_failed:
                # This rank's further files would be of no use.
                save.writers.abandon()
            self._collect(save, background=True)
        else:
            self._conclude(save)
        save.stall_s += time.perf_counter() - started_s
        if self._save is None:
            self._report(save)

    def finish(self) -> None:
        """Wait until nothing is in flight. Collective.

        Raises:
            CheckpointError: on all ranks: the save in flight cannot be written. Earlier checkpoints are intact.
        """
        save = self._save
        if save is None:
            return
        started_s = time.perf_counter()
        self._of_ranks = (0, 0)
        if not save.is_written:
            self._collect(save, background=False)
        self._conclude(save)
        save.stall_s += time.perf_counter() - (started_s if save.config.checkpoint.asynchronous else save.started_s)
        self._report(save)

    def abandon(self) -> None:
        """Stop this rank's threads: the rank ends with an error that others may not know of. Not collective."""
        if self._save is not None:
            self._save.writers.abandon()
            self._save = None

    def _stage(self, entries: Any, *, copy: bool) -> tuple[dict[Region, Tensor], Mapping[str, TensorInfo]]:
        held = held_shards(entries)
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, list(held))
        plan = plan_writes(of_all, dist.get_rank())
        data = data_of(plan.items, held)
        return (self._staging.copy(data) if copy else data), plan.tensors

    def _collect(self, save: _Save, *, background: bool) -> None:
        """Wait for the files that the ranks write, gather their list, and have rank 0 begin to finalise."""
        written: list[WrittenItemFile] = []

        def wait() -> None:
            written.extend(save.writers.wait())

        self._agree(save, _failure_of(wait))
        of_all: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(written, of_all)
        save.is_written = True
        if of_all is not None:
            files = [file for of_rank in of_all for file in of_rank]
            if background:
                with_thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
                save.finish = with_thread.submit(_finalise, save, files)
                with_thread.shutdown(wait=False)
            else:
                save.finish = Future()
                try:
                    save.finish.set_result(_finalise(save, files))
                # Raised on all ranks when they conclude.
                except BaseException as error:
                    save.finish.set_exception(error)

    def _conclude(self, save: _Save) -> None:
        """Wait for rank 0."""
        finish = save.finish
        self._agree(save, None if finish is None else _failure_of(finish.result))
        self._save = None

    def _agree(self, save: _Save, failure: BaseException | None) -> None:
        """See `_agree`; a save that failed is not in flight any more."""
        try:
            _agree(save.path, failure)
        except BaseException:
            self.abandon()
            raise

    def _report(self, save: _Save) -> None:
        num_bytes = 0 if save.finish is None else save.finish.result()
        self.reports.append(SaveReport(save.step, save.stall_s, time.perf_counter() - save.started_s, num_bytes))


def _content(config: RunConfig, state: RunState) -> dict[str, Any]:
    return {
        "run": asdict(state),
        # Random numbers of a step follow from these two; see `pretrain.train.loop.seed_step`.
        "rng": {"seed": config.seed, "step": state.step},
        "config": to_dict(config),
        "versions": folders.package_versions(),
        "weights_dtype": "bfloat16" if config.train.precision == "bf16" else "float32",
    }


def _finalise(save: _Save, written: Sequence[WrittenItemFile]) -> int:
    """Make a checkpoint of the files that all ranks have written; rank 0 does.

    Returns:
        Bytes of all files.
    """
    files = {file.name: file.recorded for file in written}
    common = io.BytesIO()
    torch.save({}, common)
    small = {
        INDEX_FILE: pickled_index(save.tensors, [item for file in written for item in file.items]),
        _COMMON_FILE: common.getvalue(),
        _FORMAT_FILE: _FORMAT,
    }
    for name, content in small.items():
        files[name] = _write_small(save.path / name, content)
    folders.complete(save.folder, save.step, files, **save.content)
    rules = save.config.checkpoint
    folders.remove_superseded(
        save.folder, save.step, keep_last=rules.keep_last, keep_every_steps=rules.keep_every_steps
    )
    return sum(file.num_bytes for file in files.values())


def _write_small(path: Path, content: bytes) -> RecordedFile:
    with HashedFile(path) as file:
        file.write(content)
    return file.recorded


def _failure_of(action: Callable[[], object]) -> BaseException | None:
    """Run an action and return its exception, if any: the other ranks are to know of it before this one ends."""
    try:
        action()
    except BaseException as error:
        return error
    return None


def _on_main(action: Callable[[], object]) -> BaseException | None:
    return _failure_of(action) if dist.get_rank() == 0 else None


def _agree(path: Path, failure: BaseException | None) -> None:
    """Go on if no rank has failed. Collective.

    Raises:
        CheckpointError: on all ranks: a rank could not write.
        BaseException: this rank's own failure, if it is a defect and no refusal of the disk.
    """
    if isinstance(failure, SaveAbandonedError):
        # The failure is another rank's, which reports it.
        failure = None
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, None if failure is None else describe_error(failure))
    failed = {rank: text for rank, text in enumerate(of_all) if text is not None}
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    if failed:
        rank, text = next(iter(failed.items()))
        raise CheckpointError(
            f"the checkpoint {path.name.removeprefix('.writing_')} cannot be saved: rank {rank}: {text}. Earlier "
            "checkpoints are intact"
        ) from failure
