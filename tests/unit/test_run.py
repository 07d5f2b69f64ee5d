"""Opening a run: what its parts are built from, what may change before it goes on, and what is written down. The parts
are stand-ins.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretrain.evaluation.restore as restore_module
import pretrain.run.saved_run as saved_run_module
import pretrain.train.run as run_module
from megamem.config.identity import Role
from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.parameters.trained_part import ALL
from pretrain.checkpoint.folder import SavedState
from pretrain.config.keys import all_keys, role_of
from pretrain.config.loader import to_dict
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import DataConfig, DatasetEntry, EvaluationConfig, ParallelConfig, RunConfig, TrainConfig
from pretrain.config.stages import load_config
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.planning.counts.formulas import training_flops_per_token
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import check_resumable, lost_of_tables
from pretrain.state import DataRead, RunState
from pretrain.train.run import Run, open_run

CONFIG = RunConfig(
    seed=3,
    model=ModelConfig(vocab_size_multiple=16, memory=UltraMemV2Config(num_keys=16)),
    train=TrainConfig(num_steps=20, global_batch_size=8, micro_batch_size=2, sequence_length=32),
    data=DataConfig(datasets=(DatasetEntry("/some"),)),
    evaluation=EvaluationConfig(max_sequences=5),
)
STATE = RunState(step=6, consumed_samples=100, consumed_tokens=3200, num_updates=4, num_skipped=2, num_skipped_in_row=1)


def saved_with(config: RunConfig, state: RunState = STATE) -> SavedState:
    return SavedState(Path("somewhere/step_00000006"), state, to_dict(config), files={}, weights_dtype="float32")


# Changes at a resume


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (CONFIG, []),
        (replace(CONFIG, train=replace(CONFIG.train, num_steps=30)), ["train.num_steps: 20 -> 30"]),
        (
            replace(CONFIG, name="other", parallel=ParallelConfig(tensor=2)),
            ["name: run -> other", "parallel.tensor: 1 -> 2"],
        ),
        (replace(CONFIG, optimizer=OptimizerConfig(lr=0.5)), ["optimizer.lr: 0.001 -> 0.5"]),
        (
            replace(CONFIG, model=replace(CONFIG.model, implementation="transformer_engine")),
            ["model.implementation: local -> transformer_engine"],
        ),
        (replace(CONFIG, data=replace(CONFIG.data, seed=4)), ["data.seed: null -> 4"]),
        (
            replace(CONFIG, data=replace(CONFIG.data, datasets=(DatasetEntry("/data/a, b", name="null"),))),
            [
                "data.datasets: [{path: /some, weight: 1.0, name: null, epochs: null}] -> "
                "[{path: '/data/a, b', weight: 1.0, name: 'null', epochs: null}]"
            ],
        ),
        (replace(CONFIG, model=replace(CONFIG.model, rotary_base=50)), ["model.rotary_base: 10000 -> 50"]),
        (
            replace(CONFIG, train=replace(CONFIG.train, sequence_length=64, kernels="naive")),
            ["train.kernels: auto -> naive", "train.sequence_length: 32 -> 64"],
        ),
    ],
    ids=lambda value: ", ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_what_may_change_is_told(changed: RunConfig, told: list[str]) -> None:
    assert check_resumable(changed, saved_with(CONFIG)) == told


def test_another_update_of_tables_says_what_is_lost() -> None:
    by_row = replace(CONFIG, optimizer=OptimizerConfig(tables="row_wise"))
    assert "optimizer.tables: adamw -> row_wise" in check_resumable(by_row, saved_with(CONFIG))
    assert ["first moments are dropped" in text for text in lost_of_tables(saved_with(CONFIG), by_row)] == [True]
    assert ["first moments start at zero" in text for text in lost_of_tables(saved_with(by_row), CONFIG)] == [True]
    for config in (CONFIG, by_row):
        assert not list(lost_of_tables(saved_with(config), config))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (replace(CONFIG, seed=4), "seed: 3 -> 4"),
        (replace(CONFIG, model=replace(CONFIG.model, hidden_size=64)), "model.hidden_size: 128 -> 64"),
        (replace(CONFIG, model=replace(CONFIG.model, memory=None)), "model.memory.top_k: 16 -> not set"),
        (
            replace(CONFIG, model=replace(CONFIG.model, memory=UltraMemV2Config(num_keys=16, top_k=8))),
            "model.memory.top_k: 16 -> 8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_seed_or_model_is_another_run(changed: RunConfig, told: str) -> None:
    """Whatever else changes: of that, nothing is said."""
    changed = replace(changed, train=replace(changed.train, num_steps=30))
    with pytest.raises(CheckpointError, match="is of another run") as error:
        check_resumable(changed, saved_with(CONFIG))
    assert "somewhere/step_00000006" in str(error.value)
    assert told in str(error.value)
    assert "num_steps" not in str(error.value)


def test_a_new_run_has_another_seed_unless_rows_are_found_by_it() -> None:
    """With another seed the keys of UltraMemV2's memory would read other rows than they were trained with."""
    other = replace(CONFIG, seed=4)
    words = r"find their rows by the run's seed .*seed: 3 -> 4.* Set seed: 3; data\.seed is free"
    with pytest.raises(CheckpointError, match=words):
        check_resumable(other, saved_with(CONFIG), as_new_run=True)
    for shuffle in ("table", "none"):
        free = replace(CONFIG, model=replace(CONFIG.model, memory=replace(CONFIG.model.memory, shuffle=shuffle)))
        assert check_resumable(replace(free, seed=4), saved_with(free), as_new_run=True) == ["seed: 3 -> 4"]
    dense = replace(CONFIG, model=replace(CONFIG.model, memory=None))
    assert check_resumable(replace(dense, seed=4), saved_with(dense), as_new_run=True) == ["seed: 3 -> 4"]


