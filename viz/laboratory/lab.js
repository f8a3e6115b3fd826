"use strict";
// The page: controls change the settings, their bytes are counted, and figures show the result.

const lab = {
  states: { A: { ...DEFAULTS }, B: { ...DEFAULTS } }, found: {}, two: false, side: "A",
  predicting: false, ask: "bytes", guess: "", revealed: false, theme: "light", picked: false,
  step: 0, playing: false, stage: { A: null, B: null }, trail: { A: [], B: [] }, ms: 0, wrong: "",
};
window.lab = lab;
const T = () => LAB.themes[lab.theme];
const sides = () => (lab.two ? ["A", "B"] : ["A"]);

// -- controls -------------------------------------------------------------------------------------

const octaves = (to) => {
  const found = [1];
  for (let n = 2; n <= to; n *= 2) found.push(...(n > 2 ? [n * 0.75, n] : [n]));
  return found;
};
const BLOCKS = [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256, 384, 512];
const MASK_WORDS = {
  none: "none", causal: "causal", window: "window", prefix: "prefix", documents: "documents",
  cells: "block-sparse",
};
const is_mask = (...names) => (s) => names.includes(s.mask);
const splits = (s) => LAB.algorithms[s.algorithm].splits;
const own = (s) => s.device === "own";
const list = (names, words = {}) => () => names.map((name) => [name, words[name] ?? name]);

const CONTROLS = [
  ["Problem", [
    { name: "n_q", label: "Queries N_q", steps: octaves(2 ** 20) },
    { name: "n_kv", label: "as many keys as queries", check: true, on: 0, off: (s) => s.n_q },
    { name: "n_kv", label: "Keys N_kv", steps: octaves(2 ** 20), when: (s) => s.n_kv > 0 },
    { name: "d", label: "head_dim d", steps: [8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576] },
    { name: "heads", label: "Query heads", steps: [1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128] },
    { name: "kv_heads", label: "KV heads", options: (s) => [[0, "= query heads"], ...Array.from({ length: s.heads - 1 }, (_, n) => n + 1)
      .filter((n) => s.heads % n === 0).map((n) => [n, `${n}: shared by ${s.heads / n} query heads each`])] },
    { name: "batch", label: "Batch", steps: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128] },
    { name: "dtype", label: "Type", options: list(CHOICES.dtype) },
  ]],
  ["Mask", [
    { name: "mask", label: "Mask", options: list(CHOICES.mask, MASK_WORDS) },
    { name: "left", label: "keys to the left (−1: all)", steps: [-1, 0, ...octaves(2 ** 17)], when: is_mask("window") },
    { name: "right", label: "keys to the right (−1: all)", steps: [-1, 0, ...octaves(2 ** 17)], when: is_mask("window") },
    { name: "prefix", label: "Keys that all queries see", steps: [0, ...octaves(2 ** 17)], when: is_mask("prefix") },
    { name: "docs", label: "Documents", steps: [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64], when: is_mask("documents") },
    { name: "lengths", label: "Lengths", options: list(CHOICES.lengths), when: is_mask("documents") },
    { name: "doc_causal", label: "causal within a document", check: true, on: 1, off: () => 0, when: is_mask("documents") },
    { name: "cell", label: "Cell side, in scores", steps: [8, 16, 32, 64, 128, 256, 512, 1024], when: is_mask("cells") },
    { name: "reach", label: "Cells kept on each side of the diagonal", steps: [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32], when: is_mask("cells") },
    { name: "shared", label: "First cell rows and columns kept", steps: [0, 1, 2, 3, 4, 6, 8], when: is_mask("cells") },
  ]],
  ["Algorithm", [
    { name: "algorithm", label: "Algorithm", wide: true, options: () => CHOICES.algorithm.map((name) => [name, LAB.algorithms[name].title]) },
    { name: "direction", label: "Direction", options: (s) => LAB.algorithms[s.algorithm].directions.map((x) => [x, x]) },
    { name: "splits", label: "Splits of the keys", options: (s) => [["auto", "auto: fill the SMs once"], ["fa3", "FlashAttention-3's rule"],
      ...[...new Set([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, ...(Number.isInteger(s.splits) ? [s.splits] : [])])]
        .sort((a, b) => a - b).map((n) => [n, n])], when: splits },
    { name: "pack", label: "query heads of a group share a tile", check: true, on: 1, off: () => 0, when: splits },
  ]],
  ["Tile", [
    { name: "fit", label: "best tile that fits", check: true, on: 1, off: () => 0 },
    { name: "block_q", label: "block_q: queries", steps: BLOCKS, when: (s) => !s.fit },
    { name: "block_k", label: "block_k: keys", steps: BLOCKS, when: (s) => !s.fit },
    { name: "kernel", label: "tile of a known kernel", options: () => [["", "choose …"], ...Object.keys(LAB.tiles).map((x) => [x, x])],
      when: (s) => !s.fit, act: (s, name) => kernel_tile(s, name) },
  ]],
  ["Device", [
    { name: "device", label: "GPU", options: () => CHOICES.device.map((name) => [name, name === "own" ? "your own …" : name]) },
    { name: "own_sram", label: "KiB on chip per block", steps: [16, 32, 48, 64, 96, 99, 128, 163, 192, 227, 256, 512], when: own },
    { name: "own_sm_sram", label: "KiB on chip per SM", steps: [16, 32, 64, 96, 100, 128, 164, 192, 228, 256, 512], when: own },
    { name: "own_sms", label: "SMs", steps: [1, 2, 4, 8, 16, 32, 48, 64, 80, 108, 132, 148, 192, 256], when: own },
    { name: "own_hbm", label: "HBM, GB/s", steps: [50, 100, 200, 400, 900, 1555, 2039, 3352, 4800, 8000, 16000], when: own },
    { name: "own_l2", label: "L2, GB/s (0: unknown)", steps: [0, 500, 1000, 2000, 5400, 9800, 20000], when: own },
    { name: "own_peak", label: "Peak, TFLOP/s", steps: [1, 5, 10, 20, 65, 125, 312, 989.4, 1979, 2250, 5000], when: own },
  ]],
];

