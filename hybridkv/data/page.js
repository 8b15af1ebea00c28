// The page at / of a server: a chat, and what the cache does meanwhile. Text of models and people goes into text nodes alone.

const narrow = matchMedia("(max-width: 900px)"), dark = matchMedia("(prefers-color-scheme: dark)"), still = matchMedia("(prefers-reduced-motion: reduce)");
const KEY = "hybridkv-key", FREE = 0, LATER = 1, SHARED = 255;
const QUIET_SECONDS = 20; // without a sign of life the feed is asked for again
let key = sessionStorage.getItem(KEY) ?? "";
let server = null, engine = null, kinds = []; // of the feed
const requests = new Map(), map = new Map(); // number -> row; kind -> {reach, per_cell, cells}
let chosen = null, follows = true; // the request looked at; whether the newest of this page is taken by itself

const percent = (a, b) => (b ? (100 * a) / b : 0);
const share = (a, b) => `${Math.round(percent(a, b))}\u00a0%`;
const rate = (n) => number(n < 10 ? Math.round(n * 10) / 10 : Math.round(n));
const headers = (more = {}) => (key ? { authorization: `Bearer ${key}`, ...more } : more);
const hue = (tag) => `oklch(${dark.matches ? "0.74 0.13" : "0.6 0.15"} ${(tag * 137.508 + 340) % 360})`;
const isLive = (row) => row.state !== "ended";

// ---- server-sent events over fetch, which can send a key

async function* serverEvents(response, alive = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const event = { name: "message", id: null, data: "" };
      for (const line of rest.slice(0, end).split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}
async function reasonOf(response) { // an answer that is an error, in words
  try {
    const found = await response.json();
    return found.error?.message ?? `the server said ${response.status}`;
  } catch {
    return `the server said ${response.status}`;
  }
}

// ---- the feed

function setStatus(text, state) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").dataset.state = state;
}
async function follow() {
  let lastId = null, pause = 1;
  for (;;) {
    const stopper = new AbortController();
    let timer = null;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stopper.abort(), 1000 * QUIET_SECONDS);
    };
    try {
      alive();
      const response = await fetch("/v1/cache/events", { headers: headers(lastId ? { "last-event-id": lastId } : {}), signal: stopper.signal, cache: "no-store" });
      if (response.status === 401) {
        setStatus("needs a key", "off");
        await askForKey();
        continue;
      }
      if (!response.ok) throw new Error(await reasonOf(response));
      pause = 1;
      for await (const event of serverEvents(response, alive)) {
        lastId = event.id ?? lastId;
        apply(JSON.parse(event.data), event.name === "snapshot");
      }
      setStatus("connection lost", "bad");
    } catch (problem) {
      setStatus(problem.name === "AbortError" || problem instanceof TypeError ? "no connection" : problem.message, "bad");
    } finally {
      clearTimeout(timer);
    }
    await new Promise((ready) => setTimeout(ready, 1000 * pause));
    pause = Math.min(15, 2 * pause);
  }
}
function askForKey() {
  const dialog = $("key-dialog");
  $("key-problem").hidden = !key;
  $("key").value = "";
  return new Promise((given) => {
    if (!dialog.open) dialog.showModal();
    dialog.addEventListener("close", () => {
      key = $("key").value.trim();
      if (key) sessionStorage.setItem(KEY, key);
      given();
    }, { once: true });
  });
}
function bytesOf(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}
function apply(found, all) {
  if (all) {
    requests.clear();
    server = found.server;
    showServer();
    $("events").replaceChildren(element("li", "Nothing has happened yet.", "quiet none"));
  }
  engine = found.engine ?? engine;
  kinds = found.kinds ?? kinds;
  for (const [n, row] of Object.entries(found.requests ?? {})) {
    if (row) requests.set(Number(n), row);
    else requests.delete(Number(n));
  }
  for (const [name, change] of Object.entries(found.map ?? {})) changeMap(name, change);
  setStatus({ ok: "ready", loading: "loading the model", draining: "shutting down", dead: "not answering" }[engine.status], engine.status === "ok" ? "ok" : "bad");
  $("reading").textContent = rate(engine.read_per_s);
  $("writing").textContent = rate(engine.written_per_s);
  $("running").textContent = number(engine.running);
  $("waiting").textContent = number(engine.waiting);
  if (all || found.kinds) showMemory(all ? 0 : sum((found.events ?? []).map((event) => event.freed ?? 0)));
  if (all || found.requests) {
    showRequests();
    showAnswers();
    lookAtPrompt();
  }
  if (found.events?.length) showEvents(found.events);
  if (all || found.map || found.requests) showMap();
}
function showServer() {
  $("model").textContent = server.model;
  document.title = `${server.model} \u00b7 hybridkv`;
  const names = server.policies.map((name) => new Option(name, name));
  if (!$("policy").options.length) {
    $("policy").replaceChildren(...names);
    $("policy").value = server.policy;
    if (server.budget) $("budget").placeholder = String(server.budget);
  }
  for (const id of ["budget", "policy"]) $(id).disabled = !server.eviction;
  $("budget").min = String(Math.max(1, server.recent));
  $("budget-note").textContent = server.eviction
    ? `Budget: tokens that each head may keep, ${number(Math.max(1, server.recent))} or more.`
    : "This model's cache is never evicted, so there is no budget.";
}

