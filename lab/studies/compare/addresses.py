"""Losses of a trained memory whose tokens read the rows of others, or none."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lab.studies.analyse.measures import Analysed, deciles_of, restored, write_found
from lab.studies.compare.runs import RunStopped
from pretrain.config.schema import RunConfig
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint
from tools.common.ranks import run_on_ranks

if TYPE_CHECKING:
    from pretrain.engine.step import LossSum

_FILE = "addresses.json"


@dataclass(frozen=True)
class Addresses:
    """Losses of one trained model, in nats per held-out token.

    Attributes:
        own: loss with the rows that it was trained to read.
        others: loss with rows that tokens of other sequences ask for (`model.memory.control: others_rows`).
        without: loss with a memory that adds nothing.
        gains: leads of own rows over others', by how often a token comes in training, the rarest first; None: no
            held-out token is of the bin.
    """

    own: float
    others: float
    without: float
    gains: tuple[float | None, ...]


def addresses_of(config: RunConfig, path: Path, num_ranks: int) -> Addresses:
    """Losses of a finished run, measured once and kept in its folder.

    Raises:
        RunStopped: the losses could not be measured.
    """
    folder = RunFolder(path)
    saved = find_checkpoint(folder, None)
    file = path / _FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if found.get("checkpoint") != str(saved.path):
        run = Analysed(config, folder, saved.path, deciles_of(config), argparse.Namespace(), file)
        if code := run_on_ranks(partial(_measure, run), num_ranks):
            raise RunStopped(code)
        found = json.loads(file.read_text(encoding="utf-8"))
    return Addresses(found["own"], found["others"], found["without"], tuple(found["gains"]))


def _measure(run: Analysed) -> None:
    """Three passes over the held-out text. Collective."""
    from lab.analysis.losses import losses_by_bin, reading_others, without_memory

    with restored(run, run.config.evaluation.max_sequences) as (chunks, held_out, groups):

        def losses() -> list[LossSum]:
            return losses_by_bin(chunks, held_out, run.deciles.bin_of, run.config, groups)

        own = losses()
        with reading_others(chunks):
            others = losses()
        with without_memory(chunks):
            without = losses()
        gains = [
            theirs.mean - mine.mean if mine.num_tokens else None
            for mine, theirs in zip(own[:-1], others[:-1], strict=True)
        ]
        totals = {name: _total(sums) for name, sums in (("own", own), ("others", others), ("without", without))}
        write_found(run, groups, **totals, gains=gains)


def _total(sums: Sequence[LossSum]) -> float:
    return sum(each.nats for each in sums) / sum(each.num_tokens for each in sums)
