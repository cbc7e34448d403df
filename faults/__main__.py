"""Run storms: `python -m faults [--form short|long] [--seed N] [--publish] [name ...]`.

Ends with status 1 if a promise was broken. With the same seed the same faults strike.
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

from faults.profiles import FORMS
from faults.report import publish, row_of, table
from faults.storm import run_storm

FAILPOINTS = "failpoints"
SEEDS = 20  # with which each failpoint is visited


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("name", nargs="*", help="of these storms; all if none")
    parser.add_argument("--form", choices=sorted(FORMS), default="short")
    parser.add_argument("--seed", type=int, help="drawn and printed if none is given")
    parser.add_argument("--most-seconds", type=float, help="of each storm: less than its goals")
    parser.add_argument("--publish", action="store_true", help="write to docs/reliability.md")
    options = parser.parse_args()
    profiles = {profile.name: profile for profile in FORMS[options.form]}
    # Of the short form they are a part of the tests.
    known = [*profiles, *([FAILPOINTS] if options.form == "long" else [])]
    unknown = set(options.name) - set(known)
    if unknown:
        parser.error(f"no such storm: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
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
            # It says nothing of the queue; the others may.
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
    """Every failpoint with several seeds, in a process of its own, since it forks: as a result."""
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
