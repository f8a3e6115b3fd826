"use strict";
// Counts the bytes of one state of the page. LAB holds formulas, tables and devices, exported from
// the package.

const LAB = JSON.parse(document.getElementById("data").textContent);
const POLYNOMIALS = LAB.polynomials.map((terms) =>
  terms.map(([n, ...names]) => [BigInt(n), names]));
const MOST_SCORES = 2 ** 53; // per head; sums of numbers are exact below
const MOST_TILES = 1 << 21; // along one axis

const DEFAULTS = {
  n_q: 4096, n_kv: 0, d: 64, heads: 16, kv_heads: 0, batch: 1, dtype: "bfloat16", mask: "none",
  left: 256, right: 0, prefix: 512, docs: 4, lengths: "equal", doc_causal: 1, cell: 64, reach: 2,
  shared: 1, algorithm: "flash2", direction: "forward", block_q: 128, block_k: 64, fit: 0,
  splits: "auto", pack: 1, device: "H100",
  own_sram: 227, own_sm_sram: 228, own_sms: 132, own_hbm: 3352, own_l2: 9800, own_peak: 989.4,
};
// The least and the largest value of each number; the problem has further conditions.
const LIMITS = {
  n_q: [1, 2 ** 24], n_kv: [0, 2 ** 24], d: [1, 576], heads: [1, 1024], kv_heads: [0, 1024],
  batch: [1, 65536], left: [-1, 2 ** 24], right: [-1, 2 ** 24], prefix: [0, 2 ** 24],
  docs: [1, 64], doc_causal: [0, 1], cell: [1, 2 ** 20], reach: [0, 4096], shared: [0, 4096],
  block_q: [1, 2 ** 24], block_k: [1, 2 ** 24], fit: [0, 1], pack: [0, 1],
  own_sram: [1, 65536], own_sm_sram: [1, 65536], own_sms: [1, 4096], own_hbm: [1, 1e6],
  own_l2: [0, 1e6], own_peak: [0.001, 1e6],
};
const CHOICES = {
  dtype: Object.keys(LAB.dtypes),
  mask: ["none", "causal", "window", "prefix", "documents", "cells"],
  lengths: ["equal", "growing"], algorithm: Object.keys(LAB.algorithms),
  direction: ["forward", "backward"], device: [...Object.keys(LAB.devices), "own"],
};
const FRACTIONS = ["own_hbm", "own_l2", "own_peak", "own_sram", "own_sm_sram"]; // need no integer

class Refusal extends Error {}
const refuse = (why) => { throw new Refusal(why); };
const group_digits = (n) => String(n).replace(/\B(?=(\d{3})+(?!\d))/g, ",");

function evaluate(number, sizes) {
  let sum = 0n;
  for (const [n, names] of POLYNOMIALS[number]) {
    let product = n;
    for (const name of names) product *= sizes[name];
    sum += product;
  }
  return sum;
}

function device(s) {
  if (s.device !== "own") return LAB.devices[s.device];
  return {
    name: "your device", sram_bytes: Math.round(1024 * s.own_sram),
    sram_per_sm: Math.round(1024 * s.own_sm_sram), sm_count: s.own_sms,
    hbm_bandwidth: 1e9 * s.own_hbm, l2_bandwidth: 1e9 * s.own_l2,
    peaks: { [s.dtype]: 1e12 * s.own_peak }, source: "typed in here",
  };
}

