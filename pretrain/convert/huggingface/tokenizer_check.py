"""An exported folder's tokenizer as transformers reads it, beside the one that the model was trained with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from pretrain.convert.huggingface.tokenizer_files import BYTE_EOD
from pretrain.data.conversations import rendered_exchanges
from pretrain.data.tokenizer import HuggingFaceTokenizer, Tokenizer

_TEXTS = (
    "The memory reads a few rows.  Two spaces, \ta tab, a line\nand a\r\nline of Windows'.\n\n\nThree lines",
    " leading and trailing ",
    "0123456789 3.14159 1,000,000 0xFF",
    "na\N{COMBINING DIAERESIS}ıve cafe\N{COMBINING ACUTE ACCENT} and café, ﬁne, ½, ＡＢＣ, 日本語, عربى, ไทย",
    "👩‍🚀 🇪🇺 \N{NO-BREAK SPACE}\N{ZERO WIDTH SPACE}\N{SOFT HYPHEN}",
    "def f(x):\n    return {'a': x[0]}  # don't, we'll, it's\n",
    "<think>one</think><|im_start|>user\ntwo<|im_end|><s>[INST] three [/INST]</s><|endoftext|>",
)


def _as_transformers_reads(folder: Path) -> Any:
    """The folder's tokenizer. That the model's own type needs code, which is not looked at, is no news: nothing warns of it."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    finally:
        logging.set_verbosity(verbosity)


def tokenizer_difference(folder: Path, tokenizer: Tokenizer) -> str | None:
    """A text that transformers reads from a folder as other ids than training did, in a sentence; None: it reads all alike.

    transformers puts a class of its own in place of some models' `tokenizer.json`, by the model's type alone: another
    tokenizer is then split as theirs is.

    Args:
        folder: exported, complete.
        tokenizer: the one of training.
    """
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed here: whether it reads the tokenizer as training did was not looked at"
    # Never code of a folder: a tokenizer of ours has none.
    read = _as_transformers_reads(folder)
    for text in [*_TEXTS, *_added_tokens(tokenizer)]:
        # The end of a document is one id there, in training it was text.
        text = text.replace(tokenizer.eod_token or BYTE_EOD, "")
        theirs, ours = read.encode(text, add_special_tokens=False), tokenizer.tokenize(text)
        if theirs != ours:
            place = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
            return (
                f"transformers reads the tokenizer of {folder} as {type(read).__name__}, and another way than training did: "
                f"{text[:40]!r} is {_shown(theirs[place:])} there and was {_shown(ours[place:])}. Texts have to be made "
                f"token ids by {folder / 'tokenizer.json'} itself, as in "
                "PreTrainedTokenizerFast(tokenizer_file=...), and given as ids"
            )
    if isinstance(tokenizer, HuggingFaceTokenizer) and (exchanged := rendered_exchanges(tokenizer)) is not None:
        messages, text = exchanged
        theirs, ours = read.apply_chat_template(messages, return_dict=True)["input_ids"], tokenizer.tokenize(text)
        if theirs != ours:
            return (
                f"transformers makes other ids of a conversation by the chat template of {folder} than training did: "
                f"{_shown(theirs)} for {_shown(ours)}"
            )
    return None


def _added_tokens(tokenizer: Tokenizer) -> list[str]:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return []
    return [f"a{token}b {token}" for token in tokenizer.added_tokens]


def _shown(ids: list[int]) -> str:
    return f"{' '.join(map(str, ids[:6]))}{' ...' if len(ids) > 6 else ''}"
