"use strict";
// What pages with a shaded prompt share: words, elements, and how strongly a token is shaded.
const $ = (id) => document.getElementById(id);
function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function size(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return unit === "B" ? `${n}\u00a0B` : `${n.toFixed(1)}\u00a0${unit}`;
    n /= 1024;
  }
}
const number = (n) => n.toLocaleString("en").replaceAll(",", "\u202f");
const count = (n, what) => `${number(n)}\u00a0${what}${n === 1 ? "" : "s"}`;
const sum = (list) => list.reduce((a, b) => a + b, 0);
const SHARES = [0.05, 0.25, 0.5, 0.75, 0.95];
function stretch(counts, most) { // counts with 0, 25, 50, 75 and 100 % of the colour, so that all of it is used
  const sorted = counts.slice().sort(), knots = SHARES.map((share) => sorted[Math.floor(share * (counts.length - 1))]);
  if (knots[0] < knots[4]) return knots;
  return SHARES.map((_, k) => (most * k) / 4); // nearly all are alike
}
function strength(n, knots) { // between two knots in proportion
  if (n <= knots[0]) return 0;
  const k = knots.findLastIndex((knot) => knot <= n);
  return k === 4 ? 100 : Math.round(25 * (k + (n - knots[k]) / (knots[k + 1] - knots[k])));
}
