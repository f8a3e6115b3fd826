"use strict";
// The tile map of a stage, and playing its traversal.

const CELLS = 64; // the most tiles that a map draws along a side

// The grid that is drawn: every tile, or CELLS evenly chosen tiles along a side that has more.
function drawn(r) {
  const w = r.walk, rows = Math.min(w.t_r, CELLS), cols = Math.min(w.t_c, CELLS);
  const pick = (n, from, of) => Math.min(Math.floor(((n + 0.5) * of) / from), of - 1);
  const kinds = [], at = { i: [], j: [] };
  for (let b = 0; b < cols; b += 1) at.j.push(pick(b, cols, w.t_c));
  const bands = [];
  let row = 0, col = 0;
  for (const grid of w.grids) {
    bands.push([row, row + grid.tiles, col, grid]);
    row += grid.tiles;
    col += grid.whole;
  }
  for (let a = 0; a < rows; a += 1) {
    const i = pick(a, rows, w.t_r);
    at.i.push(i);
    const [first, , base, grid] = bands.find(([from, to]) => i >= from && i < to);
    const [, head, lo, hi, full, from, to] = grid.tile(i - first);
    kinds.push(at.j.map((j) => {
      const n = j - base;
      const visited = n >= 0 && n < grid.whole && (n < head || (n >= lo && n < hi));
      return visited ? (n < full || (n >= from && n < to) ? 1 : 2) : 0;
    }));
  }
  return { rows, cols, kinds, at, exact: rows === w.t_r && cols === w.t_c };
}

// The steps of one stage, in the order of its loops, over the tiles that are drawn.
function steps_of(map, stage) {
  const by_rows = stage.outer === "queries", [outer, inner] = by_rows ? [map.rows, map.cols] : [map.cols, map.rows];
  const visits = stage.visit.length && !stage.rows && stage.parts !== "merges";
  const steps = [], add = (x, y) => steps.push(by_rows ? [x, y] : [y, x]);
  for (let x = 0; x < outer; x += 1) {
    if (!visits) add(x, -1);
    for (let y = 0; visits && y < inner; y += 1) if (by_rows ? map.kinds[x][y] : map.kinds[y][x]) add(x, y);
  }
  return steps;
}

function sides_of(stage) {
  const names = [...new Set([...stage.before, ...stage.visit, ...stage.after]
    .filter(([op]) => op !== "alloc").map(([, tensor]) => tensor))]
    .filter((name) => !LAB.statistics.includes(name));
  return {
    row: names.filter((name) => LAB.axes[name] === "row").slice(0, 6),
    col: names.filter((name) => LAB.axes[name] === "col").slice(0, 4),
  };
}

