"use strict";
// Draws one trace: the grid of score tiles with the tensors in HBM around it. Tiles are pixels of
// small images that are scaled up, so a frame takes the same time for 16 tiles and for 100,000.

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mix = (a, b, t) => a.map((x, n) => Math.round(x + (b[n] - x) * t));
const css = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;

class Diagram {
  constructor(canvas, walk) {
    this.canvas = canvas;
    this.walk = walk;
    this.context = canvas.getContext("2d");
    this.grid = this.image(walk.cols, walk.rows);
    this.strips = [];
    for (const side of ["left", "right", "top", "bottom"]) {
      for (const name of walk.sides[side]) {
        const upright = side === "left" || side === "right";
        const tiles = upright ? walk.rows : walk.cols;
        this.strips.push({ side, name, upright, tiles,
          image: upright ? this.image(1, tiles) : this.image(tiles, 1) });
      }
    }
    this.shown = -1;  // the step that the images show
  }

  image(width, height) {
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d");
    return { canvas, context, data: context.createImageData(width, height) };
  }

  setTheme(theme) {
    this.theme = theme;
    this.colors = { panel: rgb(theme.panel), skip: mix(rgb(theme.background), rgb(theme.grid), 0.45) };
    const q = rgb(theme.tensors.S);
    this.done = [mix(rgb(theme.panel), q, 0.3), mix(rgb(theme.panel), q, 0.75)];
    this.shown = -1;
  }

  // `tall`: the height that is available for the whole drawing, in pixels.
  resize(tall) {
    const ratio = Math.min(window.devicePixelRatio || 1, 2), width = this.canvas.clientWidth;
    const w = this.walk, count = (side) => w.sides[side].length;
    const text = Math.max(12, Math.min(22, width / 34, tall / 24));
    const strip = Math.max(13, Math.min(30, width / 26, tall / 18)), gap = strip * 0.5;
    const x = text * 1.9 + count("left") * (strip + gap), y = text * 1.9 + count("top") * (strip + gap);
    const right = count("right") * (strip + gap) + gap;
    const bottom = count("bottom") * (strip + gap) + text * 1.7;
    const room = Math.max(40, width - x - right);
    const most = Math.max(160, tall - y - bottom);
    const gridHeight = Math.min(most, Math.max(60, room * Math.max(0.4, Math.min(1, w.rows / w.cols))));
    this.box = { x, y, w: room, h: gridHeight, strip, gap, text };
    const height = y + gridHeight + bottom;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.place();
  }

  place() {
    const { x, y, w, h, strip, gap } = this.box, nth = { left: 0, right: 0, top: 0, bottom: 0 };
    for (const s of this.strips) {
      const n = nth[s.side]++, out = (n + 1) * (strip + gap);
      s.box = {
        left: { x: x - out, y, w: strip, h }, right: { x: x + w + out - strip, y, w: strip, h },
        top: { x, y: y - out, w, h: strip }, bottom: { x, y: y + h + out - strip, w, h: strip },
      }[s.side];
    }
  }

  // -- tiles to pixels --------------------------------------------------------------------------

  paint(step) {
    const at = this.walk.at(step);
    const onward = step === this.shown + 1 && this.shown >= 0 &&
      this.walk.at(this.shown).stage === at.stage;
    if (onward) {
      if (at.visited) this.pixel(this.grid, at.i * this.walk.cols + at.j, this.ramp(at.stage, this.walk.order[step]));
    } else this.repaint(step, at.stage);
    this.grid.context.putImageData(this.grid.data, 0, 0);
    for (const s of this.strips) this.paintStrip(s, step);
    this.shown = step;
  }

  repaint(step, stage) {
    const w = this.walk, kinds = w.stages[stage].kinds;
    for (let n = 0; n < kinds.length; n++) this.pixel(this.grid, n, kinds[n] ? this.colors.panel : this.colors.skip);
    for (let s = step; s >= 0 && w.stage[w.end[s]] === stage; s--) {
      const e = w.end[s];
      if (w.visited[e]) this.pixel(this.grid, w.i[e] * w.cols + w.j[e], this.ramp(stage, w.order[s]));
    }
  }

  ramp(stage, order) {
    const all = this.visitsOf(stage);
    return mix(this.done[0], this.done[1], all > 1 ? order / (all - 1) : 1);
  }

  visitsOf(stage) {
    if (!this.counts) {
      this.counts = this.walk.stages.map(() => 0);
      for (const e of this.walk.end) if (this.walk.visited[e]) this.counts[this.walk.stage[e]]++;
    }
    return this.counts[stage];
  }

