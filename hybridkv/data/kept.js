const data = JSON.parse(document.getElementById("data").textContent);
const T = data.tokens.length, L = data.layers.length, G = data.heads, S = L * G;
const masks = data.masks.flat().map(unpack); // [S][T] of 0 and 1
let stream = -1; // the row looked at; -1: all of them
let layer = -1; // the layer looked at; with stream -1: all its heads
let here = 0; // the token the keyboard stands on
let tipAtKeyboard = false; // else at the pointer

function unpack(text) {
  const bytes = atob(text), out = new Uint8Array(T);
  for (let i = 0; i < T; i++) out[i] = (bytes.charCodeAt(i >> 3) >> (7 - (i & 7))) & 1;
  return out;
}
const range = (list) => {
  const low = Math.min(...list), high = Math.max(...list);
  return low === high ? number(low) : `${number(low)} to ${number(high)}`;
};
function runs(numbers) { // 0, 1, 2, 4 -> 0 to 2, 4
  const found = [];
  for (const n of numbers) {
    const last = found.at(-1);
    if (last && last[1] === n - 1) last[1] = n;
    else found.push([n, n]);
  }
  return found.map(([a, b]) => (a === b ? `${a}` : `${a} to ${b}`)).join(", ");
}

// ---- the numbers in words, settings

const before = sum(data.bytes_before), after = sum(data.bytes_after);
const fixed = sum(data.states.map((state) => state.layers.length * state.layer_bytes));
const lengths = data.lengths.flat(), mean = Math.round(sum(lengths) / S);
const even = Math.min(...lengths) === Math.max(...lengths);
const percent = (n) => `${((n / T) * 100).toFixed(n === T ? 0 : 1)}\u00a0%`;
const smaller = (a, b) => (a === b ? "not smaller" : `${(a / b).toFixed(1)}\u00d7 smaller`);
{
  const held = mean === T ? "all of them" : even ? count(mean, "token") : `${range(lengths)} tokens, ${number(mean)} on average`;
  const states = data.states.map((state) =>
    ` The ${count(state.layers.length, `${state.name} layer`)} keep no list, but a state of fixed size.`);
  $("lead").textContent = `${data.model} read a prompt of ${count(T, "token")}. Each KV head of each attention layer keeps its own list of tokens, `
    + `a stream: here ${count(S, "stream")}, from ${count(L, "layer")} of ${count(G, "head")}. `
    + `With this budget ${S === 1 ? "it" : even ? "each stream" : "a stream"} holds ${held}.${states.join("")}`;
}
function tile(name, value, more) {
  const box = element("div");
  box.append(element("dt", name), element("dd", value, "value"));
  if (more) box.append(element("dd", more, "more"));
  $("tiles").append(box);
}
tile("the prompt", count(T, "token"));
tile(even ? "each stream keeps" : "a stream keeps on average", count(mean, "token"), `${percent(mean)} of the prompt`);
tile("KV with everything kept", size(before));
tile("KV with this budget", size(after), smaller(before, after));
if (fixed) tile("KV and state together", size(after + fixed),
  `${smaller(before + fixed, after + fixed)} than ${size(before + fixed)}; ${size(fixed)} is state, which stays`);
for (const [name, value] of Object.entries(data.settings)) $("settings").append(element("dt", name), element("dd", value));

// ---- the question and its answers

