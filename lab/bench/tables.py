"""`megamem bench tables`: generation whose token tables lie in host memory or on disk, by their size."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryFile

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from megamem.banks.bank import Columns
from megamem.model import MemoryGPTModel
from megamem.placement.sharing import BankSpec
from megamem.token_tables.codec import PlainRows
from megamem.token_tables.config import TokenTableConfig
from megamem.token_tables.fetched import FetchedRows
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.engine.build import build_chunks, build_unset_chunks
from pretrain.engine.session import session
from pretrain.errors import ConfigError
from pretrain.evaluation.generate import generate
from pretrain.evaluation.sampling import Sampling
from pretrain.evaluation.stored_tables import map_records

_SPARE_BYTES = 2**31
"""Bytes of memory and of disk left for everybody else."""
_FILL_BYTES = 2**24
_HEADER = ("GiB", "resident ms", "memory ms", "disk ms", "kB read", "cached ms")


@dataclass(frozen=True)
class Spread:
    """Records of one bank, a token's beside one another and tokens evenly spread over a larger table.

    Attributes:
        records: records of the larger table [records, bytes].
        first: the place among tokens' places that the bank's first token has.
        step: places from one token to the next.
        rows_per_token: M.
    """

    records: NDArray[np.uint8]
    first: int
    step: int
    rows_per_token: int

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of rows."""
        tokens, slots = np.divmod(rows, self.rows_per_token)
        return (self.first + tokens * self.step) * self.rows_per_token + slots

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self.records[self.places(rows)]
        return found


