"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const T = data.tokens.length, L = data.layers.length, G = data.heads, S = L * G;
const masks = data.masks.flat().map(unpack); // [S][T] of 0 and 1
let stream = -1; // the row looked at; -1: all of them
let layer = -1; // the layer looked at; with stream -1: all its heads
let here = 0; // the token the keyboard stands on

function unpack(text) {
  const bytes = atob(text), out = new Uint8Array(T);
  for (let i = 0; i < T; i++) out[i] = (bytes.charCodeAt(i >> 3) >> (7 - (i & 7))) & 1;
  return out;
}
function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function size(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
}
const number = (n) => n.toLocaleString("en").replaceAll(",", "\u202f");
const sum = (list) => list.reduce((a, b) => a + b, 0);
const range = (list) => {
  const low = Math.min(...list), high = Math.max(...list);
  return low === high ? number(low) : `${number(low)} to ${number(high)}`;
};

// ---- numbers at the top, settings, answer

function pairs(into, entries, wrap) {
  for (const [name, value] of entries) {
    const parts = [element("dt", name), element("dd", value)];
    if (!wrap) into.append(...parts);
    else {
      const box = element("div");
      box.append(...parts);
      into.append(box);
    }
  }
}
const before = sum(data.bytes_before), after = sum(data.bytes_after);
const mean = sum(data.lengths.flat()) / S;
$("model").textContent = `${data.model}: ${number(L)} attention layers of ${G} KV ${G === 1 ? "head" : "heads"}, ${number(S)} streams`;
pairs($("tiles"), [
  ["prompt tokens", number(T)],
  ["kept a stream, on average", number(Math.round(mean))],
  ["pages before", size(before)],
  ["pages after", size(after)],
  ["smaller by", `${(before / after).toFixed(1)}\u00d7`],
], true);
pairs($("settings"), Object.entries(data.settings), false);
if (data.answer) {
  $("answer").textContent = data.answer;
  $("answer-card").hidden = false;
}

// ---- the text

const spans = data.tokens.map((text, i) => {
  const span = element("span", text);
  span.token = i;
  return span;
});
$("text").append(...spans);

function rows() { // the streams looked at
  if (stream >= 0) return [stream];
  return [...Array(S).keys()].filter((s) => layer < 0 || Math.floor(s / G) === layer);
}
function shade() {
  const chosen = rows(), counts = new Uint32Array(T);
  for (const s of chosen) for (let i = 0; i < T; i++) counts[i] += masks[s][i];
  let some = 0;
  for (let i = 0; i < T; i++) {
    spans[i].style.setProperty("--s", Math.round((counts[i] / chosen.length) ** 0.7 * 55));
    spans[i].classList.toggle("none", counts[i] === 0);
    some += counts[i] > 0;
  }
  $("text").classList.toggle("one", chosen.length === 1);
  const kept = sum(chosen.map((s) => data.lengths[Math.floor(s / G)][s % G])) / chosen.length;
  const percent = `${((kept / T) * 100).toFixed(kept === T ? 0 : 1)} %`;
  $("status").textContent = chosen.length === 1
    ? `${streamName(stream)} keeps ${number(kept)} of ${number(T)} tokens (${percent}); the others are grey.`
    : `${layer < 0 ? `All ${number(S)} streams` : `The ${G} heads of layer ${data.layers[layer]}`}: ${number(Math.round(kept))} tokens each on average (${percent}), `
      + `${number(some)} kept by at least one. The stronger the colour, the more of them kept it.`;
}
function streamName(s) {
  return `Layer ${data.layers[Math.floor(s / G)]}, head ${s % G}`;
}
function describe(i) {
  const text = JSON.stringify(data.tokens[i]);
  $("token").textContent = `Token ${number(i)} ${text.length > 42 ? text.slice(0, 40) + "\u2026" : text}: kept by ${number(data.counts[i])} of ${number(S)} streams.`;
}
$("text").addEventListener("pointerover", (event) => {
  if (event.target.token !== undefined) describe(event.target.token);
});

// ---- the heat map

const canvas = $("map"), left = 62, top_ = 4, bottom = 20;
const rowHeight = Math.max(2, Math.min(14, Math.floor(400 / S)));
const gap = G > 1 && rowHeight >= 4 ? 1 : 0; // between layers
const yOf = (s) => top_ + s * rowHeight + Math.floor(s / G) * gap;
const height = yOf(S) + bottom;
canvas.style.height = `${height}px`;

