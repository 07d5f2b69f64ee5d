"""A prepared data set on disk: the manifest that makes it one, and the checks before anything reads it.

A prepared data set is a folder with `train.bin/.idx` and `validation.bin/.idx` (Megatron's indexed data sets, one
sequence per document, each ended by the end-of-document id), `train.prompts` and `validation.prompts`, or
`train.scored` and `validation.scored`, where some tokens are not scored, `tokenizer.json` where the tokenizer is a Hugging Face one, and `manifest.json`. The folder
gets its name only when all of it is there (see `staging`), so a folder of that name with a manifest is whole, or was
damaged later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.config.suggest import did_you_mean_path
from pretrain.data.indexed_files import IDX_MAGIC, document_starts, header_problem
from pretrain.data.scored import ScoredFile, ScoredTokens, open_scored, scored_file_bytes
from pretrain.data.tokenizer import BYTES, CODES, HUGGING_FACE, TOKENIZER_FILE, Tokenizer, TokenizerInfo, load_tokenizer
from pretrain.errors import DataError, MissingDataError
from pretrain.progress import Progress

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
TOKENIZER_INFO_FILE = "info.json"
_DIGEST = "digest"
_BYTES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class UnscoredInfo:
    """Tokens of a split that are not scored; size and hash of the file that says which."""

    num_tokens: int
    num_bytes: int
    """UTF-8 bytes of their text."""
    file_bytes: int
    file_sha256: str


@dataclass(frozen=True)
class SplitInfo:
    """One split: its contents, and the sizes and hashes of its files."""

    num_documents: int
    num_tokens: int
    """End-of-document tokens included."""
    num_bytes: int
    """UTF-8 bytes of the documents' text."""
    max_token_id: int
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str
    prompts: UnscoredInfo | None = None
    """Prompts of a split of prompts and answers, listed by their lengths."""
    scored: UnscoredInfo | None = None
    """Whatever else is not scored, listed by a bit for every token. Where both are None every token is scored."""

    @property
    def scoring(self) -> ScoredFile | None:
        """The file that says which tokens are scored; None: all are."""
        return "prompts" if self.prompts is not None else None if self.scored is None else "scored"

    @property
    def unscored(self) -> UnscoredInfo | None:
        """Tokens that are not scored; None: all are."""
        return self.scored if self.prompts is None else self.prompts

    @property
    def num_scored_tokens(self) -> int:
        """Tokens that count in a loss."""
        return self.num_tokens - (0 if self.unscored is None else self.unscored.num_tokens)

    @property
    def num_scored_bytes(self) -> int:
        """UTF-8 bytes of their text."""
        return self.num_bytes - (0 if self.unscored is None else self.unscored.num_bytes)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> SplitInfo:
        """Split of the values of a manifest; those written before tokens were left unscored have none."""
        unscored = {name: values.get(name) for name in ("prompts", "scored")}
        return cls(**{**values, **{name: each and UnscoredInfo(**each) for name, each in unscored.items()}})


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about a prepared data set."""

    format_version: int
    tokenizer: TokenizerInfo
    splits: Mapping[str, SplitInfo]
    sources: Mapping[str, Any]
    """Inputs, number and size of their files, arguments of the preparation."""
    num_skipped: int
    """Bad documents left out with --max-bad."""
    skipped_examples: tuple[str, ...]
    num_empty: int
    """Documents without text, which are always left out."""
    request_fingerprint: str
    """sha256 over arguments and input files (path, size, modification time)."""
    versions: Mapping[str, str]
    has_digest: bool = field(default=True, compare=False)
    """True if its file holds a sha256 of everything above; files from before there was one do not."""

    @property
    def content_fingerprint(self) -> str:
        """sha256 over the tokens and their tokenizer: two data sets with the same one are interchangeable."""
        parts = [self.tokenizer.fingerprint, *(sha256 for _, _, sha256 in self.files)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def files(self) -> Iterator[tuple[str, int, str]]:
        """Name, bytes and sha256 of the files of both splits."""
        for split in SPLITS:
            info = self.splits[split]
            yield f"{split}.bin", info.bin_bytes, info.bin_sha256
            yield f"{split}.idx", info.idx_bytes, info.idx_sha256
            if info.unscored is not None:
                yield f"{split}.{info.scoring}", info.unscored.file_bytes, info.unscored.file_sha256

    def to_json(self) -> str:
        """The manifest as the text of its file, with a digest of its contents."""
        values = asdict(self)
        if values.pop("has_digest"):
            values[_DIGEST] = _digest(values)
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: the text is not a manifest of this version, or its digest is of another one.
        """
        values = json.loads(text)
        version = values.get("format_version") if isinstance(values, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, and this program reads {FORMAT_VERSION}")
        digest = values.pop(_DIGEST, None)
        known = {each.name for each in fields(cls)} - {"has_digest"}
        # A change of the digest's own name would otherwise make a manifest one of those that have none.
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"it has a key {unknown[0]!r}, which no manifest has")
        if digest is not None and digest != _digest(values):
            raise ValueError("its contents are not those that were written: their sha256 differs from its digest")
        values = {name: values[name] for name in known}
        values["tokenizer"] = TokenizerInfo.from_plain(values["tokenizer"])
        values["splits"] = {split: SplitInfo.from_plain(values["splits"][split]) for split in SPLITS}
        values["skipped_examples"] = tuple(values["skipped_examples"])
        return cls(**values, has_digest=digest is not None)


