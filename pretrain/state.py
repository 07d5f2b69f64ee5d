"""How far a run has come: everything a resume needs besides tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunState:
    """Counters of a run. The learning rates, data and random numbers of a step are functions of them and the config.

    Attributes:
        step: optimizer steps done, skipped ones included.
        consumed_samples: sequences seen, over all ranks: the position in the data.
        consumed_tokens: tokens seen.
        num_updates: steps whose update was applied.
        num_skipped: steps skipped for a non-finite gradient.
        num_skipped_in_row: steps skipped since the last update.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    num_updates: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0

    def after_step(self, *, samples: int, tokens: int, updated: bool) -> RunState:
        """The state after one more step."""
        return RunState(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            num_updates=self.num_updates + updated,
            num_skipped=self.num_skipped + (not updated),
            num_skipped_in_row=0 if updated else self.num_skipped_in_row + 1,
        )
