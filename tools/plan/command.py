"""`megamem plan`: the layouts that a model can have on so many GPUs, with what each holds and takes."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import check_can_write
from pretrain.config.layout_rules import layout_problems
from pretrain.config.schema import RunConfig
from pretrain.config.source import (
    STAGES_KEY,
    Layer,
    apply_overrides,
    dump_yaml,
    find,
    from_plain,
    to_plain,
)
from pretrain.config.stages import RunSource, load_stage, load_stages, read_run
from pretrain.config.table_gradients import chosen
from pretrain.config.validate import batch_problems, validate
from pretrain.errors import ConfigError
from pretrain.planning.seconds.hardware import Hardware, load_hardware
from pretrain.progress import Progress
from tools.common.parsers import add_command, add_config, add_stage
from tools.common.vocabulary import with_vocabulary_of_data
from tools.plan.counted import reason_not_to_count, with_counts
from tools.plan.layouts import Estimate, estimate, estimates_of, possible_layouts, recommended, too_large
from tools.plan.report import as_json, details, table

_EPILOG = """\
examples:
  megamem plan configs/ultramemv2/2.5b_120b_top256.yaml --gpus 512 --gpu h100-80g
  megamem plan configs/ultramemv2/2.5b_120b_top256.yaml --gpus 512 --gpu h100-80g --count 3
  megamem plan configs/ultramemv2/2.5b_25b.yaml --gpus 8 --gpu h200-141g --write 25b_8.yaml --plot 25b_8.svg

docs/planning.md says what is estimated, and how well. What is recommended has been dry-run; `megamem dryrun` counts the
bytes of the layout that you choose.
"""

_MOST_SKEW = 2.0
_MOST_GPUS = 1 << 20


def add_parser(subparsers: Any) -> None:
    """Adds `plan` to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "plan",
        "estimate memory and speed of every layout on N GPUs",
        _EPILOG,
        "Estimate memory per rank and time per step of every layout that a model can have on so many GPUs: tensor, "
        "pipeline, interleaving, memory group, microbatch, recomputation and offloaded tables (and context parallelism "
        "from sequences of 16,384 tokens on). Prints the fastest that fit, and what the best one is made of.",
    )
    add_config(parser)
    add_stage(parser)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of the run")
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help="h100-80g, h200-141g, b200-192g, or a YAML file with your figures"
    )
    parser.add_argument(
        "--skew",
        type=float,
        metavar="S",
        help="spread reads over rows as by Zipf's law with exponent S, 0 for evenly (default: that of the GPU's file)",
    )
    parser.add_argument("--top", type=int, default=10, metavar="K", help="layouts to print (default: 10)")
    parser.add_argument(
        "--count",
        type=int,
        metavar="K",
        help="dry-run the fullest stages of K layouts and count their bytes: the recommended layout first, then the "
        "fastest; some 10 s of one core for the first, and 5 s for each other (default: 1; 0: none)",
    )
    parser.add_argument("--as-written", action="store_true", help="estimate the layout of CONFIG alone")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.yaml", help="write the recommended layout as a configuration over CONFIG"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the recommended layout: memory by part, and a step's time"
    )
    parser.set_defaults(func=run_plan)


_REMEDIES: tuple[dict[str, Any], ...] = (
    {"tables": "row_wise"},
    {"tables": "row_wise", "table_gradient_dtype": "bf16"},
)
"""Keys of `optimizer` by which tables take less, first those that change least."""


def run_plan(args: argparse.Namespace) -> int:
    """Estimates and prints."""
    if args.gpus < 1 or args.top < 1:
        raise ConfigError(f"--gpus is {args.gpus} and --top {args.top}: both must be at least 1")
    if args.gpus > _MOST_GPUS:
        raise ConfigError(f"--gpus is {args.gpus}: layouts are searched for {_MOST_GPUS} GPUs at most")
    if args.count is not None and args.count < 0:
        raise ConfigError(f"--count is {args.count}: the layouts that are dry-run are 0 or more")
    hardware = load_hardware(args.gpu)
    if args.skew is not None:
        if not 0 <= args.skew <= _MOST_SKEW:
            raise ConfigError(f"--skew is {args.skew:g}: it is 0 (evenly) to {_MOST_SKEW:g}")
        hardware = replace(hardware, row_skew=args.skew)
    for file in filter(None, (args.write, args.plot)):
        check_can_write(file)
    if args.write is not None and args.stage is None:
        if elements := [text for text in args.overrides if re.search(r"\.\d|^stages\.", text.partition("=")[0])]:
            raise ConfigError(
                f"--write puts overrides into its file, and {elements[0]} sets an element of a list: put it into a file "
                "over CONFIG, and plan that"
            )
        # The file is for the whole run, all stages of it.
        return _write(read_run(args.config, args.overrides), args, hardware)
    if args.write is not None:
        raise ConfigError("--write gives every stage its layout: leave --stage out")
    _plan(load_stage(args.config, args.overrides, args.stage), args, hardware)
    return 0