def _digest(values: Mapping[str, Any]) -> str:
    """sha256 over the values of a manifest, whatever the layout of its file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class PreparedDataset:
    """A complete prepared data set."""

    path: Path
    manifest: Manifest
    tokenizer: Tokenizer

    @property
    def has_unscored(self) -> bool:
        """True if some of its tokens are not scored."""
        return any(split.unscored is not None for split in self.manifest.splits.values())

    def prefix(self, split: str) -> str:
        """Path of a split's files without `.bin` and `.idx`, as Megatron wants it."""
        return str(self.path / split)

    def open_split(self, split: str) -> IndexedDataset:
        """Megatron's indexed data set of a split: item i is document i with its end-of-document id.

        Raises:
            DataError: the files do not hold what the manifest says.
        """
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        info = self.manifest.splits[split]
        with open(f"{self.prefix(split)}.idx", "rb") as stream:
            if stream.read(len(IDX_MAGIC)) != IDX_MAGIC:
                raise damaged(self.path, f"{split}.idx is not an index of Megatron's")
        try:
            indexed = IndexedDataset(self.prefix(split))
        except (AssertionError, ValueError, OSError, KeyError) as error:
            raise damaged(self.path, f"{split}.idx cannot be read ({error})") from error
        if len(indexed) != info.num_documents or int(indexed.sequence_lengths.sum(dtype="int64")) != info.num_tokens:
            raise damaged(
                self.path, f"{split}.idx lists {len(indexed)} documents where the manifest has {info.num_documents}"
            )
        return indexed

    def open_scored(self, split: str) -> ScoredTokens | None:
        """Tokens of a split that are scored; None: all are."""
        prefix, scoring = Path(self.prefix(split)), self.manifest.splits[split].scoring
        if scoring is None:
            return None
        unit = np.dtype(self.tokenizer.token_dtype).itemsize
        return open_scored(prefix, scoring, document_starts(prefix.with_name(f"{split}.idx")), unit)

    def verify(self) -> None:
        """Read every byte and compare it with the manifest's hashes.

        Raises:
            DataError: files have changed since they were written; all of them are named.
        """
        files = list(self.manifest.files)
        with Progress("reading", total=sum(size for _, size, _ in files), is_bytes=True, leave=False) as bar:
            changed = [name for name, _, sha256 in files if file_sha256(self.path / name, bar) != sha256]
        if changed:
            are = "is not the file that was" if len(changed) == 1 else "are not the files that were"
            raise damaged(self.path, f"{', '.join(changed)} {are} written (the sha256 differs)")


def damaged(path: Path, what: str) -> DataError:
    """The error for a data set that is not what its manifest says."""
    return DataError(
        f"{path}: the data set is damaged: {what}. Prepare it again with `megamem data prepare ... --overwrite`."
    )


def vocabulary_error(what: str, documents: IndexedDataset, numbers: Iterable[int], vocab_size: int) -> DataError:
    """The error for documents, given by their numbers, of which one holds an id outside of the vocabulary."""
    for number in numbers:
        ids = documents[number]
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        if bad.size:
            return DataError(
                f"{what} {number} holds token id {bad[0]}, outside the vocabulary of {vocab_size}. "
                "The data set is damaged or from another tokenizer: prepare it again."
            )
    raise AssertionError("none of the documents holds such an id")