function kernel_tile(s, name) {
  const limit = Object.keys(LAB.tiles[name] ?? {}).map(Number).sort((a, b) => a - b).find((n) => s.d <= n);
  if (limit === undefined) {
    say(`${name} has no tile for head_dim ${s.d}`);
    return;
  }
  [s.block_q, s.block_k] = LAB.tiles[name][limit][s.mask === "causal" ? 1 : 0];
}

const knobs = [];

function build_controls() {
  CONTROLS.forEach(([title, items], n) => {
    const group = document.createElement("details");
    group.className = "group";
    group.open = window.innerWidth > 960 || n === 0;
    group.innerHTML = `<summary>${title}</summary>`;
    const inside = document.createElement("div");
    inside.className = "knobs";
    for (const item of items) inside.append(knob(item));
    group.append(inside);
    by("controls").append(group);
  });
}

function knob(item) {
  const row = document.createElement("div"), id = `c-${item.name}${item.check ? "-same" : ""}`;
  row.className = `knob${item.check ? " check" : ""}${item.wide ? " wide" : ""}`;
  const state = () => lab.states[lab.side];
  const put = (value) => {
    if (item.act) item.act(state(), value);
    else state()[item.name] = value;
    changed();
  };
  if (item.check) {
    row.innerHTML = `<input type="checkbox" id="${id}"><label for="${id}">${item.label}</label>`;
    const tick = row.querySelector("input");
    tick.addEventListener("change", () => put(tick.checked ? item.on : item.off(state())));
    knobs.push(() => {
      const on = item.name === "n_kv" ? state().n_kv === 0 : state()[item.name] === item.on;
      tick.checked = on;
      row.hidden = Boolean(item.when && !item.when(state()));
    });
  } else if (item.options) {
    row.innerHTML = `<label for="${id}">${item.label}</label><select id="${id}"></select>`;
    const select = row.querySelector("select");
    let options = [], drawn_as = "";
    select.addEventListener("change", () => put(options[select.selectedIndex][0]));
    knobs.push(() => {
      row.hidden = Boolean(item.when && !item.when(state()));
      options = item.options(state());
      const now = options.map(([, word]) => `<option>${esc(word)}</option>`).join("");
      if (now !== drawn_as) select.innerHTML = drawn_as = now;
      const at = item.act ? 0 : options.findIndex(([value]) => value === state()[item.name]);
      select.selectedIndex = at;
    });
  } else {
    row.innerHTML = `<label for="${id}">${item.label}</label>` +
      `<input type="number" id="${id}" step="any" value=""><input type="range" min="0" step="1" max="${item.steps.length - 1}" ` +
      `aria-label="${esc(item.label)}, slider">`;
    const [number, range] = row.querySelectorAll("input");
    range.addEventListener("input", () => put(item.steps[Number(range.value)]));
    number.addEventListener("change", () => put(number.value === "" ? NaN : Number(number.value)));
    knobs.push(() => {
      row.hidden = Boolean(item.when && !item.when(state()));
      const value = state()[item.name];
      if (document.activeElement !== number || Number(number.value) !== value) number.value = value;
      let nearest = 0;
      item.steps.forEach((x, n) => {
        if (Math.abs(x - value) < Math.abs(item.steps[nearest] - value)) nearest = n;
      });
      range.value = nearest;
      range.setAttribute("aria-valuetext", digits_or(value));
    });
  }
  return row;
}

const digits_or = (value) => (Number.isInteger(value) ? digits(value) : String(value));

// -- the address ----------------------------------------------------------------------------------

function address() {
  const parts = [];
  for (const side of sides()) {
    for (const [name, value] of Object.entries(lab.states[side])) {
      const base = side === "B" ? lab.states.A[name] : DEFAULTS[name];
      if (value !== base) parts.push(`${side === "B" ? "b." : ""}${name}=${value}`);
    }
  }
  if (lab.two) parts.push("ab=1");
  if (lab.predicting) parts.push(`ask=${lab.ask}`);
  return parts.join("&");
}

