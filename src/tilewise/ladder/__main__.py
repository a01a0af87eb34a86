"""`python -m tilewise.ladder`: see cli/ladder.py."""

import os
import sys

from tilewise.cli.grammar import sentence

try:
    from tilewise.cli.ladder import main
except ModuleNotFoundError as error:
    sys.exit(f"tilewise.ladder: {sentence(error)}")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
