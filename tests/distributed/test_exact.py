"""Several ranks compute what one process does, bit by bit."""

import distributed_cases
import pytest
import ranks


def check(results: list) -> None:
    errors = [result["error"] for result in results if isinstance(result, dict)]
    assert not errors, errors[0]
    wrong = [each for result in results for each in result]
    assert not wrong, "\n".join(wrong[:20])


def test_two_three_and_four_ranks_have_the_bits_of_one_process():
    check(ranks.run(distributed_cases.groups, 4, (2, 3, 4), "quick"))


@pytest.mark.parametrize("case", [*distributed_cases.EVERY[:6], *distributed_cases.OPTIONS], ids=str)
def test_one_rank_is_one_process(case):
    assert not distributed_cases.compare(case, (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 8])
def test_every_family_layout_length_and_dtype(world):
    check(ranks.run(distributed_cases.groups, world, (world,), "matrix", seconds=1800, timeout=600.0))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "sizes"), [(4, (2, 3, 4)), (8, (8,))])
def test_every_case_on_every_number_of_ranks(world, sizes):
    check(ranks.run(distributed_cases.groups, world, sizes, "all", seconds=600))
