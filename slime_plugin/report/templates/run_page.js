"use strict";
// All text reaches the page as textContent. The content of a record is shown, never run.
const $ = id => document.getElementById(id);
const root = document.documentElement;
window.onerror = message => { root.dataset.error = message; };
const {runs, charts, rollouts: {rows, trees, vocabularies}} = JSON.parse($("data").textContent);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "pattern", "defs"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map(child => child instanceof Node ? child : document.createTextNode(child)));
  return node;
}
const count = number => number.toLocaleString("en");
function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "n/a";
  const size = Math.abs(value);
  if (Number.isInteger(value)) return count(value);
  if (size < 1e-3) return value.toExponential(1);
  return size >= 100 ? count(Math.round(value)) : String(+value.toPrecision(3));
}

// A tip beside the pointer, for tokens.
const tip = $("tip");
function showTip(event, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  const right = event.clientX + 16 + width < innerWidth;
  const below = event.clientY + 16 + height < innerHeight;
  tip.style.left = Math.max(4, right ? event.clientX + 14 : event.clientX - width - 14) + "px";
  tip.style.top = Math.max(4, below ? event.clientY + 14 : event.clientY - height - 14) + "px";
}

// Charts: drawn by plotly when they come into view, in the colours of the page.
const OPTIONS = {displaylogo: false, responsive: true, displayModeBar: "hover", modeBarButtons: [["toImage", "resetScale2d"]]};
function theme() {
  const style = getComputedStyle(root), css = name => style.getPropertyValue(name).trim();
  const axis = {gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"), tickcolor: css("--line"), showline: true};
  return {layout: {
    font: {family: "system-ui, sans-serif", size: 12, color: css("--soft")},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    xaxis: {...axis, ticks: "outside"}, yaxis: {...axis, showline: false},
    hoverlabel: {bgcolor: css("--page"), bordercolor: css("--line"), font: {color: css("--ink")}, namelength: -1},
    annotationdefaults: {font: {color: css("--ink")}}, shapedefaults: {line: {color: css("--ink")}},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent")},
  }};
}
const plots = [...document.querySelectorAll(".plot")];
const isDrawn = plot => plot.classList.contains("js-plotly-plot");
function draw(plot) {
  const {data, layout} = charts[plot.dataset.chart];
  Plotly.newPlot(plot, data, {...layout, template: theme()}, OPTIONS);
}
const inView = new IntersectionObserver(entries => {
  for (const {isIntersecting, target} of entries) if (isIntersecting && !isDrawn(target)) draw(target);
}, {rootMargin: "800px"});
for (const plot of plots) inView.observe(plot);
matchMedia("(prefers-color-scheme: dark)").onchange = () => {
  for (const plot of plots.filter(isDrawn)) Plotly.relayout(plot, {template: theme()});
};
window.onbeforeprint = () => { for (const plot of plots) if (!isDrawn(plot)) draw(plot); };

// The list of rollouts.
const COLUMNS = ["rollout", "run", "iteration", "reward", "status", "edits", "sampled"];
const FIELDS = {run: 0, iteration: 1, rollout: 2, reward: 3, status: 4, edits: 5, sampled: 6};
const TREE = 7, PAGE = 20;
const several = runs.length > 1;
const columns = COLUMNS.filter(name => name !== "run" || several);
const view = {sort: null, down: false, page: 0};
const address = row => `#rollout=${encodeURIComponent(row[2])}` + (several ? `&run=${encodeURIComponent(runs[row[0]])}` : "");

function matching() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const run = $("run").value, iteration = $("iteration").value;
  const found = rows.filter(row =>
    (run === "" || row[0] === +run) && (iteration === "" || row[1] === +iteration) &&
    (!$("edited").checked || row[5] > 0) && (!$("embedded").checked || row[TREE] >= 0) &&
    words.every(word => row[2].toLowerCase().includes(word) || row[4].toLowerCase().includes(word)));
  if (view.sort === null) return found;
  const at = FIELDS[view.sort], sign = view.down ? -1 : 1;
  const order = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1 :
    sign * (typeof a === "string" ? a.localeCompare(b, "en", {numeric: true}) : a - b);
  return found.sort((a, b) => order(a[at], b[at]));
}
function list() {
  const found = matching(), pages = Math.max(1, Math.ceil(found.length / PAGE));
  view.page = Math.min(view.page, pages - 1);
  const part = found.slice(view.page * PAGE, (view.page + 1) * PAGE);
  $("list").tHead.replaceChildren(make("tr", {}, ...columns.map(name => {
    const sign = view.sort === name ? (view.down ? " ↓" : " ↑") : "";
    const button = make("button", {type: "button"}, name + sign);
    button.onclick = () => {
      view.down = view.sort === name && !view.down;
      view.sort = name;
      list();
    };
    return make("th", {}, button);
  })));
  $("list").tBodies[0].replaceChildren(...part.map(row => {
    const line = make("tr", {}, ...columns.map(name => {
      const value = row[FIELDS[name]];
      if (name === "rollout" && row[TREE] >= 0) return make("td", {}, make("a", {href: address(row)}, value));
      return make("td", {}, name === "run" ? runs[value] : typeof value === "string" ? value : shown(value));
    }));
    if (row[TREE] >= 0) {
      line.className = "has";
      line.onclick = () => { location.hash = address(row); };
    }
    return line;
  }));
  $("where").textContent = found.length
    ? `${count(view.page * PAGE + 1)} to ${count(view.page * PAGE + part.length)} of ${count(found.length)}` : "none";
  $("earlier").disabled = view.page === 0;
  $("later").disabled = view.page === pages - 1;
}
function choices(select, every, values, name) {
  select.replaceChildren(make("option", {value: ""}, every), ...values.map(value => make("option", {value}, name(value))));
}
choices($("run"), "all runs", [...runs.keys()], index => runs[index]);
$("run").hidden = !several;
choices($("iteration"), "all iterations", [...new Set(rows.map(row => row[1]))].sort((a, b) => a - b), i => `iteration ${i}`);
for (const id of ["find", "run", "iteration", "edited", "embedded"]) $(id).oninput = () => { view.page = 0; list(); };
$("filters").onsubmit = event => event.preventDefault();
$("earlier").onclick = () => { view.page--; list(); };
$("later").onclick = () => { view.page++; list(); };

