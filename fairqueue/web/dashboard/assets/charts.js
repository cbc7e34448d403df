// Charts: <figure data-chart="URL"> is drawn from JSON with uPlot; a table has the same numbers.

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]]; // lines differ not only by colour
const HEIGHT = 190;
const HALF_LABEL = 24; // pixels: room for the last label of the time axis
const charts = new Map();

function colour(name) {
  const probe = document.createElement("i");
  probe.className = `tone-${name}`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function valueText(value, unit) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const digits = size === 0 || size >= 100 ? 0 : size >= 1 ? 1 : 3;
  const text = value.toLocaleString("en-US", { maximumFractionDigits: digits });
  return unit ? `${text} ${unit}` : text;
}

function zone() {
  try {
    return localStorage.getItem("fairqueue.zone") === "utc" ? "UTC" : undefined;
  } catch {
    return undefined;
  }
}

function timeText(seconds, withDay = false) {
  const day = withDay ? { day: "2-digit", month: "short" } : {};
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone: zone(), ...day };
  return new Intl.DateTimeFormat("en-GB", options).format(seconds * 1000);
}

// Labels of the time axis: the day at midnight, else the time.
function tickText(seconds) {
  const clock = timeText(seconds);
  return clock === "00:00" ? timeText(seconds, true).split(",")[0] : clock;
}

function options(figure, data) {
  const ink = colour("ink");
  const faint = colour("grid");
  const stacked = figure.dataset.kind === "stack";
  const filled = figure.dataset.kind === "area";
  const axis = { stroke: ink, grid: { stroke: faint, width: 1 }, ticks: { show: false }, font: "12px Inter, system-ui, sans-serif" };
  const lines = data.lines.map((line, i) => {
    const stroke = colour(line.tone);
    if (stacked) return { label: line.label, fill: stroke, width: 0, paths: uPlot.paths.bars({ size: [0.92, 40], align: 1 }), points: { show: false } };
    return {
      label: line.label,
      stroke,
      width: 1.75,
      dash: DASHES[i % DASHES.length],
      fill: filled ? stroke.replace("rgb(", "rgba(").replace(")", ", 0.12)") : undefined,
      points: { show: line.values.filter((each) => each !== null).length < 6, size: 5, fill: stroke },
      spanGaps: false,
    };
  });
  return {
    width: figure.querySelector(".plot").clientWidth,
    height: HEIGHT,
    padding: [10, HALF_LABEL, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: stacked ? { show: false } : { size: 7 }, drag: { x: false, y: false }, ...(stacked ? { dataIdx: (plot, _, __, at) => stretchAt(data, at) } : {}) },
    scales: { ...(stacked ? { x: { range: stretches(data) } } : {}), y: { range: (_, low, high) => [0, data.unit === "%" ? 100 : Math.max(high * 1.1, figure.dataset.least ? Number(figure.dataset.least) : 1)] } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map(tickText), space: 70, size: 28 },
      { ...axis, values: (_, ticks) => ticks.map((each) => valueText(each, "")), size: 46, space: 38 },
    ],
    series: [{}, ...(stacked ? lines.reverse() : lines)],
    hooks: { setCursor: [(plot) => showLegend(figure, data, plot.cursor.idx)] },
  };
}

// Bars begin at their times; the last one is as wide as the others.
function stretches(data) {
  const last = data.times.length - 1;
  const step = last > 0 ? data.times[1] - data.times[0] : 1;
  return [data.times[0], data.times[last] + step];
}

function stretchAt(data, seconds) {
  const after = data.times.findIndex((at) => at > seconds);
  return Math.max(0, (after < 0 ? data.times.length : after) - 1);
}

// Stack the lines. The tallest is drawn first.
function stack(lines) {
  let below = null;
  const found = lines.map((line) => {
    below = line.values.map((value, i) => (value ?? 0) + (below?.[i] ?? 0));
    return below;
  });
  return found.reverse();
}

function lastIndex(data) {
  for (let i = data.times.length - 1; i >= 0; i--) {
    if (data.lines.some((line) => line.values[i] !== null)) return i;
  }
  return null;
}

