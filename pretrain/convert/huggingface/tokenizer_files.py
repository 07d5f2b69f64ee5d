"""Our tokenizers as files that transformers reads, and a folder's tokenizer as one of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pretrain.data.chat_template import TEMPLATE_FILE, read_chat_template
from pretrain.data.conversations import other_ends
from pretrain.data.named_end import SETTINGS_FILE, model_end
from pretrain.data.tokenizer import TOKENIZER_FILE, ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from pretrain.errors import DataError

BYTE_EOD = "<|endoftext|>"


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, sequence_length: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, where training had one, the chat template. Texts and
    conversations become the ids that they became in training.

    Text that reads as a special token is text, as it was in training, unless training took it for the token: the row of a
    token that no text ever became is a random one. One difference: text that reads as the end-of-document token is that
    token, for requests that begin a document.

    Args:
        tokenizer: bytes, or a `tokenizer.json`.
        folder: folder to write into.
        sequence_length: the longest that the model was trained on.
    """
    eod_token = tokenizer.eod_token or BYTE_EOD
    definition = _definition(tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_named_tokens(tokenizer, eod_token),
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / TOKENIZER_FILE).write_text(definition, encoding="utf-8")
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if tokenizer.chat is not None:
        (folder / TEMPLATE_FILE).write_text(tokenizer.chat.source, encoding="utf-8")


def _named_tokens(tokenizer: Tokenizer, eod_token: str) -> dict[str, str]:
    """Special tokens by name: the end of documents, but for those that the chat template names, which it had in training."""
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token"), eod_token)
    if tokenizer.chat is None:
        return named
    # One that it names and did not have stood for nothing.
    others = {name: token for name, token in named.items() if name not in tokenizer.chat.source}
    return others | dict(tokenizer.chat.special_tokens)


def _definition(tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        # These would be applied here, and training did not apply them: tokens at the beginning, truncation, padding.
        unused = {"post_processor": None, "truncation": None, "padding": None}
        definition = {**json.loads(tokenizer.definition), **unused}
        if not tokenizer.special_tokens:
            definition = _without(definition, set(tokenizer.markers))
        return json.dumps(definition, ensure_ascii=False, indent=2)
    assert isinstance(tokenizer, ByteTokenizer)
    return _bytes_definition()


def _without(definition: dict[str, Any], markers: set[str]) -> dict[str, Any]:
    """Definition in which no text becomes a marker, whose ids keep their names."""
    added = definition.get("added_tokens") or []
    kept, model = [token for token in added if token["content"] not in markers], definition["model"]
    if model.get("type") == "BPE":
        # No merge makes them, where other models would find them in texts. Those that are left, too: tokens beside the
        # vocabulary are numbered anew behind it.
        names = {token["content"]: token["id"] for token in added}
        model = {**model, "vocab": {**model["vocab"], **names}}
    return {**definition, "added_tokens": kept, "model": model}


def _bytes_definition() -> str:
    """Bytes as a byte-level BPE without merges."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab=_characters_of_bytes(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BYTE_EOD, special=True, normalized=False)])
    assert backend.token_to_id(BYTE_EOD) == ByteTokenizer.eod
    return backend.to_str(pretty=True)


def _characters_of_bytes() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes: printable ones stand for themselves, others for the
    characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return characters | {chr(256 + number): byte for number, byte in enumerate(others)}


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; documents end with its end-of-sequence token. Exported bytes are bytes.

    Text that reads as a special token is that token: the folder's model knows it. Beside a chat template the end is
    the model's, where its configuration names one. If the template writes it within conversations, which are documents, they
    end with another: the only one of a known name.

    Raises:
        DataError: the tokenizer is missing or cannot be used, or nothing says which token ends a text.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        raise DataError(
            f"{folder} has no {TOKENIZER_FILE}: load its tokenizer with transformers and save it there "
            "(`AutoTokenizer.from_pretrained(...).save_pretrained(...)`)"
        )
    read = load_tokenizer(folder / TOKENIZER_FILE)
    assert isinstance(read, HuggingFaceTokenizer)
    if json.loads(read.definition) == json.loads(_bytes_definition()):
        return ByteTokenizer()
    chat = read_chat_template(folder / TOKENIZER_FILE)
    if chat is not None:
        end = model_end(folder / TOKENIZER_FILE) or read.eod_token
        ends = other_ends(HuggingFaceTokenizer(read.definition, end, special_tokens=True, chat=chat))
        end = end if ends is None or len(ends) != 1 else ends[0]
        read = HuggingFaceTokenizer(read.definition, end)
    return read.taking_special_tokens(chat) if read.markers else read
