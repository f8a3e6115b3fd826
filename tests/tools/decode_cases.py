"""Decoding cases: paged caches, the true attention over them, and the bytes of a launch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

import flashsim
from flashsim import Device, Tiling
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy import decode_plan
from flashsim.backends.launch_policy.decode_plan import Decode
from flashsim.problem import oracle
from flashsim.problem.problem import Problem, numpy_dtype

#: A page number that no kernel may read.
POISON = 1 << 30


@dataclass(frozen=True)
class Case:
    """A problem with live lengths, a page size (0: contiguous), and the number of shared keys."""

    problem: Problem
    lengths: tuple[int, ...]
    page: int = 0
    prefix: int = 0

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return q, k, v, and a table of pages. Dead elements are NaN, unused entries POISON."""
        p, rng = self.problem, np.random.default_rng(seed)
        dtype = numpy_dtype(p.dtype)
        q = rng.standard_normal((p.batch, p.heads, p.n_q, p.head_dim)).astype(dtype)
        x = {"q": q}
        for name, d in (("k", p.head_dim), ("v", p.head_dim_v)):
            if name == "v" and p.latent:
                continue
            cache = rng.standard_normal((p.batch, p.kv_heads, p.n_kv, d)).astype(dtype)
            cache[:, :, : self.prefix] = cache[:1, :, : self.prefix]
            for b, length in enumerate(self.lengths):
                cache[b, :, length:] = np.nan
            x[name] = cache
        if not self.page:
            return x
        used = [-(-length // self.page) for length in self.lengths]
        per = -(-p.n_kv // self.page)
        numbers = rng.permutation(sum(used) + 2)
        table = np.full((p.batch, per), POISON, np.int32)
        for b, n in enumerate(used):
            start = sum(used[:b])
            table[b, :n] = numbers[start : start + n]
        shared = self.prefix // self.page
        table[:, :shared] = table[:1, :shared]
        for name in x.keys() & {"k", "v"}:
            cache = x[name]
            pool = np.full((len(numbers), p.kv_heads, self.page, cache.shape[-1]), np.nan, dtype)
            for b, n in enumerate(used):
                for i in range(n):
                    rows = cache[b, :, i * self.page : (i + 1) * self.page]
                    pool[table[b, i], :, : rows.shape[1]] = rows
            x[name] = pool
        return x | {"table": table}

    def contiguous(self, x: dict[str, np.ndarray], b: int) -> dict[str, np.ndarray]:
        """Return sequence b's q, and its live k and v, from a contiguous or paged cache."""
        made = {"q": x["q"][b : b + 1]}
        for name in x.keys() & {"k", "v"}:
            if not self.page:
                made[name] = x[name][b : b + 1, :, : self.lengths[b]]
                continue
            pages = x["table"][b, : -(-self.lengths[b] // self.page)]
            rows = np.moveaxis(x[name][pages], 1, 0)
            rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])
            made[name] = rows[None, :, : self.lengths[b]]
        made.setdefault("v", made["k"][..., : self.problem.head_dim_v])  # latent attention
        return made

    def truth(self, x: dict[str, np.ndarray]) -> list[tuple[np.ndarray, ...]]:
        """Return each sequence's out and LSE in float64, and out in its own type.

        A sequence without keys has 0 and -inf.
        """
        found, p = [], self.problem
        for b, length in enumerate(self.lengths):
            if not length:
                none = np.zeros((1, p.heads, p.n_q, p.head_dim_v))
                found.append((none, np.full(none.shape[:3], -np.inf), none))
                continue
            one = replace(p, batch=1, n_kv=length)
            given = self.contiguous(x, b)
            arrays = [given[name] for name in "qkv"]
            plain, _ = oracle.attention(*arrays, one, dtype=p.dtype)
            found.append((*oracle.attention(*arrays, one), plain))
        return found

    def check(self, x: dict[str, np.ndarray], out: np.ndarray, lse: np.ndarray) -> None:
        """Check errors: at most twice plain attention's in the same type, and one rounding."""
        u = {"float16": 2**-11, "bfloat16": 2**-8}[self.problem.dtype]
        for b, (exact, exact_lse, plain) in enumerate(self.truth(x)):
            allowed = 2 * np.abs(plain - exact).max() + u * max(np.abs(exact).max(), 1)
            assert np.abs(out[b : b + 1].astype(np.float64) - exact).max() <= allowed, b
            np.testing.assert_array_equal(np.isfinite(lse[b]), np.isfinite(exact_lse[0]))
            seen = np.isfinite(exact_lse[0])
            np.testing.assert_allclose(lse[b][seen], exact_lse[0][seen], rtol=2e-6, atol=2e-5)


def planned(case: Case, gpu: Gpu, splits: int | None = None, **more: bool) -> Decode:
    """Return the launch that a GPU runs for a case."""
    given = (case.problem, case.lengths, gpu, splits, case.page)
    return decode_plan.plan(*given, **more, prefix=case.prefix)


def moved(decode: Decode, case: Case) -> dict[str, int]:
    """Return the bytes of all tensors that a launch moves, from lengths, splits and tiles alone."""
    p, size = case.problem, case.problem.itemsize
    made = dict.fromkeys(("K", "V", "table", "Q", "O_part", "L_part", "O", "L"), 0)
    for length, splits in zip(case.lengths, decode.splits, strict=True):
        first = max(0, length - p.n_q - p.left) // decode.block_k * decode.block_k
        keys = max(0, length - first) * p.kv_heads * decode.row_tiles
        made["K"] += keys * p.head_dim * size
        made["V"] += 0 if p.latent else keys * p.head_dim_v * size
        for start in range(first, length, decode.block_k) if case.page else ():
            stop = min(start + decode.block_k, length)
            entries = (stop - 1) // case.page - start // case.page + 1
            made["table"] += 4 * entries * p.kv_heads * decode.row_tiles
        rows = p.heads * p.n_q
        made["Q"] += splits * rows * p.head_dim * size
        made["O"] += rows * p.head_dim_v * size
        made["L"] += rows * 4
        if splits > 1:
            made["O_part"] += splits * rows * p.head_dim_v * 4
            made["L_part"] += splits * rows * 4
    made["O_part read"], made["L_part read"] = made["O_part"], made["L_part"]
    return made


def simulated(decode: Decode, case: Case, x: dict[str, np.ndarray] | None = None) -> dict[str, int]:
    """Return the simulator's bytes for `x`, or, without x, those of the closed form.

    Sequences with equal splits are run together, and those without keys with any of them. Only for
    a launch with one row tile or without a mask: with several row tiles, the kernel reads all keys
    for each.
    """
    p, names = case.problem, ("causal", "window", "softcap", "scale")
    how = {
        **{"algorithm": "flash-decode", "device": Device.get("H200").with_sram(1 << 24)},
        "tiling": Tiling(-(-decode.rows // decode.row_tiles // 16) * 16, decode.block_k),
    }
    if decode.prefix:
        tiles = [-(-(n - decode.prefix) // decode.block_k) for n in case.lengths]
        tiles.append(-(-decode.prefix // decode.block_k))
        longest = max(tiles)
        parts = [*decode.splits, decode.prefix_splits]
        splits = next(
            n
            for n in range(1, longest + 1)
            if [max(1, -(-t * n // longest)) for t in tiles] == parts
        )
        how["tiling"] = Tiling(dict(decode.kernel.constants)["FS_BLOCK_Q"], decode.block_k)
        whole = replace(p, page_size=case.page or None)
        more = {"cache_seqlens": case.lengths, "shared_prefix": decode.prefix}
        return named(flashsim.count(whole, splits=splits, **more, **how).transfers)
    groups: dict[int, list[int]] = {}
    for b in sorted(range(p.batch), key=lambda b: -case.lengths[b]):
        splits = decode.splits[b] if case.lengths[b] else next(iter(groups))
        groups.setdefault(splits, []).append(b)
    moved: Counter[tuple[str, str, str]] = Counter()
    for splits, entries in groups.items():
        lengths = [case.lengths[b] for b in entries]
        if x is None:
            whole = replace(p, batch=len(entries), page_size=case.page or None)
            transfers = flashsim.count(whole, cache_seqlens=lengths, splits=splits, **how).transfers
        else:
            paged = {"block_table": x["table"][entries]} if case.page else {}
            caches = {name: x[name] for name in x.keys() & {"k", "v"}}
            if not case.page:
                caches = {name: cache[entries] for name, cache in caches.items()}
            if p.latent:
                paged["head_dim_v"] = p.head_dim_v
            transfers = flashsim.run(
                *(x["q"][entries], caches["k"], caches.get("v")),
                cache_seqlens=lengths, splits=splits, trace=True,
                **{name: getattr(p, name) for name in names}, **paged, **how,
            ).trace.transfers  # fmt: skip
        moved.update(transfers)
    return named(moved)


def named(transfers: Mapping[tuple[str, str, str], int]) -> dict[str, int]:
    """Return a trace's or a count's transfers by tensor, in the form of `moved`."""
    moved: Counter[str] = Counter()
    for (stage, _, tensor), nbytes in transfers.items():
        read = stage == "combine" and tensor.endswith("_part")
        moved[f"{tensor} read" if read else tensor] += nbytes
    return {name: moved[name] for name in _COUNTED}


_COUNTED = ("K", "V", "table", "Q", "O_part", "L_part", "O", "L", "O_part read", "L_part read")
