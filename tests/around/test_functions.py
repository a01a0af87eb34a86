"""The table is complete: each public function that computes stands in it."""

import inspect

from surroundings import FUNCTIONS, check_equal, plain

import tilewise as tw


def test_every_public_function_is_in_the_table():
    public = {name for name in tw.__all__ if inspect.isfunction(getattr(tw, name))} - {"explain"}  # which computes nothing
    assert public == {name.partition(",")[0] for name in FUNCTIONS}


def test_plain_calls_repeat_bit_for_bit():
    for name in FUNCTIONS:
        check_equal(plain(name), plain(name))
