"""`megamem data`: prepare corpora, train tokenizers, look into prepared data sets."""

from __future__ import annotations

from typing import Any

from tools.data.inspect import add_inspect, add_verify
from tools.data.prepare import add_prepare
from tools.data.token_ids import add_compress, add_tokenizer


def add_parser(subparsers: Any) -> None:
    """Adds `data` to the commands of `megamem`."""
    parser = subparsers.add_parser("data", help="prepare corpora, train tokenizers, inspect data sets")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_prepare(commands)
    add_tokenizer(commands)
    add_compress(commands)
    add_inspect(commands)
    add_verify(commands)
