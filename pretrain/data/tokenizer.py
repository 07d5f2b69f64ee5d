"""Tokenizers: raw bytes, codes of images, and any Hugging Face `tokenizer.json`.

One object serves preparation, Megatron's data sets (`eod`, `pad`, `vocab_size`, `unique_identifiers`), evaluation and
generation. It is text in and ids out: beginning-of-text tokens, truncation and padding that a `tokenizer.json` may ask
for are not applied, and text that looks like a special token is encoded as the text it is, unless it is asked for.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import check_can_write, describe_error
from pretrain.config.suggest import did_you_mean_path
from pretrain.data.chat_template import ChatTemplate
from pretrain.data.named_end import named_end
from pretrain.data.sentencepiece_files import refuse_sentencepiece
from pretrain.data.tokenizer_limits import check_limits, has_expressions, panics_refused
from pretrain.errors import DataError
from pretrain.progress import Progress

BYTES = "bytes"
"""Kind of the built-in byte tokenizer, and its spec."""
CODES = "codes"
"""Kind of the tokenizer of images' codes, whose spec is `codes:NUM_CODES,NUM_CLASSES`."""
HUGGING_FACE = "huggingface"
"""Kind of a tokenizer that a `tokenizer.json` defines."""

TOKENIZER_FILE = "tokenizer.json"
_END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "<eod>", "[EOS]")
_BPE_END_OF_DOCUMENT = "<|endoftext|>"
_NUM_BYTE_VALUES = 256


@dataclass(frozen=True)
class TokenizerInfo:
    """Identity of the tokenizer that made the ids."""

    kind: str
    """`bytes`, `codes` or `huggingface`."""
    fingerprint: str
    """sha256 over everything that decides which ids a text becomes, and which one ends it."""
    vocab_size: int
    """One past its largest id."""
    eod: int
    """Id of the token that ends every document."""
    eod_token: str | None
    """Token that ends every document, of a Hugging Face tokenizer."""
    special_tokens: bool = False
    """True if text that reads as a special token became that token. Text became the text's tokens in any case, so data
    prepared with it and without have the same fingerprint, and may be trained on together."""
    chat: ChatTemplate | None = None
    """Template by which conversations became texts; None: there were none."""

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> TokenizerInfo:
        """Record of what `asdict` made of one; those written before there were conversations have no template."""
        chat = values.get("chat")
        return TokenizerInfo(**{**values, "chat": None if chat is None else ChatTemplate.from_plain(chat)})


