"""A plan in words and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pretrain.config.schema import TrainConfig
from pretrain.config.source import dump_inline
from pretrain.planning.bytes.launches import launches_of
from pretrain.planning.bytes.memory_parts import total
from pretrain.planning.counts.dense_twin import dense_twin
from pretrain.planning.counts.pipeline_stages import Division, stages_of
from pretrain.planning.seconds.checkpoints import checkpoint_costs
from pretrain.planning.seconds.hardware import Hardware
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.timing import assumptions
from tools.plan.layouts import Estimate, all_estimates, estimate, recommended

_HEAD = (
    "TP",
    "PP",
    "VP",
    "CP",
    "DP",
    "G",
    "R",
    "micro",
    "recompute",
    "offload",
    "GB",
    "s/step",
    "tokens/s",
    "MFU",
    "days",
)
_WIDTHS = (4, 4, 4, 4, 6, 5, 3, 6, 10, 8, 7, 8, 12, 7, 7)


def table(found: Sequence[Estimate], num_found: int, num_gpus: int) -> Iterator[str]:
    """The layouts, a line each, with what dry runs counted of some."""
    counted = any(each.counted is not None for each in found)
    has_streams = any(each.config.model.residual_streams is not None for each in found)
    yield f"{num_found:,} layouts on {num_gpus} GPUs; the fastest that fit:"
    heads = "".join(f"{head:>{width}}" for head, width in zip(_HEAD, _WIDTHS, strict=True))
    yield heads + (f"{'streams of':>12}" if has_streams else "") + (f"{'counted GB':>12}" if counted else "")
    for each in found:
        layout, train, time = each.config.parallel, each.config.train, each.time
        cells = (
            layout.tensor,
            layout.pipeline,
            layout.virtual_pipeline,
            layout.context,
            Division.of(each.config, num_gpus).replicas,
            layout.memory,
            layout.memory_rows,
            train.micro_batch_size,
            train.recompute,
            each.config.optimizer.value_offload,
            f"{each.predicted_bytes / 1e9:.1f}",
            f"{time.total_s:.2f}",
            f"{time.tokens_per_s:,.0f}",
            f"{100 * time.mfu:.1f} %",
            f"{each.days:.1f}",
        )
        line = "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
        line += f"{_kept_streams(train):>12}" if has_streams else ""
        yield line if each.counted is None else f"{line}{each.peak_bytes / 1e9:>12.1f}"


def _kept_streams(train: TrainConfig) -> str:
    """Part of the model for which residual streams are kept once."""
    blocks = 1 if train.recompute == "full" else train.recompute_streams
    return "a site" if blocks is None else "a block" if blocks == 1 else f"{blocks} blocks"


def details(best: Estimate, num_gpus: int, hardware: Hardware) -> Iterator[str]:
    """Memory, traffic, step time and checkpoints of the recommended layout, by part."""
    stage = best.stages[best.fullest_stage]
    division = Division.of(best.config, num_gpus)
    yield ""
    yield "Recommended, as the smallest within 5 % of the fastest: " + " ".join(
        f"{key}={dump_inline(value)}" for key, value in best.overrides.items()
    )
    yield f"{division.num_microbatches} microbatches per step and rank; the numbers are of one GPU."
    yield ""
    yield from _memory_of(best, hardware)
    yield f"  {'a save adds on the device':52}{0:>9.2f}"
    yield f"  {'in host memory: tables stepped there':52}{stage.host_tables / 1e9:>9.2f}"
    yield f"  {'in host memory: a save':52}{stage.save / 1e9:>9.2f}"
    if stage.files:
        yield f"  {'in files: tables and their state':52}{stage.files / 1e9:>9.2f}"
    sent = best.time.sent[best.time.slowest_stage]
    yield ""
    yield f"{'Sent per step (GB):':54}{'in node':>9}{'to others':>11}"
    for name, (near, far) in (
        ("exchange", sent.exchange),
        ("tables' reductions", sent.tables),
        ("the rest's", sent.dense),
    ):
        yield f"  {name:52}{near / 1e9:>9.2f}{far / 1e9:>11.2f}"
    yield ""
    yield f"A step of stage {best.time.slowest_stage}, the slowest (s):"
    for time_part, seconds in best.time.by_part.items():
        if seconds >= 0.0005:
            yield f"  {time_part.value:52}{seconds:>9.3f}"
    yield f"  {'in all':52}{best.time.total_s:>9.3f}"
    yield "  " + launches_text(best)
    saved = checkpoint_costs(best.config, num_gpus, hardware)
    yield ""
    yield f"A checkpoint of {saved.num_bytes / 1e9:,.1f} GB, at {hardware.storage_gb_per_s:g} GB/s per node (s):"
    for what, seconds in (
        ("until it is written", saved.save_s),
        ("of that, no step is taken", saved.stall_s),
        ("from a job's start to its first step", saved.restart_s),
    ):
        yield f"  {what:52}{seconds:>9.1f}"
    yield ""
    yield "Taken for granted:"
    for sentence in _assumed(best, hardware):
        yield f"  {sentence}"
    if costs := best.time.memory_costs:
        yield ""
        yield "What the memory costs most, and what would lessen it:"
        for cost, seconds, remedy in costs:
            share = f"{seconds:.2f} s, {100 * seconds / best.time.total_s:.0f} %"
            yield f"  {cost.value.removeprefix('memory: ')}, {share}: {remedy}"
    yield from twin_text(best, num_gpus, hardware)


def _memory_of(best: Estimate, hardware: Hardware) -> Iterator[str]:
    """Bytes of the fullest stage by part, the largest first: as planned, and as counted if a dry run counted them."""
    planned, counted = best.stages[best.fullest_stage].by_part, best.counted
    what = f"Memory of stage {best.fullest_stage}, the fullest of {len(best.stages)} (GB of {hardware.usable_bytes / 1e9:.0f}):"
    yield what if counted is None else f"{what:54}{'planned':>9}{'counted':>9}"
    columns = (planned,) if counted is None else (planned, counted)

    def line(name: str, numbers: Iterable[float]) -> str:
        return f"  {name:52}" + "".join(f"{number / 1e9:>9.2f}" for number in numbers)

    parts = {part: [column.get(part, 0.0) for column in columns] for column in columns for part in column}
    for part, numbers in sorted(parts.items(), key=lambda item: -item[1][-1]):
        if max(numbers) >= 1e7:
            yield line(part.value, numbers)
    yield line("in all", map(total, columns))


def _assumed(best: Estimate, hardware: Hardware) -> tuple[str, ...]:
    return assumptions(best.config, stages_of(best.config)[best.time.slowest_stage], hardware)


def launches_text(best: Estimate) -> str:
    """Kernels that the slowest stage launches for a microbatch, per block of it."""
    stage = stages_of(best.config)[best.time.slowest_stage]
    forward, backward = (
        launches_of(best.config, stage, stage.blocks, way) / max(1, stage.blocks.num) for way in (0, 1)
    )
    return f"about {forward:.0f} kernels per block and forward pass, {backward:.0f} backward"


def twin_text(best: Estimate, num_gpus: int, hardware: Hardware) -> Iterator[str]:
    """Step time of a dense model of equal FLOPs on as many GPUs."""
    twin = dense_twin(best.config)
    if twin is None:
        return
    dense = twin.config
    same, own = estimate(dense, num_gpus, hardware), recommended(all_estimates(dense, num_gpus, hardware), hardware)
    yield ""
    yield (
        f"A dense model of equal FLOPs (ffn_hidden_size {dense.model.ffn_hidden_size:,}): {same.time.total_s:.2f} s per "
        f"step in this layout"
        + (f", {own.time.total_s:.2f} s in its own" if own else "")
        + f"; the memory's step is {best.time.total_s / same.time.total_s:.1f} times as long."
    )


def as_json(each: Estimate, num_gpus: int, hardware: Hardware) -> dict[str, Any]:
    """An estimate as plain data."""
    time = each.time
    return {
        "overrides": each.overrides,
        "data_parallel": Division.of(each.config, num_gpus).replicas,
        "fits": each.fits(hardware),
        "counted_bytes": None
        if each.counted is None
        else {part.value: number for part, number in each.counted.items()},
        "stages": [
            {
                "bytes": {part.value: num_bytes for part, num_bytes in stage.by_part.items()},
                "total_bytes": stage.total,
                "host_bytes": {"tables": stage.host_tables, "save": stage.save},
                "file_bytes": stage.files,
                "sent_bytes": {
                    name: {"in_node": near, "to_others": far}
                    for name, (near, far) in (
                        ("exchange", sent.exchange),
                        ("tables", sent.tables),
                        ("dense", sent.dense),
                    )
                },
            }
            for stage, sent in zip(each.stages, time.sent, strict=True)
        ],
        "step_s": time.total_s,
        "time_s": {part.value: time.by_part[part] for part in TimePart},
        "assumptions": _assumed(each, hardware),
        "tokens_per_s": time.tokens_per_s,
        "mfu": time.mfu,
        "days": each.days,
        "checkpoint": asdict(checkpoint_costs(each.config, num_gpus, hardware)),
        "memory_costs": [
            {"part": part.value, "seconds": seconds, "remedy": remedy} for part, seconds, remedy in time.memory_costs
        ],
    }
