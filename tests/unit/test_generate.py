"""Generation from a model whose logits are known: what it is shown, what is taken from it, and how often each token is
drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamem.attention.kv_cache import KeyValueCache
from megamem.config.model import ModelConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.pkm.config import PkmConfig
from megamem.placement.spans import PlacementConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.data.streamed_text import streamed_text
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.errors import ConfigError
from pretrain.evaluation.generate import generate
from pretrain.evaluation.sampling import Sampling
from pretrain.planning.counts.attention import cached_bytes_per_token
from tools import generate as command
from tools.common.pace import GenerationPass, Pace
from tools.common.words import describe_size

VOCAB_SIZE, PADDED_SIZE, EOD = 11, 16, 10


class Alone:
    """A memory group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class Bigrams(nn.Module):
    """Logits of the next token by the one before, at every position; the embedding's padding would always win.

    Attributes:
        contexts: token ids that the model was shown or had seen, pass by pass.
        num_new: number of these that it was shown.
    """

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((PADDED_SIZE, PADDED_SIZE), 50.0))
        with torch.no_grad():
            self.table[: len(rows), :VOCAB_SIZE] = torch.tensor(rows)
        self.banks = nn.ModuleDict()
        self.contexts: list[list[int]] = []
        self.num_new: list[int] = []

    def forward(self, ids: Tensor, positions: Tensor, attention_mask: None, cache: KeyValueCache | None) -> Tensor:
        assert ids.shape[0] == 1
        seen: list[int] = []
        if cache is not None:
            seen = self.contexts[-1] if cache.num_tokens else []
            assert cache.num_tokens == len(seen)
            cache.extend(1, ids.t())
            cache.advance(ids.shape[1])
        assert positions.tolist() == [list(range(len(seen), len(seen) + ids.shape[1]))]
        self.contexts.append(seen + ids[0].tolist())
        self.num_new.append(ids.shape[1])
        return self.table[ids]


def run(model: Bigrams, prompt: Sequence[int] = (), max_tokens: int = 1, **options: Any) -> list[int]:
    settings: dict[str, Any] = {"context_tokens": 4, "vocab_size": VOCAB_SIZE, "eod": EOD, "group": Alone()} | options
    settings.setdefault("sampling", Sampling(temperature=0))
    return list(generate(model, prompt, max_tokens=max_tokens, **settings))  # type: ignore[arg-type]


def successors(following: dict[int, int]) -> list[list[float]]:
    """Rows in which each token has one likeliest successor, and another that is the least likely."""
    rows = [[0.1 * column for column in range(VOCAB_SIZE)] for _ in range(VOCAB_SIZE)]
    for token, successor in following.items():
        rows[token][successor] = 5.0
        rows[token][(successor + 1) % VOCAB_SIZE] = -5.0
    return rows


CYCLE = {EOD: 3, 3: 7, 7: 1, 1: 4, 4: 3}


@pytest.mark.parametrize(("cached", "num_new"), [(True, [3, 1, 4, 4, 4, 4]), (False, [3, 4, 4, 4, 4, 4])])
def test_temperature_0_follows_the_largest_logit_of_the_last_position(cached: bool, num_new: list[int]) -> None:
    model = Bigrams(successors(CYCLE))
    assert run(model, [3, 7], max_tokens=6, cached=cached) == [1, 4, 3, 7, 1, 4]
    # With a cache a token alone, until the text's beginning is lost and all that follows is another text's.
    assert model.num_new == num_new
    # A document is preceded by the end of another, and the oldest tokens leave first.
    assert model.contexts == [[EOD, 3, 7], [EOD, 3, 7, 1], [3, 7, 1, 4], [7, 1, 4, 3], [1, 4, 3, 7], [4, 3, 7, 1]]


def test_an_empty_prompt_starts_a_document_and_a_long_one_loses_its_beginning() -> None:
    model = Bigrams(successors(CYCLE))
    assert run(model) == [3]
    assert run(model, [0, 1, 2, 3, 4, 5, 6, 7]) == [1]
    assert run(model, [0, 1, 3]) == [7]
    assert model.contexts == [[EOD], [4, 5, 6, 7], [EOD, 0, 1, 3]]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_as_many_tokens_as_were_asked_for(max_tokens: int) -> None:
    model = Bigrams(successors(CYCLE))
    assert run(model, max_tokens=max_tokens) == [3, 7, 1, 4, 3][:max_tokens]
    assert len(model.contexts) == max_tokens


