"""`megamem bench generate`: what a prompt and a token after it take, of several models in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.engine.build import build_chunks
from pretrain.engine.session import session
from pretrain.evaluation.generate import generate
from pretrain.evaluation.sampling import Sampling
from pretrain.planning.counts.attention import cached_bytes_per_token, expanded_bytes

_WARM_TOKENS = 4
_HEADER = ("prompt", "prompt ms", "ms per token", "tokens/s", "ratio", "MB", "model")


@dataclass(frozen=True)
class TimedModel:
    """A model to time.

    Attributes:
        config: configuration of it, on one rank.
        expanded: its heads keep own values of all rows.
    """

    config: RunConfig
    expanded: bool = False


@dataclass
class _Timed:
    """A built model and its seconds: `prompt_s` until the first token is chosen, `token_s` for each after it."""

    contender: TimedModel
    model: MemoryGPTModel
    prompt_s: list[float]
    token_s: list[float]


def bench_generation_rank(
    contenders: Mapping[str, TimedModel], prompts: Sequence[int], num_tokens: int, rounds: int
) -> None:
    """Measure on the one rank, and print a line per model and length of a prompt."""
    first = next(iter(contenders.values())).config
    with session(first) as groups:
        timed = {name: _build(contender, groups) for name, contender in contenders.items()}
        print(
            f"one text of random tokens with random weights; milliseconds as median of {rounds} rounds (lowest .. highest), "
            f"per token over {num_tokens} tokens behind the prompt; ratio: of tokens/s to the first model's; MB: weights, "
            "what attention remembers of the whole text, and expanded values"
        )
        print(_line(_HEADER), flush=True)
        for length in prompts:
            for one in timed.values():
                one.prompt_s.clear()
                one.token_s.clear()
                _measure(one, groups, length, _WARM_TOKENS)
            for _ in range(rounds):
                for one in timed.values():
                    seconds = _measure(one, groups, length, num_tokens)
                    one.prompt_s.append(seconds[0])
                    one.token_s.append(sum(seconds[1:]) / (num_tokens - 1))
            reference = median(next(iter(timed.values())).token_s)
            for name, one in timed.items():
                print(_line((str(length), *_figures(one, length + num_tokens, reference), name)), flush=True)


def _build(contender: TimedModel, groups: ParallelGroups) -> _Timed:
    vocab_size = contender.config.model.vocab_size
    assert vocab_size is not None, "nothing says how many token ids there are"
    (model,) = build_chunks(contender.config, groups, vocab_size=vocab_size)
    model.eval()
    if contender.expanded:
        for layer in model.memory_layers:
            layer.expand_values()
    return _Timed(contender, model, [], [])


def _measure(timed: _Timed, groups: ParallelGroups, prompt_length: int, num_tokens: int) -> list[float]:
    """Seconds of the prompt and of every token after the first."""
    vocab_size = timed.contender.config.model.vocab_size
    assert vocab_size is not None
    # The one before the prompt is the end of a document.
    prompt = torch.randint(vocab_size, (prompt_length - 1,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = generate(
        timed.model,
        prompt,
        max_tokens=num_tokens,
        context_tokens=prompt_length + num_tokens,
        # The end of a document, the last id, would end the text.
        vocab_size=vocab_size - 1,
        eod=vocab_size - 1,
        sampling=Sampling(temperature=1.0, top_p=1.0, seed=1),
        group=groups.megatron.ep,
    )
    return list(_intervals(tokens))


def _intervals(tokens: Iterator[int]) -> Iterator[float]:
    """Seconds that each took; a token is chosen on the host, so the clock has seen the device's work."""
    started = time.perf_counter()
    for _ in tokens:
        yield time.perf_counter() - started
        started = time.perf_counter()


def _figures(timed: _Timed, text_length: int, reference_s: float) -> tuple[str, ...]:
    """Figures of one model, as text."""
    model, element = timed.contender.config.model, timed.contender.config.train.element_bytes
    held = sum(weight.numel() * weight.element_size() for weight in timed.model.parameters())
    held += text_length * cached_bytes_per_token(model, element)
    held += expanded_bytes(model, element) if timed.contender.expanded else 0
    token_s = median(timed.token_s)
    return (
        _spread(timed.prompt_s),
        _spread(timed.token_s),
        f"{1 / token_s:.1f}",
        f"{reference_s / token_s:.2f}x",
        f"{held / 1e6:,.1f}",
    )


def _spread(seconds: Sequence[float]) -> str:
    lowest, middle, highest = (1e3 * each for each in (min(seconds), median(seconds), max(seconds)))
    return f"{middle:.2f} ({lowest:.2f} .. {highest:.2f})"


def _line(cells: Sequence[str]) -> str:
    widths = (7, 34, 30, 10, 8, 10)
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)) + "  " + cells[-1]


def with_expanded(configs: Mapping[str, RunConfig], *, expanded: bool) -> dict[str, TimedModel]:
    """Models to time; with `expanded`, those whose heads expand their values both ways."""
    contenders = {}
    for name, config in configs.items():
        contenders[name] = TimedModel(config)
        memory = config.model.memory
        if expanded and memory is not None and memory.expands_values:
            contenders[f"{name} expanded"] = TimedModel(config, expanded=True)
    return contenders
