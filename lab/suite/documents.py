"""Documents of the tasks, to train on: the training twin of what is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from random import Random

from lab.facts import write_documents
from lab.suite.texts import Filler, Writer
from pretrain.data.manifest import MANIFEST_FILE, TRAIN, PreparedDataset, open_dataset
from pretrain.data.prepare import prepare
from pretrain.errors import DataError


def documents(writer: Writer, tasks: Sequence[str], lengths: Sequence[int], seed: int) -> Iterator[str]:
    """Without end, tasks and lengths in turn; what is asked in each, and at which depth, follows from the seed."""
    number = 0
    while True:
        for task, length in product(tasks, lengths):
            yield writer.document(task, length, Random(f"document {seed} {number}"))
            number += 1


def prepare_documents(
    source: Path,
    output: Path,
    tasks: Sequence[str],
    lengths: Sequence[int],
    num_documents: int,
    *,
    seed: int,
    overwrite: bool,
) -> PreparedDataset:
    """A data set of so many documents, filled with the training documents of another one, whose tokenizer it has.

    Raises:
        DataError: a source that does not open, an output that is taken.
        ConfigError: a length that is too short for a task.
    """
    filling = open_dataset(source)
    if (output / MANIFEST_FILE).exists() and not overwrite:
        raise DataError(f"{output} holds a data set. Choose another --output, or pass --overwrite to replace it.")
    writer = Writer(Filler([(filling, TRAIN)]))
    texts = output.with_name(f".{output.name}.jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_documents(texts, islice(documents(writer, tasks, lengths, seed), num_documents))
        return prepare([str(texts)], output, filling.tokenizer, overwrite=overwrite).dataset
    finally:
        texts.unlink(missing_ok=True)
