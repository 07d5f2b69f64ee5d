"""`model.size`: what one number stands for, what wins over it, and what it cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.loader import from_dict, to_dict, to_yaml
from pretrain.config.schema import RunConfig
from pretrain.config.size import LEAST, MOST, BackboneShape, Given, Size, run_of, shape_of
from pretrain.config.sized import FOLLOWING_KEYS
from pretrain.config.stages import load_config, load_stages, read_run
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.planning.counts.formulas import count_parameters
from tools import cli

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "configs" / "first_day.yaml"
TARGETS = st.floats(math.log(LEAST), math.log(MOST)).map(lambda power: min(MOST, max(LEAST, round(math.exp(power)))))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_stages(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("size", ["1m", "30m", "117.3M", "350m", " 1.3b ", "7b", "100b", "d7", "d12", "d60"])
def test_the_backbone_has_as_many_parameters_as_its_matrices(tmp_path: Path, size: str) -> None:
    config = load_config(write(tmp_path, "a.yaml", f"model: {{size: {size}, vocab_size: 1000}}"))
    model = config.model
    parts = count_parameters(model).parts
    shape = shape_of(
        Size.of_depth(int(size[1:]))
        if size[0] == "d"
        else Size(size, round(float(size.strip()[:-1]) * {"m": 1e6, "b": 1e9}[size.strip()[-1].lower()])),
        Given(),
    )
    assert shape.parameters == parts["attention"] + parts["ffn"]
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (
        shape.num_layers,
        shape.hidden_size,
        shape.ffn_hidden_size,
    )
    assert (model.num_attention_heads, model.query_groups, model.attention_head_dim) == (
        shape.num_attention_heads,
        shape.num_query_groups,
        shape.head_dim,
    )
    if size[0] == "d":
        assert model.num_layers == int(size[1:])
    validate(config, None, on_this_machine=False)


@settings(deadline=None)
@given(TARGETS)
def test_shapes_meet_their_target_and_suit_gpus(target: int) -> None:
    shape = shape_of(Size("x", target), Given())
    # Half of a step of the depth: a block of 3 or 4 in the smallest, of 7 from 10m on, two of 14 and more.
    assert abs(shape.parameters / target - 1) < (0.145 if target < 3e6 else 0.113 if target < 1e7 else 0.078)
    width, heads = shape.hidden_size, shape.num_attention_heads
    assert heads * shape.head_dim == width
    assert width % 64 == 0
    assert shape.ffn_hidden_size % 64 == 0
    if width >= 512:
        assert width % 128 == shape.ffn_hidden_size % 128 == 0
    if width >= 2048:
        assert heads % 8 == 0
        assert shape.num_query_groups == 8
        assert shape.ffn_hidden_size % 64 == 0
    assert 8 / 3 * 0.92 < shape.ffn_hidden_size / width < 8 / 3 * 1.08
    assert shape.num_layers % (1 if shape.num_layers < 12 else 2 if shape.num_layers < 32 else 4) == 0


@settings(deadline=None)
@given(TARGETS, TARGETS)
def test_larger_sizes_are_wider_with_larger_batches_and_lower_rates(one: int, other: int) -> None:
    small, large = (shape_of(Size("x", target), Given()) for target in sorted((one, other)))
    assert small.hidden_size <= large.hidden_size
    if max(one, other) > 1.3 * min(one, other):
        assert small.parameters < large.parameters
        below, above = run_of(small, Given()), run_of(large, Given())
        assert below.global_batch_size <= above.global_batch_size
        assert below.lr >= above.lr


@settings(deadline=None)
@given(TARGETS, st.sampled_from([128, 1000, 2048, 16384]))
def test_runs_follow_the_laws_that_they_cite(target: int, length: int) -> None:
    shape = shape_of(Size("x", target), Given())
    run = run_of(shape, Given(sequence_length=length))
    layers, width = shape.num_layers, shape.hidden_size
    tokens = 20 * shape.parameters
    # DeepSeek LLM, equations 1 and 2: 72 L D^2 of them are 6 per parameter.
    compute = (6 * shape.parameters + 12 * layers * width * length) * tokens
    assert run.lr == pytest.approx(0.3118 * compute**-0.1250, rel=0.05)
    wanted = 0.2920 * compute**0.3271 / length
    assert run.global_batch_size.bit_count() == 1
    assert run.global_batch_size == 1 or 2**-0.51 < run.global_batch_size / wanted < 2**0.51
    assert 0 <= run.num_steps * run.global_batch_size * length - tokens < run.global_batch_size * length
    assert run.warmup_steps == min(2000, run.num_steps // 4)
    assert run.min_lr == pytest.approx(run.lr / 10, rel=0.05)


def test_published_models_have_such_shapes() -> None:
    """Widths of GPT-3 (arXiv 2005.14165) by depth, the feed-forward of LLaMA-7B, and the width of its 13B."""
    for depth, width in ((12, 768), (32, 4096)):
        assert shape_of(Size.of_depth(depth), Given()).hidden_size == width
    assert shape_of(Size.of_depth(32), Given()).ffn_hidden_size == 11008
    assert shape_of(Size("13b", 13 * 10**9), Given()).hidden_size == 5120


def test_the_rate_is_about_the_one_that_was_searched_on_a_small_model() -> None:
    """docs/model.md: 128 steps of 16 sequences of 256 tokens; of 0.004, 0.008 and 0.016 the second was best."""
    dense = load_config(REPOSITORY / "lab" / "configs" / "compare" / "dense.yaml").model
    shape = BackboneShape(4, 128, 4, dense.query_groups, 32, dense.ffn_hidden_size)
    assert shape.parameters == pytest.approx(count_parameters(dense).core, rel=0.01)
    # Twenty tokens per parameter would be 28 times as many.
    tokens = 128 * 16 * 256
    searched = run_of(shape, Given(sequence_length=256)).lr * (20 * shape.parameters / tokens) ** 0.1250
    assert searched == pytest.approx(0.0085, rel=0.02)


def test_keys_beside_it_and_overrides_win_and_the_rest_keeps_to_them(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.yaml",
        "model: {size: 120m, ffn_hidden_size: 1111}\ntrain: {num_steps: 37}\noptimizer: {lr: 3.3e-4, schedule: constant}",
    )
    plain = load_config(write(tmp_path, "plain.yaml", "model: {size: 120m}"))
    config = load_config(path, ["train.sequence_length=512", "train.micro_batch_size=2"])
    assert config.model == replace(plain.model, ffn_hidden_size=1111)
    assert config.train.num_steps == 37
    assert config.optimizer.warmup_steps == 9
    # Nothing reads it under a constant schedule: dropped, as a base's is.
    assert config.optimizer.min_lr == RunConfig().optimizer.min_lr
    assert config.optimizer.lr == 3.3e-4
    # As many tokens in sequences of a quarter of the length.
    assert config.train.global_batch_size == 4 * plain.train.global_batch_size
    assert load_config(path, ["optimizer.schedule=cosine"]).optimizer.min_lr == 3.3e-5


def test_depth_and_width_follow_each_other(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "model: {size: 120m}")
    assert load_config(path, ["model.num_layers=24"]).model.hidden_size == 640
    assert load_config(path, ["model.hidden_size=512"]).model.num_layers == 36
    assert load_config(path, ["model.size=d10", "model.hidden_size=512"]).model.num_layers == 10


BASE = """\
model: {num_layers: 3, hidden_size: 96, num_attention_heads: 3, head_dim: 16, num_query_groups: 1, ffn_hidden_size: 200}
train: {num_steps: 5, global_batch_size: 12, sequence_length: 384, precision: bf16}
optimizer: {lr: 7.7e-3, warmup_steps: 1, min_lr: 1.0e-3, beta2: 0.99}
"""


def test_it_takes_the_place_of_what_a_base_says_and_of_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", BASE)
    above = write(tmp_path, "above.yaml", "base: base.yaml\nmodel: {size: 30m}")
    alone = write(tmp_path, "alone.yaml", "model: {size: 30m}\ntrain: {sequence_length: 384}")
    config, plain = load_config(above), load_config(alone)
    assert config.model == plain.model
    assert config.train == replace(plain.train, precision="bf16")
    assert config.optimizer == replace(plain.optimizer, beta2=0.99)
    # The command line is a file above the one that it names.
    assert load_config(tmp_path / "base.yaml", ["model.size=30m"]) == config
    assert load_config(tmp_path / "base.yaml", ["model.size=30m", "optimizer.lr=2e-3"]).optimizer.lr == 2e-3
    assert load_config(tmp_path / "base.yaml", ["optimizer.lr=2e-3", "model.size=30m"]).optimizer.lr == 2e-3
    assert load_config(tmp_path / "base.yaml", ["model.size=null"]) == load_config(tmp_path / "base.yaml")
    # Of several bases a later one is above an earlier one.
    write(tmp_path, "two.yaml", "base: [base.yaml, alone.yaml]")
    assert load_config(tmp_path / "two.yaml") == config


def test_another_size_over_one_keeps_what_stands_beside_the_first(tmp_path: Path) -> None:
    write(tmp_path, "sized.yaml", "model: {size: 120m}\noptimizer: {lr: 7.7e-4}\ntrain: {num_steps: 77}")
    above = write(tmp_path, "above.yaml", "base: sized.yaml\nmodel: {size: 30m}")
    config = load_config(above)
    assert config.model == load_config(write(tmp_path, "plain.yaml", "model: {size: 30m}")).model
    assert (config.optimizer.lr, config.train.num_steps) == (7.7e-4, 77)
    assert load_config(tmp_path / "sized.yaml", ["model.size=30m"]) == config


def test_what_a_run_stores_has_values_and_no_size(tmp_path: Path) -> None:
    config = load_config(EXAMPLE, ["model.size=30m", "optimizer.beta1=0.8"])
    assert load_config(write(tmp_path, "stored.yaml", to_yaml(config))) == config
    assert from_dict(to_dict(config)) == config
    assert "size" not in to_dict(config)["model"]
    with pytest.raises(
        ConfigError, match=r"model\.size fills keys where a configuration file is read.*model\.num_layers"
    ):
        from_dict(to_dict(config), overrides=["model.size=30m"])


def test_all_stages_have_the_model_and_its_rates(tmp_path: Path) -> None:
    text = "model: {size: 30m}\nstages:\n  - {name: a, num_steps: 3000}\n  - name: b\n    num_tokens: 4.0e8\n"
    path = write(tmp_path, "a.yaml", f"{text}    optimizer: {{lr: 5.0e-4}}\n    train: {{sequence_length: 4096}}\n")
    plain = load_config(write(tmp_path, "plain.yaml", "model: {size: 30m}"))
    first, second = load_stages(path)
    assert first.model == second.model == plain.model
    assert first.optimizer == plain.optimizer
    assert second.optimizer == replace(plain.optimizer, lr=5e-4)
    assert (first.train.num_steps, second.train.sequence_length) == (3000, 4096)
    assert first.train.global_batch_size == second.train.global_batch_size == plain.train.global_batch_size
    path.write_text(f"{text}    model: {{size: 120m}}\n")
    assert f"{path}:6: stages.1.model.size: all stages have one model" in error_of(path)


def test_options_without_effect_are_refused_as_without_it(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "model: {size: 30m}\noptimizer: {decay_steps: 3}")
    for overrides in ([], ["seed=3"]):
        assert "optimizer.decay_steps has no effect unless" in error_of(path, *overrides)


def test_parts_without_the_keys_that_follow_leave_them_out(tmp_path: Path) -> None:
    latents = load_config(write(tmp_path, "a.yaml", "model: {size: 3b, latent_attention: {latent_dim: 512}}"))
    assert latents.model.num_query_groups is None
    experts = load_config(write(tmp_path, "b.yaml", "model: {size: 30m, moe: {expert_ffn_hidden_size: 704}}"))
    assert load_config(write(tmp_path, "c.yaml", to_yaml(experts))) == experts


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("120", "model.size is 120 (a number), expected the parameters of the backbone, as in 120m or 1.3b, or its depth, as "
        "in d12: did you mean 120m?"),
        ("1.3e9", "did you mean 1.3b?"),
        ("12q", "model.size is '12q' (text), expected the parameters of the backbone"),
        ("12q", "did you mean 12m?"),
        ("-3m", "did you mean 3m?"),
        ("1,3b", "did you mean 1.3b?"),
        ("12d", "did you mean d12?"),
        ("1t", "model.size is 1t, and the rules reach from 1m to 100b: choose one between, or set model.num_layers"),
        ("999k", "model.size is 999k, and the rules reach from 1m to 100b"),
        ("d61", "model.size is d61, and the rules reach from d4 to d60"),
        ("d0", "model.size is 'd0' (text), expected"),
        ("large", "model.size is 'large' (text), expected"),
        ("true", "model.size is true (true/false), expected"),
        ("[30m]", "model.size is a list, expected"),
        ("{}", "model.size is a mapping, expected"),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, words: str) -> None:
    path = write(tmp_path, "a.yaml", f"name: x\nmodel:\n  size: {value}")
    assert error_of(path).startswith(f"{path}:3: model.size is ")
    assert words in error_of(path)
    path.write_text("name: x")
    assert cli.main(["config", "check", str(path), f"model.size={value}"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    # An override can mend a file.
    path.write_text(f"name: x\nmodel:\n  size: {value}")
    assert load_config(path, ["model.size=30m"]).model.hidden_size == 512


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ("num_layers: 8, hidden_size: 256", "model.num_layers 8 (FILE:2) and model.hidden_size 256 (FILE:2) nothing of the shape"),
        ("hidden_size: 8192", "with model.hidden_size 8192 (FILE:2) the nearest backbone has"),
        ("num_layers: 100000", "with model.num_layers 100000 (FILE:2) the nearest backbone has"),
        ("mup: {base_hidden_size: 128}", "model.mup (FILE:2) takes the one that was searched at its base_hidden_size: set optimizer.lr"),
        ("num_attention_heads: 5", "model.hidden_size is 896, which num_attention_heads = 5 does not divide"),
        ("num_attention_heads: 5", "hidden_size: FILE:3 (model.size: 120m)"),
        ("memory: {kind: tide, vocab_size: 77}", "set model.memory.value_dim: 896"),
        ("num_layers: 0", "model.num_layers is 0: it must be at least 1"),
        ("num_layers: true, hidden_size: .nan", "model.num_layers is true (true/false), expected a whole number"),
    ],
)  # fmt: skip
def test_keys_that_leave_it_no_meaning_are_refused(tmp_path: Path, beside: str, words: str) -> None:
    path = write(tmp_path, "a.yaml", f"model:\n  {{{beside},\n  size: 120m}}")
    assert words.replace("FILE", str(path)) in error_of(path)


def test_mup_takes_the_rate_that_is_set(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "model: {size: 120m, mup: {base_hidden_size: 128}}\noptimizer: {lr: 8.0e-3}")
    assert load_config(path).optimizer.min_lr == 8e-4


def test_a_depth_is_set_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "model: {size: d12, num_layers: 4}")
    assert f"model.num_layers 4 ({path}:1) is set too, which is the depth: remove one of the two" in error_of(path)


@pytest.mark.parametrize("key", ["model.sise", "size"])
def test_a_misspelt_size_is_recognised(tmp_path: Path, key: str) -> None:
    assert f"unknown key {key}: did you mean model.size?" in error_of(
        write(tmp_path, "a.yaml", "seed: 3"), f"{key}=30m"
    )


def test_the_example_can_run() -> None:
    config = load_config(EXAMPLE)
    for num_ranks in (1, 2, 8):
        validate(config, num_ranks, on_this_machine=False)
    assert cli.main(["config", "check", str(EXAMPLE), "--elsewhere", "--ranks", "8", "--gpu-memory", "80"]) == 0


def test_show_says_what_followed_and_where_values_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.yaml", "model:\n  size: 30m\ntrain: {sequence_length: 512}")
    words = ["config", "show", str(path), "optimizer.lr=1e-3"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert f"# from model.size 30m ({path}:2):\n#   model.num_layers: 9\n#   model.hidden_size: 512\n" in shown
    assert "#   optimizer.min_lr: 0.0001\n" in shown
    assert f"#   train.sequence_length: as set ({path}:3)\n" in shown
    assert "#   optimizer.lr: as set (override optimizer.lr=1e-3)\n" in shown
    for flags in (["--origins"], ["--origins", "--explain"]):
        assert cli.main([*words, *flags]) == 0
        shown = capsys.readouterr().out
        assert f"  hidden_size: 512  # {path}:2 (model.size: 30m)\n" in shown
        assert f"  sequence_length: 512  # {path}:3\n" in shown
        assert "  lr: 0.001  # override optimizer.lr=1e-3\n" in shown
        assert "seed: 1  # default\n" in shown
        assert load_config(write(tmp_path, "shown.yaml", shown)) == load_config(path, ["optimizer.lr=1e-3"])


def test_show_tells_the_origins_of_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model: {size: 30m}\nstages:\n  - {name: a, num_steps: 3000}\n  - name: b\n    num_steps: 2000\n"
    path = write(tmp_path, "a.yaml", f"{text}    optimizer: {{lr: 5.0e-4}}\n")
    assert cli.main(["config", "show", str(path), "--origins", "--stage", "b"]) == 0
    shown = capsys.readouterr().out
    assert f"  lr: 0.0005  # {path}:6\n" in shown
    assert f"  num_steps: 5000  # {path}:4\n" in shown
    assert f"  min_lr: 0.00022  # {path}:1 (model.size: 30m)\n" in shown
    assert cli.main(["config", "show", str(path), "--origins"]) == 2
    assert "--origins goes through one configuration" in capsys.readouterr().err


def test_keys_and_the_page_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", "--keys"]) == 0
    assert "\nmodel.size: str | null, default null\n" in capsys.readouterr().out
    assert cli.main(["config", "sizes"]) == 0
    table = capsys.readouterr().out
    assert table in (REPOSITORY / "docs" / "model.md").read_text(encoding="utf-8")
    assert cli.main(["config", "sizes", "5q"]) == 2
    assert "the argument 5q: model.size is '5q' (text)" in capsys.readouterr().err


def test_a_plan_is_written_with_the_size_that_it_was_made_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for base in (write(tmp_path, "base.yaml", BASE), EXAMPLE):
        overrides = ["model.size=30m", "model.vocab_size=999"]
        written = tmp_path / f"plan_{base.name}"
        words = [
            "plan",
            str(base),
            *overrides,
            "--gpus",
            "2",
            "--gpu",
            "h100-80g",
            "--write",
            str(written),
            "--count",
            "0",
        ]
        assert cli.main(words) == 0, capsys.readouterr().err
        planned, wanted = load_config(written), load_config(base, overrides)
        assert planned.model == wanted.model
        assert planned.train.num_steps == wanted.train.num_steps
        assert planned.optimizer.lr == wanted.optimizer.lr


def test_every_key_that_follows_is_one_of_the_run() -> None:
    source = read_run(EXAMPLE, ["model.size=3b"])
    assert source.filled is not None
    plain = to_dict(source.stages()[0])
    for key, value in source.filled.keys.items():
        section, name = key.split(".")
        assert plain[section][name] == value
    assert source.filled.keys.keys() == set(FOLLOWING_KEYS.values()) - {"model.head_dim"}