// One stage's traversal. `step` is the number of steps done, or null for the whole map.
function map_figure(r, T, id, stage, map, steps, step) {
  const W = narrow.matches ? 350 : 400, sides = sides_of(stage), thick = 15;
  const left = Math.max(sides.row.length * (thick + 3), 2) + 20;
  const top = Math.max(sides.col.length * (thick + 3), 2) + 18;
  const n_rows = r.problem.n_q * r.problem.members, n_cols = r.problem.n_kv;
  const room = W - left - 2, tall = 330;
  let w = room, h = (room * n_rows) / n_cols;
  if (h > tall) { h = tall; w = Math.max((tall * n_cols) / n_rows, 60); }
  h = Math.max(h, 34);
  const H = top + h + 26, x = (b) => left + (w * b) / map.cols, y = (a) => top + (h * a) / map.rows;
  const ink = color_of(T, "S"), now = step === null || step === 0 ? null : steps[step - 1];
  const done = new Set();
  if (step !== null) for (let n = 0; n < step; n += 1) done.add(steps[n][0] * map.cols + steps[n][1]);
  const whole_row = now && now[1] < 0, whole_col = now && now[0] < 0;
  const parts = { skip: "", full: "", part: "", pale: "", palepart: "" };
  const rows_done = step !== null && stage.rows ? step : 0;
  for (let a = 0; a < map.rows; a += 1) {
    let from = 0;
    const kind = (b) => {
      const k = map.kinds[a][b];
      if (!k) return "skip";
      const seen = step === null || (stage.rows ? a < rows_done : done.has(a * map.cols + b));
      return seen ? (k === 1 ? "full" : "part") : (k === 1 ? "pale" : "palepart");
    };
    for (let b = 1; b <= map.cols; b += 1) {
      if (b < map.cols && kind(b) === kind(from)) continue;
      const y0 = px(y(a)), high = px(y(a + 1) - y(a));
      parts[kind(from)] += `M${px(x(from))} ${y0}H${px(x(b))}v${high}H${px(x(from))}z`;
      from = b;
    }
  }
  let body = "<defs>" + hatch(`${id}skip`, T.panel, T.grid) + hatch(`${id}part`, ink, T.background, 1.6, -45) +
    hatch(`${id}pale`, T.background, ink, 0.7, -45) + "</defs>" + box(0, 0, W, H, T.background);
  const fills = {
    skip: `url(#${id}skip)`, full: ink, part: `url(#${id}part)`, palepart: `url(#${id}pale)`,
  };
  for (const [name, d] of Object.entries(parts)) {
    if (d && name === "pale") body += `<path d="${d}" fill="${ink}" fill-opacity="0.16"/>`;
    else if (d) body += `<path d="${d}" fill="${fills[name]}"/>`;
  }
  const cell = Math.min(w / map.cols, h / map.rows);
  if (cell > 3.2) {
    let d = "";
    for (let b = 1; b < map.cols; b += 1) d += `M${px(x(b))} ${px(top)}v${px(h)}`;
    for (let a = 1; a < map.rows; a += 1) d += `M${px(left)} ${px(y(a))}h${px(w)}`;
    body += `<path d="${d}" stroke="${T.background}" stroke-width="${cell > 9 ? 1.5 : 0.8}" fill="none"/>`;
  }
  body += box(left, top, w, h, "none", `stroke="${T.muted}" stroke-width="1"`);
  if (map.exact && stage.parts === "walks" && r.splits > 1) {
    map.kinds.forEach((row, a) => {
      const at = row.flatMap((kind, b) => (kind ? [b] : []));
      const n = Math.max(Math.min(at.length, r.splits), 1);
      for (let part = 1; part < n; part += 1) {
        const b = at[Math.floor((at.length * part) / n)];
        body += line(x(b), y(a), x(b), y(a + 1), T.accent, 'stroke-width="2"');
      }
    });
  }
  sides.row.forEach((name, n) => {
    const at = 20 + n * (thick + 3), fill = color_of(T, name);
    body += box(at, top, thick, h, fill, `fill-opacity="${step === null ? 0.85 : 0.25}"`);
    if (now && now[0] >= 0) body += box(at, y(now[0]), thick, Math.max(h / map.rows, 3), fill);
    body += text(at + thick / 2, top - 4, name.replace(/_acc$/, "").replace(/_part$/, "′"),
      { anchor: "middle", size: 11, fill: T.text, weight: 600 });
  });
  sides.col.forEach((name, n) => {
    const at = 4 + n * (thick + 3), fill = color_of(T, name);
    body += box(left, at, w, thick, fill, `fill-opacity="${step === null ? 0.85 : 0.25}"`);
    if (now && now[1] >= 0) body += box(x(now[1]), at, Math.max(w / map.cols, 3), thick, fill);
    body += text(left - 5, at + thick - 3, name.replace(/_acc$/, "").replace(/_part$/, "′"),
      { anchor: "end", size: 11, fill: T.text, weight: 600 });
  });
  if (now) {
    const [a, b] = now;
    body += box(whole_row ? left : x(b), whole_col ? top : y(a), whole_row ? w : Math.max(w / map.cols, 3),
      whole_col ? h : Math.max(h / map.rows, 3), "none", `stroke="${T.accent}" stroke-width="3"`);
  }
  body += text(13, top + h / 2, "queries", { anchor: "middle", turn: -90, size: 11, fill: T.muted });
  body += text(left + w / 2, H - 8, "keys →", { anchor: "middle", size: 11, fill: T.muted });
  const v = r.walk;
  const label = `Tile map of stage ${stage.name}: ${digits(v.t_r)} by ${digits(v.t_c)} tiles, ` +
    `${digits(v.full)} full, ${digits(v.visits - v.full)} partial, ` +
    `${digits(Math.max(r.scores - v.visits, 0))} skipped`;
  return svg(W, Math.ceil(H), label, body);
}

function step_words(r, stage, map, steps, step) {
  if (step === null || step === 0) return "";
  const [a, b] = steps[step - 1];
  const before = step > 1 ? steps[step - 2] : null, after = steps[step] ?? null;
  const outer = stage.outer === "queries" ? 0 : 1;
  const first = !before || before[outer] !== steps[step - 1][outer];
  const last = !after || after[outer] !== steps[step - 1][outer];
  const words = (moves) => {
    const by = new Map();
    for (const [op, tensor] of moves) by.set(op, [...(by.get(op) ?? []), shown(tensor)]);
    return [...by].map(([op, names]) => `${op === "alloc" ? "allocate" : op} ${names.join(" ")}`);
  };
  const moves = [...(first ? words(stage.before) : []), ...words(stage.visit),
    ...(last ? words(stage.after) : [])];
  const where = [a >= 0 ? `query tile ${digits(map.at.i[a])}` : "", b >= 0 ? `key tile ${digits(map.at.j[b])}` : ""]
    .filter(Boolean).join(", ");
  return `${stage.name}: ${where}: ${moves.join("; ")}`;
}

// -- playing it -----------------------------------------------------------------------------------

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
  return { r, n, stage, map: r.map, steps: () => (r.steps[n] ??= steps_of(r.map, stage)) };
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
    longest = Math.max(longest, steps().length);
  }
  const scrub = by("scrub");
  if (Number(scrub.max) !== longest) scrub.max = longest;
  if (Number(scrub.value) !== lab.step) scrub.value = lab.step;
  scrub.setAttribute("aria-valuetext", lab.step ? `step ${lab.step} of ${longest}` : "not begun");
  by("play").textContent = lab.playing ? "❚❚ Pause" : "▶ Play";
  by("play").setAttribute("aria-pressed", lab.playing);
  lab.longest = longest;
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
