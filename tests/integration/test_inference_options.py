"""Options of `megamem eval` and `megamem generate` in pairs, against the model's forward pass alone."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from commands import TINY, MadeOnce, Megamem
from plain_inference import (
    Draw,
    HeldOut,
    Sum,
    compressed_bits_per_byte,
    plain_losses,
    plain_model,
    plain_nats,
    plain_text,
)

from megamem.model import MemoryGPTModel
from pretrain.config.schema import ParallelConfig
from pretrain.data.prepare import prepare
from pretrain.data.sources import PairFields
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.engine.session import relaid, session
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, saved_config
from tests.deadline import launch_within
from tests.pairs import Case, pairwise
from tests.rotation import in_rotation, in_turn
from tools.cli import main

T = TypeVar("T")

LENGTH = 32
KINDS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "tide": ({"value_dim": 32, "num_tables": 2}, {"tensor": 2, "memory": 2}),
    "midus": ({"num_heads": 4, "num_keys": 8, "value_dim": 16, "placement": {"blocks": [1]}}, {}),
}
STEPS = {"v2": (80, 160), "tide": (8, 16), "midus": (8, 16)}
# Of as many lengths as there are, so that windows end anywhere in them.
TEXTS = [f"def part_{number}({'a, ' * number}b):\n    return a * {number} + b\n" for number in range(9)]
QUESTIONS = [(f"{a} times {b} is ", f"{a * b}, says Émile\n") for a in (3, 14) for b in (15, 92, 6)]


@pytest.fixture(scope="module")
def runs(made_once: MadeOnce, megamem: Megamem, trained: Path, corpus: Path) -> dict[str, Path]:
    """A run of each kind of inference: rows that tokens retrieve, rows that they address, values that heads expand."""

    def make(folder: Path) -> None:
        for name, texts in (("texts", TEXTS), ("others", map(str.upper, TEXTS))):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        (folder / "questions.jsonl").write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in QUESTIONS))
        others, texts = [str(folder / "others.jsonl")], [str(folder / "texts.jsonl")]
        prepare(others, folder / "small", ByteTokenizer(), validation_inputs=texts, num_workers=1)
        # Of a data set that holds nothing out, all is evaluated.
        questions = [str(folder / "questions.jsonl")]
        pair = PairFields("q", "a")
        prepare(questions, folder / "asked", ByteTokenizer(), pair=pair, validation_fraction=0, num_workers=1)
        for kind, (memory, parallel) in KINDS.items():
            config = {
                **TINY,
                "model": {**TINY["model"], "num_layers": 2, "num_query_groups": 4, "memory": {"kind": kind, **memory}},
                "optimizer": {"lr": 2e-2},
                "train": {**TINY["train"], "num_steps": STEPS[kind][1]},
                "checkpoint": {"every_steps": STEPS[kind][0]},
                "data": {"datasets": [{"path": str(corpus)}]},
                "evaluation": {"datasets": [{"path": str(folder / "small")}]},
                "parallel": parallel,
            }
            (folder / f"{kind}.yaml").write_text(yaml.safe_dump(config))
            result = megamem("train", folder / f"{kind}.yaml", "--run-dir", folder / kind)
            assert result.code == 0, result.output
            for step in STEPS[kind] if kind == "tide" else ():
                output = folder / f"tables_{step}"
                made = megamem("tables", folder / kind, "--step", step, "--form", "int4", "--output", output)
                assert made.code == 0, made.output

    folder = made_once("inference", make)
    return {"v2": trained, "tide": folder / "tide", "midus": folder / "midus", "folder": folder}


def said(words: list[str]) -> tuple[str, str]:
    """Output and errors of a command on these ranks, which must succeed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    assert code == 0, (words, err.getvalue())
    return out.getvalue(), err.getvalue()


def answers(runs: Mapping[str, Path], cases: list[Case], words: Callable[[Case], list[str]]) -> list[tuple[str, str]]:
    """Outputs and errors of commands, one after the other on one set of ranks for each number of them; they meet once."""
    config = saved_config(find_checkpoint(RunFolder(runs["v2"]), None), ParallelConfig())
    found: dict[int, tuple[str, str]] = {}
    for num_ranks in (1, 2):
        here = [number for number, case in enumerate(cases) if ranks_of(case) == num_ranks]

        def all_of_them(here: list[int] = here) -> list[tuple[str, str]]:
            with session(config) as groups, pytest.MonkeyPatch.context() as patch:
                patch.setattr("pretrain.engine.session.session", lambda config: nullcontext(relaid(config, groups)))
                return [said(words(cases[number])) for number in here]

        first, *_ = launch_within(all_of_them, num_ranks, timeout_s=300)
        found |= dict(zip(here, first, strict=True))
    return [found[number] for number in range(len(cases))]


