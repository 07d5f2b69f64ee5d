"""Tables of a trained model in another form: made from a checkpoint by blocks of rows, kept in memory or in a folder.

A folder has `tables.json`, and of each bank a file of records and, of factors, one of bases. Files of records are mapped
and not read: rows come from them when a token asks.
"""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from megamem.banks.bank import Columns
from megamem.placement.sharing import BankSpec
from megamem.token_tables.codec import FactoredRows, RowBlocks, RowCodec, make_codec
from megamem.token_tables.config import TokenTableConfig
from megamem.token_tables.fetched import FetchedRows
from megamem.token_tables.form import TABLES_FILE, TableForm, parse_form
from parallel.machine.atomic_write import sync
from pretrain.checkpoint.folder import STATE_FILE
from pretrain.checkpoint.store.tensors import TensorReader, pieces
from pretrain.config.schema import RunConfig
from pretrain.convert.native.format import NativeFormat
from pretrain.data.manifest import file_sha256
from pretrain.engine.megatron import parameter_dtype
from pretrain.errors import CheckpointError, ConfigError

_FORMAT_VERSION = 1
_BLOCK_ELEMENTS = 2**22
"""Elements of a table that are in memory at once."""


@dataclass(frozen=True)
class StoredBank:
    """A table in a folder.

    Attributes:
        num_rows: rows of the table.
        width: columns of a row.
        record_bytes: bytes of a row in the file.
        dtype: dtype that rows are restored to, as "bfloat16".
    """

    num_rows: int
    width: int
    record_bytes: int
    dtype: str


class TablesInMemory:
    """A `FetchRows` of a checkpoint's tables in a form, which every rank makes for itself when a bank is built."""

    def __init__(self, checkpoint: Path, memory: TokenTableConfig, form: TableForm) -> None:
        self._reader, self._memory, self.form = _open(checkpoint), memory, form

    def __call__(self, spec: BankSpec, columns: Columns, dtype: torch.dtype, device: torch.device) -> FetchedRows:
        """See `FetchRows`."""
        blocks = _blocks(self._reader, spec.index)
        codec = _codec(self.form, blocks, self._memory, dtype)
        records = np.empty((spec.num_rows, codec.record_bytes), np.uint8)
        for first, rows in blocks():
            records[first : first + len(rows)] = codec.encode(first, rows).numpy()
        return _fetched(records, codec, self._memory, columns, device)


class TablesInFolder:
    """A `FetchRows` of the tables in a folder that `write_tables` made."""

    def __init__(self, folder: Path, checkpoint: Path, memory: TokenTableConfig) -> None:
        """
        Raises:
            CheckpointError: the folder holds no tables, or they are damaged or of another checkpoint.
        """
        self.folder, self._memory = folder, memory
        self.form, self._banks, made_from = _read_manifest(folder)
        if made_from != file_sha256(checkpoint / STATE_FILE):
            raise CheckpointError(
                f"{folder} holds tables of another checkpoint than {checkpoint}: make them again with `megamem tables RUN "
                f"--form {self.form.text} --output DIR`, or name the step that they are of with --step"
            )

    def __call__(self, spec: BankSpec, columns: Columns, dtype: torch.dtype, device: torch.device) -> FetchedRows:
        """See `FetchRows`."""
        stored, path = self._banks.get(spec.index), _records_file(self.folder, spec.index)
        name = str(dtype).removeprefix("torch.")
        if stored is None or (stored.num_rows, stored.dtype) != (spec.num_rows, name):
            raise CheckpointError(
                f"{self.folder} has no table of {spec.num_rows} rows in {name} for bank {spec.index}: make it again with "
                f"`megamem tables RUN --form {self.form.text} --output DIR`"
            )
        bases = self._bases(spec.index, stored, dtype) if self.form.is_factored else None
        codec = _codec(self.form, _no_blocks, self._memory, dtype, bases)
        records = map_records(path, stored.num_rows, stored.record_bytes)
        return _fetched(records, codec, self._memory, columns, device)

    def _bases(self, bank: int, stored: StoredBank, dtype: torch.dtype) -> torch.Tensor:
        path, shape = _bases_file(self.folder, bank), (self._memory.slots_per_address, -1, stored.width)
        try:
            return torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype).view(shape)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Make it again with `megamem tables`") from error


