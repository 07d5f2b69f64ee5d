"""Every way in which a configuration can be wrong, and the message it gets."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import pytest

from megamem.families.registry import FAMILIES
from pretrain.config import source
from pretrain.config.keys import all_keys, nearest_keys
from pretrain.config.loader import build, from_dict
from pretrain.config.schema import LoggingConfig, RunConfig
from pretrain.config.source import Layer, _set, from_plain
from pretrain.config.stages import load_config
from pretrain.errors import ConfigError
from tests.plain_config import parse_config
from tests.rotation import in_rotation


def refusal(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The message for a file of that text, with the file's name shortened."""
    path = folder / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(folder) + "/", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # unknown keys
        ("seed: 1\nlr: 3", "a.yaml:2: unknown key lr: did you mean optimizer.lr?"),
        ("optimizer:\n  lrr: 3", "a.yaml:2: unknown key optimizer.lrr: did you mean optimizer.lr?"),
        (
            "train:\n  value_lr_multiplier: 3",
            "a.yaml:2: unknown key train.value_lr_multiplier: did you mean optimizer.value_lr_multiplier?",
        ),
        (
            "checkpoint: {every_step: 3}",
            "a.yaml:1: unknown key checkpoint.every_step: did you mean checkpoint.every_steps?",
        ),
        ("optimiser: {lr: 3}", "a.yaml:1: unknown key optimiser: did you mean optimizer?"),
        (
            "model: {memory: {kind: ultramem_v2, sharing: {mode: ring}}}",
            "a.yaml:1: unknown key model.memory.sharing.mode: model.memory.sharing has pattern, group, window",
        ),
        (
            "data: {datasets: [{path: x}, {pth: y, path: z}]}",
            "a.yaml:1: unknown key data.datasets.1.pth: did you mean data.datasets.1.path?",
        ),
        (
            "optimizer.lr: 3",
            "a.yaml:1: unknown key 'optimizer.lr': in a file, write optimizer as a section and nest the rest",
        ),
        # wrong types
        ("optimizer:\n  lr: fast", "a.yaml:2: optimizer.lr is 'fast' (text), expected a number"),
        ("optimizer: {lr: true}", "a.yaml:1: optimizer.lr is true (true/false), expected a number"),
        ("optimizer: {lr: null}", "a.yaml:1: optimizer.lr is null, expected a number"),
        ("optimizer: {lr: [1]}", "a.yaml:1: optimizer.lr is a list, expected a number"),
        ("optimizer: {lr: .nan}", "a.yaml:1: optimizer.lr is nan, expected a finite number"),
        ("optimizer: {lr: -.inf}", "a.yaml:1: optimizer.lr is -inf, expected a finite number"),
        ("optimizer: {lr: 1e999}", "a.yaml:1: optimizer.lr is inf, expected a finite number"),
        (f"optimizer: {{lr: 1{'0' * 400}}}", f"a.yaml:1: optimizer.lr is 1{'0' * 39}, expected a finite number"),
        ("optimizer: {lr: '1'}", "a.yaml:1: optimizer.lr is '1' (text), expected a number"),
        ("train: {num_steps: 2.5}", "a.yaml:1: train.num_steps is 2.5 (a number), expected a whole number"),
        ("train: {num_steps: true}", "a.yaml:1: train.num_steps is true (true/false), expected a whole number"),
        ("train: {num_steps: '3'}", "a.yaml:1: train.num_steps is '3' (text), expected a whole number"),
        (
            "evaluation: {max_sequences: all}",
            "a.yaml:1: evaluation.max_sequences is 'all' (text), expected a whole number, or null",
        ),
        ("logging: {tensorboard: yes}", "a.yaml:1: logging.tensorboard is 'yes' (text), expected true or false"),
        ("logging: {tensorboard: 1}", "a.yaml:1: logging.tensorboard is 1 (a number), expected true or false"),
        ("name: 12", "a.yaml:1: name is 12 (a number), expected text: put it in quotes"),
        ("name:", "a.yaml:1: name is null, expected text"),
        ("model: 3", "a.yaml:1: model is 3 (a number), expected a mapping of keys"),
        ("model:", "a.yaml:1: model is null, expected a mapping of keys"),
        (
            "model: {memory: {placement: {blocks: [0, 1.5]}}}",
            "a.yaml:1: model.memory.placement.blocks.1 is 1.5 (a number), expected a whole number",
        ),
        ("data: {datasets: x}", "a.yaml:1: data.datasets is 'x' (text), expected a list"),
        ("data: {datasets: [x]}", "a.yaml:1: data.datasets.0 is 'x' (text), expected a mapping of keys"),
        ("data: {datasets: [{weight: 1}]}", "a.yaml:1: data.datasets.0.path is missing: it has no default"),
        # choices
        (
            "optimizer: {schedule: cosin}",
            "a.yaml:1: optimizer.schedule is 'cosin' (text), expected one of constant, cosine, wsd: did you mean cosine?",
        ),
        (
            "optimizer: {schedule: 3}",
            "a.yaml:1: optimizer.schedule is 3 (a number), expected one of constant, cosine, wsd",
        ),
        ("train: {recompute: null}", "a.yaml:1: train.recompute is null, expected one of none, full, selective"),
        ("train: {recompute: {}}", "a.yaml:1: train.recompute is a mapping, expected one of none, full, selective"),
        # limits
        ("model:\n  memory:\n    top_k: 0", "a.yaml:3: model.memory.top_k is 0: it must be at least 1"),
        ("train: {num_steps: 0}", "a.yaml:1: train.num_steps is 0: it must be at least 1"),
        ("parallel: {tensor: -1}", "a.yaml:1: parallel.tensor is -1: it must be at least 1"),
        ("optimizer: {lr: 0}", "a.yaml:1: optimizer.lr is 0: it must be above 0"),
        ("optimizer: {warmup_steps: -1e3}", "a.yaml:1: optimizer.warmup_steps is -1000.0: it must not be negative"),
        ("optimizer: {value_lr: -1e-3}", "a.yaml:1: optimizer.value_lr is -0.001: it must not be negative"),
        ("optimizer: {beta2: 1}", "a.yaml:1: optimizer.beta2 is 1: it must be below 1"),
        (
            "optimizer: {warmup_start: 1.5}",
            "a.yaml:1: optimizer.warmup_start is 1.5: it must be at most 1; it is a share of optimizer.lr",
        ),
        (
            "seed: 2147483648",
            "a.yaml:1: seed is 2147483648: it must be below 2147483648; seeds of ranks and layers are derived by adding to it, and have 31 bits",
        ),
        (
            "data:\n  datasets:\n  - path: x\n  - {path: y, weight: 0}",
            "a.yaml:4: data.datasets.1.weight is 0: it must be above 0; remove the entry to leave it out",
        ),
        (
            "model: {moe: {z_loss_weight: -1}}",
            "a.yaml:1: model.moe.z_loss_weight is -1: it must not be negative; 0 turns it off",
        ),
        # YAML
        ("seed: 1\nname: x\nseed: 2", "a.yaml:3: the key seed is given twice (first at a.yaml:1): remove one"),
        (
            "seed: [1",
            "a.yaml:1 is not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
        ),
        (
            "a: 1\n--- \nb: 1",
            "a.yaml:2 is not valid YAML: expected a single document in the stream, but found another document",
        ),
        (
            "seed: !!python/name:os.system x",
            "a.yaml:1: the YAML tag tag:yaml.org,2002:python/name:os.system means nothing in a configuration: remove it",
        ),
        ("seed: !mine [1]", "a.yaml:1: the YAML tag !mine means nothing in a configuration: remove it"),
        ("seed: !!int x", "a.yaml:1: 'x' cannot be read as a YAML int"),
        ("? [a]\n: 1", "a.yaml:1: a key must be a name, not a list or a mapping"),
        ("data: &d\n  datasets: [*d]", "a.yaml:1: an alias refers to a value that contains it"),
        (
            "a: &a [1, 2]\nseed:\n  <<: *a",
            "a.yaml:3: YAML's merge key << is not read here: name a file to build on with `base:`, or write the keys out",
        ),
        ("a: " + 3000 * "[", "a.yaml is nested too deeply for a configuration: are all brackets closed?"),
        (
            "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]\n" for i in range(1, 30)),
            "a.yaml unfolds to more than 100,000 values, which no configuration has: its aliases (*name) repeat each other",
        ),
        ("- 1", "a.yaml holds a list: a configuration is a mapping of keys"),
        ("", "a.yaml holds no keys: a configuration is a YAML mapping such as `model: {num_layers: 4}`"),
        (
            "# only a comment\n",
            "a.yaml holds no keys: a configuration is a YAML mapping such as `model: {num_layers: 4}`",
        ),
        (b"\xff\xfe\x00", "a.yaml is not a configuration: it is not UTF-8 text (invalid start byte)"),
        (
            "seed: \x00",
            'a.yaml is not valid YAML: unacceptable character #x0000: special characters are not allowed in "<unicode string>", position 6',
        ),
        # bases
        ("base: 3", "a.yaml:1: base is 3 (a number), expected the path of a configuration file or a list of them"),
        ("base: [a.yaml, null]", "a.yaml:1: base is null, expected the path of a configuration file or a list of them"),
        ("base: b.yaml", "there is no configuration file b.yaml (the base of a.yaml): did you mean a.yaml?"),
        ("base: a.yaml", "the bases of a.yaml form a cycle: a.yaml -> a.yaml. Remove one `base:`"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert refusal(tmp_path, text) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=3", "override lr=3: unknown key lr: did you mean optimizer.lr?"),
        ("optimizer.lr", "the override 'optimizer.lr' is not of the form key=value, as in optimizer.lr=3e-4"),
        ("=3", "the override '=3' is not of the form key=value, as in optimizer.lr=3e-4"),
        ("optimizer..lr=3", "the override 'optimizer..lr=3' is not of the form key=value, as in optimizer.lr=3e-4"),
        (
            "seed=[1",
            "override seed=[1 is not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
        ),
        (
            "data.datasets.0.path=/corpora/web #2",
            "the override 'data.datasets.0.path=/corpora/web #2' ends before '#2', which is a comment in YAML: put the "
            "value in quotes that the shell leaves, as in 'data.datasets.0.path=\"...\"'",
        ),
        ("optimizer.lr=fast", "override optimizer.lr=fast: optimizer.lr is 'fast' (text), expected a number"),
        ("optimizer.lr.x=1", "override optimizer.lr.x=1: optimizer.lr is a mapping, expected a number"),
        (
            "data.datasets.1.path=x",
            "override data.datasets.1.path=x: data.datasets has 0 elements: use data.datasets.0 to append one, or a number below it",
        ),
        (
            "base=b.yaml",
            "override base=b.yaml: base names the file below this one: it can only stand at the top of a configuration file",
        ),
        ("model.memory.top_k=0", "override model.memory.top_k=0: model.memory.top_k is 0: it must be at least 1"),
    ],
)
def test_a_wrong_override(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, "seed: 1", override) == message