// The tree of one rollout.
const ROLES = ["", "context", "prompt", "sampled", "restored", "evicted", "sampled evicted"];
const MEANINGS = ["", "context", "prompt", "sampled here", "restored", "evicted next", "sampled, evicted next"];
const FAINTEST = -6, DECADES = 6;  // 1e-6 nats is where colour begins, 1 nat where it is full
const heat = delta => Math.max(0, Math.min(1, (Math.log10(Math.abs(delta)) - FAINTEST) / DECADES));
const colour = delta => `color-mix(in srgb, var(--${delta < 0 ? "lower" : "higher"}) ${Math.round(85 * heat(delta))}%, transparent)`;
const sampledHere = role => role === 3 || role === 6;
const shownNow = {tree: null, method: null, layer: 0};

function flags(length, spans) {
  const found = new Uint8Array(length);
  for (const [start, stop] of spans) found.fill(1, start, stop);
  return found;
}
function unpack(tree) {  // once per tree
  if (tree.size) return tree;
  tree.size = tree.tokens.length;
  tree.rollout = new Float64Array(tree.size).fill(NaN);
  let next = 0;
  for (const [start, stop] of tree.generated) for (let p = start; p < stop; p++) tree.rollout[p] = tree.logprobs[next++];
  for (const method of Object.values(tree.methods)) {
    method.isTrained = flags(tree.size, method.trained);
    method.isOff = flags(tree.size, method.off);
    method.number = method.isTrained.reduce((sum, flag) => sum + flag, 0);
    method.offNumber = method.isOff.reduce((sum, flag) => sum + flag, 0);
    if (!method.delta) continue;
    method.at = new Float64Array(tree.size).fill(NaN);
    let i = 0;
    for (let p = 0; p < tree.size; p++) if (method.isTrained[p]) method.at[p] = method.delta[i++] ?? NaN;
  }
  for (const layer of tree.layers) {
    layer.role = new Uint8Array(tree.size);
    for (let i = 0; i < layer.roles.length; i += 3)
      layer.role.fill(layer.roles[i + 2], layer.roles[i], layer.roles[i] + layer.roles[i + 1]);
  }
  return tree;
}
function piece(tree, p) {
  const id = tree.tokens[p];
  return tree.pieces ? tree.pieces[p] : vocabularies[tree.run][id];
}
function logdiff(tree, method, keep = () => true) {  // mean and largest distance, of tokens to keep
  let sum = 0, number = 0, most = null;
  if (method.at) for (let p = 0; p < tree.size; p++) if (!Number.isNaN(method.at[p]) && keep(p)) {
    const distance = Math.abs(method.at[p]);
    sum += distance; number++; most = Math.max(most, distance);
  }
  return {mean: number ? sum / number : null, most};
}
function tokenTip(tree, p, role) {
  const method = tree.methods[shownNow.method], text = piece(tree, p);
  const lines = [make("b", {}, text === undefined ? `id ${tree.tokens[p]}` : JSON.stringify(text)),
    make("div", {}, `tape ${p}, id ${tree.tokens[p]}: ${MEANINGS[role]}`)];
  if (!Number.isNaN(tree.rollout[p])) {
    lines.push(make("div", {}, `rollout log p ${shown(tree.rollout[p])}`));
    if (method.at && method.isTrained[p])
      lines.push(make("div", {}, `logdiff ${shown(method.at[p])} (${shownNow.method})`));
    lines.push(make("div", {}, method.isOff[p] ? "trained in another context than its own"
      : method.isTrained[p] ? "trained in its own context" : `not trained by ${shownNow.method}`));
  }
  return lines;
}
function strip(tree, layer) {
  const percent = p => 100 * p / tree.size + "%";
  const method = tree.methods[shownNow.method];
  const svg = make("svg", {role: "img", "aria-label": "live context"});
  for (let i = 0; i < layer.roles.length; i += 3) {
    const [start, length, role] = layer.roles.slice(i, i + 3);
    const box = {x: percent(start), width: percent(length)};
    svg.append(make("rect", {...box, class: ROLES[role], y: 1, height: 18}));
    if (sampledHere(role)) svg.append(make("rect", {...box, class: "own", y: 21, height: 8}));
  }
  for (let p = 0; p < tree.size; p++) {
    if (!sampledHere(layer.role[p])) continue;
    const box = {x: percent(p), width: percent(1), y: 21, height: 8};
    if (!method.isTrained[p]) svg.append(make("rect", {...box, class: "lost"}));
    else if (method.at) svg.append(make("rect", {...box, class: "heat", style: `fill:${colour(method.at[p])}`}));
    else svg.append(make("rect", {...box, class: "sampled"}));
  }
  svg.onpointermove = event => {
    const frame = svg.getBoundingClientRect();
    const p = Math.min(tree.size - 1, Math.max(0, Math.floor((event.clientX - frame.left) / frame.width * tree.size)));
    if (layer.role[p]) showTip(event, ...tokenTip(tree, p, layer.role[p])); else tip.hidden = true;
  };
  svg.onpointerleave = () => { tip.hidden = true; };
  return svg;
}
function drawStrips(tree) {
  const method = tree.methods[shownNow.method];
  const pattern = make("svg", {width: 0, height: 0, style: "position:absolute"}, make("defs", {},
    make("pattern", {id: "untrained", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"},
      make("rect", {width: 1.6, height: 4, style: "fill:var(--evicted-line)"}))));
  $("strips").replaceChildren(pattern, ...tree.layers.flatMap((layer, k) => {
    const {mean} = logdiff(tree, method, p => sampledHere(layer.role[p]));
    const description = make("div", {class: "description"}, make("b", {}, `layer ${k}`), ` ${layer.description}`,
      mean === null ? "" : `, mean |logdiff| ${shown(mean)}`);
    const block = make("div", {class: k === shownNow.layer ? "strip chosen" : "strip"}, description, strip(tree, layer));
    block.onclick = () => { shownNow.layer = k; drawStrips(tree); drawTokens(tree); };
    return layer.edit ? [block, make("div", {class: "edit"}, `edit ${k}: ${layer.edit}`)] : [block];
  }));
}
function drawTokens(tree) {
  const layer = tree.layers[shownNow.layer], method = tree.methods[shownNow.method];
  $("text-title").textContent = `Layer ${shownNow.layer}, as the policy saw it`;
  $("text-note").textContent = `${layer.description}, in the order of the live context. Underlined is what was sampled here.`;
  $("tokens").replaceChildren(...layer.view.flatMap(([start, stop]) => {
    const found = [];
    for (let p = start; p < stop; p++) {
      const role = layer.role[p], here = sampledHere(role), text = piece(tree, p);
      const names = [here && "sampled", text === undefined && "id", (role === 5 || role === 6) && "gone", role === 4 && "back",
        here && (method.isOff[p] ? "off" : method.isTrained[p] ? "trained" : "lost")];
      const token = make("span", {class: names.filter(Boolean).join(" "), "data-p": p},
        text === undefined ? tree.tokens[p] : text.replace(/\n/g, "⏎\n"));
      if (here && method.at && method.isTrained[p]) token.style.background = colour(method.at[p]);
      found.push(token);
    }
    return found;
  }));
}
$("tokens").onpointermove = event => {
  const p = event.target.dataset?.p;
  if (p === undefined) tip.hidden = true;
  else showTip(event, ...tokenTip(shownNow.tree, +p, shownNow.tree.layers[shownNow.layer].role[p]));
};
$("tokens").onpointerleave = () => { tip.hidden = true; };
function drawMethods(tree) {
  const heads = ["method", "mean |logdiff|", "largest", "trained", "off context", "tokens", "without gradient", "not trained"];
  $("methods").tHead.replaceChildren(make("tr", {}, ...heads.map(head => make("th", {}, head))));
  $("methods").tBodies[0].replaceChildren(...Object.entries(tree.methods).map(([key, method]) => {
    const {mean, most} = logdiff(tree, method);
    const lost = Object.entries(method.lost).map(([cause, number]) => `${number} ${cause}`).join(", ") || "none";
    const cells = [key, shown(mean), shown(most), `${method.number} of ${tree.counts.R}`, method.offNumber, method.tokens,
      method.teacher_tokens, lost];
    const line = make("tr", {class: key === shownNow.method ? "has chosen" : "has"}, ...cells.map(cell => make("td", {}, cell)));
    line.onclick = () => { $("method").value = key; $("method").oninput(); };
    return line;
  }));
}
function drawScale(tree) {
  if (!tree.methods[shownNow.method].at) {
    $("scale").textContent = "not scored: memorywalker compare measures the logdiff";
    return;
  }
  const steps = [];
  for (const sign of [-1, 1]) for (let e = 0; e <= DECADES; e++)
    steps.push([sign < 0 ? DECADES - e : e, sign]);
  const boxes = steps.map(([e, sign]) => make("i", {style: `background:${colour(sign * 10 ** (FAINTEST + e))}`}));
  $("scale").replaceChildren("logdiff: -1 nat", make("span", {class: "steps"}, ...boxes), "+1 nat; no colour: 1e-6 and less");
}
function drawAll(tree) {
  drawStrips(tree); drawTokens(tree); drawMethods(tree); drawScale(tree);
}
$("method").oninput = () => { shownNow.method = $("method").value; drawAll(shownNow.tree); };
$("zoom").oninput = () => {
  const frame = $("strips").parentElement, centre = (frame.scrollLeft + frame.clientWidth / 2) / frame.scrollWidth;
  $("strips").style.width = 100 * 2 ** $("zoom").value + "%";
  frame.scrollLeft = centre * frame.scrollWidth - frame.clientWidth / 2;
};
function openTree(row) {
  const tree = shownNow.tree = unpack(trees[row[TREE]]);
  const methods = Object.keys(tree.methods), scored = methods.filter(key => tree.methods[key].delta);
  if (!methods.includes(shownNow.method)) shownNow.method = scored[0] ?? methods[0];
  shownNow.layer = 0;
  $("method").replaceChildren(...methods.map(key =>
    make("option", {value: key}, scored.includes(key) || !scored.length ? key : `${key} (not scored)`)));
  $("method").value = shownNow.method;
  const facts = {run: runs[tree.run], iteration: tree.iteration, ...tree.meta, "edits K": tree.counts.K,
    "diverging leaves D": tree.counts.D, "tape L": tree.counts.L, "final context C": tree.counts.C, "sampled R": tree.counts.R};
  delete facts.id;
  $("tree-facts").replaceChildren(...Object.entries(facts).map(([key, value]) =>
    make("span", {}, make("b", {}, key), ` ${typeof value === "number" ? shown(value) : value}`)));
  drawAll(tree);
}
function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const open = wanted.has("rollout");
  $("top").hidden = open;
  $("tree").hidden = !open;
  tip.hidden = true;
  if (!open) {
    if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
    return;
  }
  const at = rows.findIndex(row => row[2] === wanted.get("rollout") && (!wanted.has("run") || runs[row[0]] === wanted.get("run")));
  const row = rows[at];
  if (wanted.has("method")) shownNow.method = wanted.get("method");
  $("tree-title").textContent = `Rollout ${wanted.get("rollout")}`;
  $("tree-body").hidden = $("tree-facts").hidden = !row || row[TREE] < 0;
  $("tree-missing").hidden = row && row[TREE] >= 0;
  $("tree-missing").textContent = row
    ? "This page lists the rollout without its tree; memorywalker record show FILE --record ID --html PAGE draws it."
    : "There is no such rollout in this page.";
  if (row && row[TREE] >= 0) openTree(row);
  for (const [id, step] of [["before", -1], ["after", 1]]) {
    let other = at + step;
    while (rows[other] && rows[other][TREE] < 0) other += step;
    $(id).disabled = at < 0 || !rows[other];
    $(id).onclick = () => { location.hash = address(rows[other]); };
  }
  scrollTo(0, 0);
}
window.onhashchange = follow;
list();
follow();
root.dataset.ready = "yes";
