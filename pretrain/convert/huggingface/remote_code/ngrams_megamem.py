"""Memories that hashes of a token's n-grams address, and what they look back at while text is generated.

A token reads a row for each head, at a hash of its last tokens' ids. A gate of the residual stream weighs a projection
of the rows, a short convolution over tokens follows, and both join the residual stream before attention.

Legend: b sequences, s tokens of each, n residual streams, D hidden size, N tokens of the longest n-gram, H heads, V columns
of a row, E = H V, w tokens before the first one of a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_megamem import MegamemConfig
from .memory_megamem import LookUp, rms_normalise
from .pages_megamem import PagedTokens

# Below it the root of a score is that of this.
_LEAST_SCORE = 1e-6


class RecentTokens(CacheLayerMixin):
    """Tokens before new ones, as n-grams and convolutions read them: one more layer of transformers' cache.

    Attributes:
        held: the last tokens' ids, and what each convolution read of them, [b, w, ...], by the name of the reader.
    """

    is_sliding = False
    is_compileable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Tensor] = {}

    def extended(self, reader: str, x: Tensor, width: int) -> Callable[[int], Tensor]:
        """x [b, s, ...] of the tokens that are up to `width` before, by their distance; zeros before the first token."""
        before = self.held.get(reader)
        if before is None:
            before = self.held[reader] = _zeros_before(x, width)
        whole = torch.cat((before, x), 1)
        before.copy_(whole[:, whole.shape[1] - width :].detach())
        return lambda lag: whole[:, width - lag : whole.shape[1] - lag]

    def reset(self) -> None:
        for each in self.held.values():
            each.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.held = {reader: x.index_select(0, indices.to(x.device)) for reader, x in self.held.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.held = {reader: x.repeat_interleave(repeats, 0) for reader, x in self.held.items()}

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"{abs(tokens_to_remove)} tokens are to be taken back, but this model keeps the last few tokens alone, and not "
                "those before them: generate without an assistant and without candidates from the prompt"
            )

    def offload(self) -> None:
        """Stay: they are a few tokens."""

    def prefetch(self) -> None:
        """Stay."""

    # It is no layer of keys and values.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """Name of the same in older versions of transformers."""
        return -1


def recent_tokens(cache: Cache | None, num_blocks: int) -> RecentTokens:
    """The layer behind those of a cache's blocks, made where it is not there; without a cache one that nobody keeps."""
    if cache is None:
        return RecentTokens()
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < num_blocks:
            cache.layers.append(cache.layer_class_to_replicate())
    if len(cache.layers) == num_blocks:
        cache.layers.append(RecentTokens())
    found: RecentTokens = cache.layers[num_blocks]
    return found


def _zeros_before(x: Tensor, width: int) -> Tensor:
    return x.new_zeros(x.shape[0], width, *x.shape[2:])


@dataclass(frozen=True)
class Ngrams:
    """The last tokens of every token, as all memories read them.

    Attributes:
        window: [N, b, s] ids: of the token itself, of the one before it, and so on.
        places: [b, s] of tokens in their texts; below 0 at padding.
        paged: the tokens of an engine's requests; None: the cache is one of transformers'.
    """

    window: Tensor
    places: Tensor
    paged: PagedTokens | None = None

    def to(self, device: torch.device) -> Ngrams:
        return Ngrams(self.window.to(device), self.places.to(device), self.paged)


def places_in_texts(position_ids: Tensor, mask: Tensor | None, *, is_continued: bool) -> Tensor:
    """[b, s]: tokens between each token and the start of its text, which neither padding nor a document crosses.

    Args:
        position_ids: [b, s], or [1, s].
        mask: [b, tokens in the cache and here], 0 at padding; None: there is none that says it of every token.
        is_continued: the cache has tokens.
    """
    length = position_ids.shape[1]
    if mask is not None:
        numbers = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        since_padding = numbers - torch.where(mask == 0, numbers, 0).cummax(1).values - 1
        return torch.minimum(position_ids, since_padding[:, mask.shape[1] - length :])
    if is_continued:
        return position_ids
    return torch.minimum(position_ids, torch.arange(length, device=position_ids.device))


def ngrams_of(
    input_ids: Tensor, places: Tensor, settings: dict[str, Any], recent: RecentTokens | PagedTokens, reader: str
) -> Ngrams:
    """The n-grams that end at `input_ids` [b, s], which `recent` keeps for one reader; what would stand before a text reads
    the boundary's id."""
    order, boundary = settings["max_order"], settings["boundary_id"]
    # Addresses of rows have an id of their own for what is not there.
    missing = settings.get("missing_id", boundary)
    places = places.expand_as(input_ids)
    whole = recent.extended(reader, input_ids, order - 1)
    window, seen = [input_ids], torch.ones_like(places, dtype=torch.bool)
    for lag in range(1, order):
        before = whole(lag)
        inside = places >= lag
        seen = seen & inside & (before != boundary) if settings["cut_at_boundary"] else inside
        window.append(torch.where(seen, before, missing))
    return Ngrams(torch.stack(window), places, recent if isinstance(recent, PagedTokens) else None)


