"""Speed and memory of vLLM by the size of the tables that it serves, their bits, and where their rows are.

Usage: python -m lab.maintenance.served_tables EXPORTED ENGINE_PYTHON KEYS... [--ways WAY ...] [--under WORDS]

EXPORTED is an exported UltraMemV2. For each number of keys per side it is made again with weights that are drawn: what is
computed means nothing, and costs what it would. Each row of the result is a process of its own: 32 requests of 16 tokens
that write 128 more, after others that warm it up. "First" is their speed with rows that nobody has read yet, mostly on
disk; "again" the median of the same requests three times more. Without --ways, large tables are mapped alone.

--under begins the command of each process: it bounds its memory, as in --under 'systemd-run --user --scope -p
MemoryMax=2500M'. The bound in the table is that of the process's own control group. Pages of files count, so tables are
out of the page cache before a process starts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NUM_REQUESTS, _NUM_GIVEN, _NUM_WRITTEN = 32, 16, 128
_NUM_REPEATS = 3
_SEED = 11
_MOST_LOADED_BYTES = 2**31
_CHUNK_BYTES = 2**24
_MAPPED = {"memory_device": "cpu"}
# Keys of the configuration, and bits of an element (None: fp32).
_WAYS: dict[str, tuple[dict[str, Any], int | None]] = {
    "loaded": ({}, None),
    "loaded, int8": ({}, 8),
    "mapped": (_MAPPED, None),
    "mapped, 8,192 hot rows": (_MAPPED | {"hot_rows": 8192}, None),
    "mapped, int8": (_MAPPED, 8),
    "mapped, int4": (_MAPPED, 4),
}


def main(arguments: Sequence[str]) -> None:
    """Print a row of a table for every number of keys and every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path)
    parser.add_argument("engine")
    parser.add_argument("keys", type=int, nargs="+")
    parser.add_argument("--ways", nargs="+", choices=_WAYS)
    parser.add_argument("--under", default="")
    given = parser.parse_args(arguments)
    print(
        "| keys per side | tables | | memory at most | tokens/s first | again | own memory | pages of files | read from disk |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for num_keys in given.keys:
        for bits in (None, 8, 4):
            ways = [way for way in given.ways or _WAYS if _WAYS[way][1] == bits]
            if not ways:
                continue
            with tempfile.TemporaryDirectory(dir=given.exported.parent) as folder:
                table_bytes = grow(given.exported, num_keys, Path(folder), bits)
                for way in ways:
                    overrides = _WAYS[way][0]
                    if overrides or given.ways or table_bytes <= _MOST_LOADED_BYTES:
                        found = _measured(given.engine, shlex.split(given.under), Path(folder), overrides)
                        print(f"| {num_keys:,} | {table_bytes / 1e9:.2f} GB | {way} | {found} |", flush=True)


def _measured(engine: str, under: Sequence[str], folder: Path, overrides: dict[str, Any]) -> str:
    """The figures of a process, or that it was killed."""
    _forget(folder)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [*under, engine, __file__, "--inside", str(folder), json.dumps(overrides), str(result)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    # vLLM's cache is 1 GiB on CPUs, and not a share of the machine.
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command, check=False, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode in (-9, 137) and under:
        return "killed | | | | |"
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(result.read_text(encoding="utf-8"))
    bound = "" if found["bound"] is None else f"{found['bound'] / 1e9:.2f} GB"
    sizes = " | ".join(f"{found[key] / 1e9:.2f} GB" for key in ("RssAnon", "RssFile", "read"))
    return f"{bound} | {found['first']:,.0f} | {found['again']:,.0f} | {sizes}"


def _forget(folder: Path) -> None:
    """Take a folder's files out of the page cache, where other processes' bounds would count them."""
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def grow(exported: Path, num_keys: int, folder: Path, bits: int | None = None) -> int:
    """Make a model with another number of keys, and tables of so many bits or of fp32; the bytes of its tables.

    Tables have a chunk of drawn bytes again and again: on the disk, unlike zeros.
    """
    import shutil

    import torch
    from safetensors import safe_open

    for path in exported.iterdir():
        if "safetensors" not in path.name:
            shutil.copy(path, folder)
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    memory = config["memory"]
    before = memory["layers"][0]["weights"]["keys"][2]
    for layer in memory["layers"]:
        layer["weights"]["keys"][2] = num_keys
        layer["num_rows"] = num_keys**2
        layer["first_row"] = layer["first_row"] * num_keys**2 // before**2
    memory["table_bits"] = bits
    memory["bank_rows"] = [rows * num_keys**2 // before**2 for rows in memory["bank_rows"]]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes: dict[str, list[int]] = {}
    for path in exported.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        if name.endswith(".memory.keys"):
            shape[2] = num_keys
        elif name.startswith("model.banks."):
            shape[0] = memory["bank_rows"][int(name.split(".")[2])]
            if bits is not None:
                # A scale, and codes.
                shape[1] = 4 + -(-shape[1] * bits // 8)
    # Tables last, without a gap.
    names = sorted(shapes, key=lambda name: name.startswith("model.banks."))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        code, size = ("U8", 1) if bits is not None and name.startswith("model.banks.") else ("F32", 4)
        begin, end = end, end + size * math.prod(shapes[name])
        header[name] = {"dtype": code, "shape": shapes[name], "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(_SEED)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            if not name.startswith("model.banks."):
                stream.write((0.1 * torch.randn(shapes[name], generator=generator)).numpy().tobytes())
        left = 8 + len(encoded) + end - stream.tell()
        # Four such bytes are a number below 0.1, wherever a record's scale begins; as codes any will do.
        chunk = torch.randint(0x20, 0x3E, (_CHUNK_BYTES,), generator=generator, dtype=torch.uint8).numpy().tobytes()
        for begin in range(0, left, _CHUNK_BYTES):
            stream.write(chunk[: left - begin])
    places = [header[name]["data_offsets"] for name in names if name.startswith("model.banks.")]
    return sum(stop - start for start, stop in places)


def _inside(folder: str, overrides: str, result: str) -> None:
    """Serve requests in the engine's interpreter, which has none of our packages."""
    import statistics
    import time

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        model_impl="transformers",
        trust_remote_code=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        hf_overrides=json.loads(overrides),
    )
    sampling = SamplingParams(temperature=0, max_tokens=_NUM_WRITTEN, ignore_eos=True)
    speeds = []
    # The first requests warm the engine up, the others are the same ones again and again.
    for shift in [0, *[1] * (1 + _NUM_REPEATS)]:
        prompts = [
            {"prompt_token_ids": [(shift + 7 * request + 3 * place) % 250 for place in range(_NUM_GIVEN)]}
            for request in range(_NUM_REQUESTS)
        ]
        began = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        speeds.append(_NUM_REQUESTS * _NUM_WRITTEN / (time.perf_counter() - began))
    usage = dict(line.split(":", 1) for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    found: dict[str, float | None] = {key: int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile")}
    found |= {"first": speeds[1], "again": statistics.median(speeds[2:]), "read": int(usage["read_bytes"])}
    found |= {"bound": _memory_bound()}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


def _memory_bound() -> int | None:
    """Bytes that this process's control group may take, of either version of control groups; None: as many as there are."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup", controllers)
            file = root / path.lstrip("/") / ("memory.limit_in_bytes" if controllers else "memory.max")
            if file.is_file() and (text := file.read_text(encoding="utf-8").strip()).isdecimal():
                # Without a bound, the first version has the largest number of pages.
                return int(text) if int(text) < 2**60 else None
    return None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        _inside(*sys.argv[2:])
    else:
        main(sys.argv[1:])
