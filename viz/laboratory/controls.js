"use strict";
// The controls of the page's settings, and the settings in its address.

const octaves = (to) => {
  const found = [1];
  for (let n = 2; n <= to; n *= 2) found.push(...(n > 2 ? [n * 0.75, n] : [n]));
  return found;
};
const BLOCKS = [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256, 384, 512];
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
    { name: "kv_heads", label: "KV heads", options: (s) => [[0, "= query heads"], ...Array.from(
      { length: Math.min(s.heads, LIMITS.heads[1]) - 1 }, (_, n) => n + 1)
      .filter((n) => s.heads % n === 0).map((n) => [n, `${n}: shared by ${s.heads / n} query heads each`])] },
    { name: "batch", label: "Batch", steps: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128] },
    { name: "dtype", label: "Type", options: list(CHOICES.dtype) },
  ]],
  ["Mask", [
    { name: "mask", label: "Mask", options: list(CHOICES.mask, { cells: "block-sparse" }) },
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
  knobs.push(() => { row.hidden = Boolean(item.when && !item.when(state())); });
  const put = (value) => {
    if (item.act) item.act(state(), value);
    else state()[item.name] = value;
    changed();
  };
  if (item.check) {
    row.innerHTML = `<input type="checkbox" id="${id}"><label for="${id}">${item.label}</label>`;
    const tick = row.querySelector("input");
    tick.addEventListener("change", () => put(tick.checked ? item.on : item.off(state())));
    knobs.push(() => { tick.checked = state()[item.name] === item.on; });
  } else if (item.options) {
    row.innerHTML = `<label for="${id}">${item.label}</label><select id="${id}"></select>`;
    const select = row.querySelector("select");
    let options = [], drawn_as = "";
    select.addEventListener("change", () => put(options[select.selectedIndex][0]));
    knobs.push(() => {
      options = item.options(state());
      const now = options.map(([, word]) => `<option>${esc(word)}</option>`).join("");
      if (now !== drawn_as) select.innerHTML = drawn_as = now;
      select.selectedIndex = item.act ? 0 : options.findIndex(([value]) => value === state()[item.name]);
    });
  } else {
    row.innerHTML = `<label for="${id}">${item.label}</label>` +
      `<input type="number" id="${id}" step="any" value=""><input type="range" min="0" step="1" max="${item.steps.length - 1}" ` +
      `aria-label="${esc(item.label)}, slider">`;
    const [number, range] = row.querySelectorAll("input");
    range.addEventListener("input", () => put(item.steps[Number(range.value)]));
    number.addEventListener("change", () => put(number.value === "" ? NaN : Number(number.value)));
    knobs.push(() => {
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
