"use strict";
// Decodes the columns of one trace, and computes every sum that the player shows, once on opening.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array, i2: Int16Array, i4: Int32Array };
const COMPUTE = 5, FREE = 4, ALLOC = 3, LOAD = 0;
const NEVER = 0x7fffffff;

function column(packed) {
  const text = atob(packed.data), bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
  return new ARRAYS[packed.type](bytes.buffer);
}

class Steps {
  constructor(pane, page) {
    Object.assign(this, { label: pane.label, about: pane.about, rows: pane.rows, cols: pane.cols,
      limit: pane.limit, full: pane.full, device: pane.device, sides: pane.sides, statistics: pane.statistics });
    this.names = page.tensors.map((name) => name.replace(/_acc$/, ""));
    this.symbols = page.symbols;
    this.keySide = new Set(page.keySide);
    this.matrices = new Set(page.matrices);
    this.stages = pane.stages.map((s) => ({ name: s.name, kinds: column(s.kinds) }));
    for (const name of Object.keys(pane.events)) this[name] = column(pane.events[name]);
    this.sizes = pane.sizes;
    this.price = column(pane.price);
    this.flopsOf = pane.flops;
    this.note = column(pane.note);  // of each step: which part of the keys, or how many are merged
    Object.assign(this, { notes: pane.notes, parts: pane.parts, pages: pane.pages });
    this.sum();
  }

  // One pass over the events: the bytes that each step moved, held on chip, and touched.
  sum() {
    const events = this.op.length;
    let steps = 0;
    for (let e = 0; e < events; e++) if (this.op[e] === COMPUTE) steps++;
    this.steps = steps;
    this.end = new Int32Array(steps);        // the event that ends each step
    this.moved = [0, 1, 2].map(() => new Float64Array(steps));  // loaded, stored, reduced so far
    this.flops = new Float64Array(steps);
    this.order = new Int32Array(steps);      // visits of its stage before each step
    this.buffers = [];                       // names, as they first appear
    this.touched = new Map();                // tensor -> first step of each of its tiles
    const slot = new Map(), total = [0, 0, 0];
    const owner = new Int32Array(events).fill(-1);
    for (let e = 0; e < events; e++) {
      if (this.op[e] !== LOAD && this.op[e] !== ALLOC && this.op[e] !== FREE) continue;
      const name = this.names[this.tensor[e]];
      if (!slot.has(name)) { slot.set(name, this.buffers.length); this.buffers.push(name); }
      owner[e] = slot.get(name);
    }
    const width = this.buffers.length, now = new Float64Array(width);
    this.held = new Float64Array(steps * width);
    let step = 0, flops = 0, held = 0, fullest = -1, visits = 0, stage = -1;
    for (let e = 0; e < events && step < steps; e++) {
      const op = this.op[e], size = this.sizes[this.size[e]];
      if (this.stage[e] !== stage) { stage = this.stage[e]; visits = 0; }
      if (op <= 2) { total[op] += size; this.touch(e, step); }
      if (owner[e] >= 0) {
        const change = op === FREE ? -size : size;
        now[owner[e]] += change;
        held += change;
      }
      if (op !== FREE && held > fullest) {  // a step shows SRAM at the moment when it is fullest
        fullest = held;
        this.held.set(now, step * width);
      }
      if (op !== COMPUTE) continue;
      flops += this.flopsOf[this.price[step]];
      this.end[step] = e;
      this.flops[step] = flops;
      this.order[step] = visits;
      if (this.visited[e]) visits++;
      for (let k = 0; k < 3; k++) this.moved[k][step] = total[k];
      step++;
      fullest = -1;
    }
  }

  touch(e, step) {
    const name = this.names[this.tensor[e]], i = this.i[e], j = this.j[e];
    const matrix = this.matrices.has(name), key = this.keySide.has(name);
    if (!this.touched.has(name)) {
      const size = matrix ? this.rows * this.cols : key ? this.cols : this.rows;
      this.touched.set(name, new Int32Array(size).fill(NEVER));
    }
    const first = this.touched.get(name);
    const mark = (at) => { if (at >= 0 && first[at] > step) first[at] = step; };
    if (!matrix) mark(key ? j : i);
    else if (j >= 0) mark(i * this.cols + j);
    else for (let c = 0; c < this.cols; c++) mark(i * this.cols + c);
  }

  bytes(step) { return this.moved[0][step] + this.moved[1][step] + this.moved[2][step]; }

  // The transfers of a step: [{op, name, i, j, size}].
  moves(step) {
    const found = [];
    for (let e = step ? this.end[step - 1] + 1 : 0; e <= this.end[step]; e++) {
      if (this.op[e] <= 2) found.push(this.move(e));
    }
    return found;
  }

  move(e) {
    return { op: this.op[e], name: this.names[this.tensor[e]], i: this.i[e], j: this.j[e],
      size: this.sizes[this.size[e]] };
  }

  // Where a step is: {stage, i, j, visited}.
  at(step) {
    const e = this.end[step];
    return { stage: this.stage[e], i: this.i[e], j: this.j[e], visited: this.visited[e] === 1 };
  }

  // The bytes that some events moved, by operation and tensor.
  sums(chosen) {
    const found = new Map();
    for (let e = 0; e < this.op.length; e++) {
      if (this.op[e] > 2 || !chosen(e)) continue;
      const { op, name, size } = this.move(e), key = `${op} ${name}`;
      if (!found.has(key)) found.set(key, { op, name, size: 0, times: 0 });
      found.get(key).size += size;
      found.get(key).times++;
    }
    return [...found.values()];
  }

  // A score tile in one stage: its kind, the steps that visit it, and its transfers.
  tile(stage, i, j) {
    const here = (e) => this.stage[e] === stage && this.i[e] === i && this.j[e] === j;
    const steps = Array.from(this.end.keys()).filter((s) => here(this.end[s]));
    return { kind: this.stages[stage].kinds[i * this.cols + j], steps, sums: this.sums(here) };
  }

  // All transfers of one tile of a tensor, in the whole trace.
  tensorTile(name, at) {
    const where = this.keySide.has(name) ? this.j : this.i;
    return this.sums((e) => this.names[this.tensor[e]] === name && where[e] === at);
  }

  // The last step by which no more than `bytes` have moved (the first step at least).
  stepAtBytes(bytes) {
    let low = 0, high = this.steps - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.bytes(middle) <= bytes) low = middle; else high = middle - 1;
    }
    return low;
  }
}
