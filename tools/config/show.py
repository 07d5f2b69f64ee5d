"""`megamem config show`: a configuration in full, or every key."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pretrain.config.loader import to_yaml
from pretrain.config.source import STAGES_KEY, dump_yaml, find
from pretrain.config.stages import RunSource, read_run, stage_called, to_entries
from pretrain.errors import ConfigError
from pretrain.printable import printable
from tools.common.parsers import add_config, add_stage
from tools.common.stage_table import stage_chart, stage_table
from tools.config.explained import explained_lines, key_lines
from tools.config.sections import ConfigSection, extra_sections, size_section


def add_show(actions: Any) -> None:
    """Adds `show` to the actions of `megamem config`."""
    show = actions.add_parser(
        "show",
        help="print a configuration in full",
        description="Print a configuration with its bases, overrides and defaults resolved. The output is YAML that "
        "`megamem train` takes. Options that have no effect are left out.",
    )
    add_config(show, "YAML file (not needed with --keys)", is_needed=False)
    add_stage(show, "print one stage of a run of stages in full")
    show.add_argument("--explain", action="store_true", help="put the help text of each key above it")
    show.add_argument(
        "--origins", action="store_true", help="put behind each value the file and line that sets it, or the override"
    )
    show.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="also build so many memory layers, spread over the model, and measure their initial outputs: some seconds "
        "each (default: none)",
    )
    show.add_argument("--keys", action="store_true", help="list every key there is with type, default and help instead")
    show.set_defaults(func=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Prints the resolved configuration, or the list of keys."""
    if args.keys:
        if args.config is not None:
            raise ConfigError(
                f"--keys lists the keys of every configuration: leave {args.config} out, or use --explain"
            )
        print("\n".join(key_lines()))
        return 0
    if args.config is None:
        raise ConfigError("config show needs the path of a configuration, or --keys")
    if args.layers is not None and args.layers < 1:
        raise ConfigError(f"--layers is {args.layers}: it must be at least 1")
    source = read_run(args.config, args.overrides, args.stage)
    stages = source.stages()
    config = stages[0] if args.stage is None else stage_called(stages, args.stage)
    for option, is_set in (("--explain", args.explain), ("--origins", args.origins)):
        if is_set and args.stage is None and config.stage is not None:
            raise ConfigError(f"{option} goes through one configuration, and this run has stages: add --stage NAME")
    if args.layers is not None and config.model.memory is None:
        raise ConfigError(f"--layers has no effect: {args.config} has no memory. Leave it out, or set model.memory")
    # Before anything is printed: they may find that the configuration cannot be initialised.
    sections = extra_sections(config, args.layers or 0)
    if source.filled is not None:
        sections.insert(0, size_section(source.filled))
    if config.stage is not None and args.stage is None:
        sections.insert(0, ConfigSection("stages", (*stage_table(stages), "", *stage_chart(stages))))
        print(dump_yaml(to_entries(stages)).rstrip())
    elif args.explain or args.origins:
        origin = _origins(source, args.stage) if args.origins else None
        print("\n".join(explained_lines(config, helps=args.explain, origin=origin)))
    else:
        print(to_yaml(config).rstrip())
    for section in sections:
        lines = (f"# {line}".rstrip() for line in (f"{section.title}:", *(f"  {line}" for line in section.lines)))
        print("\n" + "\n".join(lines))
    return 0


def _origins(source: RunSource, stage: str | None) -> Callable[[str], str]:
    """Tells the place at which a key is set: in the entry of a stage, or in the run's sections."""
    listed = find(source.tree, [STAGES_KEY])
    entries = listed.value if listed is not None and isinstance(listed.value, list) else []
    named = [each for each in entries if stage is not None and (at := find(each, ["name"])) and at.value == stage]

    def origin(key: str) -> str:
        if named and (key.startswith("stage.") or key == "train.num_steps"):
            # They follow from the entry's length, and those of the entries before it.
            return printable(named[0].origin)
        found = (find(tree, key.split(".")) for tree in (*named, source.tree))
        return printable(next((at.origin for at in found if at is not None), "default"))

    return origin
