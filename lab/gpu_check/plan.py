"""Parts of the check: short trainings that must agree, and commands whose output belongs on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.config.context_ways import WAYS
from pretrain.config.loader import from_dict, to_dict
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from tools.common.words import plural

CONFIGS = Path(__file__).parents[2] / "configs"

NUM_STEPS = 20
SHORT = (
    f"train.num_steps={NUM_STEPS}",
    "train.sequence_length=256",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "train.recompute=none",
    # Up to the learning rate that they have after their warm-up. At that rate from the start two kernels on one CPU are
    # 4e-3 apart after ten steps, and 4e-2 with tables by row.
    "optimizer.schedule=constant",
    f"optimizer.warmup_steps={NUM_STEPS}",
    "optimizer.value_lr_end_multiplier=null",
    "data.datasets=[]",
    "logging.memory_every_steps=0",
)
FP32_TOLERANCE = 2e-3
"""Largest difference of a loss, in nats: sums in another order differ by 1e-5 at first, and a retrieval that takes
another one of two candidates of nearly equal scores by 1e-3."""
BF16_TOLERANCE = 3e-2
ROW_WISE_TOLERANCE = 3e-2
"""Largest difference, in nats, with tables by row: a row's first step is as large as its rate, however small its
gradient. Two kernels on one CPU are 2e-2 apart in fp32."""


@dataclass(frozen=True)
class ShortTraining:
    """A short training.

    Attributes:
        name: name of the trial; others refer to it.
        config: configuration of the run, on tokens that follow a rule.
        num_ranks: one per GPU.
        on_cpu: train on the CPU of the machine, instead of its GPUs.
        like: the trial whose losses it must have.
        tolerance: largest difference of a loss; 0: the same bits.
        holds: the memory that stays allocated is held against the formula.
    """

    name: str
    config: RunConfig
    num_ranks: int = 1
    on_cpu: bool = False
    like: str | None = None
    tolerance: float = 0.0
    holds: bool = False


@dataclass(frozen=True)
class Command:
    """A command whose output belongs on the page.

    Attributes:
        words: command line behind `python -m`; it is optional where a package of the first one's name is missing.
            `FOLDER` in a word stands for a folder that commands of a check share.
        num_gpus: GPUs that it needs.
    """

    words: tuple[str, ...]
    num_gpus: int = 1


FOLDER = "{folder}"


@dataclass(frozen=True)
class CheckPlan:
    """All of it, in order: what only a GPU can tell comes first.

    Attributes:
        first: commands by title, before the trials.
        resumed: a configuration that is trained, killed and resumed by the command line, after the first commands.
        trials: a trial follows the one that it is like.
        commands: commands by title, after the trials.
    """

    trials: tuple[ShortTraining, ...]
    first: Mapping[str, Command] = field(default_factory=dict)
    commands: Mapping[str, Command] = field(default_factory=dict)
    resumed: RunConfig | None = None


def full_plan() -> CheckPlan:
    """The quickstart's model, and four blocks of the 227M / 1.2B one, at the lengths that a CPU can follow."""
    small = quickstart()
    # With tables of their own, so that pipeline stages may part the blocks.
    four_blocks = ["model.num_layers=4", "model.memory.sharing={}"]
    slice_of_227m = load_config(CONFIGS / "ultramemv2" / "227m_1.2b.yaml", [*SHORT, *four_blocks])
    return CheckPlan(
        first=dict(_only_on_a_gpu()),
        trials=(*trials_of("quickstart", small), *trials_of("227M slice", slice_of_227m)),
        commands={
            "Tests on the GPU": Command(("pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "lab/tests/gpu")),
            "A step of the 227M / 1.2B model beside others": Command((*_STEP, *_ROUNDS, "--pair", "--nproc", "1")),
        },
        resumed=with_keys(small, "train.num_steps=200"),
    )


_MACHINE = f"{FOLDER}/machine.yaml"
_STEP = (
    *("lab", "study", "bench", "step", str(CONFIGS / "ultramemv2" / "227m_1.2b.yaml")),
    "train.global_batch_size=8",
)
_ROUNDS = ("--rounds", "3")


def _only_on_a_gpu() -> Iterator[tuple[str, Command]]:
    """Commands that show what no machine without a GPU can: order of streams, bandwidths, seconds."""
    for number in (1, 2):
        words = ("lab.gpu_check.sanitized", str(number))
        yield f"Order of streams, {plural(number, 'GPU')}", Command(words, number)
    yield "This machine", Command(("lab", "study", "bench", "hardware", "--write", _MACHINE))
    for number in (1, 2):
        # Tables are split over both.
        keys = (f"parallel.memory={number}", *_ROUNDS, "--nproc", str(number), "--gpu", _MACHINE)
        yield f"A step, predicted and measured, {plural(number, 'GPU')}", Command((*_STEP, *keys), number)
    kernels = ("lab", "study", "bench", "kernels", "--shapes", "227m", "1b", "--rounds", "10")
    yield "Memory kernels, beside a copy", Command(kernels)


def quickstart() -> RunConfig:
    """The quickstart's model, without its data."""
    return load_config(CONFIGS / "quickstart.yaml", [*SHORT, "model.vocab_size=4096"])


def trials_of(name: str, model: RunConfig) -> Iterator[ShortTraining]:
    """One model on the CPU, on one GPU in every way that must not change what it learns, and on more of them."""
    for precision, tolerance in (("fp32", FP32_TOLERANCE), ("bf16", BF16_TOLERANCE)):
        config = with_keys(model, f"train.precision={precision}")
        on_cpu, on_gpu = f"{name}, {precision}, CPU", f"{name}, {precision}"
        yield ShortTraining(on_cpu, config, on_cpu=True)
        yield ShortTraining(on_gpu, config, like=on_cpu, tolerance=tolerance, holds=True)
        for what, keys in {
            "kernels of PyTorch": ["train.kernels=torch"],
            "recomputed": ["train.recompute=full"],
            "tables stepped on the host": ["optimizer.value_offload=cpu"],
            "a graph of a microbatch": ["train.cuda_graph=microbatch"],
        }.items():
            yield ShortTraining(f"{on_gpu}, {what}", with_keys(config, *keys), like=on_gpu, tolerance=tolerance)
        by_row = with_keys(config, "optimizer.tables=row_wise")
        yield ShortTraining(f"{on_cpu}, tables by row", by_row, on_cpu=True)
        yield ShortTraining(
            f"{on_gpu}, tables by row",
            by_row,
            like=f"{on_cpu}, tables by row",
            tolerance=ROW_WISE_TOLERANCE,
            holds=True,
        )
        repeatable = with_keys(config, "train.deterministic=true")
        yield ShortTraining(f"{on_gpu}, deterministic", repeatable, like=on_gpu, tolerance=tolerance)
        yield ShortTraining(f"{on_gpu}, deterministic again", repeatable, like=f"{on_gpu}, deterministic")
        yield from _layouts(on_gpu, config, tolerance)


def _layouts(on_gpu: str, config: RunConfig, tolerance: float) -> Iterator[ShortTraining]:
    repeatable = with_keys(config, "train.deterministic=true")
    for num_ranks, keys in (
        (2, ()),
        (2, ("memory=2",)),
        (2, ("tensor=2", "memory=2")),
        *((2, ("context=2", f"context_attention={way}")) for way in WAYS),
        (2, ("pipeline=2",)),
        (2, ("pipeline=2", "virtual_pipeline=2")),
        (4, ("tensor=2", "pipeline=2", "memory=2")),
        (8, ("memory=8",)),
        (8, ("tensor=2", "context=2", "pipeline=2", "memory=4")),
    ):
        if any(key.startswith("pipeline") for key in keys) and not _can_be_cut(config):
            continue
        laid_out = with_keys(config, *(f"parallel.{key}" for key in keys))
        name = f"{on_gpu}, {', '.join(keys) or 'data'} on {num_ranks} GPUs"
        yield ShortTraining(name, laid_out, num_ranks, like=on_gpu, tolerance=tolerance)
    for key in ("parallel.overlap_memory", "parallel.overlap_grad_reduce", "parallel.overlap_param_gather"):
        beside = with_keys(repeatable, "parallel.memory=2")
        name = f"{on_gpu}, {key.split('.')[1]}"
        yield ShortTraining(name, beside, 2, like=on_gpu, tolerance=tolerance)
        # Reduced in other parts, norms are summed in another order.
        rounded = tolerance if key == "parallel.overlap_grad_reduce" else 0.0
        yield ShortTraining(f"{name} off", with_keys(beside, f"{key}=false"), 2, like=name, tolerance=rounded)
        if key == "parallel.overlap_memory":
            on_half = with_keys(beside, "parallel.gradient_sm_share=0.5")
            yield ShortTraining(f"{name}, gradient_sm_share 0.5", on_half, 2, like=name, tolerance=rounded)


def _can_be_cut(config: RunConfig) -> bool:
    """True if pipeline stages may part the blocks: a table of several must not be parted."""
    return all(len(bank.layers) == 1 for bank in config.model.memory_plan.banks)


def with_keys(config: RunConfig, *overrides: str) -> RunConfig:
    """A configuration with keys set, as on the command line."""
    return from_dict(to_dict(config), "the plan", overrides)
