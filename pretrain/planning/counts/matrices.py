"""Hidden matrices of a model, by closed formulas.

Legend: D hidden size, F feed-forward width, n query and g key/value heads, d width of a head, C width of a latent, Q of
one of queries and r of a rotary key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megamem.config.model import ModelConfig
from megamem.layers.costs import LayerCosts
from megamem.placement.block_plan import BlockPlan
from pretrain.planning.counts.residual_streams import end_matrices, site_matrices

Shape = tuple[int, int]


@dataclass(frozen=True)
class HiddenMatrices:
    """Rows and columns of hidden matrices (`megamem.parameters.declaration.Matrices`).

    Attributes:
        split: matrices of which tensor-parallel ranks hold parts, or some each.
        whole: matrices that all tensor-parallel ranks hold.
        experts: matrices of experts.
    """

    split: tuple[Shape, ...] = ()
    whole: tuple[Shape, ...] = ()
    experts: tuple[Shape, ...] = ()

    @property
    def all(self) -> tuple[Shape, ...]:
        return self.split + self.whole + self.experts

    @staticmethod
    def of(
        model: ModelConfig,
        blocks: Sequence[BlockPlan],
        memory: LayerCosts,
        *,
        num_projections: int = 0,
        has_end: bool = False,
    ) -> HiddenMatrices:
        """Matrices of some blocks, of memories that have these costs in all, and of as many projections of a branch.

        Args:
            has_end: several residual streams end here.
        """
        split = [shape for block in blocks for shape in (*_attention(model, block), *_feed_forward(model, block))]
        experts = [shape for block in blocks for shape in _experts(model, block)]
        by_heads = memory.matrices if memory.split_by_heads else ()
        whole = () if by_heads else memory.matrices
        whole += num_projections * ((model.hidden_size, 2 * model.hidden_size),)
        whole += len(blocks) * site_matrices(model) + has_end * end_matrices(model)
        return HiddenMatrices((*split, *by_heads), whole, tuple(experts))


def _attention(model: ModelConfig, block: BlockPlan) -> Iterator[Shape]:
    width, head, heads = model.hidden_size, model.attention_head_dim, model.num_attention_heads
    latent = model.latent_attention
    if block.has_output_projection:
        yield width, heads * head
    if latent is None:
        yield heads * head, width
        yield from [(model.query_groups * head, width)] * 2
        return
    if latent.query_latent_dim is None:
        yield heads * head, width
    else:
        yield latent.query_latent_dim, width
        yield heads * head, latent.query_latent_dim
    yield latent.latent_dim, width
    if latent.rotary_dim:
        yield latent.rotary_dim, width
    yield heads * (head - latent.rotary_dim), latent.latent_dim
    yield heads * head, latent.latent_dim


def _feed_forward(model: ModelConfig, block: BlockPlan) -> Iterator[Shape]:
    if block.has_ffn and model.moe is None:
        yield from _swiglu(model.hidden_size, model.ffn_hidden_size)


def _experts(model: ModelConfig, block: BlockPlan) -> Iterator[Shape]:
    if block.has_ffn and model.moe is not None:
        for _ in range(model.moe.num_experts):
            yield from _swiglu(model.hidden_size, model.moe.expert_ffn_hidden_size)


def _swiglu(width: int, inner: int) -> Iterator[Shape]:
    yield from ((inner, width), (inner, width), (width, inner))


def num_elements(shapes: Sequence[Shape]) -> int:
    """Weights of matrices."""
    return sum(rows * columns for rows, columns in shapes)
