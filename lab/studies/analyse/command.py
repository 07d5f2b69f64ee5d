"""`megamem analyse`: losses by token frequency, the weights of slots, single layers left out, contextual collapse, how
much the loss hangs on each head of attention, and the rows of n-grams."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.studies.analyse.measures import (
    MEASURES,
    Analysed,
    addressed_by_ngrams,
    deciles_of,
    of_families,
    weighs_slots,
)
from lab.studies.analyse.pages import table_and_page
from parallel.machine.atomic_write import atomic_write
from parallel.machine.devices import num_visible_gpus
from parallel.machine.refusals import check_can_write
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.validate import validate_layout
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, note_edited_config, saved_config
from tools.common.parsers import add_command
from tools.common.ranks import add_nproc, current_rank_is_first, fewest_ranks, run_on_ranks, started_world_size
from tools.evaluate import check_data

if TYPE_CHECKING:
    from lab.analysis.deciles import Deciles

_FREQUENCY_EPILOG = """\
examples:
  megamem study analyse frequency runs/dense runs/tide
  megamem study analyse frequency runs/large --own-layout --nproc 8

The kinds of tokens that come in the training data, without those that have no letter or digit, are sorted by how often
they come and cut into ten bins of equally many; among equally frequent ones the smaller id comes first. A held-out
token counts in its own bin. Runs must have the same tokenizer and training data; gains are over the first.
"""
_LAYERS_EPILOG = """\
examples:
  megamem study analyse layer-drop runs/tide

One layer's memory adds nothing, and all else stays; then the next one's.
"""
_ROUTING_EPILOG = """\
examples:
  megamem study analyse routing runs/tide

Mean weights over held-out tokens: of the router of TIDE, with its place for adding nothing; of the gates of MoVE and LaVE,
averaged over heads; of the gate of Engram. Tokens without a letter or digit are left out, and those that never come in training.
"""
_COLLAPSE_EPILOG = """\
examples:
  megamem study analyse collapse runs/dense runs/tide
  megamem study analyse collapse runs/tide --pairs their/there,1847/1851 --contexts 250

Two tokens stand after the same held-out contexts: how far apart are their hidden states, after each block? Without --pairs,
pairs of rare, middling and common tokens are drawn (bins 0-2, 3-6 and 7-9 of `megamem study analyse frequency`), and of
numbers.
"""
_HEADS_EPILOG = """\
examples:
  megamem study analyse heads runs/base runs/grown
  megamem study analyse heads runs/grown --nll mean
  megamem study analyse heads runs/large --own-layout --nproc 8

A head's importance is |sum over tokens of its output times the loss's gradient with respect to it|, averaged over
held-out windows: how steeply the loss rises or falls when the head's output grows. In inserted blocks of memory a
head's output is its query. The loss of a window is the sum (--nll sum) or the mean (--nll mean) over its predicted
tokens; for prompts and answers these are the answers' tokens. The file of figures has both.
"""
_NGRAMS_EPILOG = """\
examples:
  megamem study analyse ngrams runs/engram
  megamem study analyse ngrams runs/engram --tokens 100000000

The n-grams of the first --tokens tokens of the training data: how many different ones share a row, and how reads are
spread over rows. Gates over held-out tokens, by how often the longest n-gram that ends there comes in these tokens. And
the loss and the gates where every token reads the rows of another one.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `analyse` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "analyse", help="losses by token frequency, slots' weights, layers left out, collapse, heads, n-grams"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, "frequency", "losses by how often a token comes in training", _FREQUENCY_EPILOG, own_layout=True)
    _add(commands, "layer-drop", "the loss with each layer's memory left out", _LAYERS_EPILOG, own_layout=True)
    _add(commands, "routing", "how slots are weighed, by layer and by frequency", _ROUTING_EPILOG)
    heads = _add(commands, "heads", "how much the loss depends on each head", _HEADS_EPILOG, own_layout=True)
    heads.add_argument(
        "--nll",
        choices=("sum", "mean"),
        default="sum",
        help="loss of a window: sum or mean over its tokens (default: sum)",
    )
    ngrams = _add(commands, "ngrams", "rows of n-grams: hits, collisions, gates", _NGRAMS_EPILOG)
    ngrams.add_argument(
        "--tokens", type=_count, default=2**22, metavar="N", help="training tokens to count in (default: 4194304)"
    )
    collapse = _add(commands, "collapse", "how far apart two tokens' hidden states are", _COLLAPSE_EPILOG)
    collapse.add_argument("--pairs", metavar="U/V,U/V", help="words to compare, one token each (default: drawn)")
    collapse.add_argument(
        "--num-pairs", type=_count, default=20, metavar="N", help="drawn pairs of each kind (default: 20)"
    )
    collapse.add_argument("--contexts", type=_count, default=25, metavar="N", help="contexts of a pair (default: 25)")
    collapse.add_argument(
        "--context-tokens", type=_count, default=16, metavar="N", help="tokens of a context (default: 16)"
    )
    collapse.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the drawn pairs (default: 1)")