def test_the_weights_of_a_mixtures_losses_may_change_and_the_mixture_may_not() -> None:
    """Every key of a section that one of the two does not have counts as the section does."""
    moe = MoEConfig(num_experts=4, top_k=2)
    with_experts = replace(CONFIG, model=replace(CONFIG.model, memory=None, moe=moe))
    lighter = replace(with_experts, model=replace(with_experts.model, moe=replace(moe, z_loss_weight=0.5)))
    assert check_resumable(lighter, saved_with(with_experts)) == ["model.moe.z_loss_weight: 0.001 -> 0.5"]
    for before, now in ((with_experts, CONFIG), (CONFIG, with_experts)):
        with pytest.raises(CheckpointError, match=r"model\.moe\.num_experts: (4 -> not set|not set -> 4)"):
            check_resumable(now, saved_with(before))


MAY_CHANGE = (
    "rotary_base",
    "rotary_scaling",
    "rotary_scaling.kind",
    "rotary_scaling.factor",
    "rotary_scaling.original_length",
    "rotary_scaling.beta_fast",
    "rotary_scaling.beta_slow",
    "rotary_scaling.attention_factor",
    "rotary_scaling.low_frequency_factor",
    "rotary_scaling.high_frequency_factor",
    "implementation",
    "moe.balance_loss_weight",
    "moe.balance_sequences",
    "moe.z_loss_weight",
    "memory.key_balance_weight",
    "memory.key_balance_sequences",
    "memory.tucker_penalty_weight",
    "memory.tucker_penalty_margin",
)
"""Keys of `model` that may change at a resume."""


def test_every_key_says_whether_it_is_a_part_of_the_model() -> None:
    """A new one does so too, or stands in a section that does."""
    moe = replace(CONFIG.model, moe=MoEConfig(), memory=UltraMemV2Config())
    config = replace(CONFIG, model=moe)
    roles = {key: role_of(key, config) for key in all_keys(RunConfig) if key != "model"}
    assert [key for key, role in roles.items() if role is None] == []
    running = {key for key, role in roles.items() if key.startswith("model.") and role is Role.RUNNING}
    assert running == {f"model.{key}" for key in MAY_CHANGE}
    outside = {key for key, role in roles.items() if not key.startswith("model.") and role is Role.IDENTITY}
    assert outside == {"seed"}


def test_the_page_on_configuration_names_what_may_change() -> None:
    page = (Path(__file__).parents[2] / "docs" / "model.md").read_text(encoding="utf-8")
    for key in MAY_CHANGE:
        # A section stands for its keys.
        assert f"`model.{key}`" in page or f"`model.{key.partition('.')[0]}`" in page


# Parts that are built


@dataclass
class Parts:
    """Recorded calls that build the parts of a run."""

    saved: SavedState | None = None
    calls: dict[str, Any] = field(default_factory=dict)

    def call(self, name: str, result: Any) -> Any:
        def build(*arguments: Any, **keywords: Any) -> Any:
            assert name not in self.calls
            self.calls[name] = (arguments, keywords)
            return result

        return build


DATASET: Any = SimpleNamespace(
    path="/some",
    tokenizer=SimpleNamespace(vocab_size=257, fingerprint="tokenizer", special_tokens=False, chat=None),
    has_unscored=False,
    manifest=SimpleNamespace(content_fingerprint="tokens"),
)
READ = (DataRead("/some", "tokens"),)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    parts = Parts()
    results = {
        "open_blend": [DATASET],
        "build_train_dataset": "training data",
        "HeldOutDataset": "held-out data",
        "build_chunks": "new chunks",
        "build_unset_chunks": "unset chunks",
        "wrap_chunks": ["wrapped chunks"],
        "build_optimizer": "optimizer",
        "restore_run": STATE,
        "_record_config": None,
    }
    for name, result in results.items():
        monkeypatch.setattr(run_module, name, parts.call(name, result))
    monkeypatch.setattr(run_module, "agreed_checkpoint", lambda folder, check_hashes: (parts.saved, []))
    monkeypatch.setattr(run_module, "done_by_main", lambda work: work())
    return parts


