"""The state of AdamW in Megatron-LM's rank files, as its optimizer without sharding (no `--use-distributed-optimizer`)
saves it.

PyTorch's optimizers number their parameters: here first the matrices, which are decayed, then the rest, each in the
order of the modules, chunk by chunk. bf16 weights have fp32 main weights beside the moments; fp32 weights are their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megamem.config import ModelConfig
from pretrain.checkpoint.store.lazy_tensor import LazyTensor
from pretrain.checkpoint.store.tensors import Pair, Region
from pretrain.checkpoint.store.torch_zip_writer import StoredTensor
from pretrain.config.schedule import run_lr
from pretrain.config.schema import RunConfig
from pretrain.convert.megatron_ranks.layout import RankFile, RankLayout
from pretrain.convert.megatron_ranks.pairs import weights_of
from pretrain.errors import CheckpointError, ConfigError
from pretrain.state import RunState

MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "param"
_MAIN_WEIGHTS = "fp32_from_fp16_params"


def optimizer_pairs(weights: Sequence[Pair], dtype: torch.dtype) -> list[Pair]:
    """Our optimizer state, `optimizer.state.<kind>.<name>`, in tensors `<folder>/optimizer.<kind>/<model key>/<name>`.

    Args:
        weights: the pairs of the weights.
        dtype: of the weights; those in fp32 are the main weights themselves.
    """
    main = [
        Pair(_ours(pair.ours, _MAIN), pair.theirs if dtype == torch.float32 else _theirs(pair.theirs, _MAIN))
        for pair in weights
    ]
    return main + [Pair(_ours(pair.ours, kind), _theirs(pair.theirs, kind)) for kind in MOMENTS for pair in weights]


def _ours(region: Region, kind: str) -> Region:
    return Region(f"optimizer.state.{kind}.{region.name}", region.offset, region.shape)


def _theirs(region: Region, kind: str) -> Region:
    folder, _, rest = region.name.partition("/")
    return Region(f"{folder}/optimizer.{kind}/{rest}", region.offset, region.shape)


def check_optimizer(model: ModelConfig) -> None:
    """Refuse models whose optimizer state is not translated.

    Raises:
        ConfigError: it has experts, for which Megatron-LM has an optimizer of their own.
    """
    if model.moe is not None:
        raise ConfigError("the optimizer state of mixtures of experts is not translated: take the weights alone")


def _groups(model: ModelConfig, layout: RankLayout, file: RankFile) -> list[list[str]]:
    """`<model key>/<name>` of a file's parameters: those that are decayed, and the others, in the optimizer's order."""
    every = [
        (f"{key}/{weight.local}", len(weight.shape))
        for key, chunk in layout.chunks(model, file).items()
        # The number of rows decides on no name.
        for weight in weights_of(model, 0, layout, chunk, file)
    ]
    return [[name for name, dims in every if (dims > 1) == decayed] for decayed in (True, False)]


def optimizer_entries(
    config: RunConfig, state: RunState, layout: RankLayout, file: RankFile, tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """What a file has under `optimizer` and `opt_param_scheduler`.

    Args:
        config: the run's.
        state: how far it has come.
        layout: of the files.
        file: the rank's.
        tensors: the file's, by the names of `optimizer_pairs`; main weights if the weights are not their own.
    """
    folder, settings = layout.folder(file), config.optimizer
    groups = _groups(config.model, layout, file)
    order = [name for group in groups for name in group]
    per_parameter: dict[int, dict[str, Any]] = {
        index: {kind: tensors[f"{folder}/optimizer.{kind}/{name}"] for kind in MOMENTS}
        for index, name in enumerate(order)
    }
    if layout.implementation == "local":
        # PyTorch's AdamW counts per parameter, Transformer Engine's per group.
        for moments in per_parameter.values():
            moments["step"] = float(state.num_updates)
    param_groups, first = [], 0
    for decay, group in zip((1.0, 0.0), groups, strict=True):
        numbers = list(range(first, first + len(group)))
        param_groups.append({**_settings(config, state, decay), "params": numbers})
        first += len(group)
    entries: dict[str, Any] = {"state": per_parameter, "param_groups": param_groups}
    if config.train.precision == "bf16":
        main = [[tensors[f"{folder}/optimizer.{_MAIN}/{name}"] for name in group] for group in groups]
        entries = {"optimizer": entries, _MAIN_WEIGHTS: main}
    batch = config.train.global_batch_size
    scheduler = {
        "max_lr": settings.lr,
        "min_lr": settings.min_lr,
        "lr_warmup_steps": settings.warmup_steps * batch,
        "lr_decay_steps": config.train.num_steps * batch,
        "lr_decay_style": "WSD" if settings.schedule == "wsd" else settings.schedule,
        "num_steps": state.consumed_samples,
        "start_wd": settings.weight_decay,
        "end_wd": settings.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": config.train.num_steps * batch,
    }
    return {"optimizer": entries, "opt_param_scheduler": scheduler}


def _settings(config: RunConfig, state: RunState, decay: float) -> dict[str, Any]:
    """A parameter group without its parameters; `decay` multiplies the weight decay."""
    settings = config.optimizer
    return {
        "wd_mult": decay,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": settings.lr,
        "min_lr": settings.min_lr,
        "lr": run_lr(state.step, settings, config.train, config.stage),
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay * decay,
        "bias_correction": True,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "step": state.num_updates,
    }


def held_state(
    path: Path, tree: Mapping[str, Any], model: ModelConfig, layout: RankLayout, file: RankFile
) -> dict[str, LazyTensor]:
    """The tensors of a file's optimizer by the names of `optimizer_pairs`; none if it holds no such state.

    Args:
        path: the file, for messages.
        tree: what it holds.
        model: the model's config.
        layout: of the files.
        file: the rank's.

    Raises:
        CheckpointError: the state is not that of the file's parameters.
    """
    entries = tree.get("optimizer")
    if not isinstance(entries, dict) or model.moe is not None:
        return {}
    main = entries.get(_MAIN_WEIGHTS)
    adam: Any = entries if main is None else entries.get("optimizer")
    folder, groups = layout.folder(file), _groups(model, layout, file)
    found: dict[str, LazyTensor] = {}
    try:
        if not adam["state"]:
            # Sharded state is in files of its own.
            return {}
        # Megatron-LM's versions differ in the order of the groups, and say which one is decayed.
        place = [[bool(each["wd_mult"]) for each in adam["param_groups"]].index(decayed) for decayed in (True, False)]
        for index, group in zip(place, groups, strict=True):
            numbers = adam["param_groups"][index]["params"]
            for within, (number, name) in enumerate(zip(numbers, group, strict=True)):
                for kind in MOMENTS:
                    found[f"{folder}/optimizer.{kind}/{name}"] = adam["state"][number][kind]
                if main is not None:
                    found[f"{folder}/optimizer.{_MAIN}/{name}"] = main[index][within]
        if not all(isinstance(each, LazyTensor) for each in found.values()):
            raise TypeError("moments that are no tensors")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path} has optimizer state that is not of the parameters that its args describe: {error!r}"
        ) from error
    return found
