"""Markdown tables of what configurations cost by the closed formulas, beside the figures of UltraMemV2's paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megamem.retrieval.config import RetrievalConfig
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token, memory_flops
from pretrain.printable import printable

_BF16_BYTES = 2


@dataclass(frozen=True)
class PaperFigures:
    """Figures of a model, as the paper prints them.

    Attributes:
        active: active parameters.
        total: all parameters.
        memory_share: the memory's share of the computation (Table 4), in percent.
    """

    active: str
    total: str
    memory_share: str = ""


PAPER: dict[str, PaperFigures] = {
    # Table 10.
    "ultramemv2-227m-1.2b": PaperFigures("225M", "1.18B"),
    "ultramemv2-1b-7b": PaperFigures("1079M", "6.70B"),
    "ultramem-227m-1.2b": PaperFigures("225M", "1.18B"),
    "memory-plus-227m-1.2b": PaperFigures("228M", "1.19B"),
    "olmoe-227m-1.2b": PaperFigures("227M", "1.18B"),
    "olmoe-1b-7b": PaperFigures("1070M", "6.71B"),
    # By their names.
    "ultramemv2-430m-5b": PaperFigures("430M", "5B"),
    "ultramemv2-500m-6.8b": PaperFigures("500M", "6.8B", "17.0"),
    "ultramemv2-1.25b-12.5b": PaperFigures("1.25B", "12.5B"),
    "ultramemv2-2.5b-25b": PaperFigures("2.5B", "25B"),
    "ultramemv2-2.5b-60b-top768": PaperFigures("2.5B", "60B"),
    "ultramemv2-2.5b-120b-top256": PaperFigures("2.5B", "120B"),
    # Table 4; those of Tables 5 and 7 have the totals of their baseline.
    "table4-dk344": PaperFigures("500M", "6.8B", "12.0"),
    "table4-dk432": PaperFigures("500M", "6.8B", "14.5"),
    "table4-dk524": PaperFigures("500M", "6.8B", "17.0"),
    "table4-dk610": PaperFigures("500M", "6.8B", "19.5"),
    "table4-dk730": PaperFigures("500M", "6.8B", "23.0"),
    "table4-dk796": PaperFigures("500M", "6.8B", "25.0"),
    "table4-dk880": PaperFigures("500M", "6.8B", "27.5"),
}
"""Figures by the name of the run."""


def parameter_tables(configs: Sequence[RunConfig]) -> str:
    """Two tables: totals and costs per token beside the paper's figures, and parameters by part.

    Raises:
        ConfigError: a configuration leaves its vocabulary to the data.
    """
    for config in configs:
        if config.model.vocab_size is None:
            raise ConfigError(
                f"model.vocab_size of {config.name} is left to the tokenizer, so that its parameters are not known: "
                "give model.vocab_size"
            )
    costs = [
        "model",
        "total",
        "without embeddings",
        "paper",
        "active",
        "active core",
        "paper",
        "forward GFLOPs",
        "memory's share",
        "paper",
        "table bytes read",
    ]
    counted = (part.replace("_", " ") for part in count_parameters(configs[0].model).parts)
    parts = ["model", *counted, "keys per side", "FFN width"]
    return "\n\n".join((markdown_table(costs, map(_costs, configs)), markdown_table(parts, map(_parts, configs))))


def memory_share(config: RunConfig) -> float:
    """The memory's share of the forward pass, without output projection and attention scores."""
    return memory_flops(config.model) / (2 * count_parameters(config.model).core)


def _costs(config: RunConfig) -> list[str]:
    counts, paper = count_parameters(config.model), PAPER.get(config.name, PaperFigures("", ""))
    flops = forward_flops_per_token(config.model, config.train.sequence_length)
    has_memory = config.model.memory is not None
    return [
        config.name,
        _billions(counts.total),
        _billions(counts.total - counts.embedding),
        paper.total,
        _millions(counts.active),
        _millions(counts.core),
        paper.active,
        f"{flops / 1e9:.3f}",
        f"{100 * memory_share(config):.1f} %" if has_memory else "",
        f"{paper.memory_share} %" if paper.memory_share else "",
        f"{counts.read_values * _BF16_BYTES:,}" if has_memory else "",
    ]


def _parts(config: RunConfig) -> list[str]:
    model, counts = config.model, count_parameters(config.model)
    keys = ""
    if isinstance(model.memory, RetrievalConfig):
        widest = max(view.num_keys for view in model.memory_plan.views)
        keys = f"{widest * model.memory.expansion:,}"
    width = str(model.ffn_hidden_size)
    if model.moe is not None:
        width = f"{model.moe.top_k} of {model.moe.num_experts} x {model.moe.expert_ffn_hidden_size}"
    return [config.name, *(_millions(count) for count in counts.parts.values()), keys, width]


def _billions(count: int) -> str:
    return f"{count / 1e9:.3f}B"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.2f}M" if count else ""


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown: a column of names, and columns of figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(printable, cells))} |" for cells in lines)
