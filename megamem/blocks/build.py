"""Building the blocks of a model chunk: of the backbone's parts, which the slots of their memories change."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig

from kernels.select import Kernels
from megamem.backbone.norm import LayerNorm
from megamem.backbone.parts import BlockEdit, Parts, Site
from megamem.blocks.block import Block
from megamem.placement.block_plan import PLAIN
from megamem.placement.spans import pending_before
from megamem.residual_streams.config import ResidualStreamsConfig
from megamem.residual_streams.make import make_site


def build_blocks(
    config: TransformerConfig,
    layers: range,
    parts: Parts,
    sites: Mapping[int, Sequence[Site]],
    groups: ProcessGroupCollection,
    streams: ResidualStreamsConfig | None,
    kernels: Kernels,
) -> list[Block]:
    """The blocks of one model chunk, with unset weights.

    Args:
        layers: global 0-based numbers of the chunk's blocks.
        sites: the chunk's memories, by the block that they read in.
        streams: settings of several residual streams; None: there is one.
        kernels: kernels of what is done to the streams.
    """
    spans = [site.placed.span for of_block in sites.values() for site in of_block]
    blocks = []
    for number in layers:
        of_block, changed = sites.get(number, ()), parts.block()
        plan = of_block[0].plan if of_block else PLAIN
        if plan.has_layer_norm:
            changed.input_layernorm = LayerNorm
        if streams is not None and streams.normalises:
            changed.input_layernorm = changed.pre_mlp_layernorm = IdentityOp
        if not plan.adds_attention:
            changed.pre_mlp_layernorm = IdentityOp
        for site in of_block:
            edit: BlockEdit = pkgutil.resolve_name(site.placed.slot.edit_path)
            edit(changed, site, parts)
        stream_sites = None
        if streams is not None:
            first = 2 * number
            stream_sites = (
                make_site(config, streams, kernels, site_number=first),
                make_site(config, streams, kernels, site_number=first + 1),
            )
        blocks.append(
            Block(
                config,
                changed,
                layer_number=number + 1,
                plan=plan,
                joins=tuple(span.add == number for span in pending_before(spans, number)),
                groups=groups,
                streams=stream_sites,
            )
        )
    return blocks
