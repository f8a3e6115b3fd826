"""The tables of docs/reference/hopper.md agree with the kernels: tiles, registers, barriers."""

import re
from pathlib import Path

import pytest
from gpus import H200

from flashsim import Problem, Tiling
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.hopper_kernels import take_turns

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/hopper.md"
KERNELS = ROOT / "backends/kernels/hopper"
#: The file that initialises a kernel's mbarriers, if that is not the kernel's own.
INITIALISED_IN = {
    "forward_fp8.cu": "softmax.cuh",
    "backward.cu": "kv_outer.cuh",
    "backward_wide.cu": "kv_outer.cuh",
}


def table(heading: str) -> list[list[str]]:
    """The cells of a section's table; an empty first cell repeats the one above."""
    section = re.split(rf"^##+ {heading}\n", PAGE.read_text("utf-8"), flags=re.M)[1]
    lines = [line for line in section.split("\n#")[0].splitlines() if line.startswith("|")]
    rows: list[list[str]] = []
    for line in lines[2:]:
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append([first or rows[-1][0], *others])
    return rows


def files(cell: str) -> list[str]:
    return re.findall(r"`(\w+\.cu)`", cell)


def source(name: str) -> str:
    return re.sub(r"//.*", "", (KERNELS / name).read_text("utf-8"))


def registers(text: str, warpgroups: int, *, scored: bool = False) -> dict[str, int]:
    """Registers by role, of the constants whose values may depend on the number of warpgroups.

    `scored` says whether there is a score function beside more than 224 columns.
    """
    found = {}
    for role, value in re.findall(r"(\w+)_REGISTERS = ([^,;]+)[,;]", text):
        value = re.sub(r"SCORED_WIDE \? (\d+) : (\d+)", r"\1" if scored else r"\2", value)
        choice = re.fullmatch(r"WARPGROUPS == (\d) \? (\d+) : (\d+)", value)
        if choice:
            value = choice[2] if int(choice[1]) == warpgroups else choice[3]
        found[role.lower()] = int(value)
    return found


def test_the_page_has_the_kernels_registers_and_threads():
    rows = table("Threads, registers and tile sizes")
    listed = {name for row in rows for name in files(row[0])}
    assert listed == {path.name for path in KERNELS.glob("*.cu") if registers(source(path.name), 2)}
    for cell, warpgroups, threads, producer, consumer, *_ in rows:
        (name,) = files(cell)
        text = source(name)
        assert int(threads) == 128 * (int(warpgroups) + 1)
        fixed = re.search(r"WARPGROUPS = (\d)\b", text)
        assert not fixed or fixed[1] == warpgroups
        has = registers(text, int(warpgroups), scored="score function" in cell)
        assert int(producer) == has.pop("producer")
        roles = re.findall(r"([a-z]+) (\d+)", consumer) or [("consumer", consumer)]
        assert {role: int(number) for role, number in roles} == has


def test_the_page_has_every_mbarrier_with_its_arrivals():
    listed: dict[str, dict[str, str]] = {}
    for cell, names, arrivals, _ in table("mbarriers"):
        for name in files(cell):
            given = dict.fromkeys(re.findall(r"`(\w+)`", names), arrivals.replace("×", "*"))
            listed.setdefault(name, {}).update(given)
    assert listed.keys() == {name for row in table("Threads, reg.*") for name in files(row[0])}
    for name, barriers in listed.items():
        texts = [source(name), source(INITIALISED_IN.get(name, name))]
        texts += [source("softmax.cuh")] if name == "forward.cu" else []
        made = dict(
            (barrier, " ".join(arrivals.replace("WARPGROUPS", "WG").split()))
            for text in texts
            for barrier, arrivals in re.findall(r"barrier_init\(&s\.(\w+)[^,]*, ([^)]+)\)", text)
        )
        if name == "backward_wide.cu":  # it never defers dQ
            made = {barrier: n for barrier, n in made.items() if not barrier.startswith("ds_")}
        assert barriers == made, name


def test_the_page_has_every_named_barrier_with_its_number_and_threads():
    listed: dict[str, dict[str, tuple[str, int]]] = {}
    for cell, barrier, number, threads, _ in table("Named barriers"):
        for name in files(cell):
            listed.setdefault(name, {})[barrier.strip("`")] = number, int(threads)
    waiting = {path.name for path in KERNELS.glob("*.cu") if "named_sync(" in source(path.name)}
    assert listed.keys() == waiting - {"dq.cu"}
    for name, barriers in listed.items():
        text = source(name)
        enum = re.search(r"enum NamedBarrier \{([^}]*)\}", text)
        constants = enum[1] if enum else "".join(re.findall(r"constexpr int (P_FULL[^;]*);", text))
        numbers, last = {}, 0
        for part in filter(None, map(str.strip, constants.split(","))):
            barrier, _, number = part.partition(" = ")
            last = numbers[barrier] = int(number) if number else last + 1
        headers = "kv_outer.cuh", "send_dq.cuh", "dq_of_keys.cuh", "score_terms.cuh"
        used = text + "".join(source(x) for x in headers)
        for barrier, (number, threads) in barriers.items():
            if barrier == "turn":
                assert f"turn = {number}," in text
            else:
                assert int(number.split()[0]) == numbers.pop(barrier)
            calls = re.findall(rf"named_\w+\({barrier}(?: \+ g)?, ([^)]+)\)", used)
            counts = {128 * 2 if n == "128 * WARPGROUPS" else int(n) for n in calls}
            assert counts == {threads}, (name, barrier)
        assert not numbers, name


def test_the_page_says_where_ping_pong_is_off():
    at = Tiling(128, 176)
    for head_dim, n_kv, on in ((128, 16 * 176, 1), (128, 16 * 176 + 1, 0), (64, 10**5, 1)):
        assert take_turns(Problem(128, n_kv, head_dim), at) == on
    assert not take_turns(Problem(128, 10**5, 128), at)
    assert take_turns(Problem(128, 10**5, 128, 64), at)
    assert "are 128\nand n_kv is above 16 × block_k" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_the_page_lists_the_forward_tiles(head_dim):
    (row,) = re.findall(rf"^\| tile, d ≤ {head_dim} \|(.*)$", PAGE.read_text("utf-8"), re.M)
    cell = row.split("|")[0]
    listed = {Tiling(int(q), int(k)) for q, k in re.findall(r"(\d+) × (\d+)", cell)}
    problem = Problem(4096, 4096, head_dim, dtype="bfloat16")
    assert listed == set(HOPPER.tilings(problem, H200, "forward"))
