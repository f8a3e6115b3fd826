"use strict";
// What all pages share.

const by = (id) => document.getElementById(id);

function show_theme(name, theme) {
  for (const key of ["background", "panel", "text", "muted", "grid", "accent"]) {
    document.documentElement.style.setProperty(`--${key}`, theme[key]);
  }
  document.documentElement.style.colorScheme = name;
}

function human(value, unit = "B") {
  let n = Number(value);
  if (n < 0) return "−" + human(-n, unit);
  for (const [prefix, size] of [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6],
    ["k", 1e3]]) {
    if (n >= 0.9995 * size) {
      n = Math.max(n / size, 1);
      return `${n.toFixed(n < 9.995 ? 2 : n < 99.95 ? 1 : 0)} ${prefix}${unit}`;
    }
  }
  return `${Number(n.toPrecision(3))} ${unit}`.trim();
}