def ranks_of(case: Case) -> int:
    if case["ranks"] == "own":
        return 2 if case["run"] == "tide" else 1
    return int(case["ranks"])


def with_models(runs: Mapping[str, Path], use: Callable[[Load], T]) -> T:
    """The result of `use` on a rank, called with a function that loads models."""
    config = saved_config(find_checkpoint(RunFolder(runs["v2"]), None), ParallelConfig())

    def on_a_rank() -> T:
        with session(config) as groups:

            @cache
            def load(kind: str, step: str, *keys: str, tables: str = "full") -> MemoryGPTModel:
                return plain_model(groups, runs[kind], step_of(kind, step), *keys, tables=tables)

            return use(load)

    (result,) = launch_within(on_a_rank, 1, timeout_s=300)
    return result


def step_of(kind: str, step: str) -> int:
    return STEPS[kind][step == "newest"]


def step_words(case: Case) -> list[str]:
    return [] if case["step"] == "newest" else ["--step", str(step_of(case["run"], "first"))]


# --- eval

EVALUATED = {
    "run": ("v2", "tide", "midus"),
    "step": ("newest", "first"),
    "ranks": ("1", "2", "own"),
    "data": ("own", "one", "two", "named"),
    "length": ("kept", "20", "48"),
    "batch": ("kept", "3"),
    "kernels": ("kept", "naive"),
    "rotary": ("kept", "base", "scaled"),
    "documents": ("joined", "separate"),
    "memory": ("on", "off", "ablated", "tables"),
    "output": ("json", "people"),
}
KEYS = {
    ("length", "20"): "train.sequence_length=20",
    ("length", "48"): "train.sequence_length=48",
    ("batch", "3"): "train.micro_batch_size=3",
    ("kernels", "naive"): "train.kernels=naive",
    ("rotary", "base"): "model.rotary_base=500",
    ("rotary", "scaled"): "model.rotary_scaling={kind: ntk, factor: 4}",
    ("documents", "separate"): "data.documents=separate",
}
FORMS = ("full", "int8")
Load = Callable[..., MemoryGPTModel]
"""From a run's name, `newest` or `first`, other keys and a form of its tables to its plain model."""


def no_evaluation(case: Mapping[str, str]) -> bool:
    return case.get("memory") == "tables" and case.get("run", "tide") != "tide"


def evaluation_words(case: Case, runs: Mapping[str, Path]) -> list[str]:
    small, asked = runs["folder"] / "small", runs["folder"] / "asked"
    return [
        "eval",
        str(runs[case["run"]]),
        *step_words(case),
        *{
            "own": [],
            "one": ["--data", str(small)],
            "two": ["--data", str(small), "--data", str(asked)],
            "named": [
                f"evaluation.datasets=[{{path: {asked}, name: a}}, {{path: {small}}}, {{path: {asked}, name: a}}]"
            ],
        }[case["data"]],
        *(["--own-layout"] if case["ranks"] == "own" else []),
        *{"on": [], "off": ["--without-memory"], "ablated": ["--ablate"], "tables": ["--tables", ",".join(FORMS)]}[
            case["memory"]
        ],
        *(["--json"] if case["output"] == "json" else []),
        *(KEYS[option] for option in case.items() if option in KEYS),
    ]


@in_turn(0)
def test_options_of_an_evaluation_hold_together(runs: dict[str, Path], corpus: Path) -> None:
    cases = in_rotation(pairwise(EVALUATED, no_evaluation))
    outputs = answers(runs, cases, lambda case: evaluation_words(case, runs))
    small = HeldOut("small", [(b"", text.encode()) for text in TEXTS])
    asked = HeldOut("asked", [(question.encode(), answer.encode()) for question, answer in QUESTIONS])
    again = HeldOut("a", asked.documents)

    by_data = {"one": [small], "two": [small, asked], "named": [again, small, again]}

    def judge(load: Load) -> None:
        for case, (out, _) in zip(cases, outputs, strict=True):
            sets = by_data.get(case["data"]) or ([HeldOut.on_disk(corpus)] if case["run"] == "v2" else [small])
            wanted = plain_evaluation(load, case, sets)
            compressed = compressed_bits_per_byte(sets)
            checkpoint = f"step_{step_of(case['run'], case['step']):08d}"
            if case["output"] == "json":
                judge_json(json.loads(out), wanted, compressed, checkpoint, str(case))
            else:
                judge_table(out, wanted, compressed, checkpoint, str(case))

    with_models(runs, judge)


