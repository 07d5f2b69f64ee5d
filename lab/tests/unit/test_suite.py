"""The synthetic suite: its texts, read by a solver that knows nothing of how they are made, and what is counted."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch

from lab.studies.probe.picture import draw, picture, table
from lab.suite.ask import AnswerRows
from lab.suite.plan import Answers, Cell, SuitePlan, cells
from lab.suite.tasks import NUM_HOPS, TASKS, is_asked
from lab.suite.texts import Filler, Writer
from pretrain.data.manifest import VALIDATION, open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from pretrain.errors import ConfigError, DataError

DEPTHS = (0.0, 0.3, 0.5, 1.0)
NUM_WRONG = 3


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def writer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Writer:
    folder = tmp_path_factory.mktemp("filler")
    texts = [f"def function_{i}(self):\n    return self.value_{i % 7}  # é\n" * 6 for i in range(60)]
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer: Tokenizer = ByteTokenizer()
    if request.param == "bpe":
        tokenizer = train_bpe(iter(texts), 300, folder / "bpe.json", total_bytes=0)
    prepare([str(source)], folder / "data", tokenizer, validation_fraction=0.3, num_workers=1)
    return Writer(Filler([(open_dataset(folder / "data"), VALIDATION)]))


def solved(text: str) -> str | None:
    """The answer to the question at the end of a text, if the text says it: names are followed to their values."""
    question = re.search(r"^assert ([\w()]+) ==\Z", text, re.MULTILINE)
    said = dict(re.findall(r"^assert ([\w()]+) == (\d{4})$", text, re.MULTILINE))
    said |= dict(re.findall(r"^([a-z]+) = (\w+)$", text, re.MULTILINE))
    found = said.get(question[1]) if question else None
    while found is not None and not found.isdigit():
        found = said.get(found)
    return found


def text_of(writer: Writer, task: str, depth: float, length: int, sample: int = 0) -> tuple[str, list[str]]:
    text = writer.write(task, depth, length, NUM_WRONG, random.Random(f"{task} {sample}"))
    assert len(text.prompt) + max(map(len, text.answers)) == length + 1
    assert text.prompt[0] == writer.tokenizer.eod
    assert writer.tokenizer.eod not in text.prompt[1:]
    return writer.tokenizer.detokenize(text.prompt), [writer.tokenizer.detokenize(ids) for ids in text.answers]


@pytest.mark.parametrize("task", TASKS)
def test_every_text_answers_its_question(writer: Writer, task: str) -> None:
    for length, depth in ((500, 0.0), (700, 0.0), (700, 0.3), (700, 0.5), (900, 1.0)):
        for sample in range(4):
            text, (right, *wrong) = text_of(writer, task, depth, length, sample)
            assert f" {solved(text)}" == right
            assert len({right, *wrong}) == 1 + NUM_WRONG


@pytest.mark.parametrize("task", TASKS)
def test_what_answers_stands_at_the_depth(writer: Writer, task: str) -> None:
    """A reader of the last n tokens alone answers where the answer is within them, and nowhere else."""
    length = 1200
    for depth in DEPTHS:
        text, (right, *_) = text_of(writer, task, depth, length)
        # The latest place from which on the text still says the answer.
        starts = [start for start in range(0, len(text), 8) if solved(text[start:]) == right.strip()]
        reach = 1 - starts[-1] / len(text)
        # Questions and statements take up to 80 letters or so, and chains and turns have a size of their own.
        slack = {"rounds": 0.17, "mapping": 0.12, "hops": 0.12}.get(task, 0.1)
        assert reach == pytest.approx(1 - depth, abs=slack)


def test_chains_are_as_long_as_they_say(writer: Writer) -> None:
    text, (right, rival, *_) = text_of(writer, "hops", 0.25, 900)
    links = dict(re.findall(r"^([a-z]+) = (\w+)$", text, re.MULTILINE))
    name, steps = re.findall(r"^assert (\w+) ==\Z", text, re.MULTILINE)[0], 0
    while not links[name].isdigit():
        name, steps = links[name], steps + 1
    assert steps == NUM_HOPS
    assert f" {links[name]}" == right
    # The other chain's value is the likeliest mistake.
    assert {right, rival} == {f" {value}" for value in links.values() if value.isdigit()}


def test_pairs_fill_the_text_and_needles_do_not(writer: Writer) -> None:
    def shares(task: str) -> float:
        text, _ = text_of(writer, task, 0.5, 2000)
        return sum(map(len, re.findall(r"^[a-z]{6} = \d{4}\n\n?", text, re.MULTILINE))) / len(text)

    assert shares("kv") > 0.85
    assert shares("needle") < 0.05


def test_names_to_ask_for_are_never_trained_on(writer: Writer) -> None:
    trained, asked_for = set(), set()
    for task in TASKS:
        for sample in range(6):
            trained |= set(
                re.findall(
                    r"^(?:assert )?([a-z]{6})\b", writer.document(task, 600, random.Random(sample)), re.MULTILINE
                )
            )
            asked_for |= set(
                re.findall(r"^(?:assert )?([a-z]{6})\b", text_of(writer, task, 0.5, 600, sample)[0], re.MULTILINE)
            )
    names = {"return"}
    assert not (trained & asked_for) - names
    assert all(is_asked(name) for name in asked_for - names)
    assert not any(is_asked(name) for name in trained - names)
    assert min(len(trained), len(asked_for)) > 100
    draw = random.Random(1)
    share = sum(is_asked("".join(draw.choices("abcdef", k=6))) for _ in range(4000)) / 4000
    # Four standard deviations of a share of 4,000.
    assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 4000))


@pytest.mark.parametrize("task", TASKS)
def test_documents_to_train_on_answer_all_their_questions(writer: Writer, task: str) -> None:
    for sample in range(3):
        text = writer.document(task, 700, random.Random(sample))
        lines = re.findall(r"^assert [\w()]+ == \d{4}$", text, re.MULTILINE)
        assert len(lines) >= 1
        for line in lines[-2:]:
            question, answer = line.rsplit(" ", 1)
            assert solved(text[: text.rindex(line)] + question) == answer
        assert len(writer.tokenizer.tokenize(text)) == pytest.approx(700, rel=0.15)


def test_a_text_that_is_too_short_is_refused(writer: Writer) -> None:
    with pytest.raises(ConfigError, match=r"hops needs \d+ tokens of this tokenizer, and the length is 40: ask longer"):
        writer.write("hops", 0.5, 40, NUM_WRONG, random.Random(1))
    with pytest.raises(
        ConfigError, match=r"documents of 64 tokens keep 32 of them .* kv needs \d+ tokens .* is 32: ask"
    ):
        writer.document("kv", 64, random.Random(1))


def test_there_must_be_text_to_fill_with(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text")
    prepare([str(source)], tmp_path / "data", ByteTokenizer(), validation_fraction=0, num_workers=1)
    with pytest.raises(DataError, match="there is no text to fill with"):
        Filler([(open_dataset(tmp_path / "data"), VALIDATION)])


PLAN = SuitePlan(("needle", "kv"), (400,), (0.0, 1.0), 2, NUM_WRONG, 7)


def test_rows_ask_for_each_answer_and_nothing_else(writer: Writer) -> None:
    rows = AnswerRows(writer, PLAN, 400)
    assert len(rows) == 2 * 2 * 2 * 4
    tokenizer = writer.tokenizer
    for number in range(len(rows)):
        row = rows[number]
        assert {name: tuple(value.shape) for name, value in row.items()} == dict.fromkeys(row, (400,))
        question = PLAN.questions()[number // 4]
        draw = random.Random(f"7 {question.task} 400 {question.sample}")
        text = writer.write(question.task, question.depth, 400, NUM_WRONG, draw)
        answer = text.answers[number % 4]
        counted = row["loss_mask"].bool()
        assert row["labels"][counted].tolist() == answer.tolist()
        first = int(counted.nonzero()[0])
        assert tokenizer.detokenize(row["tokens"][: first + 1].numpy()) == tokenizer.detokenize(text.prompt)
        assert torch.equal(row["tokens"][1:], row["labels"][:-1])
        assert set(row["row"].tolist()) == {number}
    # The same facts at every depth.
    assert (
        rows[0]["labels"][rows[0]["loss_mask"].bool()].tolist()
        == rows[8]["labels"][rows[8]["loss_mask"].bool()].tolist()
    )


def scored_by(writer: Writer, plan: SuitePlan, length: int, window: int | None, *, knows: bool) -> list[Cell]:
    """Cells of a reader of the last `window` letters that is sure of what it finds, or of one that knows nothing."""
    scores = []
    for question in plan.questions():
        draw = random.Random(f"{plan.seed} {question.task} {length} {question.sample}")
        text = writer.write(question.task, question.depth, length, plan.num_wrong, draw)
        found = solved(writer.tokenizer.detokenize(text.prompt)[-(window or 0) :]) if knows else None
        answers = []
        for ids in text.answers:
            right = f" {found}" == writer.tokenizer.detokenize(ids)
            nats = 0.01 if right else math.log(9000)
            answers.append((nats, float(len(ids)), float(len(ids) if right else 0)))
        scores.append(answers)
    return list(cells(plan, length, scores))


def test_one_that_can_is_always_right_and_one_that_cannot_never(writer: Writer) -> None:
    plan = SuitePlan(tuple(TASKS), (900,), DEPTHS, 3, NUM_WRONG, 1)
    able = scored_by(writer, plan, 900, None, knows=True)
    assert [(cell.task, cell.depth) for cell in able] == [(task, depth) for task in TASKS for depth in DEPTHS]
    assert all((cell.exact, cell.chosen, cell.num_samples) == (1, 1, 3) for cell in able)
    unable = scored_by(writer, plan, 900, None, knows=False)
    assert all(cell.exact == 0 for cell in unable)
    short_sighted = scored_by(writer, plan, 900, 400, knows=True)
    letters = {depth: [cell.exact for cell in short_sighted if cell.depth == depth] for depth in DEPTHS}
    assert set(letters[0.0]) == {0}
    assert set(letters[1.0]) == {1}


def test_cells_count_exact_and_chosen_answers() -> None:
    plan = SuitePlan(("needle",), (100,), (0.5,), 4, 2, 1)
    scores = [
        # Exact, and likelier than both others; per token, as they have more tokens.
        [(2.0, 2.0, 2.0), (3.5, 3.0, 0.0), (9.0, 3.0, 1.0)],
        # One token of two.
        [(2.0, 2.0, 1.0), (3.0, 2.0, 0.0), (9.0, 3.0, 1.0)],
        # A tie.
        [(4.0, 2.0, 2.0), (6.0, 3.0, 0.0), (9.0, 3.0, 1.0)],
        [(8.0, 2.0, 0.0), (2.0, 2.0, 2.0), (9.0, 3.0, 1.0)],
    ]
    (cell,) = cells(plan, 100, scores)  # type: ignore[arg-type]
    assert cell == Cell("needle", 100, 0.5, 4, 0.5, 0.5, (1 + 1 + 2 + 4) / 4)
    (alone,) = cells(SuitePlan(("needle",), (100,), (0.5,), 1, 0, 1), 100, [[(1.0, 2.0, 2.0)]])
    assert (alone.exact, alone.chosen) == (1, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": ("needel",)}, "no task 'needel': ask for some of needle, kv, hops, rounds, mapping"),
        ({"lengths": (0, 5)}, "a length is 0 tokens: ask for at least 1"),
        ({"depths": (0.5, 1.5)}, "a depth is 1.5: give shares of the text from 0 to 1"),
        ({"num_samples": 0}, "--samples is 0: ask for at least one"),
        ({"num_wrong": -1}, "--wrong is -1: give 0 to leave wrong answers out, or more"),
    ],
)
def test_plans_that_cannot_be_asked(fields: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "tasks": ("kv",),
        "lengths": (1,),
        "depths": (0.0, 1.0),
        "num_samples": 1,
        "num_wrong": 0,
        "seed": 1,
    }
    SuitePlan(**good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(message)):
        SuitePlan(**good | fields)  # type: ignore[arg-type]


def answers_of(name: str, exact: float) -> Answers:
    grid = [(task, length, depth) for task in ("needle", "kv") for length in (128, 256, 1024) for depth in (0.0, 1.0)]
    found = tuple(Cell(*key, 4, exact, 0.25, 1.5) for key in grid)
    return Answers(name, f"{name}/step_1", ("model.rotary_base=1e6",), 1, 3, found)


def test_tables_and_pictures_show_every_cell(tmp_path: Path) -> None:
    both = [answers_of("short", 0.5), answers_of("long", 0.75)]
    path = tmp_path / "probe.json"
    both[0].write(path)
    assert Answers.read(path) == both[0]
    text = table(both[0])
    assert text.count("50% / 25%") == 12
    assert "short/step_1 with model.rotary_base=1e6" in text
    figure = picture(both)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["short: needle", "long: needle", "short: kv", "long: kv"]
    shades = [axes.images[0].get_array() for axes in panels]
    assert [shade.shape for shade in shades if shade is not None] == [(2, 3)] * 4
    assert shades[1] is not None
    assert (shades[1] == 0.75).all()
    draw(both, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileNotFoundError, match=r"none/probe\.png"):
        draw(both, tmp_path / "none" / "probe.png")
