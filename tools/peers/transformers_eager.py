"""pytest plugin: transformers' own test that eager attention and SDPA agree, with "tilewise" in the place of SDPA, from a checkout that you name.

    python -m pip install pytest parameterized
    git clone --depth 1 --branch v5.15.0 https://github.com/huggingface/transformers /path/to/transformers
    cd /path/to/transformers && PYTHONPATH=/path/to/tilewise/tools/peers python -m pytest -p transformers_eager tests/models \\
        -k eager_matches_sdpa_inference -o addopts= --tilewise-sample 2 --tilewise-seed 0

The checkout and the installed transformers have to be of one version. Every model class of every model's tests runs at its own small size, with their
inputs, paddings and bounds (fp32, fp16, bf16). That test falls back to SDPA where an implementation cannot be set, so each case in which tilewise was
not called is counted apart, with the reason. docs/compat.md has the counts.
"""

import functools
import inspect
from collections import Counter, defaultdict

import pytest
from cases import choose_backend, pytest_addoption, select  # noqa: F401 (a hook)
from cases import pytest_terminal_summary as left_out_summary

WANTED = "test_eager_matches_sdpa_inference"
EXCLUDED = {  # what a case's id matches: why it is left out
    "_sdpa_kernels": "the same again with SDPA's fused kernels allowed, which tilewise has none of",
    "output_attentions": "it asks for the probabilities, which SDPA has not either: eager attention answers on both sides",
}
CALLS: Counter = Counter()
STATES: Counter = Counter()  # (outcome, whether ours was called): cases
CLASSES = defaultdict(set)  # of test classes, by outcome
REFUSALS = ("the attention mask that tilewise made", "which tilewise does not have")  # in what a refusal says


def pytest_configure(config):
    from transformers import AttentionInterface

    from tilewise.compat import transformers as ours

    choose_backend(config)
    ours.register()

    @functools.wraps(ours.attention)
    def counted(*args, **options):
        CALLS["tilewise"] += 1
        return ours.attention(*args, **options)

    AttentionInterface.register("tilewise", counted)


def pytest_collectstart(collector):
    """Before any test module takes the function: the same with another implementation."""
    if CALLS["rewritten"] or not isinstance(collector, pytest.Module):
        return
    CALLS["rewritten"] += 1
    from tests import test_modeling_common as common

    source = inspect.getsource(common._test_eager_matches_sdpa_inference)
    ours = source.replace('attn_implementation="sdpa"', 'attn_implementation="tilewise"')
    assert ours != source, "this version of the test names SDPA in another way"
    exec(compile(ours, common.__file__, "exec"), vars(common))


def pytest_collection_modifyitems(config, items):
    select(config, items, WANTED, EXCLUDED, lambda item: f"{item.path.name} {item.cls.__name__}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Counts, when a case has run. Here, and not around the call, for unittest keeps failures to itself until then."""
    report = yield
    if report.when == "call":
        called, CALLS["tilewise"] = CALLS["tilewise"] > 0, 0
        said = str(call.excinfo.value) if call.excinfo is not None else ""
        outcome = "refused" if report.failed and any(words in said for words in REFUSALS) else report.outcome
        STATES[outcome, "called" if called else "not called"] += 1
        if outcome == "refused" or (outcome, called) == ("passed", False):
            CLASSES[outcome].add(item.cls.__name__)
    return report


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section("with tilewise's attention")
    for (outcome, called), count in sorted(STATES.items()):
        terminalreporter.write_line(f"{count:8d}  {outcome}, {called}")
    terminalreporter.write_line(f"passed, never called: {', '.join(sorted(CLASSES['passed']))}")
    terminalreporter.write_line(f"refused: {', '.join(sorted(CLASSES['refused']))}")
    left_out_summary(terminalreporter, config)
