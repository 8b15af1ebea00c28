"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const rules = data.rules;
const models = new Map(data.models.map((m) => [m.name, m]));
const cards = new Map([
  ...data.sizes.map((gb) => [`${gb}GB`, {name: `a card of ${gb} GB`, mib: gb * 1024, capability: [0, 0]}]),
  ...data.cards.map((card) => [card.name, card]),
]);

// ---- arithmetic: hybridkv/commands/plan_estimate.py, engine/workspace.py, eviction/sizes.py and what they call

const sum = (list) => list.reduce((a, b) => a + b, 0);
const ceil = (a, b) => Math.floor((a + b - 1) / b);

function pages(stream, tokens) {
  return stream.streams * ceil(Math.floor(tokens / stream.tokens_per_entry), stream.entries_per_page);
}
function kvBytes(store, tokens, most) {
  const held = most === null ? tokens : Math.min(tokens, most);
  return sum(store.streams.map((s) => pages(s, s.evicted ? held : tokens) * s.page_bytes));
}
function queryBuffers(model, budget, bounded, slots) {
  if (budget === null) return model.evicts ? Math.min(slots, 1) : 0; // a request may bring a budget of its own
  if (bounded) return slots;
  return Math.min(slots, Math.max(rules.QUERY_BUFFERS, Math.floor(rules.STEP / (budget + rules.WINDOW + 1)) + 2));
}
function scratchBytes(rows, width, k) {
  if (!rows || !k) return 0;
  let kept = 1;
  while (kept < k) kept *= 2;
  let ratio = rules.RATIO;
  if (k <= rules.LOOSE) kept = Math.max(rules.KEPT, 2 * kept);
  else ratio = Math.min(rules.WIDE_RATIO, Math.floor(rules.MAX_CHOICES / kept));
  let levels = 0;
  while (ceil(width, ratio ** levels) > kept * ratio) levels++;
  if (!levels) return 0;
  const tile = Math.max(rules.TILE, ratio ** (levels + 1)), tiles = ceil(width, tile);
  let groups = 0;
  for (let i = 1; i <= levels; i++) groups += tiles * Math.floor(tile / ratio ** i);
  return 4 * rows * (groups + kept);
}
function selectBytes(rows, length, width) {
  const result = 4 * rows * width;
  if (width <= Math.floor(rules.MAX_CHOICES / 2)) {
    const room = Math.max(1, Math.floor(rules.TEMPORARY_BYTES / Math.max(1, scratchBytes(1, length, width))));
    const block = Math.min(rows, room);
    return result + Math.max(scratchBytes(block, length, width), block < rows ? result : 0);
  }
  const each = rules.SORT_BYTES_PER_SCORE;
  const block = Math.max(1, Math.floor(rules.TEMPORARY_BYTES / (each * Math.max(1, length))));
  return result + Math.min(rows, block) * each * Math.max(length, width);
}
function evictionBytes(model, budget, context) {
  if (!model.evicts) return 0;
  const streams = model.attention_layers * model.kv_heads, width = budget === null ? context : Math.min(budget, context);
  const scores = rules.STREAM_SCORE_BYTES * streams * context;
  let heads = Math.min(rules.SCORE_BYTES, 4 * model.heads * model.attention_layers * context);
  heads = Math.max(heads, Math.floor(heads * rules.PEAK_SCORES * model.kv_heads / model.heads));
  return scores + heads + Math.max(
    selectBytes(streams, context, width),
    selectBytes(model.attention_layers, model.kv_heads * context, model.kv_heads * width),
  );
}
function workspace(model, itemsize, budget, requests, context) {
  const sizes = [];
  for (let n = 1; n <= requests; n *= 2) sizes.push(n);
  if (sizes.at(-1) !== requests) sizes.push(requests);
  const kept = sum(sizes) + sum(sizes.filter((n) => n <= rules.FEW_ROWS));
  const block = Math.max(1, Math.floor(rules.BLOCK_BYTES / (model.vocab * rules.LOGIT_BYTES)));
  const temporary = Math.max(Math.min(requests, block) * rules.LOGIT_BYTES, rules.PROMPT_ROWS * rules.PROMPT_LOGIT_BYTES);
  const row = rules.ROW_BYTES + 8 * model.vocab + 4 * Math.ceil(model.vocab / 32);
  const index = model.compressed ? Math.min(rules.INDEX_SCORE_BYTES, 4 * rules.STEP * context) : 0;
  return (requests + kept) * model.vocab * itemsize + model.vocab * temporary + requests * row
    + evictionBytes(model, budget, context) + index;
}
const below = (capability, least) => capability[0] > 0
  && (capability[0] < least[0] || capability[0] === least[0] && capability[1] < least[1]);
