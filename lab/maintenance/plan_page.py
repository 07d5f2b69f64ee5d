"""The page about the largest models, docs/planning.md: what stands between its pairs of marks is computed here.

`python -m lab.maintenance.plan_page docs/planning.md` writes it anew. No figure of it is typed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.planning.bytes.memory_parts import MemoryPart
from pretrain.planning.counts.dense_twin import dense_twin
from pretrain.planning.counts.formulas import count_parameters
from pretrain.planning.counts.pipeline_stages import Division
from pretrain.planning.seconds.checkpoints import checkpoint_costs
from pretrain.planning.seconds.hardware import Hardware, load_hardware
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.timing import step_time
from tools.plan.layouts import Estimate, all_estimates, estimate, recommended

GPU = "h100-80g"
GPUS = (64, 256, 512)
CONFIGS = Path(__file__).parents[2] / "configs" / "ultramemv2"
MODELS = {"2.5B/120B-top256": "2.5b_120b_top256.yaml", "2.5B/60B-top768": "2.5b_60b_top768.yaml"}
MIXTURE = "olmoe/2.5b_120b.yaml"
"""A mixture of experts with the parameters of the first model, and as many active ones."""
SKEW, SM_SHARE = 0.8, 0.5
"""Exponent of Zipf's law of rows as reads were measured, and a share of the multiprocessors for gradients of tables."""
FEW_GPUS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs, the fewest first."""
OF_FEW_GPUS = {
    "UltraMemV2-2.5B/120B-top256": "ultramemv2/2.5b_120b_top256.yaml",
    "2.5B/60B-top768": "ultramemv2/2.5b_60b_top768.yaml",
    "2.5B/25B": "ultramemv2/2.5b_25b.yaml",
    "1.25B/12.5B": "ultramemv2/1.25b_12.5b.yaml",
    "Engram-40B": "engram/40b.yaml",
}
UPDATES: dict[str, tuple[str, ...]] = {
    "AdamW": (),
    "its tables on the host": ("optimizer.value_offload=cpu",),
    "[`row_wise`](memory-parallel.md#tables-updated-by-row)": ("optimizer.tables=row_wise",),
    "and `table_gradient_dtype: bf16`": ("optimizer.tables=row_wise", "optimizer.table_gradient_dtype=bf16"),
}
"""Ways to update tables, by the keys that ask for them."""
PLANS, FEWER = "plans", "fewest GPUs"
"""Parts of the page."""
_TABLE_PARTS = (MemoryPart.TABLES, MemoryPart.TABLE_GRADIENTS, MemoryPart.TABLE_OPTIMIZER)
_MEMORY_TIME = tuple(part for part in TimePart if part.value.startswith("memory"))
Row = Sequence[str]


@dataclass(frozen=True)
class Planned:
    """A model on so many GPUs: all layouts, and the one to take."""

    num_gpus: int
    found: list[Estimate]
    best: Estimate


def planned(config: RunConfig, num_gpus: int, hardware: Hardware) -> Planned:
    """The plan; something fits."""
    found = all_estimates(config, num_gpus, hardware)
    best = recommended(found, hardware)
    assert best is not None
    return Planned(num_gpus, found, best)


@dataclass(frozen=True)
class Ways:
    """Seconds per step in the recommended layout.

    Attributes:
        even: seconds with rows that are read evenly.
        skewed: seconds with rows that are read by Zipf's law.
        shared_skewed: seconds with these, and a share of the multiprocessors for gradients of tables.
    """

    even: float
    skewed: float
    shared_skewed: float


def ways_of(plan: Planned, hardware: Hardware) -> Ways:
    """Seconds of a plan's recommended layout in all ways."""
    config = plan.best.config
    shared = replace(config, parallel=replace(config.parallel, gradient_sm_share=SM_SHARE))
    skewed = replace(hardware, row_skew=SKEW)
    ways = ((config, hardware), (config, skewed), (shared, skewed))
    return Ways(*(step_time(each, plan.num_gpus, machine).total_s for each, machine in ways))


