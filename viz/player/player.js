"use strict";
// The player: controls, keyboard, counters. Text reaches the page through textContent only.

const page = JSON.parse(by("data").textContent);
const OPS = page.ops;

function element(tag, parent, options = {}) {
  const made = document.createElement(tag);
  Object.assign(made, options);
  if (parent) parent.appendChild(made);
  return made;
}

const exact = (value) => value.toLocaleString("en");

class Pane {
  constructor(data, parent) {
    this.walk = new Steps(data, page);
    this.root = element("section", parent, { className: "pane" });
    const head = element("div", this.root, { className: "head" });
    if (page.panes.length > 1) element("h2", head, { textContent: data.label });
    element("p", head, { className: "about", textContent: data.about });
    this.canvas = element("canvas", this.root, { className: "diagram", tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    const facts = this.facts = element("div", this.root, { className: "facts" });
    this.makeCounters(facts);
    this.makeSram(facts);
    this.diagram = new Diagram(this.canvas, this.walk);
    if (this.walk.statistics) this.makeStatistics(facts);
    this.step = 0;
    this.canvas.addEventListener("click", (event) => {
      const hit = this.diagram.under(event.offsetX, event.offsetY);
      if (!hit) return;
      this.pin(hit);
      player.select(this, hit);
    });
  }

  makeCounters(parent) {
    const box = element("div", parent, { className: "counters" });
    const counter = (name) => {
      const cell = element("div", box);
      const value = element("b", cell, { textContent: "0" });
      element("span", cell, { textContent: name });
      return value;
    };
    this.counters = { load: counter("loaded from HBM"), store: counter("stored to HBM"),
      reduce: counter("reduced into HBM"), flops: counter("computed"), intensity: counter("FLOP per byte") };
    if (!this.walk.moved[2][this.walk.steps - 1]) this.counters.reduce.parentElement.hidden = true;
  }

  makeSram(parent) {
    const box = element("div", parent);
    this.sramLabel = element("p", box, { className: "label" });
    this.sram = element("div", box, { className: "sram" });
    this.sram.setAttribute("role", "img");
    this.blocks = this.walk.buffers.map((name) => element("div", this.sram, { title: name }));
    // All panes have the same scale; a mark shows a block's capacity if the scale is larger.
    const full = Math.max(...page.panes.map((pane) => pane.full)), limit = this.walk.limit;
    this.full = full;
    this.mark = element("i", this.sram, { title: "a block's shared memory", hidden: limit >= full });
    this.mark.style.left = `${(100 * limit) / full}%`;
    const names = element("p", box, { className: "names" });
    this.chips = this.walk.buffers.map((name) => {
      const item = element("span", names), chip = element("span", item, { className: "chip" });
      item.append(this.walk.symbols[name] || name);
      return chip;
    });
  }

  makeStatistics(parent) {
    const box = element("div", parent);
    this.statisticsLabel = element("p", box, { className: "label" });
    this.chart = element("canvas", box, { height: CHART });
    this.chart.setAttribute("role", "img");
  }

  // A click on a row pins its statistics; another click on the row unpins them.
  pin(hit) {
    const rows = this.walk.statistics && this.walk.statistics.rows;
    const tile = hit.name === undefined ? hit.i : this.walk.keySide.has(hit.name) ? -1 : hit.at;
    if (rows && rows[tile]) this.pinned = this.pinned === tile ? undefined : tile;
  }

  // The row tile whose statistics are shown: the pinned one, or the current one.
  row() {
    const { rows, tile } = this.walk.statistics;
    if (this.pinned !== undefined) return this.pinned;
    if (Object.keys(rows).length === 1) return tile;
    for (let step = this.step; step >= 0; step--) {  // a column's end has no row: the one before it
      const i = this.walk.at(step).i;
      if (rows[i]) return i;
    }
    return Number(Object.keys(rows)[0]);
  }

  setTheme(theme) {
    this.theme = theme;
    this.diagram.setTheme(theme);
    this.blocks.forEach((block, n) => {
      const color = theme.tensors[this.walk.buffers[n]];
      block.style.background = this.chips[n].style.background = color;
      if (/^d[A-Z]/.test(block.title)) {  // gradients are hatched, as in the plots
        block.style.backgroundImage = `repeating-linear-gradient(135deg, transparent 0 6px, ${theme.background}55 6px 9px)`;
      }
    });
  }

  draw() {
    const w = this.walk, step = this.step, at = w.at(step);
    this.diagram.draw(step);
    const total = w.bytes(step);
    const so_far = (counter, value, unit) => {
      counter.textContent = value ? human(value, unit) : "none yet";
      counter.className = value ? "" : "none";
    };
    OPS.slice(0, 3).forEach((op, n) => so_far(this.counters[op], w.moved[n][step]));
    so_far(this.counters.flops, w.flops[step], "FLOP");
    this.counters.intensity.textContent = total && w.flops[step] ? (w.flops[step] / total).toFixed(1) : "–";
    const width = w.buffers.length;
    let held = 0;
    this.blocks.forEach((block, n) => {
      const size = w.held[step * width + n];
      held += size;
      block.hidden = size === 0;
      block.style.flex = `0 0 ${(100 * size) / this.full}%`;
    });
    const share = held > w.limit ? `: a block's ${exact(w.limit)} B of shared memory, and registers`
      : `, ${((100 * held) / w.limit).toFixed(1)} % of a block's ${exact(w.limit)} B`;
    this.sramLabel.textContent = held ? `SRAM holds ${exact(held)} B${share} (${w.device})`
      : `SRAM is empty in this step, which only writes to HBM (${w.device})`;
    this.sram.setAttribute("aria-label", this.sramLabel.textContent);
    this.canvas.setAttribute("aria-label", `${w.label}: ${this.where(step)}, step ${step + 1} of ${w.steps}`);
    if (w.statistics) this.drawStatistics();
  }

  where(step) {
    const w = this.walk, at = w.at(step), note = w.notes[w.note[step]];
    const stage = `stage ${w.stages[at.stage].name}${note ? `, ${note}` : ""}`;
    if (at.visited) return `${stage}, tile (${at.i}, ${at.j})`;
    return `${stage}, end of ${at.i >= 0 ? `row ${at.i}` : `column ${at.j}`}`;
  }

  // The finite values of m, alpha or l in all rows.
  scale(band) {
    if (!this.scales) {
      const all = Object.values(this.walk.statistics.rows);
      this.scales = ["m", "alpha", "l"].map((name) => {
        const known = all.flatMap((row) => row[name]).filter((v) => v !== null);
        return known.length ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))] : [];
      });
    }
    return this.scales[band];
  }

  // m, alpha and l of one query row, visit by visit, each on its own scale.
  drawStatistics() {
    const tile = this.row(), all = this.walk.statistics.rows, s = all[tile];
    const c = this.chart.getContext("2d"), t = this.theme, count = s.steps.length;
    const ratio = Math.min(window.devicePixelRatio || 1, 2), width = this.chart.clientWidth, height = this.chartHeight || CHART;
    if (this.chart.width !== Math.round(width * ratio) || this.chart.height !== Math.round(height * ratio)) {
      this.chart.width = Math.round(width * ratio);
      this.chart.height = Math.round(height * ratio);
      this.chart.style.height = `${height}px`;
    }
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    let seen = 0;
    while (seen < count && s.steps[seen] <= this.step) seen++;
    const show = (value) => (value === null ? "−∞" : value.toFixed(2)), last = seen - 1;
    const now = seen ? `m = ${show(s.m[last])}, α = ${show(s.alpha[last])}, l = ${show(s.l[last])}` : "not reached yet: m = −∞, l = 0";
    const kept = this.pinned === undefined ? "" : " (clicked; click again to follow)";
    this.statisticsLabel.textContent = `Online softmax of query row ${s.row}${kept}: ${now}`;
    this.chart.setAttribute("aria-label", this.statisticsLabel.textContent);
    const left = 74, room = (height - 40) / 3 - 12;
    const px = (n) => left + 8 + (n * (width - left - 16)) / Math.max(1, count - 1);
    const write = (text, x, y, align, font, color) => {
      Object.assign(c, { font: `${font} system-ui, sans-serif`, textAlign: align, textBaseline: "middle", fillStyle: color });
      c.fillText(text, x, y);
    };
    [["m", s.m, "m"], ["α", s.alpha, "P"], ["l", s.l, "l"]].forEach(([name, values, shade], band) => {
      const known = this.scale(band);  // one scale for all rows, so that they can be compared
      const low = Math.min(...known), high = Math.max(...known);
      const top = band * (room + 12) + 8;
      const py = (v) => top + room * (1 - (v === null ? 0 : (v - low) / (high - low || 1)));
      c.strokeStyle = t.grid;
      c.lineWidth = 1;
      c.strokeRect(left, top, width - left, room);
      write(name, 4, top + room / 2, "left", "600 15px", t.text);
      if (known.length) write(show(high), left - 6, top + 4, "right", "12px", t.muted);
      if (high > low) write(show(low), left - 6, top + room - 3, "right", "12px", t.muted);
      c.strokeStyle = t.text;
      c.fillStyle = t.tensors[shade];
      c.lineWidth = 2;
      c.beginPath();
      for (let n = 0; n < seen; n++) {
        if (n) c.lineTo(px(n), py(values[n - 1]));
        c.lineTo(px(n), py(values[n]));
      }
      c.stroke();
      if (seen) {
        c.fillRect(px(last) - 5, py(values[last]) - 5, 10, 10);
        c.strokeRect(px(last) - 5, py(values[last]) - 5, 10, 10);
      }
    });
    const every = Math.ceil(count / Math.max(1, Math.floor((width - left) / 40)));  // so that numbers do not touch
    for (let n = 0; n < count; n += every) write(s.j[n], px(n), height - 30, "center", "12px", t.muted);
    write("key tile j", (left + width) / 2, height - 10, "center", "12px", t.muted);
  }
}