// Read the settings from the address. Wrong values are reported and ignored.
function read_address() {
  const wrong = [], text_now = decodeURIComponent(location.hash.slice(1));
  const states = { A: { ...DEFAULTS }, B: null }, others = [];
  lab.two = false;
  lab.predicting = false;
  for (const part of text_now.split("&").filter(Boolean)) {
    const [key, value = ""] = part.split("="), name = key.replace(/^b\./, "");
    if (key === "ab") lab.two = value === "1";
    else if (key === "ask" && QUESTIONS[value]) {
      lab.predicting = true;
      lab.ask = value;
      lab.revealed = false;
    } else if (!Object.hasOwn(DEFAULTS, name)) wrong.push(`unknown setting ${key}`);
    else if (key !== name) others.push([name, value]);
    else if (!put_value(states.A, name, value)) wrong.push(`${name} cannot be ${value}`);
  }
  states.B = { ...states.A };
  for (const [name, value] of others) if (!put_value(states.B, name, value)) wrong.push(`${name} cannot be ${value}`);
  lab.states = states;
  lab.wrong = wrong.length ? `Parts of the link were ignored: ${wrong.join("; ")}.` : "";
  if (!lab.two) lab.side = "A";
}

function put_value(state, name, value) {
  const number = value.trim() === "" ? NaN : Number(value);
  if (name in CHOICES) {
    if (!CHOICES[name].includes(value)) return false;
    state[name] = value;
  } else if (name === "splits" && ["auto", "fa3"].includes(value)) state[name] = value;
  else if (Number.isNaN(number)) return false;
  else state[name] = number;
  return true;
}

// -- predict first --------------------------------------------------------------------------------

const QUESTIONS = {
  bytes: ["all bytes moved", (r) => Number(r.bytes), "B"],
  K: ["bytes of K loaded", (r) => Number(moved_of(r, "load", "K")), "B"],
  Q: ["bytes of Q loaded", (r) => Number(moved_of(r, "load", "Q")), "B"],
  times: ["how often each key is loaded", (r) => crossings(r, "load", "K"), ""],
  visits: ["tiles visited, per head", (r) => r.walk.visits, ""],
  flops: ["FLOPs of matrix products", (r) => Number(r.flops.matmul), ""],
  sram: ["bytes on chip", (r) => r.fullest.footprint, "B"],
  compulsory: ["compulsory bytes", (r) => Number(r.compulsory), "B"],
};

// A number as people write it: 16 * 4096 * 64, 2^20, 1.2 GB, 512 KiB, 1/2.
function number_of(said) {
  const units = { k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12, Ki: 1024, Mi: 1024 ** 2, Gi: 1024 ** 3 };
  let value = 1, sign = "*";
  const pieces = said.replace(/[,_]/g, "").replace(/×/g, "*").split(/([*/])/);
  for (const piece of pieces) {
    if (piece === "*" || piece === "/") { sign = piece; continue; }
    const match = /^\s*(\d+(?:\.\d*)?|\.\d+)(?:e(\d+))?(?:\^(\d+))?\s*(Ki|Mi|Gi|[kKMGT])?\s*(?:B|bytes|FLOPs?)?\s*$/.exec(piece);
    if (!match) return NaN;
    const [, base, exponent = "0", power = "1", unit] = match;
    const one = (Number(base) * 10 ** Number(exponent)) ** Number(power) * (unit ? units[unit] : 1);
    value = sign === "*" ? value * one : value / one;
  }
  return value;
}

function show_question() {
  by("question").hidden = !lab.predicting;
  by("predict").setAttribute("aria-pressed", lab.predicting);
  by("answers").hidden = lab.predicting && !lab.revealed;
  by("bar").hidden = lab.predicting && !lab.revealed;
  const r = lab.found[lab.side];
  by("case").textContent = r ? `${lab.two ? `${lab.side}: ` : ""}${pass_words(r)}` : "";
  by("hidden").hidden = lab.revealed;
  by("ask").value = lab.ask;
  if (by("guess").value !== lab.guess) by("guess").value = lab.guess;
  if (!lab.predicting || !lab.revealed || !r) {
    by("verdict").textContent = "";
    by("beside").innerHTML = "";
    return;
  }
  const [words, answer, unit] = QUESTIONS[lab.ask], guess = number_of(lab.guess), right = answer(r);
  const near = right && Math.abs(guess / right - 1) < 0.005;
  const of = right ? guess / right : Infinity;
  by("verdict").textContent = near ? `Right: ${exactly(right, unit)}.`
    : `The answer is ${exactly(right, unit)}. The guess is ${ratio_text(of)} of it.`;
  by("beside").innerHTML = beside_figure(words, guess, right, unit);
}

const exactly = (n, unit) => (Number.isInteger(n) ? `${digits(n)} ${unit}`.trim() : `${Number(n.toPrecision(4))} ${unit}`.trim());

