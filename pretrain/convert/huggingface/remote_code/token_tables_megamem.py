"""Memories whose rows a token's id addresses, or hashes of its n-grams: row v M + i is the i-th of the M of address v.

Rows are mixed into attention's values, or into latents that those are made of; or all blocks add mixtures of the same
normalised rows beside their feed-forwards, or their sum before attention; or rows stand for a feed-forward's up-projection.

Legend: b sequences, s tokens of each, T = b s, D hidden size, A addresses of a token, M rows of an address, V columns of a
row, n parts of the columns with gates of their own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_megamem import MegamemConfig
from .memory_megamem import LookUp, list_topk

# Where engines say which tensor-parallel rank this is.
_ENGINES = ("vllm.distributed", "sglang.srt.distributed")
# Bound the rows that are read at a time, [T, M, V].
_TOKENS_AT_A_TIME = 512


@dataclass(frozen=True)
class TokenRows:
    """The tokens, as memories read them that they address.

    Attributes:
        ids: [1, b, s].
        hashed: [A, b, s] each, addresses by n-grams, or [2 A, b, s] with the patterns of their signs, by the first bank of the
            kind that has them.
        shared: [b, s, A M, D], the normalised rows, or [b, s, V], the sum of rows, where all blocks read the same; else None.
    """

    ids: Tensor
    hashed: Mapping[int, Tensor] = field(default_factory=dict)
    shared: Tensor | None = None

    def of(self, memory: dict[str, Any]) -> Tensor:
        """[A, b, s] or [2 A, b, s], the addresses of a kind."""
        return self.hashed.get(first_bank(memory), self.ids)

    def to(self, device: torch.device) -> TokenRows:
        hashed = {bank: part.to(device) for bank, part in self.hashed.items()}
        return TokenRows(self.ids.to(device), hashed, None if self.shared is None else self.shared.to(device))


def first_bank(memory: dict[str, Any]) -> int:
    """The bank of a kind's first layer, which tells the kind from others."""
    number: int = memory["layers"][0]["bank"]
    return number


