"use strict";
// Numbers as text, and sentences that explain a count.

const digits = (n) => group_digits(typeof n === "bigint" ? n : Math.round(n));
const percent = (x) => x > 0 && x < 0.0005 ? "less than 0.1 %"
  : `${x > 0.995 && x < 1 ? "99" : (100 * x).toFixed(x < 0.1 && x > 0 ? 1 : 0)} %`;
const ratio_text = (x) => `${x >= 100 ? digits(x) : Number(x.toPrecision(x < 1 ? 2 : 3))}×`;

function times(x, average = false) {
  if (average && Math.abs(x - Math.round(x)) < 5e-4 && x > 1.5) return `${digits(x)} times on average`;
  if (Math.abs(x - 1) < 5e-4) return "once";
  if (Math.abs(x - 2) < 5e-4) return "twice";
  const whole = Math.abs(x - Math.round(x)) < 5e-4;
  return whole ? `${digits(x)} times` : `${x >= 100 ? digits(x) : x.toPrecision(3)} times on average`;
}

function moved_of(r, op, tensor) {
  let sum = 0n;
  for (const one of r.moved) if (one.op === op && one.tensor === tensor) sum += one.bytes;
  return sum;
}

// How often each element of a tensor is moved by an operation.
function crossings(r, op, tensor) {
  const whole = r.whole[tensor];
  return whole ? Number(moved_of(r, op, tensor)) / Number(whole) : 0;
}

function share_of(r, tensors) {
  let sum = 0n;
  for (const one of r.moved) if (tensors.includes(one.tensor)) sum += one.bytes;
  return Number(sum) / Number(r.bytes);
}

// The effect of doubling a side of the tile on the bytes of these tensors, by counting both.
function doubled(r, side, tensors) {
  const tile = { block_q: r.tile.q, block_k: r.tile.k };
  let other;
  try {
    other = count({ ...r.state, ...tile, [side]: 2 * tile[side], fit: 0 });
  } catch (error) {
    if (error instanceof Refusal) return "";
    throw error;
  }
  const bytes = (one) => one.moved.reduce(
    (sum, x) => (tensors.includes(x.tensor) ? sum + Number(x.bytes) : sum), 0);
  const share = bytes(other) / bytes(r);
  let said = `${share < 1 ? "cuts" : "raises"} that to ${percent(share)}`;
  if (Math.abs(share - 1) < 1e-9) said = "changes nothing";
  else if (Math.abs(share - 0.5) < 0.01) said = "halves that";
  const room = other.fits || !r.fits || share > 0.999 ? "" :
    `, but then a block needs ${human(other.fullest.footprint)} on chip, and has ` +
    `${human(r.problem.device.sram_bytes)}`;
  return `doubling ${side} ${said}${room}`;
}

function skipped_words(r) {
  const skipped = 1 - r.walk.visits / r.scores;
  if (r.dense || r.scores === 0 || skipped <= 0) return "";
  return ` The mask skips ${percent(skipped)} of the tiles.`;
}

function sentence(r) {
  const { algorithm, direction } = r.state, heads = r.problem.group, masked = r.state.mask !== "none";
  const shared = heads > 1 && !r.problem.packed ? `, by each of the ${heads} query heads that share them` : "";
  const is = (op, tensor) => times(crossings(r, op, tensor), masked);
  if (r.bytes === 0n) return "No bytes are moved.";
  if (algorithm === "standard") {
    const names = direction === "forward" ? ["S", "P"] : ["P", "dP", "dS"];
    const list = names.length === 2 ? "S and P" : "P, dP and dS";
    return `${list} are N × N: ${human(r.whole[names[0]])} each. Writing them to HBM and reading them again is ` +
      `${percent(share_of(r, names))} of all bytes, for every tile size` +
      (r.state.mask === "none" ? "." : ". Standard attention also computes tiles that are fully masked.");
  }
  if (algorithm === "flash1") {
    const names = direction === "forward" ? ["Q", "O", "O_acc"] : ["Q", "O", "dO", "dQ", "dQ_acc"];
    const list = direction === "forward" ? "Q and O" : "Q, O, dO and dQ";
    return `The outer loop is over keys, so ${list} move for each key tile: Q is read ${is("load", "Q")}; ` +
      `${doubled(r, "block_k", names)}.${skipped_words(r)}`;
  }
  if (algorithm === "flash-decode") return decoding(r);
  if (direction === "forward") {
    if (r.walk.t_r === 1) {
      return `One query tile holds all queries, so K and V are read ${is("load", "K")}` +
        `${shared}. There ${r.stages[0].blocks === 1 ? "is 1 block" : `are ${r.stages[0].blocks} blocks`} for ` +
        `${r.problem.device.sm_count} SMs.`;
    }
    return `K and V are read ${is("load", "K")}: once per query tile` +
      `${masked ? " that sees them" : ""}${shared}; ` +
      `${doubled(r, "block_q", ["K", "V"])}, and ${doubled(r, "block_k", ["K", "V"])}.` +
      skipped_words(r);
  }
  if (algorithm === "flash2") {
    return `One pass reads Q and dO for each key tile (Q ${is("load", "Q")} in total). ` +
      `Another pass reads K and V for each query tile (K ${is("load", "K")}); ` +
      `${doubled(r, "block_k", ["Q", "dO"])} for Q and dO.${skipped_words(r)}`;
  }
  if (algorithm === "flash2-once") {
    return `One key tile holds all keys that a query sees, so dQ is stored ${is("store", "dQ")} and needs no accumulation in HBM.`;
  }
  const acc = r.whole.dQ_acc === undefined ? "dQ" : "dQ_acc";
  return `Q and dO are read ${is("load", "Q")}, once per key tile, and dQ is accumulated in HBM equally often: ` +
    `${human(moved_of(r, "reduce", acc))}, ${percent(share_of(r, [acc]))} of all bytes; ` +
    `${doubled(r, "block_k", ["Q", "dO", acc])}.${skipped_words(r)}`;
}