function colour(variable) { // CSS colour -> [r, g, b]
  const probe = element("i");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return found;
}
function draw() {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  const inside = Math.max(1, width - left - 8), bins = Math.min(T, inside);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const low = colour("--empty"), high = colour("--kept"), ink = `rgb(${colour("--quiet")})`, mark = `rgb(${colour("--mark")})`;
  const image = new ImageData(bins, S);
  for (let s = 0; s < S; s++) {
    for (let b = 0; b < bins; b++) {
      const from = Math.floor((b * T) / bins), to = Math.max(from + 1, Math.floor(((b + 1) * T) / bins));
      let n = 0;
      for (let i = from; i < to; i++) n += masks[s][i];
      const share = n / (to - from), at = 4 * (s * bins + b);
      for (let c = 0; c < 3; c++) image.data[at + c] = low[c] + (high[c] - low[c]) * share;
      image.data[at + 3] = 255;
    }
  }
  const sheet = document.createElement("canvas");
  sheet.width = bins;
  sheet.height = S;
  sheet.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  for (let l = 0; l < L; l++) {
    pen.drawImage(sheet, 0, l * G, bins, G, left, yOf(l * G), inside, G * rowHeight);
  }
  pen.fillStyle = ink;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const every = Math.ceil(13 / (G * rowHeight + gap));
  for (let l = 0; l < L; l += every) pen.fillText(`layer ${data.layers[l]}`, left - 8, yOf(l * G) + (Math.min(G, 99) * rowHeight) / 2);
  pen.textBaseline = "alphabetic";
  const steps = width < 700 ? 4 : 8;
  for (let i = 0; i <= steps; i++) {
    pen.textAlign = i === 0 ? "left" : i === steps ? "right" : "center";
    pen.fillText(number(Math.round(((T - 1) * i) / steps)), left + (inside * i) / steps, height - 4);
  }
  pen.strokeStyle = mark;
  pen.lineWidth = 2;
  if (stream >= 0) {
    pen.strokeRect(left - 1, yOf(stream) - 1, inside + 2, rowHeight + 2);
    pen.beginPath();
    const x = left + ((here + 0.5) / T) * inside;
    pen.moveTo(x, yOf(stream) - 6);
    pen.lineTo(x, yOf(stream) + rowHeight + 6);
    pen.stroke();
  } else if (layer >= 0) pen.strokeRect(left - 1, yOf(layer * G) - 1, inside + 2, G * rowHeight + 2);
}
function goTo(i) {
  spans[here].classList.remove("here");
  here = Math.max(0, Math.min(T - 1, i));
  spans[here].classList.add("here");
  const box = $("text");
  box.scrollTop += spans[here].getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
  describe(here);
}
function look(newLayer, newStream) {
  layer = newLayer;
  stream = newStream;
  $("layer").value = String(layer);
  $("head").value = String(stream < 0 ? -1 : stream % G);
  [...$("bytes").tBodies[0].rows].forEach((row, l) => row.classList.toggle("on", l === layer));
  shade();
  draw();
  history.replaceState(null, "", layer < 0 ? "#" : `#layer=${data.layers[layer]}${stream < 0 ? "" : `&head=${stream % G}`}`);
}
canvas.addEventListener("click", (event) => {
  const box = canvas.getBoundingClientRect(), y = event.clientY - box.top;
  let s = 0;
  while (s < S - 1 && yOf(s + 1) <= y) s++;
  const x = (event.clientX - box.left - left) / (box.width - left - 8);
  if (x >= 0) goTo(Math.floor(x * T));
  look(Math.floor(s / G), s);
});
canvas.addEventListener("keydown", (event) => {
  const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const along = { ArrowRight: 1, ArrowLeft: -1, PageDown: 100, PageUp: -100, Home: -T, End: T }[event.key];
  if (event.key === "Escape") look(-1, -1);
  else if (move) {
    const s = stream < 0 ? (move > 0 ? 0 : S - 1) : Math.max(0, Math.min(S - 1, stream + move));
    look(Math.floor(s / G), s);
  } else if (along) {
    goTo(here + along * (event.shiftKey ? 10 : 1));
    draw();
  } else return;
  event.preventDefault();
});

// ---- choosing

$("layer").append(new Option("all", "-1"), ...data.layers.map((n, l) => new Option(String(n), String(l))));
$("head").append(new Option("all", "-1"), ...Array.from({ length: G }, (_, g) => new Option(String(g), String(g))));
$("layer").addEventListener("change", () => {
  const l = Number($("layer").value), g = Number($("head").value);
  look(l, l < 0 || g < 0 ? -1 : l * G + g);
});
$("head").addEventListener("change", () => {
  const g = Number($("head").value), l = g < 0 ? layer : Math.max(layer, 0);
  look(l, g < 0 ? -1 : l * G + g);
});

// ---- bytes

const widest = Math.max(...data.bytes_before);
data.layers.forEach((n, l) => {
  const row = element("tr"), track = element("div", undefined, "track"), bar = element("div");
  const pick = element("button", String(n));
  pick.type = "button";
  pick.title = `show layer ${n}`;
  bar.style.width = `${(100 * data.bytes_after[l]) / widest}%`;
  track.append(bar);
  const cells = ["", range(data.lengths[l]), size(data.bytes_before[l]), size(data.bytes_after[l]), ""].map((t) => element("td", t));
  cells[0].append(pick);
  cells[4].append(track);
  row.append(...cells);
  row.addEventListener("click", () => look(layer === l && stream < 0 ? -1 : l, -1));
  $("bytes").tBodies[0].append(row);
});
const foot = $("bytes").createTFoot().insertRow();
["all", "", size(before), size(after), ""].forEach((text) => foot.append(element("td", text)));

window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
{ // the address says what is looked at, so that it can be passed on
  const at = new URLSearchParams(location.hash.slice(1)), l = data.layers.indexOf(Number(at.get("layer") ?? -1));
  const g = Number(at.get("head") ?? -1);
  look(l, l >= 0 && Number.isInteger(g) && g >= 0 && g < G ? l * G + g : -1);
}
