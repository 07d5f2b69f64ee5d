"""Memories whose rows a token's id alone addresses: row v M + i is the i-th of the M of id v.

Rows are mixed into attention's values, or into latents that those are made of; or all blocks add mixtures of the same
normalised rows beside their feed-forwards.

Legend: b sequences, s tokens of each, T = b s, D hidden size, M rows of an id, V columns of a row, n parts of the columns
with gates of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_megamem import MegamemConfig
from .memory_megamem import LookUp

# Bound the rows that are read at a time, [T, M, V].
_TOKENS_AT_A_TIME = 512


@dataclass(frozen=True)
class TokenRows:
    """The tokens, as memories read them that they address.

    Attributes:
        ids: [b, s].
        shared: [b, s, M, D], the normalised rows, where all blocks read the same; else None.
    """

    ids: Tensor
    shared: Tensor | None = None

    def to(self, device: torch.device) -> TokenRows:
        return TokenRows(self.ids.to(device), None if self.shared is None else self.shared.to(device))


def rows_of(ids: Tensor, rows_per_token: int) -> Tensor:
    """[T, M] rows of ids of any shape."""
    return ids.flatten().unsqueeze(1) * rows_per_token + torch.arange(rows_per_token, device=ids.device)


class MegamemMixedValues(nn.Module):
    """g_0 v + sum_i g_i E[w, i] with g = 2 sigmoid(W x), a gate for each part of the columns and slot; without a gate of
    the value's own g_0 is 1.

    Attributes:
        gate_proj: W, [n (M + 1), D] or [n M, D].
    """

    gate_proj: Tensor

    def __init__(self, config: MegamemConfig, layer: dict[str, Any]) -> None:
        super().__init__()
        self.memory, self.layer = config.memory, layer
        self.gate_proj = nn.Parameter(torch.empty(layer["weights"]["gate_proj"]))

    def forward(self, values: Tensor, x: Tensor, ids: Tensor, look_up: LookUp) -> Tensor:
        """Mixed values [b, s, V], or latents, of those and attention's input [b, s, D]."""
        if values.shape[-1] != self.memory["tables"]["values"]:
            raise ValueError(
                f"block {self.layer['block']}: the memory mixes its rows into all heads of attention, and tensor "
                "parallelism split them: run this model with a tensor-parallel size of 1"
            )
        parts, slots = self.memory["num_gate_heads"], self.memory["rows_per_token"]
        gates = 2 * torch.sigmoid(F.linear(x.flatten(0, 1), self.gate_proj).unflatten(1, (parts, -1)))
        rows, of_rows = rows_of(ids.to(x.device), slots), gates[:, :, -slots:].transpose(1, 2)
        pieces = zip(rows.split(_TOKENS_AT_A_TIME), of_rows.split(_TOKENS_AT_A_TIME), strict=True)
        read = torch.cat([look_up(some, gate, None, None).to(x.device) for some, gate in pieces]).view_as(values)
        if gates.shape[2] == slots:
            return values + read
        own = gates[:, :, :1] * values.flatten(0, 1).unflatten(1, (parts, -1))
        return own.view_as(values) + read


class MegamemSharedRead(nn.Module):
    """RMSNorm(E_k[w]) of every token w, once for all blocks.

    Attributes:
        gain: [M, D], where rows have gains.
    """

    gain: Tensor

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__()
        self.memory, self.epsilon = config.memory, config.rms_norm_eps
        self.has_gain = "gain" in self.memory["shared_weights"]
        if self.has_gain:
            self.gain = nn.Parameter(torch.empty(self.memory["shared_weights"]["gain"]))

    def forward(self, ids: Tensor, like: Tensor, look_up: LookUp) -> Tensor:
        """[b, s, M, D] of ids [b, s], in the dtype and on the device of `like`."""
        rows = rows_of(ids.to(like.device), self.memory["rows_per_token"]).view(-1, 1)
        ones = torch.ones(len(rows), 1, 1, dtype=like.dtype, device=like.device)
        read = look_up(rows, ones, None, None).to(like.device).view(*ids.shape, self.memory["rows_per_token"], -1)
        wide = read.to(torch.promote_types(read.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (normal * self.gain if self.has_gain else normal).to(like.dtype)


class MegamemTokenMixture(nn.Module):
    """sum_k a_k M_k with a = softmax(W n) over one place more than there are rows, the last of which adds nothing.

    Attributes:
        router: W, [M + 1, D].
    """

    router: Tensor

    def __init__(self, config: MegamemConfig, layer: dict[str, Any]) -> None:
        super().__init__()
        self.layer = layer
        self.router = nn.Parameter(torch.empty(layer["weights"]["router"]))

    def forward(self, hidden: Tensor, shared: Tensor) -> Tensor:
        """[b, s, D] for the feed-forward's input [b, s, D] and the shared rows [b, s, M, D]."""
        logits = F.linear(hidden, self.router)
        weights = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(hidden.dtype)
        return torch.matmul(weights[..., None, :-1], shared.to(hidden.device)).squeeze(-2)
