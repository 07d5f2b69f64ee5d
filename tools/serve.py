"""`megamem serve`: an OpenAI-compatible server for a trained model, by an engine that others keep."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.convert.paths import check_source
from pretrain.errors import ConfigError
from tools.common.parsers import add_command

_EPILOG = """\
examples:
  megamem serve runs/quickstart
  megamem serve runs/quickstart --python .venv-serve/bin/python --port 9000
  megamem serve exported --engine vllm --options='--max-num-seqs 64'

A run's newest checkpoint is exported to RUN/exported the first time. vLLM answers many requests at once; transformers'
own server (pip install 'transformers[serving]' accelerate) answers one after the other. Both have versions of torch and
transformers of their own, so they may be in another environment: --python names its interpreter. A request:

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "def __init__(self", "max_tokens": 30, "temperature": 0}'

docs/serving.md says which models are served, and what they need.
"""

_PROBE = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n)]))"


@dataclass(frozen=True)
class Served:
    """A folder and the address that it is served at.

    Attributes:
        folder: folder of Hugging Face's format.
        name: name of the model.
        has_code: the folder has code of its own.
        overrides: keys of the model's configuration that are set.
        host, port: address of the server.
        options: further words for the engine.
    """

    folder: Path
    name: str
    has_code: bool
    overrides: Mapping[str, Any]
    host: str
    port: int
    options: Sequence[str]


def _vllm(served: Served) -> list[str]:
    # With code of its own: its retrieval depends on data, which compiled graphs do not.
    own = ["--model-impl", "transformers", "--trust-remote-code", "--enforce-eager"] if served.has_code else []
    tables = ["--hf-overrides", json.dumps(served.overrides)] if served.overrides else []
    address = ["--host", served.host, "--port", str(served.port), "--served-model-name", served.name]
    # Not `vllm serve`, which looks for a package of that name: builds for CPUs have others.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(served.folder)]
    return [*words, *own, *tables, *address, *served.options]


def _transformers(served: Served) -> list[str]:
    if served.options:
        raise ConfigError(
            f"--options is {shlex.join(served.options)}, words for vLLM, and transformers serves: leave it out"
        )
    script = Path(__file__).with_name("transformers_server.py")
    trust = "code" if served.has_code else "no-code"
    address = [served.host, str(served.port)]
    return [str(script), str(served.folder), served.name, *address, json.dumps(served.overrides), trust]


@dataclass(frozen=True)
class Engine:
    """A server that others keep.

    Attributes:
        packages: modules that it needs.
        install: command that installs the packages, and a note.
        words: makes the words of the command behind the interpreter.
    """

    packages: tuple[str, ...]
    install: str
    words: Callable[[Served], list[str]]


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        ("vllm",), "pip install vllm (on CPUs: requirements/serve.txt), in an environment of its own", _vllm
    ),
    "transformers": Engine(
        ("transformers", "fastapi", "uvicorn", "openai", "accelerate"),
        "pip install 'transformers[serving]' accelerate",
        _transformers,
    ),
}
"""By name, the better one first."""


def add_parser(subparsers: Any) -> None:
    """Adds `serve` to the commands of `megamem`."""
    parser = add_command(subparsers, "serve", "answer requests with a trained model, as OpenAI's API does", _EPILOG)
    parser.add_argument("source", metavar="RUN", type=Path, help="a run's folder, or an exported one")
    parser.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of this step (default: the newest)")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="dtype of the exported weights (default: as they are)"
    )
    parser.add_argument(
        "--engine",
        choices=("auto", *ENGINES),
        default="auto",
        help="default: vllm where it is installed, else transformers",
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="interpreter that has the engine (default: this one)"
    )
    parser.add_argument(
        "--options", default="", metavar="WORDS", help="options of vLLM's own, as in --options='--max-num-seqs 64'"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME", help="default: %(default)s, this machine alone")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--map-tables", action="store_true", help="leave the memory's tables in their files, mapped into host memory"
    )
    parser.add_argument(
        "--tables", choices=("int8", "int4"), help="integers of the exported tables (default: floats, as the weights)"
    )
    parser.add_argument(
        "--hot-rows", type=int, default=0, metavar="N", help="with --map-tables: rows of each table kept by the model"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code of the folder that is not this version's"
    )
    parser.set_defaults(func=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Export the model if that has not been done, and become the server."""
    check_source(args.source)
    _refuse_taken_address(args.host, args.port)
    python = shutil.which(args.python)
    if python is None:
        raise ConfigError(f"--python is {args.python}, which is no program: name the engine's interpreter")
    if args.hot_rows < 0 or (args.hot_rows and not args.map_tables):
        raise ConfigError(f"--hot-rows is {args.hot_rows}: give a number of rows from 0 on, and --map-tables")
    hot = {"hot_rows": args.hot_rows} if args.hot_rows else {}
    engine = _engine(args.engine, python)
    folder = _exported(args)
    served = Served(
        folder=folder,
        name=args.source.absolute().name,
        has_code=_has_code(folder, trusted=args.trust_remote_code),
        overrides={**({"memory_device": "cpu"} if args.map_tables else {}), **hot},
        host=args.host,
        port=args.port,
        options=shlex.split(args.options),
    )
    if args.map_tables and not served.has_code:
        raise ConfigError(f"--map-tables: {folder} has no memory: leave it out")
    command = [python, *ENGINES[engine].words(served)]
    print(f"{engine}: {shlex.join(command)}\nhttp://{args.host}:{args.port}/v1", flush=True)
    # Signals, output and exit code are the server's. What is in this folder is no package for it.
    os.execve(python, command, {**os.environ, "PYTHONSAFEPATH": "1"})