function decoding(r) {
  const sms = r.problem.device.sm_count, stage = r.stages[0];
  const per = stage.walks * r.walk.t_r, parts = r.moved.filter((x) => x.tensor.endsWith("_part"));
  const extra = parts.reduce((sum, one) => sum + one.bytes, 0n);
  const heads = r.problem.packed && r.problem.group > 1
    ? `The ${r.problem.group} query heads of a KV head share a tile, so K is read ` +
      `${times(crossings(r, "load", "K"))}. `
    : r.problem.group > 1 ? `Each of the ${r.problem.group} query heads of a KV head reads K again. ` : "";
  const tiles = `Without splits, ${digits(per)} row tile${per === 1 ? "" : "s"} would keep ${Math.min(per, sms)} of ` +
    `${sms} SMs busy. `;
  return heads + tiles + (extra
    ? `${r.splits} splits per row tile give ${digits(stage.blocks)} blocks. Their partial results move another ` +
      `${human(extra)}, ${percent(Number(extra) / Number(r.bytes))} of all bytes.`
    : "The keys are not split, so there are no partial results to merge.");
}

function pass_words(r) {
  const { s } = r.problem, p = r.problem;
  const heads = p.group > 1 ? `${s.heads} / ${p.kv_heads}` : `${s.heads}`;
  const side = (n) => (n < 0 ? "unlimited" : digits(n));
  const mask = {
    none: "no mask", causal: "causal", window: `window ${side(s.left)} : ${side(s.right)}`,
    prefix: `prefix of ${digits(s.prefix)}`,
    documents: `${s.docs} ${s.lengths === "growing" ? "growing " : ""}documents${s.doc_causal ? ", causal" : ""}`,
    cells: `cells of ${s.cell}, ${s.reach} on each side of the diagonal, ${s.shared} first rows and columns`,
  }[s.mask];
  return `${LAB.algorithms[s.algorithm].title}, ${s.direction}: ${s.batch} × ${heads} heads, ` +
    `${digits(p.n_q)} × ${digits(p.n_kv)}, d = ${s.d}, ${s.dtype}, ${mask}; tiles ${r.tile.q} × ` +
    `${r.tile.k}; ${p.device.name}`;
}

// The formula of a polynomial, as a person writes it: group times KV heads are the heads.
function formula(number) {
  const [first, ...rest] = Object.values(LAB.words), order = [first, "heads", ...rest];
  const words = (names) => {
    const found = new Map();
    for (const name of names) found.set(name, (found.get(name) ?? 0) + 1);
    const shared = Math.min(found.get("group") ?? 0, found.get("kv_heads") ?? 0);
    const listed = [["heads", shared]];
    for (const [name, n] of found) {
      listed.push([LAB.words[name], name === "group" || name === "kv_heads" ? n - shared : n]);
    }
    return listed.filter(([, n]) => n).sort(([a], [b]) => order.indexOf(a) - order.indexOf(b))
      .map(([word, n]) => (n > 1 ? `${word}${"⁰¹²³⁴⁵⁶⁷⁸⁹"[n]}` : word));
  };
  return LAB.polynomials[number].map(([n, ...names]) => {
    const product = words(names.map((one) => LAB.sizes[one]));
    if (n !== "1" || !product.length) product.push(digits(BigInt(n)));
    return product.join(" · ");
  }).join(" + ") || "0";
}

// -- as Python ------------------------------------------------------------------------------------

