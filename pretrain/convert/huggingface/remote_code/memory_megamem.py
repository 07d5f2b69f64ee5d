"""Memory layers: banks of tables, and what retrieves from them.

A memory reads a few rows of a large table for every token. Queries are scored against two short lists of keys, the rows
and the columns of a grid; a first stage keeps the best of each, a second the best entries of their grid. Each entry
stands for a row of a bank. (Or there is one long list, a key for every row.) The rows' values are added up by score,
and projected to the residual stream.

Legend: b sequences, s tokens of each, T = b s, D hidden size; H retrieval heads, d key dimension, N keys per side, M
rows (and columns) kept first, K entries kept, J = H K, R Tucker rank, C scores per entry, V and P columns of values and
pre-values, B sums per token.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .configuration_megamem import MegamemConfig

# Bound temporaries: the first stage's grid of candidates [T, H, M, M] and the rows read [T, J, V]; the scores of keys.
_TOKENS_AT_A_TIME = 512
_SCORES_AT_A_TIME = 2**26

# `MegamemBank.forward`.
LookUp = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def rms_normalise(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x gain / sqrt(mean(x^2) + epsilon) over the last dimension, in fp32, returned in the dtype of `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * gain.to(wide.dtype)).to(x.dtype)


def list_topk(scores: Tensor, top_k: int) -> Tensor:
    """Positions [..., K] of the best of [..., N]: the larger score first, of equal ones the smaller position."""
    places = None
    if scores.device.type == "cpu":
        values, places = scores.topk(min(top_k + 1, scores.shape[-1]), dim=-1)
        # `topk` leaves the order of equal scores undefined.
        if (values[..., 1:] == values[..., :-1]).any() or values.isnan().any():
            places = None
    if places is None:
        places = scores.sort(dim=-1, descending=True, stable=True).indices
    # A tensor that is kept for backward must not be a view of all positions.
    return places[..., :top_k].contiguous()


class Shuffle:
    """A bijection of the entries of an N x N grid: a Feistel network whose halves are added modulo N."""

    def __init__(self, num_keys: int, round_keys: list[int]) -> None:
        self.num_keys, self.round_keys = num_keys, round_keys

    def __call__(self, entries: Tensor) -> Tensor:
        """int64 in [0, N^2), of any shape, to the same."""
        i, j = entries // self.num_keys, entries % self.num_keys
        for key in self.round_keys:
            hashed = (self._mix(j, key) >> 1) & 0x3FFFFFFFFFFFFFFF
            i, j = j, (i + hashed % self.num_keys) % self.num_keys
        return i * self.num_keys + j

    @staticmethod
    def _mix(counter: Tensor, key: int) -> Tensor:
        """SplitMix64 in int64, which wraps; its shifts are logical."""
        z = (counter + 1) * -7046029254386353131 + key
        z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687
        z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685
        return z ^ ((z >> 31) & (2**33 - 1))


_ELEMENTS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CODES = {"U8": torch.uint8}


def mapped_tensor(path: str, name: str, shape: tuple[int, int], bits: int | None = None) -> Tensor:
    """A tensor of a safetensors file as pages of that file, of which only those that are touched are read.

    The system keeps them while there is memory, and drops them when it is short. They are read one by one: the rows of
    a memory lie anywhere in its table, and reading ahead would read dozens of pages for each. Whoever cuts the file while it
    is mapped ends the process: what is held here is held when it is mapped.

    Args:
        shape: shape that the model's configuration gives.
        bits: bits of a code, of which bytes hold one or two; None: the tensor has floating-point elements.

    Raises:
        ValueError: the file lacks the tensor or some of its bytes, or has another.
    """
    with open(path, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            entry = json.loads(stream.read(size))[name]
            dtype = (_ELEMENTS if bits is None else _CODES)[entry["dtype"]]
            (begin, end), found = entry["data_offsets"], tuple(entry["shape"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged, or of another model: {name} is not there as it should be") from error
        whole = begin >= 0 and end - begin == math.prod(shape) * dtype.itemsize
        if found != shape or not whole or 8 + size + end > os.fstat(stream.fileno()).st_size:
            raise ValueError(
                f"{path} is damaged, or of another model: {name} is {list(found)} in bytes {begin} to {end} of "
                f"{os.fstat(stream.fileno()).st_size - 8 - size}, and the configuration has {list(shape)}"
            )
        # A private copy where it is written to, which nobody does: PyTorch warns of memory that cannot be written.
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_RANDOM"):  # not on Windows
        pages.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=8 + size + begin).view(shape)


def record_bytes(width: int, bits: int) -> int:
    """Bytes of a row in fewer bits: its scale in fp32, and a code of `bits` bits for each column."""
    return 4 + -(-width * bits // 8)


def decoded(records: Tensor, width: int, bits: int) -> Tensor:
    """Rows [n, V] in fp32 of records [n, bytes]: code times scale. Of codes of 4 bits the earlier is the lower half."""
    # Not `contiguous`, which leaves one row alone its stride, of which a number of 4 bytes is no part.
    scales, codes = records[:, :4].clone(memory_format=torch.contiguous_format), records[:, 4:].contiguous()
    scales = scales.view(torch.float32)
    if bits == 4:
        # Shifted up, the sign of a half becomes that of the byte; shifted down as a number with a sign, it stays.
        codes = torch.stack((codes << 4, codes & 0xF0), 2).flatten(1)[:, :width]
        return (codes.contiguous().view(torch.int8) >> 4) * scales
    return codes.view(torch.int8) * scales


def banks_of(memory: dict[str, Any]) -> range:
    """Numbers of the banks of one kind of memories."""
    # Folders of earlier versions have one kind.
    first = memory.get("first_bank", 0)
    return range(first, first + len(memory["bank_rows"]))


def rows_of_bank(memory: dict[str, Any], number: int) -> int:
    """Rows of a bank of this kind of memories, by its number."""
    rows: int = memory["bank_rows"][banks_of(memory).index(number)]
    return rows


class HotRows:
    """Rows of a table that are read often, kept where the model is, in its dtype.

    Each row has one place, which others share. A place has a worth: reads of its row add to it, reads of others take
    away, and when nothing is left one of them gets the place. What is read seldom does not drive out what is read often.
    """

    def __init__(self, num_places: int, width: int, like: Tensor) -> None:
        self._held = torch.zeros(num_places, width, dtype=like.dtype, device=like.device)
        self._row = torch.full((num_places,), -1, dtype=torch.int64, device=like.device)
        self._worth = torch.zeros(num_places, dtype=torch.int64, device=like.device)
        self.num_read, self.num_found = 0, 0

    def read(self, rows: Tensor, fetch: Callable[[Tensor], Tensor]) -> Tensor:
        """[n, V] of different rows [n]; `fetch` gets those that are not here."""
        # The shift spreads rows that stand at equal distances.
        places = (rows * 0x9E3779B1 >> 7) % len(self._row)
        is_here = self._row[places] == rows
        missing = ~is_here
        out = self._held[places]
        fetched = fetch(rows[missing])
        out[missing] = fetched
        self._worth.index_add_(0, places, is_here.long() * 2 - 1)
        is_given_up = self._worth[places[missing]] < 0
        taken, new = places[missing][is_given_up], rows[missing][is_given_up]
        # Of several rows for a place the largest gets it.
        self._row.scatter_reduce_(0, taken, new, "amax", include_self=False)
        is_taken = self._row[taken] == new
        self._held[taken[is_taken]] = fetched[is_given_up][is_taken]
        self._worth[taken] = 0
        self.num_read, self.num_found = self.num_read + len(rows), self.num_found + len(rows) - len(fetched)
        return out


class MegamemBank(nn.Module):
    """The tables that a set of memories shares, as parameters, or in host memory outside of the module.

    In fewer bits they are buffers of records of bytes (`decoded`).

    Attributes:
        on_host: the tables by name, where they are not in the module: pages of the weights' files.
        hot: rows of those that are read often, by the table's name.
    """

    def __init__(self, config: MegamemConfig, memory: dict[str, Any], number: int) -> None:
        super().__init__()
        self.activation, self.num_sums = memory["activation"], memory["num_sums"]
        self.widths = memory["tables"]
        self.names = tuple(self.widths)
        self.config, self.number = config, number
        self.bits = memory.get("table_bits")
        self.on_host: dict[str, Tensor] = {}
        self.hot: dict[str, HotRows] = {}
        self.num_rows = rows_of_bank(memory, number)
        for name in self.names if config.memory_device is None else ():
            if self.bits is None:
                self.register_parameter(name, nn.Parameter(torch.empty(self._shape(name))))
            else:
                self.register_buffer(name, torch.zeros(self._shape(name), dtype=torch.uint8))

    def _shape(self, table: str) -> tuple[int, int]:
        width = self.widths[table]
        return self.num_rows, width if self.bits is None else record_bytes(width, self.bits)

    def map_tables(self, folder: Any, **where: Any) -> None:
        """Map the tables that are no parameters from the weights' files; see `mapped`."""
        if self.config.memory_device is not None:
            self.on_host = self.mapped(folder, **where)

    def mapped(self, folder: Any, **where: Any) -> dict[str, Tensor]:
        """All tables by name, as pages of the weights' files.

        Args:
            folder: folder of the files, or its name on the hub.
            where: further arguments of `cached_file`.

        Raises:
            ValueError: the files lack a table, or have another.
        """
        index = cached_file(folder, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **where)
        files: dict[str, str] = {}
        if index is not None:
            with open(index, encoding="utf-8") as stream:
                files = json.load(stream)["weight_map"]
        found = {}
        for table in self.names:
            name = f"model.banks.{self.number}.{table}"
            file = cached_file(folder, files.get(name, SAFE_WEIGHTS_NAME), **where)
            found[table] = mapped_tensor(file, name, self._shape(table), self.bits)
        return found

    @torch.no_grad()
    def take(self, tables: dict[str, Tensor]) -> None:
        """Have these tables (`mapped`) in place of those that are here."""
        self.hot.clear()
        if self.config.memory_device is not None:
            self.on_host = tables
            return
        for name, rows in tables.items():
            (self.get_parameter if self.bits is None else self.get_buffer)(name).copy_(rows)

    def _rows(self, table: str, ids: Tensor, like: Tensor) -> Tensor:
        """Rows of a table, [*ids, columns], in the dtype and on the device of `like`."""
        if self.config.memory_device is None:
            if self.bits is None:
                return F.embedding(ids, self.get_parameter(table))
            return self._plain(table, self.get_buffer(table).index_select(0, ids.flatten()), like).view(*ids.shape, -1)
        if not self.on_host:
            # An engine made the model from its configuration alone, and reads the other weights by itself.
            self.map_tables(self.config.name_or_path)
        wanted, places = ids.unique(return_inverse=True)

        def fetch(rows: Tensor) -> Tensor:
            return self._plain(table, self.on_host[table].index_select(0, rows.cpu()).to(like.device), like)

        # Engines trace modules before they load them, and what a trace leaves behind is no row.
        if not self.config.hot_rows or isinstance(like, Proxy):
            return fetch(wanted)[places]
        if table not in self.hot:
            self.hot[table] = HotRows(self.config.hot_rows, self.widths[table], like)
        return self.hot[table].read(wanted, fetch)[places]

    def _plain(self, table: str, rows: Tensor, like: Tensor) -> Tensor:
        """Rows [n, columns] in the dtype of `like`, of those of a table, or their records."""
        if self.bits is not None:
            rows = decoded(rows, self.widths[table], self.bits)
        return rows.to(like.dtype)

    def forward(self, rows: Tensor, scores: Tensor, pre_input: Tensor | None, sums: Tensor | None) -> Tensor:
        """Values weighted by scores and by the products of their pre-values with `pre_input`, [T, B V].

        Args:
            rows: [T, J] of the bank.
            scores: [T, J, C]; score c weights the c-th part of a value's columns.
            pre_input: [T, P]; None without pre-values.
            sums: [T, J], which of the B sums each value belongs to; None if B is 1.
        """
        values = self._rows("values", rows, scores).unflatten(-1, (scores.shape[2], -1))
        if pre_input is not None:
            products = torch.einsum("tjp,tp->tj", self._rows("pre_values", rows, scores), pre_input)
            scores = scores * (F.gelu(products) if self.activation == "gelu" else products).unsqueeze(2)
        if sums is None:
            return torch.einsum("tjc,tjcd->tcd", scores, values).flatten(1)
        member = F.one_hot(sums, self.num_sums).to(values.dtype)
        return torch.einsum("tjb,tjcd->tbcd", member, scores.unsqueeze(3) * values).flatten(1)


