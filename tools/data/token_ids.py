"""`megamem data tokenizer` and `compress`: what ids there are, and which of them are one to a hash."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pretrain.errors import DataError
from pretrain.printable import printable
from tools.common.parsers import add_command
from tools.common.words import plural
from tools.data.inputs import add_input_arguments, reads_as_text

_TOKENIZER_EPILOG = """\
examples:
  megamem data tokenizer python-stdlib --vocab-size 4096 --output data/stdlib-4096.json
  megamem data prepare python-stdlib --tokenizer data/stdlib-4096.json --output data/stdlib-4096
"""

_COMPRESS_EPILOG = """\
examples:
  megamem data compress data/stdlib-4096.json --output data/stdlib-4096-map.npy

Ids whose texts differ in case, accents, compatibility forms of Unicode or spaces alone become one. The map is for
`model.memory.token_map` of memories of kind engram; a run keeps it in its checkpoints.
"""


def add_tokenizer(commands: Any) -> None:
    """Adds `tokenizer` to the commands of `megamem data`."""
    parser = add_command(commands, "tokenizer", "train a byte-level BPE tokenizer on documents", _TOKENIZER_EPILOG)
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="tokenizer.json to write")
    parser.add_argument(
        "--vocab-size",
        required=True,
        type=int,
        metavar="N",
        help="ids, with the 256 bytes and <|endoftext|> among them (257 or more)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    parser.set_defaults(func=run_tokenizer)


def add_compress(commands: Any) -> None:
    """Adds `compress` to the commands of `megamem data`."""
    parser = add_command(
        commands, "compress", "map a tokenizer's ids to fewer, for hashes of n-grams", _COMPRESS_EPILOG
    )
    parser.add_argument(
        "tokenizer", metavar="SPEC", help="a tokenizer.json, a folder that holds one (a prepared data set), or bytes"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".npy to write: an id per token id")
    parser.set_defaults(func=run_compress)


def run_tokenizer(args: argparse.Namespace) -> int:
    """`megamem data tokenizer`. Raises DataError."""
    from pretrain.data.files import list_files
    from pretrain.data.sources import BadDocumentLog, read_documents
    from pretrain.data.tokenizer import train_bpe

    if args.output.exists() and not args.overwrite:
        raise DataError(f"{args.output} exists. Choose another --output, or pass --overwrite to replace it.")
    bad_documents = BadDocumentLog(args.max_bad)
    as_text = reads_as_text(args)
    total_bytes = sum(file.size_bytes for file in list_files(args.inputs, as_text=as_text))
    documents = read_documents(args.inputs, field_name=args.field, as_text=as_text, bad_documents=bad_documents)
    tokenizer = train_bpe(documents, args.vocab_size, args.output, total_bytes=total_bytes)
    print(
        f"Wrote {args.output}: {tokenizer.vocab_size} ids, documents end with {tokenizer.eod_token} (id "
        f"{tokenizer.eod})."
    )
    if tokenizer.vocab_size < args.vocab_size:
        print(f"The documents have no more pairs to merge: {args.vocab_size} ids were asked for.")
    if bad_documents.num_bad:
        print(f"Skipped {plural(bad_documents.num_bad, 'bad document')}:")
        print("\n".join(f"  {printable(example)}" for example in bad_documents.examples))
    return 0


def run_compress(args: argparse.Namespace) -> int:
    """`megamem data compress`. Raises DataError."""
    from pretrain.data.compression import write_token_map
    from pretrain.data.tokenizer import load_tokenizer

    mapped = write_token_map(load_tokenizer(args.tokenizer), args.output)
    fewer = int(mapped.max()) + 1
    print(
        f"Wrote {args.output}: {len(mapped)} ids become {fewer}, {1 - fewer / len(mapped):.2%} fewer. Train with "
        f"model.memory.token_map={args.output} model.memory.compressed_vocab_size={fewer}"
    )
    return 0
