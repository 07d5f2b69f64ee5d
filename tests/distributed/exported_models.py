"""Models exported to folders in tests, with the logits that they had before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exported import export
from huggingface_models import BOUNDARIES, TOKEN_MAP, VOCAB_SIZE
from tiny_runs import SHARED, build_chunks, joined
from torch import Tensor

from megamem.config.model import ModelConfig
from pretrain.config.schema import RunConfig
from pretrain.convert.huggingface.card import Figures
from pretrain.data.tokenizer import ByteTokenizer
from tests.whole_tensors import whole_tensors


def some_tokens(sequences: int = 3, length: int = 16) -> Tensor:
    """Texts [sequences, length] of random ids, every fifth of which is a boundary, wherever that falls."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB_SIZE, (sequences, length), generator=generator)
    boundaries = torch.tensor(BOUNDARIES)[torch.randint(0, len(BOUNDARIES), tokens.shape, generator=generator)]
    return torch.where(torch.rand(tokens.shape, generator=generator) < 0.2, boundaries, tokens)


def export_all(run_ranks: Any, root: Path, models: Mapping[str, ModelConfig]) -> Callable[[str], tuple[Path, Tensor]]:
    """Export models under `root`; a model's folder and its logits before, by its name.

    Weights are large enough to matter.
    """
    np.save(root / TOKEN_MAP, np.arange(VOCAB_SIZE, dtype=np.int32) % 50)

    def main() -> dict[str, Tensor]:
        logits = {}
        generator = torch.Generator().manual_seed(3)
        tokens = some_tokens()
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        with joined(SHARED) as groups:
            for number, (name, model) in enumerate(models.items()):
                config = replace(SHARED, model=model)
                if getattr(model.memory, "token_map", None) is not None:
                    memory = replace(model.memory, token_map=str(root / TOKEN_MAP))  # type: ignore[type-var]
                    config = replace(config, model=replace(model, memory=memory))
                (chunk,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE)
                with torch.no_grad():
                    for parameter in chunk.parameters():
                        # Tables that begin as zeros have large numbers of their own.
                        scale = 0.1 if bool(parameter.any()) else 1.0
                        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
                    chunk.begin_step()
                    logits[name] = chunk.eval()(tokens, positions, None)[..., :VOCAB_SIZE]
                    chunk.set_memory_enabled(False)
                    without = chunk(tokens, positions, None)[..., :VOCAB_SIZE]
                assert (model.memory is None) == torch.equal(without, logits[name])
                assert model.memory is None or (without - logits[name]).abs().max() > 0.03 * without.abs().max()
                export_to(root / str(number), config, chunk)
        return logits

    (logits,) = run_ranks(main, 1)
    return lambda name: (root / str(list(models).index(name)), logits[name])


def export_to(folder: Path, config: RunConfig, chunk: Any) -> None:
    folder.mkdir()
    export(
        config,
        whole_tensors(chunk),
        folder,
        tokenizer=ByteTokenizer(),
        vocab_size=VOCAB_SIZE,
        figures=Figures(1, 2),
        max_file_bytes=20_000,
    )


def load(folder: Path, **options: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()
