"""Models of SentencePiece, which hold a tokenizer in another format than `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path

from pretrain.errors import DataError

_ENDINGS = (".model", ".spm")


def refuse_sentencepiece(path: Path, wanted: str) -> None:
    """Refuse a model of SentencePiece, and a folder that has one and no `wanted` file, with the way to convert it.

    Raises:
        DataError: the path is such a model or folder.
    """
    found = [path] if path.suffix in _ENDINGS and path.is_file() else []
    if path.is_dir() and not (path / wanted).is_file():
        found = sorted(each for each in path.iterdir() if each.suffix in _ENDINGS)
    if found:
        raise DataError(
            f"{found[0]}: a model of SentencePiece, and a {wanted} is read. transformers makes one of a model's folder, "
            "which has tokenizer_config.json beside it (pip install transformers sentencepiece protobuf; "
            f"AutoTokenizer.from_pretrained('{found[0].parent}').save_pretrained('OUT')): name OUT."
        )
