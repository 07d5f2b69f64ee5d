"""Losses and texts of a trained model by its forward pass alone: naive kernels, one rank, no cache, loops over tokens."""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.config.schema import ParallelConfig
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.evaluation.restore import restore_model
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, saved_config

END, VOCAB_SIZE = 256, 257
# Windows of one forward pass.
_AT_ONCE = 64


def plain_model(groups: ParallelGroups, run: Path, step: int, *keys: str, tables: str = "full") -> MemoryGPTModel:
    """The model of a checkpoint on this rank, with other keys, and with its tables rounded as a form says."""
    saved = find_checkpoint(RunFolder(run), step)
    config = saved_config(saved, ParallelConfig(), ["train.kernels=naive", *keys])
    (model,) = restore_model(config, saved.path, ByteTokenizer(), groups)
    if tables != "full":
        largest = {"int8": 127, "int4": 7}[tables]
        for bank in model.banks.values():
            for table in bank.parameters():
                for row in table.data:
                    scale = float((row.abs().max().double() / largest).float())
                    row.copy_((row.double() / scale).round() * scale)
    return model


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents of a data set.

    Attributes:
        domain: its name.
        documents: a prompt, which is not predicted, and the text that is.
    """

    domain: str
    documents: Sequence[tuple[bytes, bytes]]

    @classmethod
    def on_disk(cls, folder: Path) -> HeldOut:
        """Documents of a prepared data set of bytes, read without the code that evaluation reads them by."""
        ids = np.fromfile(folder / "validation.bin", np.uint16)
        ends = np.flatnonzero(ids == END)
        parts = np.split(ids, ends + 1)[:-1]
        return cls(folder.name, [(b"", bytes(part[:-1].astype(np.uint8))) for part in parts])

    @property
    def text(self) -> bytes:
        return b"".join(prompt + answer for prompt, answer in self.documents)


@dataclass
class Sum:
    """Nats, targets and bytes of a domain."""

    nats: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.nats + other.nats, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes)

    @property
    def loss(self) -> float:
        return self.nats / self.num_tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes


@torch.no_grad()
def plain_losses(
    model: MemoryGPTModel, sets: Sequence[HeldOut], length: int, *, separate: bool, memory: bool = True
) -> dict[str, Sum]:
    """Sums by domain over windows of `length` tokens; `separate`: each document's part of a window by itself."""
    ids, targets = [END], list[tuple[str, bool]]()
    sums = {each.domain: Sum() for each in sets}
    for each in sets:
        for prompt, answer in each.documents:
            ids += [*prompt, *answer, END]
            targets += [(each.domain, False)] * len(prompt) + [(each.domain, True)] * (len(answer) + 1)
            sums[each.domain].num_bytes += len(answer)
    hooks = [] if memory else [layer.register_forward_hook(_nothing) for layer in model.memory_layers]
    places, nats = torch.arange(len(targets)), torch.empty(len(targets), dtype=torch.float64)
    tokens = torch.tensor(ids)
    for group in _alike(_pieces(ids[:-1], length, separate)):
        at = torch.stack([places[start:stop] for start, stop in group])
        # Ids of the vocabulary's padding have a share in the loss, as in training.
        logits = model(tokens[at], torch.arange(at.shape[1]).expand(at.shape), None)
        nats[at] = -logits.double().log_softmax(-1).gather(-1, tokens[at + 1].unsqueeze(-1)).squeeze(-1)
    for hook in hooks:
        hook.remove()
    for (domain, counts), loss in zip(targets, nats.tolist(), strict=True):
        if counts:
            sums[domain].nats += loss
            sums[domain].num_tokens += 1
    return sums


@torch.no_grad()
def plain_nats(model: MemoryGPTModel, text: bytes, length: int, *, memory: bool) -> list[float]:
    """Nats of each byte of a text that begins a document, in windows of `length` tokens."""
    ids = [END, *text]
    hooks = [] if memory else [layer.register_forward_hook(_nothing) for layer in model.memory_layers]
    nats: list[float] = []
    for start in range(0, len(text), length):
        seen, targets = ids[start : start + length], ids[start + 1 : start + 1 + length]
        seen = seen[: len(targets)]
        logits = model(torch.tensor([seen]), torch.arange(len(seen)).unsqueeze(0), None)[0].double()
        nats += [-float(row.log_softmax(-1)[target]) for row, target in zip(logits, targets, strict=True)]
    for hook in hooks:
        hook.remove()
    return nats


def compressed_bits_per_byte(sets: Sequence[HeldOut]) -> dict[str, float]:
    """Bits per byte of the whole text, by Python's own functions."""
    text = b"".join(each.text for each in sets)
    sizes = {"gzip -9": len(gzip.compress(text, 9)), "xz -9": len(lzma.compress(text, preset=9))}
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def _nothing(layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def _pieces(inputs: Sequence[int], length: int, separate: bool) -> Iterator[tuple[int, int]]:
    """Places at which a text begins and ends that the model sees at once."""
    for start in range(0, len(inputs), length):
        stop = min(start + length, len(inputs))
        cuts = [place for place in range(start + 1, stop) if separate and inputs[place] == END]
        yield from zip([start, *cuts], [*cuts, stop], strict=True)


def _alike(pieces: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Pieces of one length, so many at a time."""
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pieces:
        by_length.setdefault(stop - start, []).append((start, stop))
    for alike in by_length.values():
        yield from (alike[first : first + _AT_ONCE] for first in range(0, len(alike), _AT_ONCE))


@dataclass(frozen=True)
class Draw:
    """Settings of a text."""

    temperature: float
    top_p: float
    top_k: int | None
    seed: int
    max_tokens: int


@torch.no_grad()
def plain_text(model: MemoryGPTModel, prompt: bytes, length: int, draw: Draw) -> str:
    """A text after a prompt, every token of which costs a pass over the last `length` tokens."""
    generator = torch.Generator().manual_seed(draw.seed)
    ids: list[int] = []
    while len(ids) < draw.max_tokens:
        seen = [END, *prompt, *ids][-length:]
        positions = torch.arange(len(seen)).unsqueeze(0)
        logits = model(torch.tensor([seen]), positions, None)[0, -1].tolist()[:VOCAB_SIZE]
        token = _chosen(logits, draw, generator)
        if token == END:
            break
        ids.append(token)
    return bytes(ids).decode(errors="replace")


def _chosen(logits: Sequence[float], draw: Draw, generator: torch.Generator) -> int:
    """The likeliest token; or one draw from all, the likeliest first, with nothing for those that are left out."""
    if draw.temperature == 0:
        return logits.index(max(logits))
    powers = [math.exp((logit - max(logits)) / draw.temperature) for logit in logits]
    order = sorted(range(len(powers)), key=lambda token: -powers[token])[: draw.top_k]
    total = sum(powers[token] for token in order)
    shares, before = [], 0.0
    for token in order:
        shares.append(powers[token] / total if before < draw.top_p else 0.0)
        before += powers[token] / total
    return order[int(torch.multinomial(torch.tensor(shares), 1, generator=generator))]