function python(r) {
  const { s } = r.problem, p = r.problem, lines = [], kinds = [];
  const same = p.n_kv === p.n_q ? "" : `, n_kv=${p.n_kv}`;
  const list = (n) => `(${documents(s, n).join(", ")})`;
  if (s.mask === "causal") kinds.push("causal=True");
  if (s.mask === "window") kinds.push(`window=(${s.left}, ${s.right})`);
  if (s.mask === "prefix") {
    const shift = p.n_kv - p.n_q;
    const diagonal = shift ? `q ${shift < 0 ? "-" : "+"} ${Math.abs(shift)}` : "q";
    kinds.push(`mask=lambda q, k: (k <= ${diagonal}) | (k < ${s.prefix})`);
  }
  if (s.mask === "documents") {
    kinds.push(`cu_seqlens_q=${list(p.n_q)}`, `cu_seqlens_k=${list(p.n_kv)}`);
    if (s.doc_causal) kinds.push("causal=True");
  }
  if (s.mask === "cells") {
    const [rows, cols] = [p.n_q, p.n_kv].map((n) => Math.ceil(n / s.cell));
    lines.push(
      `row, col = np.arange(${rows})[:, None], np.arange(${cols})`,
      `near = abs(row + ${cols - rows} - col) <= ${s.reach}`,
      `shared = (row < ${s.shared}) | (col < ${s.shared})`);
    kinds.push(`block_mask=BlockMask(near | shared, ${s.cell}, ${s.cell})`);
  }
  const shape = [`${p.n_q}${same}`, `head_dim=${s.d}`, `heads=${s.heads}`];
  if (p.group > 1) shape.push(`kv_heads=${p.kv_heads}`);
  if (s.batch > 1) shape.push(`batch=${s.batch}`);
  shape.push(`dtype="${s.dtype}"`);
  const named = s.device === "own" ? "device" : `"${s.device}"`;
  if (s.device === "own") {
    lines.push(
      `device = Device("mine", sram_bytes=${p.device.sram_bytes}, ` +
      `sram_per_sm=${p.device.sram_per_sm}, sm_count=${s.own_sms}, ` +
      `hbm_bandwidth=${p.device.hbm_bandwidth}, l2_bandwidth=${p.device.l2_bandwidth}, ` +
      `tensor_flops={"${s.dtype}": ${p.device.peaks[s.dtype]}})`);
  }
  const tiling = `tiling=Tiling(${r.tile.q}, ${r.tile.k})`;
  const split = LAB.algorithms[s.algorithm].splits
    ? `, splits=${r.splits}, pack_gqa=${s.pack ? "True" : "False"}` : "";
  const how = `algorithm="${s.algorithm}"`;
  const masks = kinds.length ? `mask = dict(${kinds.join(", ")})` : "mask = {}";
  const big = s.batch * s.heads * p.n_q * p.n_kv > 2 ** 26 ? "# " : "";
  const type = {
    float64: "np.float64", float32: "np.float32", float16: "np.float16",
  }[s.dtype] ?? `ml_dtypes.${s.dtype}`;
  const backward = s.direction === "backward";
  const fp8 = s.dtype.startsWith("float8") ? `, scales="unscaled"` : "";
  lines.push(
    masks,
    `problem = Problem(${shape.join(", ")}, **mask)`,
    `counted = flashsim.count(problem, ${how}, direction="${s.direction}", ${tiling}, ` +
    `device=${named}${split})`,
    `print(counted)  # ${digits(r.bytes)} B`, "",
    big ? "# A run moves the same bytes. It is commented out, because simulating it takes long."
      : "# A run on random numbers moves the same bytes:",
    `${big}draw = lambda *shape: np.random.default_rng(0).standard_normal(shape).astype(${type})`,
    `${big}q = draw(${s.batch}, ${s.heads}, ${p.n_q}, ${s.d})`,
    `${big}k = draw(${s.batch}, ${p.kv_heads}, ${p.n_kv}, ${s.d})`,
    `${big}result = flashsim.run(q, k, k, **mask, ${how}, ${backward ? "" : `${tiling}, `}` +
    `device=${named}${split}${fp8}, trace=True)`);
  if (backward) lines.push(`${big}result = result.backward(result.out, ${tiling}, trace=True)`);
  lines.push(`${big}assert result.trace.bytes() == counted.bytes()`);
  const uses = (word) => lines.some((line) => !line.startsWith("# ") && line.includes(word));
  const imports = [
    ...(uses("ml_dtypes") ? ["import ml_dtypes"] : []),
    ...(uses("np.") ? ["import numpy as np"] : []), "import flashsim",
    `from flashsim import ${["BlockMask", "Device", "Problem", "Tiling"]
      .filter((name) => uses(`${name}(`)).join(", ")}`, "",
  ];
  return [...imports, ...lines].join("\n") + "\n";
}
