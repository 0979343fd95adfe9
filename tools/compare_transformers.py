#!/usr/bin/env python3
"""Random checkpoints of every architecture that lowbit reads, with random legal options, in transformers and in lowbit:
the negative log-likelihood of a text and greedy tokens must agree, or lowbit must refuse with a message.

    pip install -r tools/requirements.txt
    tools/compare_transformers.py --lowbit target/debug/lowbit --seeds 0:40

Legal is what transformers loads and computes with; other draws are repeated. What lowbit refuses is listed, and drawn
again, too: each seed stands for one case that both compute. `--only llama/17` runs one. Exits with 1 where a number is
wrong. Options that a failing case does not need are taken away, unless `--no-reduce` is given.

With `--round-trip` each case that agrees is converted, too: to GGUF, to MLX's layout, and from GGUF to MLX's layout and back. Each
keeps the likelihood to 1e-6, or is refused before anything is written; the weights are in f32 then. Checkpoints that are quantised
first, to a type of blocks in GGUF and to a number of bits in MLX's layout, keep each value that others decode (gguf, numpy), but for
the type of MLX's floats.
"""

import argparse
import collections
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
warnings.filterwarnings("ignore")

import transformers  # noqa: E402
from random_options import check, round_trip  # noqa: E402
from random_options.case import BASES  # noqa: E402
from random_options.draw import draw  # noqa: E402
from random_options.options import OPTIONS  # noqa: E402

DRAWS = 100


class Run:
    """What became of a case."""

    def __init__(self, verdict, changed, expected, round_trip=None):
        self.verdict, self.changed, self.expected = verdict, changed, expected
        self.round_trip = round_trip


