"use strict";
// Figures of a count, as SVG text that contains the theme's colours, so that a copy looks the same.

const FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif";
// Figures are narrower on a phone, so that their text stays legible.
const narrow = matchMedia("(max-width: 30rem)");
const wide = () => (narrow.matches ? 350 : 480);

const esc = (text) => String(text).replace(/[&<>"]/g,
  (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const px = (n) => Number(n.toFixed(1));
function text(x, y, said, more = {}) {
  const { size = 12, anchor = "start", fill, weight = 400, turn } = more;
  const turned = turn ? ` transform="rotate(${turn} ${px(x)} ${px(y)})"` : "";
  return `<text x="${px(x)}" y="${px(y)}" font-size="${size}" text-anchor="${anchor}" ` +
    `font-weight="${weight}" fill="${fill}"${turned}>${esc(said)}</text>`;
}
const box = (x, y, w, h, fill, more = "") =>
  `<rect x="${px(x)}" y="${px(y)}" width="${px(Math.max(w, 0))}" height="${px(Math.max(h, 0))}" ` +
  `fill="${fill}" ${more}/>`;
const line = (x1, y1, x2, y2, stroke, more = "") =>
  `<line x1="${px(x1)}" y1="${px(y1)}" x2="${px(x2)}" y2="${px(y2)}" stroke="${stroke}" ${more}/>`;
const dot = (x, y, r, fill, more = "") =>
  `<circle cx="${px(x)}" cy="${px(y)}" r="${r}" fill="${fill}" ${more}/>`;

function svg(width, height, label, body) {
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" role="img" ` +
    `aria-label="${esc(label)}" font-family="${FONT}">${body}</svg>`;
}

function hatch(id, ground, stroke, width = 1.4, turn = 45) {
  return `<pattern id="${id}" width="6" height="6" patternUnits="userSpaceOnUse" ` +
    `patternTransform="rotate(${turn})"><rect width="6" height="6" fill="${ground}"/>` +
    `<line x1="0" y1="3" x2="6" y2="3" stroke="${stroke}" stroke-width="${width}"/></pattern>`;
}

const color_of = (T, tensor) => T.tensors[tensor.replace(/_acc$/, "")] ?? T.muted;
const NAMES = { dQ_acc: "dQ (sum)", O_acc: "O (sum)", O_part: "O (parts)", L_part: "L (parts)" };
const shown = (tensor) => NAMES[tensor] ?? tensor;

// -- bytes per tensor -----------------------------------------------------------------------------

function bytes_rows(r) {
  const rows = new Map();
  for (const one of r.moved) {
    const row = rows.get(one.tensor) ?? { load: 0n, store: 0n, reduce: 0n };
    row[one.op] += one.bytes;
    rows.set(one.tensor, row);
  }
  return [...rows].map(([tensor, row]) => ({
    tensor, ...row, all: row.load + row.store + row.reduce, whole: r.whole[tensor],
  }));
}

function bytes_figure(r, T, id, most, guess) {
  const rows = bytes_rows(r), W = wide(), step = 28, left = 74, right = 128;
  const scale = (W - left - right) / Number(most);
  const paints = rows.map((x, n) => hatch(`${id}s${n}`, T.background, color_of(T, x.tensor), 2.6));
  let body = `<defs>${paints.join("")}${hatch(`${id}st`, T.background, T.muted, 2.6)}</defs>`;
  rows.forEach((row, n) => {
    const y = 6 + n * step, fill = color_of(T, row.tensor), high = step - 8;
    body += text(left - 8, y + 15, shown(row.tensor), { anchor: "end", size: 13, weight: 600, fill: T.text });
    let x = left;
    for (const op of ["load", "store", "reduce"]) {
      const w = Number(row[op]) * scale, paint = op === "load" ? fill : `url(#${id}s${n})`;
      if (w > 0) body += box(x, y, Math.max(w, 1), high, paint, `stroke="${fill}" stroke-width="1"`);
      x += w;
    }
    const often = row.whole ? Number(row.all) / Number(row.whole) : 0;
    const once = left + Number(row.whole) * scale;
    if (often > 1.02) body += line(once, y - 3, once, y + high + 3, T.text, 'stroke-width="2"');
    body += text(x + 8, y + 15, `${human(row.all)}, ${ratio_text(often)}`, { fill: T.text });
  });
  const end = 6 + rows.length * step;
  let y = end + 12;
  if (guess) {
    const at = Math.min(left + guess.value * scale, W - 4);
    body += line(at, 2, at, end, T.accent, 'stroke-width="3"') + text(at, end + 12, `guess ${human(guess.value)}`,
      { anchor: at > W / 2 ? "end" : "start", fill: T.accent, weight: 600 });
    y += 16;
  }
  const key = narrow.matches ? 6 : left;
  body += box(key, y - 9, 12, 11, T.muted) + text(key + 17, y + 1, "loaded", { fill: T.muted }) +
    box(key + 68, y - 9, 12, 11, `url(#${id}st)`, `stroke="${T.muted}"`) +
    text(key + 85, y + 1, "stored, reduced", { fill: T.muted }) +
    line(key + 187, y - 11, key + 187, y + 4, T.text, 'stroke-width="2"') +
    text(key + 195, y + 1, "the tensor, once (1×)", { fill: T.muted });
  const label = "Bytes per tensor: " + rows.map((x) => `${x.tensor} ${human(x.all)}`).join(", ");
  return svg(W, y + 10, label, box(0, 0, W, y + 10, T.background) + body);
}

// -- on chip --------------------------------------------------------------------------------------

function chip_figure(r, T, id) {
  const stage = r.fullest, held = held_by(r.problem, stage, r.tile), W = wide(), left = 8;
  const limit = r.problem.device.sram_bytes, all = stage.footprint, most = Math.max(limit, all) * 1.02;
  const scale = (W - 2 * left) / most;
  let x = left, row = 0, body = "<defs>" +
    hatch(`${id}over`, "none", T.accent, 2) + "</defs>", names = "";
  body += box(left, 22, limit * scale, 30, T.panel, `stroke="${T.grid}"`);
  let at = left;
  for (const [name, size] of held) {
    const w = size * scale, fill = color_of(T, name);
    body += box(x, 22, w, 30, fill, `stroke="${T.background}" stroke-width="1"`);
    if (w > 22) body += text(x + w / 2, 42, name, { anchor: "middle", size: 13, weight: 700, fill: on(fill) });
    x += w;
    const said = `${shown(name)} ${human(size)}`, wide = said.length * 6.2 + 26;
    if (at + wide > W + 6) {
      at = left;
      row += 1;
    }
    names += box(at, 64 + 17 * row, 10, 10, fill) + text(at + 14, 73 + 17 * row, said, { size: 11.5, fill: T.muted });
    at += wide;
  }
  if (all > limit) body += box(left + limit * scale, 22, (all - limit) * scale, 30, `url(#${id}over)`);
  const edge = left + limit * scale;
  body += line(edge, 14, edge, 58, T.text, 'stroke-dasharray="5 3" stroke-width="2"');
  body += text(Math.min(edge, W - left), 11, `a block of ${r.problem.device.name} has ${human(limit)}`,
    { anchor: "end", size: 12, fill: T.text });
  const said = all > limit ? `does not fit: stage ${stage.name} needs ${digits(all)} B, ${human(all - limit)} too much`
    : `stage ${stage.name} holds ${digits(all)} B: ${percent(all / limit)}`;
  const H = 104 + 17 * row;
  body = box(0, 0, W, H, T.background) + body + names + text(left, 96 + 17 * row, said, { size: 12.5, weight: 600, fill: all > limit ? T.accent : T.text });
  return svg(W, H, `On chip: ${said} of ${digits(limit)} B`, body);
}

function on(fill) {
  const [red, green, blue] = [1, 3, 5].map((n) => parseInt(fill.slice(n, n + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#111111" : "#ffffff";
}

// -- figures with two logarithmic axes ------------------------------------------------------------

const short = (v, unit) => human(v, unit).replace(/\.0+(?= |$)/, "");
const binary = (v) => (v >= 2 ** 20 ? `${v / 2 ** 20}M` : v >= 1024 ? `${v / 1024}k` : v);

// An empty figure with lines and numbers at the ticks of both axes, below the name of the x axis.
function axes(T, { W, H, left, right, top, bottom }, x, y, x_ticks, y_ticks, unit, name) {
  const at_x = (v) => line(x(v), top, x(v), H - bottom, T.grid) +
    text(x(v), H - bottom + 15, binary(v), { anchor: "middle", size: 11, fill: T.muted });
  const at_y = (v) => line(left, y(v), W - right, y(v), T.grid) +
    text(left - 6, y(v) + 4, short(v, unit), { anchor: "end", size: 11, fill: T.muted });
  return box(0, 0, W, H, T.background) + x_ticks.map(at_x).join("") + y_ticks.map(at_y).join("") +
    text((left + W) / 2, H - 8, name, { anchor: "middle", size: 12, fill: T.muted });
}

function nothing(T, label, said) {
  return svg(wide(), 60, label, box(0, 0, wide(), 60, T.background) + text(10, 34, said, { size: 13, fill: T.text }));
}

// -- roofline -------------------------------------------------------------------------------------

function roofline_of(r) {
  const peak = r.problem.device.peaks[r.state.dtype] ?? 0, work = Number(r.flops.matmul);
  const point = (name, bytes, bandwidth, roof) => ({
    name, roof, bandwidth, intensity: work / Number(bytes), bytes: Number(bytes),
    attainable: bandwidth ? Math.min(peak, (work / Number(bytes)) * bandwidth) : null,
    bound: !bandwidth ? "unknown" : work / Number(bytes) >= peak / bandwidth ? "arithmetic" : roof,
    seconds: bandwidth && peak ? Math.max(work / peak, Number(bytes) / bandwidth) : null,
  });
  const { hbm_bandwidth, l2_bandwidth } = r.problem.device;
  return {
    peak, work, points: [
      point("requested", r.bytes, l2_bandwidth, "L2"),
      point("compulsory", r.compulsory, hbm_bandwidth, "HBM"),
    ],
  };
}

function roofline_figure(r, T, id, trail, others) {
  const frame = { W: wide(), H: 300, left: 58, right: 12, top: 14, bottom: 44 }, { W, H, left, right, top, bottom } = frame;
  const { peak, points } = roofline_of(r);
  const { hbm_bandwidth, l2_bandwidth, name } = r.problem.device;
  if (!peak) {
    return nothing(T, `${name} has no peak for ${r.state.dtype}`, `No peak is known for ${r.state.dtype} on ${name}, so there is no roofline.`);
  }
  const all = [r, ...others.map((other) => other.r)].flatMap((one) => roofline_of(one).points);
  const powers = all.map((p) => Math.log2(p.intensity)).filter(Number.isFinite);
  const lo = Math.min(-1, Math.floor(Math.min(...powers))), hi = Math.max(14, Math.ceil(Math.max(...powers)));
  const high = Math.log2(peak) + 1.1, low = Math.min(high - 12, Math.log2(2 ** lo * hbm_bandwidth || peak));
  const x = (v) => left + ((W - left - right) * (Math.min(Math.max(Math.log2(v), lo), hi) - lo)) / (hi - lo);
  const y = (v) => top + ((H - top - bottom) * (high - Math.max(Math.log2(v), low))) / (high - low);
  const x_ticks = [], y_ticks = [];
  for (let n = lo + 1; n <= hi; n += hi - lo > 15 ? 4 : 2) x_ticks.push(2 ** n);
  for (let n = Math.ceil(Math.log10(2 ** low)); 10 ** n < 2 ** high; n += 1) y_ticks.push(10 ** n);
  let body = axes(T, frame, x, y, x_ticks, y_ticks, "", "matrix-product FLOPs per byte");
  const roof = (bandwidth, said, more) => {
    if (!bandwidth) return "";
    const from = Math.max(2 ** lo, (2 ** low) / bandwidth), to = Math.min(peak / bandwidth, 2 ** hi);
    const at = Math.min(to, 2 ** hi), angle = Math.atan2(y(from * bandwidth) - y(at * bandwidth), x(at) - x(from));
    const mid = Math.sqrt(from * at), lift = 6;
    return line(x(from), y(from * bandwidth), x(at), y(at * bandwidth), T.text, more) +
      text(x(mid) - lift * Math.sin(angle), y(mid * bandwidth) - lift * Math.cos(angle), said,
        { anchor: "middle", size: 11, fill: T.text, turn: (-angle * 180) / Math.PI });
  };
  body += roof(hbm_bandwidth, `HBM ${human(hbm_bandwidth, "B/s")}`, 'stroke-width="2"') +
    roof(l2_bandwidth, `L2 ${human(l2_bandwidth, "B/s")}`, 'stroke-width="2" stroke-dasharray="6 4"');
  const first = peak / Math.max(l2_bandwidth, hbm_bandwidth);
  body += line(x(first), y(peak), W - right, y(peak), T.text, 'stroke-width="2"') +
    text(W - 14, y(peak) - 13, `peak ${human(peak, "FLOP/s")}`, { anchor: "end", size: 11, fill: T.text });
  const place = (p) => [x(p.intensity), y(p.attainable ?? Math.min(peak, p.intensity * hbm_bandwidth))];
  for (const old of trail) {
    for (const p of old.points) body += dot(...place(p), 3, T.muted, 'fill-opacity="0.35"');
  }
  for (const p of points) {
    const [cx, cy] = place(p), filled = p.name === "requested" ? T.accent : T.background;
    body += dot(cx, cy, 7, filled, `stroke="${T.accent}" stroke-width="2.5"`);
    const last = cx > W - 100, near = place(points[1])[0] - place(points[0])[0] < 170;
    const end = last || (p.name === "requested" && near), above = end && cx < left + 70;
    const down = above ? -12 : last && near && p.name === "compulsory" ? 38 : 22;
    body += text(cx + (end && !above ? -6 : 6), cy + down, p.name,
      { size: 12, weight: 600, anchor: end && !above ? "end" : "start", fill: T.text });
  }
  for (const other of others) {
    for (const p of roofline_of(other.r).points) {
      body += dot(...place(p), 5, T.muted) + text(place(p)[0], place(p)[1] - 9, other.name, { anchor: "middle", size: 11, fill: T.muted });
    }
  }
  body += text(13, (H - bottom) / 2, "FLOP/s", { anchor: "middle", turn: -90, size: 12, fill: T.muted });
  const label = "Roofline: " + points.map((p) => `${p.name} ${p.intensity.toPrecision(3)} FLOP per byte, bound by ${p.bound}`).join("; ");
  return svg(W, H, label, body);
}

// -- curves ---------------------------------------------------------------------------------------

function curve_figure(T, { title, lines, mark, axis, guess, ticks, low_left = false }) {
  const frame = { W: wide(), H: 290, left: 62, right: 14, top: 16, bottom: 44 }, { W, H, left, right, top, bottom } = frame;
  const all = lines.flatMap((one) => one.points).filter((p) => p.bytes);
  if (!all.length) return nothing(T, "nothing to draw", "There are no points to draw.");
  const xs = all.map((p) => Math.log2(p.x)), ys = all.map((p) => Math.log10(p.bytes));
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
  let y0 = Math.min(...ys), y1 = Math.max(...ys);
  const pad = Math.max((y1 - y0) * 0.08, 0.12);
  y0 -= pad; y1 += pad;
  const x = (v) => left + ((W - left - right) * (Math.log2(v) - x0)) / (x1 - x0);
  const y = (v) => top + ((H - top - bottom) * (y1 - Math.log10(v))) / (y1 - y0);
  const between = y1 - y0 > 2.2 ? [1] : y1 - y0 > 0.6 ? [1, 2, 5] : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
  const every = Math.max(1, Math.ceil((y1 - y0) / 8));
  const y_ticks = [];
  for (let n = Math.floor(y0); n <= y1; n += 1) {
    if (between.length > 1 || n % every === 0) y_ticks.push(...between.map((m) => m * 10 ** n));
  }
  let body = axes(T, frame, x, y, ticks.filter((v) => Math.log2(v) >= x0 - 0.01 && Math.log2(v) <= x1 + 0.01),
    y_ticks.filter((v) => Math.log10(v) >= y0 && Math.log10(v) <= y1), "B", axis);
  let named = 0;
  const legend_at = low_left ? H - bottom - 12 - 17 * (lines.length - 1) : top + 16;
  for (const one of lines) {
    const points = one.points.filter((p) => p.bytes);
    if (!points.length) continue;
    body += `<polyline fill="none" stroke="${one.color}" stroke-width="${one.main ? 3 : 1.8}" ` +
      `${one.dash ? `stroke-dasharray="${one.dash}"` : ""} points="${points.map((p) => `${px(x(p.x))},${px(y(p.bytes))}`).join(" ")}"/>`;
    for (const p of points) {
      if (one.dots) body += dot(x(p.x), y(p.bytes), 3.4, p.fits ? one.color : T.background, `stroke="${one.color}" stroke-width="1.5"`);
    }
    const at = legend_at + 17 * named;
    named += 1;
    body += line(left + 10, at - 4, left + 34, at - 4, one.color,
      `stroke-width="${one.main ? 3 : 2}" ${one.dash ? `stroke-dasharray="${one.dash}"` : ""}`) +
      text(left + 41, at, one.name, { size: 12.5, weight: one.main ? 700 : 500, fill: T.text });
  }
  if (mark) {
    body += line(x(mark.x), y(mark.bytes), x(mark.x), H - bottom, T.accent, 'stroke-dasharray="3 3"') +
      dot(x(mark.x), y(mark.bytes), 7, T.accent, `stroke="${T.background}" stroke-width="2"`);
  }
  if (guess && mark) {
    const gy = Math.min(Math.max(y(guess.value), top + 4), H - bottom - 4);
    body += dot(x(mark.x), gy, 6, T.background, `stroke="${T.accent}" stroke-width="2.5"`) +
      text(x(mark.x) + 11, gy + 4, "guess", { size: 12, weight: 600, fill: T.accent });
  }
  const said = lines.filter((one) => one.points.some((p) => p.bytes)).map((one) => {
    const points = one.points.filter((p) => p.bytes);
    return `${one.name} from ${human(points[0].bytes)} to ${human(points.at(-1).bytes)}`;
  });
  return svg(W, H, `${title}: ${said.join("; ")}`, body);
}

const LENGTHS = Array.from({ length: 15 }, (_, n) => 2 ** (6 + n));

function length_figure(r, T, guess) {
  const s = r.state, both = !s.n_kv || s.n_kv === s.n_q, key = both ? "n_q" : "n_kv";
  const at = both ? { n_kv: 0 } : {}, here = both ? s.n_q : s.n_kv;
  const scaled = (n) => ({
    ...s, ...at, [key]: n, fit: 0, block_q: r.tile.q, block_k: r.tile.k, docs: Math.min(s.docs, n),
  });
  const colors = { standard: T.cycle[0], flash1: T.cycle[1], flash2: T.cycle[3] };
  const shown_too = Object.keys(colors).filter((name) => name !== s.algorithm &&
    LAB.algorithms[name].directions.includes(s.direction) && s.algorithm !== "flash2-once");
  const xs = [...new Set([...LENGTHS.filter((n) => both || n >= 64), here])].sort((a, b) => a - b);
  const lines = [...shown_too, s.algorithm].map((name) => ({
    name: LAB.algorithms[name].title, main: name === s.algorithm,
    color: name === s.algorithm ? T.accent : colors[name],
    dash: name === s.algorithm ? "" : "5 4",
    points: xs.map((n) => {
      const found = bytes_of({ ...scaled(n), algorithm: name });
      return { x: n, bytes: found ? Number(found.bytes) : 0 };
    }),
  }));
  return curve_figure(T, {
    title: "Bytes against length", lines, axis: both ? "N: queries and keys" : "N: keys", guess,
    mark: { x: here, bytes: Number(r.bytes) }, ticks: [64, 256, 1024, 4096, 16384, 65536, 2 ** 18, 2 ** 20],
  });
}

const TILE_SIDES = [16, 32, 64, 128, 256, 512];

function tile_figure(r, T) {
  const s = { ...r.state, fit: 0, block_q: r.tile.q, block_k: r.tile.k };
  const vary = (side, color, dash) => ({
    name: `${side} varies`, color, dash, dots: true, main: true,
    points: [...new Set([...TILE_SIDES, s[side]])].filter((n) => n >= 8).sort((a, b) => a - b).map((n) => {
      const found = bytes_of({ ...s, [side]: n });
      return { x: n, bytes: found ? Number(found.bytes) : 0, fits: found ? found.fits : false };
    }),
  });
  const lines = [vary("block_q", color_of(T, "Q"), ""), vary("block_k", color_of(T, "K"), "5 3")];
  return curve_figure(T, {
    title: "Bytes against tile size", lines, axis: "side of the tile (hollow: does not fit)", low_left: true,
    mark: { x: Math.max(s.block_q, 8), bytes: Number(r.bytes) }, ticks: TILE_SIDES,
  });
}

// Every tile size: its bytes, or a mark if it does not fit. A click on a cell selects the tile size.
function grid_figure(r, T) {
  const brief = (n) => (narrow.matches ? human(n).replace(/ (\w?)B$/, "$1") : human(n));
  const s = { ...r.state, fit: 0 }, W = wide(), left = 62, top = 24, w = (W - left - 10) / 6, h = 38;
  const H = top + 6 * h + 40, cells = [];
  for (const q of TILE_SIDES) {
    for (const k of TILE_SIDES) {
      const found = bytes_of({ ...s, block_q: q, block_k: k });
      if (found) cells.push({ q, k, bytes: Number(found.bytes), fits: found.fits });
    }
  }
  const logs = cells.map((c) => Math.log2(c.bytes)), low = Math.min(...logs), high = Math.max(...logs, low + 1e-9);
  const fitting = cells.filter((c) => c.fits).map((c) => c.bytes), least = Math.min(...fitting);
  let body = box(0, 0, W, H, T.background);
  const at = (c) => [left + TILE_SIDES.indexOf(c.k) * w, top + TILE_SIDES.indexOf(c.q) * h];
  for (const c of cells) {
    const [x, y] = at(c), shade = 0.08 + (0.62 * (Math.log2(c.bytes) - low)) / (high - low);
    const best = c.fits && c.bytes === least;
    body += `<g data-tile="${c.q},${c.k}" cursor="pointer">` + box(x, y, w - 2, h - 2, c.fits ? T.background : T.panel) +
      box(x, y, w - 2, h - 2, color_of(T, "Q"), `fill-opacity="${c.fits ? shade.toFixed(3) : 0}"`) +
      text(x + w / 2 - 1, y + h / 2 + 4, c.fits ? brief(c.bytes) : narrow.matches ? "✕" : "too large",
        { anchor: "middle", size: 11.5, weight: best ? 800 : 500, fill: c.fits ? (shade > 0.42 && T.name === "light" ? "#ffffff" : T.text) : T.muted }) + "</g>";
  }
  const here = cells.find((c) => c.q === r.tile.q && c.k === r.tile.k);
  if (here) body += box(at(here)[0], at(here)[1], w - 2, h - 2, "none", `stroke="${T.accent}" stroke-width="3"`);
  TILE_SIDES.forEach((n, i) => {
    body += text(left - 8, top + i * h + h / 2 + 4, n, { anchor: "end", size: 12, fill: T.muted }) +
      text(left + i * w + w / 2, top - 8, n, { anchor: "middle", size: 12, fill: T.muted });
  });
  body += text(15, top + 3 * h, "block_q", { anchor: "middle", size: 12, turn: -90, fill: T.muted }) +
    text(left + 3 * w, H - 22, "block_k", { anchor: "middle", size: 12, fill: T.muted }) +
    text(left + 3 * w, H - 6, fitting.length ? "bold: fewest bytes of those that fit. Click a tile to use it." : "no tile fits",
      { anchor: "middle", size: 11.5, fill: T.muted });
  const best = cells.filter((c) => c.fits && c.bytes === least).map((c) => `${c.q} × ${c.k}`);
  return svg(W, H, best.length ? `Bytes of every tile size; the fewest, ${human(least)}, with ${best.join(", ")}` : "No tile fits", body);
}

// -- blocks and waves -----------------------------------------------------------------------------

function waves_figure(r, T) {
  const stage = r.fullest, sms = r.problem.device.sm_count, room = stage.per_sm * sms, W = wide(), H = stage.serial ? 108 : 90;
  const whole = Math.floor(stage.blocks / room), rest = stage.blocks - whole * room;
  const count_shown = Math.min(Math.ceil(stage.waves), 24), width = (W - 16) / Math.max(count_shown, 1);
  let body = box(0, 0, W, H, T.background);
  for (let n = 0; n < count_shown; n += 1) {
    const last = n === count_shown - 1, share = last && rest ? rest / room : 1;
    body += box(8 + n * width, 8, width - 2, 40, T.panel, `stroke="${T.grid}"`) +
      box(8 + n * width, 8 + 40 * (1 - share), width - 2, 40 * share, last && rest ? T.accent : T.cycle[1]);
  }
  const waves = stage.waves < 10 ? Number(stage.waves.toPrecision(3)) : digits(stage.waves);
  const tail = rest ? `the last wave is ${percent(rest / room)} full` : "every wave is full";
  const cut = Math.ceil(stage.waves) > count_shown ? ` (${count_shown} waves drawn)` : "";
  const said = [
    [`${digits(stage.blocks)} blocks ÷ (${sms} SMs × ${stage.per_sm} per SM) = ${waves} waves`, narrow.matches ? 11.5 : 12.5, 600, T.text],
    [`stage ${stage.name}: ${tail}${cut}`, 12, 400, T.muted],
    ...(stage.serial ? [["one block per head: its key tiles share O or dQ", 12, 400, T.muted]] : []),
  ];
  said.forEach(([words, size, weight, fill], n) => { body += text(8, 66 + 18 * n, words, { size, weight, fill }); });
  return svg(W, H, `Waves: ${digits(stage.blocks)} blocks, ${waves} waves on ${sms} SMs, ${tail}`, body);
}
