"""`make mutants PACKAGE=megamem`: plants single mistakes in a package, one at a time, and prints those that no test
notices.
"""

from __future__ import annotations

import argparse
import hashlib
import queue
import subprocess
import threading
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from tests.mutants import reach as reaches
from tests.mutants.operators import PACKAGES, Mutant, mutants_of
from tests.mutants.trial import Trial, Worker

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    options = parser().parse_args()
    folder: Path = options.folder.resolve()
    if options.record is not None or reaches.load(folder / "reach") is None:
        print("Recording which tests run which functions: the suite once, traced.")
        reaches.record(ROOT, folder / "reach", options.record or ())
    reach = reaches.load(folder / "reach")
    assert reach is not None
    for package in options.packages:
        results = folder / f"{package}-{options.seed}.jsonl"
        trials = attempt_all(chosen(package, options.sample, options.seed), reach, folder, results, options)
        report(package, trials)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("packages", nargs="+", choices=PACKAGES)
    parser.add_argument("--sample", type=int, default=60, help="mutants per package, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at a time")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of tests per mutant")
    parser.add_argument("--retry", action="store_true", help="try those once more that survived before")
    parser.add_argument(
        "--record",
        nargs="*",
        metavar="TESTS",
        help="record anew which tests run which functions; of some test files, or of all",
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".mutants", help="where results are kept; a run goes on there"
    )
    return parser


def chosen(package: str, sample: int, seed: int) -> list[Mutant]:
    """A package's mutants: a sample that a larger one continues, and that a change elsewhere leaves as it is."""
    listed = subprocess.run(
        ["git", "ls-files", f"{package}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    mutants = [mutant for path in listed.stdout.split() for mutant in mutants_of(ROOT, path)]
    mutants.sort(key=lambda mutant: hashlib.sha256(f"{seed}|{mutant.key}".encode()).digest())
    return mutants[: sample or None]


def attempt_all(
    mutants: list[Mutant], reach: reaches.Reach, folder: Path, results: Path, options: argparse.Namespace
) -> list[Trial]:
    """Try the mutants that `results` does not hold yet; every result is written at once."""
    done = {trial.mutant.key: trial for trial in _read(results) if trial.is_caught or not options.retry}
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        if mutant.key not in done:
            waiting.put(mutant)
    progress = tqdm(total=len(mutants), initial=len(mutants) - waiting.qsize(), desc=results.stem, unit="mutant")
    lock = threading.Lock()
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            worker = Worker(ROOT, folder / f"worker{number}", reach, budget_s=options.budget)
            while not problems:
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    break
                trial = worker.attempt(mutant)
                with lock, results.open("a", encoding="utf-8") as file:
                    done[mutant.key] = trial
                    file.write(trial.to_json() + "\n")
                    progress.update()
                    progress.set_postfix(survived=sum(t.counts and not t.is_caught for t in done.values()))
            worker.close()
        except BaseException as error:
            problems.append(error)

    if waiting.qsize():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(options.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    progress.close()
    if problems:
        raise problems[0]
    return [done[mutant.key] for mutant in mutants]


def _read(results: Path) -> list[Trial]:
    if not results.exists():
        return []
    return [Trial.from_json(line) for line in results.read_text(encoding="utf-8").splitlines()]


def report(package: str, trials: list[Trial]) -> None:
    """Print what was caught, by kind of mistake, and what survived."""
    counted = [trial for trial in trials if trial.counts]
    kinds = Counter(trial.mutant.operator for trial in counted)
    caught = Counter(trial.mutant.operator for trial in counted if trial.is_caught)
    for kind in sorted(kinds):
        print(f"  {kind:32} {caught[kind]:4} of {kinds[kind]:4}")
    total = sum(caught.values())
    print(
        f"{package}: {total} of {len(counted)} caught ({total / max(1, len(counted)):.1%}); {len(trials) - len(counted)} cannot be imported"
    )
    for trial in counted:
        if not trial.is_caught:
            print(f"  survived {trial.num_tests} tests: {trial.mutant}")


if __name__ == "__main__":
    main()
