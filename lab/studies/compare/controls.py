"""Controls of a comparison: every memory again without its addresses, without learned rows, and as what it might be
instead (`megamem study compare --controls`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from lab.experts_twin import ExpertsTwin, experts_twin
from lab.studies.compare.addresses import Addresses
from lab.studies.compare.runs import RunResult
from megamem.config.memory import Control
from pretrain.config.keys import without_ineffective
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from pretrain.planning.counts.dense_twin import DenseTwin, dense_twin
from pretrain.planning.counts.formulas import count_parameters
from tools.parameter_table import markdown_table

_OTHER_ROWS = ("one_row", "random_rows", "others_rows")
"""Controls that take away rows and nothing else."""
NEEDED = (*_OTHER_ROWS, "equal_flops")
"""A memory is one if it beats these, with every seed."""
MEANINGS = {
    "one_row": "every read is of one row: a table of capacity one",
    "random_rows": "rows stay as they were drawn",
    "others_rows": "every token reads the rows that a token of another sequence asks for, in training too",
    "equal_flops": "no memory, and a feed-forward in every block, so wide that a token takes as many operations",
    "equal_parameters": "no memory, and a feed-forward in every block, so wide that the model has as many parameters",
    "experts": "a mixture of experts of as many parameters, and as many active ones",
}


@dataclass(frozen=True)
class Controlled:
    """A model of a comparison, and its controls by their names (`MEANINGS`).

    A control that was asked for and cannot be is left out, with the reason in `left_out`.
    """

    model: RunConfig
    controls: Mapping[str, RunConfig]
    left_out: Mapping[str, str]

    @property
    def shared(self) -> dict[str, str]:
        """The controls that are trained for another model (`trained_once`): the names of their runs, by control."""
        own = {name: f"{self.model.name}.{name}" for name in self.controls}
        return {name: control.name for name, control in self.controls.items() if control.name != own[name]}


def with_memory(models: Sequence[RunConfig]) -> list[RunConfig]:
    """Models that can have controls.

    Raises:
        ConfigError: no model has a memory.
    """
    if found := [config for config in models if config.model.memory is not None]:
        return found
    raise ConfigError("no model has a memory, and --controls is for those that have one: name one, or leave it out")


def controls_of(config: RunConfig, vocab_size: int, names: Collection[str] = tuple(MEANINGS)) -> Controlled:
    """The controls of a model with a memory, each named `<model>.<control>`.

    Args:
        config: configuration of the model.
        vocab_size: ids of its tokenizer, for parameters and operations: the configuration may leave it to the data.
        names: the controls that are asked for, of `MEANINGS`.

    Raises:
        ConfigError: the model has no memory, or is a control itself.
    """
    memory = config.model.memory
    if memory is None or memory.control != "none":
        what = "has no memory" if memory is None else f"has model.memory.control {memory.control}"
        raise ConfigError(f"{config.name} {what}, and so no controls: --controls is for models with a memory")
    frozen = replace(
        config.optimizer,
        value_lr=0.0,
        value_weight_decay=0.0,
        pre_value_lr_multiplier=None if config.optimizer.pre_value_lr_multiplier is None else 0.0,
    )
    found = {
        "one_row": _with_control(config, "one_row"),
        "random_rows": replace(config, optimizer=frozen),
        "others_rows": _with_control(config, "others_rows"),
    }
    left_out = {}
    sized = replace(config, model=replace(config.model, vocab_size=vocab_size))
    twins: dict[str, Callable[[], DenseTwin | ExpertsTwin | None]] = {
        "equal_flops": lambda: dense_twin(sized),
        "equal_parameters": lambda: dense_twin(sized, lambda model: count_parameters(model).total),
        "experts": lambda: experts_twin(sized, width_multiple=1),
    }
    for name, make_twin in twins.items():
        if name not in names:
            continue
        try:
            twin = make_twin()
        except ValueError as error:
            left_out[name] = str(error)
            continue
        if twin is None:
            left_out[name] = "model.moe is set: there is no dense feed-forward"
        else:
            found[name] = replace(twin.config, model=replace(twin.config.model, vocab_size=config.model.vocab_size))
    named = {
        name: replace(without_ineffective(control), name=f"{config.name}.{name}")
        for name, control in found.items()
        if name in names
    }
    return Controlled(config, named, left_out)


def trained_once(controlled: Sequence[Controlled]) -> list[Controlled]:
    """Models with controls, of which one that several have in common, but for its name, is that of the first of them.

    Models of equal size and rates have the same dense and expert twins: one run tells of them all.
    """
    first: dict[RunConfig, RunConfig] = {}
    return [
        replace(
            each,
            controls={
                name: first.setdefault(replace(control, name="any"), control) for name, control in each.controls.items()
            },
        )
        for each in controlled
    ]


def distinct(controlled: Sequence[Controlled]) -> list[RunConfig]:
    """The controls that there are, each once, in the order of their models."""
    return list({control.name: control for each in controlled for control in each.controls.values()}.values())


def notes_of(controlled: Sequence[Controlled]) -> list[str]:
    """Sentences on controls that there cannot be, and on those that are trained for another model."""
    return [
        note
        for each in controlled
        for note in (
            *(f"{each.model.name} has no {name}: {why}." for name, why in each.left_out.items()),
            *(
                f"{name} of {each.model.name} is {run}, trained once: the same but for its name."
                for name, run in each.shared.items()
            ),
        )
    ]


def _with_control(config: RunConfig, control: Control) -> RunConfig:
    both: dict[str, Any] = {
        key: replace(memory, control=control)
        for key, memory in zip(("memory", "second_memory"), config.model.memories, strict=False)
    }
    return replace(config, model=replace(config.model, **both))


def verdict(own: Sequence[float], controls: Mapping[str, Sequence[float]]) -> str:
    """Sentences on what the losses of a memory say, seed by seed, beside those of its controls.

    A lead over a dense model may come of other things than rows: of blocks without a feed-forward, where the memory
    stands instead, or of what a layer computes besides. So they tell what rows bring, too.

    Args:
        own: validation losses, by seed.
        controls: losses of the trained controls with the same seeds, by name.
    """
    beaten: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    leads = {name: fmean(losses) - fmean(own) for name, losses in controls.items()}
    for name, losses in controls.items():
        lead = f"{name} by {leads[name]:+.4f}"
        (beaten if all(mine < its for mine, its in zip(own, losses, strict=True)) else others).append((name, lead))
    missing = [name for name in NEEDED if name not in controls]
    of_needed = [name for name, _ in others if name in NEEDED]
    if missing:
        judged = f"not judged, without {', '.join(missing)}"
    elif of_needed:
        judged = f"not shown to be memory, as it does not beat {', '.join(of_needed)} with every seed"
    else:
        judged = f"memory: it beats {', '.join(NEEDED[:-1])} and {NEEDED[-1]} with every seed"
    seeds = "" if len(own) > 1 else " One seed says little."
    compared = "; ".join(
        f"{words} {', '.join(lead for _, lead in of)}"
        for words, of in (("ahead of", beaten), ("not ahead of", others))
        if of
    )
    of_rows = ""
    if not missing:
        brought = min(leads[name] for name in _OTHER_ROWS)
        of_rows = (
            f" Rows bring {brought:+.4f}, the least lead over {', '.join(_OTHER_ROWS[:-1])} and {_OTHER_ROWS[-1]}."
        )
    return f"{judged} ({compared}).{of_rows}{seeds}"


def controls_section(
    controlled: Sequence[Controlled],
    results: Mapping[str, Sequence[RunResult]],
    of_controls: Mapping[str, Sequence[RunResult]],
    addresses: Mapping[str, Sequence[Addresses]],
) -> str:
    """The part of a report on controls: losses, after-the-fact losses, gain by frequency, verdicts.

    Args:
        controlled: the models with a memory.
        results: results of the models' finished runs, by name.
        of_controls: results of the controls' finished runs, by their names.
        addresses: losses of finished models after training, by name, seed by seed.
    """
    names = [name for name in MEANINGS if any(name in each.controls or name in each.left_out for each in controlled)]
    head = ("model", "as it is", *names, "after training: others' rows", "after training: no memory")
    rows, times, verdicts = [], [], []
    for each in controlled:
        own = [run.validation_loss for run in results.get(each.model.name, ())]
        cells = {
            name: [run.validation_loss for run in of_controls.get(control.name, ())]
            for name, control in each.controls.items()
        }
        after = addresses.get(each.model.name, ())
        rows.append(
            [
                each.model.name,
                _mean(own),
                *(_mean(cells.get(name, ())) for name in names),
                _mean([of.others for of in after]),
                _mean([of.without for of in after]),
            ]
        )
        step_s = {name: _step_s(of_controls.get(control.name, ())) for name, control in each.controls.items()}
        times.append(
            [each.model.name, _step_s(results.get(each.model.name, ())), *(step_s.get(name, "-") for name in names)]
        )
        done = {name: losses for name, losses in cells.items() if len(losses) == len(own)}
        if own and len(done) == len(each.controls):
            verdicts.append(f"- **{each.model.name}**: {verdict(own, done)}")
    verdicts += [f"- {note}" for note in notes_of(controlled)]
    meanings = "\n".join(f"- `{name}`: {MEANINGS[name]}." for name in names)
    gains = _gains_by_frequency(addresses)
    return f"""