def attempt(options, architecture: str, seed: str, without: frozenset[str], keep: Path | None = None) -> Run:
    """One draw.

    Raises Illegal and Unfair.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = keep or Path(scratch) / "checkpoint"
        case, changed = draw(architecture, seed, without)
        if options.round_trip:
            round_trip.in_f32(case)
        check.write(case, check.hash_of(seed), out)
        verdict, expected = check.compare(options.lowbit, out, check.text_to_score(seed))
        converted = None
        if options.round_trip and verdict.kind == "agrees":
            converted = round_trip.check(options.lowbit, out, out / "text.txt", Path(scratch))
            if converted.wrong:
                verdict = check.Verdict("wrong", "; ".join(converted.wrong), verdict.difference)
        return Run(verdict, changed, expected, converted)


def runs_of(options, architecture: str, seed: int, illegal: collections.Counter):
    """The legal draws of a seed, as name and Run: those that lowbit refuses, and the first that it does not."""
    for number in range(DRAWS):
        name = f"{seed}.{number}"
        try:
            run = attempt(options, architecture, name, frozenset(options.without))
        except (check.Illegal, check.Unfair) as error:
            illegal[f"{type(error).__name__}: {error}"[:160]] += 1
            continue
        yield name, run
        if run.verdict.kind != "refused":
            return
    print(f"{architecture}/{seed}: none of {DRAWS} draws is legal and computed")


def reduce(options, architecture: str, name: str, run: Run) -> Run:
    """Takes away the options that the failure does not need."""
    without = frozenset(options.without)
    for option in list(run.changed):
        try:
            fewer = attempt(options, architecture, name, without | {option})
        except (check.Illegal, check.Unfair):
            continue
        if fewer.verdict.kind == run.verdict.kind:
            without, run = without | {option}, fewer
    if options.keep:
        folder = options.keep / f"{architecture}-{name}"
        attempt(options, architecture, name, without, folder)
    return run


def describe(options, architecture: str, name: str, run: Run) -> None:
    print(f"{architecture}/{name} {run.verdict.kind}: {run.verdict.text}", flush=True)
    if not options.no_reduce:
        run = reduce(options, architecture, name, run)
        print(f"    reduced: {run.verdict.text}", flush=True)
    for option, difference in run.changed.items():
        print(f"    {option}: {difference}", flush=True)


def architectures_and_seeds(options):
    if options.only:
        for case in options.only:
            architecture, seed = case.split("/")
            yield architecture, int(seed)
        return
    first, last = (int(part) for part in options.seeds.split(":"))
    for architecture in options.architectures:
        for seed in range(first, last):
            yield architecture, seed


def report(options, runs) -> bool:
    good = True
    refusals = collections.defaultdict(list)
    for architecture, cases in runs.items():
        kinds = collections.Counter(run.verdict.kind for _, run in cases)
        agreeing = [run for _, run in cases if run.verdict.kind == "agrees"]
        worst = max((run.verdict.difference for run in agreeing), default=0.0)
        share = max((run.verdict.difference / run.expected.tolerance for run in agreeing), default=0.0)
        print(f"{architecture}: {len(cases)} legal cases, {dict(kinds)}")
        print(f"    worst nll difference {worst:.1e}; closest to its bound: {share:.2f} of it")
        counts = collections.Counter(trait for run in agreeing for trait in run.expected.traits)
        print("    agreeing: " + ", ".join(f"{count} {trait}" for trait, count in counts.most_common()))
        changed = collections.Counter(option for run in agreeing for option in run.changed)
        print("    options: " + ", ".join(f"{count} {option}" for option, count in changed.most_common()))
        good &= not kinds["wrong"] and not kinds["crashed"]
        for name, run in cases:
            if run.verdict.kind == "refused":
                refusals[run.verdict.text].append(f"{architecture}/{name}")
    report_round_trips(runs)
    print("refusals:")
    for text, names in sorted(refusals.items(), key=lambda item: -len(item[1])):
        print(f"  {len(names)} x {text}\n      {' '.join(names[:6])}")
    return good


def report_round_trips(runs) -> None:
    trips = [(f"{architecture}/{name}", run.round_trip) for architecture, cases in runs.items() for name, run in cases if run.round_trip]
    if not trips:
        return
    kept = collections.Counter(step for _, trip in trips for step in trip.kept)
    refused = collections.defaultdict(list)
    for name, trip in trips:
        for step, text in trip.refused:
            refused[step, text].append(name)
    wrong = [text for _, trip in trips for text in trip.wrong]
    worst = max(trip.worst for _, trip in trips)
    unread = sum("unread" in text for text in wrong)
    print(f"round trips: {len(trips)} checkpoints, {unread} unread, {len(wrong) - unread} that differ, worst difference {worst:.1e}")
    print("    kept: " + ", ".join(f"{count} {step}" for step, count in kept.items()))
    for (step, text), names in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"    {len(names)} x {step} refused: {text}\n        {' '.join(names[:6])}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowbit", type=Path, required=True, help="the program")
    parser.add_argument("--seeds", default="0:40", help="FIRST:END, for each architecture [0:40]")
    parser.add_argument("--architectures", nargs="+", choices=list(BASES), default=list(BASES))
    parser.add_argument("--only", nargs="+", help="cases by name: llama/17")
    parser.add_argument("--without", nargs="+", default=[], choices=list(OPTIONS), help="options to leave alone")
    parser.add_argument("--round-trip", action="store_true", help="convert each case that agrees, and back")
    parser.add_argument("--no-reduce", action="store_true", help="leave failing cases as they are")
    parser.add_argument("--keep", type=Path, help="a folder for the checkpoints of failing cases")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    options.lowbit = options.lowbit.resolve()
    transformers.utils.logging.disable_progress_bar()
    runs, illegal = collections.defaultdict(list), collections.Counter()
    start = time.monotonic()
    try:
        for architecture, seed in architectures_and_seeds(options):
            for name, run in runs_of(options, architecture, seed, illegal):
                runs[architecture].append((name, run))
                if run.verdict.kind in ("wrong", "crashed"):
                    describe(options, architecture, name, run)
    except KeyboardInterrupt:
        print("interrupted: what follows is about the cases before")
    good = report(options, runs)
    print(f"draws that were not legal or not fair: {illegal.total()}, {time.monotonic() - start:.0f} s")
    for text, count in illegal.most_common(12):
        print(f"  {count} x {text}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
