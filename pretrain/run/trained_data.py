"""Check the data that a run goes on with against the data that it was trained on, by hashes of tokenizer and data sets,
which every checkpoint has. Imports no torch.

Hashes are those of the data sets' manifests, so nothing large is read, and a folder may be moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pretrain.checkpoint.folder import SavedState
from pretrain.config.schema import RunConfig
from pretrain.data.manifest import PreparedDataset, open_dataset, open_saved_tokenizer, saved_tokenizer_info
from pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from pretrain.errors import DataError
from pretrain.run.folder import RunFolder
from pretrain.state import DataRead, RunState

_DIGITS_SHOWN = 12


def data_read(datasets: Sequence[PreparedDataset]) -> tuple[DataRead, ...]:
    """Record of data sets in a checkpoint."""
    return tuple(DataRead(os.path.abspath(dataset.path), dataset.manifest.content_fingerprint) for dataset in datasets)


def check_trained_data(config: RunConfig, saved: SavedState, datasets: Sequence[PreparedDataset]) -> list[str]:
    """Refuse to go on from a checkpoint with another tokenizer, or with data sets that are not those it was trained on.

    Within a stage, or a run without stages, the data sets are the same, wherever they are now. A stage that begins states
    its own; but what has the path of a data set that was trained on is that data set, and where the stage goes on in the
    data of one before it, it is the data of that one. `data.allow_change` lets data be another; a tokenizer never may.

    Args:
        config: configuration to go on with: that of the stage that trains next, or of one after it.
        saved: the checkpoint.
        datasets: data sets of `data.datasets`, in its order.

    Returns:
        Notices for the user, in sentences.

    Raises:
        DataError: the tokenizer or the data is another; the message names the difference and the remedy.
    """
    told = list(_check_tokenizer(saved, datasets[0]))
    now, state = data_read(datasets), saved.run
    if not state.trained_on:
        # Weights that came from elsewhere have seen no data of ours.
        if state.step > 0:
            told.append(f"{saved.path} has no hashes of its data sets: whether these are the same is not known")
        return told
    found = list(_changed(config, state, now))
    if found and not config.data.allow_change:
        raise DataError(
            f"{'; '.join(found)}. Give the data that {saved.path} was trained on, wherever it is now. To go on with other "
            "data, set data.allow_change=true, or start a run of its own with --from and a data set of another path"
        )
    return [*told, *(f"{change}, which data.allow_change lets be" for change in found)]


def _changed(config: RunConfig, state: RunState, now: tuple[DataRead, ...]) -> Iterator[str]:
    """Data sets that are not those that they should be, in words."""
    stage, last = config.stage, state.trained_on[-1]
    if stage is None or state.step > stage.steps_before:
        if sorted(dataset.sha256 for dataset in now) != last.contents:
            yield f"the run was trained on {_listed(last.datasets)}, and data.datasets is {_listed(now)}"
        return
    known = {dataset.path: dataset for part in state.trained_on for dataset in part.datasets}
    others = [dataset for dataset in now if known.get(dataset.path, dataset) != dataset]
    for dataset in others:
        yield f"the run was trained on {_named(known[dataset.path])}, and what is there now is {_short(dataset)}"
    if others or state.step < stage.steps_before or not stage.first_sample or state.trained_on[0].first_step:
        # It has begun no data yet, or what the first steps read is not known.
        return
    contents = sorted(dataset.sha256 for dataset in now)
    if all(part.contents != contents for part in state.trained_on):
        yield (
            f"stage {stage.name} goes on in the data of a stage before it, at sample {stage.first_sample:,}, and none "
            f"was trained on {_listed(now)}"
        )


def known_path(state: RunState, config: RunConfig, path: str) -> str:
    """The path that a data set has in the configuration of a checkpoint, which may have found it elsewhere."""
    entries = config.data.datasets
    if path in [entry.path for entry in entries] or not state.trained_on:
        return path
    try:
        content = open_dataset(path).manifest.content_fingerprint
    except DataError:
        # Opening it reports the error.
        return path
    read = state.trained_on[-1].datasets
    return next((e.path for e, one in zip(entries, read, strict=False) if one.sha256 == content), path)


def _check_tokenizer(saved: SavedState, dataset: PreparedDataset) -> Iterator[str]:
    folder = RunFolder(saved.path.parent.parent).tokenizer
    expected = saved.run.tokenizer
    if expected is None:
        try:
            # Older versions kept no hash: the run's own copy tells.
            expected = open_saved_tokenizer(folder).fingerprint
        except DataError:
            yield f"{saved.path} does not say with which tokenizer it was trained: whether this is the same is not known"
            return
    if dataset.tokenizer.fingerprint != expected:
        raise DataError(
            f"{dataset.path} was prepared with another tokenizer ({dataset.tokenizer.kind}, "
            f"{dataset.tokenizer.fingerprint[:_DIGITS_SHOWN]}) than {saved.path} was trained with "
            f"({expected[:_DIGITS_SHOWN]}): the same id is another text. {how_to_prepare(folder)}"
        )


def refuse_other_tokenizer(datasets: Sequence[PreparedDataset], folder: RunFolder, saved: SavedState) -> None:
    """Refuse data sets, of one tokenizer, that were prepared with another one than a run's.

    Raises:
        DataError: another tokenizer prepared them, or the run's cannot be read.
    """
    if datasets[0].tokenizer.fingerprint != tokenizer_of(folder, saved).fingerprint:
        paths = ", ".join(str(dataset.path) for dataset in datasets)
        raise DataError(f"{paths}: prepared with another tokenizer than the run's. {how_to_prepare(folder.tokenizer)}")


def how_to_prepare(tokenizer: os.PathLike[str]) -> str:
    """Advice on preparing data with the tokenizer that a run keeps."""
    return (
        f"Prepare it with `megamem data prepare --tokenizer {os.path.join(tokenizer, TOKENIZER_FILE)}`, or with bytes if "
        "the run has no such file."
    )


def going_on(tokenizer: Tokenizer, saved: SavedState) -> Tokenizer:
    """Tokenizer of the next data with what a checkpoint was trained on: special tokens, and a chat template where the data
    has none. It goes on knowing them, whatever it is trained on next."""
    try:
        known = saved_tokenizer_info(RunFolder(saved.path.parent.parent).tokenizer)
    except DataError:
        # Checkpoints that were copied without their run say nothing.
        return tokenizer
    return tokenizer.taking_special_tokens(known.chat) if known.special_tokens else tokenizer


def tokenizer_of(folder: RunFolder, saved: SavedState) -> Tokenizer:
    """The tokenizer that a run keeps, with which the checkpoint was trained.

    Raises:
        DataError: the tokenizer cannot be read, or is another one.
    """
    tokenizer = open_saved_tokenizer(folder.tokenizer)
    expected = saved.run.tokenizer
    if expected not in (None, tokenizer.fingerprint):
        raise DataError(
            f"{folder.tokenizer} holds another tokenizer ({tokenizer.fingerprint[:_DIGITS_SHOWN]}) than {saved.path} was "
            f"trained with ({expected[:_DIGITS_SHOWN]}). Copy {TOKENIZER_FILE} and info.json of the right one there"
        )
    return tokenizer


def _listed(datasets: Sequence[DataRead]) -> str:
    return ", ".join(map(_named, datasets))


def _named(dataset: DataRead) -> str:
    return f"{dataset.path} ({_short(dataset)})"


def _short(dataset: DataRead) -> str:
    return f"sha256 {dataset.sha256[:_DIGITS_SHOWN]}"
