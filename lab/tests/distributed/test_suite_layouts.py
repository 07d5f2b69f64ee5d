"""Asking on every axis: answers are judged as one rank judges them, and as PyTorch does from whole logits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import PRIVATE, joined
from torch import Tensor, nn

from lab.suite.ask import AnswerRows, ask
from lab.suite.plan import SuitePlan
from lab.suite.texts import Filler, Writer
from megamem.backbone.chunked_loss import judge
from pretrain.data.manifest import TRAIN, open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.engine.build import build_chunks

LENGTH = 192
PLAN = SuitePlan(("needle", "hops"), (LENGTH,), (0.0, 1.0), 2, 2, 3)
LAYOUTS: dict[str, dict[str, int]] = {
    "data": {},
    "tensor and memory": {"tensor": 2, "memory": 2},
    "pipeline, interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "context": {"context": 2},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(1)
    (folder / "a.txt").write_text("".join(draw.choices("abcd \n", k=3000)))
    prepare([str(folder / "a.txt")], folder / "data", ByteTokenizer(), validation_fraction=0, num_workers=1)
    return folder / "data"


def scores(corpus: Path, layout: dict[str, int], chunk_tokens: int | None) -> list[Any]:
    """Answers of an untrained model on a layout of the world."""
    parallel = replace(PRIVATE.parallel, tensor=1, pipeline=1, context=1, memory=1)
    config = replace(
        PRIVATE,
        model=replace(PRIVATE.model, num_layers=4),
        parallel=replace(parallel, **layout),
        train=replace(PRIVATE.train, sequence_length=LENGTH, loss_chunk_tokens=chunk_tokens),
    )
    with joined(config) as groups:
        chunks = build_chunks(config, groups, vocab_size=ByteTokenizer.vocab_size)
        rows = AnswerRows(Writer(Filler([(open_dataset(corpus), TRAIN)])), PLAN, LENGTH)
        return ask(chunks, rows, groups, micro_batch_size=3, pipeline=config.parallel.pipeline)


def by_hand(corpus: Path) -> Tensor:
    """Answers from whole logits of one row at a time, [rows, 3]."""
    config = replace(
        PRIVATE, model=replace(PRIVATE.model, num_layers=4), train=replace(PRIVATE.train, sequence_length=LENGTH)
    )
    found = []
    with joined(config) as groups, torch.no_grad():
        (chunk,) = build_chunks(config, groups, vocab_size=ByteTokenizer.vocab_size)
        chunk.eval()
        rows = AnswerRows(Writer(Filler([(open_dataset(corpus), TRAIN)])), PLAN, LENGTH)
        for number in range(len(rows)):
            row = rows[number]
            logits = chunk(row["tokens"][None], row["position_ids"][None], None)[0].double()
            asked = row["loss_mask"].bool()
            nats = F.cross_entropy(logits[asked], row["labels"][asked], reduction="sum")
            hits = (logits[asked].argmax(-1) == row["labels"][asked]).sum()
            found.append([float(nats), float(asked.sum()), float(hits)])
    return torch.tensor(found, dtype=torch.float64)


def test_answers_do_not_depend_on_the_layout(corpus: Path, run_ranks: Any) -> None:
    (wanted,) = run_ranks(lambda: by_hand(corpus), 1)
    cases = [(layout, None) for layout in LAYOUTS.values()] + [(LAYOUTS["tensor and memory"], 8), ({}, 50)]
    of_ranks = run_ranks(lambda: [scores(corpus, *case) for case in cases], 2)
    assert of_ranks[0] == of_ranks[1]
    for case, found in zip(cases, of_ranks[0], strict=True):
        table = torch.tensor(found, dtype=torch.float64).view(-1, 3)
        # Sums in fp32 over 192 tokens and 4 blocks, of nats of some 5 tokens.
        torch.testing.assert_close(
            table[:, 0], wanted[:, 0], rtol=2e-5, atol=0, msg=lambda m, case=case: f"{case}: {m}"
        )
        assert torch.equal(table[:, 1:], wanted[:, 1:]), case


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_labels_are_judged_as_whole_logits_are(run_ranks: Any, chunk_tokens: int) -> None:
    """A vocabulary over two ranks judges hidden states [s, b, D]; some labels are the likeliest, and some tie."""
    draw = np.random.default_rng(5)
    hidden = torch.from_numpy(draw.integers(-3, 4, (6, 3, 4))).double()
    weight = torch.from_numpy(draw.integers(-3, 4, (10, 4))).double()
    logits = (hidden @ weight.t()).transpose(0, 1)
    labels = logits.argmax(-1)
    labels[0] = torch.from_numpy(draw.integers(0, 10, 6))
    asked = torch.from_numpy(draw.integers(0, 2, (3, 6)))
    asked[:, 3:5] = 0

    def of_rank() -> Tensor:
        group = torch.distributed.group.WORLD
        assert group is not None
        rank, size = group.rank(), group.size()
        return judge(hidden.chunk(size)[rank], weight.chunk(size)[rank], labels, asked, chunk_tokens, group)

    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 6)
    of_label = logits.gather(-1, labels[..., None])
    alone = ((logits >= of_label).sum(-1) == 1).double()
    assert 0 < alone.sum() < alone.numel()
    for size in (1, 2):
        for judged in run_ranks(of_rank, size):
            torch.testing.assert_close(judged, torch.stack([nats, alone]) * asked, rtol=1e-12, atol=1e-12)


class CopyingModel(nn.Module):
    """Says what followed the last `context` tokens at their latest earlier place within its reach: a model that can
    look back, of known logits.
    """

    reads_tokens, cp_group = True, None

    def __init__(self, vocab_size: int, reach: int) -> None:
        super().__init__()
        self.vocab_size, self.reach = vocab_size, reach

    def forward(self, tokens: Tensor, positions: Tensor, mask: None, *, labels: Tensor, asked: Tensor) -> Tensor:
        hidden = torch.zeros(*tokens.shape, self.vocab_size)
        for row, ids in enumerate(tokens.tolist()):
            for place in asked[row].nonzero()[:, 0].tolist():
                if (found := self.next_id(ids[: place + 1])) is not None:
                    hidden[row, place, found] = 20.0
        return judge(
            hidden.transpose(0, 1),
            torch.eye(self.vocab_size),
            labels,
            asked,
            10_000,
            torch.distributed.group.WORLD,  # type: ignore[arg-type]
        )

    def next_id(self, ids: list[int]) -> int | None:
        """Text is `name = 1234` before and `assert name == 1234` now: the name, and what of the value is there."""
        text = bytes(byte if byte < 128 else 63 for byte in ids[-self.reach :])
        name, _, begun = text[text.rindex(b"assert ") + 7 :].partition(b" ==")
        start = text.find(b"\n" + name + b" = ")
        if start < 0:
            return None
        return text[start + len(name) + 3 + len(begun)]


@pytest.mark.parametrize(("reach", "right"), [(LENGTH, [1.0, 1.0]), (90, [0.0, 1.0]), (30, [0.0, 0.0])])
def test_a_model_is_right_as_far_as_it_can_see(
    corpus: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch, reach: int, right: list[float]
) -> None:
    """All the way of a needle: texts, rows, the judgement of logits, cells. One that sees nothing is never right."""
    from lab.suite import ask as ask_module
    from lab.suite.plan import cells

    plan = SuitePlan(("needle",), (LENGTH,), (0.0, 1.0), 4, 2, 3)

    def passes(chunks: Any, streams: Any, step: Any, num_microbatches: int, *_: Any) -> list[Tensor]:
        found = []
        for _ in range(num_microbatches):
            output, measure = step(streams[0], chunks[0])
            found.append(measure(output)[2]["loss"])
        return found

    monkeypatch.setattr(ask_module, "forward_passes", passes)
    monkeypatch.setattr(ask_module, "read_microbatch", lambda stream, _: (next(stream), None))
    monkeypatch.setattr(ask_module, "unwrap", lambda chunk: chunk)
    monkeypatch.setattr(ask_module, "world_sums", lambda sums, _: sums)

    def asked() -> list[Any]:
        groups: Any = type("One", (), {"data_rank": 0, "data_size": 1, "device": torch.device("cpu")})
        model: Any = CopyingModel(ByteTokenizer.vocab_size, reach)
        rows = AnswerRows(Writer(Filler([(open_dataset(corpus), TRAIN)])), plan, LENGTH)
        return list(cells(plan, LENGTH, ask([model], rows, groups, micro_batch_size=5, pipeline=1)))

    (found,) = run_ranks(asked, 1)
    assert [cell.exact for cell in found] == right
    # One that knows nothing finds all answers as likely, and chooses none.
    assert [cell.chosen for cell in found] == right
