"""Sampling text from a trained model, on one rank or on several that split its tables."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.model import MemoryGPTModel
from parallel.sharded_bank import announce_tokens
from pretrain.sampling import Sampling


@torch.no_grad()
def generate(
    model: MemoryGPTModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    context_tokens: int,
    vocab_size: int,
    eod: int,
    sampling: Sampling,
    group: dist.ProcessGroup,
) -> Generator[int, None, None]:
    """Token ids that follow a prompt, one by one, until the end-of-document id or `max_tokens`.

    Every token costs a forward pass over the last `context_tokens` tokens. The first rank makes it; the others have no
    token of their own and answer for their columns of the tables. All ranks get the same ids.

    Args:
        model: the whole model, but for tables that may be split.
        prompt: token ids; an empty prompt starts a document.
        context_tokens: how far the model looks back; the length that it was trained on.
        vocab_size: ids that may be generated; the embedding's padding may not.
        group: the memory group; all of its ranks call this alike.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    # A document is preceded by the end of another, as in training.
    ids = [eod, *prompt]
    try:
        for _ in range(max_tokens):
            token = _next_token(model, ids[-context_tokens:], vocab_size, sampling, generator, group)
            if token == eod:
                return
            ids.append(token)
            yield token
    finally:
        announce_tokens(model.banks.values(), None)


def _next_token(
    model: MemoryGPTModel,
    context: Sequence[int],
    vocab_size: int,
    sampling: Sampling,
    generator: torch.Generator,
    group: dist.ProcessGroup,
) -> int:
    """The token after `context`, chosen by the first rank of the group and told to the others. Collective."""
    device = next(model.parameters()).device
    announce_tokens(model.banks.values(), (len(context), *(0,) * (group.size() - 1)))
    chosen = torch.zeros(1, dtype=torch.int64, device=device)
    if group.rank() == 0:
        positions = torch.arange(len(context), device=device).unsqueeze(0)
        logits = model(torch.tensor([context], device=device), positions, None)[0, -1, :vocab_size]
        chosen += _choose(logits.float().cpu(), sampling, generator)
    else:
        model.serve_memory()
    if group.size() > 1:
        dist.broadcast(chosen, dist.get_global_rank(group, 0), group=group)
    return int(chosen)


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits [vocab_size]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / sampling.temperature, 0).sort(descending=True)
    if sampling.top_k is not None:
        probabilities, order = probabilities[: sampling.top_k], order[: sampling.top_k]
        probabilities = probabilities / probabilities.sum()
    # Keep a token if what comes before it has not yet reached top_p.
    kept = torch.where(probabilities.cumsum(0) - probabilities < sampling.top_p, probabilities, 0.0)
    return int(order[torch.multinomial(kept, 1, generator=generator)])