// The problem of a state, checked as the package checks it.
function problem(s) {
  for (const [name, [low, high]] of Object.entries(LIMITS)) {
    const whole = FRACTIONS.includes(name) || Number.isInteger(s[name]);
    if (!whole || !(s[name] >= low && s[name] <= high)) {
      refuse(`${name} must be ${FRACTIONS.includes(name) ? "a number" : "an integer"} from ` +
        `${group_digits(low)} to ${group_digits(high)}, got ${s[name]}`);
    }
  }
  for (const [name, possible] of Object.entries(CHOICES)) {
    if (!possible.includes(s[name])) {
      refuse(`${name} must be one of ${possible.join(", ")}, got ${s[name]}`);
    }
  }
  if (!["auto", "fa3"].includes(s.splits) && !(Number.isInteger(s.splits) && s.splits >= 1)) {
    refuse(`splits must be auto, fa3 or an integer of at least 1, got ${s.splits}`);
  }
  const n_kv = s.n_kv || s.n_q, kv_heads = s.kv_heads || s.heads;
  if (s.heads % kv_heads) {
    refuse(`query heads must be a multiple of KV heads, got ${s.heads} query heads and ${kv_heads} KV heads`);
  }
  if (!LAB.algorithms[s.algorithm].directions.includes(s.direction)) {
    refuse(`${LAB.algorithms[s.algorithm].title} has no ${s.direction} pass`);
  }
  if (s.mask === "documents" && s.batch !== 1) {
    refuse(`documents are packed into one sequence, so the batch must be 1, got ${s.batch}`);
  }
  if (s.mask === "documents" && s.docs > Math.min(s.n_q, n_kv)) {
    refuse(`${s.docs} documents need at least ${s.docs} queries and ${s.docs} keys`);
  }
  const packed = LAB.algorithms[s.algorithm].splits && Boolean(s.pack);
  const members = packed ? s.heads / kv_heads : 1;
  if (s.n_q * members * n_kv >= MOST_SCORES) {
    refuse("this page supports fewer than 2^53 scores per head; flashsim.count has no such limit");
  }
  const ends = (n) => (s.mask === "documents" ? documents(s, n) : [0, n]);
  const q = ends(s.n_q), k = ends(n_kv);
  const sequences = q.slice(1).map((stop, n) => ({ q0: q[n], q1: stop, k0: k[n], k1: k[n + 1] }));
  return {
    s, n_q: s.n_q, n_kv, kv_heads, group: s.heads / kv_heads, members, packed, sequences,
    longest: Math.max(...sequences.map((one) => one.k1 - one.k0)), device: device(s),
    pass: LAB.passes[LAB.dtypes[s.dtype]][
      `${s.algorithm} ${s.direction}${packed ? " packed" : ""}`],
  };
}

function documents(s, n) {
  const parts = s.lengths === "equal" ? (i) => i : (i) => i * (i + 1);
  return Array.from({ length: s.docs + 1 }, (_, i) => Math.floor(n * parts(i) / parts(s.docs)));
}

// For each sequence: its row tiles, and `tile(i)`: rows, then the key tiles that row tile i visits
// (the first `head` ones, and lo .. hi - 1), then those of them without a mask, in the same way.
function grids(p, tile) {
  const { s } = p, block = Math.min(tile.q, p.n_q * p.members + 1);
  const inner = Math.min(tile.k, p.n_kv + 1), all = p.n_q + p.n_kv;
  const causal = s.mask === "causal" || (s.mask === "documents" && s.doc_causal);
  const side = (n) => (s.mask !== "window" || n < 0 ? all : Math.min(n, all));
  const left = side(s.left), right = causal ? 0 : side(s.right);
  return p.sequences.map((one) => {
    const rows = (one.q1 - one.q0) * p.members, n = one.k1 - one.k0, offset = n - one.q1 + one.q0;
    const whole = Math.ceil(n / inner), tiles = Math.ceil(rows / block);
    const sizes = { rows, members: p.members, block, n, inner, offset, whole, tiles };
    const grid = { ...one, ...sizes, strip: null, band: null, rest: n - (whole - 1) * inner };
    if (p.pass.dense) grid.strip = new Strip(sizes, all, all);
    if (s.mask === "prefix" || s.mask === "cells") {
      const cells = (x) => Math.ceil(x / s.cell), shift = cells(n) - cells(one.q1 - one.q0);
      grid.tile = s.mask === "prefix" ? (i) => prefix_tile(sizes, s.prefix, i) : (i) => cells_tile(sizes, s, shift, i);
      // Standard attention computes every tile, and tries this mask on each.
      if (p.pass.dense) grid.tile = (i) => [queries_of(sizes, i).height, 0, 0, whole, 0, whole, whole];
      return grid;
    }
    const band = new Strip(sizes, left, right);
    grid.strip ??= band;
    grid.band = band;
    grid.tile = (i) => {
      const [height, lo, hi] = grid.strip.visit(i), [from, to] = band.full(i);
      return [height, 0, lo, hi, 0, from, to];
    };
    return grid;
  });
}

