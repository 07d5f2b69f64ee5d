"""An exported folder, and an imported one: everything besides tensors, and then the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megamem.config.model import ModelConfig
from parallel.layout import padded_size
from pretrain.checkpoint.store.paired import PairedReader, shapes_of
from pretrain.checkpoint.store.safetensors_store import open_safetensors
from pretrain.checkpoint.store.selected import Joined, Padded
from pretrain.checkpoint.store.state_dict import StateDictReader
from pretrain.checkpoint.store.tensors import TensorInfo, TensorReader, inverted
from pretrain.config.schema import RunConfig
from pretrain.convert.huggingface.card import Figures, model_card
from pretrain.convert.huggingface.config import AUTO_MAP, OWN, architecture_of, exported_config, imported_config
from pretrain.convert.huggingface.names import exported_memory, pairs
from pretrain.convert.huggingface.quantised import RestoredTables
from pretrain.convert.huggingface.refused import refused
from pretrain.convert.huggingface.tokenizer_files import read_tokenizer, write_tokenizer
from pretrain.data.conversations import turn_end
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import CheckpointError

CONFIG_FILE, GENERATION_FILE, CARD_FILE = "config.json", "generation_config.json", "README.md"
_PARTS = ("attention", "configuration", "memory", "modeling", "ngrams", "pages", "streams", "token_tables")
_REMOTE_CODE = tuple(f"{part}_megamem.py" for part in _PARTS)
_CODE = (".py", ".pyc", ".so")
_ADAPTER_FILE = "adapter_config.json"
_MAX_CONFIG_BYTES = 2**24
_BITS = (8, 4)
_PICKLE = "pytorch_model.bin"


def exported_tensors(config: RunConfig, source: TensorReader, *, vocab_size: int) -> PairedReader:
    """A native checkpoint's model under Hugging Face's names.

    Args:
        config: the run's.
        source: the checkpoint; whatever it holds besides the model is left out.
        vocab_size: token ids before padding.

    Raises:
        CheckpointError: the model cannot be exported, or the checkpoint lacks a tensor of it.
    """
    return PairedReader(inverted(pairs(config.model, vocab_size=vocab_size, tensors=source.tensors)), source)


def write_small_files(
    config: RunConfig,
    source: TensorReader,
    folder: Path,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    figures: Figures,
    table_bits: int | None = None,
) -> None:
    """Write everything besides tensors: configurations, tokenizer, card, and the model's code where it has its own.

    Files that keys of the memory name go along, and the keys then name them in the folder.

    Args:
        config: the run's.
        source: our tensors, by global name.
        folder: exists.
        tokenizer: the run's.
        vocab_size: token ids before padding.
        figures: figures for the card.
        table_bits: bits of an element of the memory's tables; None: they have the dtype of weights.

    Raises:
        CheckpointError: the model cannot be exported, or the folder not written.
    """
    config, tensors = _with_files(config, lambda name: name), source.tensors
    content = exported_config(
        config.model,
        vocab_size=vocab_size,
        sequence_length=config.train.sequence_length,
        eod=tokenizer.eod,
        dtype=tensors["embedding.word_embeddings.weight"].dtype,
        seed=config.seed,
        tensors=tensors,
        table_bits=table_bits,
    )
    eod = tokenizer.eod
    generation = {"bos_token_id": eod, "eos_token_id": ends_of(tokenizer), "pad_token_id": eod, "use_cache": True}
    sized = replace(config, model=replace(config.model, vocab_size=vocab_size))
    try:
        _write_json(folder / CONFIG_FILE, content)
        _write_json(folder / GENERATION_FILE, generation)
        write_tokenizer(tokenizer, folder, sequence_length=config.train.sequence_length)
        (folder / CARD_FILE).write_text(model_card(sized, figures, name=config.name), encoding="utf-8")
        for layer in config.model.memory_layers:
            # All layers of a family have the same.
            for key, buffer in layer.memory.kept_files.items() if layer.number == 0 else ():
                name = f"{layer.name}.{buffer}"
                np.save(folder / _file_of(key), source.read(tensors[name].whole(name)).numpy())
        if architecture_of(config.model) == OWN:
            for name in _REMOTE_CODE:
                code = (Path(__file__).parent / "remote_code" / name).read_text(encoding="utf-8")
                (folder / name).write_text(code, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}. Choose another place") from error


def ends_of(tokenizer: Tokenizer) -> int | list[int]:
    """Ids with which a text that is being written ends: that of documents, and before it that of an assistant's turn."""
    end = turn_end(tokenizer)
    return tokenizer.eod if end is None or end == tokenizer.eod else [end, tokenizer.eod]


