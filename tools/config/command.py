"""`megamem config`: look at a configuration, and at everything that could stand in one."""

from __future__ import annotations

import argparse
from typing import Any

from pretrain.config.stages import load_config
from tools.config.check import add_check
from tools.config.ffn_width import add_ffn_width
from tools.config.show import add_show
from tools.config.sizes import add_sizes
from tools.parameter_table import parameter_tables


def add_parser(subparsers: Any) -> None:
    """Adds `config` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "config",
        help="show or check a configuration",
        description="Look at a configuration as a run would see it, or at every key that there is.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_show(actions)
    add_check(actions)
    add_ffn_width(actions)
    add_sizes(actions)
    table = actions.add_parser(
        "table",
        help="print parameters and costs of configurations as Markdown",
        description="Print Markdown tables of parameters by part, operations and table reads per token, beside the "
        "figures of UltraMemV2's paper for the models that it has. docs/parameters.md holds the output for configs/.",
    )
    table.add_argument("configs", metavar="CONFIG", nargs="+", help="YAML files")
    table.set_defaults(func=run_table)


def run_table(args: argparse.Namespace) -> int:
    """Prints the tables."""
    print(parameter_tables([load_config(path) for path in args.configs]))
    return 0