function beside_figure(words, guess, right, unit) {
  const t = T(), W = 640, H = 86, left = 76, scale = (W - left - 150) / Math.max(guess, right, 1e-9);
  const bar = (n, name, value, fill, more) => text(left - 8, 24 + n * 36, name, { anchor: "end", size: 14, weight: 600, fill: t.text }) +
    box(left, 6 + n * 36, Math.max(value * scale, 2), 26, fill, more) +
    text(left + Math.max(value * scale, 2) + 8, 24 + n * 36, human(value, unit), { size: 14, fill: t.text });
  const body = box(0, 0, W, H, t.panel) + "<defs>" + hatch("gh", t.panel, t.accent, 3) + "</defs>" +
    bar(0, "guess", guess, "url(#gh)", `stroke="${t.accent}" stroke-width="2"`) + bar(1, "answer", right, t.accent, "");
  return svg(W, H, `${words}: guess ${human(guess, unit)}, answer ${human(right, unit)}`, body);
}

// -- a side ---------------------------------------------------------------------------------------

const FIGURES = [
  ["map", "Traversal"], ["bytes", "Bytes between HBM and chip"], ["chip", "On-chip memory"],
  ["waves", "Blocks and waves"], ["roofline", "Roofline"], ["lengths", "Bytes against N"],
  ["tiles", "Bytes against tile size"], ["grid", "Bytes of every tile size"],
];
const STACK = ["bytes", "chip", "waves"]; // beside the map

function build_side(side) {
  const article = document.createElement("article");
  article.className = "side";
  article.id = side;
  const beside = ([name]) => STACK.includes(name);
  const figure = ([name, title]) => `<figure id="${side}-${name}"><figcaption><h3>${title}</h3>` +
    `<button type="button" data-copy="svg" aria-label="Copy ${title} as SVG">SVG</button>` +
    `<button type="button" data-copy="png" aria-label="Copy ${title} as PNG">PNG</button></figcaption>` +
    (name === "map" ? `<div class="stages" role="group" aria-label="Stage"></div>` : "") + `<div class="drawing"></div>` +
    (name === "roofline" ? `<p class="fine">DRAM bytes usually lie between the two points. They have no closed form; ` +
      `<code>flashsim study dram</code> simulates the L2 cache to predict them.</p>` : "") +
    (name === "map" ? `<ul class="keys"></ul>${side === "A" ? PLAYER : ""}<p class="step" aria-live="off"></p>` : "") + "</figure>";
  article.innerHTML = `<h2>${side}</h2><p class="sentence" aria-live="polite"></p><p class="what"></p><dl class="cards"></dl>` +
    `<div class="figures">${figure(FIGURES[0])}<div class="stack">${FIGURES.filter(beside).map(figure).join("")}</div>` +
    `${FIGURES.slice(1).filter((one) => !beside(one)).map(figure).join("")}</div>` +
    `<details class="table"><summary>Every number, with its formula</summary><div class="scroll"></div></details>`;
  by("sides").append(article);
  article.addEventListener("click", (event) => {
    const copy = event.target.closest("[data-copy]"), stage = event.target.closest("[data-stage]");
    if (copy) copy_figure(copy.closest("figure"), copy.dataset.copy);
    const tile = event.target.closest("[data-tile]");
    if (tile) {
      const [block_q, block_k] = tile.dataset.tile.split(",").map(Number);
      Object.assign(lab.states[side], { fit: 0, block_q, block_k });
      changed();
    }
    if (stage) {
      lab.stage[side] = Number(stage.dataset.stage);
      lab.step = 0;
      draw_maps();
    }
  });
}

const PLAYER = `<div class="player" role="group" aria-label="Playback">
<button type="button" class="play" id="play" aria-pressed="false">▶ Play</button>
<button type="button" id="back" aria-label="Step back">‹</button>
<button type="button" id="next" aria-label="Step forward">›</button>
<input type="range" id="scrub" min="0" max="1" value="0" step="1" aria-label="Step of the traversal"></div>`;

function card(name, value, small, bad = false) {
  return `<div${bad ? ' class="bad"' : ""}><dt>${name}</dt><dd>${value}<small>${small}</small></dd></div>`;
}

function cards(r) {
  const over = Number(r.bytes) / Number(r.compulsory), { points } = roofline_of(r);
  const least = points[1].seconds, visited = r.scores ? r.walk.visits / r.scores : 0;
  const limit = r.problem.device.sram_bytes;
  return card("requested", human(r.bytes), `${digits(r.bytes)} B`) +
    card("÷ compulsory", ratio_text(over), `compulsory: ${human(r.compulsory)}`) +
    card("matrix products", human(r.flops.matmul, "FLOP"), `${human(r.flops.exp, "")} exponentials`) +
    card("intensity", `${Number(points[0].intensity.toPrecision(3))}`, "FLOP per requested byte") +
    card("tiles visited", digits(r.walk.visits), `per head${r.problem.packed && r.problem.group > 1 ? " group" : ""}: ${percent(visited)} of ${digits(r.scores)}`) +
    card("on chip", human(r.fullest.footprint), `${r.fits ? "of" : "more than"} ${human(limit)}`, !r.fits) +
    card("waves", r.fullest.waves < 10 ? Number(r.fullest.waves.toPrecision(3)) : digits(r.fullest.waves), `${digits(r.fullest.blocks)} blocks`) +
    card("least time", least ? seconds(least) : "?", least ? `limited by ${points[1].bound}` : "no peak known for this type");
}

