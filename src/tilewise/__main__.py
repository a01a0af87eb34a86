"""`python -m tilewise` is the command line."""

from tilewise.cli import entry

if __name__ == "__main__":
    entry()