function lacks(card, [words, least]) { // why a card does not have what needs a compute capability, or null
  return below(card.capability, least) ? `${words} compute capability ${least.join(".")}, the ${card.name} has ${card.capability.join(".")}` : null;
}
function weightsOn(c) { // the weights as the engine holds them on the card
  const asked = c.model.weights[c.weights], why = lacks(c.card, asked.needs);
  return why === null ? asked : {...c.model.weights.bf16, why, asked_bytes: asked.asked_bytes};
}
const refused = (c) => c.kv === "fp8" ? lacks(c.card, data.kv_needs) : null;
function need(c, requests, context) {
  const model = c.model, weights = weightsOn(c), store = model.stores[weights.dtype][c.kv];
  const held = kvBytes(store, context, c.budget);
  const peak = kvBytes(store, context, c.bounded && c.budget !== null ? c.budget + rules.STEP : null);
  const lent = queryBuffers(model, c.budget, c.bounded, requests) * store.buffer;
  const found = {
    pages: (requests - 1) * held + peak,
    state: requests * store.slot + lent,
    tables: requests * sum(store.streams.map((s) => pages(s, context))) * rules.TABLE_BYTES,
    workspace: workspace(model, weights.itemsize, c.budget, requests, context),
    staging: rules.STAGING,
  };
  found.all = found.pages + found.state + found.tables + found.workspace + found.staging;
  return found;
}
function withCheckpoints(c, found) { // as many as LLM takes: fewer where not all that is asked for fits beside them
  const slot = c.model.stores[weightsOn(c).dtype][c.kv].slot, can = slot && c.model.stores[weightsOn(c).dtype][c.kv].columns;
  let rows = can ? Math.min(rules.CHECKPOINTS, Math.floor(Math.floor(usable(c.card) / rules.CHECKPOINT_SHARE) / slot)) : 0;
  while (rows && found.all + rows * slot > room(c)) rows = Math.floor(rows / 2);
  return {...found, rows, checkpoints: rows * slot, all: found.all + rows * slot};
}
function hostHolds(c, kv, tokens) { // conversations of so many tokens kept
  const store = c.model.stores[weightsOn(c).dtype][kv];
  const blocks = ceil(store.slot, rules.HOST_BLOCK) + ceil(kvBytes(store, tokens, null), rules.HOST_BLOCK);
  return Math.floor((rules.HOST / rules.HOST_BLOCK - 1) / blocks);
}
function mostThatFits(needed, room, limit) {
  let low = 0, high = limit;
  while (low < high) {
    const middle = Math.floor((low + high + 1) / 2);
    if (needed(middle) <= room) low = middle;
    else high = middle - 1;
  }
  return low;
}
const usable = (card) => Math.floor(Math.max(card.mib * rules.MIB - rules.CONTEXT, 0) * rules.HEADROOM);
const room = (c) => usable(c.card) - weightsOn(c).bytes;
const longestContext = (c) => refused(c) ? 0 : mostThatFits((n) => need(c, c.requests, n).all, room(c), c.model.max_context);
const mostRequests = (c) => refused(c) ? 0 : mostThatFits((n) => need(c, n, c.context).all, room(c), rules.MOST_REQUESTS);

// ---- words

function size(n) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(n) < 1024) return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return n < 1024 ? `${n.toFixed(1)} GiB` : `${(n / 1024).toFixed(1)} TiB`;
}
const number = (n) => n.toLocaleString("en").replaceAll(",", "\u202f");
const short = (n) => n >= 1024 && n % 1024 === 0 ? (n % 1048576 === 0 ? `${n / 1048576}M` : `${n / 1024}k`) : String(n);
function read(text) {
  const match = /^\s*(\d{1,9})\s*([km]?)\s*$/i.exec(text.replaceAll(/[\u202f,_]/g, ""));
  return match ? Number(match[1]) * {"": 1, k: 1024, m: 1048576}[match[2].toLowerCase()] : NaN;
}
function element(tag, text, more = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(more)) made.setAttribute(name, value);
  return made;
}

// ---- what is chosen

