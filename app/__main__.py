"""`python -m app`: serve, or another verb of the command line."""

import sys

try:
    from app.cli.main import main
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
