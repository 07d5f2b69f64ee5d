"""`megamem train`: train a model, or go on with a run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.machine.atomic_write import atomic_write
from parallel.machine.devices import num_visible_gpus
from pretrain.config.schema import RunConfig
from pretrain.config.settled import settled
from pretrain.config.source import dump_yaml
from pretrain.config.stages import names_of, read_run, stage_called, to_entries
from pretrain.config.table_gradients import chosen
from pretrain.config.validate import advice
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder, default_run_folder
from pretrain.run.preflight import check_stages
from pretrain.run.saved_run import check_resumable, record_start, starting_checkpoint, starting_point
from pretrain.run.stop import StopRequest
from pretrain.run.trained_stages import refuse_edited_past
from pretrain.train.health.memories import describe_faults
from tools.common.metrics import curves, read_metrics
from tools.common.parsers import add_config, add_stage
from tools.common.ranks import add_nproc, current_rank_is_first, ranks_for_stages, run_on_ranks, started_world_size
from tools.common.words import count_in_millions, plural

if TYPE_CHECKING:
    import torch

    from pretrain.checkpoint.folder import SavedState
    from pretrain.train.run import Run

_EPILOG = """\
examples:
  megamem train configs/quickstart.yaml
  megamem train configs/quickstart.yaml train.num_steps=50 model.memory=null --run-dir runs/dense
  megamem train configs/quickstart.yaml data.datasets.0.path=data/mine --run-dir runs/mine --nproc 2
  megamem train configs/stages/2.5b_25b.yaml --stage decay --run-dir runs/staged
  megamem train continued.yaml --from runs/mine --run-dir runs/continued
  torchrun --nproc-per-node 8 -m megamem train CONFIG

