"""Costs of one memory layer, as families and what they share state them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one layer besides its tables, whose costs follow from `MemoryConfig.tables` and `lookup`.

    Attributes:
        retrieval: parameters of query projections, keys, gains and cores.
        projections: parameters between a token's hidden state and its values, in both directions.
        key_flops: operations per token of query projections, and of their products with the keys.
        selection_flops: operations per token of first-stage scores and the candidate grid.
        projection_flops: operations per token of the projections.
        selection_bytes: bytes per token that the selection has to read and write.
        scored: scores per token that the selection reads; those that are sorted in several passes count as often.
        candidates: entries per token, out of which those that are retrieved are chosen.
        compared: pairs of entries per token, whose keys backward compares to add up the gradients of one key.
        kept_wide: fp32 elements per token that backward needs of a forward pass, lookups left to `traffic`.
        kept_narrow: elements in the precision of the run per token that backward needs of a forward pass.
        kept_ids: int64 numbers per token that backward needs of a forward pass.
        kept_keys: elements of keys that are normalised, once per forward pass.
        select_wide: fp32 elements per token that the selection of entries has at a time, scores among them.
        kept_by_entries: bytes per token, of what is kept, that are gone when backward has the gradients of scores.
        backward_wide: fp32 elements per token that exist at a time in backward, besides what was kept.
        matrices: rows and columns of each of the layer's hidden matrices (`megamem.parameters.declaration.Matrices`).
        split_by_heads: number of the parameters that tensor-parallel ranks split with attention's heads.
        halo_tokens: hidden states before each cut of a sequence that the rank behind it asks for.
    """

    retrieval: int = 0
    projections: int = 0
    key_flops: float = 0.0
    selection_flops: float = 0.0
    projection_flops: float = 0.0
    selection_bytes: int = 0
    scored: int = 0
    candidates: int = 0
    compared: int = 0
    kept_wide: int = 0
    kept_narrow: int = 0
    kept_ids: int = 0
    kept_keys: int = 0
    select_wide: int = 0
    kept_by_entries: int = 0
    backward_wide: int = 0
    matrices: tuple[tuple[int, int], ...] = ()
    split_by_heads: int = 0
    halo_tokens: int = 0

    def __add__(self, other: LayerCosts) -> LayerCosts:
        return LayerCosts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))
