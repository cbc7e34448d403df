"""Look up known vulnerabilities of all installed packages.

pip-audit asks the advisory service, and ignores packages for which the service does not answer.
This script fails unless every package was looked up.
"""

import json
import subprocess
import sys
from typing import Any

OWN = "fairqueue"  # installed from this folder, not from an index
VULNERABLE, NOT_KNOWN = 1, 3  # exit codes
TIMEOUT_S = 600


def main(arguments: list[str]) -> int:
    """Audit this environment; arguments go to pip-audit. Return 0 if all is well."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        print(f"no result: pip-audit could not reach the advisory service: {last}")
        return NOT_KNOWN
    return report([each for each in found if each["name"] != OWN])


def report(packages: list[dict[str, Any]]) -> int:
    """Print the result."""
    vulnerable = [each for each in packages if each.get("vulns")]
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    for each in vulnerable:
        for vuln in each["vulns"]:
            fixed = ", ".join(vuln["fix_versions"]) or "no version"
            print(f"{each['name']} {each['version']}: {vuln['id']}; fixed in {fixed}")
    if skipped or not packages:
        print(
            f"no result for {len(skipped)} of {len(packages)} packages, such as "
            f"{', '.join(skipped[:5]) or 'any'}: the advisory service did not answer for them"
        )
    if vulnerable:
        return VULNERABLE
    if skipped or not packages:
        return NOT_KNOWN
    print(f"{len(packages)} packages were looked up: no known vulnerabilities")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