function seconds(x) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (x >= size) return `${Number((x / size).toPrecision(3))} ${unit}`;
  }
  return `${Number((x / 1e-9).toPrecision(3))} ns`;
}

function table(r) {
  const rows = r.moved.map((one) => `<tr><td>${one.stage}</td><td>${one.op} ${shown(one.tensor)}</td><td>${digits(one.bytes)}</td>` +
    `<td>${r.whole[one.tensor] ? ratio_text(Number(one.bytes) / Number(r.whole[one.tensor])) : ""}</td><td class="words">${esc(formula(one.size))}</td></tr>`);
  const kinds = Object.entries(r.flops).filter(([, n]) => n).map(([kind, n]) => `${kind} ${digits(n)}`).join(", ");
  const sums = ["row_cols", "col_rows", "area"].map((name) => `${LAB.words[name]} = ${digits(r.walk[name])}`).join(", ");
  return `<table><caption class="fine">Requested bytes</caption><thead><tr><th>stage</th><th>transfer</th><th>bytes</th><th>÷ size</th><th class="words">formula</th></tr></thead>` +
    `<tbody>${rows.join("")}<tr><td>all</td><td></td><td>${digits(r.bytes)}</td><td></td><td class="words"></td></tr></tbody></table>` +
    `<p class="fine">${sums}: sums over the visited tiles of one head. FLOPs: ${kinds}; in all ${digits(r.flops_all)}. ` +
    `On chip, ${digits(r.chip.read)} B are read and ${digits(r.chip.write)} B written. Saved for the backward pass: ${digits(r.saved)} B. ` +
    `Peak on-chip memory of a block: ${digits(r.peak)} B.</p>` +
    `<p class="fine">Device: ${esc(r.problem.device.source)}.</p>`;
}

function draw_side(side) {
  const r = lab.found[side], article = by(side), t = T();
  article.hidden = !r;
  if (!r) return;
  article.querySelector("h2").hidden = !lab.two;
  article.querySelector(".sentence").textContent = sentence(r);
  article.querySelector(".what").textContent = pass_words(r);
  article.querySelector(".cards").innerHTML = cards(r);
  const guess = lab.predicting && lab.revealed && side === lab.side ? { ask: lab.ask, value: number_of(lab.guess) } : null;
  const put = (name, drawing) => { by(`${side}-${name}`).querySelector(".drawing").innerHTML = drawing; };
  let most = 1n;
  for (const one of sides()) {
    if (lab.found[one]) for (const row of bytes_rows(lab.found[one])) if (row.all > most) most = row.all;
  }
  const other = side === "A" ? "B" : "A";
  put("bytes", bytes_figure(r, t, `${side}b`, most, guess && ["K", "Q"].includes(guess.ask) ? guess : null));
  put("chip", chip_figure(r, t, `${side}c`));
  put("waves", waves_figure(r, t));
  put("roofline", roofline_figure(r, t, `${side}r`, lab.trail[side], lab.two && lab.found[other] ? [{ r: lab.found[other], name: other }] : []));
  put("lengths", length_figure(r, t, guess && guess.ask === "bytes" ? guess : null));
  put("tiles", tile_figure(r, t));
  put("grid", grid_figure(r, t));
  const details = article.querySelector("details.table");
  if (details.open) details.querySelector(".scroll").innerHTML = table(r);
}

// -- the map, and playing it ----------------------------------------------------------------------

function main_stage(r) {
  const size = (one) => (one.visit.length && !one.rows ? one.bytes : 0n);
  let best = 0;
  r.stages.forEach((one, n) => { if (size(one) > size(r.stages[best])) best = n; });
  return best;
}

function map_of(side) {
  const r = lab.found[side];
  if (!r.map) r.map = drawn(r);
  const n = lab.stage[side] === null || lab.stage[side] >= r.stages.length ? main_stage(r) : lab.stage[side];
  const stage = r.stages[n];
  r.steps ??= [];
  return { r, n, stage, map: r.map, steps: () => (r.steps[n] ??= steps_of(r, r.map, stage)) };
}

