"""`python -m tilewise` is the command line."""

from tilewise.cli.grammar import entry

if __name__ == "__main__":
    entry()
