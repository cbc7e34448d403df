"""What `fairqueue` and `python -m fairqueue` start: the command line, where click is installed."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    try:
        import click  # noqa: F401 - of the extra `cli`
    except ImportError:
        sys.stderr.write("fairqueue: click is not installed: pip install 'fairqueue[cli]'\n")
        return 1
    from fairqueue.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
