"""Contextual collapse: how far apart two tokens' hidden states are in the same contexts, layer by layer (TIDE, Fig. 2)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lab.analysis.deciles import COMMON, MID, RARE, Deciles
from megamem.blocks.block import BlockState
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import ConfigError

Pairs = Mapping[str, Sequence[tuple[int, int]]]
"""Pairs of token ids by category."""


def drawn_pairs(deciles: Deciles, tokenizer: Tokenizer, num_pairs: int, seed: int) -> dict[str, list[tuple[int, int]]]:
    """Pairs of rare, of middling and of common types, and of numbers, where there are any; no type is in two of a kind."""
    generator = random.Random(seed)
    pools = {
        name: np.flatnonzero(np.isin(deciles.bin_of, list(bins))).tolist()
        for name, bins in (("rare", RARE), ("mid", MID), ("common", COMMON))
    }
    binned = (number for pool in tuple(pools.values()) for number in pool)
    pools["numbers"] = sorted(number for number in binned if tokenizer.decode_bytes([number]).strip().isdigit())
    pairs = {}
    for name, pool in pools.items():
        drawn = generator.sample(pool, min(2 * num_pairs, len(pool) // 2 * 2))
        if drawn:
            pairs[name] = list(zip(drawn[::2], drawn[1::2], strict=True))
    return pairs


def named_pairs(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """The ids of pairs like `their/there`, with a space before both or before none.

    Raises:
        ConfigError: two words are not a token each.
    """
    pairs = []
    for word in words:
        first, slash, second = word.partition("/")
        for space in (" ", ""):
            ids = [tokenizer.tokenize(space + part) for part in (first, second)]
            if slash and first != second and all(len(each) == 1 for each in ids):
                pairs.append((ids[0][0], ids[1][0]))
                break
        else:
            raise ConfigError(
                f"--pairs has {word}: give two words with / between them that are one token each in this run's tokenizer"
            )
    return pairs


@torch.no_grad()
def distances(
    model: MemoryGPTModel,
    pairs: Pairs,
    held_out: HeldOutDataset,
    groups: ParallelGroups,
    *,
    num_contexts: int,
    context_tokens: int,
) -> dict[str, tuple[list[float], list[float]]]:
    """||h_u - h_v|| at a token that stands after the same context, by category and layer. Collective, data-parallel ranks.

    Contexts are the first tokens of held-out windows, evenly spread. States are those of the residual stream: of the
    embedding first, and then after each block; several streams are one vector.

    Returns:
        Mean distance, and mean of the distance over the mean length of both states, by category.
    """
    watched: list[Tensor] = []
    blocks = list(model.decoder.layers)
    handles = [blocks[0].register_forward_pre_hook(partial(_keep_input, watched))]
    handles += [block.register_forward_hook(partial(_keep_output, watched)) for block in blocks]
    numbers = np.linspace(0, len(held_out) - 1, num_contexts).round().astype(int).tolist()
    contexts = torch.stack([held_out[number]["tokens"][:context_tokens] for number in numbers])
    found = {}
    for category, of_category in pairs.items():
        sums = torch.zeros(2, len(blocks) + 1, dtype=torch.float64, device=groups.device)
        for index in range(groups.data_rank, len(of_category), groups.data_size):
            sums += _sums(model, contexts.to(groups.device), of_category[index], watched)
        dist.all_reduce(sums)
        mean, relative = (sums / (len(of_category) * num_contexts)).tolist()
        found[category] = (mean, relative)
    for handle in handles:
        handle.remove()
    return found


def _sums(model: MemoryGPTModel, contexts: Tensor, pair: tuple[int, int], watched: list[Tensor]) -> Tensor:
    """[2, layers + 1], distances and relative distances of a pair, summed over contexts [n, s]."""
    n = len(contexts)
    last = torch.tensor(pair, device=contexts.device).repeat_interleave(n)[:, None]
    tokens = torch.cat((contexts.repeat(2, 1), last), 1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    watched.clear()
    # With labels, as losses come in chunks of tokens and logits as a whole.
    model(tokens, positions, None, labels=tokens)
    # [layers + 1, 2, n, D]
    states = torch.stack([state.double().unflatten(0, (2, n)) for state in watched])
    apart = (states[:, 0] - states[:, 1]).norm(dim=-1)
    return torch.stack((apart.sum(1), (apart / states.norm(dim=-1).mean(1)).sum(1)))


def _keep_input(watched: list[Tensor], _: Any, arguments: tuple[BlockState, Any]) -> None:
    watched.append(arguments[0].hidden[-1].flatten(1))


def _keep_output(watched: list[Tensor], _: Any, arguments: tuple[Any, ...], out: BlockState) -> None:
    watched.append(out.hidden[-1].flatten(1))
