"""`megamem generate`: text from a trained model."""

from __future__ import annotations

import argparse
import codecs
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.errors import ConfigError
from pretrain.folder import RunFolder
from tools.ranks import add_nproc, run_on_ranks, started_world_size

if TYPE_CHECKING:
    from pretrain.data.tokenizer import Tokenizer

_EPILOG = """\
examples:
  megamem generate runs/quickstart --prompt 'def __init__(self'
  megamem generate runs/quickstart --prompt 'import os' --max-tokens 50 --temperature 0
  megamem generate runs/large --prompt 'import os' --nproc 8
"""


def add_parser(subparsers: Any) -> None:
    """Adds `generate` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "generate",
        help="text from a trained model",
        description="Continue a prompt with a run's newest checkpoint, and print the text as it comes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="text to continue (default: the start of a document)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=200, metavar="N", help="the most tokens to generate (default: 200)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="sample from the likeliest tokens of this probability (default: 0.95)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the sampling (default: 1)")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest complete one)"
    )
    add_nproc(parser, "1", what="ranks to start here, over which the memory tables are split", default=1)
    parser.set_defaults(func=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Prints the prompt and what follows it."""
    from pretrain.config.layout_rules import layout_problems
    from pretrain.config.parse import join_problems
    from pretrain.generate import Sampling
    from pretrain.restore import find_checkpoint, saved_config

    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}: ask for at least one")
    sampling = Sampling(args.temperature, args.top_p, args.seed)
    folder = RunFolder(args.run)
    saved = find_checkpoint(folder, args.step)
    num_ranks = started_world_size() or args.nproc
    config = saved_config(saved, ParallelConfig(memory=num_ranks))
    problems = list(layout_problems(config, num_ranks))
    if config.model.moe is not None and num_ranks > 1:
        problems.append("model.moe is set, whose experts would be split too: generate on one rank")
    if problems:
        raise ConfigError(join_problems(problems))
    return run_on_ranks(
        lambda: generate_rank(config, folder.tokenizer, saved.path, args.prompt, args.max_tokens, sampling), num_ranks
    )


def generate_rank(
    config: RunConfig, tokenizer_folder: Path, checkpoint: Path, prompt: str, max_tokens: int, sampling: Any
) -> None:
    """What one rank does."""
    from pretrain.data.manifest import open_saved_tokenizer
    from pretrain.generate import generate
    from pretrain.restore import restore_model
    from pretrain.session import session

    with session(config) as groups:
        tokenizer = open_saved_tokenizer(tokenizer_folder)
        (model,) = restore_model(config, checkpoint, tokenizer, groups)
        ids = generate(
            model,
            tokenizer.tokenize(prompt),
            max_tokens=max_tokens,
            context_tokens=config.train.sequence_length,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            sampling=sampling,
            group=groups.megatron.ep,
        )
        if groups.is_main:
            _print(prompt, tokenizer, ids)
        else:
            for _ in ids:
                pass


def _print(prompt: str, tokenizer: Tokenizer, ids: Iterator[int]) -> None:
    sys.stdout.write(prompt)
    # A character may be spread over several tokens: hold its first bytes back until the rest is there.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        sys.stdout.write(decoder.decode(tokenizer.decode_bytes([token])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    sys.stdout.flush()
