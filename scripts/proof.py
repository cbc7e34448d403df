"""Remove each guard that the guarantees under faults depend on; storms or the model must fail.

`scripts/mutants.py` shows that each guard has its own test. This shows more: that general checks,
which do not know the guard, notice its removal. For each guard, in a copy of the tree:

    storms  the ones that are hard on this kind of guard (`python -m faults --form proof`)
    model   the one of tests/proof that has the guard, for longer than `make test` runs it
    test    the quickest unit test, as in mutants.py

    python scripts/proof.py                   all of them, and the table
    python scripts/proof.py fence lease       those whose family or name contains one of the words
    python scripts/proof.py --publish         write the table to docs/reliability.md too

Exits with status 1 if neither storms nor model notice one, or if a check fails without a mutation.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mutants
from flow_mutants import SLOTS, UNIQUE
from mutants import (
    COMPARE,
    DUPLICATE,
    FENCE,
    LEASE,
    MODEL,
    MUTATIONS,
    OWNER,
    REPLAY,
    ROOT,
    DoesNotApply,
    Mutation,
)

sys.path.insert(0, str(ROOT))  # the checkout has `faults`, which no wheel contains

from faults.report import fill, table

STORMS = {
    FENCE: ("terms",),
    COMPARE: ("terms",),
    DUPLICATE: ("replies",),
    LEASE: ("leases",),
    OWNER: ("terms", "leases"),
    REPLAY: ("replies",),
    SLOTS: ("flow",),
    UNIQUE: ("flow",),
}
SEEDS = (1, 2)  # storms are random: one that misses gets a second try
STORM_S, MODEL_S = 120.0, 600.0  # seconds until it is killed
EXAMPLES, OTHER_EXAMPLES = 200, 40  # of the model, and of those of keys, whose steps take longer
MODEL_TEST = f"{MODEL}::test_the_queue_and_its_schedulers_do_what_the_model_says"
OTHER_MODELS = {
    SLOTS: "tests/proof/test_keys_model.py::test_keys_hold_and_nothing_waits_for_nothing",
    UNIQUE: "tests/proof/test_unique_model.py::test_unique_keys_do_what_the_model_says",
}
AT_ONCE = 2
HEAD = ("family", "guard", "removed from", "storms", "model", "test")

COUNTED = re.compile(r"^\d+ ([^:,]+): ")
RULE = re.compile(r"^E +state\.(\w+)\(", re.MULTILINE)
NO_RULES = {
    *("teardown", "tasks_can_be_looked_at", "the_queue_is_what_the_model_says"),
    "slots_are_held_by_those_who_run",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The checks that noticed a missing guard; empty texts for those that did not."""

    storms: str = ""
    model: str = ""
    test: str = ""
    broken: str = ""

    @property
    def is_proof(self) -> bool:
        """Whether storms or the model have noticed."""
        return not self.broken and bool(self.storms or self.model)


def run_storm(folder: Path, name: str, seed: int) -> str:
    """Return the guarantee that a storm found broken, or an empty text. Raises RuntimeError."""
    try:
        result = mutants.run(
            folder, "-m", "faults", "--form", "proof", "--seed", str(seed), name, timeout=STORM_S
        )
    except subprocess.TimeoutExpired:
        return ""
    found = [line.strip() for line in result.stdout.splitlines() if line.startswith("  ")]
    found = [line for line in found if not re.match(r"\d+ s: |\S+ had ended ", line)]
    if result.returncode == 0:
        return ""
    if not found or "violations: " not in result.stdout:
        raise RuntimeError(f"storm {name}: {(result.stdout + result.stderr).strip()[-500:]}")
    counted = COUNTED.match(found[0])
    return f"{name}: {counted[1] if counted else found[0].partition(', such as')[0]}"