class Banks:
    """The banks, for blocks: no module, which accelerate would move to where each block is."""

    def __init__(self, modules: nn.ModuleDict) -> None:
        self._banks = modules

    def __getitem__(self, number: int) -> LookUp:
        """The bank's `forward` with its hooks."""
        return self._banks[str(number)].__call__


class MegamemMemory(nn.Module):
    """A memory: its keys and projections, and how entries are retrieved, found in the bank, and projected.

    Weights have the names and shapes of the configuration's `layers`; which of them there are says what is computed.

    Attributes:
        query_proj: [queries of a token x d, D].
        query_norm: [d], and `keys_norm` [d], the gains of queries and keys.
        query_gain: [H, 2 d], and `query_bias` [H, 2 d], of the LayerNorm of heads that are queries. (A `query_bias` beside
            a `query_proj` is that projection's.)
        keys: [H, 2, N, d]; with Tucker scores [H, 2, N, d, R]; of memories with a key for every row [H, N, d].
        cores: [C, H, R, R]; `u` and `v`, [H, R], are the leading singular vectors of their sum over C, as they stood in
            the last step of training: the sign of the pair is theirs alone to know, and selects.
        permutation: [N^2], of the entries.
        expansion: [H, V, 2 d], which brings the sum of each head to the columns of that head.
    """

    query_proj: Tensor
    query_norm: Tensor
    query_gain: Tensor
    query_bias: Tensor
    keys: Tensor
    keys_norm: Tensor
    cores: Tensor
    u: Tensor
    v: Tensor
    permutation: Tensor
    expansion: Tensor

    def __init__(self, config: MegamemConfig, memory: dict[str, Any], layer: dict[str, Any]) -> None:
        super().__init__()
        self.memory, self.layer, self.epsilon = memory, layer, config.rms_norm_eps
        for name, shape in layer["weights"].items():
            if name == "permutation":
                self.register_buffer(name, torch.zeros(shape, dtype=torch.int64))
            elif name in ("u", "v"):
                # They select, and are kept in fp32 whatever the model's dtype.
                self.register_buffer(name, torch.zeros(shape, dtype=torch.float32))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        keys = layer["round_keys"]
        self.num_keys = layer["weights"]["keys"][1 if memory["scoring"] == "rows" else 2]
        self.shuffle = None if keys is None else Shuffle(self.num_keys, keys)

    def forward(self, hidden: Tensor, look_up: LookUp) -> Tensor:
        """The memory's output [b, s, D] for what it is given, [b, s, D], and what its bank computes."""
        scores_of_token = self.keys.numel() // self.keys.shape[-1]
        tokens = max(1, min(_TOKENS_AT_A_TIME, _SCORES_AT_A_TIME // scores_of_token))
        parts = [self._read(x, look_up) for x in hidden.flatten(0, 1).split(tokens)]
        return torch.cat(parts).view_as(hidden)

    def _read(self, x: Tensor, look_up: LookUp) -> Tensor:
        """[T, D] of [T, D]."""
        match self.memory["scoring"]:
            case "tucker":
                entries, scores = self._retrieve_tucker(x)
            case "rows":
                entries, scores = self._retrieve_rows(x)
            case _:
                entries, scores = self._retrieve(x)
        rows, sums = self._locate(entries.flatten(1))
        values = look_up(rows, scores.flatten(1, 2).to(x.dtype), self._pre_input(x), sums)
        return self._project(values.to(x.device), x)

    def _weight(self, name: str | None) -> Tensor | None:
        """A weight that only some memories have."""
        return None if name is None else getattr(self, name, None)

    def _linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        return F.linear(x, getattr(self, weight), self._weight(bias))

    # Retrieval: from tokens [T, D] to entries [T, H, K] of the grid, and their scores [T, H, K, C].

    def _retrieve(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Product keys: an entry's score is the sum of its row's and its column's; softmax within a head.

        Each half of a query meets keys of its own. Heads of attention are queries as they are, or normalised.
        """
        heads = self.memory["num_heads"]
        if self.memory["scoring"] != "heads":
            x = F.linear(x, self.query_proj, self._weight("query_bias"))
        elif self._weight("query_gain") is not None:
            by_head = _wide(x.view(x.shape[0], heads, -1))
            standard = F.layer_norm(by_head, by_head.shape[2:], eps=self.epsilon)
            x = (standard * _wide(self.query_gain) + _wide(self.query_bias)).to(x.dtype)
        queries = x.view(x.shape[0], 2 * heads, -1)
        if self._weight("query_norm") is not None:
            queries = rms_normalise(queries, self.query_norm, self.epsilon)
        products = _wide(torch.bmm(queries.transpose(0, 1), self.keys.flatten(0, 1).transpose(1, 2)))
        rows, columns = products.unflatten(0, (heads, 2)).permute(1, 2, 0, 3)
        row_ids, column_ids = (list_topk(side, self.memory["row_top_k"]) for side in (rows, columns))
        grid = rows.gather(2, row_ids).unsqueeze(3) + columns.gather(2, column_ids).unsqueeze(2)
        best = list_topk(grid.detach().flatten(2), self.memory["top_k"])
        scores = grid.flatten(2).gather(2, best).softmax(2)
        return self._entries(row_ids, column_ids, best), scores.unsqueeze(3)

    def _retrieve_tucker(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tucker-decomposed scores S_row C S_col; the first stage takes the core for its leading singular pair."""
        memory, cores = self.memory, _wide(self.cores)
        heads, num_keys, rank = memory["num_heads"], self.num_keys, cores.shape[-1]
        queries = F.linear(x, self.query_proj).unflatten(1, (-1, len(self.query_norm)))
        queries = rms_normalise(queries, self.query_norm, self.epsilon)
        if memory["queries"] == "single":
            queries = queries.repeat_interleave(rank, dim=1)
        keys = rms_normalise(self.keys.transpose(3, 4), self.keys_norm, self.epsilon)
        if memory["queries"] == "per_head":
            # One product per (side, head): [2H, T, d] x [2H, d, N R].
            keys = keys.transpose(0, 1).flatten(0, 1).flatten(1, 2)
            products = _wide(torch.bmm(queries.transpose(0, 1), keys.transpose(1, 2)))
            sides = products.view(2, heads, x.shape[0], num_keys, rank).transpose(1, 2)
        else:
            # One product per (side, rank): [2R, T, d] x [2R, d, H N].
            keys = keys.permute(1, 3, 4, 0, 2).flatten(0, 1).flatten(2, 3)
            products = _wide(torch.bmm(queries.transpose(0, 1), keys))
            sides = products.view(2, rank, x.shape[0], heads, num_keys).permute(0, 2, 3, 4, 1)
        directions = (self.u.to(cores.dtype), self.v.to(cores.dtype))
        ids = [
            list_topk(_sum(side[..., r] * direction[:, r, None] for r in range(rank)), memory["row_top_k"])
            for side, direction in zip(sides.detach(), directions, strict=True)
        ]
        row, column = (_pick(side, kept) for side, kept in zip(sides, ids, strict=True))
        core, ranks = cores.sum(0), range(rank)
        # Products and sums are rounded one by one, in the order of r, as in training: equal bits select equal entries.
        with torch.no_grad():
            mixed = [_sum(row[..., r] * core[:, r, s, None] for r in ranks) for s in ranks]
            grid = _sum(mixed[s].unsqueeze(3) * column[..., s].unsqueeze(2) for s in ranks)
            best = list_topk(grid.flatten(2), memory["top_k"])
        count = memory["row_top_k"]
        scores = torch.einsum("thkr,chrs,thks->thkc", _pick(row, best // count), cores, _pick(column, best % count))
        return self._entries(ids[0], ids[1], best), scores

    def _retrieve_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A key for every row: softmax of the best products within a head."""
        queries = F.linear(x, self.query_proj).view(x.shape[0], self.memory["num_heads"], -1)
        # One product per head: [H, T, d] x [H, d, N].
        products = _wide(torch.bmm(queries.transpose(0, 1), self.keys.transpose(1, 2)).transpose(0, 1))
        rows = list_topk(products.detach(), self.memory["top_k"])
        return rows, products.gather(2, rows).softmax(2).unsqueeze(3)

    def _entries(self, row_ids: Tensor, column_ids: Tensor, best: Tensor) -> Tensor:
        """Positions row N + column in the grid, of positions in the grid of candidates."""
        count = self.memory["row_top_k"]
        return row_ids.gather(2, best // count) * self.num_keys + column_ids.gather(2, best % count)

    # From entries to the output.

    def _locate(self, entries: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the bank behind entries [T, J], and the sum of each one's value: its virtual block's, or head's."""
        if self.shuffle is not None:
            entries = self.shuffle(entries)
        elif self._weight("permutation") is not None:
            entries = self.permutation[entries]
        num_rows, num_bank_rows = self.layer["num_rows"], rows_of_bank(self.memory, self.layer["bank"])
        rows = (entries % num_rows + self.layer["first_row"]) % num_bank_rows
        if self.memory["scoring"] == "heads":
            heads = torch.arange(self.memory["num_heads"], device=rows.device)
            return rows, heads.repeat_interleave(self.memory["top_k"]).expand_as(rows)
        return rows, entries // num_rows if self.memory["num_sums"] > 1 else None

    def _pre_input(self, x: Tensor) -> Tensor | None:
        """Input that pre-values are multiplied with, [T, P]: the projected input, or the input itself."""
        if "pre_values" not in self.memory["tables"]:
            return None
        return x if self._weight("pre_value_proj") is None else self._linear(x, "pre_value_proj")

    def _project(self, values: Tensor, x: Tensor) -> Tensor:
        """The output [T, D] of the summed values [T, B V]: gated, projected, and gated by a scalar per token."""
        if self._weight("silu_gate") is not None:
            values = values * F.silu(self._linear(x, "silu_gate", "silu_gate_bias"))
        if self._weight("expansion") is not None:
            by_head = values.unflatten(1, (self.memory["num_heads"], -1)).transpose(0, 1)
            values = torch.bmm(by_head, self.expansion).transpose(0, 1).flatten(1)
        if self._weight("value_proj") is not None:
            values = self._linear(values, "value_proj", "value_bias")
        if self._weight("output_gate") is not None:
            values = values * torch.sigmoid(self._linear(x, "output_gate", "output_gate_bias"))
        return values


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum(terms: Any) -> Tensor:
    first, *others = terms
    for term in others:
        first = first + term
    return first


def _pick(scores: Tensor, ids: Tensor) -> Tensor:
    """scores[t, h, ids[t, h, k], r]: [T, H, N, R] and [T, H, K] to [T, H, K, R]."""
    return scores.gather(2, ids.unsqueeze(3).expand(-1, -1, -1, scores.shape[3]))