function draw_maps() {
  let longest = 1;
  for (const side of sides()) {
    const figure = by(`${side}-map`);
    if (!lab.found[side]) continue;
    const { r, n, stage, map, steps } = map_of(side);
    const at = lab.step || lab.playing ? Math.min(lab.step, steps().length) : null;
    figure.querySelector(".drawing").innerHTML = map_figure(r, T(), `${side}m`, stage, map, at === null ? [] : steps(), at);
    const tabs = r.stages.length < 2 && !lab.two ? "" : r.stages.map((one, k) =>
      `<button type="button" data-stage="${k}" aria-pressed="${k === n}">${one.name}</button>`).join("");
    const bar = figure.querySelector(".stages");
    if (bar.innerHTML !== tabs) bar.innerHTML = tabs;
    const { visits, full } = r.walk, skipped = Math.max(r.scores - visits, 0);
    figure.querySelector(".keys").innerHTML = `<li>■ full <b>${digits(full)}</b></li><li>▨ partial <b>${digits(visits - full)}</b></li>` +
      `<li>▧ skipped <b>${digits(skipped)}</b></li>` + (map.exact ? "" : `<li>${map.rows} × ${map.cols} of ${digits(r.walk.t_r)} × ${digits(r.walk.t_c)} tiles drawn</li>`);
    figure.querySelector(".step").textContent = at === null
      ? `${stage.outer === "queries" ? "The outer loop is over query tiles: each visits its key tiles." : "The outer loop is over key tiles: each visits its query tiles."}`
      : step_words(r, stage, map, steps(), at);
    longest = Math.max(longest, r.steps[n] ? r.steps[n].length : count_steps(r, map, stage));
  }
  const scrub = by("scrub");
  if (Number(scrub.max) !== longest) scrub.max = longest;
  if (Number(scrub.value) !== lab.step) scrub.value = lab.step;
  scrub.setAttribute("aria-valuetext", lab.step ? `step ${lab.step} of ${longest}` : "not begun");
  by("play").textContent = lab.playing ? "❚❚ Pause" : "▶ Play";
  by("play").setAttribute("aria-pressed", lab.playing);
  lab.longest = longest;
}

function count_steps(r, map, stage) {
  if (!stage.visit.length || stage.rows || stage.parts === "merges") return stage.outer === "queries" ? map.rows : map.cols;
  return map.kinds.reduce((sum, row) => sum + row.filter(Boolean).length, 0);
}

function go(step) {
  lab.step = Math.min(Math.max(step, 0), lab.longest);
  draw_maps();
}

let clock = 0, fraction = 0;
function play(on = !lab.playing) {
  lab.playing = on;
  if (on && lab.step >= lab.longest) lab.step = 0;
  clock = performance.now();
  fraction = 0;
  draw_maps();
  if (on) requestAnimationFrame(frame);
}

function frame(now) {
  if (!lab.playing) return;
  const rate = Math.max(lab.longest / 14, 4); // plays the whole map in about 14 seconds
  // A frame's time may precede the click that started playing.
  fraction += (Math.min(Math.max(now - clock, 0), 100) / 1000) * rate;
  clock = now;
  const whole = Math.floor(fraction);
  if (whole) {
    fraction -= whole;
    lab.step = Math.min(lab.step + whole, lab.longest);
    if (lab.step >= lab.longest) lab.playing = false;
    draw_maps();
  }
  if (lab.playing) requestAnimationFrame(frame);
}

// -- B compared with A ----------------------------------------------------------------------------

function difference() {
  const [a, b] = [lab.found.A, lab.found.B];
  by("difference").hidden = !(lab.two && a && b);
  if (by("difference").hidden) return;
  const of = (r, f) => f(r);
  const rows = [
    ["requested bytes", (r) => r.bytes, "B"], ["compulsory bytes", (r) => r.compulsory, "B"],
    ...[...new Set([...a.moved, ...b.moved].map((one) => one.tensor))].filter((x) => !LAB.statistics.includes(x))
      .map((x) => [`bytes of ${shown(x)}`, (r) => r.moved.reduce((sum, one) => (one.tensor === x ? sum + one.bytes : sum), 0n), "B"]),
    ["FLOPs of matrix products", (r) => r.flops.matmul, ""], ["exponentials", (r) => r.flops.exp, ""],
    ["tiles visited per head", (r) => r.walk.visits, ""], ["on chip", (r) => r.fullest.footprint, "B"],
    ["blocks", (r) => r.fullest.blocks, ""], ["waves", (r) => r.fullest.waves, ""],
  ].map(([name, f, unit]) => [name, of(a, f), of(b, f), unit]);
  by("difference").innerHTML = `<h2>B compared with A</h2><div class="scroll"><table><thead><tr><th></th><th>A</th><th>B</th><th>B − A</th><th>B ÷ A</th></tr></thead><tbody>` +
    rows.map(([name, x, y, unit]) => {
      const big = typeof x === "bigint" ? y - x : Number(y) - Number(x), share = Number(y) / Number(x);
      const whole = (v) => (typeof v === "bigint" || Number.isInteger(v) ? digits(v) : Number(v.toPrecision(3)));
      const sign = big > 0 ? "+" : "";
      return `<tr><td>${name}</td><td>${whole(x)}</td><td>${whole(y)}</td><td>${big == 0 ? "same" : sign + human(big, unit)}</td>` +
        `<td class="${big == 0 ? "" : "more"}">${Number.isFinite(share) ? ratio_text(share) : "–"}</td></tr>`;
    }).join("") + "</tbody></table></div>";
}

