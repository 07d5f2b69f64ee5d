"""Teaching by adapters (LoRA): the model exported for transformers, and peft."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lab.studies.teach.asking import rows_of
from lab.studies.teach.course import Course, Taught, ask_all
from lab.studies.teach.facts import Fact
from lab.studies.teach.ways import LORA_RANK
from pretrain.config.schema import RunConfig
from pretrain.data.tokenizer import Tokenizer


def teach_adapter(
    exported: Path,
    batches: Sequence[Sequence[Fact]],
    tokenizer: Tokenizer,
    config: RunConfig,
    course: Course,
    *,
    rate: float,
    seed: int,
) -> Taught:
    """Teach batch after batch, as many facts per step as a run's own way reads, each in a row of its own.

    Args:
        exported: folder of the model.
        config: configuration of the run that it was exported from.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    # A lesson beside others has fewer cores than PyTorch counted.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules="all-linear"))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    recall, known, seconds = [], [], 0.0
    draw = random.Random(seed)

    def logits_of(tokens: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = model(input_ids=tokens, position_ids=positions).logits
        return out

    for number, facts in enumerate(batches, start=1):
        optimizer = torch.optim.AdamW(
            weights, lr=rate, betas=(config.optimizer.beta1, config.optimizer.beta2), weight_decay=0
        )
        began = time.monotonic()
        stream = _stream(facts, draw)
        per_step = facts_per_step(facts, tokenizer, config, course.batch_size)
        model.train()
        for _ in range(course.num_steps):
            ids, is_answer = rows_of([next(stream) for _ in range(per_step)], tokenizer)
            tokens, labels = ids[:, :-1], ids[:, 1:]
            # The end behind an answer is learnt, too.
            scored = is_answer | torch.nn.functional.pad(is_answer, (1, 0))[:, :-1]
            logits = logits_of(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
            torch.nn.functional.cross_entropy(logits[scored], labels[scored]).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds += time.monotonic() - began
        model.eval()
        of_batches, nats = ask_all(logits_of, config, batches[:number], tokenizer, course.num_windows)
        recall.append(of_batches)
        known.append(nats)
    return Taught(recall, known, seconds, sum(weight.numel() * weight.element_size() for weight in weights))


def facts_per_step(facts: Sequence[Fact], tokenizer: Tokenizer, config: RunConfig, batch_size: int) -> int:
    """Facts in the tokens of a step."""
    ids, _ = rows_of(facts, tokenizer)
    num_tokens = float((ids != tokenizer.eod).sum()) + len(facts)
    return round(batch_size * config.train.sequence_length / (num_tokens / len(facts)))


def _stream(facts: Sequence[Fact], draw: random.Random) -> Iterator[Fact]:
    """All facts once, in an order of their own, before any of them again."""
    while True:
        yield from draw.sample(facts, len(facts))