// ---- memory

const KIND_NAMES = { attention: "attention pages", gdn: "Gated DeltaNet state", "gdn checkpoint": "Gated DeltaNet checkpoints", csa: "CSA pages", hca: "HCA pages", window: "sliding window", csa_rows: "CSA rows", hca_running: "HCA softmax" };
const kindName = (kind) => KIND_NAMES[kind.name] ?? `${kind.name} ${kind.what}`;
const past = []; // [seconds, bytes in use, bytes held] of the last minute
let lastUsed = 0, lastHeld = 0;

function showMemory(freed) { // freed: bytes that evictions gave back since; they were held until then
  let used = 0, later = 0, total = 0;
  const boxes = kinds.map((kind) => {
    used += kind.used * kind.unit_bytes;
    later += kind.later * kind.unit_bytes;
    total += kind.total * kind.unit_bytes;
    const box = element("div", undefined, "kind"), head = element("p"), parts = element("div", undefined, "parts"), words = element("p", undefined, "quiet");
    head.append(element("b", kindName(kind)), element("span", `${size((kind.used + kind.later) * kind.unit_bytes)} of ${size(kind.total * kind.unit_bytes)}`));
    for (const part of ["used", "later"]) {
      const bar = element("i", undefined, part);
      bar.style.setProperty("--part", percent(kind[part], kind.total));
      parts.append(bar);
    }
    words.append(element("span", `${count(kind.used, kind.what.slice(0, -1))} in use`), element("span", `${number(kind.later)} kept for later turns`),
      element("span", `${number(kind.total - kind.used - kind.later)} free`));
    box.append(head, parts, words);
    return box;
  });
  $("kinds").replaceChildren(...boxes);
  $("used").textContent = size(used);
  $("capacity").textContent = size(total);
  $("memory-short").textContent = `${share(used, total)} in use, ${share(later, total)} kept`;
  [lastUsed, lastHeld] = [used, used + later];
  if (freed) past.push([performance.now() / 1000 - 0.2, used + freed, Math.max(lastHeld, used + freed)]);
  remember();
}
function remember() { // the curve of the last minute
  const now = performance.now() / 1000;
  past.push([now, lastUsed, lastHeld]);
  while (past.length > 1 && past[1][0] < now - 60) past.shift();
  const most = Math.max(1, ...past.map(([, , n]) => n)), x = (t) => Math.max(0, 240 - 4 * (now - t)).toFixed(1), y = (n) => (42 - 38 * (n / most)).toFixed(1);
  const curve = (part) => {
    let path = "", before = null;
    for (const point of past) {
      path += before === null ? `M${x(point[0])} ${y(point[part])}` : `L${x(point[0])} ${y(before)}L${x(point[0])} ${y(point[part])}`;
      before = point[part];
    }
    return `${path}L240 ${y(before)}`;
  };
  const line = curve(1);
  $("past-line").setAttribute("d", line);
  $("past-held").setAttribute("d", curve(2));
  $("past-area").setAttribute("d", `${line}L240 44L${x(past[0][0])} 44Z`);
  $("past-most").textContent = most > 1 ? `at most ${size(most)}` : "";
}

