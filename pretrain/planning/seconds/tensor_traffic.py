"""Bytes that a rank of a stage sends for tensor parallelism, in closed formulas.

Legend: B bytes of a microbatch's hidden states on this rank, TP tensor-parallel ranks.
"""

from __future__ import annotations

from megamem.token_tables.config import ValuesConfig
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.pipeline_stages import Blocks, Division, Stage
from pretrain.planning.seconds.traffic import follows_heads


def tensor_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes of hidden states and latents that a rank sends to tensor-parallel ranks in one microbatch."""
    elements = _tensor_passes(config, stage) * config.model.hidden_size + _latents(config, stage)
    elements += _shared_heads(config, stage) + _mixed_values(config, stage)
    return (config.parallel.tensor - 1) * division.rank_tokens * elements * config.train.element_bytes


def _tensor_passes(config: RunConfig, stage: Stage) -> float:
    """Gathers and scatters of a microbatch's hidden states over tensor-parallel ranks: each sends (TP - 1) B.

    A pair of linears gathers its input and scatters its output: twice forward, and twice backward, which gathers the
    input again for the gradient of a weight that is trained. A block has two pairs, unless experts or a memory stand for
    the second. Heads without an output projection are exchanged, which sends 1 / TP of a scatter. Blocks below
    what is trained go forward alone.
    """

    def pairs(blocks: Blocks) -> int:
        return blocks.num + (blocks.ffns if config.model.moe is None else 0)

    def both_ways(blocks: Blocks) -> float:
        return 2 * pairs(blocks) - blocks.unprojected * (1 - 1 / config.parallel.tensor)

    passes = both_ways(stage.blocks) + (2 if config.train.recompute == "full" else 1) * both_ways(stage.backward)
    # The embedding scatters, and gathers backward; the output projection scatters backward alone.
    passes += pairs(stage.trained_blocks)
    # So do the embedded tokens and the losses of a branch.
    passes += stage.branch_blocks * (3 + 2 * stage.trains_all)
    return passes + (1 + stage.trains_all) * stage.has_embedding + (2 + stage.trains_all) * stage.has_loss


def _latents(config: RunConfig, stage: Stage) -> float:
    """Elements per token that latent attention sends to each other rank besides, forward and backward.

    Their down-projection gathers hidden states as that of queries does, and their up-projection the latents, those of
    queries too: backward scatters the gradients, and gathers again for those of weights that are trained. A column of
    latents is computed on one rank, and all columns go to the rank that has the token; rotary keys are gathered.
    """
    latent = config.model.latent_attention
    if latent is None:
        return 0.0
    of_queries = latent.query_latent_dim or 0
    exchanged = (latent.latent_dim + latent.rotary_dim + of_queries) / config.parallel.tensor + latent.rotary_dim

    def gathered(blocks: Blocks) -> int:
        of_keys_and_values = (blocks.num + blocks.split_latents) * latent.latent_dim
        return blocks.num * (config.model.hidden_size + of_queries) + of_keys_and_values

    def one_way(blocks: Blocks) -> float:
        return gathered(blocks) + blocks.num * exchanged

    backward_passes = 2 if config.train.recompute == "full" else 1
    return one_way(stage.blocks) + backward_passes * one_way(stage.backward) + gathered(stage.trained_blocks)


def _shared_heads(config: RunConfig, stage: Stage) -> float:
    """Elements per token of queries, keys and values that each rank gathers where there are fewer key/value heads than ranks,
    and whose gradients it scatters."""
    model = config.model
    if model.latent_attention is not None or config.parallel.tensor <= model.query_groups:
        return 0.0
    passes = stage.blocks.num + (2 if config.train.recompute == "full" else 1) * stage.backward.num
    return passes * model.attention_head_dim * (model.num_attention_heads + 2 * model.query_groups)


def _mixed_values(config: RunConfig, stage: Stage) -> float:
    """Elements per token that memories in attention's values send to each other rank (`ValuesConfig.handed_to_heads`).

    A rank has all heads of its own tokens, and hands each rank its heads, or all of them where ranks share one.
    """
    model, tensor = config.model, config.parallel.tensor
    if model.latent_attention is not None:
        return 0.0
    parts, elements = (1 if tensor > model.query_groups else tensor), 0.0
    for family in stage.families:
        memory = family.memory
        if isinstance(memory, ValuesConfig):
            columns = model.query_groups * model.attention_head_dim
            of_layer = memory.handed_to_heads(columns, follows_heads=follows_heads(config, memory))
            passes = len(family.lookups) + (2 if config.train.recompute == "full" else 1) * len(family.backward_lookups)
            elements += passes * (of_layer / parts + memory.handed_to_tokens * max(1, model.query_groups / tensor))
    return elements
