"""Run storms: `python -m faults [--form short|long] [--seed N] [--publish] [name ...]`.

Ends with status 1 if a promise was broken. With the same seed the same faults strike.
"""

import argparse
import secrets
import sys
import time
from dataclasses import replace

from faults.profiles import FORMS
from faults.report import publish, row_of, table
from faults.storm import run_storm


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("name", nargs="*", help="of these storms; all if none")
    parser.add_argument("--form", choices=sorted(FORMS), default="short")
    parser.add_argument("--seed", type=int, help="drawn and printed if none is given")
    parser.add_argument("--most-seconds", type=float, help="of each storm: less than its goals")
    parser.add_argument("--publish", action="store_true", help="write to docs/reliability.md")
    options = parser.parse_args()
    profiles = {profile.name: profile for profile in FORMS[options.form]}
    unknown = set(options.name) - set(profiles)
    if unknown:
        parser.error(
            f"no such storm: {', '.join(sorted(unknown))}; there are {', '.join(profiles)}"
        )
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    results = []
    for name in options.name or profiles:
        profile = profiles[name]
        if options.most_seconds is not None:
            profile = replace(profile, most_seconds=options.most_seconds)
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        result = run_storm(profile, seed, say=lambda line: print(line, flush=True))
        results.append(result)
        for line in result.verdict.details:
            print(f"  {line}")
        if options.publish:
            publish([result.as_dict()])
    print()
    print(table(row_of(result.as_dict()) for result in results))
    broken = sum(result.violations for result in results)
    print(f"storms: {len(results)}, violations: {broken}, seed {seed}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