GROUPS: Any = SimpleNamespace(is_main=False, data_size=2, world_size=2, device=torch.device("cpu"))


def test_a_run_that_its_gpu_cannot_hold(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = SimpleNamespace(**{**vars(GROUPS), "device": torch.device("cuda", 0)})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1_000_000))
    with pytest.raises(ConfigError, match=r"on 2 ranks, and a GPU has 0\.001 GB"):
        open_run(CONFIG, RunFolder(tmp_path), on_gpu)
    assert "build_chunks" not in parts.calls


def test_a_run_that_starts(parts: Parts, tmp_path: Path) -> None:
    run = open_run(CONFIG, RunFolder(tmp_path), GROUPS)
    assert (run.state, run.last_saved_step) == (RunState().reading("tokenizer", READ), None)
    assert (run.train_data, run.held_out, run.chunks, run.optimizer) == (
        "training data",
        "held-out data",
        ["wrapped chunks"],
        "optimizer",
    )
    assert parts.calls["open_blend"] == ((CONFIG.data.datasets,), {})
    assert parts.calls["build_train_dataset"] == (
        (CONFIG.data.datasets,),
        {
            "sequence_length": 32,
            "num_samples": 160,
            "seed": 3,
            "tokenizer": run.tokenizer,
            "cache_dir": tmp_path / "data_cache",
            "shuffle": "documents",
            "separate_documents": False,
        },
    )
    assert parts.calls["HeldOutDataset"] == ((CONFIG.data.datasets, 32, 5), {"separate_documents": False})
    assert parts.calls["build_chunks"] == ((CONFIG, GROUPS), {"vocab_size": 257})
    assert parts.calls["wrap_chunks"] == (("new chunks", CONFIG, GROUPS), {})
    assert parts.calls["build_optimizer"] == ((CONFIG, ["wrapped chunks"], GROUPS), {})
    # 257 ids are padded to 272.
    assert run.flops_per_token == training_flops_per_token(replace(CONFIG.model, vocab_size=272), 32)
    assert parts.calls["_record_config"] == ((run,), {})
    assert not {"restore_run", "build_unset_chunks"} & parts.calls.keys()
    assert (run.num_microbatches, run.tokens_per_step) == (2, 256)


def test_a_run_that_goes_on(parts: Parts, tmp_path: Path) -> None:
    """Fourteen steps are left, whatever the batch was before."""
    parts.saved = saved_with(CONFIG)
    config = replace(CONFIG, data=replace(CONFIG.data, seed=8), model=CONFIG.model)
    run = open_run(config, RunFolder(tmp_path), GROUPS)
    assert (run.state, run.last_saved_step) == (STATE.reading("tokenizer", READ), 6)
    _, data = parts.calls["build_train_dataset"]
    assert (data["num_samples"], data["seed"]) == (100 + 14 * 8, 8)
    assert parts.calls["restore_run"] == (
        (parts.saved, ["wrapped chunks"], "optimizer"),
        {"trained": ALL, "tables_every": 1, "with_moments": True},
    )
    assert parts.calls["build_unset_chunks"] == ((config, GROUPS), {"vocab_size": 257})
    assert "build_chunks" not in parts.calls


def test_a_run_that_has_gone_further_than_now_asked_for_needs_what_it_has_read(parts: Parts, tmp_path: Path) -> None:
    parts.saved = saved_with(CONFIG)
    open_run(replace(CONFIG, train=replace(CONFIG.train, num_steps=4)), RunFolder(tmp_path), GROUPS)
    assert parts.calls["build_train_dataset"][1]["num_samples"] == 100


def test_a_checkpoint_of_another_run_is_refused_before_anything_is_built(parts: Parts, tmp_path: Path) -> None:
    parts.saved = saved_with(replace(CONFIG, seed=99))
    with pytest.raises(CheckpointError, match="seed: 99 -> 3"):
        open_run(CONFIG, RunFolder(tmp_path), GROUPS)
    assert set(parts.calls) == {"open_blend"}


def test_a_checkpoint_of_other_data_is_refused_before_anything_is_built(parts: Parts, tmp_path: Path) -> None:
    parts.saved = saved_with(CONFIG, STATE.reading("tokenizer", (DataRead("/other", "other tokens"),)))
    with pytest.raises(DataError, match="the run was trained on /other"):
        open_run(CONFIG, RunFolder(tmp_path), GROUPS)
    assert set(parts.calls) == {"open_blend"}