// Sums over the visits of one head, and what the peak on chip needs: sizes of visited tiles.
function walk(p, tile) {
  const found = {
    visits: 0, full: 0, row_cols: 0, col_rows: 0, area: 0, t_r: 0, t_c: 0, most: 0, least: Infinity,
    pairs: [], sides: [], counts: LAB.algorithms[p.s.algorithm].splits ? [] : null, grids: [],
  };
  const lists = grids(p, tile);
  for (const grid of lists) {
    found.t_r += grid.tiles;
    found.t_c += grid.whole;
  }
  if (Math.max(found.t_r, found.t_c) > MOST_TILES) {
    refuse(`${group_digits(Math.max(found.t_r, found.t_c))} tiles along one axis, but this page supports ` +
      `${group_digits(MOST_TILES)}; use a larger tile`);
  }
  // Bands have closed forms; splits of the keys and other masks need every row tile.
  const tiled = found.counts || p.pass.stages.some((stage) => stage.once);
  for (const grid of lists) {
    if (grid.strip && !tiled) {
      const sums = grid.strip.sums();
      ["visits", "row_cols", "col_rows", "area"].forEach((name, n) => { found[name] += sums[n]; });
      found.full += grid.band ? grid.band.fulls() : 0;
      for (const [height, width] of grid.strip.extents()) {
        if (width) found.pairs.push([height, width]);
        found.sides.push([height, 0]);
      }
      if (grid.whole) found.sides.push([0, Math.min(grid.inner, grid.n)]);
      continue;
    }
    const seen = new Map();
    for (let i = 0; i < grid.tiles; i += 1) {
      const [height, head, lo, hi, from_0, from, to] = grid.tile(i);
      const count = head + hi - lo;
      const touches = (hi > lo ? hi : head) === grid.whole && count > 0;
      const width = count * grid.inner - (touches ? grid.inner - grid.rest : 0);
      found.visits += count;
      found.full += from_0 + to - from;
      found.row_cols += width;
      found.col_rows += height * count;
      found.area += height * width;
      found.most = Math.max(found.most, count);
      found.least = Math.min(found.least, count);
      if (found.counts) found.counts.push([height, count]);
      const sizes = seen.get(height) ?? { inner: false, rest: false };
      sizes.inner ||= count > 1 || (count === 1 && !touches);
      sizes.rest ||= touches;
      seen.set(height, sizes);
    }
    for (const [height, sizes] of seen) {
      if (sizes.inner) found.pairs.push([height, grid.inner]);
      if (sizes.rest) found.pairs.push([height, grid.rest]);
      found.sides.push([height, 0]);
    }
    if (grid.whole) found.sides.push([0, Math.min(grid.inner, grid.n)]);
  }
  found.grids = lists;
  return found;
}

function sizes_of(p, sums = {}) {
  const at = {
    n_q: p.n_q, n_kv: p.n_kv, d: p.s.d, batch: p.s.batch, kv_heads: p.kv_heads, group: p.group,
    longest: p.longest,
    pairs: p.sequences.reduce((sum, one) => sum + (one.q1 - one.q0) * (one.k1 - one.k0), 0), ...sums,
  };
  return LAB.sizes.map((name) => BigInt(at[name] ?? 0));
}

// -- on chip --------------------------------------------------------------------------------------

function buffers_of(p) {
  const sizes = sizes_of(p), number = (one) => Number(evaluate(one, sizes));
  const read = (b) => ({
    name: b.name, visit: b.visit, row: number(b.row), col: number(b.col), score: number(b.score),
  });
  return p.pass.stages.map((stage) => ({
    ...stage, held: stage.buffers.map(read), strip: stage.strip.map(read),
  }));
}

const nbytes = (b, rows, cols) => b.row * rows + b.col * cols + b.score * rows * cols;
const summed = (list, rows, cols) => list.reduce((sum, b) => sum + nbytes(b, rows, cols), 0);

