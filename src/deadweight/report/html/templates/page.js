// The behaviour of a report. Everything here also works with the keyboard; nothing is fetched.
"use strict";

const byId = (id) => document.getElementById(id);
const PAGE = 100; // rows added to the table at a time
const OWN = "\u0000", NEXT = "\u0001"; // in proofs: the number of the finding's block, and of the next one

// An element with attributes and children. Texts become text nodes, so no name can become markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

const count = (n) => n.toLocaleString("en-US");
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

function percent(part, whole) {
  const share = (100 * part) / whole;
  if (part === 0 || whole === 0) return "0 %";
  if (share < 0.001) return "<0.001 %";
  const decimals = [10, 1, 0.1, 0.01].findIndex((least) => share >= least);
  return `${share.toFixed(decimals < 0 ? 4 : decimals)} %`;
}

function badge(verdict) {
  const letter = make("span", { "aria-hidden": "true" }, verdict[0].toUpperCase());
  return make("span", { class: `badge ${verdict}`, title: verdict }, letter, make("span", { class: "hidden" }, verdict));
}

// --- every page: theme, copy buttons, printing -----------------------------------------------------------------------

byId("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.body.dataset.theme || (dark ? "dark" : "light");
  document.body.dataset.theme = now === "dark" ? "light" : "dark";
});

async function copy(text, button) {
  const label = button.dataset.label || button.textContent;
  button.dataset.label = label;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select and copy";
  }
  setTimeout(() => (button.textContent = label), 1600);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button) copy(button.dataset.copy, button);
});

// --- the findings of an audit ----------------------------------------------------------------------------------------

const report = { strings: [], walks: [], rows: [], parameters: 1, shown: [], limit: PAGE, open: null };

async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// A finding is stored as a list; give its parts names.
function readFinding(row, list) {
  const [name, dof, elements, evidence, unreplayed, block, walk, address, line] = list;
  return { row, name, dof, elements, evidence, unreplayed, block, walk, address, line };
}

// Words of the filter: a law's code, a verdict, or a part of a name in which * stands for a number.
function matcher(query) {
  const tests = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    if (["dead", "folds", "gauge"].includes(word)) return (row) => row.verdict === word;
    if (/^dw\d+$/.test(word)) return (row) => row.code.toLowerCase() === word;
    const escaped = word.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replaceAll("*", "\\d+");
    const pattern = new RegExp(escaped);
    return (row) => pattern.test(row.law) || row.names.some((name) => pattern.test(name));
  });
  return (row) => tests.every((test) => test(row));
}

const ORDERS = {
  "": () => 0,
  dof: (a, b) => b.dof - a.dof,
  where: (a, b) => (a.where < b.where ? -1 : a.where > b.where ? 1 : 0),
};

function showRows() {
  const query = byId("query").value;
  report.shown = report.rows.filter(matcher(query)).sort(ORDERS[byId("order").value]);
  const body = byId("table").tBodies[0];
  body.replaceChildren(...report.shown.slice(0, report.limit).map(drawRow));
  const hidden = report.shown.length - Math.min(report.limit, report.shown.length);
  byId("more").hidden = hidden === 0;
  byId("more").textContent = `Show ${count(Math.min(PAGE, hidden))} more of ${count(hidden)}`;
  const findings = report.shown.reduce((sum, row) => sum + row.n, 0);
  const dof = report.shown.reduce((sum, row) => sum + row.dof, 0);
  byId("shown").textContent =
    `${plural(findings, "finding")} in ${plural(report.shown.length, "row")}, ${plural(dof, "dimension")}`;
  const words = query.toLowerCase().split(/\s+/);
  for (const toggle of document.querySelectorAll(".toggle"))
    toggle.setAttribute("aria-pressed", String(words.includes(toggle.dataset.word)));
}

function drawRow(row) {
  const into = row.into.length === 0 ? null : make("span", { class: "into dim" },
    row.verdict === "gauge" ? "with " : "into ", make("span", { class: "name" }, row.into[0]),
    row.into.length > 1 ? ` and ${row.into.length - 1} more` : "");
  const link = make("a", { class: "open name", href: hashOf(row.findings[0]) }, row.where);
  return make("tr", {},
    make("td", { class: "law" }, make("b", {}, row.code), ` ${row.law}`),
    make("td", { class: "where" }, link, into),
    make("td", { class: "verdict" }, badge(row.verdict), ` ${row.verdict} `, make("span", { class: "dim" }, row.tier)),
    make("td", { class: "num" }, count(row.dof)),
    make("td", { class: "num" }, percent(row.dof, report.parameters)));
}

