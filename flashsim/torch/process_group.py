"""Messages between ranks of a process group, which agree on arguments before tensors are sent.

The module only uses `batch_isend_irecv` of torch.distributed, with gloo on the CPU and NCCL on
GPUs. On GPUs, messages run on a separate CUDA stream and overlap the kernels. If a rank fails, dies
or is called with other arguments, every rank raises an error: at once, or after the group's
timeout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from flashsim.distributed.group import SCHEMES
from flashsim.errors import RankError

_COUNTERS: list[Counter[str]] = []


@contextmanager
def count_sent() -> Iterator[Counter[str]]:
    """Count the bytes that this rank sends in a ``with`` block, by tensor: "K", "V", "dK", ...

    `flashsim.distributed.count` predicts the bytes that a rank sends.
    """
    counter: Counter[str] = Counter()
    _COUNTERS.append(counter)
    try:
        yield counter
    finally:
        _COUNTERS.remove(counter)


#: Contiguous tensors by name that are sent as one message.
Parcel = dict[str, Tensor]


def parcel(**tensors: Tensor) -> Parcel:
    """Return contiguous tensors as a parcel, which is sent as one message."""
    return {name: x.contiguous() for name, x in tensors.items()}


def room(like: Parcel) -> Parcel:
    """Return a parcel of new, uninitialised tensors that can receive a parcel like this one."""
    return {name: torch.empty_like(x) for name, x in like.items()}


class Pending:
    """A batch of sends and receives that are in progress."""

    def __init__(self, works: Sequence[Any], going: Any, what: str) -> None:
        self._works, self._what = works, what
        self._going = going  # tensors stay alive until they are sent

    def wait(self) -> None:
        """Wait for all sends and receives (on a GPU, only the current stream waits).

        If another rank is gone, or the group's timeout has passed, RankError is raised.
        """
        with _explaining(self._what):
            for work in self._works:
                work.wait()
        self._going = None


class Member:
    """This process, as one rank of a process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RankError(
                "there is no process group: start this program with torchrun or a similar "
                "launcher, and call torch.distributed.init_process_group() first"
            )
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise RankError(
                "this process is not a member of the process group passed as group=; call this "
                "only on the group's ranks"
            )

    def ask(self, mine: Mapping[str, int], error: Exception | None = None) -> Inquiry:
        """Start to send this rank's arguments (`mine`) and the flag `error` to all ranks."""
        return Inquiry(self, mine, error)

    def exchange(
        self, going: Sequence[tuple[Parcel, int]], coming: Sequence[tuple[Parcel, int]], what: str
    ) -> Pending:
        """Start to send parcels to ranks and to receive parcels from ranks, all in one batch."""
        for counter in _COUNTERS:
            for tensors, _ in going:
                for name, x in tensors.items():
                    counter[name] += x.numel() * x.element_size()
        group = self.group
        operations = [
            dist.P2POp(how, x, group=group, group_peer=other)
            for how, parcels in ((dist.isend, going), (dist.irecv, coming))
            for tensors, other in parcels
            for x in tensors.values()
        ]
        what = f"rank {self.rank} of {self.ranks}: {what}"
        with _explaining(what):
            works = dist.batch_isend_irecv(operations) if operations else []
        if operations and operations[0].tensor.is_cuda and HEAD_START:
            torch.cuda._sleep(HEAD_START)
        return Pending(works, (going, coming), what)


#: Cycles for which kernels wait after a transfer begins. The attention kernels fill every
#: multiprocessor until they end, so NCCL's blocks must be there first.
HEAD_START = 20_000


class Inquiry:
    """A comparison of all ranks' arguments that is in progress."""

    #: The arguments on which all ranks of a group agreed before.
    _known: ClassVar[set[tuple[Any, ...]]] = set()

    def __init__(self, link: Member, mine: Mapping[str, int], error: Exception | None) -> None:
        self._error = error
        self._names, self._key = list(mine), (link.group, *mine.values())
        numbers = torch.tensor([error is not None, *mine.values()], dtype=torch.int64)
        self._everyone = [torch.empty_like(numbers) for _ in range(link.ranks)]
        self._what = f"rank {link.rank} of {link.ranks}: asking whether all ranks agree"
        with _explaining(self._what):
            self._work = dist.all_gather(
                self._everyone, numbers, group=_host_group(link.group), async_op=True
            )

    @property
    def familiar(self) -> bool:
        """Return True if the ranks agreed on these arguments in an earlier call."""
        return self._error is None and self._key in self._known

    def settle(self) -> None:
        """Raise this rank's own error, or RankError if another rank failed or arguments differ."""
        with _explaining(self._what):
            self._work.wait()
        if self._error is not None:
            raise self._error
        told = [x.tolist() for x in self._everyone]
        wrong = [rank for rank, (failed, *_) in enumerate(told) if failed]
        if wrong:
            there = _ranks(wrong)
            raise RankError(f"{there} failed; read the error message that {there} printed")
        if told.count(told[0]) < len(told):
            self._refuse(told)
        self._known.add(self._key)

    def _refuse(self, told: list[list[int]]) -> NoReturn:
        """Raise RankError for the first argument whose value differs between ranks."""
        for column, name in enumerate(self._names, 1):
            values = [numbers[column] for numbers in told]
            if len(set(values)) > 1:
                found = ", ".join(
                    f"{_named(name, x)} on {_ranks(_where(values, x))}"
                    for x in dict.fromkeys(values)
                )
                raise RankError(f"all ranks must get the same {name}, got {found}")
        raise AssertionError(told)


@contextmanager
def _explaining(what: str) -> Iterator[None]:
    """Turn torch.distributed's errors in the ``with`` block into RankError for the step `what`."""
    try:
        yield
    except RuntimeError as error:
        (first, *_) = str(error).splitlines() or [""]
        raise RankError(
            f"{what} failed: another rank has ended, or has not reached this point within the "
            f"group's timeout ({first}); see the errors of the other ranks"
        ) from error


@lru_cache(maxsize=64)
def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group for CPU tensors: `group` itself, or a gloo group with `group`'s timeout."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        ranks = dist.get_process_group_ranks(group)
        return dist.new_group(
            ranks, backend="gloo", timeout=_timeout(group), use_local_synchronization=True
        )
    return group


def _timeout(group: dist.ProcessGroup) -> Any:
    try:
        return group._get_backend(torch.device("cuda")).options._timeout
    except (AttributeError, RuntimeError):
        return None


def _where(values: Sequence[int], wanted: int) -> list[int]:
    return [rank for rank, value in enumerate(values) if value == wanted]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


#: The element types by number; ranks compare the numbers.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _named(name: str, value: int) -> str:
    """Return an argument, which ranks compare as a number, as text for an error message."""
    names = {"dtype": DTYPES, "scheme": SCHEMES, "causal": ("no", "yes")}.get(name)
    return str(value) if names is None else str(names[value]).removeprefix("torch.")