def fewest(model: str, update: str, hardware: Hardware) -> str:
    """The fewest GPUs that a model fits on with an update of tables, and the seconds of a step there."""
    config = load_config(CONFIGS.parent / OF_FEW_GPUS[model], list(UPDATES[update]))
    for num_gpus in FEW_GPUS:
        # A plan tries both places of AdamW's state.
        place = config.optimizer.value_offload
        found = [e for e in all_estimates(config, num_gpus, hardware) if e.config.optimizer.value_offload == place]
        if (best := recommended(found, hardware)) is not None:
            return f"{num_gpus}, {best.time.total_s:.3g}"
    return f"more than {FEW_GPUS[-1]}"


def _fewer(hardware: Hardware) -> str:
    rows = [[model, *(fewest(model, update, hardware) for update in UPDATES)] for model in OF_FEW_GPUS]
    return "\n".join(markdown_table([["", *UPDATES], *rows])) + "\n"


def _plans(hardware: Hardware) -> str:
    lines: list[str] = []
    for name, file in MODELS.items():
        config = load_config(CONFIGS / file)
        plans = [planned(config, n, hardware) for n in GPUS]
        lines += ["", f"## UltraMemV2-{name}", "", *_of_model(config, plans, hardware)]
    lines += ["", "## A mixture with as many parameters", "", *_mixture(hardware)]
    return "\n".join(lines) + "\n"


def _of_model(config: RunConfig, plans: Sequence[Planned], hardware: Hardware) -> Iterator[str]:
    counts = count_parameters(config.model)
    yield (
        f"{counts.total / 1e9:.1f}B parameters, of which {counts.tables / 1e9:.1f}B in tables; "
        f"{config.train.tokens_per_step / 1e6:.2f}M tokens per step."
    )
    yield ""
    yield from markdown_table([["GPUs", *(str(plan.num_gpus) for plan in plans)], *rows_of(config, plans, hardware)])


def rows_of(config: RunConfig, plans: Sequence[Planned], hardware: Hardware) -> Iterator[Row]:
    bests = [plan.best for plan in plans]
    yield ["layout", *(_layout(plan.best, plan.num_gpus) for plan in plans)]
    fastest = [min(e.time.total_s for e in plan.found if e.fits(hardware)) for plan in plans]
    yield [
        "s per step; the fastest that fits",
        *(f"{b.time.total_s:.2f}; {f:.2f}" for b, f in zip(bests, fastest, strict=True)),
    ]
    ways = [ways_of(plan, hardware) for plan in plans]
    yield [f"with rows read by Zipf's law with {SKEW:g}", *(f"{way.skewed:.2f}" for way in ways)]
    yield ["days for 1.6T tokens", *(f"{b.days:.1f}" for b in bests)]
    yield ["MFU", *(f"{100 * b.time.mfu:.1f} %" for b in bests)]
    yield [f"GB per GPU, of {hardware.usable_bytes / 1e9:.0f}", *(f"{b.peak_bytes / 1e9:.1f}" for b in bests)]
    yield ["of that, tables with all their state", *(f"{_tables(b) / 1e9:.1f}" for b in bests)]
    yield ["the memory's part of a step, s", *(f"{_memory_s(b):.2f}" for b in bests)]
    yield ["largest of these", *(_largest_cost(b) for b in bests)]
    yield ["dense twin of equal FLOPs, s per step in its own layout", *(_twin(p, hardware) for p in plans)]
    costs = [checkpoint_costs(config, plan.num_gpus, hardware) for plan in plans]
    yield ["checkpoint, GB", *(f"{c.num_bytes / 1e9:,.0f}" for c in costs)]
    yield ["save, s; of that stalled", *(f"{c.save_s:.0f}; {c.stall_s:.0f}" for c in costs)]
    copying = replace(config, checkpoint=replace(config.checkpoint, asynchronous=True))
    behind = [checkpoint_costs(copying, plan.num_gpus, hardware) for plan in plans]
    yield ["with checkpoint.asynchronous, stalled, s", *(f"{c.stall_s:.1f}" for c in behind)]