def _refuse_taken_address(host: str, port: int) -> None:
    """Refuse an address before minutes of loading, after which an engine would."""
    try:
        if not 0 < port < 2**16:
            raise OverflowError("ports are numbers from 1 to 65535")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: what a server that ended leaves behind is no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--host is {host} and --port is {port}, where nothing can be served ({reason}): name others"
        ) from error


def _engine(wanted: str, python: str) -> str:
    """Name of the engine that an interpreter has. Raises ConfigError where it has none, or not the wanted one."""
    names = list(ENGINES) if wanted == "auto" else [wanted]
    modules = sorted({package for name in names for package in ENGINES[name].packages})
    try:
        probe = subprocess.run([python, "-c", _PROBE, *modules], capture_output=True, text=True, check=True)
        found = set(json.loads(probe.stdout))
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ConfigError(
            f"--python is {python}, which does not run ({error}): name the engine's interpreter"
        ) from error
    for name in names:
        if found.issuperset(ENGINES[name].packages):
            return name
    ways = "; or ".join(ENGINES[name].install for name in names)
    lacking = ", ".join(sorted(set(ENGINES[names[-1]].packages) - found))
    raise ConfigError(
        f"{python} has no engine to serve with ({names[-1]} lacks {lacking}): {ways}; or name another --python"
    )


def _exported(args: argparse.Namespace) -> Path:
    """The folder to serve, made if it is of a run and not there."""
    from pretrain.config.schema import ParallelConfig
    from pretrain.convert.convert import convert
    from pretrain.convert.format import ConversionTarget
    from pretrain.convert.names import HUGGINGFACE
    from pretrain.convert.registry import FORMATS
    from pretrain.convert.resources import Resources
    from tools.checkpoint.command import opened, size_in_bytes
    from tools.checkpoint.convert import TABLE_BITS, dtype_named, warn_of_tokenizer
    from tools.checkpoint.phases import Phases

    source: Path = args.source
    kind = FORMATS[HUGGINGFACE]
    if kind.is_at(source):
        for name in ("step", "dtype", "tables"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name}: {source} is exported already: leave it out, or name the run")
        return source
    checkpoint = opened(source, args.step)
    if checkpoint.saved is None:
        raise ConfigError(f"{source} is in the format {checkpoint.format_name}: name a run, or convert it first")
    name = "-".join([checkpoint.path.name, *(word for word in (args.dtype, args.tables) if word is not None)])
    folder = checkpoint.path.parent.parent / "exported" / name
    if not kind.is_at(folder):
        size = size_in_bytes("4GiB")
        target = ConversionTarget(
            ParallelConfig(), False, dtype_named(args.dtype), size, table_bits=TABLE_BITS[args.tables]
        )
        with Phases() as phases:
            convert(checkpoint, kind, folder, target, Resources(2, size), on_start=phases.start)
        print(f"exported: {folder}", flush=True)
        warn_of_tokenizer(folder, checkpoint.tokenizer)
    return folder


def _has_code(folder: Path, *, trusted: bool) -> bool:
    """Tell whether a folder has code of its own. Raises ConfigError if it is not this version's and nobody trusts it."""
    from pretrain.convert.huggingface.folder import changed_code

    changed = changed_code(folder)
    if changed and not trusted:
        raise ConfigError(
            f"{folder} has code that this version did not export ({', '.join(changed)}): remove the folder or export it "
            "again; or read the code, and give --trust-remote-code"
        )
    return changed is not None
