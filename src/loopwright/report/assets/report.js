// The page: draws the data it holds, and the newer data of the file beside it while the run trains.
const charts = new Map();
let current = null;
let range = null;
let paused = false;

const zoom = (min, max) => {
  range = min === null ? null : clamp(min, max);
  for (const chart of charts.values()) chart.range(range);
  announce(range === null ? "showing the whole run" : `showing steps ${number(range[0])} to ${number(range[1])}`);
};
const clamp = (min, max) => {
  const ends = [...charts.values()].map((chart) => chart.whole());
  const low = Math.min(...ends.map((each) => each[0])), high = Math.max(...ends.map((each) => each[1]));
  const from = Math.max(min, low), to = Math.min(max, high);
  return from <= low && to >= high ? null : to - from > 1e-9 ? [from, to] : range;
};
const clock = (seconds) => {
  const whole = Math.round(seconds);
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return `${hours}:${String(minutes).padStart(2, "0")}:${String(whole % 60).padStart(2, "0")}`;
};
const share = (value) => `${(100 * value).toFixed(1)} %`;
const put = (id, ...nodes) => {
  const section = document.getElementById(id);
  section.hidden = !nodes.length;
  section.querySelector(":scope > div").replaceChildren(...nodes);
};
const table = (name, heads, rows, numbers = []) => {
  const kind = (index) => (numbers.includes(index) ? { class: "number" } : {});
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head, index) => make("th", { scope: "col", ...kind(index) }, head)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, index) => (
      index ? make("td", cell instanceof Node ? { class: "bars" } : { ...(numbers.includes(index) ? { class: "number" } : { class: "value" }) }, cell)
        : make("th", { scope: "row" }, cell))))))));
};
const titled = (runs, run, node) => (runs.length > 1 ? [make("h3", {}, run.label), node] : [node]);

const labelled = (runs) => {
  const seen = new Map();
  for (const run of runs) seen.set(run.name, (seen.get(run.name) || 0) + 1);
  return runs.map((run, index) => ({ ...run, label: seen.get(run.name) > 1 ? `${run.name} (${index + 1})` : run.name }));
};

const showRuns = (runs) => document.getElementById("runs").replaceChildren(...runs.map((run) => {
  const silent = run.status === "running" && Date.now() / 1000 - run.updated > 120;
  const bad = silent || ["failed", "killed"].includes(run.status);
  const steps = run.max_steps ? `step ${number(run.step)} of ${number(run.max_steps)}` : `step ${number(run.step)}`;
  const epoch = run.epoch === null ? "" : `, epoch ${number(run.epoch)}`;
  const starts = run.starts > 1 ? `, ${run.starts} starts` : "";
  const when = new Date(1000 * run.updated).toLocaleString();
  return make("li", {}, make("b", {}, run.label), " ", make("span", { class: bad ? "state bad" : "state" }, silent ? "no sign of life" : run.status),
    ` ${steps}${epoch}, ${clock(run.wall)} in total${starts}; last sign of life ${when}`);
}));

const showVerdict = (runs) => put("verdict", ...runs.flatMap((run) => [
  make("p", { class: "first" }, runs.length > 1 ? `${run.label}: ${run.verdict}` : run.verdict),
  ...(run.findings.length ? [make("ul", {}, ...run.findings.map((text) => make("li", {}, text)))] : []),
]));

const showTime = (runs) => put("time", ...runs.filter((run) => run.ledger.length).flatMap((run) => {
  const rows = run.ledger.map((row) => [row.title, clock(row.seconds), share(row.share),
    make("span", { class: "bar", "aria-hidden": "true", style: `width:${(100 * row.share).toFixed(2)}%` })]);
  rows.push(["Wall time", clock(run.wall), share(1), make("span", {})]);
  return titled(runs, run, table(`Time ledger of ${run.label}`, ["part", "time", "share", "chart"], rows, [1, 2]));
}));

const showMarks = (runs) => put("marks", ...runs.filter((run) => run.marks.length).flatMap((run) => titled(runs, run,
  table(`Incidents of ${run.label}`, ["step", "mark", "kind", "what happened"],
    run.marks.map((mark) => [number(mark.step), LETTERS[mark.kind] || "*", mark.kind, mark.text])))));

const showEvaluations = (runs) => put("evaluations", ...runs.filter((run) => run.evaluations.length).flatMap((run) => {
  const names = [...new Set(run.evaluations.flatMap((row) => Object.keys(row)))].filter((name) => name !== "step");
  const rows = run.evaluations.map((row) => [number(row.step), ...names.map((name) => number(row[name]))]);
  return titled(runs, run, table(`Evaluations of ${run.label}`, ["step", ...names], rows, names.map((name, index) => index + 1)));
}));