function answer(title, given, apart, className) {
  const box = element("article", undefined, className), text = element("p", undefined, "answer");
  text.append(given.text.slice(0, apart));
  if (apart < given.text.length) text.append(element("ins", given.text.slice(apart)));
  box.append(element("h3", title), text);
  if (given.cut) box.append(element("p", "Cut here; the model had more to say.", "quiet"));
  $("pair").append(box);
}
function parting(a, b) { // where two texts part, at a word's beginning
  let i = 0;
  while (i < a.length && i < b.length && a[i] === b[i]) i++;
  if (i === a.length && i === b.length) return i;
  while (i > 0 && !/\s/.test(a[i - 1])) i--;
  return i;
}
if (data.answer) {
  const { question, answer: short, full_answer: full } = data, apart = full ? parting(full.text, short.text) : short.text.length;
  const same = full && full.text === short.text;
  $("question").textContent = question.length > 400 ? `${question.slice(0, 200)} \u2026 ${question.slice(-180)}` : question;
  if (full) answer(`With everything kept: ${count(T, "token")} a stream, ${size(before)}`, full, apart);
  answer(`With this budget: ${count(mean, "token")} a stream, ${size(after)}`, short, apart, "budget");
  $("pair").classList.toggle("single", !full);
  $("parting").textContent = !full ? "" : same ? "Both answers are the same, word for word." : "Underlined: where the two answers part.";
  $("answers").hidden = false;
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
  const chosen = rows(), n = chosen.length, counts = new Uint32Array(T);
  for (const s of chosen) for (let i = 0; i < T; i++) counts[i] += masks[s][i];
  const knots = n === 1 ? [0, 1, 1, 1, 1] : stretch(counts, n);
  let some = 0, least = n, most = 0;
  for (let i = 0; i < T; i++) {
    spans[i].style.setProperty("--s", strength(counts[i], knots));
    spans[i].classList.toggle("none", counts[i] === 0);
    some += counts[i] > 0;
    least = Math.min(least, counts[i]);
    most = Math.max(most, counts[i]);
  }
  const kept = sum(chosen.map((s) => lengths[s])) / n;
  $("status").textContent = n === 1
    ? `${streamName(chosen[0])} keeps ${number(kept)} of ${number(T)} tokens (${percent(kept)}).`
    : `${layer < 0 ? `All ${number(S)} streams` : `The ${G} heads of layer ${data.layers[layer]}`}: ${number(Math.round(kept))} tokens each${even ? "" : " on average"} (${percent(kept)}), `
      + `${number(some)} of ${number(T)} kept by at least one.`;
  legend(n, knots, least, most);
}
function legend(n, knots, least, most) {
  const steps = element("span", undefined, "steps"), listed = n === 1 ? [1] : [...new Set(knots)].filter(Number.isInteger);
  for (const at of listed) {
    const beyond = at === listed[0] && least < at ? "\u2264" : at === listed.at(-1) && most > at ? "\u2265" : "";
    const step = element("span", n === 1 ? "kept" : beyond + number(at));
    step.style.setProperty("--s", strength(at, knots));
    steps.append(step);
  }
  const before = n === 1 ? [] : [element("span", "kept by")];
  const after = n === 1 ? [] : [element("span", `of ${count(n, layer < 0 ? "stream" : "head")}`)];
  $("scale").replaceChildren(...before, steps, ...after, element("span", n === 1 ? "grey: dropped" : "grey: by none", "none"));
}
function streamName(s) {
  return `Layer ${data.layers[Math.floor(s / G)]}, head ${s % G}`;
}

// ---- which token, who kept it: in a line that is always in sight, and beside the pointer or the keyboard's place

function tokenText(i) {
  const text = data.tokens[i];
  if (text === "") return "a part of a character";
  const shown = JSON.stringify(text);
  return shown.length > 42 ? `${shown.slice(0, 40)}\u2026` : shown;
}
function verdict(i, s) { // of one stream, or of all
  const all = `${data.counts[i] ? number(data.counts[i]) : "none"} of ${count(S, "stream")}`;
  return s < 0 || S === 1 ? `kept by ${all}` : `${masks[s][i] ? "kept here" : "dropped here"}, kept by ${all}`;
}
function describe(i, s) {
  $("token").replaceChildren(
    s < 0 ? "" : `${streamName(s)} \u00b7 `, `position ${number(i)} \u00b7 `, element("bdi", tokenText(i)), ` \u00b7 ${verdict(i, s)}`);
}
function showTip(x, y, i, s) { // i -1: the row's own numbers
  const lines = [element("div", s < 0 ? "All streams" : streamName(s))];
  if (i < 0) lines.push(element("div", `keeps ${number(lengths[s])} of ${count(T, "token")}`));
  else {
    const token = element("div");
    token.append(element("bdi", tokenText(i)), ` at position ${number(i)}`);
    lines.push(token, element("div", verdict(i, s)));
  }
  const tip = $("tip");
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const { width, height: tall } = tip.getBoundingClientRect(), room = document.documentElement.clientWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(x + 14, room - width))}px`;
  tip.style.top = `${y + 18 + tall > window.innerHeight - 44 ? Math.max(8, y - tall - 12) : y + 18}px`;
}
const hideTip = () => { $("tip").hidden = true; };
$("text").addEventListener("pointerover", (event) => {
  if (event.target.token !== undefined) describe(event.target.token, stream);
});

// ---- the heat map

const canvas = $("map"), left = 62, right = 8, top_ = 4, bottom = 2;
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
  const inside = Math.max(1, width - left - right), bins = Math.min(T, inside);
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
  drawAxis(width, inside);
}
function roundStep(least) { // the smallest of 1, 2, 5, 10, 20, 50, ... that is not below
  const ten = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((n) => n * ten).find((step) => step >= least);
}
function drawAxis(width, inside) {
  const step = roundStep((T * (inside < 500 ? 50 : 80)) / inside); // so many pixels apart at the least
  $("axis").replaceChildren();
  for (let i = 0; i < T; i += step) {
    const x = left + ((i + 0.5) / T) * inside, tick = element("i"), label = element("span", number(i));
    $("axis").append(tick, label);
    tick.style.left = `${x}px`;
    label.style.left = `${Math.min(x - label.offsetWidth / 2, width - label.offsetWidth)}px`;
  }
}
function goTo(i) {
  spans[here].classList.remove("here");
  here = Math.max(0, Math.min(T - 1, i));
  spans[here].classList.add("here");
  const box = $("text");
  box.scrollTop += spans[here].getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
}
function look(newLayer, newStream) {
  layer = newLayer;
  stream = newStream;
  $("layer").value = String(layer);
  $("head").value = String(stream < 0 ? -1 : stream % G);
  for (const row of $("bytes").tBodies[0].rows) row.classList.toggle("on", layer >= 0 && row.dataset.layer === String(layer));
  shade();
  draw();
  history.replaceState(null, "", layer < 0 ? "#" : `#layer=${data.layers[layer]}${stream < 0 ? "" : `&head=${stream % G}`}`);
}
function under(event) { // the row and the token at the pointer; token -1: left of the first
  const box = canvas.getBoundingClientRect(), y = event.clientY - box.top;
  let s = 0;
  while (s < S - 1 && yOf(s + 1) <= y) s++;
  const x = (event.clientX - box.left - left) / (box.width - left - right);
  return [s, x < 0 ? -1 : Math.min(T - 1, Math.floor(x * T))];
}
function point(event) {
  const [s, i] = under(event);
  tipAtKeyboard = false;
  showTip(event.clientX, event.clientY, i, s);
  if (i >= 0) describe(i, s);
  else $("token").textContent = `${streamName(s)} \u00b7 keeps ${number(lengths[s])} of ${count(T, "token")}`;
}
function showKeyboardPlace() {
  const box = canvas.getBoundingClientRect(), x = left + ((here + 0.5) / T) * (box.width - left - right);
  describe(here, stream);
  tipAtKeyboard = true;
  showTip(box.left + x, box.top + (stream < 0 ? top_ : yOf(stream) + rowHeight), here, stream);
}
canvas.addEventListener("pointermove", point);
canvas.addEventListener("pointerleave", hideTip);
canvas.addEventListener("click", (event) => {
  const [s, i] = under(event);
  if (i >= 0) goTo(i);
  look(Math.floor(s / G), s);
  point(event); // a finger does not move before it clicks
});
canvas.addEventListener("focus", () => { if (canvas.matches(":focus-visible")) showKeyboardPlace(); });
canvas.addEventListener("blur", hideTip);
window.addEventListener("scroll", () => {
  if (tipAtKeyboard && !$("tip").hidden) showKeyboardPlace();
  else hideTip();
}, { passive: true });
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
  if (event.key === "Escape") hideTip();
  else showKeyboardPlace();
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