def rows_of(addresses: Tensor, memory: dict[str, Any]) -> Tensor:
    """[T, A M] rows of addresses [A, b, s], or of those and signs."""
    # Folders of earlier versions have one address of a token.
    slots = memory.get("slots_per_address", memory["rows_per_token"])
    # Heads may choose among the rows of a token.
    given = addresses[: len(addresses) // 2] if _has_signs(memory) else addresses
    rows = given.flatten(1).unsqueeze(2) * slots + torch.arange(slots, device=addresses.device)
    return rows.transpose(0, 1).flatten(1).contiguous()


def _has_signs(memory: dict[str, Any]) -> bool:
    address = memory.get("address")
    return address is not None and address.get("signs") is not None


@lru_cache(maxsize=4)
def sign_patterns(count: int, width: int, device: torch.device) -> Tensor:
    """[count, width] int8 of +1 and -1: the lowest bits of a SplitMix64 stream."""
    z = (torch.arange(1, count * width + 1, device=device)) * -7046029254386353131 + 0x7369676E73
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return (1 - 2 * (z & 1)).to(torch.int8).view(count, width)


def read_apart(addresses: Tensor, like: Tensor, memory: dict[str, Any], look_up: LookUp) -> Tensor:
    """[b, s, A M, V] rows of addresses [A, b, s], each by itself and with its signs, in the dtype and on the device of `like`."""
    addresses = addresses.to(like.device)
    rows = rows_of(addresses, memory).view(-1, 1)
    ones = torch.ones(len(rows), 1, 1, dtype=like.dtype, device=like.device)
    read = look_up(rows, ones, None, None).to(like.device).view(*addresses.shape[1:], memory["rows_per_token"], -1)
    if not _has_signs(memory):
        return read
    count = memory["address"]["signs"]["moduli"][0]
    patterns = sign_patterns(count, read.shape[-1], like.device)
    return read * patterns[addresses[len(addresses) // 2 :].movedim(0, -1)]


def _tensor_rank(engine: Any) -> tuple[int, int] | None:
    """This tensor-parallel rank and how many there are, of an engine that runs; None: it does not."""
    if engine is None:
        return None
    return engine.get_tensor_model_parallel_rank(), engine.get_tensor_model_parallel_world_size()


class MegamemMixedValues(nn.Module):
    """g_0 v + sum_i g_i E[w, i] with g = 2 sigmoid(W x), a gate for each part of the columns and slot; without a gate of
    the value's own g_0 is 1.

    Attributes:
        gate_proj: W, [n (A M + 1), D] or [n A M, D].
    """

    gate_proj: Tensor

    def __init__(self, memory: dict[str, Any], layer: dict[str, Any]) -> None:
        super().__init__()
        self.memory, self.layer = memory, layer
        self.gate_proj = nn.Parameter(torch.empty(layer["weights"]["gate_proj"]))

    def forward(self, values: Tensor, x: Tensor, addresses: Tensor, look_up: LookUp) -> Tensor:
        """Mixed values [b, s, V], or latents, of those and attention's input [b, s, D]; or a tensor-parallel rank's
        columns of them."""
        kept = columns_here(values.shape[-1], self.memory["tables"]["values"], self.layer["block"])
        parts, slots = self.memory["num_gate_heads"], self.memory["rows_per_token"]
        gates = 2 * torch.sigmoid(F.linear(x.flatten(0, 1), self.gate_proj).unflatten(1, (parts, -1)))
        rows, of_rows = rows_of(addresses.to(x.device), self.memory), gates[:, :, -slots:].transpose(1, 2)
        pieces = zip(rows.split(_TOKENS_AT_A_TIME), of_rows.split(_TOKENS_AT_A_TIME), strict=True)
        read = torch.cat([look_up(some, gate, None, None).to(x.device)[:, kept] for some, gate in pieces])
        if gates.shape[2] == slots:
            return values + read.view_as(values)
        of_columns = gates[:, :, 0].repeat_interleave(self.memory["tables"]["values"] // parts, 1)[:, kept]
        return of_columns.view_as(values) * values + read.view_as(values)


class MegamemHeadValues(nn.Module):
    """Memory that adds to values of all heads, with weights of the names and shapes of the configuration's `layers`."""

    def __init__(self, config: MegamemConfig, memory: dict[str, Any], layer: dict[str, Any]) -> None:
        super().__init__()
        self.memory, self.layer = memory, layer
        self.head_dim, self.num_heads = config.head_dim, config.num_key_value_heads
        for name, shape in layer["weights"].items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class MegamemValueNgrams(MegamemHeadValues):
    """v + W_up (g e), or g e added to one head's columns of v, with g = sigmoid(w x / C + b) of the first C columns of x, for the
    rows e of a token's addresses, side by side.

    Attributes:
        gate: w, [1, C], and `gate_bias` b, [1], where there is one.
        up_proj: W_up, [V, E], where all heads get the rows.
    """

    gate: Tensor
    gate_bias: Tensor
    up_proj: Tensor

    def forward(self, values: Tensor, x: Tensor, addresses: Tensor, look_up: LookUp) -> Tensor:
        """See `MegamemMixedValues.forward`."""
        width = self.num_heads * self.head_dim
        kept = columns_here(values.shape[-1], width, self.layer["block"])
        read = read_apart(addresses, x, self.memory, look_up).flatten(2)
        channels = self.gate.shape[1]
        logits = F.linear(x[..., :channels], self.gate) / channels
        if "gate_bias" in self.layer["weights"]:
            logits = logits + self.gate_bias
        gated = torch.sigmoid(logits) * read
        if "up_proj" in self.layer["weights"]:
            added = F.linear(gated, self.up_proj[kept])
        else:
            head = (self.layer["bank"] - self.memory["first_bank"]) % self.num_heads
            added = F.pad(gated, (head * self.head_dim, width - (head + 1) * self.head_dim))[..., kept]
        return values + added.view_as(values)


class MegamemChosenRows(MegamemHeadValues):
    """v[h] + 2 sigmoid(w_h x) sum_i a_i E[w, i] over the K best of a token's rows by logits, for each key/value head h: a are the
    logits' sigmoids over their sum, or of K = 1 the softmax over all of them.

    Attributes:
        gate: w, [G, C], of the first C columns of x.
        router: [G A M, D], of logits of x; or `router_of_values`, [A M, V], of logits of v[h].
        router_bias: added to logits.
    """

    gate: Tensor
    router: Tensor
    router_of_values: Tensor
    router_bias: Tensor

    def forward(self, values: Tensor, x: Tensor, addresses: Tensor, look_up: LookUp) -> Tensor:
        """See `MegamemMixedValues.forward`."""
        kept = columns_here(values.shape[-1], self.num_heads * self.head_dim, self.layer["block"])
        first = (kept.start or 0) // self.head_dim
        heads, x = slice(first, first + values.shape[-1] // self.head_dim), x.flatten(0, 1)
        if "router" in self.layer["weights"]:
            logits = F.linear(x, self.router, self.router_bias).unflatten(1, (self.num_heads, -1))[:, heads]
        else:
            logits = F.linear(values.reshape(len(x), -1, self.head_dim), self.router_of_values, self.router_bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        slots = list_topk(logits.detach(), self.memory["rows_per_token"] // self.memory["num_sums"])
        if slots.shape[2] == 1:
            weights = logits.softmax(2).gather(2, slots)
        else:
            found = torch.sigmoid(logits.gather(2, slots))
            weights = found / (found.sum(2, keepdim=True) + 1e-10)
        gates = 2 * torch.sigmoid(F.linear(x[:, : self.gate.shape[1]], self.gate)[:, heads])
        weights = (gates.unsqueeze(2) * weights).to(x.dtype).flatten(0, 1).unsqueeze(2)
        rows = rows_of(addresses.to(x.device), self.memory).gather(1, slots.flatten(1)).view(weights.shape[:2])
        return values + look_up(rows, weights, None, None).to(x.device).view_as(values)


def columns_here(count: int, width: int, block: int) -> slice:
    """Columns of all `width` values that a rank with `count` of them has, in an engine that split attention's heads.

    Raises:
        ValueError: nobody says which columns.
    """
    if count == width:
        return slice(None)
    rank = next((found for name in _ENGINES if (found := _tensor_rank(sys.modules.get(name)))), None)
    if rank is None or width % count:
        raise ValueError(
            f"block {block}: the memory mixes its rows into all heads of attention, tensor parallelism split them, and nobody "
            "says which are here: run this model with a tensor-parallel size of 1"
        )
    number, size = rank
    # Fewer heads than ranks are on several.
    first = number * (width // count) // size * count
    return slice(first, first + count)


class MegamemNgramEmbedding(nn.Module):
    """(h + W e) / (A + 1) for an input embedding h and the rows e of a token's A addresses, side by side; then amplified.

    Attributes:
        up_proj: W, [D, E].
    """

    up_proj: Tensor

    def __init__(self, config: MegamemConfig, memory: dict[str, Any], layer: dict[str, Any]) -> None:
        super().__init__()
        self.memory, self.layer, self.epsilon = memory, layer, config.rms_norm_eps
        self.up_proj = nn.Parameter(torch.empty(layer["weights"]["up_proj"]))

    def forward(self, hidden: Tensor, addresses: Tensor, look_up: LookUp) -> Tensor:
        """[b, s, D] of embeddings [b, s, D] and addresses [A, b, s]."""
        read = read_apart(addresses, hidden, self.memory, look_up)
        mean = (hidden + F.linear(read.flatten(2), self.up_proj)) / (read.shape[2] + 1)
        match self.memory["amplification"]:
            case "sqrt_width":
                return mean * math.sqrt(hidden.shape[-1])
            case "layer_norm":
                return F.layer_norm(mean, mean.shape[-1:], eps=self.epsilon)
        return mean


class MegamemSharedRead(nn.Module):
    """RMSNorm(E_k[w]) of every token w, once for all blocks.

    Attributes:
        gain: [A M, D], where rows have gains.
    """

    gain: Tensor

    def __init__(self, config: MegamemConfig, memory: dict[str, Any]) -> None:
        super().__init__()
        self.memory, self.epsilon = memory, config.rms_norm_eps
        self.has_gain = "gain" in self.memory["shared_weights"]
        if self.has_gain:
            self.gain = nn.Parameter(torch.empty(self.memory["shared_weights"]["gain"]))

    def forward(self, addresses: Tensor, like: Tensor, look_up: LookUp) -> Tensor:
        """[b, s, A M, D] of addresses [A, b, s], in the dtype and on the device of `like`."""
        read = read_apart(addresses, like, self.memory, look_up)
        wide = read.to(torch.promote_types(read.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (normal * self.gain if self.has_gain else normal).to(like.dtype)


class MegamemSummedRows(nn.Module):
    """The sum of the rows of a token's addresses, with their signs, once for all blocks."""

    def __init__(self, memory: dict[str, Any]) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, addresses: Tensor, like: Tensor, look_up: LookUp) -> Tensor:
        """[b, s, V] of addresses [A, b, s], in the dtype and on the device of `like`."""
        return read_apart(addresses, like, self.memory, look_up).sum(2)


class MegamemWeightedRows(nn.Module):
    """h + w b in the first columns, for the residual stream h, or each of several, and the shared sum of rows b.

    Attributes:
        gain: w, [1].
    """

    gain: Tensor

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        self.layer = layer
        self.gain = nn.Parameter(torch.empty(layer["weights"]["gain"]))

    def forward(self, hidden: Tensor, shared: Tensor) -> Tensor:
        """[b, s, D] of a stream [b, s, D] and the shared sums [b, s, V]; [b, s, n, D] of n streams."""
        added = self.gain * shared.to(hidden.device)
        added = added if hidden.dim() == added.dim() else added.unsqueeze(2)
        return hidden + F.pad(added, (0, hidden.shape[-1] - added.shape[-1]))


class MegamemTokenMixture(nn.Module):
    """sum_k a_k M_k with a = softmax(W n) over one place more than there are rows, the last of which adds nothing.

    Attributes:
        router: W, [A M + 1, D].
    """

    router: Tensor

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        self.layer = layer
        self.router = nn.Parameter(torch.empty(layer["weights"]["router"]))

    def forward(self, hidden: Tensor, shared: Tensor) -> Tensor:
        """[b, s, D] for the feed-forward's input [b, s, D] and the shared rows [b, s, A M, D]."""
        logits = F.linear(hidden, self.router)
        weights = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(hidden.dtype)
        return torch.matmul(weights[..., None, :-1], shared.to(hidden.device)).squeeze(-2)


class MegamemTokenFeedForward(nn.Module):
    """W_down (SiLU(W_gate n) * E[w]), a feed-forward whose up-projection is the token's row.

    Attributes:
        gate_proj: W_gate, [V, D].
        down_proj: W_down, [D, V].
    """

    gate_proj: Tensor
    down_proj: Tensor

    def __init__(self, memory: dict[str, Any], layer: dict[str, Any]) -> None:
        super().__init__()
        self.memory, self.layer = memory, layer
        self.gate_proj = nn.Parameter(torch.empty(layer["weights"]["gate_proj"]))
        self.down_proj = nn.Parameter(torch.empty(layer["weights"]["down_proj"]))

    def forward(self, hidden: Tensor, addresses: Tensor, look_up: LookUp) -> Tensor:
        """[b, s, D] for the feed-forward's input [b, s, D] and addresses [A, b, s]."""
        rows = rows_of(addresses.to(hidden.device), self.memory)
        ones = torch.ones(*rows.shape, 1, dtype=hidden.dtype, device=hidden.device)
        gate = F.linear(hidden.flatten(0, 1), self.gate_proj)
        read = look_up(rows, ones, None, None).to(gate.device)
        return F.linear(F.silu(gate) * read, self.down_proj).view_as(hidden)
