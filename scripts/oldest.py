"""Print the oldest versions that setup.cfg allows, as constraints for pip."""

import configparser
import re
from pathlib import Path

_LEAST = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(\[[^\]]*\])?>=(?P<version>[0-9.]+)")


def oldest(text: str) -> list[str]:
    """Return the lower bound of each requirement of a setup.cfg that has one."""
    config = configparser.ConfigParser(interpolation=None)
    config.read_string(text)
    needed = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    found = {
        match["name"].lower(): match["version"]
        for lines in needed
        for line in lines.splitlines()
        if (match := _LEAST.match(line.strip()))
    }
    return [f"{name}=={version}" for name, version in sorted(found.items())]


if __name__ == "__main__":
    print("\n".join(oldest((Path(__file__).parent.parent / "setup.cfg").read_text())))
