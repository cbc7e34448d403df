"""Entry point of `fairqueue` and `python -m fairqueue`; needs click."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        import click  # noqa: F401 - of the extra `cli`
    except ImportError:
        sys.stderr.write("fairqueue: click is not installed: pip install 'fairqueue[cli]'\n")
        return 1
    from fairqueue.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
