"""Usage of a run's memory: rows read and how evenly, scores, size of the output, spectrum of the cores.

Layers add to buffers on their device while they are observed. Then row counts are reduced once over the ranks of a
pipeline stage and all other figures once over all ranks, and one copy to the host serves every layer.

Legend: T tokens of this rank, J rows read per token, H heads, K retrieved, C cores, R Tucker rank, D hidden size, M
rows of the window of a bank that a layer sees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.config.memory import ObservedQuantities
from megamem.placement.sharing import LayerView

# Sums of a layer over its tokens: their number, and the token-weighted means below.
_TOKENS, _TOP1, _TOPK, _OUT, _OUT_SQUARE, _NULL, _ENTROPY, _NUM_SUMS = 0, 1, 2, 3, 4, 5, 6, 7
# After the sums, what the ranks of a stage share; after these, the singular values.
_COVERAGE, _KL, _EVEN_COVERAGE, _NUM_COLUMNS = range(_NUM_SUMS, _NUM_SUMS + 4)

# Temporaries of the entropy are fp64 tensors of this many elements.
_SLICE_ELEMENTS = 1 << 22

LayerMetrics: TypeAlias = dict[str, float | list[list[float]]]


class ReadObserver(Protocol):
    """Whoever a memory layer shows its reads."""

    def record(self, rows: Tensor, scores: Tensor | None, out: Tensor, router: Tensor | None = None) -> None:
        """Take what one forward pass of a layer read, evaluations and passes without gradients included.

        Args:
            rows: [T, J], rows of the bank, int32 or int64.
            scores: [T, H, K, C], best first within a head; None in layers whose rows have none.
            out: [T, D], the layer's output.
            router: [T, K + 1], a softmax over the rows and, last, nothing; None in layers without.
        """
        ...


class LayerUsage:
    """Sums over the tokens that one layer has seen since `reset`, on its device.

    Attributes:
        counts: [M] int32, how often each row of the layer's window was read.
        sums: [7] fp64, the number of tokens and sums over them.
    """

    def __init__(self, view: LayerView, counts: Tensor) -> None:
        self.view, self.counts = view, counts
        self.sums = torch.zeros(_NUM_SUMS, dtype=torch.float64, device=counts.device)

    def reset(self) -> None:
        """Forget all tokens."""
        self.counts.zero_()
        self.sums.zero_()

    def record(self, rows: Tensor, scores: Tensor | None, out: Tensor, router: Tensor | None = None) -> None:
        """See `ReadObserver.record`. Once per microbatch of training: the first forward of a recomputed block runs without
        gradients, as does evaluation, and neither is added."""
        if torch.is_grad_enabled():
            self._add(rows, scores, out, router)

    @torch.no_grad()
    def _add(self, rows: Tensor, scores: Tensor | None, out: Tensor, router: Tensor | None) -> None:
        in_window = ((rows.long() - self.view.first_row) % self.view.num_bank_rows).flatten()
        # Integers: the order of the atomic additions does not show.
        self.counts.scatter_add_(0, in_window, self.counts.new_ones(()).expand(in_window.shape))
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        top1, topk = (wide.new_zeros(()),) * 2 if scores is None else (scores[:, :, 0].mean(), scores.mean())
        null, entropy = (wide.new_zeros(()),) * 2
        if router is not None:
            weights = router.to(wide.dtype)
            null, entropy = weights[:, -1].mean(), torch.special.entr(weights).sum(1).mean()
        means = (wide.new_ones(()), top1, topk, wide.mean(), wide.square().mean(), null, entropy)
        self.sums += torch.stack([mean.double() for mean in means]) * out.shape[0]


class ObservedLayer(Protocol):
    """A memory layer, as far as it is observed (`megamem.layers.layer.MemoryLayer`)."""

    name: str
    view: LayerView
    cores: Tensor | None
    usage: ReadObserver | None


class UsageCollector:
    """Observes the memory layers of a model. Every rank has one for its own layers, and all act at the same time."""

    def __init__(
        self,
        layers: Sequence[ObservedLayer],
        *,
        num_blocks: int,
        observed: ObservedQuantities,
        stage_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Allocate the counters: 4 bytes per row of each window.

        Args:
            layers: this rank's.
            num_blocks: blocks of the whole model.
            observed: quantities that their family has to be observed.
            stage_group: all ranks of this pipeline stage (tensor, context and data parallel); each sees other tokens.
        """
        self.layers, self.num_blocks, self.observed = tuple(layers), num_blocks, observed
        self.stage_group, self.device = stage_group, device
        sizes = [layer.view.num_rows for layer in layers]
        self._counts = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._usages = [
            LayerUsage(layer.view, counts) for layer, counts in zip(layers, self._counts.split(sizes), strict=True)
        ]

    def start(self) -> None:
        """Observe from here on."""
        for layer, usage in zip(self.layers, self._usages, strict=True):
            usage.reset()
            layer.usage = usage

    def stop(self) -> None:
        """Observe no longer."""
        for layer in self.layers:
            layer.usage = None

    def finish(self) -> dict[int, LayerMetrics]:
        """Stop observing; the figures of every memory layer of the model by block number, on every rank. Collective.

        Returns:
            coverage: share of the rows of the layer's window that were read at least once.
            kl_to_uniform: sum_i p_i log(p_i M) in nats, p_i the share of row i in all reads: 0 if even, log(M) if all
                reads hit one row.
            even_coverage: the coverage that as many even reads would come to, 1 - (1 - 1 / M)^S of S reads; only where
                rows have scores, as reads by token id are as even as the text is.
            top1_score, topk_score: mean score of the best and of all K entries, over tokens, heads and cores; only
                where rows have scores.
            null_weight, router_entropy: mean weight that a token's router gives to nothing, and mean entropy of its
                weights in nats (log(K + 1) if they are even); only where rows have a router.
            output_std: standard deviation of the layer's output over tokens and dimensions.
            singular_values: values of each head's summed core, descending; only with Tucker cores.
        """
        self.stop()
        if self.layers:
            dist.all_reduce(self._counts, group=self.stage_group)
        num_columns = _NUM_COLUMNS + (math.prod(self.observed.spectrum) if self.observed.spectrum is not None else 0)
        table = torch.zeros(self.num_blocks, num_columns, dtype=torch.float64, device=self.device)
        for layer, usage in zip(self.layers, self._usages, strict=True):
            table[block_number(layer.name), :_NUM_SUMS] = usage.sums
        if self.layers and self.stage_group.rank() == 0:
            # Equal on all ranks of the stage: one of them brings them into the sum over all.
            self._fill_stage_figures(table)
        dist.all_reduce(table)
        # Host sync: the one of all layers and figures, on observed steps only.
        rows = table.tolist()
        return {block: self._metrics(row) for block, row in enumerate(rows) if row[_TOKENS]}

    def _fill_stage_figures(self, table: Tensor) -> None:
        blocks = [block_number(layer.name) for layer in self.layers]
        for block, usage in zip(blocks, self._usages, strict=True):
            table[block, _COVERAGE] = (usage.counts > 0).double().mean()
            table[block, _KL] = _kl_to_uniform(usage.counts)
            table[block, _EVEN_COVERAGE] = _even_coverage(usage.counts)
        if self.observed.spectrum is not None:
            sums = torch.stack([_core_sum(layer) for layer in self.layers])
            # Host sync on GPUs: the SVD of all layers at once looks at its convergence.
            table[blocks, _NUM_COLUMNS:] = torch.linalg.svdvals(sums).flatten(1).double()

    def _metrics(self, row: list[float]) -> LayerMetrics:
        means = [value / row[_TOKENS] for value in row[:_NUM_SUMS]]
        metrics: LayerMetrics = {"coverage": row[_COVERAGE], "kl_to_uniform": row[_KL]}
        if self.observed.scores:
            metrics |= {"even_coverage": row[_EVEN_COVERAGE], "top1_score": means[_TOP1], "topk_score": means[_TOPK]}
        if self.observed.router:
            metrics |= {"null_weight": means[_NULL], "router_entropy": means[_ENTROPY]}
        metrics["output_std"] = math.sqrt(max(0.0, means[_OUT_SQUARE] - means[_OUT] ** 2))
        if self.observed.spectrum is not None:
            heads, rank = self.observed.spectrum
            values = row[_NUM_COLUMNS:]
            metrics["singular_values"] = [values[head * rank : (head + 1) * rank] for head in range(heads)]
        return metrics


