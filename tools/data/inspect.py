"""`megamem data inspect` and `verify`: prepared data sets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import DataError
from pretrain.printable import printable
from tools.common.parsers import add_command
from tools.common.words import plural

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pretrain.data.manifest import PreparedDataset
    from pretrain.data.tokenizer import Tokenizer

_SCORED = "«»"
"""Brackets around scored parts of a document."""

_INSPECT_EPILOG = """\
examples:
  megamem data inspect data/stdlib
  megamem data inspect data/stdlib --verify
  megamem data inspect data/stdlib --documents 2 --split validation
"""

_VERIFY_EPILOG = """\
examples:
  megamem data verify data/stdlib data/web

Training looks at the sizes and headers of its data sets' files when it starts. This reads all of them.
"""


def add_inspect(commands: Any) -> None:
    """Adds `inspect` to the commands of `megamem data`."""
    parser = add_command(commands, "inspect", "show what a prepared data set holds, and check it", _INSPECT_EPILOG)
    parser.add_argument("path", type=Path, metavar="DIR", help="prepared data set")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare with the hashes of the manifest"
    )
    parser.add_argument(
        "--documents", type=int, default=0, metavar="N", help="print the beginning of the first N documents"
    )
    parser.add_argument(
        "--split", choices=("train", "validation"), default="train", help="split for --documents (default: train)"
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON instead of the summary")
    parser.set_defaults(func=run_inspect)


def add_verify(commands: Any) -> None:
    """Adds `verify` to the commands of `megamem data`."""
    parser = add_command(commands, "verify", "read every byte of data sets against its hash", _VERIFY_EPILOG)
    parser.add_argument("paths", type=Path, nargs="+", metavar="DIR", help="prepared data sets")
    parser.set_defaults(func=run_verify)


def run_inspect(args: argparse.Namespace) -> int:
    """`megamem data inspect`. Raises DataError."""
    from pretrain.data.manifest import open_dataset

    dataset = open_dataset(args.path)
    print(dataset.manifest.to_json().rstrip() if args.json else summary(dataset))
    if args.verify:
        dataset.verify()
        said = _verified(dataset)
        print(f"{said[0].upper()}{said[1:]}")
    if args.documents > 0:
        _print_documents(dataset, args.split, args.documents)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """`megamem data verify`: every data set, and then the first error. Raises DataError."""
    from pretrain.data.manifest import open_dataset

    errors = []
    for path in args.paths:
        try:
            dataset = open_dataset(path)
            dataset.verify()
            print(f"{path}: {_verified(dataset)}")
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError("\n".join(errors))
    return 0


def _verified(dataset: PreparedDataset) -> str:
    """Message about a data set in which nothing has changed."""
    from pretrain.data.manifest import MANIFEST_FILE

    said = "every byte is as it was written."
    if dataset.manifest.has_digest:
        return said
    return (
        f"{said[:-1]}, but for {MANIFEST_FILE}, which is from a version that wrote no digest: what it says of inputs, "
        "bytes of text and versions cannot be checked."
    )


def _print_documents(dataset: PreparedDataset, split: str, num_documents: int, num_tokens: int = 256) -> None:
    import numpy as np

    from pretrain.data.indexed_files import first_documents
    from pretrain.data.manifest import damaged
    from pretrain.data.scored import open_scored

    try:
        documents = first_documents(Path(dataset.prefix(split)), num_documents)
    except ValueError as error:
        raise damaged(dataset.path, f"{split}.idx cannot be used ({error})") from error
    starts = np.cumsum([0, *map(len, documents)])
    scoring = dataset.manifest.splits[split].scoring
    scored = None if scoring is None else open_scored(Path(dataset.prefix(split)), scoring, starts[:-1])
    for index, ids in enumerate(documents):
        flags = None if scored is None else scored.flags(starts[index], starts[index + 1])
        shown = "" if flags is None else f", {flags.sum()} of them scored: in {_SCORED[0]}{_SCORED[1]}"
        print(f"\n--- {split} document {index}: {len(ids)} tokens{shown} ---")
        text = _text_of(dataset.tokenizer, ids[:num_tokens], None if flags is None else flags[:num_tokens])
        print(text, end=" [...]\n" if len(ids) > num_tokens else "\n")


def _text_of(tokenizer: Tokenizer, ids: NDArray[Any], scored: NDArray[Any] | None) -> str:
    """Text of a document, in which scored parts stand in brackets."""
    from pretrain.data.scored import runs_of

    if scored is None:
        return tokenizer.detokenize(ids)
    # A token has no text of its own: that of some is the text of all up to them without the one before.
    whole, parts, written = tokenizer.decode_bytes(ids), [], 0
    for run in runs_of(scored):
        first, end = (len(tokenizer.decode_bytes(ids[:place])) for place in run)
        parts += [whole[written:first], _SCORED[0].encode(), whole[first:end], _SCORED[1].encode()]
        written = end
    return b"".join([*parts, whole[written:]]).decode("utf-8", errors="replace")


def summary(dataset: PreparedDataset) -> str:
    """Lines on what a data set was made of, what it holds, and what was left out."""
    manifest = dataset.manifest
    tokenizer = manifest.tokenizer
    end = "an id of their own" if tokenizer.eod_token is None else tokenizer.eod_token
    lines = [
        f"  inputs      {', '.join(manifest.sources['inputs'])} ({plural(manifest.sources['num_files'], 'file')})",
        f"  tokenizer   {tokenizer.kind}, {tokenizer.vocab_size} ids, documents end with {end} (id {tokenizer.eod})"
        + (", texts of special tokens are these" if tokenizer.special_tokens else ""),
    ]
    for name, split in manifest.splits.items():
        per_token = f" ({split.num_bytes / split.num_tokens:.2f} per token)" if split.num_tokens else ""
        lines.append(
            f"  {name:<11} {plural(split.num_documents, 'document')}, {plural(split.num_tokens, 'token')}, "
            f"{plural(split.num_bytes, 'byte')} of text{per_token}"
            + ("" if split.unscored is None else f"; scored are {plural(split.num_scored_tokens, 'token')} of answers")
        )
    if (messages := manifest.sources.get("messages")) is not None:
        lines.append(f"  messages    {messages['name']}, {_template(dataset)}")
    if repeated := manifest.sources.get("num_repeated"):
        lines.append(f"  repeated    {plural(repeated, 'document')} equal to one before")
    lines.append(f"  left out    {plural(manifest.num_empty, 'empty document')}, {manifest.num_skipped:,} bad")
    lines += [f"    {example}" for example in manifest.skipped_examples]
    # Inputs, ends of documents and what was left out are others' words.
    return "\n".join(map(printable, lines))


def _template(dataset: PreparedDataset) -> str:
    """Summary of what the chat template makes of conversations."""
    from pretrain.data.conversations import turn_end

    tokenizer = dataset.tokenizer
    end, eod = turn_end(tokenizer), tokenizer.eod
    marked = "" if tokenizer.chat is None or not tokenizer.chat.marks_generation else ", scored is its {% generation %}"
    return (
        f"by the chat template{marked}; the assistant's turns end with {tokenizer.name_of(eod if end is None else end)}"
    )
