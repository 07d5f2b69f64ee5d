"""Tokenizers that ask for more than there is, that panic, or that are of another format: an error of one paragraph."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pretrain.data import tokenizer_limits
from pretrain.data.tokenizer import load_tokenizer
from pretrain.data.tokenizer_limits import panics_refused
from pretrain.errors import DataError

BACKTRACKING = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$|(a|aa)+$"},
    "behavior": "Isolated",
    "invert": False,
}


def replacing(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def written(path: Path, *, largest_id: int = 3, **parts: Any) -> Path:
    """A `tokenizer.json` of four tokens."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "\N{LATIN SMALL LETTER E WITH ACUTE}": 2, "</s>": largest_id}}
    none = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    path.write_text(json.dumps({"version": "1.0", **none, **parts, "model": {**model, "merges": []}}))
    return path


def test_a_normaliser_that_writes_a_megabyte_per_letter_is_refused(tmp_path: Path) -> None:
    for growing in (
        replacing("b", "a" * 2**20),
        {"type": "Prepend", "prepend": "a" * 2**20},
        {"type": "Sequence", "normalizers": [replacing("a", "aa")] * 40},
    ):
        path = written(tmp_path / "tokenizer.json", normalizer=growing)
        with pytest.raises(DataError, match=r"tokenizer\.json: its normalizer may make a text [\d,]+ times as long"):
            load_tokenizer(path)
    with pytest.raises(DataError, match="its decoder may make"):
        load_tokenizer(written(tmp_path / "tokenizer.json", decoder=replacing("b", "a" * 2**20)))
    umlauts = [replacing(letter, "ab") for letter in "\u00e4\u00f6\u00fc\u00df\u00c4\u00d6\u00dc"]
    usual = written(tmp_path / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": umlauts})
    assert load_tokenizer(usual).tokenize("a\u00e4") == [0, 0, 1]


@pytest.mark.parametrize("largest_id", [2**31 - 1, 2**32 - 1])
def test_ids_that_data_sets_cannot_hold_are_refused(tmp_path: Path, largest_id: int) -> None:
    path = written(tmp_path / "tokenizer.json", largest_id=largest_id)
    with pytest.raises(DataError, match=f"its largest id is {largest_id}, and ids are at most 2147483646"):
        load_tokenizer(path)
    assert load_tokenizer(written(path, largest_id=2**31 - 2)).vocab_size == 2**31 - 1


def test_an_expression_that_tries_too_many_ways_is_one_paragraph(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(written(tmp_path / "tokenizer.json", pre_tokenizer=BACKTRACKING))
    assert tokenizer.tokenize("aab") == [0, 0, 1]
    with pytest.raises(DataError, match=r"The tokenizer cannot take a text .*retry-limit-in-match over"):
        tokenizer.tokenize_batch(["a" * 60 + "b"] * 3)
    assert capfd.readouterr().err == ""


def test_a_decoder_whose_expression_tries_too_many_ways_is_one_paragraph(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    replaced = {"type": "Replace", "pattern": {"Regex": "(a|a)*$"}, "content": "x"}
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}, replaced]}
    tokenizer = load_tokenizer(written(tmp_path / "tokenizer.json", decoder=decoder))
    assert tokenizer.detokenize([1]) == "bx"
    with pytest.raises(DataError, match=r"The tokenizer cannot take a text .*retry-limit-in-match over"):
        tokenizer.detokenize([*[0] * 60, 1])
    assert capfd.readouterr().err == ""


def test_other_decoders_leave_stderr_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard would cost more than to decode a token does."""
    plain = load_tokenizer(written(tmp_path / "tokenizer.json", decoder=replacing("b", "B")))
    expressions = load_tokenizer(written(tmp_path / "tokenizer.json", pre_tokenizer=BACKTRACKING))
    # Whoever calls it fails.
    monkeypatch.setattr(tokenizer_limits, "_stderr_into_file", None)
    assert (plain.detokenize([1]), expressions.detokenize([0, 1])) == ("B", "a b")


def test_what_else_is_written_and_raised_meanwhile_stays(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with panics_refused():
            os.write(2, b"something else\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capfd.readouterr().err == "something else\n"


def test_models_of_sentencepiece_are_named_with_the_way_to_convert_them(tmp_path: Path) -> None:
    model = tmp_path / "sp.model"
    model.write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    for given in (model, tmp_path):
        with pytest.raises(DataError, match=r"sp\.model: a model of SentencePiece, .*save_pretrained\('OUT'\)"):
            load_tokenizer(given)
    written(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).tokenize("ab") == [0, 1]
