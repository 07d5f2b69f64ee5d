"""Limits on what a `tokenizer.json` asks for: how much longer it makes texts, how large its ids are, and panics.

The package that runs it is in Rust, and takes a definition at its word. What it cannot do ends in a panic, which Python
sees as no `Exception`, after a page of its stack for each text.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from pretrain.errors import DataError

# Rules for seven umlauts of two letters each come to 128.
MAX_GROWTH = 512
_MAX_ID = 2**31 - 2
_HAS_MEMORY_FILES = hasattr(os, "memfd_create")


def check_limits(definition: Mapping[str, Any], largest_id: int, origin: str) -> None:
    """Refuse a definition that would exhaust memory.

    Args:
        definition: the content of a `tokenizer.json`.
        largest_id: largest id that a text may become.
        origin: source of the definition, for messages.

    Raises:
        DataError: the definition makes texts far longer, or an id is larger than data sets can hold.
    """
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := _growth(definition.get(part))) > MAX_GROWTH:
            raise DataError(
                f"{origin}: its {part} may make a text {growth:,} times as long, and {MAX_GROWTH} is the most: take "
                "another tokenizer, or mend what it puts in place of characters."
            )
    if largest_id > _MAX_ID:
        raise DataError(
            f"{origin}: its largest id is {largest_id}, and ids are at most {_MAX_ID}: number its tokens from 0 on."
        )


def _growth(step: Any) -> int:
    """Bound on the characters that a step, or a sequence of them, makes of one."""
    if not isinstance(step, Mapping):
        return 1
    growth = 1
    for steps in ("normalizers", "pretokenizers", "decoders"):
        for inner in step.get(steps) or ():
            growth *= _growth(inner)
    written = [step.get(key) for key in ("content", "prepend", "replacement")]
    return growth * max([1, *(len(text) for text in written if isinstance(text, str))])


def has_expressions(part: Any) -> bool:
    """Tell whether a part of a definition has regular expressions, which panic where they try too many ways."""
    if isinstance(part, Mapping):
        return "Regex" in part or any(map(has_expressions, part.values()))
    return isinstance(part, list) and any(map(has_expressions, part))


@contextmanager
def panics_refused() -> Iterator[None]:
    """Turn a panic into an error, and keep what Rust writes of it on stderr.

    Raises:
        DataError: Rust has panicked.
    """
    with _stderr_into_file() as written:
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            if written is not None:
                written.truncate(0)
            raise DataError(
                f"The tokenizer cannot take a text ({str(error)[:200]}). A regular expression of its tokenizer.json that "
                "tries too many ways does so: take another tokenizer, or mend the expression."
            ) from None


@contextmanager
def _stderr_into_file() -> Iterator[BinaryIO | None]:
    """Have everything that is written to stderr at the end; None: that is not possible here."""
    try:
        terminal = os.dup(2)
    except OSError:
        yield None
        return
    try:
        with os.fdopen(os.memfd_create("stderr"), "w+b") if _HAS_MEMORY_FILES else tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield file
            finally:
                os.dup2(terminal, 2)
                file.seek(0)
                with suppress(OSError):
                    os.write(terminal, file.read())
    finally:
        os.close(terminal)