const widest = Math.max(...data.bytes_before, ...data.states.map((state) => state.layer_bytes));
function bytesRow(cells, part, className) { // of a layer; `part`: its bytes now
  const row = $("bytes").tBodies[0].insertRow(), track = element("div", undefined, "track"), bar = element("div", undefined, className);
  if (className) row.className = className;
  row.style.setProperty("--part", (100 * part) / widest);
  track.append(bar);
  const share = element("td", undefined, "share");
  share.append(track);
  row.append(...cells.map((cell) => (typeof cell === "string" ? element("td", cell) : cell)), share);
  return row;
}
const alike = even && new Set(data.bytes_after).size === 1 && L > 1;
if (alike) bytesRow([`each of ${number(L)}`, number(mean), size(data.bytes_before[0]), size(data.bytes_after[0])], data.bytes_after[0]);
else data.layers.forEach((n, l) => {
  const first = element("td"), pick = element("button", String(n));
  pick.type = "button";
  pick.title = `show layer ${n}`;
  first.append(pick);
  const row = bytesRow([first, range(data.lengths[l]), size(data.bytes_before[l]), size(data.bytes_after[l])], data.bytes_after[l]);
  row.dataset.layer = String(l);
  row.addEventListener("click", () => look(layer === l && stream < 0 ? -1 : l, -1));
});
for (const { layers, layer_bytes: one } of data.states) {
  bytesRow([`each of ${number(layers.length)}`, "state", size(one), size(one)], one, "fixed");
}
$("bytes").createTFoot();
function totals(name, a, b) {
  const row = $("bytes").tFoot.insertRow();
  row.append(...[name, "", size(a), size(b)].map((text) => element("td", text)), element("td", "", "share"));
}
totals(fixed ? "KV" : "all", before, after);
if (fixed) {
  totals("state", fixed, fixed);
  totals("all", before + fixed, after + fixed);
  $("state-note").textContent = data.states.map(({ name, layers, layer_bytes: one }) =>
    `Layers ${runs(layers)} are ${name} layers. Their state takes ${size(one)} each, for one token as for a million: it does not grow, and a budget does not touch it.`).join(" ");
  $("state-note").hidden = false;
}

window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
{ // the address says what is looked at, so that it can be passed on
  const at = new URLSearchParams(location.hash.slice(1)), l = data.layers.indexOf(Number(at.get("layer") ?? -1));
  const g = Number(at.get("head") ?? -1);
  look(l, l >= 0 && Number.isInteger(g) && g >= 0 && g < G ? l * G + g : -1);
}