const showTexts = (runs) => put("texts", ...runs.filter((run) => run.texts.length).flatMap((run) => titled(runs, run,
  make("div", {}, ...[...run.texts].reverse().flatMap((text) => [make("p", { class: "hint" }, `${text.name}, step ${number(text.step)}`), make("pre", {}, text.text)])))));

const showSpeed = (runs) => put("speed", ...runs.filter((run) => run.speed_plan.length).flatMap((run) => titled(runs, run,
  table(`Speed plan of ${run.label}`, ["acceleration", "state", "reason", "proof"],
    run.speed_plan.map((row) => [row.name, row.on ? "on" : "off", row.reason, row.proof])))));

const showConfig = (runs) => {
  const maps = runs.map((run) => new Map(run.config.map((row) => [row.name, row])));
  const names = [...new Set(runs.flatMap((run) => run.config.map((row) => row.name)))];
  if (!names.length) return put("config");
  const text = (map, name) => (map.has(name) ? map.get(name).value : "-");
  const differs = (name) => maps.some((map) => text(map, name) !== text(maps[0], name));
  const source = (name) => [...new Set(maps.filter((map) => map.has(name)).map((map) => map.get(name).source))].join(", ");
  if (runs.length > 1) names.sort((one, other) => differs(other) - differs(one));
  const rows = names.map((name) => [name, ...maps.map((map) => text(map, name)), ...(runs.length > 1 ? [differs(name) ? "differs" : "same"] : [source(name)])]);
  const heads = ["argument", ...(runs.length > 1 ? runs.map((run) => run.label) : ["value"]), runs.length > 1 ? "comparison" : "source"];
  const own = rows.filter((row) => !["default", "same"].includes(row[row.length - 1]));
  const rest = rows.filter((row) => ["default", "same"].includes(row[row.length - 1]));
  const word = runs.length > 1 ? "with equal values" : "with default values";
  const notes = runs.flatMap((run) => [...run.notes, ...(run.command ? [`command: ${run.command}`] : [])]);
  return put("config", ...notes.map((note) => make("p", { class: "hint" }, note)), ...(own.length ? [table("Arguments", heads, own)] : []),
    ...(rest.length ? [keptOpen("defaults", make("details", {}, make("summary", {}, `${rest.length} ${rest.length === 1 ? "argument" : "arguments"} ${word}`), table("Other arguments", heads, rest)))] : []));
};
const opened = new Set();
const keptOpen = (name, details) => {
  details.open = opened.has(name);
  details.addEventListener("toggle", () => (details.open ? opened.add(name) : opened.delete(name)));
  return details;
};

const showEnvironment = (runs) => {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.environment)))];
  put("environment", ...(names.length ? [table("Versions and machine", ["name", ...runs.map((run) => (runs.length > 1 ? run.label : "value"))],
    names.map((name) => [name, ...runs.map((run) => run.environment[name] || "-")]))] : []));
};

const showCharts = (specs, leftOut, runs) => {
  const grid = document.querySelector("#charts .grid");
  for (const [id, chart] of charts) {
    if (!specs.some((spec) => spec.id === id && spec.curves.join() === chart.spec.curves.join())) {
      chart.figure.remove();
      charts.delete(id);
    }
  }
  specs.forEach((spec, index) => {
    if (!charts.has(spec.id)) {
      charts.set(spec.id, new Chart(spec, zoom));
      grid.insertBefore(charts.get(spec.id).figure, grid.children[index] || null);
    }
    charts.get(spec.id).update(runs, range);
  });
  document.getElementById("charts").hidden = !specs.length;
  document.getElementById("left-out").textContent = leftOut.length ? `Not drawn, but in metrics.jsonl: ${leftOut.join(", ")}` : "";
};

function loopwrightReport(data) {
  if (paused || (current && (data.written === current.written || data.format !== current.format))) return;
  current = data;
  const runs = labelled(data.runs);
  showRuns(runs);
  showVerdict(runs);
  showCharts(data.charts, data.left_out || [], runs);
  for (const show of [showTime, showMarks, showEvaluations, showTexts, showSpeed, showConfig, showEnvironment]) show(runs);
  document.body.dataset.written = String(data.written);
}

const follow = (file) => {
  const running = () => current.runs.some((run) => run.status === "running");
  const next = () => setTimeout(load, running() ? 3000 : 15000);
  const load = () => {
    if (paused) { next(); return; }
    const script = document.createElement("script");
    script.src = `${file}?n=${Date.now()}`;
    script.onload = script.onerror = () => { script.remove(); next(); };
    document.head.append(script);
  };
  load();
};

document.getElementById("whole").addEventListener("click", () => zoom(null));
document.getElementById("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", String(paused));
  event.target.textContent = paused ? "Resume updates" : "Pause updates";
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts.values()) chart.build(range); });
loopwrightReport(JSON.parse(document.getElementById("data").textContent));
if (document.body.dataset.follow) follow(document.body.dataset.follow);
else document.getElementById("pause").hidden = true;