@pytest.mark.parametrize(
    ("text", "key", "section"),
    [("logging: {qqq: 3}", "logging.qqq", "logging"), ('"%%": {seed: 1}', "%%", "the configuration")],
)
def test_an_unknown_key_unlike_any_other(tmp_path: Path, text: str, key: str, section: str) -> None:
    cls = LoggingConfig if section == "logging" else RunConfig
    names = ", ".join(field.name for field in dataclasses.fields(cls))
    assert refusal(tmp_path, text) == f"a.yaml:1: unknown key {key}: {section} has {names}"


def test_a_list_wants_a_number(tmp_path: Path) -> None:
    assert refusal(tmp_path, "data: {datasets: [{path: x}]}", "data.datasets.path=y") == (
        "override data.datasets.path=y: data.datasets is a list: name an element by its number, as in data.datasets.0.path, "
        "or replace all of it with data.datasets=[...]"
    )


def test_a_cycle_shows_the_chain(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("base: c.yaml")
    (tmp_path / "c.yaml").write_text("base: a.yaml")
    message = refusal(tmp_path, "base: b.yaml")
    assert message == "the bases of a.yaml form a cycle: a.yaml -> b.yaml -> c.yaml -> a.yaml. Remove one `base:`"


def test_an_error_in_a_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("seed: 1\noptimizer: {lrr: 1}")
    assert refusal(tmp_path, "base: b.yaml\nname: x").startswith("b.yaml:2: unknown key optimizer.lrr")


def test_a_refusal_names_the_places_of_the_keys_it_mentions(tmp_path: Path) -> None:
    message = refusal(tmp_path, "model:\n  num_layers: 2\n  hidden_size: 30\n  num_attention_heads: 4")
    assert message == (
        "a.yaml:2: model.hidden_size is 30, which num_attention_heads = 4 does not divide: change one, or set model.head_dim "
        "(hidden_size: a.yaml:3, num_attention_heads: a.yaml:4)"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file .*/nothing/here.yaml$"):
        load_config(tmp_path / "nothing" / "here.yaml")
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*: Is a directory"):
        load_config(tmp_path)


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    message = refusal(
        tmp_path, "optimizer: {lrr: 1, beta1: x}\nmodel: {num_layers: 0}\ndata: {datasets: [{}]}", "seed=x"
    )
    assert message.splitlines()[0] == "5 problems in the configuration:"
    for part in (
        "lrr",
        "optimizer.beta1",
        "model.num_layers is 0",
        "data.datasets.0.path is missing",
        "override seed=x: seed",
    ):
        assert part in message


def test_mappings_name_their_source() -> None:
    with pytest.raises(ConfigError, match=r"^step 5: unknown key sed: did you mean seed\?$"):
        from_dict({"sed": 1}, "step 5")
    with pytest.raises(ConfigError, match=r"^the configuration: the key 3 is not text$"):
        parse_config({3: 1}, RunConfig)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"^here: the configuration is 3 \(a number\), expected a mapping of keys$"):
        parse_config(3, RunConfig, "here")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^the configuration: a value of type set cannot stand in a configuration$"):
        parse_config({"seed": {1}}, RunConfig)


def test_no_more_than_three_keys_are_suggested() -> None:
    assert nearest_keys("x", ["a.x", "b.x", "c.x", "d.x"]) == ["a.x", "b.x", "c.x"]
    assert nearest_keys("x", ["a.x", "b.x", "c.y"]) == ["a.x", "b.x"]


ODD_VALUES = (
    None,
    True,
    0,
    -1,
    2.5,
    10**400,
    math.inf,
    math.nan,
    "",
    "x",
    "\ud800",
    [],
    [1],
    [None],
    {},
    {"x": 1},
    [{}],
)


@pytest.mark.parametrize("memory", [None, *FAMILIES])
def test_whatever_stands_at_a_key_is_taken_or_refused_in_our_words(memory: str | None) -> None:
    base = from_plain({} if memory is None else {"model": {"memory": {"kind": memory}}}, "here", Layer.FILE)
    refusals, values = [], in_rotation(ODD_VALUES)
    # What a family's own keys say does not depend on the others, nor what others say on the family.
    for key in all_keys(RunConfig) if memory is None else all_keys(FAMILIES[memory].config, "model.memory."):
        segments = key.replace(".N.", ".0.").split(".")
        for value in (from_plain(value, "x", Layer.FILE) for value in values):
            try:
                build(RunConfig, _set(base, segments, 0, value))
            except ConfigError as error:
                refusals.append(str(error))
    assert len(refusals) * len(ODD_VALUES) > (500 if memory is None else 100) * len(values)
    assert [text for text in refusals if not re.match(r"(x|here|\d+ problems in the configuration):", text)] == []


@pytest.mark.parametrize("name", ["../../x", "/x", "..", "", "a\nb"])
def test_a_name_that_names_no_folder_does_not_load(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({"name": name}))
    with pytest.raises(ConfigError, match=re.escape(f"name is {name!r}: it names a folder, so use letters, digits")):
        load_config(path)


def test_only_files_of_bounded_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pipe = tmp_path / "a.yaml", tmp_path / "pipe"
    os.mkfifo(pipe)
    for base in (Path("/dev/zero"), pipe):
        path.write_text(f"base: {base}\n")
        with pytest.raises(ConfigError, match=f"{base} is no regular file"):
            load_config(path)
    with pytest.raises(ConfigError, match="/dev/zero is no regular file"):
        load_config(Path("/dev/zero"))
    monkeypatch.setattr(source, "MAX_BYTES", 20)
    path.write_text("name: a\n" + "#" * 12)
    assert load_config(path).name == "a"
    path.write_text("name: a\n" + "#" * 13)
    with pytest.raises(ConfigError, match="has more than 20 bytes, which no configuration has"):
        load_config(path)