// ---- requests

const ENDED = { stop: "finished", length: "finished at its limit", abort: "stopped", error: "failed" };
function stateOf(row) {
  if (row.state === "reading") return `reading ${share(row.read, row.prompt)}`;
  return row.state === "ended" ? ENDED[row.end] ?? "finished" : row.state;
}
const cachedOf = (row) => (row.cached ? `${number(row.cached)} cached` : "none cached");
function keptOf(row) {
  if (!row.full) return "";
  return `kept ${size(row.bytes)} of ${size(row.full)} (${share(row.bytes, row.full)})`;
}
function settingsOf(row) {
  return row.budget ? `budget ${number(row.budget)}${row.policy ? `, ${row.policy}` : ""}` : "";
}
function strip(row) {
  const box = element("span", undefined, "strip"), all = Math.max(1, row.prompt + row.written);
  const part = (name, from, to) => {
    if (to <= from && name !== "at") return;
    const piece = element("i", undefined, name);
    piece.style.setProperty("--from", percent(from, all));
    if (name !== "at") piece.style.setProperty("--part", percent(to - from, all));
    box.append(piece);
  };
  part("read", row.cached, row.read);
  part("reused", 0, row.cached);
  part("written", row.prompt, row.prompt + row.written);
  for (const at of row.checkpoints) part("at", at, at);
  return box;
}
function requestButton(row) {
  const button = element("button", undefined, isLive(row) ? "" : "ended"), top = element("span", undefined, "line"), under = element("span", undefined, "line quiet");
  button.type = "button";
  button.style.setProperty("--colour", hue(row.tag));
  button.setAttribute("aria-pressed", String(row.n === chosen));
  const name = element("span");
  name.append(element("span", undefined, "dot"), element("b", `#${row.n}`), ` ${stateOf(row)}`);
  top.append(name, element("span", `${number(row.read)} read (${cachedOf(row)}), ${number(row.written)} written`));
  under.append(element("span", keptOf(row)), element("span", settingsOf(row)));
  button.append(top, strip(row), under);
  button.addEventListener("click", () => choose(row.n));
  return button;
}
function showRequests() {
  const rows = [...requests.values()].sort((a, b) => isLive(b) - isLive(a) || b.n - a.n).slice(0, 40);
  const focused = document.activeElement?.closest?.("#requests li")?.dataset.n;
  const items = rows.map((row) => {
    const item = element("li");
    item.dataset.n = String(row.n);
    item.append(requestButton(row));
    return item;
  });
  $("requests").replaceChildren(...(items.length ? items : [element("li", "Nothing was asked yet.", "quiet none")]));
  if (focused) $("requests").querySelector(`[data-n="${focused}"] button`)?.focus({ preventScroll: true });
  const live = rows.filter(isLive).length;
  $("requests-short").textContent = `${number(live)} now, ${number(requests.size - live)} before`;
}
function choose(n, byItself = false) {
  if (!byItself) follows = false;
  if (chosen === n) return;
  chosen = n;
  first = 0;
  showRequests();
  lookAtPrompt();
}

// ---- the page map

const canvas = $("map"), fades = new Map(); // kind:cell -> [tag, when]
const FADE = 1400, PATTERNS = { csa: "diagonal", hca: "dots", gdn: "lines", window: "lines", csa_rows: "diagonal", hca_running: "dots" };
let places = []; // of each kind: {kind, left, top, columns, step}