const steps = (most) => {
  const found = [];
  for (let n = 1; n <= most; n *= 2) found.push(n, ...(n > 1 && n * 1.5 < most ? [n * 1.5] : []));
  if (found.at(-1) !== most) found.push(most);
  return found;
};
const contextSteps = (model) => steps(model.max_context).filter((n) => n >= Math.min(512, model.max_context));
const requestSteps = steps(rules.MOST_REQUESTS);
const nearest = (list, n) => list.reduce((best, x, i) => Math.abs(Math.log(x / n)) < Math.abs(Math.log(list[best] / n)) ? i : best, 0);
const first = models.get(data.first.model);
const chosen = {
  model: first, card: cards.get("RTX 4090"), cardName: "RTX 4090", weights: data.first.weights, kv: "bf16",
  context: Math.min(32768, first.max_context), requests: 1, budget: null, bounded: false,
};

function choose(changes) {
  Object.assign(chosen, changes);
  const c = chosen;
  if (!Object.hasOwn(c.model.weights, c.weights)) c.weights = "bf16";
  c.context = Math.max(1, Math.min(c.context, c.model.max_context));
  c.requests = Math.max(1, Math.min(c.requests, rules.MOST_REQUESTS));
  if (!c.model.evicts) c.budget = null;
  if (c.budget === null) c.bounded = false;
  show();
}
function address() {
  const c = chosen;
  const found = new URLSearchParams({
    model: c.model.name, card: c.cardName, weights: c.weights, kv: c.kv, context: c.context, requests: c.requests,
  });
  if (c.budget !== null) found.set("budget", c.budget);
  if (c.bounded) found.set("bounded", "1");
  return `#${found}`;
}
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), changes = {};
  if (models.has(given.get("model"))) changes.model = models.get(given.get("model"));
  if (cards.has(given.get("card"))) Object.assign(changes, {card: cards.get(given.get("card")), cardName: given.get("card")});
  if (Object.hasOwn(data.forms, given.get("weights"))) changes.weights = given.get("weights");
  if (data.kv.includes(given.get("kv"))) changes.kv = given.get("kv");
  for (const name of ["context", "requests"]) {
    const n = read(given.get(name) ?? "");
    if (n >= 1) changes[name] = n;
  }
  if (given.size) {
    const budget = read(given.get("budget") ?? "");
    Object.assign(changes, {budget: budget >= rules.WINDOW ? budget : null, bounded: given.get("bounded") === "1"});
  }
  return changes;
}

// ---- what is shown