def plain_evaluation(load: Load, case: Case, sets: list[HeldOut]) -> dict[str, dict[str, Sum]]:
    """Sums by domain, for each form of the tables or setting of the memory that is asked for."""
    keys = [KEYS["rotary", case["rotary"]]] if case["rotary"] != "kept" else []
    length = LENGTH if case["length"] == "kept" else int(case["length"])
    separate = case["documents"] == "separate"
    if case["memory"] == "tables":
        models = {form: load(case["run"], case["step"], *keys, tables=form) for form in FORMS}
        return {form: plain_losses(model, sets, length, separate=separate) for form, model in models.items()}
    model = load(case["run"], case["step"], *keys)
    settings = {"on": (True,), "off": (False,), "ablated": (True, False)}[case["memory"]]
    return {str(memory): plain_losses(model, sets, length, separate=separate, memory=memory) for memory in settings}


def judge_row(row: Mapping[str, Any], wanted: Mapping[str, Sum], case: str) -> None:
    whole = sum(wanted.values(), Sum())
    parts = [(row, whole)]
    if len(wanted) > 1:
        assert list(row["domains"]) == list(wanted), case
        parts += [(row["domains"][name], part) for name, part in wanted.items()]
    else:
        assert "domains" not in row, case
    for found, part in parts:
        assert found["validation_loss"] == pytest.approx(part.loss, rel=1e-5), case
        assert found["bits_per_byte"] == pytest.approx(part.bits_per_byte, rel=1e-5), case
        assert (found["validation_tokens"], found["validation_bytes"]) == (part.num_tokens, part.num_bytes), case


def judge_json(
    said: Mapping[str, Any],
    wanted: Mapping[str, Mapping[str, Sum]],
    compressed: Mapping[str, float],
    checkpoint: str,
    case: str,
) -> None:
    assert Path(said["checkpoint"]).name == checkpoint, case
    if "tables" in said:
        assert list(said["tables"]) == list(wanted), case
        for form, sums in wanted.items():
            judge_row(said["tables"][form], sums, case)
        return
    first, *ablated = wanted.values()
    judge_row(said, first, case)
    assert ("without_memory" in said) == bool(ablated), case
    for sums in ablated:
        judge_row(said["without_memory"], sums, case)
    for name, bits in compressed.items():
        assert said[f"{name} bits_per_byte"] == pytest.approx(bits), case


def judge_table(
    out: str,
    wanted: Mapping[str, Mapping[str, Sum]],
    compressed: Mapping[str, float],
    checkpoint: str,
    case: str,
) -> None:
    """Figures of four digits behind the point, each in the line that says whose it is."""
    totals = {name: sum(sums.values(), Sum()) for name, sums in wanted.items()}
    head, *lines = out.splitlines()
    first = next(iter(totals.values()))
    assert checkpoint in head, case
    assert f"{first.num_tokens:,} held-out tokens" in head, case
    shown = {re.split(r"  +|: ", line.strip())[0]: numbers(line) for line in lines}
    if case_has_tables := "full" in wanted:
        expected = {form: [total.loss, total.loss - first.loss, total.bits_per_byte] for form, total in totals.items()}
        shown = {form: [shown[form][-4], shown[form][-3], shown[form][-1]] for form in wanted}
    else:
        assert f"({first.num_bytes:,} bytes)" in head, case
        assert numbers(head.partition(": ")[2])[0] == pytest.approx(first.loss, abs=6e-5), case
        names = {"True": "this model", "False": "this model without its memory"}
        expected = {names[memory]: [total.bits_per_byte] for memory, total in totals.items()}
        expected |= {name: [bits] for name, bits in compressed.items()}
    for name, figures in expected.items():
        assert shown[name][-len(figures) :] == pytest.approx(figures, abs=6e-5), (case, name)
    of_domains = {} if case_has_tables else next(iter(wanted.values()))
    for name in of_domains if len(of_domains) > 1 else ():
        figures = [figure for sums in wanted.values() for figure in (sums[name].loss, sums[name].bits_per_byte)]
        assert shown[name] == pytest.approx([*figures, of_domains[name].num_tokens], abs=6e-5), case


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"(?<![\w-])[-+]?\d[\d,]*(?:\.\d+)?", line)]