function changeMap(name, change) {
  if (!Array.isArray(change)) {
    map.set(name, { ...change, cells: bytesOf(change.cells) });
    return;
  }
  const { cells } = map.get(name), now = performance.now();
  for (const [from, text] of change) {
    bytesOf(text).forEach((tag, i) => {
      const at = from + i, before = cells[at];
      if (before > LATER && tag <= LATER && !still.matches) fades.set(`${name}:${at}`, [before, now]);
      else fades.delete(`${name}:${at}`);
      cells[at] = tag;
    });
  }
}
function layOut(width) { // the largest cells of which all fit into 250 pixels of height
  const shown = kinds.filter((kind) => map.has(kind.name)), label = shown.length > 1 ? 18 : 0;
  for (let step = 13; ; step--) {
    let top = 0;
    places = shown.map((kind) => {
      const own = kind.what === "pages" ? step : 13, columns = Math.max(1, Math.floor(width / own)), cells = map.get(kind.name).cells.length;
      const place = { kind, top: top + label, columns, step: own };
      top += label + Math.ceil(cells / columns) * own + (label ? 6 : 0);
      return place;
    });
    if (top <= 250 || step === 2) return Math.max(24, top);
  }
}
function overlay(pen, pattern) { // a kind's own pattern, over its cells
  const tile = document.createElement("canvas"), ink = dark.matches ? "rgb(0 0 0 / 0.5)" : "rgb(255 255 255 / 0.6)";
  tile.width = tile.height = 6;
  const on = tile.getContext("2d");
  on.strokeStyle = on.fillStyle = ink;
  on.lineWidth = 1.5;
  on.beginPath();
  if (pattern === "diagonal") for (const x of [-6, 0, 6]) on.moveTo(x, 6), on.lineTo(x + 6, 0);
  else if (pattern === "lines") on.moveTo(0, 3), on.lineTo(6, 3);
  else on.rect(2, 2, 1.5, 1.5);
  on.stroke();
  return pen.createPattern(tile, "repeat");
}
function draw() {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  if (!width) return;
  const height = layOut(width), now = performance.now(), style = getComputedStyle(document.body);
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d"), empty = style.getPropertyValue("--empty"), colours = new Map();
  pen.scale(ratio, ratio);
  const resolved = (css) => { // light-dark() is not for a canvas
    canvas.style.color = css;
    return getComputedStyle(canvas).color;
  };
  colours.set(FREE, resolved(empty));
  colours.set(LATER, resolved("var(--held)"));
  colours.set(SHARED, resolved("var(--ink)"));
  const ink = resolved("var(--quiet)");
  const colour = (tag) => colours.get(tag) ?? colours.set(tag, hue(tag)).get(tag);
  for (const { kind, top, columns, step } of places) {
    const { cells } = map.get(kind.name), side = step > 3 ? step - 1 : step;
    if (places.length > 1) {
      pen.fillStyle = ink;
      pen.font = "12px system-ui, sans-serif";
      pen.fillText(kindName(kind), 0, top - 5);
    }
    for (let i = 0; i < cells.length; i++) {
      const x = (i % columns) * step, y = top + Math.floor(i / columns) * step, fade = fades.get(`${kind.name}:${i}`);
      pen.fillStyle = colour(cells[i]);
      pen.fillRect(x, y, side, side);
      if (fade && cells[i] <= LATER) {
        pen.globalAlpha = Math.max(0, 1 - (now - fade[1]) / FADE);
        pen.fillStyle = colour(fade[0]);
        pen.fillRect(x, y, side, side);
        pen.globalAlpha = 1;
      }
    }
    if (PATTERNS[kind.name]) {
      pen.fillStyle = overlay(pen, PATTERNS[kind.name]);
      pen.fillRect(0, top, columns * step, Math.ceil(cells.length / columns) * step);
    }
  }
  for (const [at, [, when]] of fades) if (now - when >= FADE) fades.delete(at);
}
let drawing = false;
function drawSoon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
    if (fades.size) drawSoon();
  });
}
function swatch(text, css) {
  const mark = element("span", undefined, "swatch");
  mark.style.background = css;
  return [mark, text];
}
function showMap() {
  const live = [...requests.values()].filter((row) => Object.keys(row.pages).length).sort((a, b) => a.n - b.n);
  const pages = kinds.filter((kind) => kind.what === "pages"), of = (what) => sum(pages.map((kind) => kind[what]));
  $("map-short").textContent = `${number(of("used") + of("later"))} of ${count(of("total"), "page")}`;
  const legend = [...swatch("free", "var(--empty)"), ...swatch("kept for later", "var(--held)")];
  if ([...map.values()].some(({ cells }) => cells.includes(SHARED))) legend.push(...swatch("shared", "var(--ink)"));
  for (const row of live.slice(0, 8)) legend.push(...swatch(`#${row.n}`, hue(row.tag)));
  $("map-key").replaceChildren(...legend);
  const each = [];
  for (const kind of pages) {
    const found = map.get(kind.name);
    if (!found) continue;
    const cell = found.per_cell === 1 ? "a cell is a page" : `a cell is ${found.per_cell} pages`;
    const rest = found.reach < kind.total ? `; the first ${number(found.reach)} are shown, the others are free` : "";
    each.push(`${pages.length > 1 ? `${kindName(kind)}: ` : ""}${cell} of ${size(kind.unit_bytes)}${rest}`);
  }
  $("map-note").textContent = each.length ? `${each.join(". ").replace(/^a/, "A")}.` : "";
  canvas.setAttribute("aria-label", `Page map: ${number(of("used"))} pages in use, ${number(of("later"))} kept for later, ${number(of("total") - of("used") - of("later"))} free`);
  const head = element("tr");
  head.append(...["", ...kinds.map(kindName)].map((name) => Object.assign(element("th", name), { scope: "col" })));
  $("map-table").tHead.replaceChildren(head);
  const rows = [
    ...live.map((row) => [`#${row.n} ${stateOf(row)}`, ...kinds.map((kind) => row.pages[kind.name] ?? 1)]),
    ["kept for later", ...kinds.map((kind) => kind.later)],
    ["free", ...kinds.map((kind) => kind.total - kind.used - kind.later)],
    ["all", ...kinds.map((kind) => kind.total)],
  ];
  $("map-table").tBodies[0].replaceChildren(...rows.map(([name, ...cells]) => {
    const row = element("tr");
    row.append(Object.assign(element("th", name), { scope: "row" }), ...cells.map((n) => element("td", number(n))));
    return row;
  }));
  drawSoon();
}
canvas.addEventListener("click", (event) => {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  for (const { kind, top, columns, step } of places) {
    const at = Math.floor((y - top) / step) * columns + Math.floor(x / step), tag = y < top ? FREE : map.get(kind.name).cells[at] ?? FREE;
    const owner = tag > LATER && tag < SHARED && [...requests.values()].find((row) => isLive(row) && row.tag === tag);
    if (owner) choose(owner.n);
  }
});

