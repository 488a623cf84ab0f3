// Charts instead of tables, live figures, and the theme switch. Without scripts, pages show everything as text.
"use strict";

const root = document.documentElement;
const style = () => getComputedStyle(root);
const colour = (name) => style().getPropertyValue(name).trim() || style().getPropertyValue("--other").trim();
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // Plotly reads names as text with a few tags

function traces(chart) {
  const moments = chart.moments;
  const hover = { calls: "%{y:,}", tokens: "%{y:,}", ms: "%{y:,.0f} ms", times: "%{y:,.2f} ×" }[chart.unit] ?? "%{y:,.4f} " + plain(chart.unit);
  return chart.series.map((series) => ({
    name: plain(series.name), x: moments, y: series.values, hovertemplate: hover,
    ...(chart.shape === "bars"
      ? { type: "bar", marker: { color: colour(series.colour) } }
      : { type: "scatter", mode: "lines+markers", connectgaps: false, line: { color: colour(series.colour), width: 2, shape: "linear" }, marker: { size: 4, color: colour(series.colour) } }),
  }));
}

// Latencies range from milliseconds (warm call) to a minute (cold start).
function scale(chart) {
  if (chart.unit === "ms")
    return { type: "log", tickvals: [1, 3, 10, 30, 100, 300, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5], ticktext: ["1 ms", "3 ms", "10 ms", "30 ms", "100 ms", "300 ms", "1 s", "3 s", "10 s", "30 s", "100 s", "300 s"] };
  return { rangemode: "tozero", nticks: 5, exponentformat: ["calls", "tokens"].includes(chart.unit) ? "SI" : "none", separatethousands: true, tickprefix: { USD: "$", EUR: "€", GBP: "£" }[chart.unit] ?? "" };
}

function layout(chart, narrow) {
  const daily = chart.moments.length < 2 || Date.parse(chart.moments[1]) - Date.parse(chart.moments[0]) > 4e6;
  const soft = colour("--soft");
  const font = { family: style().getPropertyValue("--sans"), size: 12, color: soft };
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), fixedrange: true, automargin: true };
  return {
    barmode: "stack", bargap: 0.25, font, height: narrow ? 220 : 240, margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { ...font, color: colour("--ink") } },
    xaxis: { ...axis, showgrid: false, type: "date", nticks: narrow ? 4 : 7, tickformat: daily ? "%-d %b" : "%H:%M", hoverformat: daily ? "%a %-d %b" : "%-d %b %H:%M" },
    yaxis: { ...axis, ...scale(chart) },
  };
}

function draw(holder) {
  const data = document.querySelector(`script[data-chart="${holder.id}"]`);
  const chart = JSON.parse(data.textContent);
  const narrow = holder.clientWidth < 460;
  Plotly.react(holder, traces(chart), layout(chart, narrow), { displayModeBar: false, responsive: true, locale: "en-US" });
}

function drawAll() {
  const holders = document.querySelectorAll(".plot");
  if (typeof Plotly === "undefined") {
    for (const holder of holders) holder.remove(); // the tables below show the same data
    return;
  }
  for (const holder of holders) {
    holder.querySelector(".loading")?.remove();
    draw(holder);
    holder.parentElement.querySelector("details.figures").open = false;
  }
}

function switchTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("pilotlight-theme", root.dataset.theme);
  } catch {
    // storage is disabled: the choice applies to this page only
  }
  drawAll();
}

// On phones each row of a table is a block (style.css): its cells show the names of their columns.
function columnNames(table) {
  const grid = [];
  [...table.tHead.rows].forEach((row, number) => {
    let column = 0;
    for (const cell of row.cells) {
      while ((grid[number] ??= [])[column] !== undefined) column++;
      for (let down = 0; down < cell.rowSpan; down++)
        for (let right = 0; right < cell.colSpan; right++) (grid[number + down] ??= [])[column + right] = down ? "" : cell.textContent.trim();
      column += cell.colSpan;
    }
  });
  return grid[0].map((_, column) => grid.map((row) => row[column]).filter(Boolean).join(" "));
}