def _plan(config: RunConfig, args: argparse.Namespace, hardware: Hardware) -> Estimate:
    """Estimates a stage and prints; what is recommended.

    Raises:
        ConfigError: nothing fits, or the configuration cannot be planned.
    """
    config = with_vocabulary_of_data(config, args.config)
    # Whatever of it has nothing to do with its layout must be right.
    kernels = config.train.kernels if config.train.kernels == "naive" else "auto"
    validate(replace(config, train=replace(config.train, kernels=kernels)), None)
    written = None
    problems = (each(config, args.gpus) for each in (layout_problems, batch_problems))
    if next(chain.from_iterable(problems), None) is None:
        written = estimate(config, args.gpus, hardware)
    if args.as_written:
        if written is None:
            validate(config, args.gpus)
        assert written is not None
        found = [written]
    else:
        found = _all(config, args.gpus, hardware)
    if args.count is None and (reason := reason_not_to_count(found, args.gpus, hardware)) is not None:
        print(f"Not counted by a dry run: {reason}.", file=sys.stderr)
    elif args.count != 0:
        found = with_counts(found, 1 if args.count is None else args.count, args.gpus, hardware)
    best = recommended(found, hardware)
    if best is None:
        if not found:
            raise ConfigError(f"no layout of {args.config} divides {args.gpus} GPUs: try another number")
        remedy = "" if args.as_written else _remedy(config, args.gpus, hardware)
        raise ConfigError(
            f"no layout fits. Of the one that needs least, {too_large(_smallest(found), hardware)}{remedy}"
        )
    fitting = [each for each in found if each.fits(hardware)]
    if args.json:
        shown = [as_json(each, args.gpus, hardware) | {"recommended": each is best} for each in fitting[: args.top]]
        if best not in fitting[: args.top]:
            shown.append(as_json(best, args.gpus, hardware) | {"recommended": True})
        print(json.dumps(shown, indent=2))
    else:
        print("\n".join(table(fitting[: args.top], len(found), args.gpus)))
        if written is not None and not written.fits(hardware):
            print(f"\nAs written it does not fit: {too_large(written, hardware)}.")
        elif written is not None and not args.as_written:
            print(f"\nAs written: {written.time.total_s:.2f} s per step, {written.peak_bytes / 1e9:.1f} GB.")
        asked = replace(
            best.config, optimizer=replace(best.config.optimizer, table_gradients=config.optimizer.table_gradients)
        )
        if (choice := chosen(asked)) is not None:
            print(f"\n{choice.text}.")
        print("\n".join(details(best, args.gpus, hardware)))
    if args.plot is not None:
        from tools.plan.picture import save_picture

        save_picture(best, hardware, args.plot)
    return best


def _all(config: RunConfig, num_gpus: int, hardware: Hardware) -> list[Estimate]:
    """Every layout, the fastest first."""
    layouts, found = list(possible_layouts(config, num_gpus, hardware)), []
    with Progress("layout", total=len(layouts), leave=False) as progress:
        for layout in layouts:
            found += estimates_of(layout, num_gpus, hardware)
            progress.update(1)
    return sorted(found, key=lambda each: each.time.total_s)


def _remedy(config: RunConfig, num_gpus: int, hardware: Hardware) -> str:
    """Cheaper state of tables with which a layout fits, in words; empty if there is none."""
    if config.model.memory is None:
        return ""
    for keys in _REMEDIES:
        optimizer = replace(config.optimizer, value_offload="none", **keys)
        if optimizer == config.optimizer:
            continue
        best = recommended(_all(replace(config, optimizer=optimizer), num_gpus, hardware), hardware)
        if best is not None:
            said = " ".join(f"optimizer.{key}={value}" for key, value in keys.items())
            return f". It fits with {said}, which takes {best.peak_bytes / 1e9:,.1f} GB (docs/memory-parallel.md)"
    return ""


def _smallest(found: list[Estimate]) -> Estimate:
    return min(found, key=lambda each: each.peak_bytes)


def _write(source: RunSource, args: argparse.Namespace, hardware: Hardware) -> int:
    """A configuration that `train` and `submit` take: CONFIG as its base, and the keys of the recommended layouts.

    For a run of stages, whose list a file replaces whole, it has all entries again, each with the layout of its own.
    """
    layouts = []
    for config in source.stages():
        if config.stage is not None and not args.json:
            print(f"Stage {config.stage.name}\n")
        layouts.append(_sections(_plan(config, args, hardware)))
    tree: dict[str, Any] = {"base": os.path.relpath(Path(args.config).resolve(), args.write.resolve().parent)}
    tree |= to_plain(apply_overrides(from_plain({}, "overrides", Layer.OVERRIDE), args.overrides))
    listed = find(source.tree, [STAGES_KEY])
    if listed is None:
        _put(layouts[0], tree)
    else:
        entries = to_plain(listed)
        for entry, layout in zip(entries, layouts, strict=True):
            _put(layout, entry)
        tree["stages"] = entries
    words = ["megamem", "plan", args.config, *args.overrides, "--gpus", str(args.gpus), "--gpu", args.gpu]
    said = f"# For {args.gpus} GPU{'s' * (args.gpus > 1)}: {shlex.join([*words, '--write', str(args.write)])}\n"
    with atomic_write(args.write) as stream:
        stream.write((said + dump_yaml(tree)).encode())
    for config in load_stages(args.write):
        validate(replace(config, train=replace(config.train, kernels="auto")), args.gpus)
    return 0


def _put(layout: dict[str, dict[str, Any]], tree: dict[str, Any]) -> None:
    """Set the keys of a layout in the sections of a tree, in place."""
    for section, keys in layout.items():
        tree[section] = {**tree.get(section, {}), **keys}


def _sections(best: Estimate) -> dict[str, dict[str, Any]]:
    """The keys of a layout by their sections."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in best.overrides.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    return tree
