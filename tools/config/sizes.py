"""`megamem config sizes`: models and trainings that sizes stand for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from pretrain.config.size import Given, run_of, shape_of
from pretrain.config.sized import read_size
from pretrain.config.source import Layer, Node
from tools.parameter_table import markdown_table

_SIZES = ("30m", "120m", "350m", "1.3b", "7b")
_HEADER = (
    "`model.size`",
    "parameters",
    "blocks",
    "width",
    "heads",
    "key/value heads",
    "feed-forward",
    "sequences per step",
    "steps",
    "`lr`",
    "warm-up",
)


def add_sizes(actions: Any) -> None:
    """Adds `sizes` to the actions of `megamem config`."""
    sizes = actions.add_parser(
        "sizes",
        help="print what values of model.size stand for, as Markdown",
        description="Print a Markdown table of the models and trainings that values of model.size stand for, where "
        "nothing else is set.",
    )
    sizes.add_argument(
        "sizes", metavar="SIZE", nargs="*", default=_SIZES, help=f"as in 120m or d12 (default: {' '.join(_SIZES)})"
    )
    sizes.set_defaults(func=run_sizes)


def run_sizes(args: argparse.Namespace) -> int:
    """Prints the table."""
    print(size_table(args.sizes))
    return 0


def size_table(texts: Sequence[str]) -> str:
    """A row for each size.

    Raises:
        ConfigError: a size cannot be read, or is out of the rules' reach.
    """
    return markdown_table(_HEADER, [list(_row(text)) for text in texts])


def _row(text: str) -> Iterator[str]:
    size = read_size(Node(text, f"the argument {text}", Layer.OVERRIDE))
    shape = shape_of(size, Given())
    run = run_of(shape, Given())
    yield size.text
    yield f"{shape.parameters / 1e6:,.1f}M"
    widths = (shape.hidden_size, shape.num_attention_heads, shape.num_query_groups, shape.ffn_hidden_size)
    yield from (f"{count:,}" for count in (shape.num_layers, *widths, run.global_batch_size, run.num_steps))
    yield f"{run.lr:g}"
    yield f"{run.warmup_steps:,}"