function clipped(p, tile) {
  return { q: Math.min(tile.q, p.n_q * p.members), k: Math.min(tile.k, p.n_kv) };
}

function held_by(p, stage, tile) {
  const at = clipped(p, tile);
  return stage.held.map((b) => [b.name, nbytes(b, stage.rows ? 1 : at.q, at.k)]);
}

function footprint(p, stages, tile) {
  const { q, k } = clipped(p, tile);
  let most = 0;
  for (const stage of stages) most = Math.max(most, summed(stage.held, stage.rows ? 1 : q, k));
  return most;
}

// The tiling that fits and moves the fewest bytes, as Tiling.fit finds it; null if none fits.
function fit(p, stages) {
  const splits = stages.some((stage) => stage.parts), whole = stages.some((stage) => stage.once);
  const fewest = whole ? p.longest : 1, most = splits ? 128 : LAB.sides.at(-1);
  const outers = new Set(
    stages.filter((x) => x.held.some((b) => b.visit)).map((x) => x.outer));
  const merit = ({ q, k }) => {
    if (whole) return [q, -k];
    if (outers.size === 2) return [Math.min(q, k), q * k, q];
    return outers.has("queries") ? [q, k] : [k, q];
  };
  const better = (one, two) => {
    const n = one.findIndex((x, i) => x !== two[i]);
    return n >= 0 && one[n] > two[n];
  };
  const own = whole ? [fewest] : [];
  for (const sides of [[...LAB.sides, ...own], [1, 2, 4, 8, 16, ...own]]) {
    let best = null;
    for (const q of sides) {
      for (const k of sides) {
        const tile = { q, k };
        if (k < fewest || k > most) continue;
        if (best && !better(merit(tile), merit(best))) continue;
        if (footprint(p, stages, tile) <= p.device.sram_bytes) best = tile;
      }
    }
    if (best) {
      while (Math.floor(best.q / 2) >= p.n_q * p.members) best.q = Math.floor(best.q / 2);
      while (Math.floor(best.k / 2) >= p.n_kv) best.k = Math.floor(best.k / 2);
      return best;
    }
  }
  return null;
}

function peak(p, stage, w, tile, merged) {
  if (stage.rows) {
    const row = stage.held.reduce((sum, b) => sum + b.row, 0);
    const tallest = Math.min(tile.q, Math.max(...p.sequences.map((one) => one.q1 - one.q0)));
    const most = row ? Math.max(1, Math.min(tallest, Math.floor(p.device.sram_bytes / row))) : tallest;
    return Math.max(...p.sequences.map((one) =>
      summed(stage.strip, Math.min(tile.q, one.q1 - one.q0, most), one.k1 - one.k0)));
  }
  if (stage.parts === "merges") return merged ? summed(stage.held, merged, 1) : 0;
  const kept = stage.held.filter((b) => !b.visit);
  const side = stage.outer === "queries" ? 0 : 1;
  return Math.max(0, ...w.pairs.map(([rows, cols]) => summed(stage.held, rows, cols)),
    ...w.sides.filter((one) => one[side]).map(([rows, cols]) => summed(kept, rows, cols)));
}

// -- a state, counted -----------------------------------------------------------------------------

function tile_of(p, stages) {
  return p.s.fit ? fit(p, stages) : { q: p.s.block_q, k: p.s.block_k };
}

function splits_of(p, w, walks) {
  const { splits } = p.s, most = Math.max(w.most, 1);
  const rule = { auto: fill_once, fa3 }[splits];
  return Math.min(rule ? rule(walks * w.t_r, p.device.sm_count, most) : splits, most);
}

