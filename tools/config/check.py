"""`megamem config check`: whether a configuration can run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_stages
from pretrain.config.table_gradients import chosen
from pretrain.config.validate import advice, validate
from pretrain.errors import ConfigError, MissingDataError
from pretrain.planning.bytes.held import HeldBytes, held_bytes
from pretrain.run.folder import RunFolder, default_run_folder
from pretrain.run.preflight import check_gpu_memory, check_start, gigabytes, naming_stage
from tools.common.parsers import add_config
from tools.common.ranks import add_device, ranks_for_stages
from tools.common.words import plural


def add_check(actions: Any) -> None:
    """Adds `check` to the actions of `megamem config`."""
    check = actions.add_parser(
        "check",
        help="say whether a configuration can run",
        description="Load a configuration and check it as `megamem train` does before it starts: keys, layout and "
        "batch, data, run folder, and whether the model fits into this machine's memory. Exits with 0 if it can run.",
    )
    add_config(check)
    check.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of the run (default: what `megamem train` would start here)"
    )
    check.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of the run (default: as `megamem train`: runs/<name>)"
    )
    check.add_argument(
        "--elsewhere",
        action="store_true",
        help="leave out checks of this machine: data, folders, memory, and the number of ranks unless --ranks gives it",
    )
    check.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of a GPU elsewhere: refuse a layout that it cannot hold (needs --elsewhere and --ranks)",
    )
    add_device(check)
    check.set_defaults(func=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Validates a configuration and says so."""
    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"--ranks is {args.ranks}: it must be at least 1")
    if args.gpu_memory is not None and not (args.elsewhere and args.ranks and args.gpu_memory > 0):
        raise ConfigError(
            f"--gpu-memory is {args.gpu_memory}: it is the memory of a GPU elsewhere, above 0, and needs --elsewhere and "
            "--ranks; here the GPUs are asked"
        )
    stages = load_stages(args.config, args.overrides)
    num_ranks = args.ranks if args.elsewhere else args.ranks or ranks_for_stages(stages)
    folder = RunFolder(args.run_dir or default_run_folder(stages[0].name))
    checked, choices = [], []
    for config in stages:
        with naming_stage(config):
            if (choice := chosen(config)) is not None:
                choices.append(choice.text)
            config = validate(config, num_ranks)
            if args.gpu_memory is not None:
                check_gpu_memory(config, args.ranks, int(args.gpu_memory * 1e9))
            # Parameters are counted with the data's vocabulary where the data is here.
            checked.append(config if args.elsewhere else _started(config, num_ranks, folder))
    if not args.elsewhere:
        folder.check_writable()
    where = "" if num_ranks is None else f" on {plural(num_ranks, 'rank')}"
    for sentence in dict.fromkeys(sentence for config in stages for sentence in advice(config)):
        print(f"note: {sentence}", file=sys.stderr)
    print(f"{args.config} can run{where}{'' if args.elsewhere else ' here'}.")
    for text in dict.fromkeys(choices):
        print(f"{text}.")
    if num_ranks is not None:
        held = max((held_bytes(config, num_ranks) for config in checked), key=lambda held: held.total)
        staged = any(config.parallel.pipeline > 1 for config in checked)
        holder = "A rank of the fullest stage holds" if staged else "Each rank holds"
        print(
            f"{holder} {gigabytes(held.model)} of weights and gradients and {gigabytes(held.optimizer)} of the "
            f"optimizer's state{_in_files(held)}; activations come on top."
        )
    return 0


def _in_files(held: HeldBytes) -> str:
    return f", and keeps {gigabytes(held.files)} of tables and their state in files" if held.files else ""


def _started(config: RunConfig, num_ranks: int, folder: RunFolder) -> RunConfig:
    """The configuration as a run starts with it here.

    Raises:
        MissingDataError: a data set is not here; the message names the option that does without.
    """
    try:
        return check_start(config, num_ranks, folder, local=True)
    except MissingDataError as error:
        raise MissingDataError(
            f"{error} If it is on another machine, --elsewhere checks all else.", error.folder
        ) from error
