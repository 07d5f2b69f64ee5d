"""Small data sets, prepared for tests."""

from __future__ import annotations

import json
from pathlib import Path

from pretrain.data.prepare import PreparationResult, prepare
from pretrain.data.tokenizer import ByteTokenizer


def corpus(path: Path, num_documents: int = 40) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"document {i} says {i * i}. " * (i % 7 + 1)}) + "\n" for i in range(num_documents))
    )
    return path


def run(source: Path | str, output: Path, **options) -> PreparationResult:
    options = {"num_workers": 1, "validation_fraction": 0.2} | options
    return prepare([str(source)], output, options.pop("tokenizer", ByteTokenizer()), **options)
