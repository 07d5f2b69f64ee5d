"""The model card of an exported folder: what the model is, how it was trained, and how to use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.loader import to_dict
from pretrain.config.schema import RunConfig
from pretrain.config.source import dump_yaml
from pretrain.convert.huggingface.config import OWN, architecture_of
from pretrain.planning.counts.formulas import count_parameters
from pretrain.state import RunState

# Its data and the places of its files are the run's own affair.
_SHOWN_SECTIONS = ("seed", "model", "train", "optimizer")


@dataclass(frozen=True)
class Figures:
    """Progress of a run, and its losses.

    Attributes:
        steps: optimizer steps.
        tokens: tokens seen.
        training_loss: loss of the last step that was logged, in nats per token; None: unknown.
        validation_loss: loss of the last evaluation, in nats per token; None: there was none.
        bits_per_byte: bits per byte of the last evaluation; None: there was none.
    """

    steps: int
    tokens: int
    training_loss: float | None = None
    validation_loss: float | None = None
    bits_per_byte: float | None = None


def figures_of(state: RunState, metrics: Path) -> Figures:
    """The figures of a checkpoint.

    Args:
        state: the checkpoint's.
        metrics: the run's `metrics.jsonl`, which may be missing and may go on after the checkpoint.
    """
    last: dict[str, Any] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        row = json.loads(line)
        if row.get("step", 0) <= state.step:
            last |= {key: value for key, value in row.items() if value is not None}
    return Figures(
        state.step,
        state.consumed_tokens,
        last.get("loss"),
        last.get("validation_loss"),
        last.get("bits_per_byte"),
    )


def model_card(config: RunConfig, figures: Figures, *, name: str) -> str:
    """The text of `README.md`.

    Args:
        config: the run's, with `model.vocab_size` set.
        figures: figures of the checkpoint.
        name: name of the model.
    """
    own = architecture_of(config.model) == OWN
    trust = ", trust_remote_code=True" if own else ""
    plain = to_dict(config)
    shown = {key: plain[key] for key in _SHOWN_SECTIONS if key in plain}
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [megamem" + (", memory-layers]" if config.model.memory is not None else "]"),
        "---",
        "",
        f"# {name}",
        "",
        f"{_described(config)} Trained with megamem.",
        "",
        "| | |",
        "|---|---|",
        *_rows(config, figures),
        "",
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."  # this folder',
        f"tokenizer = AutoTokenizer.from_pretrained(folder{trust})",
        f"model = AutoModelForCausalLM.from_pretrained(folder{trust})",
        'inputs = tokenizer("Once", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
        "```",
        "",
    ]
    memory = config.model.memory
    if own:
        lines += [
            "vLLM runs it with `--model-impl transformers --trust-remote-code --enforce-eager`.",
            "",
        ]
    if memory is not None:
        lines += [
            "With `memory_device=\"cpu\"` the memory's tables stay in the weights' files, mapped into host memory, and only",
            "the rows that are read go to the model's device.",
            "",
        ]
    lines += [
        "In training a document began after the end-of-document token of another: put that token before a text that",
        "begins a document.",
        "",
        "## Configuration",
        "",
        "```yaml",
        dump_yaml(shown).rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _described(config: RunConfig) -> str:
    model = config.model
    kind = "A dense decoder-only transformer."
    if model.moe is not None:
        kind = f"A decoder-only transformer with a mixture of {model.moe.num_experts} experts in every block."
    if model.memory is not None:
        kind = kind[:-1] + f" and {model.num_memory_layers} memory layers ({model.memory_kinds})."
    return kind


def _rows(config: RunConfig, figures: Figures) -> Iterator[str]:
    counts = count_parameters(config.model)
    yield f"| parameters | {counts.total:,} |"
    yield f"| active per token | {counts.active:,} |"
    yield f"| steps | {figures.steps:,} |"
    yield f"| tokens | {figures.tokens:,} |"
    yield f"| sequence length | {config.train.sequence_length:,} |"
    if figures.training_loss is not None:
        yield f"| training loss of the last step | {figures.training_loss:.4f} nats per token |"
    if figures.validation_loss is not None:
        yield f"| validation loss | {figures.validation_loss:.4f} nats per token |"
    if figures.bits_per_byte is not None:
        yield f"| validation | {figures.bits_per_byte:.4f} bits per byte |"
