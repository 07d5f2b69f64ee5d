"""Traffic between host and GPU that commands may cause, and findings beyond it.

What no allowance names is allowed nowhere: mixed devices, tensors made on the host, pageable copies, further reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.stand_in.host_traffic import LineTraffic, Traffic

Unit = Literal["pass", "chunk", "forward", "microbatch", "mixture", "window", "item", "buffer", "token"]
"""One step or evaluation; a model chunk of the rank; a forward pass of one; a microbatch of one chunk that reads tokens;
a pass of a microbatch through a mixture of experts; a window of tables that are stepped on the host; an item of a
checkpoint; a chunk of page-locked memory; a token that is generated."""


@dataclass(frozen=True)
class Allowance:
    """Traffic of one kind from one source.

    Attributes:
        source: a file of ours, from the root of the repository, or a module of another package.
        number: the most there may be of it for each `unit`.
    """

    kind: Traffic
    source: str
    number: int
    unit: Unit
    reason: str


Command = Literal["training", "evaluation", "saving", "restoring", "generation"]
"""A step of a run; a pass over held-out documents; a checkpoint, copied and written, and read; a token after another."""

_SHARES_OF_EXPERTS = Allowance(
    Traffic.READ, "megatron.core.transformer.moe.moe_utils", 2, "mixture", "tokens and weights that each expert gets"
)
_SENT_TO_EXPERTS = Allowance(
    Traffic.WAIT, "megatron.core.transformer.moe.token_dispatcher", 1, "mixture", "sizes of what ranks send each other"
)
_BATCH = Allowance(
    Traffic.PINNED, "pretrain/data/loader.py", 4, "microbatch", "tokens, labels, positions and mask of a microbatch"
)

ALLOWED: Mapping[Command, Sequence[Allowance]] = {
    "training": (
        _BATCH,
        Allowance(
            Traffic.PINNED,
            "megatron.core.models.common.embeddings.rope_utils",
            1,
            "forward",
            "places of a cut sequence",
        ),
        _SHARES_OF_EXPERTS,
        _SENT_TO_EXPERTS,
        Allowance(Traffic.READ, "pretrain/engine/step.py", 1, "pass", "the loss is logged, and decides on the update"),
        Allowance(Traffic.READ, "pretrain/engine/optimizer.py", 1, "pass", "gradient norms decide on the update"),
        Allowance(
            Traffic.READ, "megatron.core.distributed.finalize_model_grads", 1, "chunk", "divides by targets, if any"
        ),
        Allowance(Traffic.PINNED, "pretrain/engine/tables/value_offload.py", 2, "window", "gradients come, weights go"),
        Allowance(
            Traffic.WAIT, "pretrain/engine/tables/value_offload.py", 1, "window", "the host steps what has arrived"
        ),
    ),
    "evaluation": (
        _BATCH,
        _SHARES_OF_EXPERTS,
        _SENT_TO_EXPERTS,
        Allowance(Traffic.READ, "pretrain/engine/step.py", 1, "pass", "the loss is printed"),
    ),
    "saving": (
        Allowance(Traffic.HOST_TENSOR, "pretrain/checkpoint/staging.py", 1, "buffer", "room for copies, kept"),
        Allowance(Traffic.PINNED, "pretrain/checkpoint/staging.py", 1, "item", "copies, written beside training"),
        Allowance(Traffic.WAIT, "pretrain/checkpoint/staging.py", 1, "pass", "the next step overwrites what is copied"),
        Allowance(Traffic.PAGEABLE, "pretrain/checkpoint/write_plan.py", 1, "item", "live tensors, written at once"),
    ),
    "restoring": (
        Allowance(Traffic.PAGEABLE, "pretrain/checkpoint/loading.py", 1, "item", "read from disk"),
        Allowance(
            Traffic.PAGEABLE,
            "pretrain/engine/tables/value_offload.py",
            1,
            "window",
            "weights that the host keeps wider",
        ),
    ),
    "generation": (
        _SHARES_OF_EXPERTS,
        Allowance(Traffic.PAGEABLE, "pretrain/evaluation/generate.py", 2, "token", "its id goes, its scores come"),
        Allowance(
            Traffic.READ, "pretrain/evaluation/generate.py", 1, "token", "the next id, which all ranks must know"
        ),
    ),
}
"""Everything that each command may do."""


@dataclass(frozen=True)
class Excess:
    """Traffic of one kind from one source beyond what is allowed there.

    Attributes:
        findings: its lines, the most frequent first.
        calls: number of calls in all lines.
        allowed: number of calls that are allowed.
    """

    findings: tuple[LineTraffic, ...]
    calls: int
    allowed: int

    def __str__(self) -> str:
        first, others = self.findings[0], len(self.findings) - 1
        more = f" and {others} other {'line' if others == 1 else 'lines'} of it" if others else ""
        return (
            f"{self.calls} {first.kind} ({first.what}) from {first.place}{more}, where {self.allowed or 'none'} may be"
        )


@dataclass(frozen=True)
class CommandTraffic:
    """Traffic of one command, with how many units there were."""

    command: Command
    findings: tuple[LineTraffic, ...]
    units: Mapping[Unit, int]

    def allowed(self, finding: LineTraffic) -> int:
        """Calls of its kind that may come from its source."""
        return sum(rule.number * self.units.get(rule.unit, 0) for rule in self._rules(finding))

    def reason(self, finding: LineTraffic) -> str:
        """Purpose for which its source may do it; nothing if it may not."""
        return "; ".join(rule.reason for rule in self._rules(finding))

    def _rules(self, finding: LineTraffic) -> list[Allowance]:
        key = finding.kind, finding.place.source
        return [rule for rule in ALLOWED[self.command] if (rule.kind, rule.source) == key]

    @property
    def excesses(self) -> tuple[Excess, ...]:
        """Everything beyond what is allowed, by kind and source."""
        by_source: dict[tuple[Traffic, str], list[LineTraffic]] = {}
        for finding in self.findings:
            by_source.setdefault((finding.kind, finding.place.source), []).append(finding)
        found = (Excess(tuple(each), sum(f.calls for f in each), self.allowed(each[0])) for each in by_source.values())
        return tuple(excess for excess in found if excess.calls > excess.allowed)