def file_sha256(path: Path, bar: Progress | None = None) -> str:
    """sha256 of a file, as hexadecimal digits; a progress bar is told of its bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BYTES_AT_ONCE):
            digest.update(block)
            if bar is not None:
                bar.update(len(block))
    return digest.hexdigest()


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Keep a tokenizer in a folder of its own, for those who have a run but not its data."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    (folder / TOKENIZER_INFO_FILE).write_text(json.dumps(asdict(tokenizer.info), indent=1), encoding="utf-8")


def saved_tokenizer_info(folder: Path) -> TokenizerInfo:
    """Record of the tokenizer that `save_tokenizer` kept, which is read in no time.

    Raises:
        DataError: the record is missing or damaged.
    """
    try:
        return TokenizerInfo.from_plain(json.loads((folder / TOKENIZER_INFO_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{folder}: no tokenizer can be read here ({error}). It is written when a run starts."
        ) from error


def open_saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save_tokenizer` kept.

    Raises:
        DataError: the tokenizer is missing or damaged.
    """
    info = saved_tokenizer_info(folder)
    try:
        return _open_tokenizer(folder, info)
    except DataError as error:
        raise DataError(
            f"{folder}: the run's tokenizer is damaged. Copy {TOKENIZER_FILE} of its data set here; `megamem train` "
            "writes it too when it goes on with the run."
        ) from error


def open_dataset(path: str | Path) -> PreparedDataset:
    """Open a prepared data set, after checking that all of it is there: presence, sizes and headers of its files,
    whatever their size in no time (`verify` reads every byte).

    Raises:
        MissingDataError: no data set is there.
        DataError: the data set is incomplete or damaged, or holds ids past its own vocabulary.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    for name, num_bytes, _ in manifest.files:
        file = folder / name
        if not file.is_file():
            raise damaged(folder, f"{name} is missing")
        if file.stat().st_size != num_bytes:
            raise damaged(folder, f"{name} has {file.stat().st_size} bytes where {num_bytes} were written")
    for split, info in manifest.splits.items():
        if problem := header_problem(folder / f"{split}.idx", info.num_documents, info.bin_bytes, info.num_tokens):
            raise damaged(folder, f"{split}.idx {problem}")
        if info.unscored is not None and info.scoring is not None:
            expected = scored_file_bytes(info.scoring, info.num_documents, info.num_tokens)
            if info.unscored.file_bytes != expected:
                raise damaged(
                    folder,
                    f"{split}.{info.scoring} has {info.unscored.file_bytes} bytes, and {info.num_documents} documents of "
                    f"{info.num_tokens} tokens have {expected}",
                )
        if info.max_token_id >= manifest.tokenizer.vocab_size:
            raise damaged(
                folder,
                f"{split} holds token id {info.max_token_id}, past the vocabulary of {manifest.tokenizer.vocab_size}",
            )
    return PreparedDataset(folder, manifest, _open_tokenizer(folder, manifest.tokenizer))


def _read_manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise MissingDataError(
            f"{folder}: no such data set{did_you_mean_path(folder)} "
            f"Make it with `megamem data prepare INPUT --output {folder}`.",
            folder,
        )
    try:
        return Manifest.from_json((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder}: not a prepared data set (it has no {MANIFEST_FILE}). "
            f"Make one with `megamem data prepare INPUT --output DIRECTORY`."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"{MANIFEST_FILE} cannot be used ({error})") from error


def _open_tokenizer(folder: Path, info: TokenizerInfo) -> Tokenizer:
    # Classes come after the token that ends a document, and it comes after the codes.
    specs: dict[str, str | Path] = {
        BYTES: BYTES,
        CODES: f"{CODES}:{info.eod},{info.vocab_size - info.eod - 1}",
        HUGGING_FACE: folder / TOKENIZER_FILE,
    }
    if info.kind not in specs:
        raise damaged(folder, f"unknown tokenizer kind {info.kind!r}")
    tokenizer = load_tokenizer(specs[info.kind], info.eod_token, special_tokens=info.special_tokens, chat=info.chat)
    if tokenizer.fingerprint != info.fingerprint:
        raise damaged(folder, "its tokenizer is not the one that made the tokens")
    return tokenizer