def test_the_end_of_a_document_ends_the_text_and_is_no_part_of_it() -> None:
    assert run(Bigrams(successors({**CYCLE, 1: EOD})), max_tokens=9) == [3, 7, 1]


# Probabilities by id, in no order; the largest three are 0.4, 0.2 and 0.15.
PROBABILITIES = [0.05, 0.2, 0.02, 0.4, 0.03, 0.15, 0.04, 0.06, 0.01, 0.03, 0.01]
NUM_DRAWS = 2000
# The 99.99 % quantiles of chi-square by degrees of freedom.
CHI_SQUARE = {1: 15.14, 2: 18.42, 10: 35.56}


def expected_shares(temperature: float, top_p: float) -> dict[int, float]:
    """The distribution in Python's floats: tempered, and cut after the token that reaches `top_p`."""
    powers = [probability ** (1 / temperature) for probability in PROBABILITIES]
    shares = {token: power / sum(powers) for token, power in enumerate(powers)}
    kept: dict[int, float] = {}
    for token in sorted(shares, key=lambda token: -shares[token]):
        if sum(kept.values()) < top_p:
            kept[token] = shares[token]
    return {token: share / sum(kept.values()) for token, share in kept.items()}


@pytest.mark.parametrize(
    ("temperature", "top_p", "num_kept"),
    [(1.0, 1.0, 11), (0.7, 1.0, 11), (2.0, 1.0, 11), (1.0, 0.7, 3), (1.0, 0.55, 2), (1.0, 0.39, 1), (2.0, 0.4, 3)],
)
def test_tokens_are_drawn_as_often_as_they_should_be(temperature: float, top_p: float, num_kept: int) -> None:
    rows = [[math.log(probability) for probability in PROBABILITIES] for _ in range(PADDED_SIZE)]
    # No id ends the text, so that one run draws them all; every draw has the same distribution.
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=3)
    drawn = Counter(run(Bigrams(rows), max_tokens=NUM_DRAWS, sampling=sampling, eod=PADDED_SIZE - 1, context_tokens=1))
    shares = expected_shares(temperature, top_p)
    assert len(shares) == num_kept
    assert set(drawn) <= set(shares)
    assert drawn.total() == NUM_DRAWS
    if num_kept > 1:
        distance = sum((drawn[t] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for t, p in shares.items())
        assert distance < CHI_SQUARE[num_kept - 1]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, 1.0, {3, 1}), (1, 1.0, {3}), (3, 0.6, {3, 1}), (99, 1.0, set(range(11)))]
)
def test_only_the_likeliest_are_drawn(top_k: int, top_p: float, kept: set[int]) -> None:
    """The `top_k` likeliest are scaled to add up to 1, and those of them are drawn that together have `top_p`."""
    rows = [[math.log(probability) for probability in PROBABILITIES] for _ in range(PADDED_SIZE)]
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=3, top_k=top_k)
    drawn = Counter(run(Bigrams(rows), max_tokens=NUM_DRAWS, sampling=sampling, eod=PADDED_SIZE - 1, context_tokens=1))
    assert set(drawn) == kept
    total = sum(PROBABILITIES[token] for token in kept)
    for token, number in drawn.items():
        share = PROBABILITIES[token] / total
        assert abs(number / NUM_DRAWS - share) <= 4 * math.sqrt(share * (1 - share) / NUM_DRAWS)


@pytest.mark.parametrize(
    ("top_k", "top_p", "num_kept"),
    [(None, 0.5, 2), (None, 0.75, 3), (None, 0.25, 1), (3, 1.0, 3), (2, 0.5, 1), (None, 1.0, 4)],
)
def test_equals_are_cut_where_their_sum_is_exact(top_k: int | None, top_p: float, num_kept: int) -> None:
    """Four ids of a quarter each, whose sums are not rounded: none is kept once those before it have `top_p`."""
    equals = (3, 1, 6, 9)
    row = [0.0 if token in equals else -math.inf for token in range(VOCAB_SIZE)]
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=3, top_k=top_k)
    options: dict[str, Any] = {"sampling": sampling, "eod": PADDED_SIZE - 1, "context_tokens": 1}
    drawn = set(run(Bigrams([row] * PADDED_SIZE), max_tokens=100, **options))
    assert len(drawn) == num_kept
    assert drawn <= set(equals)


