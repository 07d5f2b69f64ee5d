"""A picture of one layout: what a rank of every stage holds, and where the time of a step goes."""

from __future__ import annotations

from pathlib import Path

from pretrain.planning.bytes.memory_parts import MemoryPart
from pretrain.planning.seconds.hardware import Hardware
from pretrain.planning.seconds.time_parts import TimePart
from tools.common.drawing import svg
from tools.plan.layouts import Estimate


def save_picture(best: Estimate, hardware: Hardware, path: Path) -> None:
    """Writes SVG, or what else the ending of the name says."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    figure = Figure(figsize=(11, 7), layout="constrained")
    memory, time = figure.subplots(2, 1, height_ratios=[max(2, len(best.stages)), 1.6])
    names = [f"stage {index}" for index in range(len(best.stages))]
    left = [0.0] * len(names)
    for index, part in enumerate(MemoryPart):
        widths = [stage.by_part.get(part, 0.0) / 1e9 for stage in best.stages]
        if max(widths) >= 0.01:
            memory.barh(names, widths, left=left, label=part.value, color=colours[index % 20])
            left = [a + b for a, b in zip(left, widths, strict=True)]
    memory.axvline(hardware.usable_bytes / 1e9, color="black", linestyle="--", label="what tensors may take")
    memory.set_xlabel("GB per rank at the peak of a step")
    memory.invert_yaxis()
    memory.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    at = 0.0
    for index, time_part in enumerate(TimePart):
        seconds = best.time.by_part[time_part]
        if seconds >= best.time.total_s / 500:
            time.barh(["step"], [seconds], left=[at], label=time_part.value, color=colours[index % 20])
        at += seconds
    time.set_xlabel("seconds of a step, by part and not in order of time")
    time.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    if path.suffix == ".svg":
        path.write_text(svg(figure), encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)