def write_tables(checkpoint: Path, config: RunConfig, memory: TokenTableConfig, form: TableForm, folder: Path) -> int:
    """Write a checkpoint's tables in a form into a new folder, which appears when it is complete; returns their bytes.

    One block of rows is in memory at a time.

    Raises:
        ConfigError: the rows cannot have this form.
        CheckpointError: the checkpoint cannot be read.
        OSError: the folder is there, or cannot be written.
    """
    reader = _open(checkpoint)
    dtype = parameter_dtype(config)
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    banks: dict[int, StoredBank] = {}
    num_bytes = 0
    for spec in config.model.memory_plan.banks:
        blocks = _blocks(reader, spec.index)
        codec = _codec(form, blocks, memory, dtype)
        with _records_file(writing, spec.index).open("wb") as stream:
            _write_records(stream, blocks, codec)
        if isinstance(codec, FactoredRows):
            _bases_file(writing, spec.index).write_bytes(codec.bases.contiguous().view(torch.uint8).numpy().tobytes())
            sync(_bases_file(writing, spec.index))
        sync(_records_file(writing, spec.index))
        name = str(dtype).removeprefix("torch.")
        banks[spec.index] = StoredBank(spec.num_rows, memory.value_dim, codec.record_bytes, name)
        num_bytes += spec.num_rows * codec.record_bytes + codec.shared_bytes
    manifest = {
        "format_version": _FORMAT_VERSION,
        "form": form.text,
        "checkpoint": str(checkpoint),
        "state_sha256": file_sha256(checkpoint / STATE_FILE),
        "banks": {str(index): asdict(bank) for index, bank in banks.items()},
    }
    (writing / TABLES_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sync(writing / TABLES_FILE)
    writing.rename(folder)
    return num_bytes


def map_records(path: Path, num_rows: int, record_bytes: int) -> NDArray[np.uint8]:
    """The records of a file [num_rows, record_bytes], mapped.

    Raises:
        CheckpointError: the file is not there, or has another size.
    """
    try:
        with path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Make it again with `megamem tables`") from error
    if len(mapped) != num_rows * record_bytes:
        raise CheckpointError(
            f"{path} has {len(mapped)} bytes where {num_rows * record_bytes} were written: make it again with `megamem "
            "tables`"
        )
    # Tokens ask for rows anywhere: what lies beside one is not wanted.
    mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, np.uint8).reshape(num_rows, record_bytes)


def _open(checkpoint: Path) -> TensorReader:
    return NativeFormat().open(checkpoint, None, None).reader


def _blocks(reader: TensorReader, bank: int) -> RowBlocks:
    name = f"banks.{bank}.values"
    if name not in reader.tensors:
        raise CheckpointError(f"the checkpoint has no tensor {name}: use the version of the package that wrote it")
    info = reader.tensors[name]

    def blocks() -> Iterator[tuple[int, torch.Tensor]]:
        for region in pieces(info.whole(name), max(_BLOCK_ELEMENTS, info.shape[1])):
            yield region.offset[0], reader.read(region)

    return blocks


def _no_blocks() -> Iterator[tuple[int, torch.Tensor]]:
    raise AssertionError("bases are stored: nothing is to be read for them")


def _codec(
    form: TableForm, blocks: RowBlocks, memory: TokenTableConfig, dtype: torch.dtype, bases: torch.Tensor | None = None
) -> RowCodec:
    try:
        return make_codec(
            form, blocks, width=memory.value_dim, num_slots=memory.slots_per_address, dtype=dtype, bases=bases
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _write_records(stream: BinaryIO, blocks: RowBlocks, codec: RowCodec) -> None:
    for first, rows in blocks():
        stream.write(codec.encode(first, rows).numpy().tobytes())


def _fetched(
    records: NDArray[np.uint8], codec: RowCodec, memory: TokenTableConfig, columns: Columns, device: torch.device
) -> FetchedRows:
    return FetchedRows(
        records,
        codec,
        rows_per_token=memory.slots_per_address,
        part=columns.part,
        num_parts=columns.num_parts,
        device=device,
    )


def _read_manifest(folder: Path) -> tuple[TableForm, dict[int, StoredBank], str]:
    """Form, tables by bank, and the hash of the checkpoint that they are of."""
    try:
        content: dict[str, Any] = json.loads((folder / TABLES_FILE).read_text(encoding="utf-8"))
        if content["format_version"] != _FORMAT_VERSION:
            raise ValueError(f"format version {content['format_version']}, and this program reads {_FORMAT_VERSION}")
        banks = {int(index): StoredBank(**bank) for index, bank in content["banks"].items()}
        return parse_form(content["form"]), banks, content["state_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} holds no tables that can be used ({error}): make them with `megamem tables RUN --form FORM "
            "--output DIR`"
        ) from error


def _records_file(folder: Path, bank: int) -> Path:
    return folder / f"bank_{bank}.rows"


def _bases_file(folder: Path, bank: int) -> Path:
    return folder / f"bank_{bank}.bases"


def open_tables(word: str, checkpoint: Path, memory: TokenTableConfig) -> TablesInMemory | TablesInFolder:
    """Open the stand-in for a checkpoint's tables: a folder of them, or a form that is made in memory.

    Raises:
        CheckpointError: the folder does not hold this checkpoint's tables.
        ConfigError: no form has this name.
    """
    if (Path(word) / TABLES_FILE).is_file():
        return TablesInFolder(Path(word), checkpoint, memory)
    return TablesInMemory(checkpoint, memory, parse_form(word))
