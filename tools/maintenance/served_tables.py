"""Speed and memory of vLLM by the size of the tables that it serves, their bits, and where their rows are.

Usage: python -m tools.maintenance.served_tables EXPORTED ENGINE_PYTHON KEYS...

EXPORTED is an exported UltraMemV2. For each number of keys per side it is made again with weights that are drawn, and
tables of zeros in a sparse file: what is computed means nothing, and costs what it would. Each row of the result is a
process of its own: 32 requests of 16 tokens that write 32 more, after as many that warm it up. Large tables are mapped
alone.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_NUM_REQUESTS, _NUM_GIVEN, _NUM_WRITTEN = 32, 16, 32
_SEED = 11
_MOST_LOADED_BYTES = 2**31
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


def main(exported: str, engine: str, *keys: str) -> None:
    """Print a row of a table for every number of keys and every way."""
    print("| keys per side | tables | | tokens/s | own memory | pages of files |\n|---|---|---|---|---|---|")
    for num_keys in map(int, keys):
        for way, (overrides, bits) in _WAYS.items():
            with tempfile.TemporaryDirectory(dir=Path(exported).parent) as folder:
                table_bytes = grow(Path(exported), num_keys, Path(folder), bits)
                if not overrides and table_bytes > _MOST_LOADED_BYTES:
                    continue
                result = Path(folder) / "result.json"
                command = [engine, __file__, "--inside", folder, json.dumps(overrides), str(result)]
                environment = {**os.environ, "PYTHONSAFEPATH": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
                # vLLM's cache is 1 GiB on CPUs, and not a share of the machine.
                environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
                subprocess.run(
                    command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                found = json.loads(result.read_text(encoding="utf-8"))
                sizes = " | ".join(f"{found[key] / 1e9:.2f} GB" for key in ("RssAnon", "RssFile"))
                print(
                    f"| {num_keys:,} | {table_bytes / 1e9:.2f} GB | {way} | {found['tokens_per_s']:.0f} | {sizes} |",
                    flush=True,
                )


def grow(exported: Path, num_keys: int, folder: Path, bits: int | None = None) -> int:
    """Make a model with another number of keys, and tables of so many bits or of fp32; the bytes of its tables."""
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
    # Tables last: the end of the file is a hole.
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
        stream.truncate(8 + len(encoded) + end)
    places = [header[name]["data_offsets"] for name in names if name.startswith("model.banks.")]
    return sum(stop - start for start, stop in places)


def _inside(folder: str, overrides: str, result: str) -> None:
    """Serve requests in the engine's interpreter, which has none of our packages."""
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
    seconds = math.inf
    for first in range(2):
        prompts = [
            {"prompt_token_ids": [(first + 7 * request + 3 * place) % 250 for place in range(_NUM_GIVEN)]}
            for request in range(_NUM_REQUESTS)
        ]
        began = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    found: dict[str, float] = {key: int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile")}
    found |= {"tokens_per_s": _NUM_REQUESTS * _NUM_WRITTEN / seconds}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        _inside(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