@pytest.mark.parametrize(
    ("stops", "pieces", "text"),
    [
        ([], ["a", "b", "ü", "c"], "abüc"),
        (["üc"], ["a", "b", "üc!"], "ab"),
        (["üc"], ["a", "b", "ü", "d"], "abüd"),
        (["bb", "c"], ["a", "b", "x", "c", "z"], "abx"),
        (["cd", "b"], ["abcd"], "a"),
        (["aab"], ["a", "a", "a", "b", "c"], "a"),
        (["ab"], ["a"], "a"),
    ],
)
def test_a_stop_text_ends_the_text_and_is_no_part_of_it(stops: list[str], pieces: list[str], text: str) -> None:
    """Byte by byte, so that stop texts and characters come in parts."""
    ids = list("".join(pieces).encode())
    told = list(streamed_text(iter(ids), ByteTokenizer(), stops=stops))
    assert "".join(told) == text
    # Certain text is told at once.
    if not stops:
        assert [piece for piece in told if piece] == list(text)


def test_nothing_is_generated_past_a_stop_text() -> None:
    ids = iter(b"ab.cd")
    assert "".join(streamed_text(ids, ByteTokenizer(), stops=["."])) == "ab"
    assert bytes(ids) == b"cd"


def test_draws_follow_from_the_seed_alone() -> None:
    flat = Bigrams([[0.0] * VOCAB_SIZE] * PADDED_SIZE)

    def text(seed: int) -> list[int]:
        # The state of the process's own generator plays no part.
        torch.rand(1)
        return run(flat, max_tokens=40, sampling=Sampling(1.0, 1.0, seed), eod=PADDED_SIZE - 1)

    texts = [text(seed) for seed in (1, 2, 3)]
    assert len({tuple(found) for found in texts}) == 3
    assert text(1) == texts[0]


SETTINGS = ["--max-tokens", "7", "--temperature", "0.25", "--top-p", "0.75", "--seed", "12", "--step", "40"]
SETTINGS += ["--top-k", "9", "--no-cache"]


@pytest.mark.parametrize(
    ("words", "sampling", "max_tokens", "step", "cached"),
    [(SETTINGS, Sampling(0.25, 0.75, 12, 9), 7, 40, False), ([], Sampling(0.8, 0.95, 1), 200, None, True)],
    ids=["set", "default"],
)
def test_the_command_hands_over_what_was_typed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sampling: Sampling,
    max_tokens: int,
    step: int | None,
    cached: bool,
) -> None:
    """A character is printed when all of its bytes are there."""
    asked: dict[str, Any] = {}
    group, model = object(), object()

    def sample(model: Any, prompt: Sequence[int], **options: Any) -> Iterator[int]:
        asked.update(options, model=model, prompt=list(prompt))
        yield from "ü—".encode()
        yield 0xC3

    def find(folder: Any, step: int | None) -> SimpleNamespace:
        asked.update(step=step, folder=folder.path)
        return SimpleNamespace(path=Path("there"))

    config = RunConfig(train=TrainConfig(sequence_length=48))
    groups = SimpleNamespace(megatron=SimpleNamespace(ep=group), is_main=True)
    monkeypatch.setattr("pretrain.evaluation.generate.generate", sample)
    monkeypatch.setattr("tools.generate.find_checkpoint", find)
    monkeypatch.setattr("tools.generate.saved_config", lambda saved, parallel: config)
    monkeypatch.setattr("tools.generate.note_edited_config", lambda folder, saved: None)
    monkeypatch.setattr("pretrain.evaluation.restore.restore_model", lambda *arguments, fetch_rows: [model])
    monkeypatch.setattr("pretrain.engine.session.session", lambda config: contextlib.nullcontext(groups))
    monkeypatch.setattr("tools.generate.tokenizer_of", lambda folder, saved: ByteTokenizer())
    monkeypatch.setattr(command, "run_on_ranks", lambda main, num_ranks: main())
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["generate", "runs/one", "--prompt", "né", *words])
    arguments.func(arguments)
    assert asked == {
        "folder": Path("runs/one"),
        "step": step,
        "model": model,
        "prompt": [0x6E, 0xC3, 0xA9],
        "max_tokens": max_tokens,
        "context_tokens": 48,
        "vocab_size": 257,
        "eod": 256,
        "sampling": sampling,
        "group": group,
        "cached": cached,
    }
    printed = capsys.readouterr()
    assert printed.out == "néü—\N{REPLACEMENT CHARACTER}\n"
    # The first figure is of the prompt and the separator before it, the second of what followed the first token.
    assert re.fullmatch(r"prefill 4 tokens, \S+ ms each; then 5 tokens, \S+ ms each; .*\n", printed.err)
    size = describe_size(cached_bytes_per_token(config.model, 4))
    assert printed.err.endswith(f"; cache {size} per token\n" if cached else "; no cache\n")