Controls, in validation losses (means over seeds):

{markdown_table(head, rows)}

{meanings}

"After training" is the trained model, whose tokens read the rows of other sequences' tokens, or none.

{chr(10).join(verdicts) or "No model and all of its controls are done yet."}

Median seconds per step, on the machine as it was:

{markdown_table(("model", "as it is", *names), times)}
{gains}"""


def _mean(losses: Sequence[float]) -> str:
    return f"{fmean(losses):.4f}" if losses else "-"


def _step_s(runs: Sequence[RunResult]) -> str:
    of_steps = [step_s for run in runs for step_s in run.step_s]
    return f"{median(of_steps):.3f}" if of_steps else "-"


def _gains_by_frequency(addresses: Mapping[str, Sequence[Addresses]]) -> str:
    rows = []
    for name, after in addresses.items():
        if not after:
            continue
        bins = zip(*(of.gains for of in after), strict=True)
        rows.append(
            [name, *("-" if None in of_bin else f"{fmean(x for x in of_bin if x is not None):+.3f}" for of_bin in bins)]
        )
    if not rows:
        return ""
    head = ("model", *(f"bin {number}" for number in range(len(rows[0]) - 1)))
    return f"""
Nats per token that own rows gain over rows of others, after training, by how often the token comes in training (bin 0:
the rarest tenth of kinds of tokens):

{markdown_table(head, rows)}
"""
