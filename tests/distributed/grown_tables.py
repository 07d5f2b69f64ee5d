"""An exported model with tables of another size, of weights that are drawn: what is computed means nothing."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_SEED = 11
_CHUNK_BYTES = 2**24


def grow(exported: Path, num_keys: int, folder: Path, bits: int | None = None) -> int:
    """Make a model with another number of keys, and tables of so many bits or of fp32; the bytes of its tables.

    Tables have a chunk of drawn bytes again and again: on the disk, unlike zeros.
    """
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