The run folder holds config.yaml, metrics.jsonl, checkpoints/ and logs/. If it holds a complete checkpoint, the run
goes on from there as if it had never stopped (bit for bit on CPUs, and on GPUs with train.deterministic=true); the
layout may differ. A run of several stages goes from one to the next by itself. Ctrl-C, SIGTERM or SIGUSR1 ends the
step, saves and exits with 75: run the same command again.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `train` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "train",
        help="train a model, or go on with a run",
        description="Train a model. Starts its own ranks on this machine, or uses those that torchrun or Slurm "
        "started.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config(parser, "YAML file; `megamem config show --keys` lists what it may hold")
    add_nproc(parser, "one per GPU, or as few as the layout needs")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the run's folder (default: runs/<name of the config>)"
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="CHECKPOINT",
        help="start a new run from the weights, moments and counters of a checkpoint: a run's folder, or one of its "
        "checkpoints/step_XXXXXXXX",
    )
    add_stage(
        parser,
        "train this stage of a run of stages alone, which must be the next one: it may have ranks of its own number",
    )
    parser.set_defaults(func=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Trains, and says where the run is and what to do next."""
    started = started_world_size()
    if started is not None and args.nproc is not None and args.nproc != started:
        raise ConfigError(f"--nproc is {args.nproc}, but {started} ranks were started already: leave --nproc out")
    source = read_run(args.config, args.overrides)
    folder = RunFolder(args.run_dir or default_run_folder(source.name))
    start = starting_checkpoint(args.start, folder)
    stages = source.stages(starting_point(start))
    trained = stages if args.stage is None else (stage_called(stages, args.stage),)
    num_ranks = started or args.nproc or ranks_for_stages(trained)
    # Each rank looks for itself: one file, and nothing is asked of the others.
    refuse_edited_past(stages, folder)
    check_stages(trained, num_ranks, folder, local=started is None, start=start)
    if start is not None:
        check_resumable(stages[0], start, as_new_run=True)
    if current_rank_is_first():
        on_gpu = bool(num_visible_gpus())
        for sentence in dict.fromkeys(sentence for config in trained for sentence in advice(config, on_gpu=on_gpu)):
            print(f"note: {sentence}", file=sys.stderr)
    if started is None:
        # Rank 0 makes it, when it takes the folder, if ranks were started elsewhere.
        folder.make()
    return run_on_ranks(lambda: train_rank(stages, folder, start, trained), num_ranks, log_dir=folder.logs)


def train_rank(
    stages: Sequence[RunConfig],
    folder: RunFolder,
    start: SavedState | None = None,
    trained: Sequence[RunConfig] | None = None,
    *,
    quiet: bool = False,
) -> None:
    """Train on one rank.

    Args:
        stages: configurations of the run's stages, or the one configuration of a run without stages.
        folder: the run's.
        trained: stages that are to be trained now; None: all.
        start: the checkpoint that the run goes on from while it has none of its own.
        quiet: leave out what is said before and after.
    """
    # Importing Megatron from a busy disk and loading a large checkpoint take minutes, in which a run can be asked to
    # stop too. In a Slurm job somebody has listened since Python started.
    stop = StopRequest(heed_earlier=True)
    from pretrain.engine.session import session, takes_products_in_fp32
    from pretrain.train.callbacks import default_callbacks
    from pretrain.train.loop import train
    from pretrain.train.run import owning
    from pretrain.train.stage_loop import train_stages

    asked = trained or stages
    with session(*asked) as groups, owning(folder) as owner:
        speaks = groups.is_main and not quiet
        trained = [settled(config) for config in asked]
        choices = {_stage_name(config): chosen(config) for config in asked}

        def train_one(run: Run) -> None:
            if owner is not None:
                # Not before the run is opened: what is refused leaves the folder as it was.
                _record(stages, folder, start)
            finished = run.state.num_finished >= run.config.train.num_steps
            if speaks:
                if groups.device.type == "cpu" and takes_products_in_fp32(run.config):
                    print("bf16: these cores cannot multiply it, so products are taken in fp32 and rounded", flush=True)
                choice = choices[_stage_name(run.config)]
                said = "" if choice is None else f"\n{choice.text}"
                print(_finished(run) if finished else f"{_headline(run)}{said}", flush=True)
            if not finished:
                train(run, default_callbacks(run, owner), stop)
            if speaks and run.state.step >= run.config.run_steps:
                print(_closing(run), flush=True)

        if not train_stages(trained, folder, groups, train_one, stop, start) and speaks:
            print(f"stage {', '.join(names_of(trained))} of {folder.path} is finished.", flush=True)


def _stage_name(config: RunConfig) -> str | None:
    return None if config.stage is None else config.stage.name


def _record(stages: Sequence[RunConfig], folder: RunFolder, start: SavedState | None) -> None:
    """Write into the run's folder what it goes on from, and all its stages: `config.yaml` is the present one."""
    if start is not None and not folder.start.exists():
        record_start(folder, start)
    if stages[0].stage is not None:
        with atomic_write(folder.stages) as stream:
            stream.write(dump_yaml(to_entries(stages)).encode())


def _finished(run: Run) -> str:
    done, wanted = run.state.step, run.config.run_steps
    if done == wanted:
        return f"{run.folder.path} is finished: {done} steps done."
    if run.config.stage is not None:
        return (
            f"{run.folder.path} has {done} steps done, and its stages end at step {wanted}: there is nothing left to "
            "train. Add a stage to go on."
        )
    return (
        f"{run.folder.path} has {done} steps done, and train.num_steps is {wanted}: there is nothing left to train. "
        "Raise it to go on, or start a shorter run in another --run-dir."
    )


def _headline(run: Run) -> str:
    """The run in two lines, what `auto` chose, and who steps the tables if that is the host."""
    from kernels.implementations import describe
    from kernels.select import resolve
    from pretrain.data.blend import model_vocab_size
    from pretrain.data.ngram_ids import boundary_notes
    from pretrain.planning.counts.formulas import count_parameters

    model, train, layout = run.config.model, run.config.train, run.config.parallel
    counts = count_parameters(replace(model, vocab_size=model_vocab_size(model, run.tokenizer)))
    updates = "".join(f"\n{text}" for text in run.optimizer.describe())
    notes = "".join(f"\nnote: {text}" for text in boundary_notes(model, run.tokenizer))
    kind = f"{model.memory_kinds}, {count_in_millions(counts.tables)} in tables" if model.memory else "dense"
    chosen = resolve(train.kernels, {}, run.groups.device.type)
    context = f"context {layout.context} x " if layout.context > 1 else ""
    kernels = f"\nmemory kernels ({train.kernels}): {describe(chosen)}" if model.memory else ""
    gpu = f"\n{described_gpu(run.groups.device)}" if run.groups.device.type == "cuda" else ""
    stage = run.config.stage
    name = run.config.name if stage is None else f"{run.config.name}, stage {stage.name}"
    num_steps = train.num_steps - (0 if stage is None else stage.steps_before)
    return (
        f"{name}: {count_in_millions(counts.total)} parameters ({kind}), {count_in_millions(counts.active)} "
        "active per token\n"
        f"{plural(run.groups.world_size, 'rank')} (tensor {layout.tensor} x pipeline {layout.pipeline} x {context}data "
        f"{run.groups.data_size}), {train.precision}, "
        f"{plural(num_steps, 'step')} of {train.tokens_per_step:,} tokens{gpu}{kernels}{updates}{notes}"
    )


def described_gpu(device: torch.device) -> str:
    """A rank's GPU, its memory, and how it reaches the others of its machine."""
    import torch

    from parallel.machine.devices import gpu_links

    properties = torch.cuda.get_device_properties(device)
    links = gpu_links()
    return f"on {properties.name}, {properties.total_memory / 1e9:.0f} GB each" + (
        f", linked by {links}" if links else ""
    )


def _prompt(run: Run) -> str:
    """The first words of a held-out document, as a prompt to try."""
    if not len(run.held_out):
        return ""
    text = run.tokenizer.detokenize(run.held_out[0]["labels"][:40].numpy())
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    words = " ".join(line.split()[:4])[:40]
    return f" --prompt {shlex.quote(words)}" if words else ""


def _closing(run: Run) -> str:
    """Results of the run, where it is, and what to try next."""
    rows = read_metrics(run.folder.metrics)
    evaluations = [row for row in rows if "validation_loss" in row]
    result = ""
    if evaluations:
        last = evaluations[-1]
        result = (
            f"validation loss {last['validation_loss']:.4f} nats per token, {last['bits_per_byte']:.4f} bits per byte "
            f"on {last['validation_bytes']:,} held-out bytes\n"
        )
    for sentence in describe_faults(curves(rows).dropped_out).values():
        result += f"note: at the end {sentence}\n"
    path, stage = run.folder.path, run.config.stage
    named = shlex.quote(str(path))
    longer = f"train.num_steps={2 * run.config.train.num_steps}" if stage is None else "with one more stage"
    return (
        f"{result}run folder: {path} (config.yaml, metrics.jsonl, checkpoints/, logs/)\n"
        f"next: megamem eval {named}\n"
        f"      megamem generate {named}{_prompt(run)}\n"
        f"      megamem train ... {longer} goes on with this run"
    )
