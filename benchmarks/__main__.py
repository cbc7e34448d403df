"""Run the benchmarks: `python -m benchmarks [--quick] [section ...]`."""

import argparse
import statistics

from benchmarks import (
    adversarial,
    fairness,
    flow,
    lateness,
    million,
    mixed_fleet,
    page_speed,
    partition_speed,
    partitions,
    queue_speed,
    quotes,
    scaling,
    schedule_speed,
    worker_speed,
    worst_scripts,
)
from benchmarks.common import bench, format_line

SECTIONS = {
    "queue": queue_speed.run,
    "schedules": schedule_speed.run,
    "workers": worker_speed.run,
    "mixed": mixed_fleet.run,
    "fairness": fairness.run,
    "adversarial": adversarial.run,
    "partitions": partitions.run,
    "partition-speed": partition_speed.run,
    "flow": flow.run,
    "quotes": quotes.run,
    "lateness": lateness.run,
    "scaling": scaling.run,
    "million": million.run,
    "pages": page_speed.run,
    "worst": worst_scripts.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("section", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes")
    options = parser.parse_args()
    unknown = set(options.section) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    with bench(0.1 if options.quick else 1.0) as surroundings:
        for name in options.section or SECTIONS:
            SECTIONS[name](surroundings)
        surroundings.unit_s()
        surroundings.unit_b()
        print()
        print(f"S = {statistics.median(surroundings.singles):,.0f} single SETs per second")
        print(f"B = {statistics.median(surroundings.bulks):,.0f} SETs per second in pipelines")
        missed = [line for line in surroundings.lines if line.ok is False]
        print("every aim reached" if not missed else f"{len(missed)} aims missed:")
        for line in missed:
            print("  " + format_line(line))


if __name__ == "__main__":
    main()
