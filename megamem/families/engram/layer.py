"""Engram's layer.

Legend: s tokens of a sequence on this context-parallel rank and t of them on this rank, b sequences, T = t b, n residual
streams, D hidden size, N highest order, H heads, V columns of a row, E = H V. Of one stream [n, D] is [D], and [n] is not
there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.chunk.halo import UNCUT, Halo, extended_in_one
from megamem.chunk.inputs import Inputs
from megamem.config.width import Width
from megamem.layers.layer import MemoryLayer, ScoreCalibration
from megamem.layers.read_apart import read_apart
from megamem.parameters.declaration import parameter_device
from megamem.placement.spans import resolve_placement
from megamem.residual_streams.operations import stream_norm, wide_dtype

from .config import EngramConfig
from .convolution import causal_convolution
from .hashing import multipliers_of
from .token_map import read_token_map

_LEAST_SCORE = 1e-6
"""Below it the root of a score is that of this; its gradient would grow without bound."""


class EngramLayer(MemoryLayer):
    """u + SiLU(conv(RMS(u))) with u = g W_V e, g = sigmoid(sign(s) sqrt(|s|)) and s = <RMS(W_K e), RMS(h)> / sqrt(D),
    for the rows e of the n-grams that end at a token and the residual stream h.

    Of several streams each has its own W_K, norms and convolution; rows and W_V are for all of them.
    """

    memory: EngramConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        memory, device = self.memory, parameter_device(self.config)
        self.key_epsilon, self.query_epsilon, self.conv_epsilon = (
            self.epsilon if own is None else own
            for own in (memory.key_epsilon, memory.query_epsilon, memory.conv_epsilon)
        )
        all_streams = hidden_size * (self.num_streams or 1)
        self.key_proj = self._matrix(all_streams, memory.memory_width, Width.OUTPUTS)
        self.value_proj = self._matrix(hidden_size, memory.memory_width, Width.OUTPUTS)
        self.key_bias = self._weight(all_streams) if memory.projection_biases else None
        self.value_bias = self._weight(hidden_size) if memory.projection_biases else None
        self.key_gain, self.query_gain = self._weight(all_streams), self._weight(all_streams, width=Width.SCORES)
        if memory.conv_kernel:
            self.conv_gain, self.conv = self._weight(all_streams), self._weight(all_streams, memory.conv_kernel)
        sizes = torch.tensor(memory.sizes(self._number + 1)[-1], device=device)
        self.register_buffer("sizes", sizes, persistent=False)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        orders = torch.arange(2, memory.max_order + 1, device=device)
        self.register_buffer("orders", orders, persistent=False)
        self.register_buffer("boundary_id", torch.tensor(memory.boundary_id, device=device), persistent=False)
        # Checkpoints hold them: neither NumPy's generators nor Unicode's tables promise to stay as they are.
        self.register_buffer("multipliers", torch.zeros(memory.max_order, dtype=torch.int64, device=device))
        if memory.token_map is not None:
            assert memory.vocab_size is not None
            self.register_buffer("token_map", torch.zeros(memory.vocab_size, dtype=torch.int64, device=device))

    def calibrate(self, seed: int) -> ScoreCalibration | None:
        """Set the multipliers and the map of token ids.

        Raises:
            ValueError: the file of the map cannot be read, or is not that of this configuration.
        """
        memory, index = self.memory, self._number
        block = resolve_placement(memory.placement, self.config.num_layers)[index].read
        drawn = multipliers_of(memory.rules, memory.max_order, memory.num_hashed_ids, memory.hash_seed, index, block)
        self.multipliers.copy_(torch.tensor(drawn))
        if memory.token_map is not None:
            assert memory.compressed_vocab_size is not None
            self.token_map.copy_(
                read_token_map(Path(memory.token_map), len(self.token_map), memory.compressed_vocab_size)
            )
        return None

    @property
    def _number(self) -> int:
        """Number of the layer, which has a bank of its own, among those of its family."""
        return self.view.bank_of_family

    @classmethod
    def addresses(cls, layers: Sequence[Self], token_ids: Tensor, positions: Tensor, halo: Halo) -> Tensor:
        """See `MemoryLayer.addresses`: the rows of all layers' heads, [layers H, s, b]."""
        first, memory = layers[0], layers[0].memory
        # Tokens that are hidden read as the boundary, which is a raw id: it is mapped where it is a token.
        boundary = first.boundary_id if memory.token_map is None else first.token_map[memory.boundary_id]
        num_orders, heads = memory.ids_before, memory.heads_per_order
        groups = len(layers) * num_orders
        # One copy per microbatch, as loading a checkpoint changes multipliers, which a layer's orders share.
        numbers = torch.cat(
            [
                *(each.multipliers for each in layers for _ in range(num_orders)),
                *(each.sizes for each in layers),
                *(each.offsets for each in layers),
                *(each.orders for each in layers),
            ]
        )
        sizes = (memory.max_order, heads, heads, 1)
        multipliers, moduli, offsets, orders = (
            part.view(groups, size)
            for part, size in zip(numbers.split([groups * size for size in sizes]), sizes, strict=True)
        )
        return first.kernels.ngram_hashes(
            extended_in_one(halo, first.hashed_ids(token_ids), num_orders),
            *(positions, multipliers, moduli, offsets, orders.squeeze(1), boundary, boundary),
            *("xor", memory.cuts_at_boundary, None),
        )

    @classmethod
    def rows_read(cls, layers: Sequence[Self], token_ids: Tensor, positions: Tensor) -> Mapping[int, Tensor]:
        """See `MemoryLayer.rows_read`."""
        rows = cls.addresses(layers, token_ids, positions, UNCUT).chunk(len(layers))
        return {layer.view.bank: own for layer, own in zip(layers, rows, strict=True)}

    def hashed_ids(self, token_ids: Tensor) -> Tensor:
        """See `MemoryLayer.hashed_ids`."""
        return token_ids if self.memory.token_map is None else self.token_map[token_ids]

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.forward`."""
        rows = self._rows(inputs)
        return self.mixed(hidden, self._read_for(hidden, rows), rows, inputs)

    def slot_weights(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.slot_weights`: the gate, of several streams their mean."""
        gate = self.gate(hidden, self._read_for(hidden, self._rows(inputs)))
        return gate.flatten(0, 1).unsqueeze(1) if self.num_streams is None else gate.mean(2).flatten().unsqueeze(1)

    def _rows(self, inputs: Inputs) -> Tensor:
        heads = self.memory.num_heads
        first = self.first_address + self.place * heads
        return inputs.addresses_of(first, heads).flatten(1).t().contiguous()

    def _read_for(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.read(rows, hidden.dtype).view(*hidden.shape[:2], self.memory.memory_width)

    def read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """e [T, E] of `rows` [T, H]: each head's row, side by side."""
        return read_apart(self.lookup, rows, dtype).flatten(1)

    def mixed(self, hidden: Tensor, read: Tensor, rows: Tensor, inputs: Inputs) -> Tensor:
        """[t, b, n, D] of the residual streams [t, b, n, D] and what was read for them, [t, b, E]."""
        value = F.linear(read, self.value_proj, self.value_bias)
        gate = self.gate(hidden, read)
        if self.num_streams is not None:
            value = value.unsqueeze(2)
        gated = (gate.unsqueeze(-1) * value.to(gate.dtype)).to(hidden.dtype)
        out = gated
        if self.memory.conv_kernel:
            out = gated + F.silu(self._convolved(gated, inputs)).to(hidden.dtype)
        self.observe(rows, None, out.flatten(2).flatten(0, 1))
        return out

    def gate(self, hidden: Tensor, read: Tensor) -> Tensor:
        """g [t, b, n], in at least fp32, of h [t, b, n, D] and e [t, b, E]."""
        key = F.linear(read, self.key_proj, self.key_bias).view(hidden.shape)
        key = self._normal(key, self.key_gain, self.key_epsilon)
        query = self._normal(hidden, self.query_gain, self.query_epsilon)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        score = (key.to(wide) * query.to(wide)).sum(-1) / math.sqrt(hidden.shape[-1])
        root = score.abs().clamp_min(_LEAST_SCORE).sqrt()
        return torch.sigmoid(root.copysign(score) if self.memory.zero_has_sign else score.sign() * root)

    def _convolved(self, gated: Tensor, inputs: Inputs) -> Tensor:
        normal = self._normal(gated, self.conv_gain, self.conv_epsilon).flatten(2)
        halo = self.halo if inputs.cache is None else inputs.cache.halo(self.name)
        width = self.memory.reach
        out = causal_convolution(
            halo.extended(normal, width), self.conv, inputs.positions, dilation=self.memory.max_order, width=width
        )
        return out.view(gated.shape)

    def _normal(self, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        """RMS(x) of x [t, b, n, D], of each stream by itself."""
        if self.num_streams is None:
            return self.kernels.rms_norm(x, gain, epsilon)
        return stream_norm(x, gain.to(wide_dtype(x.dtype)).view(x.shape[2:]), epsilon)