function count(s) {
  const p = problem(s), stages = buffers_of(p), tile = tile_of(p, stages);
  if (!tile) {
    refuse(`no tile fits: ${LAB.algorithms[s.algorithm].title} needs more than the ` +
      `${group_digits(p.device.sram_bytes)} B that a block has on ${p.device.name}`);
  }
  const w = walk(p, tile);
  if (stages.some((stage) => stage.once) && !(w.least === 1 && w.most === 1)) {
    refuse("this algorithm needs one key tile that holds all keys of a row tile, and every query must see a key: " +
      `use a block_k of at least ${p.longest}, or flash2-fused`);
  }
  const sums = { row_cols: w.row_cols, col_rows: w.col_rows, area: w.area };
  let splits = 1, parts = w.t_r, merged = 0, merging = 0;
  if (w.counts) {
    splits = splits_of(p, w, Number(evaluate(p.pass.stages[0].walks, sizes_of(p))));
    Object.assign(sums, { whole_rows: 0, part_rows: 0 });
    parts = 0;
    for (const [height, visits] of w.counts) {
      const own = Math.max(Math.min(visits, splits), 1);
      parts += own;
      if (own > 1) {
        sums.part_rows += height * own;
        merged = Math.max(merged, height);
        merging += 1;
      } else sums.whole_rows += height;
    }
  }
  const sizes = sizes_of(p, sums), at = (one) => evaluate(one, sizes);
  const held = clipped(p, tile), moved = [];
  const told = stages.map((stage) => {
    const bytes_held = summed(stage.held, stage.rows ? 1 : held.q, held.k);
    const per_sm = Math.max(1, Math.min(LAB.most_blocks,
      Math.floor(p.device.sram_per_sm / (bytes_held + LAB.reserved))));
    const walks = Number(at(stage.walks));
    const steps = { walks: parts, merges: merging }[stage.parts] ??
      (stage.outer === "queries" ? w.t_r : w.t_c);
    const blocks = walks * (stage.serial ? 1 : steps);
    for (const [op, tensor, size] of stage.moves) {
      const bytes = at(size);
      if (bytes) moved.push({ stage: stage.name, op, tensor, bytes, size });
    }
    return {
      ...stage, walks, blocks, per_sm, waves: blocks / (per_sm * p.device.sm_count),
      footprint: bytes_held, bytes: at(stage.bytes), peak: peak(p, stage, w, tile, merged),
    };
  });
  const each = (table) => Object.fromEntries(Object.entries(table).map(([k, v]) => [k, at(v)]));
  const flops = each(p.pass.flops), total = (values) => values.reduce((sum, x) => sum + x, 0n);
  const fullest = told.reduce((a, b) => (b.footprint > a.footprint ? b : a));
  return {
    state: s, problem: p, tile, walk: w, stages: told, moved, splits, flops, chip: each(p.pass.chip),
    bytes: total(moved.map((one) => one.bytes)), flops_all: total(Object.values(flops)),
    compulsory: at(p.pass.compulsory), saved: at(p.pass.saved), whole: each(p.pass.whole), sizes, fullest,
    fits: fullest.footprint <= p.device.sram_bytes,
    peak: Math.max(...told.map((stage) => stage.peak)), dense: p.pass.dense,
    scores: w.t_r && w.t_c ? w.grids.reduce((sum, one) => sum + one.tiles * one.whole, 0) : 0,
  };
}

// Only the bytes, for curves: bands in closed form, whatever the length. null if refused.
function bytes_of(s) {
  try {
    const p = problem(s), stages = buffers_of(p), tile = tile_of(p, stages);
    if (!tile) return null;
    const closed = grids(p, tile).every((grid) => grid.strip);
    if (!closed || LAB.algorithms[s.algorithm].splits || stages.some((x) => x.once)) {
      const found = count(s);
      return { bytes: found.bytes, fits: found.fits };
    }
    const [, row_cols, col_rows, area] = strips(p, tile);
    const sizes = sizes_of(p, { row_cols, col_rows, area });
    return {
      bytes: p.pass.stages.reduce((sum, stage) => sum + evaluate(stage.bytes, sizes), 0n),
      fits: footprint(p, stages, tile) <= p.device.sram_bytes,
    };
  } catch (error) {
    if (error instanceof Refusal) return null;
    throw error;
  }
}

function strips(p, tile) {
  const sums = grids(p, tile).map((grid) => grid.strip.sums());
  return [0, 1, 2, 3].map((n) => sums.reduce((sum, one) => sum + one[n], 0));
}