def test_the_vocabulary_may_be_larger_than_the_tokenizers(parts: Parts, tmp_path: Path) -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, vocab_size=1000))
    run = open_run(config, RunFolder(tmp_path), GROUPS)
    assert parts.calls["build_chunks"][1] == {"vocab_size": 1000}
    assert run.flops_per_token == training_flops_per_token(replace(config.model, vocab_size=1008), 32)


# Records


@pytest.mark.parametrize("is_main", [True, False])
def test_the_first_rank_writes_the_configuration_and_all_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool
) -> None:
    log: list[str] = []
    monkeypatch.setattr(run_module, "save_tokenizer", lambda tokenizer, path: log.append(f"{tokenizer} {path.name}"))
    monkeypatch.setattr(run_module, "barrier", lambda: log.append("barrier"))
    run: Any = SimpleNamespace(
        config=CONFIG,
        groups=SimpleNamespace(is_main=is_main),
        folder=RunFolder(tmp_path / "run"),
        tokenizer="tokenizer",
    )
    run_module._record_config(run)
    assert log == (["tokenizer tokenizer", "barrier"] if is_main else ["barrier"])
    assert run.folder.path.exists() == is_main
    if is_main:
        assert load_config(run.folder.config) == CONFIG
        assert [path.name for path in run.folder.path.iterdir()] == ["config.yaml"]


# A trained model


def test_a_model_is_opened_on_its_own_layout_or_another() -> None:
    config = replace(CONFIG, parallel=ParallelConfig(tensor=2, pipeline=2))
    saved = saved_with(config)
    assert saved_run_module.saved_config(saved, None) == config
    other = ParallelConfig(context=2)
    assert saved_run_module.saved_config(saved, other) == replace(config, parallel=other)


def test_a_restored_model_has_the_weights_and_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    chunks = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    config = replace(CONFIG, model=replace(CONFIG.model, vocab_size=300))

    def build(*arguments: Any, **keywords: Any) -> Any:
        log.append((arguments, keywords))
        return chunks

    monkeypatch.setattr(restore_module, "build_unset_chunks", build)
    monkeypatch.setattr(restore_module, "load_weights", lambda path, found: log.append((path, found)))
    tokenizer: Any = SimpleNamespace(vocab_size=257, special_tokens=False, chat=None)
    assert restore_module.restore_model(config, Path("checkpoint"), tokenizer, GROUPS) == chunks
    assert log == [((config, GROUPS), {"vocab_size": 300, "fetch_rows": None}), (Path("checkpoint"), chunks)]
    assert not any(chunk.training for chunk in chunks)


def test_the_newest_checkpoint_or_that_of_a_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, newest = RunFolder(tmp_path), saved_with(CONFIG)
    monkeypatch.setattr(
        saved_run_module,
        "newest_complete",
        lambda path, before, damage: (newest if path == folder.checkpoints else None, []),
    )
    monkeypatch.setattr(saved_run_module, "read_state", lambda path: path)
    monkeypatch.setattr(saved_run_module, "_damage", lambda saved, with_optimizer: [])
    for step in (12, 0):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    assert saved_run_module.find_checkpoint(folder, None) is newest
    assert saved_run_module.find_checkpoint(folder, 12) == tmp_path / "checkpoints" / "step_00000012"
    assert saved_run_module.find_checkpoint(folder, 0) == tmp_path / "checkpoints" / "step_00000000"
    monkeypatch.setattr(saved_run_module, "newest_complete", lambda path, before, damage: (None, []))
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        saved_run_module.find_checkpoint(folder, None)
    with pytest.raises(CheckpointError, match="no such run folder"):
        saved_run_module.find_checkpoint(RunFolder(tmp_path / "none"), None)


@pytest.mark.parametrize("is_port_there", [False, True])
def test_variables_of_ranks_that_contradict_each_other_are_told(
    monkeypatch: pytest.MonkeyPatch, is_port_there: bool
) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"} | (
        {"MASTER_PORT": "29500"} if is_port_there else {}
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="LOCAL_RANK is not set" if is_port_there else "MASTER_PORT is not"):
        saved_run_module.ranks_were_started()


def test_the_number_of_microbatches_is_of_one_rank() -> None:
    nothing: Any = None
    for data_size, expected in ((1, 4), (2, 2), (4, 1)):
        groups: Any = SimpleNamespace(data_size=data_size)
        run = Run(CONFIG, nothing, groups, nothing, nothing, nothing, nothing, nothing, RunState(), 1.0)
        assert run.num_microbatches == expected