# --- eval --text

SCORED = {
    "run": ("v2", "tide", "midus"),
    "step": ("newest", "first"),
    "ranks": ("1", "2", "own"),
    "text": ("short", "long file"),
    "length": ("kept", "20"),
    "batch": ("kept", "3"),
    "memory": ("on", "off"),
    "output": ("json", "people"),
}
SCORED_TEXTS = {"short": 'x="\x1b[2J"\n', "long file": "naïve — 日本語 " * 9}
"""The long one has more tokens than a window of each length, and is cut within a character."""


def test_every_token_of_a_text_is_scored_on_every_layout(runs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(SCORED_TEXTS["long file"], encoding="utf-8")

    def words(case: Case) -> list[str]:
        text = ["--text", SCORED_TEXTS["short"]] if case["text"] == "short" else ["--text-file", str(file)]
        return [
            *("eval", str(runs[case["run"]]), *step_words(case), *text),
            *(["--own-layout"] if case["ranks"] == "own" else []),
            *(["--without-memory"] if case["memory"] == "off" else []),
            *(["--json"] if case["output"] == "json" else []),
            *(KEYS[option] for option in case.items() if option in KEYS),
        ]

    cases = in_rotation(pairwise(SCORED, lambda case: False))
    outputs = answers(runs, cases, words)

    def judge(load: Load) -> None:
        for case, (out, err) in zip(cases, outputs, strict=True):
            content = SCORED_TEXTS[case["text"]].encode()
            length = LENGTH if case["length"] == "kept" else int(case["length"])
            model = load(case["run"], case["step"])
            nats = plain_nats(model, content, length, memory=case["memory"] == "on")
            assert ("is read in windows of" in err) == (len(content) > length), case
            *lines, last = out.splitlines()
            if case["output"] == "json":
                rows, whole = [json.loads(line) for line in lines], json.loads(last)
                found = [row["logprob"] for row in rows]
                assert [row["token"] for row in rows] == list(content), case
                total, bits = whole["logprob"], whole["bits_per_byte"]
                assert (whole["tokens"], whole["bytes"]) == (len(content), len(content)), case
                assert Path(whole["checkpoint"]).name == f"step_{step_of(case['run'], case['step']):08d}", case
            else:
                head, *rows = lines
                assert head.split() == ["token", "text", "log", "p"]
                found = [float(row.split()[-1]) for row in rows]
                assert [int(row.split()[0]) for row in rows] == list(content), case
                assert out.replace("\n", "").isprintable(), case
                total, *_, bits = numbers(last.partition("log p ")[2])
            assert found == pytest.approx([-each for each in nats], abs=1e-4), case
            assert total == pytest.approx(-sum(nats), abs=1e-3), case
            assert bits == pytest.approx(sum(nats) / math.log(2) / len(content), abs=1e-4), case

    with_models(runs, judge)


NO_SCORE = (
    (("--text", ""), "the text has no tokens: give one with --text or --text-file"),
    (("--text-file", "nowhere"), "--text-file is nowhere, which cannot be read as UTF-8 text"),
    (("--text", "x", "--ablate"), "--ablate is for held-out documents, and --text names a text: leave one of them out"),
    (("--text", "x", "--tables", "int8"), "--tables is for held-out documents"),
    (("--text", "x", "data.documents=separate"), "data.documents=separate is for held-out documents"),
    (("--text", "x", "--text-file", "y"), "argument --text-file: not allowed with argument --text"),
)


@pytest.mark.parametrize(("words", "message"), NO_SCORE)
def test_what_cannot_be_scored_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["eval", str(trained), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


# --- generate

GENERATED = {
    "run": ("v2", "tide", "midus"),
    "step": ("newest", "first"),
    "ranks": ("1", "2"),
    "prompt": ("none", "short", "long file"),
    "max_tokens": ("1", "9", "45"),
    "temperature": ("kept", "0", "3"),
    "top_p": ("kept", "1", "0.5"),
    "top_k": ("none", "1", "5"),
    "stop": ("none", "two"),
    "samples": ("1", "3"),
    "seed": ("kept", "77"),
    "cache": ("kept", "none"),
    "expand": ("no", "yes"),
    "tables": ("no", "full", "int8", "folder"),
}
PROMPTS = {"none": "", "short": "def ", "long file": "naïve — 日本語 " * 4}


def no_text(case: Mapping[str, str]) -> bool:
    return (
        (case.get("tables", "no") != "no" and case.get("run", "tide") != "tide")
        or (case.get("expand") == "yes" and case.get("run", "midus") != "midus")
        or (case.get("expand") == "yes" and case.get("tables", "no") != "no")
        or (case.get("expand") == "yes" and case.get("ranks") == "2")
    )


def text_words(case: Case, runs: Mapping[str, Path], stops: list[str], prompt_file: Path) -> list[str]:
    prompts = {"none": [], "short": ["--prompt", PROMPTS["short"]], "long file": ["--prompt-file", str(prompt_file)]}
    tables = {"folder": str(runs["folder"] / f"tables_{step_of('tide', case['step'])}")}
    words = ["generate", str(runs[case["run"]]), *step_words(case), *prompts[case["prompt"]]]
    for option in ("max_tokens", "temperature", "top_p", "top_k", "samples", "seed"):
        if case[option] not in ("kept", "none"):
            words += [f"--{option.replace('_', '-')}", case[option]]
    words += [word for stop in stops for word in ("--stop", stop)]
    words += ["--no-cache"] if case["cache"] == "none" else []
    words += ["--expand-values"] if case["expand"] == "yes" else []
    return words + (["--tables", tables.get(case["tables"], case["tables"])] if case["tables"] != "no" else [])


def cut_at(text: str, stops: list[str]) -> str:
    """The text before the stop that is complete first."""
    for end in range(len(text) + 1):
        places = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if places:
            return text[: min(places)]
    return text


@in_turn(1)
def test_options_of_a_text_hold_together(runs: dict[str, Path], tmp_path: Path) -> None:
    every = pairwise(GENERATED, no_text)
    # Some text has to be longer than the model's window, in every share.
    long = [case for case in every if case["max_tokens"] == "45"]
    cases = [*long, *in_rotation([case for case in every if case not in long])]
    forms = {"no": "full", "folder": "int4"}

    def draws(case: Case) -> list[Draw]:
        temperature, top_p, top_k, seed = (case[name] for name in ("temperature", "top_p", "top_k", "seed"))
        return [
            Draw(
                0.8 if temperature == "kept" else float(temperature),
                0.95 if top_p == "kept" else float(top_p),
                None if top_k == "none" else int(top_k),
                (1 if seed == "kept" else int(seed)) + number,
                int(case["max_tokens"]),
            )
            for number in range(int(case["samples"]))
        ]

    def texts(load: Load) -> list[list[str]]:
        return [
            [
                plain_text(
                    load(case["run"], case["step"], tables=forms.get(case["tables"], case["tables"])),
                    PROMPTS[case["prompt"]].encode(),
                    LENGTH,
                    draw,
                )
                for draw in draws(case)
            ]
            for case in cases
        ]

    wanted = with_models(runs, texts)
    assert any(len(text) > LENGTH for of_case in wanted for text in of_case)
    prompt_file = tmp_path / "prompt"
    prompt_file.write_text(PROMPTS["long file"])
    # One that the first sample has, and one that none has.
    stops = [
        ([texts_of_case[0][4:6] or texts_of_case[0][-1:] or "?", "\0never"] if case["stop"] == "two" else [])
        for case, texts_of_case in zip(cases, wanted, strict=True)
    ]
    by_case = {id(case): of_case for case, of_case in zip(cases, stops, strict=True)}
    found = answers(runs, cases, lambda case: text_words(case, runs, by_case[id(case)], prompt_file))
    for case, of_case, its_stops, (out, err) in zip(cases, wanted, stops, found, strict=True):
        prompt = PROMPTS[case["prompt"]]
        lines = [f"{prompt}{cut_at(text, its_stops)}\n" for text in of_case]
        if len(lines) > 1:
            seeds = [draw.seed for draw in draws(case)]
            heads = [f"--- sample {n} of {len(lines)} (seed {seed}) ---\n" for n, seed in enumerate(seeds, 1)]
            lines = [head + line for head, line in zip(heads, lines, strict=True)]
        assert out == "".join(lines), case
        assert ("of which the model sees the last 32" in err) == (len(prompt.encode()) >= LENGTH), case
        assert ("no cache" in err, "expanded values" in err) == (case["cache"] == "none", case["expand"] == "yes"), case