def hashed(ngrams: Ngrams, address: dict[str, Any]) -> Tensor:
    """[A, b, s] addresses of tokens: offset + (sum or xor over an n-gram of id times multiplier) mod a modulus; behind them
    [A, b, s] patterns of signs, which are hashes of the same form, where rows have signs.
    """
    found = []
    numbers = zip(*(address[name] for name in ("orders", "multipliers", "moduli", "offsets")), strict=True)
    for order, multipliers, modulus, offset in numbers:
        products = [ids * factor for ids, factor in zip(ngrams.window[:order], multipliers, strict=False)]
        mixed = products[0]
        for product in products[1:]:
            mixed = mixed ^ product if address["operation"] == "xor" else mixed + product
        mixed = mixed % modulus
        if address["missing"] is not None:
            mixed = torch.where(ngrams.places < order - 1, address["missing"], mixed)
        found.append(mixed + offset)
    # Signs have none of their own, and folders of earlier versions no signs.
    signs = address.get("signs")
    return torch.stack(found) if signs is None else torch.cat((torch.stack(found), hashed(ngrams, signs)))


class MegamemNgramMemory(nn.Module):
    """u + SiLU(conv(RMS(u))) with u = g W_V e, g = sigmoid(sign(s) sqrt(|s|)) and s = <RMS(W_K e), RMS(h)> / sqrt(D),
    for the rows e of the n-grams that end at a token and the residual stream h. Of n streams each has its own W_K, norms and
    convolution.

    Weights have the names and shapes of the configuration's `layers`.

    Attributes:
        key_proj: [n D, E], and `value_proj` [D, E], with `key_bias` [n D] and `value_bias` [D] where there are.
        key_gain: [n D], and `query_gain` [n D].
        conv: [n D, taps], and `conv_gain` [n D], where there is a convolution; its taps are N tokens apart.
        multipliers: [N] int64, of the hashes.
        token_map: [vocabulary] int64, of ids to those that are hashed, where there is one.
    """

    key_proj: Tensor
    value_proj: Tensor
    key_gain: Tensor
    query_gain: Tensor
    conv: Tensor
    conv_gain: Tensor
    multipliers: Tensor
    token_map: Tensor

    def __init__(self, config: MegamemConfig, memory: dict[str, Any], layer: dict[str, Any]) -> None:
        super().__init__()
        self.memory, self.layer = memory, layer
        # Folders of earlier versions name none.
        own = memory.get("epsilons", [None] * 3)
        self.key_epsilon, self.query_epsilon, self.conv_epsilon = (
            config.rms_norm_eps if each is None else each for each in own
        )
        self.has_map, self.has_convolution = "token_map" in layer["weights"], "conv" in layer["weights"]
        for name, shape in layer["weights"].items():
            if name in ("multipliers", "token_map"):
                self.register_buffer(name, torch.zeros(shape, dtype=torch.int64))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def rows(self, window: Tensor) -> Tensor:
        """[b, s, H] rows of the bank: (XOR over an n-gram of id times multiplier) mod a head's rows, order by order."""
        if self.has_map:
            window = self.token_map[window]
        mixed, rows, first = window[0] * self.multipliers[0], [], 0
        sizes = self.layer["head_rows"]
        heads = len(sizes) // (len(window) - 1)
        for order in range(1, len(window)):
            mixed = mixed ^ (window[order] * self.multipliers[order])
            for size in sizes[(order - 1) * heads : order * heads]:
                rows.append(mixed % size + first)
                first += size
        return torch.stack(rows, -1)

    def forward(self, hidden: Tensor, look_up: LookUp, ngrams: Ngrams, recent: RecentTokens | PagedTokens) -> Tensor:
        """The sum [b, s, D] that joins the residual stream, which it is given, before attention; of streams [b, s, n, D]."""
        ngrams = ngrams.to(hidden.device)
        rows = self.rows(ngrams.window)
        ones = torch.ones(rows.numel(), 1, 1, dtype=hidden.dtype, device=hidden.device)
        read = look_up(rows.view(-1, 1), ones, None, None).to(hidden.device).view(*hidden.shape[:2], -1)
        value = F.linear(read, self.value_proj, getattr(self, "value_bias", None))
        value = value if hidden.dim() == value.dim() else value.unsqueeze(2)
        key = F.linear(read, self.key_proj, getattr(self, "key_bias", None)).view(hidden.shape)
        of_stream = hidden.shape[2:]
        key = rms_normalise(key, self.key_gain.view(of_stream), self.key_epsilon)
        query = rms_normalise(hidden, self.query_gain.view(of_stream), self.query_epsilon)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        score = (key.to(wide) * query.to(wide)).sum(-1, keepdim=True) / math.sqrt(hidden.shape[-1])
        root = score.abs().clamp_min(_LEAST_SCORE).sqrt()
        # In a module without biases and convolution a score of 0 has a sign.
        zero_has_sign = not self.has_convolution and "key_bias" not in self.layer["weights"]
        gate = torch.sigmoid(root.copysign(score) if zero_has_sign else score.sign() * root)
        gated = (gate * value.to(wide)).to(hidden.dtype)
        if not self.has_convolution:
            return gated
        normal = rms_normalise(gated, self.conv_gain.view(of_stream), self.conv_epsilon).flatten(2)
        convolved = self._convolved(normal, ngrams.places, recent).view(gated.shape)
        return gated + F.silu(convolved).to(hidden.dtype)

    def _convolved(self, x: Tensor, places: Tensor, recent: RecentTokens | PagedTokens) -> Tensor:
        """y_t = sum_j w_j x_{t - (taps - 1 - j) N} of x [b, s, n D], in at least fp32; zeros before a text."""
        taps, apart = self.conv.shape[1], self.memory["max_order"]
        width = (taps - 1) * apart
        whole = recent.extended(f"block {self.layer['block']}", x, width)
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.zeros_like(x, dtype=wide)
        for tap in range(taps):
            lag = (taps - 1 - tap) * apart
            # Padding may hold what is no number.
            read = torch.where((places >= lag).unsqueeze(2), whole(lag), 0)
            out = out + read.to(wide) * self.conv[:, tap].to(wide)
        return out
