"""Effects of the keys of data, evaluation, checkpoints and logging, measured on what whole runs on one rank read and
leave behind.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import resource
import string
import sys
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
import yaml
from keys_table import BASE, MEMORY, Table, as_kind, set_key
from torch import Tensor, nn
from torch.utils.data import default_collate

import tools.train
from parallel.groups import ParallelGroups
from pretrain.checkpoint.folder import read_state, step_folder
from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.newest import damaged_files
from pretrain.config.schema import DataConfig, DatasetEntry, EvaluationConfig, EvaluationEntry, RunConfig
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.engine.chunks import unwrap
from pretrain.errors import CheckpointError, DataError, UserError
from pretrain.run.folder import RunFolder
from pretrain.train.callbacks import default_callbacks
from pretrain.train.loop import train
from pretrain.train.run import Run, open_run
from tools.cli import main

RUNS, COMMANDS = Table(), Table()
LETTERS = {"lower": string.ascii_lowercase, "upper": string.ascii_uppercase}
RUN = replace(
    set_key(BASE, "model.num_layers", 1),
    train=replace(BASE.train, num_steps=6),
    data=DataConfig(datasets=(DatasetEntry("lower"),)),
    evaluation=EvaluationConfig(max_sequences=3),
)


def prepare_corpora(folder: Path) -> None:
    """Two data sets of 40 documents each, of lower-case and of upper-case letters, for runs in this folder."""
    generator = random.Random(0)
    for name, letters in LETTERS.items():
        sources = folder / f"{name}_sources"
        sources.mkdir()
        for number in range(40):
            (sources / f"{number}.txt").write_text("".join(generator.choices(letters, k=100)))
        prepare([str(sources)], folder / name, ByteTokenizer(), validation_fraction=0.25, num_workers=1)


def corpus_of(tokens: Tensor) -> str:
    """The corpus that most of the letters are from."""
    return "upper" if bool(((tokens >= ord("A")) & (tokens <= ord("Z"))).double().mean() > 0.5) else "lower"


class Outputs:
    """A run in a folder of its own, and what it leaves behind."""

    numbers = itertools.count()

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config, self.groups = config, groups

    def open(self) -> Run:
        """The run before its first step."""
        return open_run(self.config, RunFolder(Path(f"run_{next(self.numbers)}").absolute()), self.groups)

    @cached_property
    def opened(self) -> Run:
        """One that stays at its first step."""
        return self.open()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.opened.chunks[0].named_parameters()}

    @cached_property
    def finished(self) -> tuple[RunFolder, list[Tensor]]:
        """The folder of a finished run, and the tokens [b, s] of its microbatches."""
        run, read = self.open(), []

        def watch(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            # Not what evaluation reads.
            if module.training:
                read.append((*arguments, *named.values())[0].clone())

        unwrap(run.chunks[0]).embedding.register_forward_pre_hook(watch, with_kwargs=True)
        train(run, default_callbacks(run))
        return run.folder, read

    @property
    def microbatches(self) -> list[tuple[int, ...]]:
        """Shapes of what its forward passes read."""
        return [tuple(tokens.shape) for tokens in self.finished[1]]

    @property
    def tokens(self) -> Tensor:
        """[samples, s] of the whole run, as its steps read them."""
        return torch.cat(self.finished[1])

    @property
    def letters(self) -> list[str]:
        """Corpus of each sample."""
        return [corpus_of(sample) for sample in self.tokens]

    @property
    def held_out_letters(self) -> set[str]:
        """Corpora of the windows over held-out documents."""
        return {corpus_of(self.opened.held_out[index]["tokens"]) for index in range(len(self.opened.held_out))}

    @property
    def folder(self) -> RunFolder:
        return self.finished[0]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of steps and evaluations."""
        return [row for row in self.all_rows if "save_s" not in row]

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    @property
    def logged(self) -> list[int]:
        """Steps with a row of their own."""
        return [row["step"] for row in self.rows if "loss" in row]

    @property
    def evaluated(self) -> dict[int, int]:
        """Predicted tokens by the step of the evaluation."""
        return {row["step"]: row["validation_tokens"] for row in self.rows if "validation_loss" in row}

    @property
    def domains(self) -> list[str]:
        """Domains of the last evaluation."""
        return list(next(row for row in reversed(self.rows) if "validation_loss" in row)["domains"])

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step_")) for path in self.folder.checkpoints.iterdir())

    @property
    def checkpoint(self) -> Path:
        """The last one."""
        return step_folder(self.folder.checkpoints, self.saved[-1])