// --- one finding -----------------------------------------------------------------------------------------------------

const hashOf = (finding) => `#finding=${encodeURIComponent(finding.address)}`;

function openFinding(finding) {
  report.open = finding;
  const { row } = finding;
  byId("sheet-body").replaceChildren(...[
    make("p", { class: "dim" }, badge(row.verdict), ` ${row.verdict} · ${row.code} ${row.law}`),
    make("h2", { id: "sheet-title", tabindex: "-1" }, finding.name),
    lawSummary(row.code),
    drawFacts(finding),
    row.note ? make("p", {}, make("b", {}, "Condition: "), row.note) : null,
    partners(row),
    ...drawRemedy(row.remedy),
    make("h3", {}, "The proof, step by step"),
    ...drawProof(finding),
    ...drawMembers(finding),
  ].filter((part) => part !== null));
  byId("permalink").href = hashOf(finding);
  if (!byId("sheet").open) byId("sheet").showModal();
  byId("sheet").scrollTop = 0;
  byId("sheet-title").focus();
  drawEdges();
}

function lawSummary(code) {
  const page = byId(code);
  const first = page && page.querySelector(".prose p");
  if (!first) return null;
  const more = make("details", { class: "law-page" }, make("summary", {}, `All of ${code}: why it holds, and when it fails`));
  more.append(page.querySelector(".prose").cloneNode(true));
  return make("div", {}, make("p", {}, first.textContent), more);
}

const TIERS = {
  bitwise: "the same bits",
  real: "the same over the real numbers, only rounding differs",
  epsilon: "the same if the norm's ε were 0",
  mode: "only in eval, or only in training",
};

function drawFacts(finding) {
  const evidence = finding.evidence
    ? `changes the output ${finding.evidence} times as much as a random change of all parameters`
    : "not measured";
  const facts = [
    ["redundant dimensions", `${count(finding.dof)} of ${plural(finding.elements, "number")}`],
    ["exact", `${finding.row.tier}: ${TIERS[finding.row.tier] || ""}`],
    ["evidence in float64", evidence],
  ];
  if (finding.unreplayed) facts.push(["not replayed by the checker", plural(finding.unreplayed, "step")]);
  if (finding.line) facts.push(["line of code", finding.line]);
  const parts = facts.map(([label, value]) => make("div", {}, make("dt", {}, label), make("dd", {}, value)));
  return make("dl", { class: "facts" }, ...parts);
}

function partners(row) {
  if (row.into.length === 0) return null;
  const label = row.verdict === "gauge" ? "Changes together with" : "Taken over by";
  const items = row.into.map((name) => make("li", { class: "name" }, name));
  return make("div", {}, make("h3", {}, label), make("ul", {}, ...items));
}

function drawRemedy(remedy) {
  const parts = [make("h3", {}, "What to do")];
  if (remedy.in_code) parts.push(make("p", { class: "advice" }, remedy.in_code.replaceAll("`", "")));
  parts.push(make("p", {}, remedy.by_reduce));
  if (remedy.command) {
    const button = make("button", { type: "button", class: "quiet copy", "data-copy": remedy.command }, "Copy");
    parts.push(make("p", {}, `Saves ${remedy.saves_text}, over all parameters of this row.`));
    parts.push(make("div", { class: "command" }, make("code", {}, remedy.command), button));
  }
  return parts;
}

const LANE = 14; // pixels between two lanes
const KEY = "A change begins at a filled dot, follows the lines through the operations that read it, and ends at a green dot. " +
  "Shifted: changed by an unknown amount. Turned alike: multiplied by the same matrix. Scaled: multiplied by the same number.";