def block_number(layer_name: str) -> int:
    """The global number of the block that a memory layer belongs to, from the layer's global name."""
    match = re.search(r"\blayers\.(\d+)\.", layer_name)
    assert match is not None, f"{layer_name} names no block"
    return int(match[1])


def _core_sum(layer: ObservedLayer) -> Tensor:
    """[H, R, R], in at least fp32: what the first selection stage approximates by rank 1."""
    assert layer.cores is not None
    return layer.cores.detach().to(torch.promote_types(layer.cores.dtype, torch.float32)).sum(0)


def _even_coverage(counts: Tensor) -> Tensor:
    """Expected share of the rows that are read if every read hits any of them as likely: an fp64 scalar."""
    missed = counts.new_full((), 1 - 1 / counts.numel(), dtype=torch.float64)
    return 1 - missed.pow(counts.sum().double())


def _kl_to_uniform(counts: Tensor) -> Tensor:
    """KL divergence of counts / sum(counts) from uniform, (sum c log c) / S - log S + log M: an fp64 scalar."""
    total = counts.sum().double()
    plogp = counts.new_zeros((), dtype=torch.float64)
    for some in counts.split(_SLICE_ELEMENTS):
        wide = some.double()
        plogp += torch.special.xlogy(wide, wide).sum()
    return plogp / total - total.log() + math.log(counts.numel())