@RUNS.key("train.num_steps", 4, RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert (base.logged, second.logged) == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4])
    # A shorter run reads what the longer one begins with.
    assert torch.equal(second.tokens, base.tokens[:16])


@RUNS.key("train.global_batch_size", 6, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """Samples per step, and what a step reads: the same stream in larger portions."""
    assert [row["consumed_samples"] for row in base.rows if "loss" in row] == [4, 8, 12, 16, 20, 24]
    assert [row["consumed_samples"] for row in second.rows if "loss" in row] == [6, 12, 18, 24, 30, 36]
    assert (base.microbatches, second.microbatches) == ([(2, 8)] * 12, [(2, 8)] * 18)
    assert torch.equal(second.tokens[:24], base.tokens)


@RUNS.key("train.micro_batch_size", 1, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """The same samples in more portions."""
    assert (base.microbatches, second.microbatches) == ([(2, 8)] * 12, [(1, 8)] * 24)
    assert torch.equal(second.tokens, base.tokens)


@RUNS.key("train.sequence_length", 12, RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert (base.tokens.shape, second.tokens.shape) == ((24, 8), (24, 12))
    assert [row["consumed_tokens"] for row in second.rows if "loss" in row] == [48, 96, 144, 192, 240, 288]
    assert (base.evaluated, second.evaluated) == ({6: 3 * 8}, {6: 3 * 12})


@RUNS.key("train.max_skipped_steps", 3, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """Gradients that are never finite end the run after so many steps; with 20 this one is over before."""
    for outputs, steps in ((base, 6), (second, 3)):
        run = outputs.open()
        unwrap(run.chunks[0]).decoder.final_layernorm.register_forward_hook(lambda _, inputs, out: out * float("inf"))
        if steps == 6:
            train(run, [])
        else:
            with pytest.raises(UserError, match=r"the last 3 steps had no finite gradient"):
                train(run, [])
        assert (run.state.step, run.state.num_skipped) == (steps, steps)


@RUNS.key("model.vocab_size", 300, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """Rows of the embedding, in multiples of 16: bytes and the end of a document, or as many ids as asked for."""
    for outputs, rows in ((base, 272), (second, 304)):
        (name,) = (name for name in outputs.weights if name.endswith("word_embeddings.weight"))
        assert outputs.weights[name].shape == (rows, 32)


@RUNS.key("data.seed", 2, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """The same weights on samples in the order of a run with that seed."""
    assert all(torch.equal(second.weights[name], weight) for name, weight in base.weights.items())
    assert not torch.equal(second.tokens, base.tokens)
    of_seed = Outputs(set_key(RUN, "seed", 2), base.groups)
    assert torch.equal(second.tokens, of_seed.tokens)


@RUNS.key("data.shuffle", "samples", RUN)
def _(base: Outputs, second: Outputs) -> None:
    """Parts of the file as it lies, where the other order puts other documents side by side; and no index is kept."""
    assert all(torch.equal(second.weights[name], weight) for name, weight in base.weights.items())
    stream = np.fromfile(Path(RUN.data.datasets[0].path) / "train.bin", dtype=np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(stream, second.tokens.shape[-1])
    for row in second.tokens.reshape(-1, second.tokens.shape[-1]).numpy():
        assert (windows == row).all(1).any()
    assert list(base.opened.folder.data_cache.glob("*.npy"))
    assert not list(second.opened.folder.data_cache.glob("*.npy"))


@RUNS.key("data.documents", "separate", set_key(RUN, "train.sequence_length", 64))
def _(base: Outputs, second: Outputs) -> None:
    """The same samples, in training and in evaluation, whose positions count from the last end of a document."""
    assert torch.equal(second.tokens, base.tokens)
    for tokens in (second.tokens, torch.stack([sample["tokens"] for sample in second.opened.held_out])):
        assert int((tokens == ByteTokenizer.eod).sum()) > 1
    for outputs in (base, second):
        (stream,) = outputs.opened.batches()
        held_out = outputs.opened.held_out
        windows = [held_out[number] for number in range(len(held_out))]
        for sample in (next(stream), default_collate(windows)):
            expected = [list(range(64)) for _ in sample["tokens"]]
            for row, ids in zip(expected, sample["tokens"].tolist(), strict=True):
                for place in range(1, 64) if outputs is second else ():
                    row[place] = 0 if ids[place] == ByteTokenizer.eod else row[place - 1] + 1
            assert sample["position_ids"].tolist() == expected
    losses, apart = ([row["loss"] for row in outputs.rows if "loss" in row] for outputs in (base, second))
    assert all(a != b for a, b in zip(losses, apart, strict=True))


@RUNS.key("data.num_workers", 2, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """The same samples, from processes of their own."""
    for outputs, workers in ((base, 0), (second, 2)):
        before = set(multiprocessing.active_children())
        (stream,) = outputs.opened.batches()
        next(stream)
        assert len(set(multiprocessing.active_children()) - before) == workers
        del stream
    assert torch.equal(second.tokens, base.tokens)


@RUNS.key("data.allow_change", True, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """Other letters, from a checkpoint on that says which ones it has read; and one behind it says both."""
    saved = read_state(step_folder(base.folder.checkpoints, 6))
    manifests = [json.loads((Path(name) / "manifest.json").read_text()) for name in ("lower", "upper")]
    assert saved.run.tokenizer == manifests[0]["tokenizer"]["fingerprint"]
    of_upper = [
        replace(set_key(outputs.config, "data.datasets.0.path", "upper"), train=replace(RUN.train, num_steps=9))
        for outputs in (base, second)
    ]
    folder = RunFolder(Path("changed").absolute())
    with pytest.raises(DataError, match=r"trained on .*/lower \(.*set data\.allow_change=true"):
        open_run(of_upper[0], folder, base.groups, saved)
    assert not folder.path.exists()
    run = open_run(of_upper[1], folder, base.groups, saved)
    (stream,) = run.batches()
    assert corpus_of(next(stream)["tokens"]) == "upper"
    parts = [(part.first_step, [Path(read.path).name for read in part.datasets]) for part in run.state.trained_on]
    assert parts == [(0, ["lower"]), (6, ["upper"])]


@RUNS.key("data.datasets", (DatasetEntry("lower"), DatasetEntry("upper")), RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert base.letters.count("upper") == 0
    assert second.letters.count("upper") == 12
    whole = [
        Outputs(set_key(outputs.config, "evaluation.max_sequences", None), outputs.groups) for outputs in (base, second)
    ]
    assert [outputs.held_out_letters for outputs in whole] == [{"lower"}, {"lower", "upper"}]


@RUNS.key("data.datasets.0.path", "upper", RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert set(base.letters) == {"lower"}
    assert set(second.letters) == {"upper"}
    assert (base.held_out_letters, second.held_out_letters) == ({"lower"}, {"upper"})


@RUNS.key("data.datasets.1.weight", 3.0, set_key(RUN, "data.datasets", (DatasetEntry("lower"), DatasetEntry("upper"))))
def _(base: Outputs, second: Outputs) -> None:
    """A weight of 3 beside 1 takes 18 of 24 samples; equal weights take 12 each."""
    assert (base.letters.count("upper"), second.letters.count("upper")) == (12, 18)


@RUNS.key(
    "data.datasets.1.epochs",
    15.0,
    set_key(RUN, "data.datasets", (DatasetEntry("lower", epochs=5.0), DatasetEntry("upper", epochs=5.0))),
)
def _(base: Outputs, second: Outputs) -> None:
    """Two sets of one size share 24 samples by their epochs: 15 beside 5 takes 18, equal epochs take 12 each."""
    assert (base.letters.count("upper"), second.letters.count("upper")) == (12, 18)


# Long windows: all that is held out is evaluated.
BOTH = replace(
    set_key(RUN, "data.datasets", (DatasetEntry("lower"), DatasetEntry("upper"))),
    train=replace(RUN.train, sequence_length=64),
    evaluation=EvaluationConfig(),
)


@RUNS.key("data.datasets.0.name", "small", BOTH)
def _(base: Outputs, second: Outputs) -> None:
    """The domain of its held-out documents has the name."""
    assert [outputs.domains for outputs in (base, second)] == [["lower", "upper"], ["small", "upper"]]
    assert base.rows[-1]["validation_loss"] == second.rows[-1]["validation_loss"]


@RUNS.key("evaluation.datasets", (EvaluationEntry("upper"),), RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert torch.equal(base.tokens, second.tokens)
    assert (base.held_out_letters, second.held_out_letters) == ({"lower"}, {"upper"})


APART = set_key(BOTH, "evaluation.datasets", (EvaluationEntry("lower"), EvaluationEntry("upper", "large")))


@RUNS.key("evaluation.datasets.0.path", "upper", APART)
def _(base: Outputs, second: Outputs) -> None:
    assert (base.held_out_letters, second.held_out_letters) == ({"lower", "upper"}, {"upper"})


@RUNS.key("evaluation.datasets.0.name", "small", APART)
def _(base: Outputs, second: Outputs) -> None:
    assert [outputs.domains for outputs in (base, second)] == [["lower", "large"], ["small", "large"]]


@RUNS.key("evaluation.every_steps", 4, RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert (list(base.evaluated), list(second.evaluated)) == ([6], [4, 6])
    assert base.rows[-1] == second.rows[-1]


@RUNS.key("evaluation.max_sequences", 2, RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert (base.evaluated, second.evaluated) == ({6: 3 * 8}, {6: 2 * 8})


@RUNS.key("checkpoint.every_steps", 4, RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert (base.saved, second.saved) == ([6], [4, 6])


OFTEN = set_key(RUN, "checkpoint.every_steps", 1)


@RUNS.key("checkpoint.keep_last", 3, OFTEN)
def _(base: Outputs, second: Outputs) -> None:
    assert (base.saved, second.saved) == ([5, 6], [4, 5, 6])


@RUNS.key("checkpoint.keep_every_steps", 2, OFTEN)
def _(base: Outputs, second: Outputs) -> None:
    assert (base.saved, second.saved) == ([5, 6], [2, 4, 5, 6])


@RUNS.key("checkpoint.weights_copy", True, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """The checkpoint stores one tensor more per parameter."""
    names = [set(read_index(outputs.checkpoint).tensors) for outputs in (base, second)]
    main = {name for name in names[0] if name.startswith("optimizer.state.param.")}
    assert names[1] - names[0] == {name.removeprefix("optimizer.state.param.") for name in main}
    assert len(main) == len(base.weights)


@RUNS.key("checkpoint.writer_threads", 3, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """Files of the rank: weights, and moments, by as many threads each."""
    assert [len(list(outputs.checkpoint.glob("*.distcp"))) for outputs in (base, second)] == [4, 6]


@RUNS.key("checkpoint.asynchronous", True, OFTEN)
def _(base: Outputs, second: Outputs) -> None:
    """A save is told of when it is complete: before the next step, or after it."""
    assert [row["step"] for row in base.all_rows if "validation_loss" not in row][:4] == [1, 1, 2, 2]
    assert [row["step"] for row in second.all_rows if "validation_loss" not in row][:3] == [1, 2, 1]
    for outputs in (base, second):
        assert sorted(row["step"] for row in outputs.all_rows if "save_s" in row) == [1, 2, 3, 4, 5, 6]
        assert outputs.saved == [5, 6]
        assert damaged_files(outputs.checkpoint) == []


@RUNS.key("checkpoint.check_hashes", False, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """Damage that leaves a file as long as it was is found, or trained on."""
    for outputs in (base, second):
        file = outputs.checkpoint / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        item = read_index(outputs.checkpoint).items["optimizer.state.param.decoder.final_layernorm.weight"][0]
        assert item.file == file.name
        # An element, somewhere before the archive's directory.
        content[item.start + item.num_bytes // 2] ^= 1
        file.write_bytes(content)
        again = partial(open_run, outputs.config, outputs.folder, outputs.groups)
        if outputs is base:
            with pytest.raises(CheckpointError, match=r"__0_0\.distcp has other contents than were written"):
                again()
        else:
            assert again().state.step == 6


@RUNS.key("logging.every_steps", 4, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """The last step always has a row."""
    assert (base.logged, second.logged) == ([1, 2, 3, 4, 5, 6], [4, 6])


@RUNS.key("logging.memory_every_steps", 3, RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert [row["step"] for row in base.rows if "memory" in row] == []
    assert [row["step"] for row in second.rows if "memory" in row] == [3, 6]
    assert [row["loss"] for row in second.rows if "loss" in row] == [row["loss"] for row in base.rows if "loss" in row]


@RUNS.key("logging.tensorboard", True, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """A writer in the run's folder, a stand-in for TensorBoard's, gets the loss of every step."""
    for outputs, steps in ((base, []), (second, [1, 2, 3, 4, 5, 6])):
        tensorboard = MagicMock()
        with patch.dict(sys.modules, {"torch.utils.tensorboard": tensorboard}):
            run = outputs.open()
            train(run, default_callbacks(run))
        written = tensorboard.SummaryWriter.return_value.add_scalar.mock_calls
        assert [call.args[2] for call in written if call.args[0] == "loss"] == steps
        folders = [call.args[0] for call in tensorboard.SummaryWriter.mock_calls if call.args]
        assert folders[:1] == ([str(run.folder.tensorboard)] if steps else [])


def tracked(outputs: Outputs) -> tuple[dict[str, Any], list[int]]:
    """Arguments that start a stand-in for Weights & Biases, and the steps that it gets; nothing if it is not used."""
    wandb = MagicMock()
    with patch.dict(sys.modules, wandb=wandb):
        run = outputs.open()
        train(run, default_callbacks(run))
    if not wandb.init.called:
        return {}, []
    steps = [call.args[0]["step"] for call in wandb.init.return_value.log.mock_calls]
    assert wandb.init.return_value.finish.call_count == 1
    return wandb.init.call_args.kwargs, steps


@RUNS.key(
    "optimizer.table_folder",
    "tables",
    replace(
        RUN,
        model=replace(RUN.model, memory=as_kind(MEMORY, "engram", value_dim=8)),
        optimizer=replace(RUN.optimizer, tables="row_wise", table_gradients="rows", value_weight_decay=0.0),
    ),
)
def _(base: Outputs, second: Outputs) -> None:
    """The same losses, norms and evaluations; the table is mapped from a file of the folder's disk, each row beside its two
    numbers of state."""
    figures = ("loss", "grad_norm", "validation_loss")
    assert [[row.get(name) for name in figures] for row in base.rows] == [
        [row.get(name) for name in figures] for row in second.rows
    ]
    rows, folder = second.config.model.memory_plan.banks[0].num_rows, Path("tables").absolute()
    assert second.opened.optimizer is not base.opened.optimizer
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f" {folder}/" in line]
    assert all(words[-1] == "(deleted)" for words in mapped)
    page = resource.getpagesize()
    sizes = {int(end, 16) - int(start, 16) for start, end in (words[0].split("-") for words in mapped)}
    assert sizes == {-(-rows * 4 * (8 + 2) // page) * page}


@RUNS.key("logging.wandb_mode", "offline", RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert tracked(base) == ({}, [])
    settings, steps = tracked(second)
    assert (settings["mode"], settings["project"], settings["name"]) == ("offline", "megamem", "run")
    assert steps == [1, 2, 3, 4, 5, 6, 6]


@RUNS.key("logging.wandb_project", "another", set_key(RUN, "logging.wandb_mode", "offline"))
def _(base: Outputs, second: Outputs) -> None:
    settings, _ = tracked(second)
    assert (settings["mode"], settings["project"]) == ("offline", "another")


@COMMANDS.key("name", "second", RUN)
def _(base: RunConfig, second: RunConfig) -> None:
    """The folder of a run that is given none."""
    for config, name in ((base, "run"), (second, "second")):
        Path("named.yaml").write_text(yaml.safe_dump({"name": config.name, "data": {"datasets": [{"path": "lower"}]}}))
        seen: list[RunFolder] = []
        with (
            patch.object(tools.train, "run_on_ranks", lambda main, num_ranks, log_dir: main() or 0),
            patch.object(tools.train, "train_rank", lambda stages, folder, *others, seen=seen: seen.append(folder)),
        ):
            assert main(["train", "named.yaml"]) == 0
        assert [folder.path for folder in seen] == [Path("runs") / name]