def test_tokens_are_timed_by_what_the_pass_was_over() -> None:
    pace = Pace()
    for num_prompt in (2, 9):
        assert list(pace.of(iter([5, 6, 7, 8]), num_prompt=num_prompt, context_tokens=4)) == [5, 6, 7, 8]
    assert {phase: number for phase, (number, _) in pace.spent.items()} == {
        GenerationPass.PROMPT: 2 + 4,
        GenerationPass.NEXT: 2,
        GenerationPass.BEYOND: 1 + 3,
    }
    assert all(seconds > 0 for _, seconds in pace.spent.values())
    assert "beyond the context 4 tokens, " in pace.description()


def test_the_tables_are_split_over_as_many_ranks_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def configured(saved: Any, parallel: ParallelConfig) -> RunConfig:
        asked.append(parallel)
        return RunConfig()

    monkeypatch.setattr("tools.generate.find_checkpoint", lambda folder, step: SimpleNamespace(path=Path("there")))
    monkeypatch.setattr("tools.generate.saved_config", configured)
    monkeypatch.setattr("tools.generate.note_edited_config", lambda folder, saved: None)
    monkeypatch.setattr("tools.generate.tokenizer_of", lambda folder, saved: ByteTokenizer())
    monkeypatch.setattr(command, "run_on_ranks", lambda main, num_ranks: asked.append(num_ranks))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["generate", "runs/one", "--nproc", "4"])
    arguments.func(arguments)
    assert asked == [ParallelConfig(memory=4), 4]


MEMORY = MidusConfig(num_heads=4, placement=PlacementConfig(blocks=(1,)))
GROWN = ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, memory=MEMORY)


@pytest.mark.parametrize(
    ("model", "num_ranks", "message"),
    [
        (replace(GROWN, memory=None), 1, "the model's memory is none, whose heads expand no values"),
        (replace(GROWN, memory=PkmConfig(value_dim=32)), 1, "memory is pkm, whose heads expand no values"),
        (GROWN, 2, "needs whole tables: generate on one rank, not 2"),
        (GROWN, 1, None),
    ],
)
def test_values_are_expanded_where_heads_do_and_tables_are_whole(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig, num_ranks: int, message: str | None
) -> None:
    started: list[int] = []
    monkeypatch.setattr("tools.generate.find_checkpoint", lambda folder, step: SimpleNamespace(path=Path("there")))
    monkeypatch.setattr(
        "tools.generate.saved_config", lambda saved, parallel: RunConfig(model=model, parallel=parallel)
    )
    monkeypatch.setattr("tools.generate.note_edited_config", lambda folder, saved: None)
    monkeypatch.setattr("tools.generate.tokenizer_of", lambda folder, saved: ByteTokenizer())
    monkeypatch.setattr(command, "run_on_ranks", lambda main, num_ranks: started.append(num_ranks))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["generate", "runs/one", "--expand-values", "--nproc", str(num_ranks)])
    if message is None:
        arguments.func(arguments)
        assert started == [1]
    else:
        with pytest.raises(ConfigError, match=message):
            arguments.func(arguments)
        assert not started