function labelTables() {
  for (const table of document.querySelectorAll(".scroll:not(.log) > table:not(.spans)")) {
    if (!table.tHead) continue;
    const names = columnNames(table);
    for (const row of table.querySelectorAll("tbody tr, tfoot tr")) [...row.cells].forEach((cell, column) => (cell.dataset.label = names[column] ?? ""));
    table.classList.add("labelled");
  }
}

function live(address) {
  const state = document.querySelector("[data-live-state]");
  const words = document.querySelector("[data-live-words]");
  const show = (text, on) => {
    state.hidden = false;
    state.classList.toggle("on", on);
    words.textContent = text;
  };
  const source = new EventSource(address);
  source.addEventListener("open", () => show("live", true));
  source.addEventListener("figures", (event) => {
    const update = JSON.parse(event.data);
    for (const [name, text] of Object.entries(update.figures))
      for (const element of document.querySelectorAll(`[data-live-figure="${name}"]`)) element.textContent = text;
    const rows = document.querySelector("[data-live-rows]");
    if (rows && update.calls && !rows.contains(document.activeElement)) {
      rows.innerHTML = update.calls;
      labelTables();
    }
  });
  source.addEventListener("over", () => {
    source.close();
    location.reload(); // the session has ended: reload to show the sign-in form
  });
  source.addEventListener("error", () => show(source.readyState === EventSource.CLOSED ? "not live" : "connecting…", false));
}

// Log lines: the first event replaces what the page was loaded with, later ones are added; the oldest rows go.
function followLog(rows) {
  const box = rows.closest(".scroll");
  const state = document.querySelector("[data-live-state]");
  const words = document.querySelector("[data-live-words]");
  const show = (text, on) => {
    state.hidden = false;
    state.classList.toggle("on", on);
    words.textContent = text;
  };
  const atEnd = () => box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const toEnd = () => (box.scrollTop = box.scrollHeight);
  toEnd();
  const source = new EventSource(rows.dataset.log);
  source.addEventListener("open", () => show("live", true));
  source.addEventListener("lines", (event) => {
    const update = JSON.parse(event.data);
    const follows = atEnd();
    if (update.all) rows.replaceChildren();
    rows.insertAdjacentHTML("beforeend", update.rows);
    while (rows.rows.length > Number(rows.dataset.logRows)) rows.deleteRow(0);
    document.querySelector("[data-log-empty]").hidden = true;
    if (follows) toEnd();
  });
  source.addEventListener("trouble", (event) => show(JSON.parse(event.data).text, false));
  source.addEventListener("over", () => {
    source.close();
    location.reload(); // the session has ended: reload to show the sign-in form
  });
  source.addEventListener("error", () => source.readyState === EventSource.CLOSED && show("not live", false));
}

// Pages with active rollouts or experiments refresh while visible, unless an element in them has the focus.
let shown = document.querySelector("#main")?.innerHTML;
async function refresh() {
  const main = document.querySelector("#main");
  if (document.hidden || !main.querySelector("[data-again]") || main.contains(document.activeElement)) return;
  try {
    const answer = await fetch(location.href);
    if (answer.redirected) return location.reload(); // the session has ended: reload to show the sign-in form
    const fresh = answer.ok && new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("#main");
    if (fresh && fresh.innerHTML !== shown) {
      shown = fresh.innerHTML;
      main.replaceChildren(...fresh.childNodes);
      labelTables();
    }
  } catch {
    // no response: retry at the next refresh
  }
}

for (const field of document.querySelectorAll("[data-submit]")) field.addEventListener("change", () => field.form.requestSubmit());
// Functions have the dashboard's origin, unless it has one of its own.
for (const place of document.querySelectorAll("[data-own-origin] [data-origin]")) place.textContent = location.origin;
for (const button of document.querySelectorAll("[data-theme-switch]")) {
  button.hidden = false;
  button.addEventListener("click", switchTheme);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
labelTables();
drawAll();
if (document.querySelector("[data-again]")) setInterval(refresh, 2000);
if (document.body.dataset.live) live(document.body.dataset.live);
for (const rows of document.querySelectorAll("[data-log]")) followLog(rows);
