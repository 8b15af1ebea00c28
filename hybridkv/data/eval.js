"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = 8, SVG = "http://www.w3.org/2000/svg";
const ALL = "all"; // all lengths, all dtypes
const policies = data.policies; // in the order of their colours
const shapes = ["circle", "square", "triangle", "diamond", "cross", "down", "bar", "ring"];

// ---- words and elements

function tenth(n) { // one digit behind the point; halves go to the even digit, as Python has it
  if (!Number.isInteger(4 * n) || 4 * n % 2 === 0) return n.toFixed(1);
  const low = Math.floor(10 * n);
  return ((low % 2 ? low + 1 : low) / 10).toFixed(1);
}
function size(n) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(n) < 1024) return unit === "B" ? `${Math.round(n)}\u00a0B` : `${tenth(n)}\u00a0${unit}`;
    n /= 1024;
  }
  return n < 1024 ? `${tenth(n)}\u00a0GiB` : `${tenth(n / 1024)}\u00a0TiB`;
}
const number = (n) => n.toLocaleString("en").replaceAll(",", "\u202f");
const points = tenth;
function signed(n) {
  const text = tenth(Math.abs(n));
  return text === "0.0" ? text : `${n > 0 ? "+" : "\u2212"}${text}`;
}
const between = ([, low, high]) => `${signed(low)} to ${signed(high)}`;
const times = (n) => `${Number(tenth(n))}\u00d7`;
const count = (n, what) => `${number(n)}\u00a0${what}${n === 1 ? "" : "s"}`;
const isFull = (row) => row.policy === data.full;
const named = (row) => isFull(row) ? "full cache" : `${row.policy} ${times(row.ratio)}`;
const dtypes = (row) => [data.kv.length > 1 ? `KV ${row.kv}` : "", data.state.length > 1 ? `state ${row.state}` : ""].filter(Boolean).join(", ");

function element(tag, text, more = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(more)) made.setAttribute(name, value);
  return made;
}
function drawn(tag, more = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(more)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function marker(shape, x, y, r, className) {
  const paths = {
    square: `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
    triangle: `M${x} ${y - 1.2 * r}L${x + 1.15 * r} ${y + r}H${x - 1.15 * r}z`,
    down: `M${x} ${y + 1.2 * r}L${x + 1.15 * r} ${y - r}H${x - 1.15 * r}z`,
    diamond: `M${x} ${y - 1.3 * r}L${x + 1.3 * r} ${y}L${x} ${y + 1.3 * r}L${x - 1.3 * r} ${y}z`,
    cross: `M${x - r} ${y - r / 3}h${r * 2 / 3}v${-r * 2 / 3}h${r * 2 / 3}v${r * 2 / 3}h${r * 2 / 3}v${r * 2 / 3}h${-r * 2 / 3}v${r * 2 / 3}h${-r * 2 / 3}v${-r * 2 / 3}h${-r * 2 / 3}z`,
    bar: `M${x - r} ${y - r / 2}h${2 * r}v${r}h${-2 * r}z`,
  };
  if (paths[shape]) return drawn("path", {d: paths[shape], class: className});
  return drawn("circle", {cx: x, cy: y, r: shape === "ring" ? r * 0.7 : r, class: className});
}

// ---- what is chosen

const chosen = {mode: data.modes[0], length: ALL, kv: ALL, state: ALL, task: null, hidden: new Set()};
const lengths = () => data.views.filter((v) => v.mode === chosen.mode).map((v) => v.length ?? ALL);
function view() {
  const own = data.views.filter((v) => v.mode === chosen.mode);
  return own.find((v) => (v.length ?? ALL) === chosen.length) ?? own[0];
}
const fits = (row) => (chosen.kv === ALL || row.kv === chosen.kv) && (chosen.state === ALL || row.state === chosen.state);
const base = (v) => v.rows.find((row) => isFull(row)); // what all are compared with

function choose(changes) {
  Object.assign(chosen, changes);
  if (!data.modes.includes(chosen.mode)) chosen.mode = data.modes[0];
  if (!lengths().includes(chosen.length)) chosen.length = lengths()[0];
  if (!data.kv.includes(chosen.kv)) chosen.kv = ALL;
  if (!data.state.includes(chosen.state)) chosen.state = ALL;
  if (!data.tasks.includes(chosen.task)) chosen.task = null;
  show();
  const found = new URLSearchParams({mode: chosen.mode, length: chosen.length, kv: chosen.kv, state: chosen.state});
  if (chosen.task) found.set("task", chosen.task);
  history.replaceState(null, "", `#${found}`);
}
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), found = {};
  for (const name of ["mode", "kv", "state", "task"]) if (given.has(name)) found[name] = given.get(name);
  if (given.has("length")) found.length = given.get("length") === ALL ? ALL : Number(given.get("length"));
  return found;
}
function choices(id, values, words) { // a row of buttons of which one is chosen
  const field = $(`${id}-field`);
  field.hidden = values.length < 2;
  const had = document.activeElement?.name === id;
  $(id).replaceChildren(...values.map((value) => {
    const label = element("label"), input = element("input", undefined, {type: "radio", name: id, value});
    input.checked = chosen[id] === value;
    input.onchange = () => choose({[id]: value});
    label.append(input, words(value));
    return label;
  }));
  if (had) $(id).querySelector(":checked")?.focus();
}