// ---- events

const EVENTS = {
  began: (e) => `reads ${count(e.prompt, "token")}${e.cached ? `, ${number(e.cached)} of them from the cache` : ""}`,
  evicted: (e) => `evicted ${e.times > 1 ? `${e.times} times, last ` : ""}from ${number(e.before)} to ${count(e.kept, "token")} a head, let go of ${size(e.freed)}`,
  checkpoint: (e) => `checkpoint at ${number(e.at)}`,
  preempted: () => "gave up its cache for others, and will be read again",
  finished: (e) => `finished${e.reason === "length" ? " at its limit" : ""}, ${count(e.written, "token")} written`,
  cancelled: (e) => `stopped, ${count(e.written, "token")} written`,
  failed: (e) => `failed after ${count(e.written, "token")}`,
};
function showEvents(list) {
  const items = list.map((e) => {
    const item = element("li", undefined, e.what), dot = element("span", undefined, "dot"), at = element("time", new Date(1000 * e.time).toTimeString().slice(0, 8));
    dot.style.setProperty("--colour", hue(2 + (e.n % 253)));
    item.append(at, dot, element("span", `#${e.n} ${(EVENTS[e.what] ?? (() => e.what))(e)}`, "what"));
    return item;
  });
  $("events").querySelector(".none")?.remove();
  $("events").prepend(...items.reverse());
  while ($("events").children.length > 200) $("events").lastChild.remove();
  $("events-short").textContent = items[0].querySelector(".what").textContent;
}

// ---- the chosen request's prompt

