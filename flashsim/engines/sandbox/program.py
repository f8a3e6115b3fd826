"""Records a user's algorithm as a program without numbers, and replays it with any numbers.

An algorithm cannot depend on its tiles' numbers, so one run on tiles that are all NaN contains all
instructions. `record` returns the instructions as text. `replay` performs the instructions on
another machine, which checks them as if the algorithm itself ran.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim.engines.sandbox.arithmetic import COSTS
from flashsim.engines.sandbox.lines import REPLAYED
from flashsim.engines.sandbox.machine import OpenMachine
from flashsim.engines.sandbox.running import located, one_argument, put, run, size
from flashsim.engines.sandbox.tape import MOST_LINE, OPERATIONS, SCOPES, TAPE, Tape
from flashsim.engines.sandbox.tile import SramTile
from flashsim.errors import FlashSimError
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule.schedule import Visit
from flashsim.schedule.tensors import dtype as dtype_of
from flashsim.schedule.tiling import Tiling

#: The most bytes of SRAM, and of workspaces, of a recorded algorithm, to protect the computer that
#: replays it; the limits of the simulated device are checked separately.
MOST, MOST_HBM = 1 << 22, 1 << 24
_UFUNCS = {ufunc.__name__: ufunc for ufunc in COSTS}


class ProgramError(Exception):
    """A text is no recorded program, or a replay takes too long."""


@dataclass(frozen=True)
class Setting:
    """The data for a machine: the problem, the sizes, and the tensors in HBM."""

    problem: Problem
    tiling: Tiling
    device: Device
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def machine(
        self, arrays: Mapping[str, np.ndarray], *, samples: int = 1, most: int | None = MOST
    ) -> OpenMachine:
        """Return a machine whose HBM holds `samples` sets of inputs along the first axis."""
        p = self.problem
        machine = OpenMachine(
            p, self.tiling, self.device, samples=samples, most=most, most_hbm=MOST_HBM
        )
        put(machine, {name: arrays[name] for name in ("Q", "K", "V", *self.inputs)}, self.outputs)
        return machine

    def blank(self) -> OpenMachine:
        """Return a machine whose inputs are all NaN."""
        names = ("Q", "K", "V", *self.inputs)
        kinds = {name: numpy_dtype(dtype_of(self.problem, name)) for name in names}
        return self.machine({n: np.full(size(self.problem, n), np.nan, kinds[n]) for n in names})


def record(algorithm: Callable[[OpenMachine], None], name: str, setting: Setting) -> list[str]:
    """Run an algorithm on tiles that are all NaN, and return its program."""
    one_argument(algorithm, name)
    machine, tape = setting.blank(), Tape()
    before = TAPE.set(tape)
    try:
        run(algorithm, name, machine)
    finally:
        TAPE.reset(before)
    return tape.instructions


def replay(
    program: Iterable[str | bytes],
    machine: OpenMachine,
    name: str,
    source: Sequence[str] = (),
    *,
    until: float = float("inf"),
) -> None:
    """Perform a recorded program on a machine, until a deadline of `time.monotonic`.

    Error messages quote the `name` of the algorithm, and the lines of its file, `source`. A refused
    instruction raises `FlashSimError`; an invalid program or a missed deadline raises
    `ProgramError`.
    """
    player, before = _Player(machine), REPLAYED.set(0)
    try:
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            for text in program:
                if time.monotonic() > until:
                    raise ProgramError(
                        "the recorded program takes too long to replay; load and store fewer, "
                        "larger tiles"
                    )
                player.perform(text)
        if player.open:
            raise ProgramError(
                "the recorded program ends inside a step, a visit or another scope that was not "
                "closed; open each scope in a `with` statement"
            )
    except ProgramError:
        raise
    except FlashSimError as error:
        line = REPLAYED.get()
        text = source[line - 1] if 0 < line <= len(source) else ""
        raise located(error, name, line, text) from None
    except Exception as error:  # any other error means that no tape wrote the text
        raise ProgramError(
            "flashsim cannot replay the recorded program, because it is malformed "
            f"({type(error).__name__}); do not change recorded programs"
        ) from None
    finally:
        REPLAYED.reset(before)


class _Player:
    """Performs instructions on a machine; `tiles` holds the tiles that are still in use."""

    def __init__(self, machine: OpenMachine) -> None:
        self.machine = machine
        self.sram: Any = None
        self.tiles: dict[int, SramTile] = {}
        self.made = 0
        self.open: list[AbstractContextManager[Any]] = []

    def perform(self, text: str | bytes) -> None:
        """Perform one instruction."""
        if len(text) > MOST_LINE:
            raise ProgramError(
                f"an instruction of the recorded program has more than {MOST_LINE:,} characters, "
                "the limit of flashsim's machine; do not change recorded programs"
            )
        line, name, arguments, named = json.loads(text)
        REPLAYED.set(int(line))
        if name == "drop":
            for number in arguments:
                del self.tiles[number]
        elif name == "end":
            self.open.pop().__exit__(None, None, None)
        else:
            args = [self._value(value) for value in arguments]
            kwargs = {key: self._value(value) for key, value in named.items()}
            if name in SCOPES:
                scope = SCOPES[name](*args, **kwargs)
                held = scope.__enter__()
                self.open.append(scope)
                if name == "stage":
                    self.sram = held
                return
            result = OPERATIONS[name](*args, **kwargs)
            if isinstance(result, SramTile) and result._number < 0:
                result._number = self.made
                self.tiles[self.made] = result
                self.made += 1

    def _value(self, encoded: Any) -> Any:
        """Return an operation's argument from its JSON value, as the reverse of `tape._plain`."""
        if isinstance(encoded, list):
            return tuple(self._value(element) for element in encoded)
        if not isinstance(encoded, dict):
            return encoded
        ((kind, value),) = encoded.items()
        if kind == "tile":
            return self.tiles[value]
        return _VALUES[kind](self, value)


def _mask(encoded: Any) -> np.ndarray:
    sides, bits = encoded
    flags = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8))
    n = int(np.prod([int(side) for side in sides]))
    return flags[:n].astype(bool).reshape(sides)


def _type(name: str) -> np.dtype:
    kind = numpy_dtype(name) if name in ("bfloat16", "float16") else np.dtype(name)
    if kind.kind not in "biuf" and name != "bfloat16":
        raise ProgramError(
            f"the recorded program has a tile of type {name}, which flashsim's machine does not "
            "support; do not change recorded programs"
        )
    return kind


_VALUES: Mapping[str, Callable[[_Player, Any], Any]] = {
    "hbm": lambda player, name: player.machine.hbm.tensors[name],
    "space": lambda player, _: player.machine.hbm,
    "machine": lambda player, _: player.machine,
    "sram": lambda player, _: player.sram,
    "slice": lambda player, ends: slice(*ends),
    "dots": lambda player, _: ...,
    "mask": lambda player, given: _mask(given),
    "ufunc": lambda player, name: _UFUNCS[name],
    "type": lambda player, name: _type(name),
    "tiling": lambda player, sides: Tiling(*sides),
    "visit": lambda player, at: Visit(player.sram.schedule, 0, at[0], at[1], slice(0), slice(0), 0),
}