def _add(commands: Any, name: str, summary: str, epilog: str, *, own_layout: bool = False) -> argparse.ArgumentParser:
    parser = add_command(commands, name, summary, epilog)
    several = name in ("frequency", "collapse", "heads")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+" if several else 1, help="a run's folder")
    parser.add_argument("--name", default=name, help=f"name of the files in the run's folder (default: {name})")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest complete one)"
    )
    add_nproc(parser, "one per GPU, or 2" + (", or what --own-layout needs" if own_layout else ""))
    if own_layout:
        parser.add_argument("--own-layout", action="store_true", help="use the layout that each run was trained on")
    else:
        parser.set_defaults(own_layout=False)
    parser.set_defaults(func=partial(run_analysis, name))
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def run_analysis(name: str, args: argparse.Namespace) -> int:
    """Measures one run after the other, prints a table, and writes a page."""
    if len({path.resolve() for path in args.runs}) < len(args.runs):
        raise ConfigError("a run is named twice: leave one of them out")
    if len(args.runs) > 1 and started_world_size() is not None:
        raise ConfigError(
            "ranks that were started elsewhere look at one run: name one, or start the ranks with --nproc"
        )
    first: Deciles | None = None
    files: list[Path] = []
    page = args.runs[0] / f"{args.name}.html"
    for path in args.runs:
        folder = RunFolder(path)
        saved = find_checkpoint(folder, args.step)
        config = saved_config(saved, None if args.own_layout else ParallelConfig())
        note_edited_config(folder, saved)
        if name in ("layer-drop", "routing", "ngrams"):
            _check_memory(name, config, path)
        if name == "heads" and config.parallel.pipeline > 1:
            raise ConfigError(
                f"{path} was trained with parallel.pipeline {config.parallel.pipeline}, and gradients by head are taken "
                "without a pipeline: leave --own-layout out, or convert the checkpoint to a layout without one "
                "(megamem checkpoint convert)"
            )
        by_default = fewest_ranks(config.parallel) if args.own_layout else num_visible_gpus() or 2
        num_ranks = started_world_size() or args.nproc or by_default
        validate_layout(config, num_ranks)
        check_data(config, folder, saved, moved=False)
        deciles = deciles_of(config)
        if first is not None and deciles.bin_of.tolist() != first.bin_of.tolist():
            raise ConfigError(
                f"{path} and {args.runs[0]} have other tokenizers or training data, and so other bins: look at them apart"
            )
        first = deciles
        files.append(path / f"{args.name}.json")
        for file in (files[-1], *([page] if path == args.runs[0] else ())):
            check_can_write(file)
        analysed = Analysed(config, folder, saved.path, deciles, args, files[-1])
        if code := run_on_ranks(partial(MEASURES[name], analysed), num_ranks):
            return code
    if current_rank_is_first():
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        table, text = table_and_page(name, found)
        print(table, flush=True)
        with atomic_write(page) as stream:
            stream.write(text.encode())
        print(f"\nfigures: {', '.join(map(str, files))}\npage: {page}", flush=True)
    return 0


def _check_memory(name: str, config: RunConfig, path: Path) -> None:
    memories = config.model.memories
    if not memories:
        raise ConfigError(f"{path} is a model without memory, of which `megamem analyse {name}` has nothing to say")
    kinds = config.model.memory_kinds
    if name == "ngrams" and not of_families(config.model, addressed_by_ngrams):
        raise ConfigError(
            f"{path} has a memory of kind {kinds}, whose rows no n-gram addresses: `megamem analyse ngrams` is for "
            "memories of n-grams (docs/engram.md)"
        )
    if name == "routing" and not of_families(config.model, weighs_slots):
        raise ConfigError(
            f"{path} has a memory of kind {kinds}, whose rows are retrieved: `megamem plot` shows how evenly they are "
            "read; routing is for memories whose slots every token weighs (docs/token-tables.md)"
        )
