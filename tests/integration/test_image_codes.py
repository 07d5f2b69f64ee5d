"""Images as codes, from arrays to codes that a trained model draws for a class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from commands import Megamem

REPOSITORY = Path(__file__).parents[2]
# Codes of each class. The first two are the same for all, so what follows has to come from the class itself.
CODES = np.array([[5, 5, 0, 1, 7, 7], [5, 5, 2, 3, 0, 6], [5, 5, 4, 1, 2, 3]])
NUM_CODES = 8


def test_a_model_draws_the_codes_of_the_class_that_it_is_asked_for(tmp_path: Path, megamem: Megamem) -> None:
    classes = np.arange(240) % len(CODES)
    np.savez(tmp_path / "codes.npz", codes=CODES[classes], classes=classes)
    data, run = tmp_path / "data", tmp_path / "run"
    tokenizer = f"codes:{NUM_CODES},{len(CODES)}"
    # Of a few images that repeat none can be held out and learnt.
    options = ("--tokenizer", tokenizer, "--validation-fraction", 0, "--output", data)
    result = megamem("data", "prepare", tmp_path / "codes.npz", *options)
    assert result.code == 0, result.output
    result = megamem(
        "train",
        REPOSITORY / "configs" / "move" / "images_8x8.yaml",
        "--run-dir",
        run,
        f"data.datasets=[{{path: {data}}}]",
        f"model.memory.vocab_size={NUM_CODES + 1 + len(CODES)}",
        "model.num_layers=2",
        "train.sequence_length=32",
        "train.num_steps=60",
        "optimizer.lr=1e-2",
        "optimizer.warmup_steps=5",
    )
    assert result.code == 0, result.output
    for number, codes in enumerate(CODES):
        result = megamem("generate", run, "--prompt", f"c{number} ", "--max-tokens", 1 + len(codes), "--temperature", 0)
        assert result.code == 0, result.output
        assert result.generated.split() == [f"c{number}", *map(str, codes)]
