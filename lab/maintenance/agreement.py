"""Predictions for a rank beside the counts of its dry run, with the limits within which they must agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lab.maintenance.stage_sent import StageSent
from pretrain.planning.bytes.memory_parts import STATE_PARTS, MemoryPart, StageBytes
from pretrain.planning.dryrun.rank import RankReport

HELD_LIMIT, ACTIVATIONS_LIMIT, REDUCTIONS_LIMIT, SENT_LIMIT = 0.02, 0.1, 0.02, 1e-6
"""Shares of what is counted. Buffers that are reduced are padded, so their formula is as exact as that of weights; what
else is sent is exact, but for the whole bytes that a call's share is rounded to."""
_SMALL = 1e-3
"""Parts below this share of what is held are not worth a limit."""
_PADDED = ("tables", "dense", "copies")

# By the axes of a dry run's groups: what of `StageSent` they send.
_AXES: Mapping[str, str] = {
    "memory": "memory",
    # The next step's ids, for tables in files.
    "stage": "memory",
    "context": "context",
    "tensor": "tensor",
    "table replicas": "tables",
    "data": "dense",
}
_ROW_SUMS = ("memory", "table columns")
"""Axes over which sums per row of tables go (`optimizer.tables: row_wise`); nothing else is summed over them."""

_OF_HALOS = "tensor x context"
"""The axis over which hidden states look back where both cut sequences; a mixture sums its router's figures over it."""

_OF_PIECES = ("table replicas", "data", "stage")
"""Axes that send each other pieces of hidden matrices (`optimizer.matrices: muon`), of sizes of their own, and nothing
else in that way. (Equal parts are of gradients of tables in bf16.)"""


@dataclass(frozen=True)
class Figure:
    """One number, predicted and counted.

    Attributes:
        name: subject of the number.
        limit: largest error that is allowed, as a share of what was counted.
    """

    name: str
    predicted: float
    counted: float
    limit: float

    @property
    def error(self) -> float:
        """Excess of the prediction over the count, as a share of the count."""
        if self.counted == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.counted - 1

    @property
    def agrees(self) -> bool:
        return abs(self.error) <= self.limit


def figures(report: RankReport, stage: StageBytes, sent: StageSent) -> Iterator[Figure]:
    """Everything that plans predict of a rank: parts of what is held, activations, host memory, bytes by group."""
    for part in STATE_PARTS:
        counted = report.held.by_part.get(part, 0)
        if max(counted, stage.by_part[part]) > _SMALL * report.held.total:
            yield Figure(part.value, stage.by_part[part], counted, HELD_LIMIT)
    yield Figure("activations", stage.activations, report.activation_bytes, ACTIVATIONS_LIMIT)
    # Of tables in files rows are on their way through host memory, and no more.
    if report.held.host or (stage.host_tables and not stage.files):
        yield Figure(MemoryPart.HOST.value, stage.host_tables, report.held.host, HELD_LIMIT)
    if report.held.files or stage.files:
        yield Figure(MemoryPart.FILES.value, stage.files, report.held.files, HELD_LIMIT)
    for name, num_bytes in _counted(report).items():
        predicted = getattr(sent, name)
        if max(predicted, num_bytes) > 0:
            limit = REDUCTIONS_LIMIT if name in _PADDED else SENT_LIMIT
            yield Figure(f"sent: {name}", predicted, num_bytes, limit)


def _counted(report: RankReport) -> dict[str, float]:
    """Bytes sent by field of `StageSent`."""
    found = dict.fromkeys((*_AXES.values(), "halo", "messages", "copies"), 0.0)
    for call in report.collectives:
        if call.op == "all_reduce" and call.axis in _ROW_SUMS:
            found["tables"] += call.sent_bytes
        elif call.op == "all_to_all" and call.splits is not None and call.axis in _OF_PIECES:
            # Predicted on the average over ranks: those with the largest matrices exchange more.
            continue
        elif call.op == "all_to_all" and call.axis == _OF_HALOS:
            found["halo"] += call.sent_bytes
        elif call.axis in _AXES:
            found[_AXES[call.axis]] += call.sent_bytes
        elif call.op == "send":
            found["messages"] += call.sent_bytes
        elif call.axis == "pipeline":
            found["copies"] += call.sent_bytes
    return found
