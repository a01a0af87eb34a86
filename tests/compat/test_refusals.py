"""The guard of the drop-ins: it takes what the function takes, however that is read, and tells errors in the peer's words."""

import importlib
import inspect
import pickle
import pkgutil

import pytest

from tilewise import compat
from tilewise.compat import _refusals
from tilewise.errors import ShapeError, UnsupportedError

GUARDED = f"{_refusals.__name__} of "


def drop_ins():
    for module in pkgutil.iter_modules(compat.__path__):
        if module.name.startswith("_"):
            continue
        try:
            found = vars(importlib.import_module(f"{compat.__name__}.{module.name}"))
        except ImportError:  # a peer that is not here
            continue
        for name, value in found.items():
            if inspect.isfunction(value) and GUARDED in value.__code__.co_filename and value.__module__.endswith(f".{module.name}"):
                yield pytest.param(value, id=f"{module.name}.{name}")


DROP_INS = list(drop_ins())


def test_drop_ins_are_found():
    assert len(DROP_INS) >= 30


@pytest.mark.parametrize("function", DROP_INS)
def test_what_it_takes_is_read_in_every_way(function):
    own, code = inspect.unwrap(function), function.__code__  # flex_attention is wrapped by torch beneath
    assert inspect.signature(function, follow_wrapped=False) == inspect.signature(own)
    spec = inspect.getfullargspec(function)
    assert spec == inspect.getfullargspec(own) and spec.args == list(own.__code__.co_varnames[: own.__code__.co_argcount])
    for field in ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_name"):
        assert getattr(code, field) == getattr(own.__code__, field), field
    count = code.co_argcount + code.co_kwonlyargcount
    assert code.co_varnames[:count] == own.__code__.co_varnames[:count]
    assert (function.__defaults__, function.__kwdefaults__) == (own.__defaults__, own.__kwdefaults__)
    assert pickle.loads(pickle.dumps(function)) is function


def every_kind(z, /, a, b=2, *rest, c, d=4, **more):
    if z == "size":
        raise ValueError("length is wrong")
    if z == "word":
        raise UnsupportedError("length is not supported")
    return z, a, b, rest, c, d, more


def test_every_kind_of_parameter():
    guarded = _refusals.translate_errors(length="seqlen")(every_kind)
    assert inspect.getfullargspec(guarded) == inspect.getfullargspec(every_kind)
    assert guarded(0, 1, c=3) == every_kind(0, 1, c=3) and guarded(0, 1, 5, 6, 7, c=8, e=10) == every_kind(0, 1, 5, 6, 7, c=8, e=10)
    with pytest.raises(ShapeError, match=r"test_refusals.every_kind: seqlen is wrong$"):
        guarded("size", a=1, c=0)
    with pytest.raises(UnsupportedError, match=r"test_refusals.every_kind: seqlen is not supported$"):
        guarded("word", a=1, c=0)
    with pytest.raises(TypeError, match=r"every_kind\(\) missing 1 required positional argument: 'a'"):
        guarded(0, c=0)

    def words_alone(*, a, b=1):
        return a, b

    assert _refusals.translate_errors()(words_alone)(a=2) == (2, 1)
