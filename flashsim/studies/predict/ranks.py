"""Predicts the time of attention that is distributed over several GPUs, including transfers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from flashsim import report
from flashsim.counts.questions import in_words
from flashsim.distributed import Account, count
from flashsim.distributed.counting import work
from flashsim.errors import OptionError, UnsupportedError, own_errors
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.links import Link
from flashsim.problem.problem import Problem
from flashsim.studies.predict.calibration import CALIBRATED, HBM_SHARE
from flashsim.studies.predict.decode_time import ALGORITHM as DECODES
from flashsim.studies.predict.model import family_name, predict

#: The default number of GPUs per host.
HOST = 8


@dataclass(frozen=True, eq=False, repr=False)
class SpreadTime(report.Tabled):
    """The predicted time of a pass over several ranks (GPUs); prints as a table.

    Attributes
    ----------
    account : Account
        The bytes sent and the work computed.
    link, network : Link
        The links inside a host, and between hosts.
    one : float
        Seconds that one GPU would take for the whole problem without a power limit.
    compute : ndarray, (ranks, steps)
        Seconds of local attention and merging.
    transfer : ndarray, (ranks, steps)
        Seconds that a rank's sends take on the slowest link that they use.
    start, end : ndarray, (ranks, steps)
        The times at which each step begins and ends on each rank. A step ends when its blocks are
        computed and all data that it sends and receives has arrived.
    """

    account: Account
    device: Device
    link: Link
    network: Link
    one: float
    compute: np.ndarray
    transfer: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def seconds(self) -> float:
        """The predicted time of the pass: the seconds until the last rank (GPU) has finished."""
        return float(self.end.max())

    @property
    def alone(self) -> float:
        """The seconds that the pass would take if transfers took no time."""
        return float(_run(self.account, self.compute, np.zeros_like(self.transfer))[1].max())

    @property
    def exposed(self) -> float:
        """The seconds that transfers add to the pass."""
        return self.seconds - self.alone

    @property
    def efficiency(self) -> float:
        """Parallel efficiency: one GPU's time / (`seconds` times ranks); 1 is perfect scaling."""
        return self.one / (self.seconds * self.account.group.ranks)

    def table(self) -> report.Table:
        """Return a table with one row per step: computing, transfers, and waiting for transfers."""
        account, group = self.account, self.account.group
        table = report.Table(
            f"{account.direction} by {group.scheme!r} over {group.ranks} x {self.device.name}, "
            f"{in_words(group.problem)}: {self.seconds * 1e3:.4g} ms",
            ("step", "compute ms", "least ms", "transfer ms", "waits ms"),
            note=f"the speed is {100 * self.efficiency:.1f} % of {group.ranks} times one GPU's "
            f"({self.one * 1e3:.4g} ms); communication prolongs the pass by "
            f"{self.exposed * 1e3:.4g} ms; links: {self.link.name}, {self.network.name} between "
            "hosts; compute: of the busiest rank; least: of the least busy rank; waits: the "
            "longest",
        )
        # Rounding errors of up to a picosecond, also negative ones, count as no wait.
        waits = np.maximum(self.end - self.start - self.compute, 0).round(12)
        each = [x.max(axis=0) for x in (self.compute, self.transfer, waits)]
        each.insert(1, self.compute.min(axis=0))
        for step, *seconds in zip(account.steps, *each, strict=True):
            table.add(step, *(1e3 * float(x) for x in seconds))
        return table


