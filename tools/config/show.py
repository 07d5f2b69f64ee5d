"""`megamem config show`: a configuration in full, or every key."""

from __future__ import annotations

import argparse
from typing import Any

from pretrain.config.loader import to_yaml
from pretrain.config.source import dump_yaml
from pretrain.config.stages import read_run, stage_called, to_entries
from pretrain.errors import ConfigError
from tools.config.explained import explained_lines, key_lines
from tools.config.sections import Section, extra_sections
from tools.parsers import add_config, add_stage
from tools.stages import stage_chart, stage_table


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
    stages = read_run(args.config, args.overrides, args.stage).stages()
    config = stages[0] if args.stage is None else stage_called(stages, args.stage)
    if args.explain and args.stage is None and config.stage is not None:
        raise ConfigError("--explain goes through one configuration, and this run has stages: add --stage NAME")
    if args.layers is not None and config.model.memory is None:
        raise ConfigError(f"--layers has no effect: {args.config} has no memory. Leave it out, or set model.memory")
    # Before anything is printed: they may find that the configuration cannot be initialised.
    sections = extra_sections(config, args.layers or 0)
    if config.stage is not None and args.stage is None:
        sections.insert(0, Section("stages", (*stage_table(stages), "", *stage_chart(stages))))
        print(dump_yaml(to_entries(stages)).rstrip())
    else:
        print("\n".join(explained_lines(config)) if args.explain else to_yaml(config).rstrip())
    for section in sections:
        lines = (f"# {line}".rstrip() for line in (f"{section.title}:", *(f"  {line}" for line in section.lines)))
        print("\n" + "\n".join(lines))
    return 0