// The steps of a proof with the part of the graph beside them, drawn like the history of a repository.
function drawProof(finding) {
  if (finding.walk < 0) return [make("p", { class: "dim" }, "Left out to keep this file small: --json FILE has it.")];
  const text = (i) => report.strings[i].replaceAll(OWN, finding.block).replaceAll(NEXT, finding.block + 1);
  const steps = report.walks[finding.walk].map(([op, node, rule, then, reads, parameters]) =>
    ({ op: text(op), node: text(node), rule: text(rule), then: text(then), reads, parameters: parameters.map(text) }));
  if (steps.length === 0) return [make("p", { class: "dim" }, "No proof: this was only measured.")];
  const lanes = assignLanes(steps);
  const list = make("ol", { class: "proof", style: `padding-left: ${24 + LANE * Math.max(...lanes)}px` });
  steps.forEach((step, i) => list.append(drawStep(step, i)));
  list.walk = { steps, lanes };
  return [make("p", { class: "dim small" }, KEY), list];
}

function drawStep(step, i) {
  const place = step.op === "parameter" ? step.node : step.parameters.join(", ");
  return make("li", {},
    make("span", { class: "op" }, `${i + 1}. ${step.op === "parameter" ? "start" : step.op.replace(/^(aten|core)\./, "")} `),
    place ? make("span", { class: "name" }, place) : make("span", { class: "name dim" }, step.node),
    make("span", { class: "rule" }, step.rule),
    step.then ? make("span", { class: "then" }, `→ ${step.then}`) : null);
}

// A value keeps its lane until its last reader, which takes the lane over; another step takes the first free one.
function assignLanes(steps) {
  const lastReader = steps.map(() => -1), lanes = [], busy = new Set();
  steps.forEach((step, i) => step.reads.forEach((j) => (lastReader[j] = i)));
  steps.forEach((step, i) => {
    for (const j of step.reads) if (lastReader[j] === i) busy.delete(lanes[j]);
    const ended = step.reads.find((j) => lastReader[j] === i);
    let lane = ended === undefined ? 0 : lanes[ended];
    while (busy.has(lane)) lane++;
    lanes.push(lane);
    if (lastReader[i] > i) busy.add(lane);
  });
  return lanes;
}

function drawEdges() {
  for (const list of document.querySelectorAll(".proof")) {
    list.querySelector("svg")?.remove();
    const { steps, lanes } = list.walk;
    const at = [...list.children].map((item, i) => [9 + LANE * lanes[i], item.offsetTop + 12]);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const add = (tag, attributes) => {
      const shape = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
      svg.append(shape);
    };
    steps.forEach((step, i) => step.reads.forEach((j) => {
      const [x, y] = at[i], [u, v] = at[j];
      add("path", { d: x === u ? `M${u},${v}V${y}` : `M${u},${v}V${y - 20}C${u},${y - 4} ${x},${y - 16} ${x},${y}` });
    }));
    const read = new Set(steps.flatMap((step) => step.reads));
    steps.forEach((step, i) => {
      const kind = step.reads.length === 0 ? "start" : read.has(i) ? "" : "end";
      add("circle", { cx: at[i][0], cy: at[i][1], r: 5, class: kind });
    });
    svg.setAttribute("width", "1");
    svg.setAttribute("height", "1");
    svg.setAttribute("aria-hidden", "true");
    list.append(svg);
  }
}

function drawMembers(finding) {
  const { row } = finding;
  if (row.n < 2) return [];
  const shown = row.findings.slice(0, 300);
  const items = shown.map((other) => {
    const link = make("a", { class: "name", href: hashOf(other) }, other.name);
    if (other === finding) link.setAttribute("aria-current", "true");
    return make("li", {}, link);
  });
  const rest = row.n - shown.length;
  return [
    make("h3", {}, `All ${plural(row.n, "finding")} of this row`),
    make("ul", { class: "members" }, ...items),
    rest > 0 ? make("p", { class: "dim" }, `and ${count(rest)} more`) : null,
  ];
}

function step(by) {
  const place = report.shown.indexOf(report.open.row) + by;
  const row = report.shown[place];
  if (row) location.hash = hashOf(row.findings[0]);
}

// --- addresses: #finding=…, #filter=…, or the id of a section --------------------------------------------------------