let first = 0, shown = "", fetching = false, spans = [], prompt = null, here = -1;
async function lookAtPrompt() {
  const row = requests.get(chosen);
  if (!row) return;
  $("kept-title").textContent = `What #${chosen} kept of its prompt`;
  if (row.request === undefined) {
    $("prompt").hidden = $("paging").hidden = true;
    $("scale").replaceChildren();
    $("token").textContent = "";
    $("kept-status").textContent = "Its text is shown only to the key that asked.";
    return;
  }
  const wanted = `${chosen} ${row.evictions} ${row.state} ${row.cached} ${row.checkpoints} ${first}`;
  if (wanted === shown || fetching || row.state === "waiting") return;
  fetching = true;
  try {
    const response = await fetch(`/v1/cache/requests/${row.n}?first=${first}`, { headers: headers(), cache: "no-store" });
    if (response.ok) {
      shown = wanted;
      showPrompt(await response.json(), row);
    } else {
      shown = wanted;
      $("prompt").hidden = true;
      $("kept-status").textContent = "Its prompt is no longer there to be shown.";
    }
  } catch { // the connection is lost; the feed will say so
  } finally {
    fetching = false;
  }
  if (wanted === shown) setTimeout(lookAtPrompt); // it may have changed meanwhile
}
function showPrompt(found, row) {
  const { texts, counts, streams, tokens } = found;
  prompt = found;
  here = -1;
  spans = texts.map((text, i) => {
    const span = element("span", text), at = found.first + i;
    span.token = i;
    if (at < row.cached) span.className = "reused";
    if (row.checkpoints.includes(at)) span.classList.add("at");
    return span;
  });
  $("prompt").replaceChildren(...spans);
  $("prompt").hidden = false;
  $("token").textContent = "";
  if (counts) {
    const knots = stretch(Uint32Array.from(counts), streams);
    counts.forEach((n, i) => {
      spans[i].style.setProperty("--s", strength(n, knots));
      spans[i].classList.toggle("none", n === 0);
    });
    legend(knots, counts, streams, row);
    const whole = Math.round(found.kept) === tokens;
    $("kept-status").textContent = whole
      ? `All ${count(tokens, "token")} are kept by all ${number(streams)} heads.`
      : `Of ${count(tokens, "token")} a head holds ${number(Math.round(found.kept))} on average (${share(found.kept, tokens)}). The stronger its shade, the more of the ${number(streams)} heads kept a token.`;
    if (row.why) $("kept-status").append(` From the cache: ${number(row.cached)} (${row.why}).`);
    $("kept-short").textContent = `${share(found.kept, tokens)} kept`;
  } else {
    $("scale").replaceChildren();
    $("kept-status").textContent = "This model compresses its cache by design; no token is dropped on its own.";
  }
  $("paging").hidden = tokens <= found.window;
  $("earlier").disabled = found.first === 0;
  $("later").disabled = found.first + texts.length >= tokens;
}
function legend(knots, counts, streams, row) {
  const steps = element("span", undefined, "steps"), listed = [...new Set(knots)].filter(Number.isInteger);
  for (const at of listed) {
    const step = element("span", number(at));
    step.style.setProperty("--s", strength(at, knots));
    steps.append(step);
  }
  const more = [counts.includes(0) && element("span", "grey: by none", "none"), row.cached && element("span", "dotted: from the cache"), row.checkpoints.length && element("span", "bar: a checkpoint")];
  $("scale").replaceChildren(element("span", "kept by"), steps, element("span", `of ${count(streams, "head")}`), ...more.filter(Boolean));
}
function standOn(i) { // one token: who kept it
  spans[here]?.classList.remove("here");
  here = Math.max(0, Math.min(spans.length - 1, i));
  const span = spans[here], box = $("prompt");
  if (!span) return;
  span.classList.add("here");
  const place = span.getBoundingClientRect(), frame = box.getBoundingClientRect();
  if (place.top < frame.top || place.bottom > frame.bottom) box.scrollTop += place.top - frame.top - box.clientHeight / 3;
  const shownText = JSON.stringify(prompt.texts[here]), kept = prompt.counts ? ` \u00b7 kept by ${number(prompt.counts[here])} of ${count(prompt.streams, "head")}` : "";
  $("token").replaceChildren(`token ${number(prompt.first + here)} \u00b7 `, element("bdi", shownText.length > 42 ? `${shownText.slice(0, 40)}\u2026` : shownText), kept);
}
$("prompt").addEventListener("click", (event) => { if (event.target.token !== undefined) standOn(event.target.token); });
$("prompt").addEventListener("keydown", (event) => {
  const along = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100, Home: -1e9, End: 1e9 }[event.key];
  if (!along) return;
  standOn(here + along);
  event.preventDefault();
});
$("earlier").addEventListener("click", () => { first = Math.max(0, prompt.first - prompt.window); lookAtPrompt(); });
$("later").addEventListener("click", () => { first = prompt.first + prompt.window; lookAtPrompt(); });

