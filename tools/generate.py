"""`megamem generate`: text from a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config.layout_rules import layout_problems
from pretrain.config.loader import join_problems
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.errors import ConfigError
from pretrain.evaluation.sampling import Sampling
from pretrain.planning.counts.attention import cached_bytes_per_token, expanded_bytes
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, note_edited_config, saved_config
from pretrain.run.trained_data import tokenizer_of
from tools.common.given_text import text_in
from tools.common.pace import Pace
from tools.common.ranks import add_nproc, run_on_ranks, started_world_size
from tools.common.words import describe_size
from tools.tables import form_of, token_tables

if TYPE_CHECKING:
    from pretrain.data.tokenizer import Tokenizer

_EPILOG = """\
examples:
  megamem generate runs/quickstart --prompt 'def __init__(self'
  megamem generate runs/quickstart --prompt 'import os' --max-tokens 50 --temperature 0
  megamem generate runs/quickstart --prompt 'def ' --samples 3 --top-k 40 --stop $'\\n\\n'
  megamem generate runs/quickstart --prompt-file prompt.txt
  git log -1 --format=%B | megamem generate runs/quickstart --prompt-file -
  megamem generate runs/large --prompt 'import os' --nproc 8
  megamem generate runs/tide --prompt 'import os' --tables runs/tide-int4

--tables is for memories whose rows the token addresses (docs/token-tables.md): a folder that `megamem tables` made,
whose rows are read from its files, or a form (full, int8, int4, rank:R, cut:P) that is made in host memory.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `generate` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt with a trained model",
        description="Continue a prompt with a run's newest checkpoint, and print the text as it comes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", default="", metavar="TEXT", help="text to continue (default: the start of a document)"
    )
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the text to continue; - is standard input")
    parser.add_argument(
        "--max-tokens", type=int, default=200, metavar="N", help="the most tokens to generate (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="temperature of sampling; 0 takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="sample from the likeliest tokens whose probabilities add up to P (default: 0.95)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens (default: from all)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="texts to generate, with a seed each (default: 1)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed of sampling; further samples take the next seeds (default: 1)",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest complete one)"
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="pass the whole text through the model for every token, to compare (default: the new token alone)",
    )
    parser.add_argument(
        "--expand-values",
        action="store_true",
        help="compute every head's own values of all rows once, for memories whose heads expand rows (docs/upscale.md)",
    )
    parser.add_argument("--tables", metavar="DIR", help="read the memory's tables from here, see below")
    add_nproc(parser, "1", what="ranks to start here, over which the memory tables are split", default=1)
    parser.set_defaults(func=run_generate)


@dataclass(frozen=True)
class Request:
    """Texts to generate.

    Attributes:
        prompt: the text to continue.
        max_tokens: the most tokens of a sample.
        samplings: one per sample.
        stops: texts that end a sample, and are no part of it.
        tables: a folder or form that the memory's rows come from; None: they are part of the model.
        cached: attention remembers the text.
        expanded: heads' own values are made of all rows at the start.
    """

    prompt: str
    max_tokens: int
    samplings: Sequence[Sampling]
    stops: Sequence[str] = ()
    tables: str | None = None
    cached: bool = True
    expanded: bool = False


def run_generate(args: argparse.Namespace) -> int:
    """Prints the prompt and what follows it."""
    request = _request(args)
    folder = RunFolder(args.run)
    saved = find_checkpoint(folder, args.step)
    num_ranks = started_world_size() or args.nproc
    config = saved_config(saved, ParallelConfig(memory=num_ranks))
    note_edited_config(folder, saved)
    if request.tables is not None:
        form_of(request.tables, token_tables(config, "--tables"))
    problems = list(layout_problems(config, num_ranks))
    if request.expanded:
        problems += _expansion_problems(config, num_ranks)
    problems += [
        f"{section}.control is {memory.control}: the model was trained as a control, with rows of a microbatch that a text "
        "does not have; generate with the model that it was held against"
        for section, memory in config.model.families.items()
        if memory.control != "none"
    ]
    if config.model.moe is not None and num_ranks > 1:
        problems.append("model.moe is set, whose experts would be split too: generate on one rank")
    if problems:
        raise ConfigError(join_problems(problems))
    tokenizer = tokenizer_of(folder, saved)
    return run_on_ranks(lambda: generate_rank(config, tokenizer, saved.path, request), num_ranks)


