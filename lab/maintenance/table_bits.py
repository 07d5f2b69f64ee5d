"""Logits on a text, and bytes of the weights' files, of a run's models with tables in 8 and in 4 bits.

Usage: python -m lab.maintenance.table_bits RUN TEXT [TOKENS]

RUN's newest checkpoint is exported with tables as its weights are, in int8 and in int4; transformers computes the logits of
the first TOKENS (512) tokens of the file TEXT, in fp32, by each.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from pretrain.config.schema import ParallelConfig
from pretrain.convert.convert import convert
from pretrain.convert.format import Target
from pretrain.convert.names import HUGGINGFACE
from pretrain.convert.registry import FORMATS, open_checkpoint
from pretrain.convert.resources import Resources
from tools.checkpoint.convert import TABLE_BITS

_BYTES = 2**32


def main(run: str, text: str, tokens: str = "512") -> None:
    """Print a row for each number of bits."""
    opened = open_checkpoint(Path(run))
    assert opened.tokenizer is not None
    ids = opened.tokenizer.tokenize(Path(text).read_text(encoding="utf-8"))[: int(tokens)]
    print("| tables | weights' files | largest logit | moved at most | on average | same likeliest token |")
    print("|---|---|---|---|---|---|")
    expected: Any = None
    for name in (None, "int8", "int4"):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "exported"
            target = Target(ParallelConfig(), False, None, _BYTES, table_bits=TABLE_BITS[name])
            convert(
                opened, FORMATS[HUGGINGFACE], folder, target, Resources(2, _BYTES), on_start=lambda *_: lambda _: None
            )
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
            logits = _logits(folder, ids)
        row = f"| {name or 'as weights'} | {size:.2f} MB | {float(logits.abs().max()):.2f} |"
        if expected is None:
            expected = logits
            print(f"{row} | | |", flush=True)
            continue
        moved, same = (logits - expected).abs(), int((logits.argmax(-1) == expected.argmax(-1)).sum())
        print(f"{row} {float(moved.max()):.4f} | {float(moved.mean()):.4f} | {same} of {len(ids)} |", flush=True)


def _logits(folder: Path, ids: list[int]) -> Any:
    """[tokens, vocabulary] in fp32, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
