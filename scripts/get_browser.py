"""Install Debian's Chromium for the browser tests, if there is none and it is possible.

Never fails: without a browser the browser tests are skipped with a reason (and fail if CI=true).
"""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main() -> None:
    """Install only as root, with apt, and if there is no browser."""
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
