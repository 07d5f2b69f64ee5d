"""Parallel layouts that a model can have.

A layout is refused with its fault and the nearest ones that work; nothing is rounded or changed behind the user's back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megamem.config.memory import MemoryConfig
from megamem.placement.block_plan import UncutBlocks, unsplittable_units
from megamem.retrieval.config import RetrievalConfig
from parallel.pipeline_layout import chunks_of_stage, layout_text, model_chunks, nearest_layouts, split_units
from pretrain.config.context_ways import heads_problem
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.suggest import nearest_multiples

_MAX_LAYOUTS_LISTED = 4


def layout_problems(config: RunConfig, world_size: int | None) -> Iterator[str]:
    """Reasons that the model cannot be laid out this way.

    Args:
        config: configuration of the run.
        world_size: ranks of the run, or None where it is not known yet.
    """
    yield from _ranks(config, world_size)
    yield from _tensor(config)
    yield from _sequence(config)
    yield from _context(config)
    yield from _pipeline(config)
    yield from _memory(config, world_size)


def _model_ranks(config: RunConfig) -> int:
    return config.parallel.tensor * config.parallel.pipeline * config.parallel.context


def _ranks(config: RunConfig, world_size: int | None) -> Iterator[str]:
    model_ranks = _model_ranks(config)
    if world_size is not None and world_size % model_ranks:
        parallel = config.parallel
        yield (
            f"the run has {world_size} ranks, which is not a multiple of parallel.tensor {parallel.tensor} x pipeline "
            f"{parallel.pipeline} x context {parallel.context} = {model_ranks}: "
            f"start {nearest_multiples(world_size, model_ranks)} ranks or change the layout"
        )


def _tensor(config: RunConfig) -> Iterator[str]:
    tensor = config.parallel.tensor
    sizes: dict[str, int] = {
        "model.num_attention_heads": config.model.num_attention_heads,
        "model.num_query_groups": config.model.query_groups,
        # Experts are whole on every rank: no tensor parallelism inside of them.
        **({"model.ffn_hidden_size": config.model.ffn_hidden_size} if config.model.moe is None else {}),
        "model.vocab_size_multiple": config.model.vocab_size_multiple,
    }
    if (latent := config.model.latent_attention) is not None:
        sizes["model.latent_attention.latent_dim + rotary_dim"] = latent.latent_dim + latent.rotary_dim
        if latent.query_latent_dim is not None:
            sizes["model.latent_attention.query_latent_dim"] = latent.query_latent_dim
    groups = config.model.query_groups
    for key, size in sizes.items():
        # Repeated where it is null; and of fewer key/value heads than ranks, equally many ranks have each, and make equal
        # parts of all their columns.
        shared = tensor % groups == 0 and 2 * groups * config.model.attention_head_dim % tensor == 0
        fits = key == "model.num_query_groups" and (config.model.num_query_groups is None or shared)
        if size % tensor and not fits:
            yield (
                f"{key} is {size}, which parallel.tensor {tensor} does not divide: "
                "each tensor-parallel rank holds an equal part"
            )
    memory_sizes = {
        f"{key}.{name}": n for key, each in config.model.families.items() for name, n in each.tensor_sizes.items()
    }
    for key, size in memory_sizes.items():
        if size % min(tensor, groups):
            yield (
                f"{key} is {size}, which parallel.tensor {tensor} does not divide: "
                "each tensor-parallel rank holds an equal part"
            )


def _sequence(config: RunConfig) -> Iterator[str]:
    tensor, context = config.parallel.tensor, config.parallel.context
    length = config.train.sequence_length
    # Context parallelism gives each rank two slices, one from either end, to balance causal attention; sequence
    # parallelism splits what a context rank holds over the tensor-parallel ranks.
    unit = math.lcm(2 * context if context > 1 else 1, tensor * context if tensor > 1 else 1)
    if length % unit:
        yield (
            f"train.sequence_length is {length}, which must be a multiple of {unit} with parallel.tensor {tensor} and "
            f"context {context}: use {nearest_multiples(length, unit)}"
        )


def _context(config: RunConfig) -> Iterator[str]:
    """Ways of attention that the heads, or the implementation, do not allow."""
    asked, context = config.parallel.context_attention, config.parallel.context
    if context > 1 and asked == "heads" and (problem := heads_problem(config)):
        yield f"parallel.context_attention is heads, but {problem}: use ring or auto, or another context size"
    if config.data.documents == "separate" and config.model.implementation == "transformer_engine":
        yield (
            "data.documents is separate, but model.implementation is transformer_engine, whose attention is not told "
            "of documents: use model.implementation: local, or data.documents: joined"
        )


def _pipeline(config: RunConfig) -> Iterator[str]:
    """No sharing group or skip span that reaches over the edge of a chunk."""
    if config.parallel.pipeline_layout is not None:
        yield from _uneven_chunks(config, config.parallel.pipeline_layout)
    else:
        yield from _even_chunks(config)
    yield from _copies(config)
    model, pipeline = config.model, config.parallel.pipeline
    if model.multi_token_prediction is not None and not model.tied_embeddings and pipeline > 1:
        yield (
            f"model.multi_token_prediction is set with model.tied_embeddings false, but parallel.pipeline is {pipeline}: the "
            "last stage embeds the tokens that the branch reads, and has no embedding but a tied one. Use "
            "model.tied_embeddings: true, or parallel.pipeline: 1"
        )


def _copies(config: RunConfig) -> Iterator[str]:
    """Every stage has a block that reads the bank of which every stage holds a copy."""
    parallel, model = config.parallel, config.model
    reading = {
        model.memory_spans[layer].read
        for bank in model.memory_plan.banks
        if bank.on_every_stage
        for layer in bank.layers
    }
    if not reading:
        return
    try:
        chunks = model_chunks(
            model.num_layers,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            layout=parallel.pipeline_layout,
        )
    except ValueError:
        # Refused above.
        return
    for stage in range(parallel.pipeline):
        held = chunks_of_stage(chunks, pipeline=parallel.pipeline, pipeline_rank=stage)
        if not any(reading & set(chunk.layers) for chunk in held):
            yield (
                f"stage {stage} of parallel.pipeline {parallel.pipeline} has no block with a memory, but all stages "
                "hold a copy of the bank and add up its gradients: change model.memory.placement, parallel.pipeline, "
                "parallel.virtual_pipeline or parallel.pipeline_layout so that every stage has one"
            )


def _uneven_chunks(config: RunConfig, layout: str) -> Iterator[str]:
    parallel, num_layers = config.parallel, config.model.num_layers
    try:
        chunks = model_chunks(
            num_layers, pipeline=parallel.pipeline, virtual_pipeline=parallel.virtual_pipeline, layout=layout
        )
    except ValueError as error:
        yield str(error)
        return
    units = unsplittable_units(config.model)
    split = split_units(units, chunks)
    if not split:
        return
    nearest = [
        layout_text(found) for found in nearest_layouts(units, chunks, num_layers=num_layers, limit=_MAX_LAYOUTS_LISTED)
    ]
    where = ", ".join(f"{unit.first}..{unit.last}" for unit in split[:_MAX_LAYOUTS_LISTED])
    more = f" and {len(split) - _MAX_LAYOUTS_LISTED} more" if len(split) > _MAX_LAYOUTS_LISTED else ""
    fix = "the nearest layouts that work are " + ", ".join(nearest) if nearest else "use fewer chunks"
    yield (
        f"parallel.pipeline_layout is {layout!r}, which splits blocks {where}{more}: those share a memory bank, "
        f"or what a memory reads with or adds, and must stand on one chunk: {fix}"
    )


def _even_chunks(config: RunConfig) -> Iterator[str]:
    """Equal chunks, and no unit that reaches over the edge of one."""
    parallel, num_layers = config.parallel, config.model.num_layers
    # Layers of one family of a model share tables at the most: of two, one is that of n-grams.
    key, memory = next(
        ((key, each) for key, each in config.model.families.items() if isinstance(each, RetrievalConfig)),
        ("model.memory", config.model.memory),
    )
    sharing = memory.sharing if isinstance(memory, RetrievalConfig) else None
    pipeline, virtual = parallel.pipeline, parallel.virtual_pipeline
    chunks = pipeline * virtual
    layout = f"parallel.pipeline {pipeline} x virtual_pipeline {virtual}"
    units = unsplittable_units(config.model)
    whole = num_layers % chunks == 0
    split = _split_if_even(units, num_layers, pipeline, virtual) if whole else ()
    if sharing is not None and sharing.pattern in ("ring", "no_ring", "all") and units and (split or not whole):
        yield (
            f"{key}.sharing.pattern is {sharing.pattern}, where all layers read each other's tables: they must "
            f"stand on one stage, but {layout} makes {chunks} chunks: use parallel.pipeline: 1, or pattern: block"
        )
        return
    if not whole:
        yield (
            f"model.num_layers is {num_layers}, which {layout} = {chunks} chunks do not divide: "
            f"{_nearest_text(config, units)}"
        )
    for unit in split:
        if unit.kind == "span":
            yield (
                f"{key}.placement.spans has {unit.first}:{unit.last}, but {layout} puts {num_layers // chunks} "
                f"blocks into a chunk, and blocks {unit.first} and {unit.last} into different ones, "
                f"where the output cannot follow: {_nearest_text(config, units)}"
            )
    queried = next((unit for unit in split if unit.kind == "query"), None)
    if queried is not None:
        # One family alone hands on what it reads with.
        handing = ((of, each.placement.query_group) for of, each in config.model.families.items())
        of, size = next((of, size) for of, size in handing if size > 1)
        yield (
            f"{of}.placement.query_group is {size}, but {layout} puts {num_layers // chunks} "
            f"blocks into a chunk, and the memory of block {queried.last}, which reads with the stream of block "
            f"{queried.first}, into another one: {_nearest_text(config, units)}"
        )
    if any(unit.kind == "group" for unit in split):
        assert memory is not None
        held = "layers" if config.model.num_memory_layers == num_layers else "blocks"
        group = (
            f"sharing.group is {sharing.group}"
            if sharing is not None
            else f"kind is {memory.kind}, whose layers share tables"
        )
        yield (
            f"{key}.{group}, but {layout} puts {num_layers // chunks} {held} into a chunk, which would "
            f"split a group: {_nearest_text(config, units)}"
        )


def _nearest_text(config: RunConfig, units: Sequence[UncutBlocks]) -> str:
    layouts = nearest_pipelines(
        config.model.num_layers, units, config.parallel.pipeline, config.parallel.virtual_pipeline
    )
    texts = [f"pipeline {pipeline} x virtual_pipeline {virtual}" for pipeline, virtual in layouts]
    return "the nearest layouts that work are " + ", ".join(texts)


def nearest_pipelines(
    num_layers: int, units: Sequence[UncutBlocks], pipeline: int, virtual: int
) -> list[tuple[int, int]]:
    """(pipeline, virtual pipeline) sizes whose chunks are equal and split no unit, the most similar first."""
    layouts = []
    for stages in range(1, num_layers + 1):
        for chunks in range(1, num_layers // stages + 1 if stages > 1 else 2):
            if num_layers % (stages * chunks) == 0 and not _split_if_even(units, num_layers, stages, chunks):
                layouts.append((stages, chunks))
    # The number of stages decides how many ranks a run needs, so it is the last thing to move.
    layouts.sort(key=lambda layout: (abs(math.log(layout[0] / pipeline)), abs(math.log(layout[1] / virtual))))
    return layouts[:_MAX_LAYOUTS_LISTED]


def _split_if_even(
    units: Sequence[UncutBlocks], num_layers: int, pipeline: int, virtual: int
) -> tuple[UncutBlocks, ...]:
    return split_units(units, model_chunks(num_layers, pipeline=pipeline, virtual_pipeline=virtual, layout=None))


def _memory(config: RunConfig, world_size: int | None) -> Iterator[str]:
    """The group of ranks that splits the columns of the tables, and the experts of a mixture."""
    group, memory, moe = config.parallel.memory, config.model.memory, config.model.moe
    if group % config.parallel.memory_rows:
        yield _uneven_row_parts(config.parallel)
        return
    if group == 1:
        return
    if memory is None and moe is None:
        yield (
            f"parallel.memory is {group}, but model.memory is null: there is no table to split, use parallel.memory: 1"
        )
        return
    for key, each in config.model.families.items():
        yield from _parts_of_tables(config, key, each)
    if moe is not None and moe.num_experts % group:
        beside = " (the experts and the tables are split over the same group)" if memory is not None else ""
        yield (
            f"model.moe.num_experts is {moe.num_experts}, which parallel.memory {group} does not divide: "
            f"each rank holds equally many experts{beside}"
        )
    yield from _memory_ranks(config, world_size)


def _parts_of_tables(config: RunConfig, key: str, memory: MemoryConfig) -> Iterator[str]:
    row_parts = config.parallel.memory_rows
    if row_parts > 1 and not isinstance(memory, RetrievalConfig):
        yield (
            f"parallel.memory_rows is {row_parts}, but rows of {key}.kind {memory.kind} are read as often as their "
            "tokens come, which no shuffle spreads over the parts: use parallel.memory_rows: 1"
        )
    model = config.model
    banks = model.banks_of(memory)
    num_rows = {bank.num_rows for bank in banks}
    for number in sorted(num_rows):
        if number % row_parts:
            yield (
                f"a bank has {number} rows, which parallel.memory_rows {row_parts} does not divide: each rank holds an "
                f"equal part of them, use parallel.memory_rows {math.gcd(number, row_parts)} or a "
                f"{key}.num_keys that is a multiple of {row_parts}"
            )
    for table in memory.tables:
        if table.width % config.parallel.memory_columns:
            yield (
                f"{key}.{table.key} is {table.width}, which {column_parts_text(config.parallel)} does not divide: "
                "each rank holds an equal part of the columns"
            )


def _uneven_row_parts(layout: ParallelConfig) -> str:
    return (
        f"parallel.memory_rows is {layout.memory_rows}, which does not divide parallel.memory {layout.memory}: equally "
        f"many ranks hold each part of the rows, use parallel.memory_rows {math.gcd(layout.memory, layout.memory_rows)}"
    )


def column_parts_text(layout: ParallelConfig) -> str:
    """The parts of the columns, in the keys that make them."""
    of_rows = f" / memory_rows {layout.memory_rows}" if layout.memory_rows > 1 else ""
    return f"parallel.memory {layout.memory}{of_rows}"


def _memory_ranks(config: RunConfig, world_size: int | None) -> Iterator[str]:
    group, pipeline = config.parallel.memory, config.parallel.pipeline
    if world_size is not None and world_size % _model_ranks(config) == 0 and (world_size // pipeline) % group:
        ranks = world_size // pipeline
        sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
        sizes.sort(key=lambda size: abs(math.log(size / group)))
        yield (
            f"parallel.memory is {group}, which does not divide the {ranks} ranks of a pipeline stage (tensor x "
            f"context x data): use {' or '.join(map(str, sizes[:2]))}"
        )