@dataclass(frozen=True)
class Shape:
    """Places of a model's tokens in a table of some size.

    Attributes:
        num_banks: tables of the model, which take turns.
        num_tokens: ids of a table.
        rows_per_token: M.
        record_bytes: bytes of a row.
    """

    num_banks: int
    num_tokens: int
    rows_per_token: int
    record_bytes: int

    @property
    def token_bytes(self) -> int:
        return self.rows_per_token * self.record_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the model's own tables."""
        return self.num_banks * self.num_tokens * self.token_bytes

    def step(self, size: int) -> int:
        """Places from one token of a bank to its next, in a table of `size` bytes."""
        return size // (self.num_tokens * self.token_bytes)

    def spread(self, records: NDArray[np.uint8], bank: int, size: int) -> Spread:
        """The records of a bank; each bank has another place within a step."""
        step = self.step(size)
        return Spread(records, bank * step // self.num_banks, step, self.rows_per_token)


def shape_of(config: RunConfig, memory: TokenTableConfig) -> Shape:
    """The shape of a model's tables."""
    record_bytes = memory.value_dim * config.train.element_bytes
    banks = config.model.memory_plan.banks
    return Shape(len(banks), banks[0].num_rows // memory.slots_per_address, memory.slots_per_address, record_bytes)


def check_sizes(config: RunConfig, memory: TokenTableConfig, sizes: Sequence[int], folder: Path) -> None:
    """Refuse a table that the model's own does not fit into, and a disk that it does not fit onto.

    Raises:
        ConfigError: a size is too small for the model's own tables or too large for the disk, or no such folder exists.
    """
    own = shape_of(config, memory).num_bytes
    if sizes[0] < own:
        raise ConfigError(
            f"--sizes has {sizes[0] / 2**30:g}, but the model's tables take {own / 2**30:.3f} GiB already"
        )
    if not folder.is_dir():
        raise ConfigError(f"--dir is {folder}, which is no folder: name one on the disk to measure")
    free = shutil.disk_usage(folder).free
    if free < sizes[-1] + _SPARE_BYTES:
        raise ConfigError(
            f"--sizes has {sizes[-1] / 2**30:g}, but {folder} has {free / 2**30:.1f} GiB free, of which 2 shall stay: ask "
            "for less, or name another --dir"
        )


def bench_tables_rank(
    config: RunConfig, memory: TokenTableConfig, sizes: Sequence[int], folder: Path, num_tokens: int, context: int
) -> None:
    """Measure on the one rank, and print a line per size."""
    # Kernels of several threads wait for one another wherever others compute too, which is most of the time that is measured.
    torch.set_num_threads(1)
    record_bytes = shape_of(config, memory).record_bytes
    with session(config) as groups, _file(folder, sizes[-1] // record_bytes * record_bytes) as path:
        vocab_size = config.model.vocab_size
        assert vocab_size is not None, "nothing says how many token ids there are"
        (resident,) = build_chunks(config, groups, vocab_size=vocab_size)
        resident.eval()
        bench = _Bench(config, memory, groups, resident, vocab_size, num_tokens, context)
        print(
            f"milliseconds per token, median of {num_tokens} (and the fastest tenth, where others compute too), over the "
            f"last {context} tokens, one thread; own tables: "
            f"{bench.shape.num_bytes / 2**30:.3f} GiB; kB read: from the disk, per token"
        )
        print("".join(f"{name:>16}" for name in _HEADER), flush=True)
        for size in sizes:
            print("".join(f"{cell:>16}" for cell in bench.row(path, size)), flush=True)


@contextmanager
def _file(folder: Path, size: int) -> Iterator[Path]:
    """A path to a file of that many random bytes, for as long as the context lasts; it has no name that a kill could leave."""
    # Random bytes cannot be compressed away, and no two blocks are alike.
    filler = np.random.default_rng(1).integers(0, 2**63, _FILL_BYTES // 8, dtype=np.int64)
    with TemporaryFile(dir=folder) as stream:
        for start in range(0, size, _FILL_BYTES):
            stream.write((filler ^ start).tobytes()[: size - start])
        stream.flush()
        os.fsync(stream.fileno())
        yield Path(f"/proc/self/fd/{stream.fileno()}")


class _Bench:
    """A model, once with resident tables, and with fetched ones of the same rows."""

    def __init__(
        self,
        config: RunConfig,
        memory: TokenTableConfig,
        groups: ParallelGroups,
        resident: MemoryGPTModel,
        vocab_size: int,
        num_tokens: int,
        context: int,
    ) -> None:
        self._config, self._memory, self._groups, self._resident = config, memory, groups, resident
        self._vocab_size, self._num_tokens, self._context = vocab_size, num_tokens, context
        self.shape = shape_of(config, memory)
        self._dtype = next(resident.parameters()).dtype
        tables = {bank.spec.index: bank.get_parameter("values").detach().cpu() for bank in resident.own_banks}
        codec = PlainRows(memory.value_dim, self._dtype)
        self._tables = {index: codec.encode(0, table).numpy() for index, table in tables.items()}

    def row(self, path: Path, size: int) -> list[str]:
        """The figures of one size."""
        num_records = size // self.shape.record_bytes
        used = num_records * self.shape.record_bytes
        self._write_rows(path, size, num_records)
        wanted, resident_ms, _ = self._generate(self._resident)
        cells = [f"{size / 2**30:g}", resident_ms]
        if psutil.virtual_memory().available < size + _SPARE_BYTES:
            cells.append("no room")
        else:
            records = np.fromfile(path, np.uint8, count=used).reshape(num_records, -1)
            cells.append(self._figures(records, size, wanted)[0])
            del records
        _forget(path)
        all_records = path.stat().st_size // self.shape.record_bytes
        mapped = map_records(path, all_records, self.shape.record_bytes)[:num_records]
        cells += self._figures(mapped, size, wanted)
        cells.append(self._figures(mapped, size, wanted)[0])
        return cells

    def _write_rows(self, path: Path, size: int, num_records: int) -> None:
        """Put the model's rows into their places in the first `size` bytes of the file."""
        records = np.memmap(path, np.uint8, mode="r+", shape=(num_records, self.shape.record_bytes))
        for index, table in self._tables.items():
            records[self.shape.spread(records, index, size).places(np.arange(len(table)))] = table
        records.flush()

    def _figures(self, records: NDArray[np.uint8], size: int, wanted: tuple[list[int], Tensor]) -> list[str]:
        """Milliseconds and kB from the disk per token, of a model that fetches from these records."""

        def fetch(spec: BankSpec, columns: Columns, dtype: torch.dtype, device: torch.device) -> FetchedRows:
            assert columns.num_parts == 1
            return FetchedRows(
                self.shape.spread(records, spec.index, size),
                PlainRows(self._memory.value_dim, dtype),
                rows_per_token=self._memory.slots_per_address,
                part=0,
                num_parts=1,
                device=device,
            )

        (model,) = build_unset_chunks(self._config, self._groups, vocab_size=self._vocab_size, fetch_rows=fetch)
        _copy_weights(self._resident, model)
        (ids, logits), ms, read = self._generate(model)
        if ids != wanted[0] or not torch.equal(logits, wanted[1]):
            raise AssertionError("rows that were fetched are not those of the resident table")
        return [ms, f"{read / 1e3 / self._num_tokens:.1f}"]

    def _generate(self, model: MemoryGPTModel) -> tuple[tuple[list[int], Tensor], str, int]:
        """Ids and the logits after the last of them; milliseconds per token; bytes read from the disk."""
        model.eval()
        before = _bytes_read()
        ids, seconds, started = [], [], time.perf_counter()
        for token in generate(
            model,
            [],
            max_tokens=self._num_tokens,
            context_tokens=self._context,
            vocab_size=self._vocab_size,
            # No id: text goes on.
            eod=self._vocab_size - 1,
            sampling=Sampling(temperature=1.0, top_p=1.0, seed=1),
            group=self._groups.megatron.ep,
            # Every pass is over as many tokens as the one before it.
            cached=False,
        ):
            ids.append(token)
            seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
        read = _bytes_read() - before
        context = torch.tensor([ids[-self._context :]], device=self._groups.device)
        with torch.no_grad():
            logits = model(context, torch.arange(context.shape[1], device=context.device)[None], None)[0, -1]
        fastest = quantiles(seconds, n=10)[0]
        return (ids, logits), f"{1e3 * median(seconds):.2f} ({1e3 * fastest:.2f})", read


def _copy_weights(source: MemoryGPTModel, target: MemoryGPTModel) -> None:
    """All but the tables."""
    weights: Mapping[str, Tensor] = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(weights[name])
        for buffer, of_source in zip(target.buffers(), source.buffers(), strict=True):
            buffer.copy_(of_source)
    target.weights_are_set = True


def _forget(path: Path) -> None:
    """Ask the system to drop what it has cached of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _bytes_read() -> int:
    """Bytes that this process has made the disk read."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