// ---- the chat

const turns = [], answers = []; // what is sent next time; answers of this page, shown ones
let running = null; // the answer that is being written

function addTurn(role, text) {
  $("empty")?.remove();
  const box = element("div", undefined, `turn ${role}`), said = element("div", text, "said");
  box.append(element("span", role === "user" ? "You: " : "Answer: ", "unseen"), said);
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return { box, said };
}
function rowOf(answer) {
  return answer.request === null ? undefined : [...requests.values()].find((row) => row.request === answer.request);
}
function describe(answer) { // the line under an answer
  const row = rowOf(answer), usage = answer.usage, own = usage?.hybridkv, line = answer.took;
  const read = usage?.prompt_tokens ?? row?.read, cached = usage?.prompt_tokens_details?.cached_tokens ?? row?.cached ?? 0;
  const wrote = usage?.completion_tokens ?? Math.max(row?.written ?? 0, answer.pieces), bytes = own?.kv_bytes ?? row?.bytes, full = own?.full_bytes ?? row?.full;
  const seconds = ((answer.last ?? 0) - (answer.begun ?? 0)) / 1000, words = [];
  if (answer === running && !answer.begun) words.push(row ? stateOf(row) : "sending");
  if (read !== undefined && (answer !== running || answer.begun)) words.push(`read ${number(read)} (cached ${number(cached)})`);
  if (answer.begun) words.push(`wrote ${number(wrote)}`);
  if (wrote > 1 && seconds > 0) words.push(`${rate((wrote - 1) / seconds)} tokens/s`);
  if (full) words.push(`kept ${size(bytes)} of ${size(full)}`);
  if (answer.why) words.push(answer.why);
  line.replaceChildren(...words.map((text) => element("span", text)));
  if (full) {
    const meter = element("span", undefined, "meter"), bar = element("i");
    bar.style.setProperty("--part", percent(bytes, full));
    meter.append(bar);
    line.append(meter);
  }
  if (row && answer !== running) {
    const look = element("button", `#${row.n}`, "plain");
    look.type = "button";
    look.setAttribute("aria-label", `Look at request ${row.n}`);
    look.addEventListener("click", () => choose(row.n));
    line.append(look);
  }
  if (answer === running) line.append(answer.stop);
}
function showAnswers() {
  for (const answer of answers.slice(-8)) {
    const row = rowOf(answer);
    if (row && follows && (answer === running || answer === answers.at(-1))) choose(row.n, true);
    describe(answer);
  }
}
function asked(text) {
  const body = { messages: [...turns, { role: "user", content: text }], stream: true, stream_options: { include_usage: true } };
  const [budget, most, temperature] = ["budget", "longest", "temperature"].map((id) => $(id).value.trim());
  if (most) body.max_tokens = Math.max(1, Math.floor(Number(most)));
  if (temperature) body.temperature = Number(temperature);
  if (server?.eviction && budget) body.hybridkv = { budget: Math.floor(Number(budget)), policy: $("policy").value };
  return body;
}
async function send(text) {
  const body = asked(text), user = addTurn("user", text), { box, said } = addTurn("assistant", "");
  const answer = { request: null, usage: null, pieces: 0, begun: null, last: null, why: "", took: element("div", undefined, "took"), stop: element("button", "Stop", "plain") };
  const stopper = new AbortController();
  answer.stop.type = "button";
  answer.stop.addEventListener("click", () => stopper.abort());
  box.append(answer.took);
  box.classList.add("busy");
  running = answer;
  answer.stopper = stopper;
  follows = true;
  answers.push(answer);
  $("send").disabled = true;
  $("log").setAttribute("aria-busy", "true");
  describe(answer);
  let thoughts = null, problem = "";
  const grow = (node, piece) => {
    const atEnd = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
    node.append(piece);
    if (atEnd) $("log").scrollTop = $("log").scrollHeight;
  };
  const take = (chunk) => {
    if (chunk.error) throw new Error(chunk.error.message);
    answer.usage = chunk.usage ?? answer.usage;
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (!delta.content && !delta.reasoning_content) return;
    answer.last = performance.now();
    answer.begun ??= answer.last;
    answer.pieces++;
    if (delta.reasoning_content) {
      if (!thoughts) {
        const fold = element("details", undefined, "thoughts");
        thoughts = element("p");
        fold.append(element("summary", "Thoughts"), thoughts);
        box.insertBefore(fold, said);
      }
      grow(thoughts, delta.reasoning_content);
    }
    if (delta.content) grow(said, delta.content);
    describe(answer);
  };
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal: stopper.signal });
    answer.request = response.headers.get("x-request-id");
    if (response.status === 401) await askForKey();
    if (!response.ok) throw new Error(await reasonOf(response));
    for await (const event of serverEvents(response)) if (event.data !== "[DONE]") take(JSON.parse(event.data));
  } catch (found) {
    if (found.name === "AbortError") answer.why = "stopped";
    else problem = found instanceof TypeError ? "The connection was lost." : found.message;
  }
  running = null;
  box.classList.remove("busy");
  $("log").setAttribute("aria-busy", "false");
  $("send").disabled = false;
  if (!box.isConnected) return; // a new chat has begun meanwhile
  if (problem) {
    const told = element("p", problem, "problem");
    told.setAttribute("role", "alert");
    box.append(told);
  }
  if (problem && !said.textContent) { // it is not a part of the conversation
    if (!$("text").value) $("text").value = text;
    user.box.classList.add("refused");
  } else turns.push({ role: "user", content: text }, { role: "assistant", content: said.textContent });
  describe(answer);
  $("log").scrollTop = $("log").scrollHeight;
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.stopper.abort();
});
$("new").addEventListener("click", () => {
  running?.stopper.abort();
  turns.length = answers.length = 0;
  $("log").replaceChildren();
  $("text").focus();
});
$("example").addEventListener("click", () => { // long enough for a budget to matter, with one thing to find
  const weather = ["clear sky", "light rain", "fog until noon", "strong wind from the west", "snow on deck"], places = ["Brenholm", "Sandvika", "Orrin Sound", "Kaldfjord", "Mostad"];
  const room = Math.min(44, Math.floor(((server?.context ?? 2048) - 300) / 33)), lines = [];
  for (let day = 1; day <= room; day++) {
    lines.push(day === Math.ceil(room / 3)
      ? `Day ${day}: at ${places[day % 5]} the pilot said that the code word for the harbour gate is heron.`
      : `Day ${day}: ${weather[(day * 7) % 5]}, ${3 + ((day * 11) % 17)} miles made, anchored at ${places[(day * 3) % 5]} with ${20 + ((day * 13) % 60)} crates aboard.`);
  }
  $("text").value = `This is the log of a ship.\n${lines.join("\n")}\n\nWhat is the code word for the harbour gate?`;
  if (server?.eviction) $("budget").value = "256";
  $("text").focus();
});

// ---- the window

function fold() { // narrow: the chat first, the rest folded
  for (const card of document.querySelectorAll("details.card")) card.open = !narrow.matches;
}
fold();
narrow.addEventListener("change", fold);
for (const change of [dark, still]) change.addEventListener("change", () => { showRequests(); showMap(); });
$("map-card").addEventListener("toggle", drawSoon);
const head = document.querySelector("header");
new ResizeObserver(() => document.body.style.setProperty("--head", `${head.offsetHeight}px`)).observe(head);
new ResizeObserver(drawSoon).observe(canvas.parentElement);
setInterval(() => { if (kinds.length) remember(); }, 2000); // so that the curve moves on
follow();
