"""Tokenizers of the kinds that published models have, trained on a few lines, for tests of what is common to all."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pretrain.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from pretrain.data.tokenizer import Tokenizer as OurTokenizer

CORPUS = [
    "the memory reads a few rows, and the model reads the memory.\n",
    "def run(self):\n    return self.value\n",
] * 3
END = "<|endoftext|>"
MARKERS = ("<|im_start|>", "<|im_end|>")
THINK = "<think>"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """GPT-2's kind, as Qwen's and Llama 3's: bytes as letters, with a chat model's markers."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (END, *MARKERS)])
    backend.add_tokens([AddedToken(THINK, normalized=False)])
    return backend


def metaspace_with_bytes() -> Tokenizer:
    """Llama 2's and Mistral's kind: spaces as letters, and a token for each byte of what the vocabulary lacks."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", END, *_BYTES, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(END, normalized=False)])
    return backend


def unigram() -> Tokenizer:
    """T5's kind: pieces of words with a space before them."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece() -> Tokenizer:
    """BERT's kind: lower-cased words in pieces, which lose case, accents and blanks."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", END], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def characters() -> Tokenizer:
    """Single characters, without any decoder of their own but one that joins them."""
    vocabulary = {character: id for id, character in enumerate(sorted(set("".join(CORPUS))))}
    backend = Tokenizer(models.WordLevel({**vocabulary, "[UNK]": len(vocabulary)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(END, normalized=False)])
    return backend


def kinds() -> Mapping[str, OurTokenizer]:
    """A tokenizer of each kind, by name."""
    made = (byte_level, metaspace_with_bytes, unigram, word_piece, characters)
    return {"bytes": ByteTokenizer(), **{make.__name__: HuggingFaceTokenizer(make().to_str(), END) for make in made}}