class Tokenizer(ABC):
    """Interface of tokenizers: the fields of `info`, and the conversions of text to ids and back."""

    kind: str
    fingerprint: str
    vocab_size: int
    eod: int
    eod_token: str | None = None
    special_tokens: bool = False
    chat: ChatTemplate | None = None

    @property
    def info(self) -> TokenizerInfo:
        """Record of the tokenizer in a prepared data set."""
        return TokenizerInfo(
            self.kind, self.fingerprint, self.vocab_size, self.eod, self.eod_token, self.special_tokens, self.chat
        )

    @property
    def pad(self) -> int:
        """Id outside the vocabulary: Megatron masks it wherever it occurs, and no id of a document may be masked."""
        return -1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Fields that Megatron writes into the description of a data set."""
        return asdict(self.info)

    @property
    def token_dtype(self) -> type[np.uint16] | type[np.int32]:
        """The narrowest integer that Megatron's indexed data sets store these ids in."""
        return np.uint16 if self.vocab_size <= np.iinfo(np.uint16).max else np.int32

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-document token."""
        return self.tokenize_batch([text])[0].tolist()

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Ids of each text, [num_tokens] in `token_dtype`, without an end-of-document token."""

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """UTF-8 bytes of the text that the ids stand for; end-of-document ids stand for nothing."""

    def detokenize(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Text that the ids stand for; bytes that are not UTF-8 become the replacement character."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def text_of(self, id: int) -> str:
        """Text of one id by itself, that of the end-of-document token too."""
        return self.name_of(id) if id == self.eod else self.detokenize([id])

    def taking_special_tokens(self, chat: ChatTemplate | None = None) -> Tokenizer:
        """Tokenizer by which text that reads as a special token is that token; itself, where it has none.

        Args:
            chat: template of conversations, if it has none of its own.
        """
        return self

    def name_of(self, id: int) -> str:
        """Name of one id, unlike all others' names."""
        return f"<{id}>"

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the definition into a folder, where there is one to write."""

    def check_ids(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """The ids as an array.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            bad = int(array[(array < 0) | (array >= self.vocab_size)][0])
            raise DataError(
                f"Token id {bad} is outside the vocabulary of {self.vocab_size}. Use the tokenizer that made the ids."
            )
        return array


class ByteTokenizer(Tokenizer):
    """The 256 byte values and an end-of-document token: 257 ids, no training, no loss."""

    kind = BYTES
    eod = _NUM_BYTE_VALUES
    vocab_size = _NUM_BYTE_VALUES + 1
    fingerprint = hashlib.sha256(b"megamem: utf-8 bytes, 256 ends a document").hexdigest()

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        array = self.check_ids(ids)
        return array[array != self.eod].astype(np.uint8).tobytes()

    def save(self, folder: Path) -> None:
        """Nothing to write: the kind says it all."""


class CodeTokenizer(Tokenizer):
    """Codes of a vector quantiser, written as numbers, and classes, written as c0, c1 and so on, with spaces between.

    Ids are the codes, then the end-of-document token, then the classes. An image of class 3 is the document
    `c3 17 4 ...`: its class, and its codes row by row.
    """

    kind = CODES

    def __init__(self, num_codes: int, num_classes: int) -> None:
        """Make the vocabulary.

        Raises:
            DataError: a number that is too small.
        """
        if num_codes < 1 or num_classes < 0:
            raise DataError(f"{CODES}:{num_codes},{num_classes}: give 1 code or more, and 0 classes or more.")
        self.num_codes, self.num_classes = num_codes, num_classes
        self.eod, self.vocab_size = num_codes, num_codes + 1 + num_classes
        self.fingerprint = hashlib.sha256(f"megamem: {num_codes} codes, {num_classes} classes".encode()).hexdigest()

    @staticmethod
    def of(spec: str) -> CodeTokenizer:
        """Tokenizer of a spec `codes:NUM_CODES,NUM_CLASSES`.

        Raises:
            DataError: the spec is not written so.
        """
        numbers = spec.removeprefix(f"{CODES}:").split(",")
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise DataError(f"{spec}: no such tokenizer. Give {CODES}:NUM_CODES,NUM_CLASSES, as in {CODES}:16384,1000.")
        return CodeTokenizer(int(numbers[0]), int(numbers[1]))

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.array([self._id_of(word) for word in text.split()], dtype=self.token_dtype) for text in texts]

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        words = [f"{id}" if id < self.eod else f"c{id - self.eod - 1}" for id in self.check_ids(ids) if id != self.eod]
        return "".join(f"{word} " for word in words).encode()

    def save(self, folder: Path) -> None:
        """Nothing to write: the numbers of codes and of ids say it all."""

    def _id_of(self, word: str) -> int:
        is_class = word.startswith("c")
        number, limit = word.removeprefix("c"), self.num_classes if is_class else self.num_codes
        if not number.isdecimal() or int(number) >= limit:
            raise DataError(
                f"{word[:40]!r} is neither one of {self.num_codes} codes (0, 1, ...) nor of {self.num_classes} classes (c0, "
                f"c1, ...). Give --tokenizer {CODES}:NUM_CODES,NUM_CLASSES with as many as there are, or mend the input."
            )
        return self.eod + 1 + int(number) if is_class else int(number)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the `tokenizers` package."""

    kind = HUGGING_FACE

    def __init__(
        self,
        definition: str,
        eod_token: str | None = None,
        origin: str = TOKENIZER_FILE,
        *,
        special_tokens: bool = False,
        chat: ChatTemplate | None = None,
    ) -> None:
        """Load a definition.

        Args:
            definition: content of the `tokenizer.json`.
            eod_token: the token that ends a document; None picks the only known name that the vocabulary has.
            origin: source of the definition, for messages.
            special_tokens: text that reads as a special token is that token, as in a chat model's own texts.
            chat: template of conversations.

        Raises:
            DataError: the definition cannot be used, or has no such token.
        """
        from tokenizers import Tokenizer as Backend

        try:
            with panics_refused():
                self._backend = Backend.from_str(definition)
            content = json.loads(definition)
            canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        except Exception as error:  # the package raises bare Exception
            raise DataError(
                f"{origin}: not a usable tokenizer.json ({error}). Save it with `tokenizers` or `transformers`."
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        # It would leave blanks out of the places of tokens.
        self._backend.post_processor = None
        self.special_tokens, self.chat = special_tokens, chat
        # The package's word for taking them as text.
        self._backend.encode_special_tokens = not special_tokens
        self.definition = definition
        self.eod_token = _choose_end_of_document(self._backend.get_vocab(), eod_token, origin)
        self.eod = self._backend.get_vocab()[self.eod_token]
        # Ids may have holes, so the largest one counts and not their number.
        self.vocab_size = max(self._backend.get_vocab().values()) + 1
        check_limits(content, self.vocab_size - 1, origin)
        # Generation decodes for every token, and the guard takes longer than that.
        self._guarded_decoding: Callable[[], AbstractContextManager[None]] = (
            panics_refused if has_expressions(content.get("decoder")) else nullcontext
        )
        self.fingerprint = hashlib.sha256(f"{canonical}\n{self.eod_token}".encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(HuggingFaceTokenizer, special_tokens=self.special_tokens, chat=self.chat)
        return make, (self.definition, self.eod_token)

    @property
    def added_tokens(self) -> list[str]:
        """Tokens beside those of the vocabulary of texts, special or not."""
        return [token.content for token in self._added]

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of these."""
        return frozenset(self._backend.get_added_tokens_decoder())

    @property
    def markers(self) -> list[str]:
        """Special tokens beside the one that ends a document."""
        return [token.content for token in self._added if token.special and token.content != self.eod_token]

    @cached_property
    def normalizes_markers(self) -> bool:
        """True if a special token is found in normalised texts, in which others may read as it."""
        return any(token.special and token.normalized for token in self._added)

    @property
    def _added(self) -> Iterable[Any]:
        return self._backend.get_added_tokens_decoder().values()

    def taking_special_tokens(self, chat: ChatTemplate | None = None) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer(self.definition, self.eod_token, special_tokens=True, chat=self.chat or chat)

    def id_of(self, token: str) -> int | None:
        """Id of a token; None: there is none of that name."""
        number: int | None = self._backend.token_to_id(token)
        return number

    def tokenize_with_places(self, texts: Sequence[str]) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Ids of each text, as of `tokenize_batch`, and their places [num_tokens, 2]: the first character that each stands
        for, and the one behind the last."""
        with panics_refused():
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(each.ids, dtype=self.token_dtype), np.array(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in encodings
        ]

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        with panics_refused():
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.token_dtype) for encoding in encodings]

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        array = self.check_ids(ids)
        with self._guarded_decoding():
            text = self._backend.decode(array[array != self.eod].tolist(), skip_special_tokens=False)
        return text.encode("utf-8")

    def name_of(self, id: int) -> str:
        # Ids may have holes.
        return self._backend.id_to_token(id) or super().name_of(id)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`."""
        (folder / TOKENIZER_FILE).write_text(self.definition, encoding="utf-8")


