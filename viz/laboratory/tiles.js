"use strict";
// The key tiles that each row tile visits, as flashsim.schedule finds them, and how keys are split.
// A grid has `rows` rows in `tiles` row tiles of `block`, with `members` rows for each query, and
// `n` keys in `whole` key tiles of `inner`. Query p is on the diagonal of key p + offset.

// The number of rows of a row tile, and its first and its last query.
function queries_of(grid, tile) {
  const start = tile * grid.block, stop = Math.min(start + grid.block, grid.rows);
  return {
    height: stop - start, first: Math.floor(start / grid.members), last: Math.floor((stop - 1) / grid.members),
  };
}

// A band: queries see keys from `left` before the diagonal to `right` after it. Its sums are those of
// flashsim.schedule.closed_sums.Strip, whose comments explain them: exact for any length, without a loop.
class Strip {
  constructor(grid, left, right) { Object.assign(this, grid, { left, right }); }

  // The height of a row tile, and its key tiles lo .. hi - 1.
  visit(tile) {
    const { height, first, last } = queries_of(this, tile);
    const begin = Math.max(first + this.offset - this.left, 0), end = Math.min(last + this.offset + this.right, this.n - 1);
    return begin <= end ? [height, Math.floor(begin / this.inner), Math.floor(end / this.inner) + 1] : [height, 0, 0];
  }

  // The key tiles lo .. hi - 1 in which a row tile sees every key.
  full(tile) {
    const { first, last } = queries_of(this, tile);
    const begin = Math.max(last + this.offset - this.left, 0), end = Math.min(first + this.offset + this.right, this.n - 1);
    const lo = Math.ceil(begin / this.inner), hi = Math.floor(Math.max(end + 1, 0) / this.inner);
    return lo < hi ? [lo, hi] : [0, 0];
  }

  width(lo, hi) { return hi > lo ? Math.min(hi * this.inner, this.n) - lo * this.inner : 0; }

  // Sums over all visits: their number, keys, rows and scores.
  sums() {
    const { members, block, n, inner, offset, tiles, whole } = this;
    if (!tiles) return [0, 0, 0, 0];
    const first = this.reaching(-offset - this.right);
    const stop = Math.max(first, this.beyond(n - offset + this.left));
    const inside = (tile) => Math.min(Math.max(tile, first), stop);
    const right = inside(this.reaching((whole - 1) * inner - offset - this.right));
    const left = inside(this.beyond(this.left - offset));
    const ends = floors(first, right, block, members * (offset + this.right) + block - 1, members * inner) + right - first;
    const begins = floors(left, stop, block, members * (offset - this.left), members * inner);
    const visits = ends + (stop - right) * whole - begins, keys = (ends - begins) * inner + (stop - right) * n;
    const [height, lo, hi] = this.visit(tiles - 1), width = this.width(lo, hi);
    return [visits + hi - lo, keys + width, block * visits + height * (hi - lo), block * keys + height * width];
  }

  // The number of visits in which every score is kept.
  fulls() {
    const { rows, members, block, n, inner, offset, tiles } = this;
    const size = (tile) => { const [lo, hi] = this.full(tile); return hi - lo; };
    if (!tiles) return 0;
    let total = size(tiles - 1);
    if (Math.floor((rows - 1) / members) + offset > this.left) { // lo and hi both change
      for (let tile = 0; tile < tiles - 1; tile += 1) total += size(tile);
      return total;
    }
    const reach = offset + this.right + 1, first = this.beyond(-reach), stop = Math.max(first, this.beyond(n - reach));
    total += floors(first, stop, block, members * reach, members * inner);
    return total + (tiles - 1 - stop) * Math.floor(n / inner);
  }

  // The rows of the largest row tiles, and the keys of their largest key tile.
  extents() {
    const numbers = this.tiles ? [...new Set([0, this.reaching(-this.offset - this.right), this.tiles - 1])] : [];
    return numbers.map((tile) => {
      const [height, lo, hi] = this.visit(tile);
      return [height, hi > lo ? this.width(lo, lo + 1) : 0];
    });
  }

