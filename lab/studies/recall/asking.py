"""Asking a trained model for facts that its documents stated: how many values it knows, and what they cost it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lab.facts import FACT_LETTERS, NAME_LETTERS
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Recall:
    """Recall of a model's facts.

    Attributes:
        accuracy: share of the facts of which every letter of the value is the likeliest one.
        nats: mean over the facts of what the value costs.
    """

    accuracy: float
    nats: float


@torch.no_grad()
def recall(
    model: MemoryGPTModel,
    facts: Sequence[str],
    tokenizer: Tokenizer,
    groups: ParallelGroups,
    *,
    micro_batch_size: int,
    sequence_length: int,
) -> Recall:
    """Ask for the values of all facts. Collective over data-parallel ranks, each of which has the whole model.

    Every sequence states facts one after the other, as documents do, and each value is predicted from what stands
    before it: the name, and facts that have nothing to do with it.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=groups.device)
    for ids in _batches(facts, tokenizer, micro_batch_size, sequence_length)[groups.data_rank :: groups.data_size]:
        tokens, targets = ids[:, :-1].to(groups.device), ids[:, 1:].to(groups.device)
        positions = torch.arange(tokens.shape[1], device=groups.device).expand_as(tokens)
        sums += asked(model(tokens, positions, None)[..., : tokenizer.vocab_size], targets)
    dist.all_reduce(sums)
    num_facts, num_known, nats = sums.tolist()
    return Recall(num_known / num_facts, nats / num_facts)


def asked(logits: Tensor, targets: Tensor) -> Tensor:
    """[3] fp64: facts, those that are known, and nats of their values.

    Args:
        logits: [b, 6 F, ids].
        targets: [b, 6 F], the letters of F facts.
    """
    losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    of_values, known = (
        x.unflatten(1, (-1, FACT_LETTERS))[..., NAME_LETTERS:] for x in (losses, logits.argmax(-1) == targets)
    )
    every = known.all(-1)
    return torch.stack([torch.ones_like(every).sum(), every.sum(), of_values.double().sum()]).double()


def _batches(facts: Sequence[str], tokenizer: Tokenizer, micro_batch_size: int, sequence_length: int) -> list[Tensor]:
    """[b, 1 + 6 F] each: an end of document, then as many facts as fit. The last sequence is filled up with the first
    facts.
    """
    per_sequence = min(sequence_length // FACT_LETTERS, len(facts))
    padded = [*facts, *facts[: -len(facts) % per_sequence]]
    sequences = [
        [tokenizer.eod, *tokenizer.tokenize("".join(padded[first : first + per_sequence]))]
        for first in range(0, len(padded), per_sequence)
    ]
    return list(torch.tensor(sequences).split(micro_batch_size))
