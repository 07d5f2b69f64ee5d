"""Notes that earlier tokens of an engine's requests left, for memories that look back at them.

vLLM runs the tokens of many requests one behind the other, of each those that it has not computed yet, and keeps keys
and values in pages, whose places it tells attention. Kept at the same places, anything else of a token is there whenever
its keys are: where requests share a prefix, come in chunks, or are computed once more.

Legend: T tokens of all requests, R requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# As transformers knows the attention that vLLM brings.
ENGINE = "vllm"


class PagedTokens:
    """The tokens of one forward pass, and the places of those before them.

    Attributes:
        places: [1, T] of tokens in their requests.
    """

    def __init__(
        self, pages: MegamemPages, places: Tensor, slots: Tensor, requests: Tensor, table: Tensor, page_size: int
    ) -> None:
        self.places = places
        self._pages, self._slots, self._requests, self._table = pages, slots, requests, table
        self._page_size = page_size

    def extended(self, reader: str, x: Tensor, width: int) -> Callable[[int], Tensor]:
        """See `RecentTokens.extended`, of x [1, T, ...]; before a request's first token stands anything."""
        held = self._pages.held_by(reader, x)
        # Tokens that fill up a batch have the place -1, which is nobody's.
        held[self._slots] = x[0].detach()
        return lambda lag: held[self._places_before(lag)].unsqueeze(0)

    def _places_before(self, lag: int) -> Tensor:
        earlier = (self.places[0] - lag).clamp(min=0)
        page = self._table[self._requests, earlier // self._page_size].long()
        return page * self._page_size + earlier % self._page_size


class MegamemPages:
    """Notes of readers about tokens, at the places that an engine's cache has for these: as many as that has."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._num_slots, self._page_size = 0, 0

    def held_by(self, reader: str, like: Tensor) -> Tensor:
        """[places, ...] of a reader of `like` [1, T, ...]."""
        held = self._held.get(reader)
        if held is None or len(held) != self._num_slots:
            held = self._held[reader] = like.new_zeros(self._num_slots, *like.shape[2:])
        return held

    def of_step(self, attention: nn.Module, position_ids: Tensor) -> PagedTokens | None:
        """The tokens at `position_ids` [1, T]; None where the engine only tries out how much memory it needs.

        Args:
            attention: attention of any block, in which the engine put its own.

        Raises:
            ValueError: the engine tells less than is needed, or brings pages from elsewhere.
        """
        try:
            # It is there if this runs, and the exported folder does not need it.
            engine: Any = sys.modules["vllm.forward_context"]
            context = engine.get_forward_context()
            step = context.attn_metadata
            if step is None:
                return None
            layer: Any = attention.attn
            step = step[layer.layer_name]
            starts, table, slots = step.query_start_loc, step.block_table, step.slot_mapping
            cache, elements = layer.kv_cache, 2 * layer.num_kv_heads * layer.head_size
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"this version of vLLM does not say where its cache holds a request's tokens ({error!r}), which the "
                "memory's n-grams look back at: take vLLM 0.32, or generate with transformers"
            ) from error
        transfer: Any = sys.modules.get("vllm.distributed.kv_transfer")
        if transfer is not None and transfer.has_kv_transfer_group():
            raise ValueError(
                "vLLM gets keys and values from another place (kv_transfer_config), and not what the memory's n-grams look "
                "back at: leave that option out"
            )
        places = position_ids[0]
        requests = torch.searchsorted(starts.long(), torch.arange(len(places), device=places.device), right=True) - 1
        requests = requests.clamp(max=len(starts) - 2)
        slots = torch.nn.functional.pad(
            slots[: len(places)].long(), (0, len(places) - len(slots[: len(places)])), value=-1
        )
        self._num_slots = cache.numel() // elements + 1
        if not self._page_size:
            found = _page_sizes(set(cache.shape), places, slots, requests, table)
            if len(found) > 1:
                # Of a trial run: no request is given the page 0, which alone is at the same place whatever the size.
                return None
            (self._page_size,) = found
        return PagedTokens(self, position_ids, slots, requests, table, self._page_size)


def _page_sizes(sizes: set[int], places: Tensor, slots: Tensor, requests: Tensor, table: Tensor) -> list[int]:
    """Page sizes, out of some, by which an engine's table of pages says where its tokens are.

    Raises:
        ValueError: no page size fits.
    """
    is_token = slots >= 0
    places, requests, slots = places[is_token], requests[is_token], slots[is_token]
    found = []
    for size in sizes:
        pages = (places // size).clamp(max=table.shape[1] - 1)
        if torch.equal(table[requests, pages].long() * size + places % size, slots):
            found.append(size)
    if not found:
        raise ValueError(
            "vLLM's cache holds tokens elsewhere than its table of pages says, and the memory's n-grams look back at "
            "them: take vLLM 0.32, or generate with transformers"
        )
    return found