def _choose_end_of_document(vocabulary: dict[str, int], wanted: str | None, origin: str) -> str:
    if wanted is not None:
        if wanted not in vocabulary:
            raise DataError(f"{origin}: the vocabulary has no token {wanted!r}. Name one that it has with --eod-token.")
        return wanted
    known = [token for token in _END_OF_DOCUMENT_TOKENS if token in vocabulary]
    if len(known) == 1:
        return known[0]
    looked_for = ", ".join(_END_OF_DOCUMENT_TOKENS)
    found = (
        f"{' and '.join(known)} may each end a document"
        if known
        else f"no token that ends a document (looked for {looked_for})"
    )
    raise DataError(f"{origin}: {found}. Name the one that does with --eod-token.")


def known_ends(tokenizer: HuggingFaceTokenizer) -> list[str]:
    """Tokens of the vocabulary whose name says that they end documents."""
    return [token for token in _END_OF_DOCUMENT_TOKENS if tokenizer.id_of(token) is not None]


def load_tokenizer(
    spec: str | Path,
    eod_token: str | None = None,
    *,
    special_tokens: bool = False,
    chat: ChatTemplate | None = None,
) -> Tokenizer:
    """A tokenizer by name or file.

    Args:
        spec: `bytes`, `codes:NUM_CODES,NUM_CLASSES`, a `tokenizer.json`, or a folder that holds one.
        eod_token: token that ends a document (of a `tokenizer.json` alone); None takes the one that the files beside it
            name, or else the only one of a known name.
        special_tokens: text that reads as a special token is that token.
        chat: template of conversations (of a `tokenizer.json` alone).

    Raises:
        DataError: no such tokenizer exists, or it cannot be used.
    """
    if str(spec) == BYTES or str(spec).startswith(f"{CODES}:"):
        if eod_token is not None or special_tokens:
            option = "--special-tokens" if eod_token is None else f"--eod-token {eod_token!r}"
            raise DataError(
                f"The {'byte' if str(spec) == BYTES else 'code'} tokenizer has its own end-of-document token, and no other "
                f"special one: leave {option} out."
            )
        return ByteTokenizer() if str(spec) == BYTES else CodeTokenizer.of(str(spec))
    path = Path(spec)
    refuse_sentencepiece(path, TOKENIZER_FILE)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    try:
        definition = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{spec}: no such tokenizer{did_you_mean_path(path)} "
            f"Give `{BYTES}`, a tokenizer.json, or a folder that holds one."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the tokenizer cannot be read ({error}). Give a readable tokenizer.json.") from error
    end = named_end(path) if eod_token is None else eod_token
    return HuggingFaceTokenizer(definition, end, origin=str(path), special_tokens=special_tokens, chat=chat)


