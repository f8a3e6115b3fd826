"""A call that does not fit a function is refused in flashsim's words, whatever the function."""

from __future__ import annotations

import inspect
import pickle
from importlib.util import find_spec

import numpy as np
import pytest

import flashsim
from flashsim import Device, Tiling, UnknownArgumentError
from flashsim.errors import own_errors

pytestmark = pytest.mark.promise("refuses bad input")

#: Classes of rooms that users make objects of; the others' objects are what functions return.
MADE = {"Case", "Constants", "Exercise", "Group", "L2Model", "Lesson", "Link", "Question", "Task"}
#: What is imported only where an optional package is installed, which has names of its own.
BRIDGES = {"torch": "torch", "jax": "jax", "viz": "matplotlib"}


def public():
    """Every public function, and every class that a user may call, by its name."""
    found = {name: getattr(flashsim, name) for name in flashsim.__all__}
    for room in flashsim._LATE:
        if room in ("torch", "jax") or find_spec(BRIDGES.get(room, "numpy")) is None:
            continue
        module = getattr(flashsim, room)
        own = [n for n, x in vars(module).items() if getattr(x, "__module__", 0) == module.__name__]
        for name in getattr(module, "__all__", own):
            x = getattr(module, name)
            if not name.startswith("_") and (not isinstance(x, type) or name in MADE):
                found[f"{room}.{name}"] = x
    return {
        name: x
        for name, x in found.items()
        if callable(x) and not (isinstance(x, type) and issubclass(x, Exception))
    }


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_call_that_does_not_fit_says_so_in_our_words(name):
    called, short = PUBLIC[name], name.split(".")[-1]
    parameters = inspect.signature(called).parameters.values()
    kinds = {one.kind for one in parameters}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        with pytest.raises(UnknownArgumentError, match=f"^{short}.. has no argument 'nosuch'; "):
            called(nosuch=1)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        with pytest.raises(UnknownArgumentError, match=f"^{short}.*too many positional arguments"):
            called(*range(50))
    lacks = [x.name for x in parameters if x.default is x.empty and x.kind not in (2, 4)]
    if lacks:
        with pytest.raises(UnknownArgumentError, match=f"^{short}.*'{lacks[0]}'; got: nothing"):
            called()


def test_what_was_wrong_what_was_given_what_there_is():
    text = "Device(): missing a required argument: 'sram_per_sm'; got: 3, 1; its arguments are name"
    with pytest.raises(UnknownArgumentError) as caught:
        Device(3, 1)
    assert str(caught.value).startswith(text)
    assert isinstance(caught.value, TypeError)
    assert caught.value.__context__ is None
    with pytest.raises(
        UnknownArgumentError, match="got: 1, block_q=2, block_k=3; its arguments are block_q"
    ):
        Tiling(1, block_q=2, block_k=3)
    with pytest.raises(UnknownArgumentError, match="here it is called algorithm"):
        flashsim.count(algo="flash1")
    with pytest.raises(UnknownArgumentError, match=r"got: <ndarray float32 \(64, 16\)>; its"):
        flashsim.run(np.random.default_rng(0).random((64, 16), np.float32))


def test_a_mistake_inside_is_not_taken_for_one_in_the_call():
    @own_errors
    def broken(x):
        return x + "text"

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        broken(1)
    assert not isinstance(caught.value, flashsim.FlashSimError)


def test_what_refuses_calls_is_still_found_by_its_name():
    assert pickle.loads(pickle.dumps(flashsim.count)) is flashsim.count
    assert inspect.signature(flashsim.count).parameters["level"].default == "requested"


def test_every_annotation_that_an_error_quotes_is_text():
    """Also of inherited methods: their modules import annotations from the future."""
    found = {x for x in PUBLIC.values() if isinstance(x, type)}
    methods = {
        vars(base)[n] for x in found for base in x.__mro__ for n in vars(base) if n[0] != "_"
    }
    methods = {getattr(x, "__func__", x) for x in methods if not isinstance(x, property)}
    called = [x.__wrapped__ for x in {*PUBLIC.values(), *methods} if hasattr(x, "guarded")]
    assert len(called) > 50
    for one in called:
        kinds = {n: x for n, x in one.__annotations__.items() if n != "return"}
        assert all(isinstance(x, str) for x in kinds.values()), one.__qualname__
