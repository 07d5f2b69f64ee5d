"""The token that ends a document, as the files beside a `tokenizer.json` name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pretrain.data.tokenizer_limits import panics_refused
from pretrain.errors import DataError

PREPARED_FILES = ("manifest.json", "info.json")
"""Files beside the tokenizers of prepared data sets and of runs."""
SETTINGS_FILE = "tokenizer_config.json"
_MODEL_FILE = "config.json"


def named_end(definition: Path) -> str | None:
    """End-of-document token that the folder of a `tokenizer.json` names; None: it names none.

    A prepared data set and a run say with which token they were made, and Hugging Face's folders name the end of a
    sequence: a tokenizer as a token, older models as an id alone.

    Raises:
        DataError: a file that should name it cannot be read.
    """
    prepared, info = (read_object(definition.with_name(name)) for name in PREPARED_FILES)
    made_with = prepared.get("tokenizer") or info
    if isinstance(made_with, dict) and isinstance(made_with.get("eod_token"), str):
        return str(made_with["eod_token"])
    named = read_object(definition.with_name(SETTINGS_FILE)).get("eos_token")
    # Older files write a token with its options.
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else model_end(definition)


def model_end(definition: Path) -> str | None:
    """End-of-sequence token that the model beside a `tokenizer.json` names by its id; None: there is none.

    Raises:
        DataError: a file that should name it cannot be read.
    """
    wanted = read_object(definition.with_name(_MODEL_FILE)).get("eos_token_id")
    wanted = wanted[0] if isinstance(wanted, list) and wanted else wanted
    return None if wanted is None else _token_of(definition, wanted)


def read_object(path: Path) -> dict[str, Any]:
    """JSON object of a file; an empty one where there is no file, or something else in it.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): copy the folder again") from error
    return content if isinstance(content, dict) else {}


def _token_of(definition: Path, id: Any) -> str | None:
    from tokenizers import Tokenizer as Backend

    try:
        with panics_refused():
            vocabulary = Backend.from_file(str(definition)).get_vocab()
    except Exception:  # the package raises bare Exception, and whoever loads the definition says why
        return None
    return next((token for token, number in vocabulary.items() if number == id), None)
