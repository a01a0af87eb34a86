"""`python -m tilewise.ladder`: see cli/ladder.py."""

import os
import sys

from tilewise.cli.ladder import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
