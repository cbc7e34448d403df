"""See that there is a Chromium for the browser tests; install Debian's where we may.

Never fails: without one, the browser tests are skipped with their reason (and fail where CI=true).
"""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main() -> None:
    """Install only as root, only with apt, and only where no browser is."""
    if any(map(shutil.which, NAMES)) or os.environ.get("FAIRQUEUE_CHROMIUM"):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print("no Chromium here: the browser tests will be skipped", file=sys.stderr)
        return
    print("installing chromium for the browser tests")
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"],
    ):
        subprocess.run(command, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
