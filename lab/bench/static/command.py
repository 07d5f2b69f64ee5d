"""Options of `megamem bench kernels --static`."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from lab.bench.arguments import with_given_vocabulary
from pretrain.config.stages import load_stage
from pretrain.errors import ConfigError
from pretrain.planning.costs.hardware import load_hardware
from tools.parsers import add_config, add_stage

_CONFIG = Path(__file__).parents[3] / "configs" / "h100" / "2.5b_120b_top256_on_256.yaml"
_STAGE, _GPU, _EXPONENTS = "pretrain", "h100-80g", [0.0, 0.8]
_ONLY_STATIC = ("config", "stage", "gpu", "zipf")
_ONLY_TIMED = ("shapes", "tokens", "rows", "dtypes", "kernels", "compile_naive")


def add_static_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options, none of which the measured kernels have."""
    add_config(
        parser,
        f"with --static: YAML file whose memory's kernels are looked at (default: {_CONFIG.name})",
        "with --static: set a key of CONFIG",
        is_needed=False,
    )
    add_stage(parser, f"with --static: which stage of a run of stages (default: {_STAGE}, of the default CONFIG)")
    parser.add_argument(
        "--static",
        action="store_true",
        help="measure nothing, but read the machine code that Triton builds: needs no GPU",
    )
    parser.add_argument("--gpu", metavar="NAME", help=f"with --static: a GPU that megamem plan knows (default: {_GPU})")
    parser.add_argument(
        "--zipf",
        type=_exponents,
        metavar="A,..",
        help="with --static: exponents of Zipf's law by which rows are read; 0: all alike (default: 0,0.8)",
    )


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that the other half of the command has.

    Raises:
        ConfigError: see above.
    """
    for name in _ONLY_TIMED if args.static else _ONLY_STATIC:
        if getattr(args, name):
            given = "CONFIG" if name == "config" else f"--{name.replace('_', '-')}"
            fix = f"leave {given} out" if args.static else "add --static"
            raise ConfigError(f"{given} has no effect {'with' if args.static else 'without'} --static: {fix}")


def run_static(args: argparse.Namespace) -> int:
    """Builds the kernels and prints."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError('--static looks at what Triton builds, which is not installed: pip install "megamem[gpu]"')
    from lab.bench.static.floors import gpu_of
    from lab.bench.static.report import static_lines

    name = args.gpu or _GPU
    gpu, hardware = gpu_of(name), load_hardware(name)
    file, overrides = args.config, args.overrides
    if file is not None and "=" in file:
        # The first override, where no file is named.
        file, overrides = None, [file, *overrides]
    stage = args.stage or (None if file else _STAGE)
    config = with_given_vocabulary(load_stage(file or str(_CONFIG), overrides, stage), 4096)
    for line in static_lines(config, gpu, hardware, args.zipf or _EXPONENTS):
        print(line, flush=True)
    return 0


def _exponents(text: str) -> list[float]:
    """Numbers of a list with commas, of 0 or more."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= number < 10 for number in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of exponents from 0 to 10, as in 0,0.8")
    return found
