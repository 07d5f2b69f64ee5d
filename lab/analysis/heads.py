"""Importance of each head of attention to the loss (MIDUS, Eq. 16).

Legend: s tokens of a sequence and b sequences of this context-parallel rank, n heads of this tensor-parallel rank, d
width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.blocks.memory_sites import CoreSite
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.data.held_out import HeldOutDataset
from pretrain.engine.step import read_microbatch
from pretrain.evaluation.evaluate import passes_over

READINGS = ("sum", "mean")
"""Reductions of a window's loss over its predicted tokens."""


@dataclass(frozen=True)
class HeadImportance:
    """Importance of every head.

    Attributes:
        scores: [readings of the loss, blocks, heads] float64, in the order of `READINGS`.
        num_examples: number of examples that the scores are means over.
    """

    scores: Tensor
    num_examples: int


def head_importance(
    model: MemoryGPTModel, held_out: HeldOutDataset, groups: ParallelGroups, *, micro_batch_size: int
) -> HeadImportance:
    """E |sum_t a[h, t] . dl / da[h, t]| over held-out windows. Collective; not for layouts with pipelines.

    a[h, t] is the output of head h at token t, before any output projection: in an inserted block of memory the query
    of the head's memory. An example is a window, x the part of it that is not predicted (prompts), and l its loss, which
    the paper calls the autoregressive negative log-likelihood: either the sum over the predicted tokens or their mean.
    Weights ask for no gradient.
    """
    (stream,), passes = passes_over(held_out, [model], groups, micro_batch_size=micro_batch_size, pipeline=1)
    heads, rank = model.config.num_attention_heads, dist.get_rank(groups.megatron.tp)
    own_heads = heads // groups.megatron.tp.size()
    outputs: list[Tensor] = []
    blocks = len(model.decoder.layers)
    sums = torch.zeros(len(READINGS), blocks, heads, dtype=torch.float64, device=groups.device)
    counted = torch.zeros(1, dtype=torch.float64, device=groups.device)
    model.eval()
    with _watching(model, outputs), torch.enable_grad():
        for _ in range(sum(passes)):
            outputs.clear()
            batch, bounds = read_microbatch(stream, model)
            losses = model(batch["tokens"], batch["position_ids"], bounds, labels=batch["labels"]).float()
            mask = batch["loss_mask"]
            gradients = torch.autograd.grad((losses * mask).sum(), outputs)
            by_head = torch.stack([_slopes(a, g, own_heads) for a, g in zip(outputs, gradients, strict=True)])
            targets = mask.double().sum(1)
            for part in (by_head, targets):
                dist.all_reduce(part, group=groups.megatron.cp)
            # The last windows of some ranks are made of nothing.
            real = targets > 0
            of_mean = by_head / targets.clamp(min=1)[:, None]
            found = torch.stack((by_head, of_mean)).abs()[:, :, real].sum(2)
            sums[:, :, rank * own_heads : (rank + 1) * own_heads] += found
            counted += real.sum() if rank == 0 else 0
    if dist.get_rank(groups.megatron.cp) != 0:
        sums.zero_()
        counted.zero_()
    dist.all_reduce(sums)
    dist.all_reduce(counted)
    return HeadImportance((sums / counted).cpu(), round(float(counted)))


def _slopes(output: Tensor, gradient: Tensor, num_heads: int) -> Tensor:
    """[b, n] float64, the sum over this rank's tokens of a . dl / da: both [s, b, n d]."""
    products = output.detach().double() * gradient.double()
    return products.unflatten(2, (num_heads, -1)).sum((0, 3))


@contextmanager
def _watching(model: MemoryGPTModel, outputs: list[Tensor]) -> Iterator[None]:
    """Within it weights ask for no gradient, and a forward pass leaves the heads' outputs of every block in `outputs`."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    blocks: Any = model.decoder.layers
    cores = [block.self_attention.core_attention for block in blocks]
    attention = [core.core if isinstance(core, CoreSite) else core for core in cores]
    handles = [core.register_forward_hook(partial(_keep, outputs)) for core in attention]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_()
        for handle in handles:
            handle.remove()


def _keep(outputs: list[Tensor], _: Any, arguments: tuple[Any, ...], out: Tensor) -> Tensor:
    # Nothing before the first block asks for a gradient.
    kept = out if out.requires_grad else out.detach().requires_grad_()
    outputs.append(kept)
    return kept