// ---- plots

const scoreOf = (row) => chosen.task ? row.tasks[chosen.task] ?? null : row.mean;
function lines(rows) { // rows of one policy and pair of dtypes, from the largest to the smallest
  const found = new Map();
  for (const row of rows.filter((r) => !isFull(r))) {
    const key = `${row.policy} ${row.kv} ${row.state}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(row);
  }
  return [...found.values()].map((list) => [...list].sort((a, b) => b.bytes - a.bytes));
}
function byteTicks(low, high, room) { // powers of two, and halfway between them where there are few
  const all = [], steps = high / low < 8 ? [1, 1.5] : [1];
  for (let p = Math.floor(Math.log2(low)); p <= Math.log2(high); p++) {
    all.push(...steps.map((step) => step * 2 ** p).filter((n) => n >= low * 0.999 && n <= high * 1.001));
  }
  const step = Math.max(1, Math.ceil(all.length / Math.max(room, 1)));
  return all.filter((_, i) => (all.length - 1 - i) % step === 0);
}
function valueTicks(low, high, most) {
  const step = [1, 2, 5, 10, 20, 25, 50].find((s) => (high - low) / s <= most) ?? 50, found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9; v += step) found.push(v);
  return found;
}
function powerTicks(low, high) {
  const found = [];
  for (let p = Math.ceil(Math.log10(low) - 1e-9); p <= Math.log10(high) + 1e-9; p++) found.push(10 ** p);
  return found;
}
const plainPower = (v) => v >= 0.001 ? String(Number(v.toPrecision(3))) : v.toExponential(0);

// value(row) -> [value, low, high] or null. Returns the points as they were drawn.
function plot(host, v, value, {height, small = false, logarithmic = false, label, reference = null, whole = false}) {
  const width = Math.max(host.clientWidth || 600, 120);
  const rows = v.rows.filter((row) => row.bytes && fits(row) && value(row) && !chosen.hidden.has(row.policy));
  const svg = drawn("svg", {viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true", ...(small ? {class: "small"} : {})});
  const edge = small ? {left: 26, right: 8, top: 6, bottom: 16} : {left: 46, right: 18, top: 28, bottom: 44};
  const sizes = rows.map((row) => row.bytes);
  if (!rows.length) {
    svg.append(drawn("text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, small ? "not cut" : "nothing to show"));
    host.replaceChildren(svg);
    return [];
  }
  const lowX = Math.log2(Math.min(...sizes)), highX = Math.log2(Math.max(...sizes));
  const pad = Math.max(0.12, (highX - lowX) * 0.05);
  const x = (bytes) => edge.left + (Math.log2(bytes) - lowX + pad) / (highX - lowX + 2 * pad) * (width - edge.left - edge.right);
  const values = rows.flatMap((row) => value(row)).filter((n) => !logarithmic || n > 0);
  if (reference !== null) values.push(reference);
  let low, high;
  if (logarithmic) [low, high] = [10 ** Math.floor(Math.log10(Math.min(...values))), 10 ** Math.ceil(Math.log10(Math.max(...values)) + 1e-9)];
  else [low, high] = whole ? [0, 100] : [Math.max(0, Math.floor((Math.min(...values) - 2) / 5) * 5), Math.min(100, Math.ceil((Math.max(...values) + 1) / 5) * 5)];
  const place = (n) => logarithmic ? Math.log10(Math.max(n, low)) : n, span = place(high) - place(low) || 1;
  const y = (n) => edge.top + (place(high) - place(Math.min(Math.max(n, low), high))) / span * (height - edge.top - edge.bottom);
  const ticks = logarithmic ? powerTicks(low, high) : small ? [0, 50, 100] : valueTicks(low, high, height / 38);
  for (const tick of ticks) {
    svg.append(drawn("line", {x1: edge.left, x2: width - edge.right, y1: y(tick), y2: y(tick), class: "grid"}));
    svg.append(drawn("text", {x: edge.left - 6, y: y(tick) + 4, "text-anchor": "end"}, logarithmic ? plainPower(tick) : tick));
  }
  const floor = height - edge.bottom;
  if (!small) {
    for (const tick of byteTicks(2 ** (lowX - pad), 2 ** (highX + pad), (width - edge.left - edge.right) / 74)) {
      svg.append(drawn("line", {x1: x(tick), x2: x(tick), y1: floor, y2: floor + 4, class: "grid"}));
      svg.append(drawn("text", {x: x(tick), y: floor + 18, "text-anchor": "middle"}, size(tick).replace(".0", "")));
    }
    svg.append(drawn("text", {x: width - edge.right, y: height - 6, "text-anchor": "end", class: "name"}, "bytes held by a request \u2192"));
    svg.append(drawn("text", {x: edge.left - 6, y: 12, "text-anchor": "end", class: "name"}, label));
  }
  svg.append(drawn("line", {x1: edge.left, x2: width - edge.right, y1: floor, y2: floor, class: "grid"}));
  if (reference !== null) {
    svg.append(drawn("line", {x1: edge.left, x2: width - edge.right, y1: y(reference), y2: y(reference), class: "full"}));
  }
  const dots = [], r = small ? 2.6 : 5;
  for (const line of lines(rows)) {
    const at = policies.indexOf(line[0].policy), group = drawn("g", {style: `color: var(--c${Math.max(at, 0) % COLOURS})`});
    const second = line[0].kv !== data.kv[0] || line[0].state !== data.state[0];
    const start = rows.find((row) => isFull(row) && row.kv === line[0].kv && row.state === line[0].state);
    const path = [...(start ? [start] : []), ...line].filter((row) => !logarithmic || value(row)[0] > 0);
    group.append(drawn("path", {
      d: path.map((row, i) => `${i ? "L" : "M"}${x(row.bytes).toFixed(1)} ${y(value(row)[0]).toFixed(1)}`).join(""),
      class: second ? "series second" : "series",
    }));
    for (const row of line) {
      const [mean, least, most] = value(row), [px, py] = [x(row.bytes), y(mean)];
      if (!small && most > least) {
        group.append(drawn("path", {d: `M${px} ${y(most)}V${y(least)}M${px - 4} ${y(most)}h8M${px - 4} ${y(least)}h8`, class: "whisker", fill: "none"}));
      }
      group.append(marker(shapes[Math.max(at, 0) % shapes.length], px, py, r, second ? "dot hollow" : "dot"));
      dots.push({row, x: px, y: py});
    }
    svg.append(group);
  }
  for (const row of rows.filter(isFull)) {
    if (logarithmic && !(value(row)[0] > 0)) continue;
    const [px, py] = [x(row.bytes), y(value(row)[0])];
    svg.append(marker("diamond", px, py, r, row === base(v) ? "dot" : "dot hollow"));
    dots.push({row, x: px, y: py});
  }
  if (reference !== null && !small) {
    const text = drawn("text", {x: edge.left + 6, y: y(reference) - 6, class: "name"}, `full cache ${points(reference)}`);
    svg.append(text);
  }
  host.replaceChildren(svg);
  return dots;
}
function scores(row) { // the score with the interval of its difference to the full cache
  const score = scoreOf(row);
  if (!score) return null;
  const full = score.score[0] - score.difference[0];
  return [score.score[0], full + score.difference[1], full + score.difference[2]];
}

// ---- the tip

function describe(row, score) {
  const found = [named(row), dtypes(row), `${size(row.bytes)} held, ${size(row.peak_bytes)} at the peak`];
  if (row.state_bytes) found.push(`KV ${size(row.kv_bytes)}, state ${size(row.state_bytes)}`);
  if (row.smaller && !isFull(row)) found.push(`KV ${times(row.smaller)} smaller, ${number(Math.round(row.kept))} of ${number(Math.round(row.tokens))} tokens a stream`);
  if (score) {
    found.push(`score ${points(score.score[0])} on ${count(score.samples, "text")}`);
    if (row !== base(view())) found.push(`${signed(score.difference[0])} to the full cache (${between(score.difference)})`);
  }
  if (row.divergence) found.push(`KL ${row.divergence.kl.toPrecision(3)}, 99.9 % ${row.divergence.kl_999.toPrecision(3)}, top-1 ${points(row.divergence.top1)} %`);
  return found.filter(Boolean);
}
function tip(texts, x, y) {
  const box = $("tip");
  box.replaceChildren(...texts.map((text) => element("div", text)));
  box.hidden = false;
  const {width, height} = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 14) : y + 18}px`;
}
const noTip = () => { $("tip").hidden = true; };

function followed(host, dots, score) { // pointer and keyboard on a plot
  let at = -1;
  const svg = host.querySelector("svg"), ring = drawn("circle", {r: 9, class: "near", visibility: "hidden"});
  svg.append(ring);
  const look = (i, x, y) => {
    at = i;
    const dot = dots[i];
    ring.setAttribute("cx", dot.x);
    ring.setAttribute("cy", dot.y);
    ring.setAttribute("visibility", "visible");
    const box = svg.getBoundingClientRect(), texts = describe(dot.row, score(dot.row));
    tip(texts, x ?? box.left + dot.x, y ?? box.top + dot.y);
    if (x === undefined) $("said").textContent = texts.join(". ");
  };
  const leave = () => { at = -1; ring.setAttribute("visibility", "hidden"); noTip(); };
  host.onpointermove = (event) => {
    const box = svg.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = -1, least = 40 ** 2;
    dots.forEach((dot, i) => {
      const far = (dot.x - x) ** 2 + (dot.y - y) ** 2;
      if (far < least) [best, least] = [i, far];
    });
    if (best < 0) leave();
    else look(best, event.clientX, event.clientY);
  };
  host.onpointerdown = host.onpointermove;
  host.onpointerleave = leave;
  host.onblur = leave;
  host.onkeydown = (event) => {
    if (!dots.length) return;
    if (event.key === "Escape") return leave();
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    if (at < 0) return look(0);
    const here = dots[at], line = (row) => `${row.policy} ${row.kv} ${row.state}`;
    const same = dots.filter((dot) => line(dot.row) === line(here.row)).sort((a, b) => a.x - b.x), i = same.indexOf(here);
    if (event.key === "ArrowLeft") return look(dots.indexOf(same[Math.max(i - 1, 0)]));
    if (event.key === "ArrowRight") return look(dots.indexOf(same[Math.min(i + 1, same.length - 1)]));
    if (event.key === "Home") return look(dots.indexOf(same[0]));
    if (event.key === "End") return look(dots.indexOf(same.at(-1)));
    const keys = [...new Set(dots.map((dot) => line(dot.row)))], step = event.key === "ArrowDown" ? 1 : keys.length - 1;
    const next = keys[(keys.indexOf(line(here.row)) + step) % keys.length];
    const others = dots.filter((dot) => line(dot.row) === next);
    look(dots.indexOf(others.reduce((a, b) => Math.abs(b.x - here.x) < Math.abs(a.x - here.x) ? b : a)));
  };
}

// ---- parts of the page

function show() {
  const v = view();
  choices("mode", data.modes, (name) => name === "seen" ? "seen" : "not seen");
  choices("length", lengths(), (n) => n === ALL ? "all" : number(n));
  choices("kv", data.kv.length > 1 ? [ALL, ...data.kv] : data.kv, String);
  choices("state", data.state.length > 1 ? [ALL, ...data.state] : data.state, String);
  showTiles(v);
  showLegend();
  showPlots(v);
  showTable(v);
  showLost();
}
function tile(name, value, more) {
  const box = element("div");
  box.append(element("dt", name), element("dd", value, {class: "value"}), element("dd", more, {class: "more"}));
  return box;
}
function showTiles(v) {
  const full = base(v), score = full && scoreOf(full), what = chosen.task ?? `mean of ${count(v.averaged.length, "task")}`;
  const tiles = [];
  if (full) tiles.push(tile(`full cache, ${what}`, score ? points(score.score[0]) : "\u2013", full.bytes ? `${size(full.bytes)} held` : ""));
  for (const most of [1, 3]) {
    const within = v.rows.filter((row) => !isFull(row) && fits(row) && scoreOf(row) && scoreOf(row).difference[0] >= -most - 1e-6);
    const best = within.reduce((a, b) => !a || b.bytes < a.bytes ? b : a, null);
    tiles.push(best
      ? tile(`smallest within ${count(most, "point")} of it`, [named(best), dtypes(best)].filter(Boolean).join(", "),
        `${size(best.bytes)} held; ${signed(scoreOf(best).difference[0])} (${between(scoreOf(best).difference)})`)
      : tile(`smallest within ${count(most, "point")} of it`, "none", "of what was measured"));
  }
  $("tiles").replaceChildren(...tiles);
}
function showLegend() {
  const had = document.activeElement?.dataset?.policy;
  $("legend").replaceChildren(...policies.map((policy, i) => {
    const button = element("button", undefined, {type: "button", "aria-pressed": !chosen.hidden.has(policy), "data-policy": policy});
    const sign = drawn("svg", {width: 22, height: 12, viewBox: "0 0 22 12", "aria-hidden": "true", style: `color: var(--c${i % COLOURS})`});
    sign.append(drawn("path", {d: "M0 6H22", class: "series"}), marker(shapes[i % shapes.length], 11, 6, 4.5, "dot"));
    const auto = policy.split(":")[0] === "auto" ? data.auto[chosen.mode] : null;
    button.append(sign, auto ? `${policy} (${auto})` : policy);
    button.onclick = () => {
      if (!chosen.hidden.delete(policy)) chosen.hidden.add(policy);
      choose({});
    };
    return button;
  }));
  if (data.kv.length > 1 || data.state.length > 1) {
    const first = [data.kv.length > 1 ? data.kv[0] : "", data.state.length > 1 ? `state ${data.state[0]}` : ""].filter(Boolean).join(", ");
    $("legend").append(element("span", `solid: ${first}; dashed, hollow: other dtypes`, {class: "quiet"}));
  }
  if (had) [...$("legend").querySelectorAll("button")].find((button) => button.dataset.policy === had)?.focus();
}
function showPlots(v) {
  const what = chosen.task ?? "mean over tasks", full = base(v), score = full && scoreOf(full);
  $("plot-title").textContent = `Score against bytes: ${what}`;
  const dots = plot($("plot"), v, scores, {height: innerWidth < 560 ? 300 : 400, label: "score", reference: score ? score.score[0] : null});
  $("plot").setAttribute("aria-label", `Plot of score against bytes, ${what}; ${count(dots.length, "point")}. The table below has the same figures.`);
  followed($("plot"), dots, scoreOf);
  showMultiples(v);
  const far = v.rows.some((row) => row.divergence);
  $("divergence").hidden = !far;
  if (!far) return;
  for (const [id, name] of [["kl", "kl"], ["kl999", "kl_999"]]) {
    const of = (row) => row.divergence ? [row.divergence[name], row.divergence[name], row.divergence[name]] : null;
    const some = v.rows.some((row) => of(row) && of(row)[0] > 0);
    followed($(id), some ? plot($(id), {...v, rows: v.rows.filter((row) => of(row)?.[0] > 0)}, of, {height: 240, logarithmic: true, label: "nats"})
      : plot($(id), {...v, rows: []}, of, {height: 240, label: "nats"}), () => null);
  }
}
function showMultiples(v) {
  const host = $("multiples"), had = document.activeElement?.dataset?.task, top = base(v);
  const tasks = data.tasks.filter((task) => v.rows.some((row) => row.tasks[task]));
  const buttons = [null, ...tasks].map((task) => {
    const of = (row) => task ? row.tasks[task] ?? null : row.mean, score = top && of(top);
    const button = element("button", undefined, {type: "button", "aria-pressed": chosen.task === task, "data-task": task ?? ""});
    const what = element("span", undefined, {class: "what"}), low = task && !v.averaged.includes(task);
    what.append(element("span", task ?? "mean", low ? {class: "low"} : {}), element("span", score ? `full ${points(score.score[0])}${low ? ", not averaged" : ""}` : ""));
    const sheet = element("div");
    button.append(what, sheet);
    button.onclick = () => choose({task: chosen.task === task ? null : task});
    return {button, sheet, of, reference: score ? score.score[0] : null};
  });
  host.replaceChildren(...buttons.map(({button}) => button));
  for (const {sheet, of, reference} of buttons) {
    plot(sheet, v, (row) => { const s = of(row); return s && [s.score[0], s.score[0], s.score[0]]; }, {height: 92, small: true, whole: true, reference});
  }
  if (had !== undefined) [...host.querySelectorAll("button")].find((button) => button.dataset.task === had)?.focus();
}
function showTable(v) {
  const far = v.rows.some((row) => row.divergence), tasks = data.tasks.filter((task) => v.rows.some((row) => row.tasks[task]));
  const head = element("tr");
  const heads = ["policy", ...(data.kv.length > 1 ? ["KV"] : []), ...(data.state.length > 1 ? ["state"] : []), "bytes", "KV bytes", "state bytes", "peak",
    "KV smaller", "mean", "to full", "95 % interval", ...(far ? ["KL", "KL 99.9 %", "top-1 %"] : [])];
  head.append(...heads.map((text) => element("th", text, {scope: "col"})),
    ...tasks.map((task) => element("th", data.short[task] ?? task, {scope: "col", title: task, ...(v.averaged.includes(task) ? {} : {class: "out"})})));
  $("figures").tHead.replaceChildren(head);
  let last = null;
  $("figures").tBodies[0].replaceChildren(...v.rows.filter(fits).map((row) => {
    const line = element("tr", undefined, row.policy === last ? {} : {class: "begins"}), known = row.bytes !== null;
    last = row.policy;
    const m = row.mean, d = row.divergence;
    const cells = [...(data.kv.length > 1 ? [row.kv] : []), ...(data.state.length > 1 ? [row.state] : []),
      ...(known ? [row.bytes, row.kv_bytes, row.state_bytes, row.peak_bytes].map(size) : ["", "", "", ""]), row.smaller ? times(row.smaller) : "",
      m ? points(m.score[0]) : "", m && row !== base(v) ? signed(m.difference[0]) : "", m && row !== base(v) ? between(m.difference) : "",
      ...(far ? d ? [d.kl.toFixed(4), d.kl_999.toFixed(3), points(d.top1)] : ["", "", ""] : [])];
    line.append(element("th", named(row), {scope: "row"}), ...cells.map((text) => element("td", text)),
      ...tasks.map((task) => element("td", row.tasks[task] ? points(row.tasks[task].score[0]) : "", v.averaged.includes(task) ? {} : {class: "out"})));
    return line;
  }));
  const out = Object.entries(v.shown_only).map(([task, score]) => `${task} ${points(score)}`).join(", ");
  $("averaged").textContent = (v.averaged.length ? `Mean of ${count(v.averaged.length, "task")}.` : "No task is averaged.") + (out ? ` Not averaged: ${out}.` : "");
}
function showLost() {
  const here = data.changed.filter((c) => c.mode === chosen.mode && (chosen.length === ALL || c.length === chosen.length));
  $("lost").hidden = !here.length;
  if (!here.length) return;
  const tasks = data.tasks.filter((task) => here.some((c) => c.task === task)), select = $("lost-task");
  const had = tasks.includes(chosen.task) ? chosen.task : tasks.includes(select.value) ? select.value : tasks[0];
  select.replaceChildren(...tasks.map((task) => element("option", task, {value: task})));
  select.value = had;
  showSamples();
}
function showSamples() {
  const task = $("lost-task").value;
  const here = data.changed.filter((c) => c.mode === chosen.mode && (chosen.length === ALL || c.length === chosen.length) && c.task === task);
  $("samples").replaceChildren(...here.map((sample) => {
    const box = element("div", undefined, {class: "sample"}), table = element("table"), body = element("tbody");
    const best = sample.answers[0].score, same = new Map(); // the same answer of several is one line
    for (const answer of sample.answers) {
      const key = `${answer.score} ${answer.answer}`;
      if (!same.has(key)) same.set(key, []);
      same.get(key).push(answer);
    }
    for (const [first, ...others] of same.values()) {
      const line = element("tr", undefined, first.score < best - 1e-9 ? {class: "wrong"} : {});
      line.append(element("td", together([first, ...others])), element("td", points(100 * first.score)), element("td", first.answer));
      body.append(line);
    }
    table.append(body);
    box.append(element("h3", `Text ${sample.number} of ${number(sample.length)} tokens${sample.question ? `, question ${sample.question + 1}` : ""}`), table);
    return box;
  }));
}
function together(answers) { // full cache, peak 2x and 4x
  const found = new Map();
  for (const answer of answers) {
    const name = isFull(answer) ? "full cache" : answer.policy;
    if (!found.has(name)) found.set(name, []);
    if (!isFull(answer)) found.get(name).push(times(answer.ratio));
  }
  return [...found].map(([name, ratios]) => [name, ...ratios].join("\u00a0")).join(", ");
}
function showAbout() {
  $("lead").textContent = data.lead;
  $("least").textContent = data.least;
  for (const [name, value] of data.about) $("about").append(element("dt", name), element("dd", value));
}

$("controls").onsubmit = (event) => event.preventDefault();
$("lost-task").onchange = showSamples;
showAbout();
choose(fromAddress());
window.onhashchange = () => choose(fromAddress());
let width = innerWidth;
new ResizeObserver(() => {
  if (innerWidth !== width) { width = innerWidth; noTip(); showPlots(view()); }
}).observe(document.documentElement);