// -- copies ---------------------------------------------------------------------------------------

let hush = 0;
function say(words) {
  by("said").textContent = words;
  clearTimeout(hush);
  hush = setTimeout(() => { by("said").textContent = ""; }, 3500);
}

function shelf(title, body) {
  by("shelfTitle").textContent = title;
  by("shelfBody").innerHTML = body;
  by("shelf").showModal();
}

async function copy_text(words, what) {
  try {
    await navigator.clipboard.writeText(words);
    say(`${what} copied`);
  } catch {
    shelf(`${what}: the browser does not allow access to the clipboard, so copy the text here`,
      `<textarea rows="${Math.min(words.split("\n").length + 1, 20)}" aria-label="${esc(what)}" readonly>${esc(words)}</textarea>`);
    by("shelfBody").querySelector("textarea").select();
  }
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function copy_figure(figure, kind) {
  const drawing = figure.querySelector("svg").outerHTML, name = `tile-lab-${figure.id}`;
  if (kind === "svg") {
    copy_text(drawing, "SVG");
    return;
  }
  const blob = await png(drawing);
  try {
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
    say("PNG copied");
  } catch {
    download(blob, `${name}.png`);
    say(`The browser does not allow access to the clipboard, so ${name}.png is saved`);
  }
}

function png(drawing) {
  return new Promise((done, failed) => {
    const [, , w, h] = /viewBox="(\S+) (\S+) (\S+) (\S+)"/.exec(drawing).slice(1).map(Number);
    const sized = drawing.replace("<svg ", `<svg width="${w * 3}" height="${h * 3}" `), image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = w * 3;
      canvas.height = h * 3;
      canvas.getContext("2d").drawImage(image, 0, 0);
      canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("no PNG"))), "image/png");
    };
    image.onerror = () => failed(new Error("the figure cannot be drawn as PNG"));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(sized)}`;
  });
}

const KEYS = [
  ["Space", "play or pause the traversal", () => play()],
  ["← →", "step back or forward (with Shift: ten steps)", null],
  ["B", "compare two settings side by side", () => by("ab").click()],
  ["1 2", "choose whether the controls change A or B", null],
  ["P", "predict first: hide the results until you enter a guess", () => by("predict").click()],
  ["C", "copy as Python", () => by("code").click()],
  ["L", "copy a link to these settings", () => by("link").click()],
  ["T", "switch between light and dark", () => by("theme").click()],
  ["?", "show this list", () => by("help").click()],
];

function help() {
  shelf("Keyboard shortcuts, and how to read this page", `<dl>${KEYS.map(([key, words]) => `<dt>${key}</dt><dd>${words}</dd>`).join("")}</dl>
<p class="fine">Requested bytes are all bytes that tiles move between HBM and the chip. Compulsory bytes count each input and each output once.
The mask keeps all scores of a full tile. A partial tile also computes scores that the mask then removes. Skipped tiles are neither loaded nor computed.
The numbers come from the closed forms of flashsim, and equal those of flashsim.count to the byte. The page loads no other files.</p>`);
}

// -- everything together --------------------------------------------------------------------------

function recount() {
  const wrong = lab.wrong ? [lab.wrong] : [];
  for (const side of ["A", "B"]) {
    const before = lab.found[side];
    lab.found[side] = null;
    if (side === "B" && !lab.two) continue;
    const s = lab.states[side];
    if (!LAB.algorithms[s.algorithm].directions.includes(s.direction)) s.direction = "forward";
    try {
      lab.found[side] = count({ ...s });
      if (before) lab.trail[side] = [...lab.trail[side], roofline_of(before)].slice(-8);
      if (!lab.found[side].fits) {
        const { fullest, problem: p } = lab.found[side], best = fit(p, lab.found[side].stages);
        wrong.push(`${lab.two ? `${side}: ` : ""}A ${lab.found[side].tile.q} × ${lab.found[side].tile.k} tile does not fit: stage ${fullest.name} ` +
          `needs ${digits(fullest.footprint)} B on chip, but a block on ${p.device.name} has ${digits(p.device.sram_bytes)} B. ` +
          (best ? `The tile that fits and moves the fewest bytes is ${best.q} × ${best.k}.` : "No tile fits."));
      }
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      wrong.push(`${lab.two ? `${side}: ` : ""}${error.message}.`);
    }
  }
  by("notice").textContent = wrong.join(" ");
  by("notice").hidden = !wrong.length;
}

function update() {
  const began = performance.now();
  recount();
  for (const refresh of knobs) refresh();
  by("which").hidden = !lab.two;
  by("which").innerHTML = ["A", "B"].map((x) => `<button type="button" role="radio" data-side="${x}" aria-checked="${lab.side === x}">controls change ${x}</button>`).join("");
  by("ab").setAttribute("aria-pressed", lab.two);
  by("sides").className = lab.two ? "two" : "";
  for (const side of ["A", "B"]) draw_side(side);
  draw_maps();
  difference();
  show_question();
  by("bar").textContent = sides().filter((x) => lab.found[x]).map((x) => {
    const r = lab.found[x];
    return `${lab.two ? `${x}: ` : ""}${human(r.bytes)}, ${ratio_text(Number(r.bytes) / Number(r.compulsory))} compulsory, ${r.fits ? "fits" : "does not fit"}`;
  }).join(" · ");
  lab.ms = performance.now() - began;
}

let writing = 0;
function changed() {
  lab.wrong = "";
  lab.revealed = false;
  lab.playing = false;
  lab.step = 0;
  update();
  clearTimeout(writing);
  writing = setTimeout(write_address, 120);
}

function write_address() {
  const now = address();
  if (now !== decodeURIComponent(location.hash.slice(1))) history.replaceState(null, "", now ? `#${now}` : location.pathname + location.search);
}