function showLegend(figure, data, index) {
  const list = figure.querySelector(".legend");
  const at = index ?? lastIndex(data);
  if (list.childElementCount !== data.lines.length) {
    list.replaceChildren(...data.lines.map((line, i) => {
      const item = document.createElement("li");
      const mark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      mark.setAttribute("viewBox", "0 0 22 4");
      mark.setAttribute("class", `mark tone-${line.tone}`);
      mark.setAttribute("aria-hidden", "true");
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of Object.entries({ x1: 0, y1: 2, x2: 22, y2: 2, stroke: "currentColor", "stroke-width": 3, "stroke-dasharray": DASHES[i % DASHES.length].join(" ") })) stroke.setAttribute(name, value);
      mark.append(stroke);
      const value = document.createElement("b");
      item.append(mark, `${line.label} `, value);
      return item;
    }));
  }
  data.lines.forEach((line, i) => {
    list.children[i].querySelector("b").textContent = at === null ? "–" : valueText(line.values[at], data.unit);
  });
  figure.querySelector(".at").textContent = index === null || index === undefined ? "" : timeText(data.times[index], true);
}

function fillTable(figure, data) {
  const table = figure.querySelector("table");
  const row = (cells, kind) => {
    const line = document.createElement("tr");
    line.append(...cells.map((text, i) => {
      const cell = document.createElement(i === 0 || kind === "head" ? "th" : "td");
      cell.scope = kind === "head" ? "col" : i === 0 ? "row" : "";
      if (!cell.scope) cell.removeAttribute("scope");
      cell.textContent = text;
      return cell;
    }));
    return line;
  };
  const head = document.createElement("thead");
  head.append(row(["Time", ...data.lines.map((line) => line.label)], "head"));
  const body = document.createElement("tbody");
  const order = [...data.times.keys()].reverse(); // newest first
  body.append(...order.map((i) => row([timeText(data.times[i], true), ...data.lines.map((line) => valueText(line.values[i], data.unit))])));
  table.replaceChildren(...[table.querySelector("caption"), head, body].filter(Boolean));
}

function draw(figure, data) {
  const place = figure.querySelector(".plot");
  const empty = data.times.length === 0 || lastIndex(data) === null;
  figure.classList.toggle("is-empty", empty);
  charts.get(figure)?.plot?.destroy();
  const entry = { data, plot: null };
  charts.set(figure, entry);
  showLegend(figure, data, null);
  if (!empty) {
    const values = figure.dataset.kind === "stack" ? stack(data.lines) : data.lines.map((line) => line.values);
    entry.plot = new uPlot(options(figure, data), [data.times, ...values], place);
    entry.plot.root.setAttribute("aria-hidden", "true"); // screen readers use the table
  }
  if (figure.querySelector("details")?.open) fillTable(figure, data);
  figure.dataset.ready = "true";
}

async function load(figure) {
  const answer = await fetch(figure.dataset.chart, { headers: { Accept: "application/json" } }).catch(() => null);
  if (!answer?.ok) {
    figure.classList.add("is-old");
    return;
  }
  figure.classList.remove("is-old");
  draw(figure, await answer.json());
}

function redrawAll() {
  for (const [figure, entry] of charts) {
    if (figure.isConnected) draw(figure, entry.data);
    else charts.delete(figure);
  }
}

function begin() {
  for (const figure of document.querySelectorAll("figure[data-chart]:not([data-begun])")) {
    figure.dataset.begun = "true";
    figure.querySelector("details")?.addEventListener("toggle", () => {
      const data = charts.get(figure)?.data;
      if (data) fillTable(figure, data);
    });
    load(figure);
  }
}

let resizing = null;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    for (const [figure, { plot }] of charts) plot?.setSize({ width: figure.querySelector(".plot").clientWidth, height: HEIGHT });
  }, 100);
});
document.addEventListener("fq:theme", redrawAll);
document.addEventListener("fq:zone", redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
document.body.addEventListener("fq:pulse", () => {
  for (const figure of charts.keys()) if (figure.isConnected && !figure.matches(":hover")) load(figure);
});
document.addEventListener("htmx:after:swap", begin);
begin();