def train_bpe(
    documents: Iterable[str],
    vocab_size: int,
    output: Path,
    *,
    total_bytes: int | None = None,
) -> HuggingFaceTokenizer:
    """Train a byte-level BPE and write it. The same documents give the same file.

    Args:
        vocab_size: ids wanted, the 256 bytes and `<|endoftext|>` included. A small corpus may give fewer.
        output: the `tokenizer.json` to write; it appears when it is complete.
        total_bytes: size of the corpus, for the progress bar.

    Raises:
        DataError: the vocabulary is too small for the bytes, or the file cannot be written.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    smallest = _NUM_BYTE_VALUES + 1
    if vocab_size < smallest:
        raise DataError(
            f"A vocabulary of {vocab_size} cannot hold the 256 bytes and {_BPE_END_OF_DOCUMENT}. "
            f"Ask for {smallest} or more."
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BPE_END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    try:
        check_can_write(output)
    except OSError as error:
        raise DataError(f"the tokenizer is not made: {describe_error(error)}.") from error
    backend.train_from_iterator(_with_progress(documents, total_bytes), trainer=trainer)
    definition = backend.to_str(pretty=True)
    try:
        with atomic_write(output) as stream:
            stream.write(definition.encode())
    except OSError as error:
        raise DataError(f"the tokenizer is not made: {describe_error(error)}.") from error
    return HuggingFaceTokenizer(definition, _BPE_END_OF_DOCUMENT, origin=str(output))


def _with_progress(documents: Iterable[str], total_bytes: int | None) -> Iterator[str]:
    with Progress("reading", total=total_bytes or 0, is_bytes=True, leave=False) as bar:
        for text in documents:
            yield text
            bar.update(len(text.encode("utf-8")))