def run_model(folder: Path, family: str = "") -> str:
    """Return the rule in which the model and the queue differed, or an empty text."""
    examples = OTHER_EXAMPLES if family in OTHER_MODELS else EXAMPLES
    variables = {"FAIRQUEUE_MODEL_EXAMPLES": str(examples), "FAIRQUEUE_MODEL_SAME": "1"}
    test = OTHER_MODELS.get(family, MODEL_TEST)
    try:
        result = mutants.run_tests(folder, [test], traceback="short", timeout=MODEL_S, **variables)
    except subprocess.TimeoutExpired:
        return ""
    caught, what = mutants.judge(result)
    if not caught:
        if result.returncode:
            raise RuntimeError(f"model: {what}")
        return ""
    rules = [rule for rule in RULE.findall(result.stdout) if rule not in NO_RULES]
    return rules[-1].replace("_", " ") if rules else "yes"


def try_guard(pristine: Path, mutation: Mutation) -> Outcome:
    """Return the checks that notice a missing guard."""
    try:
        with mutants.mutated(pristine, mutation) as folder:
            caught, test = mutants.judge(
                mutants.run_tests(folder, [mutants.select(mutation, with_model=False)])
            )
            model = run_model(folder, mutation.family)
            storms = ""
            for seed in SEEDS:
                for name in STORMS[mutation.family]:
                    storms = storms or run_storm(folder, name, seed)
    except (DoesNotApply, RuntimeError, subprocess.TimeoutExpired) as error:
        return Outcome(broken=str(error))
    return Outcome(storms=storms, model=model, test=test if caught else "")


def check_without(pristine: Path, chosen: list[Mutation], pool: ThreadPoolExecutor) -> None:
    """Check that nothing is noticed without a mutation."""
    mutants.check_copy(pristine, {mutants.select(each, with_model=False) for each in chosen})
    storms = sorted({name for each in chosen for name in STORMS[each.family]})
    models = {each.family if each.family in OTHER_MODELS else "" for each in chosen}
    looks = [pool.submit(run_model, pristine, family) for family in sorted(models)]
    looks += [pool.submit(run_storm, pristine, name, SEEDS[0]) for name in storms]
    noticed = [look.result() for look in looks]
    if any(noticed):
        sys.exit(f"without any mutation there is: {', '.join(filter(None, noticed))}")


def row_of(mutation: Mutation, outcome: Outcome) -> tuple[str, ...]:
    """Return a line of the table."""
    noticed = [outcome.storms, outcome.model, outcome.test.replace("_", " ")]
    if outcome.broken:
        noticed = [outcome.broken.replace("\n", " "), "", ""]
    return (mutation.family, mutation.name, mutation.file, *(text or "–" for text in noticed))


def main() -> None:
    """Check the guards, two at a time, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("word", nargs="*", help="part of a family or a name; default: all guards")
    parser.add_argument("--publish", action="store_true", help="write to docs/reliability.md")
    options = parser.parse_args()
    chosen = [
        each
        for each in MUTATIONS
        if each.family
        and (not options.word or any(word in f"{each.family} {each.name}" for word in options.word))
    ]
    if not chosen:
        sys.exit(f"no guard has one of {options.word} in its name")
    if options.publish and options.word:
        sys.exit("only the whole table is published: --publish takes no words")
    chosen.sort(key=lambda each: list(STORMS).index(each.family))
    started = time.monotonic()
    rows, proven = [], 0
    with (
        tempfile.TemporaryDirectory(prefix="proof-") as name,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        pristine = Path(name)
        mutants.copy_tree(pristine)
        check_without(pristine, chosen, pool)
        print(f"nothing is noticed without a mutation ({time.monotonic() - started:.0f} s)")
        outcomes = pool.map(lambda each: try_guard(pristine, each), chosen)
        for mutation, outcome in zip(chosen, outcomes, strict=True):
            rows.append(row_of(mutation, outcome))
            proven += outcome.is_proof
            print(("  " if outcome.is_proof else "! ") + "  |  ".join(rows[-1]), flush=True)
    print()
    print(table(rows, HEAD))
    seconds = time.monotonic() - started
    print(f"proof: {proven} of {len(chosen)} guards, in {seconds:.0f} s")
    if options.publish:
        fill("mutations", table(rows, HEAD))
    sys.exit(0 if proven == len(chosen) else 1)


if __name__ == "__main__":
    main()