function show() {
  const c = chosen, weights = weightsOn(c), found = withCheckpoints(c, need(c, c.requests, c.context)), why = refused(c);
  const total = weights.bytes + found.all, has = usable(c.card), whole = c.card.mib * rules.MIB;
  const fits = why === null && total <= has, kept = weights.why ? `kept in ${weights.label} (${weights.why})` : "";
  showControls(c);
  const one = c.requests === 1;
  const what = `${one ? "One request" : `${number(c.requests)} requests`} of ${number(c.context)} tokens`
    + (kept ? ` with weights ${kept}` : "");
  $("verdict").className = fits ? "yes" : "no";
  $("verdict").textContent = why !== null ? `Not possible: ${why}.`
    : weights.bytes >= has ? `The weights alone${kept ? `, ${kept},` : ""} take ${size(weights.bytes)} of ${size(has)}.`
    : fits ? `${what} ${one ? "takes" : "take"} ${size(total)}; ${size(has - total)} are left.`
    : `${what} ${one ? "takes" : "take"} ${size(total)}, ${size(total - has)} more than there is.`;
  const parts = [
    ["weights", `Weights, ${weights.why ? weights.label : data.forms[c.weights]}`, weights.bytes], ["pages", `KV cache, ${c.kv}`, found.pages],
    ["state", "State of requests", found.state],
    ["checkpoints", found.rows ? `Checkpoints, ${found.rows} x ${size(found.checkpoints / found.rows)}` : "Checkpoints", found.checkpoints],
    ["tables", "Page tables", found.tables], ["workspace", "Workspace", found.workspace],
    ["staging", "Reuse staging", found.staging],
    ["reserve", "Reserve", whole - has],
  ];
  showBar(parts, total + whole - has, whole);
  const rows = parts.map(([name, label, bytes]) => partRow(name, label, bytes, whole));
  const last = element("tr", undefined, {class: "sum"});
  const head = element("th", "Total, of ", {scope: "row"});
  head.append(element("span", size(has), {id: "usable", "data-value": has}), " without reserve");
  last.append(head, element("td", size(total), {id: "total", "data-value": total}), element("td", `${(100 * total / whole).toFixed(1)} %`));
  $("parts").tBodies[0].replaceChildren(...rows, last);
  $("note").textContent = notes(c).join(" ");
  showHost(c);
  showTiles(c, weights, found);
  showForms(c);
  $("command").textContent = command(c);
  history.replaceState(null, "", address());
}
function partRow(name, label, bytes, whole) {
  const row = element("tr"), head = element("th", undefined, {scope: "row"});
  head.append(element("span", undefined, {class: `swatch ${name}`, "aria-hidden": "true"}), label);
  row.append(head, element("td", size(bytes), {id: `part-${name}`, "data-value": bytes}), element("td", `${(100 * bytes / whole).toFixed(1)} %`));
  return row;
}
function showBar(parts, taken, whole) {
  const scale = Math.max(taken, whole), bar = $("bar");
  bar.replaceChildren(...parts.map(([name, label, bytes]) => {
    const made = element("div", undefined, {class: `part ${name}`, title: `${label}: ${size(bytes)}`});
    made.style.width = `${100 * bytes / scale}%`;
    return made;
  }));
  const limit = element("div", undefined, {class: whole / scale < 0.3 ? "limit early" : "limit"});
  limit.style.left = `min(${100 * whole / scale}%, 100% - 1px)`;
  limit.append(element("span", `${chosen.card.name}, ${size(whole)}`));
  bar.append(limit);
  bar.setAttribute("aria-label", parts.map(([, label, bytes]) => `${label} ${size(bytes)}`).join(", ") + `, of ${size(whole)}`);
}
function notes(c) {
  const weights = weightsOn(c), asked = c.weights === "file" ? "the file's formats" : data.forms[c.weights];
  return weights.why ? [`In ${asked} the weights would take ${size(weights.asked_bytes)}.`] : [];
}
function showHost(c) {
  const whole = hostHolds(c, c.kv, c.context), kept = c.budget ?? data.budget, cut = hostHolds(c, c.kv, Math.min(kept, c.context));
  const value = (id, n) => element("span", number(n), {id, "data-value": n});
  const line = $("host");
  line.replaceChildren(`${size(rules.HOST)} of host memory hold `, value("host-whole", whole),
    ` conversation${whole === 1 ? "" : "s"} of ${number(c.context)} tokens while they wait for a next turn`);
  if (c.model.evicts && kept < c.context) line.append(", or ", value("host-kept", cut), ` of ${number(kept)} kept`);
  line.append(".");
}
function showTiles(c, weights, found) {
  const longest = longestContext(c), most = mostRequests(c);
  const tile = (id, name, value, text, about) => {
    const box = element("div"), list = element("dl");
    list.style.margin = 0;
    list.append(element("dt", name), element("dd", text, {id, "data-value": value}));
    box.append(list, element("p", about));
    return box;
  };
  const each = found.pages + found.state + found.tables;
  $("tiles").replaceChildren(
    tile("longest", "Longest context", longest, number(longest), c.requests === 1 ? "of one request" : `of each of ${number(c.requests)} requests`),
    tile("most", "Most requests", most, number(most), `of ${number(c.context)} tokens`),
    tile("cache", "Cache", each, size(each), "pages, state, page tables"),
    tile("room", "For the cache", Math.max(room(c), 0), size(Math.max(room(c), 0)), "what the weights leave"),
  );
}
function showForms(c) {
  const body = [], table = $("forms");
  $("forms-title").textContent = c.requests === 1 ? "Longest context by weights and KV cache"
    : `Longest context of ${number(c.requests)} requests by weights and KV cache`;
  const head = element("tr");
  head.append(element("th", "weights", {scope: "col"}), element("th", "bytes", {scope: "col", class: "size"}),
    ...data.kv.map((kv) => element("th", `KV ${kv}`, {scope: "col"})));
  table.tHead.replaceChildren(head);
  const focus = document.activeElement?.dataset?.cell;
  for (const form of Object.keys(c.model.weights)) {
    const row = element("tr"), weights = weightsOn({...c, weights: form});
    row.append(element("th", data.forms[form], {scope: "row"}), element("td", size(weights.bytes), {class: "size"}));
    for (const kv of data.kv) {
      const longest = longestContext({...c, weights: form, kv}), cell = element("td", undefined, longest ? {} : {class: "none"});
      const button = element("button", longest ? number(longest) : "no", {
        type: "button", "aria-pressed": form === c.weights && kv === c.kv, "data-cell": `${form} ${kv}`, "data-value": longest,
        "aria-label": `${data.forms[form]} weights, KV ${kv}: ${longest ? `${longest} tokens` : refused({...c, kv}) ? "not possible" : "does not fit"}`,
      });
      button.onclick = () => choose({weights: form, kv});
      cell.append(button);
      row.append(cell);
    }
    body.push(row);
  }
  table.tBodies[0].replaceChildren(...body);
  if (focus) [...table.querySelectorAll("button")].find((button) => button.dataset.cell === focus)?.focus();
}
function command(c) {
  const quote = (text) => /^[\w.\/:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
  const words = ["hybridkv", "plan", quote(c.model.argument), "--card", quote(c.cardName)];
  if (c.weights !== "file") words.push("--weights", c.weights);
  words.push("--kv-dtype", c.kv, "--context", short(c.context));
  if (c.requests > 1) words.push("--requests", c.requests);
  if (c.budget !== null) words.push("--budget", c.budget, ...(c.bounded ? ["--bounded"] : []));
  return words.join(" ");
}

// ---- controls

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", text, {value})));
}
function showControls(c) {
  $("model").value = c.model.name;
  $("card").value = c.cardName;
  options($("weights"), Object.keys(c.model.weights).map((form) => {
    const weights = weightsOn({...c, weights: form});
    return [form, `${data.forms[form]}, ${weights.why ? `kept in ${weights.label}, ` : ""}${size(weights.bytes)}`];
  }));
  $("weights").value = c.weights;
  $("kv").value = c.kv;
  const list = contextSteps(c.model);
  $("context-slide").max = list.length - 1;
  $("context-slide").value = nearest(list, c.context);
  $("context-slide").setAttribute("aria-valuetext", `${number(c.context)} tokens`);
  $("requests-slide").value = nearest(requestSteps, c.requests);
  $("requests-slide").setAttribute("aria-valuetext", number(c.requests));
  for (const [id, value] of [["context", c.context], ["requests", c.requests]]) {
    if (document.activeElement !== $(id)) $(id).value = number(value);
    $(id).removeAttribute("aria-invalid");
  }
  $("budget-field").hidden = !c.model.evicts;
  const budgets = data.budgets.includes(c.budget) || c.budget === null ? data.budgets : [...data.budgets, c.budget];
  options($("budget"), [["", "all"], ...budgets.map((n) => [n, `${number(n)} a stream, once the prompt is read`])]);
  $("budget").value = c.budget ?? "";
  $("bounded").checked = c.bounded;
  $("bounded").disabled = c.budget === null;
}
options($("model"), data.models.map((m) => [m.name, m.name]));
const groups = [["By size", [...cards].slice(0, data.sizes.length)], ["By name", [...cards].slice(data.sizes.length)]];
for (const [label, entries] of groups) {
  const group = element("optgroup", undefined, {label});
  group.append(...entries.map(([key, card]) => element("option", label === "By size" ? key : `${key}, ${size(card.mib * rules.MIB)}`, {value: key})));
  $("card").append(group);
}
options($("kv"), data.kv.map((kv) => [kv, kv]));
$("requests-slide").max = requestSteps.length - 1;
$("model").onchange = (event) => choose({model: models.get(event.target.value)});
$("card").onchange = (event) => choose({card: cards.get(event.target.value), cardName: event.target.value});
$("weights").onchange = (event) => choose({weights: event.target.value});
$("kv").onchange = (event) => choose({kv: event.target.value});
$("budget").onchange = (event) => choose({budget: event.target.value ? Number(event.target.value) : null});
$("bounded").onchange = (event) => choose({bounded: event.target.checked});
$("context-slide").oninput = (event) => choose({context: contextSteps(chosen.model)[event.target.value]});
$("requests-slide").oninput = (event) => choose({requests: requestSteps[event.target.value]});
for (const id of ["context", "requests"]) {
  $(id).oninput = (event) => {
    const n = read(event.target.value), most = id === "context" ? chosen.model.max_context : rules.MOST_REQUESTS;
    if (n >= 1 && n <= most) choose({[id]: n});
    else event.target.setAttribute("aria-invalid", "true");
  };
  $(id).onblur = () => showControls(chosen);
}
$("controls").onsubmit = (event) => event.preventDefault();
window.onhashchange = () => choose(fromAddress());
choose(fromAddress());