function follow() {
  const [kind, ...rest] = location.hash.slice(1).split("=");
  let value = rest.join("=");
  try { value = decodeURIComponent(value); } catch { /* typed by hand: taken as it is */ }
  if (kind === "finding") {
    const finding = report.byAddress.get(value);
    if (finding) return openFinding(finding);
    byId("shown").textContent = `This report has no finding ${value}`;
  }
  if (byId("sheet").open) byId("sheet").close();
  if (kind === "filter") {
    setQuery(value);
    byId("findings").scrollIntoView();
  }
  const target = byId(kind);
  if (target instanceof HTMLDetailsElement) target.open = true;
}

function setQuery(value) {
  byId("query").value = value;
  report.limit = PAGE;
  showRows();
}

function leaveFinding() {
  const link = [...document.querySelectorAll("#table a.open")].find((a) => a.hash === hashOf(report.open.row.findings[0]));
  history.replaceState(null, "", byId("query").value ? `#filter=${encodeURIComponent(byId("query").value)}` : "#findings");
  link?.focus();
}

function listen() {
  byId("query").addEventListener("input", () => {
    setQuery(byId("query").value);
    history.replaceState(null, "", `#filter=${encodeURIComponent(byId("query").value)}`);
  });
  document.querySelector("form.filter").addEventListener("submit", (event) => event.preventDefault());
  byId("order").addEventListener("change", showRows);
  byId("clear").addEventListener("click", () => { setQuery(""); history.replaceState(null, "", "#findings"); });
  byId("more").addEventListener("click", () => { report.limit += PAGE; showRows(); });
  for (const toggle of document.querySelectorAll(".toggle")) toggle.addEventListener("click", () => {
    const words = byId("query").value.split(/\s+/).filter(Boolean);
    const others = words.filter((word) => !["dead", "folds", "gauge"].includes(word.toLowerCase()));
    const on = toggle.getAttribute("aria-pressed") === "true";
    const query = (on ? others : [...others, toggle.dataset.word]).join(" ");
    setQuery(query);
    history.replaceState(null, "", query ? `#filter=${encodeURIComponent(query)}` : "#findings");
  });
  byId("sheet").addEventListener("close", () => { if (location.hash.startsWith("#finding=")) leaveFinding(); });
  byId("sheet").addEventListener("click", (event) => { if (event.target === byId("sheet")) byId("sheet").close(); });
  byId("close").addEventListener("click", () => byId("sheet").close());
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
  byId("permalink").addEventListener("click", (event) => {
    event.preventDefault();
    copy(byId("permalink").href, byId("permalink"));
  });
  addEventListener("hashchange", follow);
  addEventListener("resize", drawEdges);
  addEventListener("beforeprint", () => { report.limit = 1000; showRows(); });
  addEventListener("keydown", onKey);
}

function onKey(event) {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "/" && !typing) { event.preventDefault(); byId("query").focus(); return; }
  if (byId("sheet").open && event.key === "ArrowLeft") step(-1);
  if (byId("sheet").open && event.key === "ArrowRight") step(1);
  if (!byId("sheet").open && (event.key === "ArrowDown" || event.key === "ArrowUp")) moveInTable(event);
}

function moveInTable(event) {
  const links = [...document.querySelectorAll("#table a.open")];
  const here = links.indexOf(document.activeElement);
  if (here < 0 && event.target !== byId("query")) return;
  const next = links[here + (event.key === "ArrowDown" ? 1 : -1)];
  (next || (event.key === "ArrowUp" ? byId("query") : null))?.focus();
  event.preventDefault();
}

async function start(element) {
  Object.assign(report, await unpack(element));
  report.parameters = Number(element.dataset.parameters);
  report.byAddress = new Map();
  for (const row of report.rows) {
    row.findings = row.findings.map((list) => readFinding(row, list));
    row.names = row.findings.map((finding) => finding.name.toLowerCase());
    for (const finding of row.findings) if (!report.byAddress.has(finding.address)) report.byAddress.set(finding.address, finding);
  }
  listen();
  showRows();
  follow();
}

// Tests and screenshots wait for this.
function tellReady() {
  performance.mark("ready");
  document.body.dataset.ready = "true";
}

function sayTooOld() {
  byId("shown").textContent = "This browser cannot unpack the proofs: use one of 2023 or later. The first rows are below.";
}

if (byId("data") && byId("table")) start(byId("data")).catch(sayTooOld).then(tellReady);
else tellReady();