def changed_code(folder: Path) -> list[str] | None:
    """Files of a folder by which code would run that an export does not write today; None: no code of it would run.

    These are files of code, in whatever folder below; and JSON files that name code, which may be elsewhere: a
    tokenizer's and a processor's configuration have an `auto_map` of their own, and an adapter's names another model.

    Raises:
        CheckpointError: the folder's configuration cannot be read.
    """
    _read_config(folder / CONFIG_FILE)
    named = {path: maps for path in sorted(folder.rglob("*.json")) if (maps := _named_code(path))}
    code = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _CODE or _is_linked_folder(path))
    changed = [path for path, maps in named.items() if (path, maps) != (folder / CONFIG_FILE, [AUTO_MAP])]
    changed += [path for path in code if not _is_exported(path, folder)]
    return [str(path.relative_to(folder)) for path in changed] if named or changed else None


def _named_code(path: Path) -> list[Any]:
    """Every `auto_map` in a JSON file, at any depth; the file itself where it names another model, or cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return [path.name]
    found, left = [path.name] if path.name == _ADAPTER_FILE else [], [content]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            found += [value["auto_map"]] if value.get("auto_map") else []
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
    return found


def _is_linked_folder(path: Path) -> bool:
    """Tell whether a path is a link to a folder, of which the search for code sees nothing, and an engine all."""
    return path.is_symlink() and path.is_dir()


def _is_exported(path: Path, folder: Path) -> bool:
    ours = Path(__file__).parent / "remote_code" / path.name
    return path.parent == folder and ours.is_file() and path.read_bytes() == ours.read_bytes()


def _file_of(key: str) -> str:
    return f"{key}.npy"


def _with_files(config: RunConfig, place: Callable[[str], str]) -> RunConfig:
    """The configuration whose memories find their files where `place` says, given a name in the folder."""
    placed: dict[str, Any] = {}
    for section, memory in config.model.families.items():
        found: dict[str, Any] = {key: place(_file_of(key)) for key in memory.kept_files}
        placed[section.removeprefix("model.")] = replace(memory, **found)
    return replace(config, model=replace(config.model, **placed))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Imported:
    """A Hugging Face folder, as a model of ours.

    Attributes:
        config: configuration of a run that goes on with it, with `model.vocab_size` set; a default where the folder
            says nothing.
        tensors: its weights under our global names; rows that pad the vocabulary are 0.
        tokenizer: tokenizer that prepares data for it.
    """

    config: RunConfig
    tensors: TensorReader
    tokenizer: Tokenizer

    @property
    def model(self) -> ModelConfig:
        """The model alone."""
        return self.config.model


def open_folder(folder: Path) -> Imported:
    """Open a Llama, a Qwen, a Mistral or an exported model to train it on.

    Raises:
        CheckpointError: the model is damaged, or one that ours cannot be.
        DataError: the folder's tokenizer cannot be used.
    """
    path = folder / CONFIG_FILE
    content = _read_config(path)
    config = _with_files(imported_config(content, str(path)), lambda name: str(folder / name))
    model = config.model
    assert model.vocab_size is not None
    source = _opened_weights(folder, content)
    _check_size(model, source.tensors, path)
    found = pairs(model, vocab_size=model.vocab_size, tensors=exported_memory(model, source.tensors))
    padded = (padded_size(model.vocab_size, model.vocab_size_multiple), model.hidden_size)
    vocabulary = {"embedding.word_embeddings.weight": padded, "output_layer.weight": padded}
    _check_all_used(model, source.tensors, shapes_of(pair.theirs for pair in found), path)
    return Imported(config, Padded(PairedReader(found, source), vocabulary), read_tokenizer(folder))


def _opened_files(folder: Path) -> TensorReader:
    """The files' reader: of safetensors, or where there are none of pickles, of which nothing is run."""
    index, single = folder / f"{_PICKLE}.index.json", folder / _PICKLE
    if any(folder.glob("*.safetensors")) or not (index.is_file() or single.is_file()):
        return open_safetensors(folder)
    if not index.is_file():
        return StateDictReader(single)
    files = _read_config(index).get("weight_map")
    names = set(files.values()) if isinstance(files, dict) else set()
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise CheckpointError(f"{index} names no files beside it: copy the folder again")
    reader: TensorReader
    reader, *others = (StateDictReader(folder / name) for name in sorted(names))
    for other in others:
        reader = Joined(reader, other, reader.tensors.keys() | other.tensors.keys())
    return reader