  pixel(image, at, color) {
    const d = image.data.data, n = at * 4;
    d[n] = color[0]; d[n + 1] = color[1]; d[n + 2] = color[2]; d[n + 3] = 255;
  }

  paintStrip(s, step) {
    const first = this.walk.touched.get(s.name), own = rgb(this.theme.tensors[s.name]);
    const idle = mix(rgb(this.theme.background), own, 0.22), seen = mix(rgb(this.theme.background), own, 0.55);
    for (let n = 0; n < s.tiles; n++) this.pixel(s.image, n, first && first[n] <= step ? seen : idle);
    s.image.context.putImageData(s.image.data, 0, 0);
  }

  // -- one frame --------------------------------------------------------------------------------

  draw(step) {
    this.paint(step);
    const c = this.context, { x, y, w, h, text } = this.box, t = this.theme;
    c.fillStyle = t.background;
    c.fillRect(0, 0, this.canvas.width, this.canvas.height);
    c.imageSmoothingEnabled = false;
    c.drawImage(this.grid.canvas, x, y, w, h);
    const at = this.walk.at(step), moves = this.walk.moves(step);
    this.lines(at.stage);
    for (const s of this.strips) {
      c.drawImage(s.image.canvas, s.box.x, s.box.y, s.box.w, s.box.h);
      this.stripTicks(s);
      this.name(s);
    }
    this.edges();
    this.flights(moves, at);
    c.font = `${Math.max(12, text * 0.75)}px system-ui, sans-serif`;
    c.fillStyle = t.muted;
    c.textAlign = "left";
    c.textBaseline = "alphabetic";
    const held = this.walk.sides.grid;
    const inHbm = held.length ? ` · ${held.join(", ")} in HBM` : "";
    c.fillText(`scores: keys across, queries down${inHbm}`, 0, text * 1.05);
    if (this.picked) this.outline(this.cell(this.picked.i, this.picked.j), t.text, 2);
  }

  cell(i, j) {
    const { x, y, w, h } = this.box, { rows, cols } = this.walk;
    if (i < 0) return { x: x + (j * w) / cols, y, w: w / cols, h };
    if (j < 0) return { x, y: y + (i * h) / rows, w, h: h / rows };
    return { x: x + (j * w) / cols, y: y + (i * h) / rows, w: w / cols, h: h / rows };
  }

  // Draw lines between tiles if they are large enough, and a corner on partly masked tiles.
  lines(stage) {
    const c = this.context, { x, y, w, h } = this.box, { rows, cols } = this.walk;
    const dx = w / cols, dy = h / rows, kinds = this.walk.stages[stage].kinds;
    if (Math.min(dx, dy) < 6) return;
    c.strokeStyle = this.theme.background;
    c.lineWidth = 1;
    c.beginPath();
    for (let j = 1; j < cols; j++) { c.moveTo(x + j * dx, y); c.lineTo(x + j * dx, y + h); }
    for (let i = 1; i < rows; i++) { c.moveTo(x, y + i * dy); c.lineTo(x + w, y + i * dy); }
    c.stroke();
    const side = Math.min(dx, dy) * 0.35;
    c.fillStyle = this.theme.accent;
    c.beginPath();
    const corner = (px, py, s) => { c.moveTo(px - s, py); c.lineTo(px, py); c.lineTo(px, py + s); };
    for (let n = 0; n < kinds.length; n++) {  // 2: the upper right corner is masked, 3: the lower left, 4: both
      const left = x + (n % cols) * dx, top = y + Math.floor(n / cols) * dy;
      if (kinds[n] === 2 || kinds[n] === 4) corner(left + dx, top, side);
      if (kinds[n] > 2) corner(left, top + dy, -side);
    }
    c.fill();
  }

  // Draw lines on the grid between splits of the keys, and on strips of keys between pages.
  edges() {
    const c = this.context, { x, y, w, h } = this.box, { rows, cols, parts, pages } = this.walk;
    c.strokeStyle = this.theme.text;
    const down = (at, top, high) => { c.moveTo(x + (at * w) / cols, top); c.lineTo(x + (at * w) / cols, top + high); };
    c.lineWidth = Math.min(3, w / cols / 5);  // so that the tiles between narrow parts stay visible
    c.beginPath();
    for (const [i, j] of parts) down(j, y + (i * h) / rows, h / rows);
    c.stroke();
    c.lineWidth = 1.5;
    c.beginPath();
    for (const s of this.strips) if (!s.upright) for (const at of pages) down(at, s.box.y, s.box.h);
    c.stroke();
  }

