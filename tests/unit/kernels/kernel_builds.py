"""Builds the Triton kernels for GPUs that are not there, and prints which limits they break: `python -m
tests.unit.kernels.kernel_builds PART PARTS`.

A process of its own, because Triton decides at import whether it compiles or interprets. The launches are those of the
launchers themselves, at the shapes that shipped layouts leave to a rank. Prints a JSON object per kernel.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_stages
from tests.rotation import in_rotation
from tests.unit.kernels.machine_code.builds import CAPABILITIES, Launch, launcher, recorded
from tests.unit.kernels.machine_code.launches import launches_of
from tests.unit.kernels.machine_code.limits import compiles_alike, described, of_ones, problems, specialised
from tools.common.vocabulary import with_vocabulary

REPOSITORY = Path(__file__).parents[3]
ALL = os.environ.get("MEGAMEM_BUILD_FOR") == "all"
"""True where every shape of shipped layouts is built, for every generation of GPUs: a build takes a second."""
BUILT_FOR = (90, *in_rotation([each for each in CAPABILITIES if each != 90], parts=2))
"""Generations: the one with all shapes, and of the others this week's share."""
PUBLISHED = tuple(f"{folder}/*.yaml" for folder in ("h100", "memory_plus", "ultramem", "ultramemv2"))
"""Configurations of published models, and their layouts."""
NARROW = "h100/2.5b_120b_top256_on_256.yaml"
GROUPS = (8, 16, 32)
"""Ranks that its tables are split over: rows of 240 to 20 bytes are left to each, whatever is planned today."""
FEW = ("ultramem/2.5b_120b.yaml", "memory_plus/2.5b_120b.yaml")
"""Models of the families that select in other ways, or in blocks."""
ROWS = (
    ("ultramemv2/227m_1.2b.yaml", ()),
    ("ultramem/227m_1.2b.yaml", ("train.precision=fp32",)),
    ("memory_plus/1b_7b.yaml", ()),
    ("memory_plus/1b_7b.yaml", ("optimizer.tables=row_wise", "optimizer.table_gradient_dtype=bf16")),
    ("ultramem/227m_1.2b.yaml", ("train.precision=fp32", "optimizer.tables=row_wise")),
)
"""Models whose rows are of another kind: of two cores, of fp32, wider than a tile; and those of rounded gradients and of
updates by row."""
READ = ("optimizer.tables=row_wise", "optimizer.table_gradients=rows", "optimizer.value_weight_decay=0.0")
UPDATED = "ultramemv2/2.5b_120b_top256.yaml"
"""A model, and keys by which the rows that a step read are updated."""


def configs(patterns: Iterable[str]) -> Iterator[RunConfig]:
    """The first stage of shipped configurations; of those whose tables are split, with every number of `GROUPS`."""
    for pattern in patterns:
        for file in sorted((REPOSITORY / "configs").glob(pattern)):
            config = load_stages(file)[0]
            yield config
            if config.parallel.memory > 1 and ALL:
                yield from (replace(config, parallel=replace(config.parallel, memory=number)) for number in GROUPS)


def every_kernel() -> list[RunConfig]:
    """Models that launch every kernel: of all families that select in other ways, and an update of rows that were read."""
    return [*configs((NARROW, *FEW)), load_stages(REPOSITORY / "configs" / UPDATED, READ)[0]]


def launches(configs: Iterable[RunConfig], num_tokens: int | None = None) -> list[Launch]:
    """Launches of these configurations' memory layers, of each that is compiled alike one."""
    found: dict[Any, Launch] = {}
    for config in configs:
        for launch in launches_of(with_vocabulary(config, 50_304), num_tokens):
            found.setdefault(compiles_alike(launch), launch)
    return list(found.values())


def launches_on_rows() -> list[Launch]:
    """Launches that read or write rows of the models in `ROWS`."""
    models = (load_stages(REPOSITORY / "configs" / file, overrides)[0] for file, overrides in ROWS)
    return [launch for launch in launches(models) if "W" in launch.values]


def launches_of_loss() -> list[Launch]:
    """Launches over a chunk of logits: of the vocabulary whole, of a part of it, in fp32, and of rows without alignment."""
    import torch

    from kernels.softmax_gradient import triton_op as gradient
    from kernels.softmax_sums import triton_op as sums

    found: list[Launch] = []
    for num_ids, dtype in (
        (50_304, torch.bfloat16),
        (6_288, torch.bfloat16),
        (50_304, torch.float32),
        (50_257, torch.bfloat16),
    ):
        logits = torch.empty(8192, num_ids, dtype=dtype, device="meta")
        places = torch.empty(8192, dtype=torch.int64, device="meta")
        of_row = torch.empty(8192, device="meta")
        found += recorded(partial(launcher(sums.softmax_sums), logits, places))
        found += recorded(partial(launcher(gradient._softmax_gradient), logits, places, of_row, of_row, of_row))
    return found


