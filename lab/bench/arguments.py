"""Arguments that several of the benchmarks have."""

from __future__ import annotations

import argparse

from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_stage
from pretrain.errors import ConfigError
from tools.common.parsers import add_stage
from tools.common.vocabulary import with_vocabulary


def add_configs(parser: argparse.ArgumentParser) -> None:
    """Adds what `load_configs` reads; overrides that come after the options end up in `overrides`."""
    parser.add_argument("configs", metavar="CONFIG", nargs="+", help="YAML files; then key=value overrides")
    parser.set_defaults(overrides=[])
    add_stage(parser)
    add_vary(parser)
    add_rounds(parser)
    add_vocabulary(parser)


def add_vary(
    parser: argparse.ArgumentParser,
    text: str = "measure each configuration with each of these values",
    *,
    is_needed: bool = False,
) -> None:
    """Adds what `variations` reads, with what is said of it."""
    parser.add_argument("--vary", metavar="KEY=A,B,...", required=is_needed, help=text)


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Adds how often each is measured."""
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="figures of each (default: 5)")


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Adds how long is trained for a figure."""
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps per figure (default: 2)")


def add_vocabulary(parser: argparse.ArgumentParser) -> None:
    """Adds what `with_given_vocabulary` takes."""
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=4096,
        metavar="N",
        help="token ids where model.vocab_size is not set (default: 4096)",
    )


def numbers(text: str) -> list[int]:
    """The numbers of a list with commas, which are 1 or more."""
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of 1 or more, as in 1,2,4")
    return [int(part) for part in text.split(",")]


def with_given_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """Tokens are random: no tokenizer says how many there are."""
    if vocab_size < 1:
        raise ConfigError(f"--vocab-size is {vocab_size}: it must be at least 1")
    return with_vocabulary(config, vocab_size)


def load_configs(args: argparse.Namespace) -> dict[str, RunConfig]:
    """The configurations by name, with overrides and with each value of `--vary`."""
    overrides = [*(word for word in args.configs if "=" in word), *args.overrides]
    paths = [word for word in args.configs if "=" not in word]
    if not paths or args.rounds < 1:
        raise ConfigError("nothing to measure: name at least one CONFIG, and use --rounds of at least 1")
    configs = {}
    for path in paths:
        for change in variations(args.vary):
            config = load_stage(path, [*overrides, *change], args.stage)
            configs[" ".join((path, *change))] = with_given_vocabulary(config, args.vocab_size)
    return configs


def variations(vary: str | None) -> list[list[str]]:
    """The overrides of each value of `--vary`; none, once, without it."""
    if vary is None:
        return [[]]
    key, separator, values = vary.partition("=")
    if not separator or not all(values.split(",")):
        raise ConfigError(f"--vary is {vary}: write a key and its values, as in parallel.memory=1,2,4")
    return [[f"{key}={value}"] for value in values.split(",")]
