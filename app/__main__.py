"""`python -m app`, and `troupe` once installed: serve, or another verb of the command line."""

import sys

try:
    from app.cli.main import main
except KeyboardInterrupt:
    sys.exit(130)


def run() -> int:
    """Run the command line on the process's arguments and return the exit code."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