@own_errors
def spread(
    problem: Problem,
    *,
    ranks: int,
    scheme: str = "zigzag",
    ulysses: int | None = None,
    direction: str = "forward",
    algorithm: str = "flash2",
    kernels: str | None = None,
    device: str | Device = "H200",
    link: str | Link | None = None,
    network: str | Link = "InfiniBand NDR",
    host: int = HOST,
) -> SpreadTime:
    """Predict the time of attention over several GPUs, step by step.

    At each step, every rank begins to send, receive and compute at the same time. A transfer begins
    when the sender and the receiver have begun the step. A rank begins the next step when its
    blocks are computed and all data that it sends and receives has arrived. The model assumes that
    links reach their nominal speed, and do not slow down kernels. Local attention takes the time
    that `predict` returns; merging takes the time that HBM needs for its bytes. The model assumes
    the high clock at which short kernels run. The model ignores that a power limit also slows down
    a long series of short kernels.

    Parameters
    ----------
    problem, ranks, scheme, ulysses
        As in `flashsim.distributed.count`.
    direction, algorithm, kernels, device
        The arguments of `predict` for every rank's local attention.
    link : str or Link, optional
        The link between the GPUs of a host, by name (`flashsim.problem.links.LINKS`); default: the
        device's own link.
    network : str or Link
        The link between hosts, one per GPU.
    host : int
        The number of GPUs per host: ranks 0 to `host` - 1 share the first host, and so on.

    Raises
    ------
    FlashSimError
    """
    device = Device.get(device)
    if algorithm == DECODES:
        raise UnsupportedError(
            f"the time of {DECODES!r} can be predicted only for a few queries, but each rank has "
            "many; use algorithm='flash2'"
        )
    if link is None and not device.link:
        raise OptionError(
            f"{device.name} has no preset link between GPUs; pass link= with a link's name or a "
            "flashsim.predict.Link"
        )
    inside, between = Link.get(device.link if link is None else link), Link.get(network)
    host = checks.positive_int("host", host)
    roomy = replace(device, sram_bytes=device.sram_per_sm + device.registers_per_sm)
    group: dict[str, Any] = {"ranks": ranks, "scheme": scheme, "ulysses": ulysses}
    account = count(problem, **group, direction=direction, algorithm=algorithm, device=roomy)
    how = (direction, algorithm, kernels, device)
    compute = account.merge / (device.hbm_bandwidth * HBM_SHARE)
    for columns, there, block in work(account.group, direction):
        compute[:, columns][there] += _seconds(block.problem, *how)
    transfer = _transfers(account, inside, between, host)
    start, end = _run(account, compute, transfer)
    one = _seconds(problem, *how)
    return SpreadTime(account, device, inside, between, one, compute, transfer, start, end)


@lru_cache(maxsize=256)
def _seconds(
    problem: Problem, direction: str, algorithm: str, kernels: str | None, device: Device
) -> float:
    constants = None
    if algorithm in ("flash2", "flash2-fused"):  # other predictions have no power limit
        kernels = family_name(kernels, problem, None, device, direction, algorithm)
        constants = {name: c._replace(throttle=0.0) for name, c in CALIBRATED[kernels].items()}
    how: dict[str, Any] = {"direction": direction, "algorithm": algorithm, "kernels": kernels}
    return predict(problem, **how, constants=constants, device=device).seconds


def _transfers(account: Account, inside: Link, between: Link, host: int) -> np.ndarray:
    """Return the seconds that each rank's transfers take at each step."""
    group, out = account.group, account.out_bytes
    ranks = np.arange(group.ranks)
    abroad = ranks // host != (ranks + group.ulysses) % group.ranks // host
    made = np.where(abroad[:, None], _time(out, between), _time(out, inside))
    if group.ulysses > 1:
        team = [np.array(group.team(int(rank))) // host for rank in ranks]
        away = np.array(
            [(hosts != rank // host).mean() for rank, hosts in zip(ranks, team, strict=True)]
        )
        away *= group.ulysses / (group.ulysses - 1)  # as a share of the ranks to which it sends
        for step in (0, -1):
            near, far = out[:, step] * (1 - away), out[:, step] * away
            made[:, step] = np.maximum(_time(near, inside), _time(far, between))
    return made


def _time(nbytes: np.ndarray, link: Link) -> np.ndarray:
    return np.where(nbytes > 0, link.latency + nbytes / link.bandwidth, 0.0)


def _run(
    account: Account, compute: np.ndarray, transfer: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: when each step begins on each rank, and when it ends."""
    group = account.group
    start, end = np.zeros_like(compute), np.zeros_like(compute)
    now = np.zeros(group.ranks)
    for n, step in enumerate(account.steps):
        start[:, n] = now
        computed = now + compute[:, n]
        if step.startswith("exchange"):
            teams = (now + transfer[:, n]).reshape(-1, group.ulysses).max(axis=1)
            now = np.maximum(computed, np.repeat(teams, group.ulysses))
        elif transfer[:, n].any():
            begun = np.maximum(now, np.roll(now, -group.ulysses))  # sender and receiver
            arrived = np.where(transfer[:, n] > 0, begun + transfer[:, n], 0.0)
            now = np.maximum(computed, np.maximum(arrived, np.roll(arrived, group.ulysses)))
        else:
            now = computed
        end[:, n] = now
    return start, end
