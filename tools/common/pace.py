"""Time that the tokens of generated texts take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum


class GenerationPass(Enum):
    """Tokens that a forward pass of generation is over."""

    PROMPT = "prefill"
    NEXT = "then"
    BEYOND = "beyond the context"


@dataclass
class Pace:
    """Tokens and seconds by phase, of the texts whose ids went through `of`."""

    spent: dict[GenerationPass, tuple[int, float]] = field(default_factory=dict)

    def of(self, ids: Iterable[int], *, num_prompt: int, context_tokens: int) -> Iterator[int]:
        """The ids that follow a prompt of so many tokens, as they come.

        The first of them takes as long as the prompt's tokens do, of which the model sees `context_tokens`.
        """
        started = time.perf_counter()
        for number, token in enumerate(ids):
            seconds = time.perf_counter() - started
            if number == 0:
                self._add(GenerationPass.PROMPT, min(num_prompt, context_tokens), seconds)
            else:
                self._add(
                    GenerationPass.NEXT if num_prompt + number <= context_tokens else GenerationPass.BEYOND, 1, seconds
                )
            yield token
            started = time.perf_counter()

    def description(self) -> str:
        """ "prefill 5 tokens, 1.2 ms each; then 27 tokens, 2.3 ms each"."""
        return "; ".join(
            f"{phase.value} {number:,} tokens, {1e3 * seconds / number:.3g} ms each"
            for phase, (number, seconds) in self.spent.items()
        )

    def _add(self, phase: GenerationPass, num_tokens: int, seconds: float) -> None:
        before, seconds_before = self.spent.get(phase, (0, 0.0))
        self.spent[phase] = (before + num_tokens, seconds_before + seconds)
