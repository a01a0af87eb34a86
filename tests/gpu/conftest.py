"""`python -m pytest tests/gpu` runs what needs a GPU, without `-m gpu`: naming this folder is asking for it."""

from pathlib import Path

HERE = Path(__file__).parent


def pytest_configure(config):
    """Lift the default `-m 'not gpu'` where every argument is in this folder, and no -m was given with them."""
    paths = [Path(str(argument).partition("::")[0]).resolve() for argument in config.args]
    given = any(argument.startswith("-m") for argument in config.invocation_params.args)
    if not given and all(path == HERE or HERE in path.parents for path in paths):
        config.option.markexpr = "not slow"