def _opened_weights(folder: Path, content: Mapping[str, Any]) -> TensorReader:
    """The weights' reader, by which tables in fewer bits have rows.

    Raises:
        CheckpointError: the tables are not what `content`, the configuration, says.
    """
    source, bits = _opened_files(folder), _table_bits(folder, content)
    if bits is None:
        return source
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    try:
        return RestoredTables(source, bits, _table_widths(content), dtypes[content["dtype"]])
    except (KeyError, TypeError, AttributeError) as error:
        path = folder / CONFIG_FILE
        raise CheckpointError(
            f"{path}: memory.table_bits is {bits}, and nothing says how wide tables are, or of which dtype ({error!r}): copy "
            "the folder again"
        ) from error


def table_bits(folder: Path) -> int | None:
    """Bits of an element of an exported folder's tables; None: they have the dtype of weights.

    Raises:
        CheckpointError: the configuration cannot be read, or says something impossible.
    """
    return _table_bits(folder, _read_config(folder / CONFIG_FILE))


def _table_bits(folder: Path, content: Mapping[str, Any]) -> int | None:
    memory = content.get("memory") if content.get("architectures") == [OWN] else None
    bits = memory.get("table_bits") if isinstance(memory, dict) else None
    if bits is None:
        return None
    if type(bits) is not int or bits not in _BITS:
        allowed = " or ".join(map(str, _BITS))
        raise refused(str(folder / CONFIG_FILE), "memory.table_bits", bits, f"it may be null, {allowed}")
    return bits


def _table_widths(content: Mapping[str, Any]) -> dict[str, int]:
    """Columns of all tables, by Hugging Face's names, as a configuration has them."""
    return {
        f"model.banks.{memory.get('first_bank', 0) + number}.{table}": width
        for memory in (content["memory"], content.get("second_memory"))
        if memory is not None
        for number in range(len(memory["bank_rows"]))
        for table, width in memory["tables"].items()
    }


def _read_config(path: Path) -> dict[str, Any]:
    """The content of a `config.json`."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no mapping")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): give a folder of Hugging Face's format") from error
    return content


def _check_size(model: ModelConfig, found: Mapping[str, TensorInfo], path: Path) -> None:
    """Refuse a configuration of a model far larger than the weights: pairs are made of each block and head of it."""
    key = f"model.layers.0.self_attn.{'k' if model.latent_attention is None else 'kv_up'}_proj.weight"
    rows = found[key].shape[0] if key in found and found[key].shape else 0
    experts = 0 if model.moe is None else model.moe.num_experts
    if max(model.num_layers, experts) > len(found) or model.query_groups > rows:
        raise CheckpointError(
            f"{path} names {model.num_layers} layers and {model.query_groups} key/value heads, and the weights have "
            "fewer: copy the folder again"
        )


def _check_all_used(
    model: ModelConfig, found: Mapping[str, TensorInfo], used: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Refuse weights that the configuration does not explain: biases, adapters, other shapes."""
    # A tied output projection may be written nevertheless, and old files have the frequencies of RoPE.
    idle = {"lm_head.weight"} if model.tied_embeddings else set()
    for name, info in found.items():
        if name in idle or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in used:
            raise CheckpointError(f"{path.parent}: there is a tensor {name}, which imported models do not have")
        if info.shape != used[name]:
            raise CheckpointError(
                f"{path.parent}: {name} has the shape {info.shape}, and {path.name} says {used[name]}"
            )
