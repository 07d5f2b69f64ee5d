"""Configuration of a grown model. It imports no torch, so that a wrong key is told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megamem.placement.block_plan import plan_blocks
from pretrain.config.keys import all_keys, nearest_keys
from pretrain.config.loader import from_dict, to_dict
from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from pretrain.growth.plan import GrownBlock

_SEED, _MEMORY, _PLACEMENT = "seed", "model.memory.", "model.memory.placement"
_CHOSEN = (_PLACEMENT, *(f"{_PLACEMENT}.{name}" for name in ("blocks", "every", "spans", "position")))
"""Keys that follow from the blocks."""


def grown_config(
    before: RunConfig, blocks: Sequence[GrownBlock], overrides: Sequence[str], *, name: str, origin: str
) -> RunConfig:
    """The configuration of a model that was grown from one of this configuration.

    Args:
        before: configuration of the pretrained model.
        blocks: blocks of the grown one.
        overrides: `model.memory.<key>=value`, which memory is inserted; and the seed.
        name: name of the run that goes on from it.
        origin: name of the pretrained model in messages.

    Raises:
        ConfigError: the model has a memory already, or the keys do not fit.
    """
    if before.model.memory is not None:
        raise ConfigError(
            f"{origin} has a memory of kind {before.model.memory.kind}: blocks are inserted into models without one"
        )
    if before.model.residual_streams is not None:
        raise ConfigError(
            f"{origin} has several residual streams (model.residual_streams), which every block mixes: a block that adds nothing "
            "at first changes it, and blocks are inserted into models with one stream"
        )
    memories = [number for number, block in enumerate(blocks) if block.inserted == "memory"]
    check_keys(overrides, with_memory=bool(memories))
    # Chunks of another depth would need other texts; a stage is of the run that was.
    parallel = replace(before.parallel, pipeline_layout=None)
    model = replace(before.model, num_layers=len(blocks))
    plain = to_dict(replace(before, name=name, model=model, parallel=parallel, stage=None))
    origin = f"the configuration grown from {origin}"
    # Below the overrides, so that none is blamed that nobody gave.
    placement: dict[str, object] = {"blocks": memories}
    if memories:
        plain["model"]["memory"] = {"placement": placement}
    config = from_dict(plain, origin, overrides)
    if config.model.memory is not None and config.model.memory.slot is None:
        placement["position"] = "inserted"
        config = from_dict(plain, origin, overrides)
    memory = config.model.memory
    if memory is not None and any(plan.adds_attention for plan in plan_blocks(config.model).values()):
        raise ConfigError(
            f"model.memory.kind is {memory.kind}, which has no inserted blocks: docs/upscale.md names the kinds that have "
            "them"
        )
    return config


def check_keys(overrides: Sequence[str], *, with_memory: bool) -> None:
    """See whether the keys are ones that a grown model takes.

    Args:
        overrides: `model.memory.<key>=value`, which memory is inserted; and the seed.
        with_memory: blocks of memory are inserted.

    Raises:
        ConfigError: a key is none of those, or the memory's kind is missing.
    """
    for text in overrides:
        _check_key(text, with_memory=with_memory)
    if with_memory and not any(text.startswith("model.memory.kind=") for text in overrides):
        raise ConfigError("model.memory.kind is not given: say which memory is inserted, as in model.memory.kind=midus")


def _check_key(text: str, *, with_memory: bool) -> None:
    """Refuse an override of what a grown model does not choose, with what was meant by it."""
    key, equals, value = text.partition("=")
    if with_memory and key in _CHOSEN:
        raise ConfigError(f"{text}: --blocks, --insert and --placement say where memories are inserted: leave it out")
    if key == _SEED or (with_memory and key.startswith(_MEMORY)):
        return
    every = list(all_keys(RunConfig))
    valid = [each for each in every if each == _SEED or (with_memory and each.startswith(_MEMORY))]
    taken = "model.memory.<key> and seed alone" if with_memory else "seed alone, as no memory is inserted"
    # A known key, or one of another section, has a meaning of its own.
    may_be_ours = key not in every and key.partition(".")[0] in (key, "memory", "model")
    if may_be_ours and (meant := nearest_keys(key, valid)):
        advice = f": did you mean {' or '.join(f'{each}{equals}{value}' for each in meant)}?"
    elif key.startswith(_MEMORY):
        advice = ": leave it out, or use --insert memory"
    else:
        advice = "; give other keys to the run that trains it"
    raise ConfigError(f"{text}: a grown model takes {taken}{advice}")
