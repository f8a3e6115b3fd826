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

// -- B compared with A ----------------------------------------------------------------------------

function difference() {
  const [a, b] = [lab.found.A, lab.found.B];
  by("difference").hidden = !(lab.two && a && b);
  if (by("difference").hidden) return;
  const rows = [
    ["requested bytes", (r) => r.bytes, "B"], ["compulsory bytes", (r) => r.compulsory, "B"],
    ...[...new Set([...a.moved, ...b.moved].map((one) => one.tensor))].filter((x) => !LAB.statistics.includes(x))
      .map((x) => [`bytes of ${shown(x)}`, (r) => r.moved.reduce((sum, one) => (one.tensor === x ? sum + one.bytes : sum), 0n), "B"]),
    ["FLOPs of matrix products", (r) => r.flops.matmul, ""], ["exponentials", (r) => r.flops.exp, ""],
    ["tiles visited per head", (r) => r.walk.visits, ""], ["on chip", (r) => r.fullest.footprint, "B"],
    ["blocks", (r) => r.fullest.blocks, ""], ["waves", (r) => r.fullest.waves, ""],
  ].map(([name, f, unit]) => [name, f(a), f(b), unit]);
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
  show_theme(name, T());
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