def launches_of_streams() -> list[Launch]:
    """Launches over residual streams of published models, of the numbers of them that they have."""
    import torch

    from kernels.doubly_stochastic import triton_op as matrices
    from kernels.mix_streams import triton_op as mixing
    from kernels.normal_product import triton_op as product
    from kernels.weigh_streams import triton_op as weighing

    found: list[Launch] = []
    for n in (4, 2):
        logits = torch.empty(8192, n, n, dtype=torch.float32, device="meta")
        found += recorded(partial(launcher(matrices._doubly_stochastic), logits, 20, 1e-6))
        found += recorded(partial(launcher(matrices._gradient), logits, logits, 20, 1e-6))
    for n, width, dtype in (
        (4, 4096, torch.bfloat16),
        (4, 2560, torch.float32),
        (2, 2048, torch.bfloat16),
        (8, 5120, torch.bfloat16),
        (3, 1000, torch.bfloat16),
    ):
        streams, post = torch.empty(8192, n, width, dtype=dtype, device="meta"), torch.empty(8192, n, device="meta")
        out, mix = torch.empty(8192, width, dtype=dtype, device="meta"), torch.empty(8192, n, n, device="meta")
        for given in (mix, None):
            found += recorded(partial(launcher(mixing._mix_streams), streams, out, post, given))
            kept = None if given is None else streams
            found += recorded(partial(launcher(mixing._gradients), streams, kept, out, post, given))
        found += recorded(partial(launcher(weighing._weigh_streams), streams, post))
        found += recorded(partial(launcher(weighing._gradients), out, streams, post))
    # Maps of a site, of the end, and of each stream by itself; the widest; and what is not asked for.
    for columns, outputs, dtype, centred, asked in (
        (4 * 2048, 24, torch.bfloat16, False, (True, True)),
        (4 * 7168, 24, torch.bfloat16, False, (True, False)),
        (4 * 4096, 4, torch.bfloat16, False, (False, True)),
        (2 * 2048, 8, torch.float32, False, (True, True)),
        (4 * 2560, 24, torch.float32, False, (True, True)),
        (3 * 1000, 15, torch.bfloat16, False, (True, True)),
        (6 * 4096, 48, torch.bfloat16, False, (True, True)),
        (6 * 4096, 48, torch.float32, False, (True, True)),
        (4096, 6, torch.bfloat16, True, (True, True)),
        (1000, 18, torch.bfloat16, True, (True, True)),
        (2560, 6, torch.float32, True, (True, True)),
    ):
        x = torch.empty(8192, columns, dtype=dtype, device="meta")
        maps = torch.empty(outputs, columns, device="meta")
        results = product._empty(x, maps, 1e-6, centred)
        found += recorded(partial(launcher(product._normal_product), x, maps, 1e-6, centred))
        found += recorded(partial(launcher(product._gradients), results[0], x, maps, *results, *asked, centred))
    return found


def launches_of_hashes() -> list[Launch]:
    """Hashes of Engram's layers, of value_ngrams and of residual_ngrams, whose sequences a rank has whole or in two pieces."""
    import torch

    from kernels.ngram_hashes import triton_op as hashing

    found: list[Launch] = []
    for num_groups, num_heads, max_order, num_sequences, num_stretches, rules in (
        (30, 8, 3, 1, 1, ("xor", False, None)),
        (4, 8, 3, 8, 2, ("xor", True, None)),
        (4, 1, 3, 8, 1, ("sum", False, None)),
        (12, 1, 5, 3, 2, ("sum", True, None)),
        (1, 1, 2, 8, 1, ("xor", False, 251_519)),
    ):
        ids = torch.empty(num_stretches * (max_order - 1) + 4096, num_sequences, dtype=torch.int64, device="meta")
        positions = ids.new_empty(num_sequences, 4096).t()
        of_groups = (ids.new_empty(num_groups, each) for each in (max_order, num_heads, num_heads))
        scalars = ids.new_empty(num_groups), ids.new_empty(()), ids.new_empty(())
        found += recorded(partial(launcher(hashing.ngram_hashes), ids, positions, *of_groups, *scalars, *rules))
    return found


@dataclass(frozen=True)
class Build:
    """A kernel to be built.

    Attributes:
        what: reason to build it.
        more: further entries of its report.
    """

    what: str
    launch: Launch
    capability: int = 90
    more: Mapping[str, Any] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """Build it, and tell which limits it breaks."""
        found = problems(self.launch, self.capability)
        return {"what": self.what, "launch": described(self.launch), "problems": found, **self.more}


def builds() -> Iterator[Build]:
    """All kernels to be built, in the same order in every process."""
    from tests.unit.kernels.planted_kernels import planted

    for wanted, call in planted() if ALL else ():
        (launch,) = recorded(call)
        yield Build("planted", launch, more={"wanted": wanted})
    for capability in BUILT_FOR if ALL else ():
        shipped = [*configs(PUBLISHED), *every_kernel()] if capability == 90 else every_kernel()
        others = [*launches_of_loss(), *launches_of_streams(), *launches_of_hashes()]
        for launch in [*launches(shipped), *launches_on_rows(), *others]:
            yield Build("shipped", launch, capability, {"capability": capability})
    # A generated token, whose numbers are 1 more often; one launch of each kernel.
    by_name = {launch.name: launch for launch in launches(every_kernel(), num_tokens=1)}
    # The largest, which has most to hold: a loss has no number that could be a one.
    others = [*launches_of_loss(), *launches_of_streams(), *launches_of_hashes()]
    by_name |= {launch.name: launch for launch in reversed(others)}
    for launch in by_name.values():
        for other in [of_ones(launch), *(specialised(launch) if ALL else ())]:
            yield Build("specialised", other)


def main(part: int, num_parts: int) -> None:
    """Build every `num_parts`-th kernel, beside other processes that build the others."""
    for build in islice(builds(), part, None, num_parts):
        print(json.dumps(build.report()), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