def _mixture(hardware: Hardware) -> Iterator[str]:
    config = load_config(CONFIGS.parent / MIXTURE)
    yield (
        f"`configs/{MIXTURE}`: {count_parameters(config.model).total / 1e9:.1f}B parameters, as many of them active. A plan\n"
        "takes its router to be balanced, and its experts' products to reach the same share of the peak as large ones."
    )
    yield ""
    yield from markdown_table(against_mixture(GPUS, hardware))


def against_mixture(numbers: Sequence[int], hardware: Hardware) -> Iterator[Row]:
    mixture, memory = (load_config(path) for path in (CONFIGS.parent / MIXTURE, CONFIGS / MODELS["2.5B/120B-top256"]))
    yield [
        "GPUs", "layout of the mixture", "GB", "s per step", "of that, tokens to experts and back",
        "times as long: UltraMemV2-2.5B/120B-top256", f"with Zipf {SKEW:g}",
        f"and parallel.gradient_sm_share={SM_SHARE:g}",
    ]  # fmt: skip
    for num_gpus in numbers:
        own, other = (planned(config, num_gpus, hardware) for config in (mixture, memory))
        ways, took = ways_of(other, hardware), own.best.time.total_s
        yield [
            f"{num_gpus}",
            _layout(own.best, num_gpus),
            f"{own.best.peak_bytes / 1e9:.1f}",
            f"{took:.2f}",
            f"{own.best.time.by_part[TimePart.EXPERTS]:.2f}",
            *(f"{seconds / took:.1f}" for seconds in (ways.even, ways.skewed, ways.shared_skewed)),
        ]


def markdown_table(rows: Sequence[Row] | Iterator[Row]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield "| " + " | ".join(row) + " |"
        if number == 0:
            yield "|" + "---|" * len(row)


def _layout(each: Estimate, num_gpus: int) -> str:
    layout, train = each.config.parallel, each.config.train
    axes = {"TP": layout.tensor, "PP": layout.pipeline, "VP": layout.virtual_pipeline, "CP": layout.context}
    words = [f"{name} {size}" for name, size in axes.items() if size > 1]
    words += [f"DP {Division.of(each.config, num_gpus).replicas}"]
    words += [f"G {layout.memory}"]
    words += [f"R {layout.memory_rows}"] if layout.memory_rows > 1 else []
    words += [f"mb {train.micro_batch_size}"]
    words += [f"recompute {train.recompute}"] if train.recompute != "none" else []
    words += ["tables on the host"] if each.config.optimizer.value_offload == "cpu" else []
    return ", ".join(words)


def _tables(each: Estimate) -> float:
    return sum(each.stages[each.fullest_stage].by_part[part] for part in _TABLE_PARTS)


def _memory_s(each: Estimate) -> float:
    return sum(each.time.by_part[part] for part in _MEMORY_TIME)


def _largest_cost(each: Estimate) -> str:
    part, seconds, _ = each.time.memory_costs[0]
    return f"{part.value.removeprefix('memory: ')}: {seconds:.2f} s"


def _twin(plan: Planned, hardware: Hardware) -> str:
    twin = dense_twin(plan.best.config)
    assert twin is not None
    own = recommended(all_estimates(twin.config, plan.num_gpus, hardware), hardware)
    return f"{(own or estimate(twin.config, plan.num_gpus, hardware)).time.total_s:.2f}"


def marks(part: str) -> tuple[str, str]:
    """Lines before and after a computed part."""
    return f"<!-- {part} -->", f"<!-- end of {part} -->"


def write(path: Path) -> None:
    """Computes the parts anew, and leaves the rest of the page."""
    hardware = load_hardware(GPU)
    for part, computed in ((PLANS, _plans), (FEWER, _fewer)):
        begin, end = marks(part)
        before, _, rest = path.read_text(encoding="utf-8").partition(begin)
        path.write_text(f"{before}{begin}\n{computed(hardware)}{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