const CHART = 250;  // pixels high
const SPEEDS = [1, 2, 5, 10, 20, 60, 120, 300, 1200];

const player = {
  panes: [], time: 0, playing: false, dirty: true, speed: 10, clock: "steps", theme: "light", last: 0, owed: 0,
  shown: 0, shownAt: 0,  // the step that the address shows, and since when

  start() {
    document.title = page.title;
    by("title").textContent = page.title;
    document.body.dataset.panes = page.panes.length;
    this.panes = page.panes.map((data) => new Pane(data, by("panes")));
    this.length = Math.max(...this.panes.map((pane) => pane.walk.steps));
    this.most = Math.max(...this.panes.map((pane) => pane.walk.bytes(pane.walk.steps - 1)));
    by("scrub").max = this.length - 1;
    by("clockLabel").hidden = this.panes.length < 2;
    for (const speed of SPEEDS) element("option", by("speed"), { value: speed, textContent: `${speed}/s` });
    this.setSpeed(this.length > 2000 ? 120 : 10);
    for (const data of page.panes) {
      for (const [key, value] of Object.entries(data.provenance)) {
        element("dt", by("provenance"), { textContent: page.panes.length > 1 ? `${data.label}: ${key}` : key });
        element("dd", by("provenance"), { textContent: value });
      }
    }
    this.connect();
    const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    this.setTheme(page.theme === "auto" ? (dark ? "dark" : "light") : page.theme);
    this.resize();
    this.follow();
    requestAnimationFrame((now) => this.tick(now));
  },

  follow() {  // a link to a step: page.html#step=14
    const asked = /^#step=(\d+)$/.exec(location.hash);
    if (!asked) return;
    this.shown = Number(asked[1]) - 1;
    this.go(this.shown);
  },

  // Put the step into the address, except in a frame. Browsers limit how often it may change.
  address(now) {
    if (this.playing || this.shown === this.time || now - this.shownAt < 300 || window !== window.top) return;
    this.shown = this.time;
    this.shownAt = now;
    history.replaceState(null, "", `#step=${this.time + 1}`);
  },

  connect() {
    by("play").onclick = () => this.play(!this.playing);
    by("first").onclick = () => this.go(0);
    by("last").onclick = () => this.go(this.length - 1);
    by("next").onclick = () => this.go(this.time + 1);
    by("back").onclick = () => this.go(this.time - 1);
    by("help").onclick = () => this.help(true);
    by("how").ontoggle = () => this.help(by("how").open);
    by("theme").onclick = () => this.setTheme(this.theme === "dark" ? "light" : "dark");
    by("scrub").oninput = (event) => this.go(Number(event.target.value));
    by("speed").onchange = (event) => this.setSpeed(Number(event.target.value));
    by("clock").onchange = (event) => { this.clock = event.target.value; this.go(this.time); };
    // Also called when a notebook shows a frame that began without a size; panes follow the window.
    new ResizeObserver(() => this.resize()).observe(by("panes"));
    window.addEventListener("resize", () => this.resize());
    window.addEventListener("hashchange", () => this.follow());
    document.addEventListener("keydown", (event) => this.key(event));
  },

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const tag = event.target.tagName;
    if (tag === "SELECT" || ((tag === "BUTTON" || tag === "SUMMARY") && (event.key === " " || event.key === "Enter"))) return;
    const stride = event.shiftKey ? 10 : 1;
    const keys = {
      " ": () => this.play(!this.playing), ArrowRight: () => this.go(this.time + stride),
      ArrowLeft: () => this.go(this.time - stride), Home: () => this.go(0), End: () => this.go(this.length - 1),
      "]": () => this.stage(1), "[": () => this.stage(-1), "+": () => this.faster(1), "=": () => this.faster(1),
      "-": () => this.faster(-1), t: () => by("theme").click(), "?": () => this.help(true), Enter: () => this.selectCurrent(),
    };
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  },

  help(open) {  // when it opens, scroll it above the bar
    by("how").open = open;
    if (open) by("how").scrollIntoView({ block: "nearest" });
  },

  play(on) {
    if (on && this.time === this.length - 1) this.move(0);
    this.playing = on;
    this.last = 0;
    this.owed = 0;
    by("play").textContent = on ? "❚❚ Pause" : "▶ Play";
    by("play").setAttribute("aria-pressed", on);
    by("play").setAttribute("aria-label", on ? "Pause" : "Play");
    by("status").setAttribute("aria-live", on ? "off" : "polite");
    this.dirty = true;
  },

  go(time) { if (this.playing) this.play(false); this.move(time); },

  move(time) {
    this.time = Math.max(0, Math.min(this.length - 1, time));
    for (const pane of this.panes) {
      pane.step = this.clock === "steps" ? Math.min(this.time, pane.walk.steps - 1)
        : pane.walk.stepAtBytes(((this.time + 1) / this.length) * this.most);
    }
    this.dirty = true;
  },

  stage(direction) {  // to the next or previous step that begins a stage, in the longer trace
    const walk = this.panes.find((pane) => pane.walk.steps === this.length).walk;
    const starts = [];
    for (let s = 0; s < walk.steps; s++) if (!s || walk.at(s).stage !== walk.at(s - 1).stage) starts.push(s);
    const found = direction > 0 ? starts.find((s) => s > this.time) : starts.reverse().find((s) => s < this.time);
    if (found !== undefined) this.go(found);
  },

  setSpeed(speed) { this.speed = speed; by("speed").value = speed; },

  faster(direction) {
    const at = SPEEDS.indexOf(this.speed) + direction;
    if (SPEEDS[at]) this.setSpeed(SPEEDS[at]);
  },

  setTheme(name) {
    this.theme = name;
    const theme = page.themes[name];
    show_theme(name, theme);
    for (const pane of this.panes) pane.setTheme(theme);
    this.dirty = true;
  },

  resize() {
    // On a wide screen, the parts beside and below a diagram fit without scrolling.
    const main = document.querySelector("main"), rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const frame = main.getBoundingClientRect(), wide = window.innerWidth >= 60 * rem;
    const from = (element) => element.getBoundingClientRect().top - frame.top + main.scrollTop;
    const high = (element) => element.getBoundingClientRect().height;
    const gap = 0.9 * rem;
    for (const pane of this.panes) {
      const [counters, sram] = pane.facts.children, below = this.panes.length > 1 ? high(counters) + high(sram) + 3 * gap : gap;
      const tall = wide ? main.clientHeight - from(pane.canvas) - below : Math.min(window.innerHeight * 0.62, 900);
      pane.diagram.resize(Math.max(tall, window.innerHeight * 0.25, 160));
      if (!pane.chart) continue;
      const room = main.clientHeight - from(pane.chart) - gap;
      pane.chartHeight = wide && this.panes.length === 1 ? Math.max(130, Math.min(CHART, room)) : CHART;
    }
    this.dirty = true;
  },

  tick(now) {
    if (this.playing) {
      if (this.last) this.owed += ((now - this.last) * this.speed) / 1000;
      this.last = now;
      const whole = Math.floor(this.owed);
      if (whole) {
        this.owed -= whole;
        this.move(this.time + whole);
        if (this.time === this.length - 1) this.play(false);
      }
    }
    if (this.dirty) { this.dirty = false; this.draw(); }
    this.address(now);
    requestAnimationFrame((next) => this.tick(next));
  },

  draw() {
    for (const pane of this.panes) pane.draw();
    by("scrub").value = this.time;
    const text = this.panes.map((pane) => `${this.panes.length > 1 ? `${pane.walk.label}: ` : ""}step ${exact(pane.step + 1)} of ${exact(pane.walk.steps)}, ${pane.where(pane.step)}`);
    by("status").textContent = text.join(" · ");
    by("scrub").setAttribute("aria-valuetext", text[0]);
    const box = by("moves");
    box.textContent = "";
    for (const pane of this.panes) {
      if (this.panes.length > 1) element("p", box, { className: "quiet", textContent: pane.walk.label });
      this.table(box, pane.walk.moves(pane.step), pane);
    }
  },

  table(parent, moves) {
    if (!moves.length) element("p", parent, { className: "quiet", textContent: "This step moves no bytes." });
    const table = element("table", parent);
    for (const m of moves) {
      const row = element("tr", table), cell = element("td", row);
      element("span", cell, { className: "chip" }).style.background = page.themes[this.theme].tensors[m.name];
      cell.append(`${OPS[m.op]} ${m.name}${m.times > 1 ? ` × ${exact(m.times)}` : ""}`);
      element("td", row, { textContent: `${exact(m.size)} B` });
    }
  },

  selectCurrent() {
    const pane = this.panes.find((p) => p.canvas === document.activeElement) || this.panes[0];
    const at = pane.walk.at(pane.step);
    if (at.visited) this.select(pane, { i: at.i, j: at.j });
  },

  select(pane, hit) {
    const box = by("selected"), w = pane.walk;
    box.textContent = "";
    for (const other of this.panes) other.diagram.picked = null;
    this.dirty = true;
    if (hit.name) {
      element("p", box, { textContent: `${hit.name}, tile ${hit.at}, in the whole trace (${w.label})` });
      this.table(box, w.tensorTile(hit.name, hit.at));
      return;
    }
    pane.diagram.picked = hit;
    const stage = w.at(pane.step).stage, tile = w.tile(stage, hit.i, hit.j);
    const kind = ["skipped because it is fully masked", "full", "partly masked"][Math.min(tile.kind, 2)];
    const when = tile.steps.length ? `visited at step ${tile.steps.map((s) => exact(s + 1)).slice(0, 8).join(", ")}` : "not visited";
    element("p", box, { textContent: `Tile (${hit.i}, ${hit.j}), ${kind}; stage ${w.stages[stage].name}: ${when}` });
    this.table(box, tile.sums);
  },
};

player.start();
window.player = player;