def _expansion_problems(config: RunConfig, num_ranks: int) -> Iterator[str]:
    memory = config.model.memory
    if memory is None or not memory.expands_values:
        kind = "none" if memory is None else memory.kind
        yield f"--expand-values is set, but the model's memory is {kind}, whose heads expand no values: leave it out"
    elif num_ranks > 1:
        yield f"--expand-values is set, for which a rank needs whole tables: generate on one rank, not {num_ranks}"


def _request(args: argparse.Namespace) -> Request:
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}: ask for at least one")
    if args.samples < 1:
        raise ConfigError(f"--samples is {args.samples}: ask for at least one")
    if "" in args.stop:
        raise ConfigError("--stop is empty, and would end every text at once: leave it out")
    first = Sampling(args.temperature, args.top_p, args.seed, args.top_k)
    samplings = [replace(first, seed=first.seed + number) for number in range(args.samples)]
    prompt = args.prompt if args.prompt_file is None else text_in(args.prompt_file, "--prompt-file")
    return Request(prompt, args.max_tokens, samplings, args.stop, args.tables, not args.no_cache, args.expand_values)


def generate_rank(config: RunConfig, tokenizer: Tokenizer, checkpoint: Path, request: Request) -> None:
    """Generate on one rank. All of them get the same ids, and so end every sample at the same one."""
    from pretrain.data.streamed_text import streamed_text
    from pretrain.engine.session import session
    from pretrain.evaluation.generate import generate
    from pretrain.evaluation.restore import restore_model
    from pretrain.evaluation.stored_tables import open_tables

    with session(config) as groups:
        tables = None
        if request.tables is not None:
            tables = open_tables(request.tables, checkpoint, token_tables(config, "--tables"))
        (model,) = restore_model(config, checkpoint, tokenizer, groups, fetch_rows=tables)
        if request.expanded:
            for layer in model.memory_layers:
                layer.expand_values()
        ids = tokenizer.tokenize(request.prompt)
        write = _write if groups.is_main else _ignore
        # The end of the document before is in the context too.
        if groups.is_main and len(ids) >= config.train.sequence_length:
            print(
                f"note: the prompt has {len(ids):,} tokens, of which the model sees the last "
                f"{config.train.sequence_length:,} (train.sequence_length)",
                file=sys.stderr,
            )
        pace = Pace()
        for number, sampling in enumerate(request.samplings, start=1):
            if len(request.samplings) > 1:
                write(f"--- sample {number} of {len(request.samplings)} (seed {sampling.seed}) ---\n")
            write(request.prompt)
            generated = generate(
                model,
                ids,
                max_tokens=request.max_tokens,
                context_tokens=config.train.sequence_length,
                vocab_size=tokenizer.vocab_size,
                eod=tokenizer.eod,
                sampling=sampling,
                group=groups.megatron.ep,
                cached=request.cached,
            )
            timed = pace.of(generated, num_prompt=1 + len(ids), context_tokens=config.train.sequence_length)
            with closing(generated):
                for text in streamed_text(timed, tokenizer, prompt=ids, stops=request.stops):
                    write(text)
            write("\n")
        if groups.is_main and pace.spent:
            print(f"{pace.description()}; {_described_cache(config, request)}", file=sys.stderr)


def _described_cache(config: RunConfig, request: Request) -> str:
    model, element = config.model, config.train.element_bytes
    expanded = f"expanded values {describe_size(expanded_bytes(model, element))}; " if request.expanded else ""
    if not request.cached:
        return f"{expanded}no cache"
    return f"{expanded}cache {describe_size(cached_bytes_per_token(model, element))} per token"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    """Another rank writes it."""