  // The first row tile with any row (`beyond`: with all rows) at a position or later, else the last.
  reaching(position) { return this.existing(Math.ceil((this.members * position - this.block + 1) / this.block)); }
  beyond(position) { return this.existing(Math.ceil((this.members * position) / this.block)); }
  existing(tile) { return Math.min(Math.max(tile, 0), this.tiles - 1); }
}

// The sum of floor((step i + shift) / over) for i = first .. stop - 1, by Euclid's algorithm.
function floors(first, stop, step, shift, over) {
  let count = stop - first, total = 0;
  shift += step * first;
  while (count > 0) {
    const [steps, shifts] = [Math.floor(step / over), Math.floor(shift / over)];
    total += ((count * (count - 1)) / 2) * steps + count * shifts;
    step -= over * steps;
    const top = step * count + shift - over * shifts;
    count = Math.floor(top / over);
    shift = top - over * count;
    [step, over] = [over, step];
  }
  return total;
}

// Other masks keep two ranges of key tiles: 0 .. head - 1 and lo .. hi - 1. A row tile's height and
// ranges, and the two ranges of the key tiles in which it keeps every score.

// Every query sees the first `prefix` keys; the rest is causal.
function prefix_tile(grid, prefix, tile) {
  const { height, first, last } = queries_of(grid, tile);
  const seen = (query) => Math.min(Math.max(query + grid.offset + 1, prefix), grid.n);
  return [height, Math.ceil(seen(last) / grid.inner), 0, 0, Math.floor(seen(first) / grid.inner), 0, 0];
}

// Square cells of `cell` scores: those within `reach` of the diagonal, and the first `shared` rows and
// columns of cells. The diagonal ends in the lower right corner, `shift` cells to the right.
function cells_tile(grid, { cell, reach, shared }, shift, tile) {
  const { height, first, last } = queries_of(grid, tile), { n, inner, whole } = grid;
  const top = Math.floor(first / cell), bottom = Math.floor(last / cell);
  if (bottom < shared) return [height, whole, 0, 0, Math.floor(n / inner), 0, 0];
  const head = Math.min(shared * cell, n), from = (column) => Math.max(column, 0) * cell;
  const upto = (column) => Math.min(from(column + 1), n);
  // Every row of the tile keeps begin .. end - 1, besides the head.
  const begin = from(bottom + shift - reach), end = upto(Math.max(top, shared) + shift + reach);
  let full = [Math.floor(head / inner), 0, 0];
  if (begin < end && begin <= head) full = [Math.floor(Math.max(head, end) / inner), 0, 0];
  else if (begin < end) {
    const hi = Math.floor(end / inner);
    full = [full[0], Math.min(Math.max(Math.ceil(begin / inner), full[0]), hi), hi];
  }
  if (top < shared) return [height, whole, 0, 0, ...full];
  // And some row keeps each of low .. high - 1.
  const low = from(top + shift - reach), high = upto(bottom + shift + reach);
  const after = Math.ceil(head / inner), lo = Math.max(Math.floor(low / inner), after);
  return [height, after, lo, low < high ? Math.max(Math.ceil(high / inner), lo) : lo, ...full];
}

// The largest number of parts of the keys for which all blocks run at the same time.
const fill_once = (blocks, processors, visits) => Math.max(1, Math.min(Math.floor(processors / blocks), visits));

// The number of parts that FlashAttention-3's rule chooses (flashsim.schedule.split.fa3).
function fa3(blocks, processors, visits) {
  if (5 * blocks >= 4 * processors || visits <= 4) return 1;
  const filled = Array.from({ length: Math.min(128, processors, visits) }, (_, n) => {
    const waves = (blocks * (n + 1)) / processors;
    return waves / Math.ceil(waves);
  });
  return 1 + filled.findIndex((x) => x >= 0.85 * Math.max(...filled));
}