  stripTicks(s) {
    const length = (s.upright ? s.box.h : s.box.w) / s.tiles, c = this.context;
    if (length < 6) return;
    c.strokeStyle = this.theme.background;
    c.lineWidth = 1;
    c.beginPath();
    for (let n = 1; n < s.tiles; n++) {
      if (s.upright) { c.moveTo(s.box.x, s.box.y + n * length); c.lineTo(s.box.x + s.box.w, s.box.y + n * length); }
      else { c.moveTo(s.box.x + n * length, s.box.y); c.lineTo(s.box.x + n * length, s.box.y + s.box.h); }
    }
    c.stroke();
  }

  name(s) {
    const c = this.context, { text } = this.box, name = this.walk.symbols[s.name] || s.name;
    c.font = `600 ${Math.min(text, this.box.strip)}px system-ui, sans-serif`;
    c.fillStyle = this.theme.text;
    c.textBaseline = "middle";
    // The names of each side are placed where they overlap no other side's strips or names.
    const { x, y, w, h } = s.box;
    c.textAlign = s.upright ? "center" : s.side === "top" ? "right" : "left";
    const at = { left: [x + w / 2, y + h + text * 0.75], right: [x + w / 2, y - text * 0.6],
      top: [x - 6, y + h / 2], bottom: [x + w + 6, y + h / 2] }[s.side];
    if (s.upright && name.length > 3) {  // wider than its strip: upwards
      c.save();
      c.translate(x + w / 2, s.side === "right" ? y - text * 0.3 : y + h + text * 0.3);
      c.rotate(-Math.PI / 2);
      c.textAlign = s.side === "right" ? "left" : "right";
      c.fillText(name, 0, 0);
      c.restore();
      return;
    }
    c.fillText(name, at[0], at[1]);
  }

  // Tiles that move in this step have full colour, an outline, and a line to the current tile.
  flights(moves, at) {
    const c = this.context, target = this.cell(at.i, at.j);
    for (const m of moves) {
      const color = this.theme.tensors[m.name], s = this.strips.find((strip) => strip.name === m.name);
      if (!s) {
        this.outline(this.cell(m.i, m.j), color, 5);
        continue;
      }
      const n = s.upright ? m.i : m.j;
      const length = (s.upright ? s.box.h : s.box.w) / s.tiles;
      const box = s.upright ? { x: s.box.x, y: s.box.y + n * length, w: s.box.w, h: length }
        : { x: s.box.x + n * length, y: s.box.y, w: length, h: s.box.h };
      const from = { x: box.x + box.w / 2, y: box.y + box.h / 2 };
      // Lines of one side are drawn side by side.
      const share = (this.strips.filter((o) => o.side === s.side).indexOf(s) + 1) / (this.walk.sides[s.side].length + 1);
      if (s.upright) from.y = box.y + box.h * share; else from.x = box.x + box.w * share;
      const to = s.upright ? { x: Math.max(target.x, Math.min(from.x, target.x + target.w)), y: from.y }
        : { x: from.x, y: Math.max(target.y, Math.min(from.y, target.y + target.h)) };
      c.strokeStyle = color;
      c.lineWidth = Math.max(2, this.box.strip / 8);
      c.setLineDash(m.op === 0 ? [] : [6, 4]);
      c.beginPath();
      c.moveTo(from.x, from.y);
      c.lineTo(to.x, to.y);
      c.stroke();
      c.setLineDash([]);
      c.fillStyle = color;
      const thick = this.grown(box);
      c.fillRect(thick.x, thick.y, thick.w, thick.h);
      this.outline(box, this.theme.text, 1.5);
    }
    this.outline(target, this.theme.accent, at.visited ? 4 : 2.5);
  }

  grown(box) {  // never thinner than three pixels, so that one tile of a thousand is seen
    const w = Math.max(box.w, 3), h = Math.max(box.h, 3);
    return { x: box.x - (w - box.w) / 2, y: box.y - (h - box.h) / 2, w, h };
  }

  outline(box, color, width) {
    const b = this.grown(box);
    this.context.strokeStyle = color;
    this.context.lineWidth = width;
    this.context.strokeRect(b.x, b.y, b.w, b.h);
  }

  // Return the score tile or the tensor's tile at a point of the canvas, if any.
  under(px, py) {
    const { x, y, w, h } = this.box, { rows, cols } = this.walk;
    if (px >= x && px < x + w && py >= y && py < y + h) {
      return { i: Math.floor(((py - y) * rows) / h), j: Math.floor(((px - x) * cols) / w) };
    }
    for (const s of this.strips) {
      const b = s.box;
      if (px >= b.x && px < b.x + b.w && py >= b.y && py < b.y + b.h) {
        return { name: s.name, at: Math.floor(s.upright ? ((py - b.y) * s.tiles) / b.h : ((px - b.x) * s.tiles) / b.w) };
      }
    }
    return null;
  }
}
