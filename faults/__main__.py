"""Run storms: `python -m faults [--form short|long] [--seed N] [--publish] [name ...]`.

Exits with status 1 if a guarantee was broken. The same seed injects the same faults.
"""

import argparse
import json
import secrets
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

from faults.cluster import run as run_on_cluster
from faults.profiles import FORMS
from faults.report import publish, row_of, table
from faults.storm import run_storm

FAILPOINTS = "failpoints"
CLUSTER = "cluster"  # only when it is named: it starts six servers
SEEDS = 20  # how many seeds each failpoint is visited with


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("name", nargs="*", help="of these storms; default: all")
    parser.add_argument("--form", choices=sorted(FORMS), default="short")
    parser.add_argument("--seed", type=int, help="default: drawn at random, and printed")
    parser.add_argument(
        "--most-seconds", type=float, help="of each storm, even before it has reached its goals"
    )
    parser.add_argument("--publish", action="store_true", help="write to docs/reliability.md")
    options = parser.parse_args()
    profiles = {profile.name: profile for profile in FORMS[options.form]}
    # The short form is part of the tests.
    known = [*profiles, *([FAILPOINTS] if options.form == "long" else [])]
    unknown = set(options.name) - {*known, CLUSTER}
    if unknown:
        parser.error(f"no such storm: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if options.name == [CLUSTER]:
        verdicts = run_on_cluster(options.form, seed, options.most_seconds)
        sys.exit(1 if any(verdict.violations for verdict in verdicts) else 0)
    results: list[dict[str, Any]] = []
    unended: list[str] = []
    for name in options.name or known:
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        try:
            if name == FAILPOINTS:
                result = run_failpoints(seed)
            else:
                profile = profiles[name]
                if options.most_seconds is not None:
                    profile = replace(profile, most_seconds=options.most_seconds)
                result = run_storm(profile, seed, say=_say).as_dict()
        except Exception:
            # A failure of the harness, not of the queue: go on with the others.
            traceback.print_exc()
            unended.append(name)
            continue
        results.append(result)
        for line in result["verdict"]["details"]:
            print(f"  {line}")
        if options.publish:
            publish([result])
    print()
    print(table(map(row_of, results)))
    broken = sum(result["violations"] for result in results)
    print(f"storms: {len(results)}, violations: {broken}, seed {seed}")
    if unended:
        print(f"not judged: {', '.join(unended)}")
    sys.exit(1 if broken or unended else 0)


def run_failpoints(seed: int) -> dict[str, Any]:
    """Visit every failpoint with several seeds, in another process, since it forks."""
    command = [sys.executable, "-m", "faults.failpoints", "--json"]
    command += ["--first", str(seed), "--seeds", str(SEEDS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(f"the failpoints ended with status {done.returncode}")
    summary = json.loads(done.stdout)
    gaps = [text for name in ("unvisited", "unmade", "unknown") for text in summary[name]]
    return {
        "name": FAILPOINTS,
        "seed": f"{seed} to {seed + SEEDS - 1}",
        "seconds": summary["seconds"],
        "faults": {"failpoints": summary["killed"], "kill": summary["runs"]},
        "violations": len(summary["violations"]) + len(gaps),
        "verdict": {
            "lost": summary["lost"],
            "unexpected": summary["unexpected"],
            "duplicated": summary["duplicated"],
            "doubled": summary["double_completions"],
            "disagreements": summary["inconsistent"],
            "wrong": len(gaps),
            "details": [*summary["violations"], *gaps],
        },
    }


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
