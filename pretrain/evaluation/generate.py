"""Sampling text from a trained model, on one rank or on several that split its tables."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.attention.kv_cache import KeyValueCache
from megamem.model import MemoryGPTModel
from parallel.sharded_bank import announce_tokens
from pretrain.evaluation.sampling import Sampling


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
    cached: bool = True,
) -> Generator[int, None, None]:
    """Token ids that follow a prompt, one by one, until the end-of-document id or `max_tokens`.

    The prompt costs a forward pass, and every token after the first one of that token alone: attention finds the others in
    a cache. When the text is longer than `context_tokens`, what is left of it begins elsewhere, and nothing that was
    cached holds: then, as without a cache, every token costs a pass over the last `context_tokens`. The first rank makes
    the passes; the others have no token of their own and answer for their columns of the tables. All ranks get the same
    ids.

    Args:
        model: the whole model, but for tables that may be split.
        prompt: token ids; an empty prompt starts a document.
        context_tokens: tokens that the model looks back on; the length that it was trained on.
        vocab_size: ids that may be generated; the embedding's padding may not.
        group: the memory group; all of its ranks call this alike.
        cached: off to compare.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    # A document is preceded by the end of another, as in training.
    ids = [eod, *prompt]
    # The last token is chosen and not shown.
    cache = KeyValueCache(min(context_tokens, len(ids) + max_tokens - 1)) if cached else None
    num_seen = 0
    try:
        for _ in range(max_tokens):
            if len(ids) > context_tokens:
                cache, num_seen = None, 0
            token = _next_token(
                model, ids[num_seen:][-context_tokens:], num_seen, cache, vocab_size, sampling, generator, group
            )
            num_seen = 0 if cache is None else len(ids)
            if token == eod:
                return
            ids.append(token)
            yield token
    finally:
        announce_tokens(model.banks.values(), None)


def _next_token(
    model: MemoryGPTModel,
    new: Sequence[int],
    num_seen: int,
    cache: KeyValueCache | None,
    vocab_size: int,
    sampling: Sampling,
    generator: torch.Generator,
    group: dist.ProcessGroup,
) -> int:
    """The token after the `num_seen` tokens of the cache and `new`, chosen by the first rank of the group and told to the
    others. Collective."""
    device = next(model.parameters()).device
    announce_tokens(model.banks.values(), (len(new), *(0,) * (group.size() - 1)))
    chosen = torch.zeros(1, dtype=torch.int64, device=device)
    if group.rank() == 0:
        positions = torch.arange(num_seen, num_seen + len(new), device=device).unsqueeze(0)
        logits = model(torch.tensor([new], device=device), positions, None, cache=cache)[0, -1, :vocab_size]
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