function paint(name) {
  lab.theme = name;
  const t = T();
  for (const part of ["background", "panel", "text", "muted", "grid", "accent"]) {
    document.documentElement.style.setProperty(`--${part}`, t[part]);
  }
  document.documentElement.style.colorScheme = name;
}

function listen() {
  by("ab").addEventListener("click", () => {
    lab.two = !lab.two;
    lab.side = lab.two ? "B" : "A";
    if (lab.two) lab.states.B = { ...lab.states.A };
    changed();
  });
  by("which").addEventListener("click", (event) => {
    const button = event.target.closest("[data-side]");
    if (button) choose_side(button.dataset.side);
  });
  by("predict").addEventListener("click", () => {
    lab.predicting = !lab.predicting;
    changed();
    if (lab.predicting) by("guess").focus();
  });
  by("ask").innerHTML = Object.entries(QUESTIONS).map(([name, [words]]) => `<option value="${name}">${words}</option>`).join("");
  by("ask").addEventListener("change", () => { lab.ask = by("ask").value; changed(); });
  by("guess").addEventListener("input", () => {
    lab.guess = by("guess").value;
    if (lab.revealed) { lab.revealed = false; show_question(); }
  });
  by("guessing").addEventListener("submit", (event) => {
    event.preventDefault();
    lab.guess = by("guess").value;
    if (!(number_of(lab.guess) >= 0)) {
      by("verdict").textContent = "Type a number first, such as 16 * 4096 * 64 * 2, 2^20, 1.2 GB or 512 KiB.";
      return;
    }
    lab.revealed = true;
    update();
  });
  by("code").addEventListener("click", () => {
    const r = lab.found[lab.side];
    if (r) copy_text(python(r), "Python");
    else say("There is nothing to copy, because these settings cannot be counted");
  });
  by("link").addEventListener("click", () => { write_address(); copy_text(location.href, "Link"); });
  by("theme").addEventListener("click", () => {
    lab.picked = true;
    paint(lab.theme === "light" ? "dark" : "light");
    update();
  });
  by("help").addEventListener("click", help);
  by("play").addEventListener("click", () => play());
  by("back").addEventListener("click", () => { lab.playing = false; go(lab.step - 1); });
  by("next").addEventListener("click", () => { lab.playing = false; go(lab.step + 1); });
  by("scrub").addEventListener("input", () => { lab.playing = false; go(Number(by("scrub").value)); });
  by("sides").addEventListener("toggle", (event) => { if (event.target.open) update(); }, true);
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", on_key);
  window.addEventListener("hashchange", () => {
    read_address();
    Object.assign(lab, { step: 0, playing: false, stage: { A: null, B: null }, trail: { A: [], B: [] } });
    update();
  });
  narrow.addEventListener("change", update);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => {
    if (lab.picked || LAB.theme !== "auto") return;
    paint(dark.matches ? "dark" : "light");
    update();
  });
  let before = "light";
  window.addEventListener("beforeprint", () => { before = lab.theme; paint("light"); update(); });
  window.addEventListener("afterprint", () => { paint(before); update(); });
  paint(LAB.theme === "auto" ? (dark.matches ? "dark" : "light") : LAB.theme);
}

function choose_side(side) {
  lab.side = side;
  update();
  by("which").querySelector(`[data-side="${side}"]`).focus();
}

function on_key(event) {
  const typing = event.target.closest("input:not([type=range]):not([type=checkbox]), select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const inside = event.target.closest("input, button, summary");
  if (event.key === " ") {
    if (inside) return; // Space presses what has the focus
    event.preventDefault();
    play();
  } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
    if (event.target.closest("input")) return;
    event.preventDefault();
    lab.playing = false;
    go(lab.step + (event.key === "ArrowRight" ? 1 : -1) * (event.shiftKey ? 10 : 1));
  } else if (lab.two && (event.key === "1" || event.key === "2")) choose_side(event.key === "1" ? "A" : "B");
  else {
    const found = KEYS.find(([key]) => key.toLowerCase() === event.key.toLowerCase());
    if (found && found[2]) found[2]();
  }
}

build_controls();
build_side("A");
build_side("B");
listen();
read_address();
update();
