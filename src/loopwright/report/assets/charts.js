"use strict";
// One chart per figure: lines with dash patterns, marks of incidents, a tooltip, keyboard and table.
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 5], [4, 4, 1, 4]];
const LETTERS = { resume: "R", rollback: "B", incident: "!", "not finite": "N" };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const number = (value) => {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumSignificantDigits: 5 });
};

const short = (value, digits) => {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-2 || size >= 1e6)) return value.toExponential(digits - 1).replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, 5) });
};
// With as many digits as the ticks need: rounded ones would be at a wrong height.
const labels = (ticks) => {
  const found = ticks.filter((tick) => tick !== null);
  const near = Math.abs(found[1] - found[0]) / 1e3 || 0;
  let digits = 2;
  while (digits < 12 && found.some((tick) => Math.abs(Number(tick.toPrecision(digits)) - tick) > near)) digits += 1;
  return ticks.map((tick) => (tick === null ? "" : short(tick, digits)));
};
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

let announcing = 0;
const announce = (text) => {
  clearTimeout(announcing);
  announcing = setTimeout(() => { document.getElementById("live").textContent = text; }, 150);
};

class Chart {
  constructor(spec, zoom) {
    this.spec = spec;
    this.zoom = zoom;
    this.plot = make("div", { class: "plot", "aria-hidden": "true" });
    this.tip = make("div", { class: "tip" });
    this.legend = make("ul", { class: "legend" });
    const caption = make("figcaption", { id: `caption-${spec.id}` }, spec.title + (spec.unit ? ` (${spec.unit})` : ""));
    this.table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Values of ${spec.title}` });
    this.details = make("details", {}, make("summary", {}, `Table: ${spec.title}`), this.table);
    this.details.addEventListener("toggle", () => this.fill());
    this.area = make("div", {
      tabindex: "0", role: "application", "aria-roledescription": "chart",
      "aria-labelledby": `caption-${spec.id}`, "aria-describedby": "keys",
    }, this.plot);
    this.figure = make("figure", { "data-chart": spec.id }, caption, this.area, this.legend, this.details);
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.place = null;
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  update(runs, range) {
    this.lines = [];
    runs.forEach((run, index) => {
      for (const [order, name] of this.spec.curves.entries()) {
        const curve = run.curves[name];
        if (!curve) continue;
        const place = runs.length > 1 ? index + order * runs.length : order;
        const label = runs.length > 1 ? `${run.label}: ${name}` : name;
        this.lines.push({ label, curve, color: `--c${place % 6}`, dash: DASHES[place % DASHES.length] });
      }
    });
    this.marks = runs.flatMap((run) => run.marks.map((mark) => ({ ...mark, run: run.label })));
    const tables = this.lines.map((line) => [line.curve.x, line.curve.y]);
    this.data = tables.length > 1 ? uPlot.join(tables) : tables[0] || [[], []];
    const signature = JSON.stringify(this.lines.map((line) => line.label));
    if (this.uplot && signature === this.signature) {
      this.uplot.setData(this.data, false);
      this.range(range);
    } else {
      this.signature = signature;
      this.build(range);
    }
    this.describe();
    if (this.details.open) this.fill();
  }

  build(range) {
    if (this.uplot) this.uplot.destroy();
    const axis = { stroke: css("--ink"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--line") }, font: "12px system-ui, sans-serif" };
    const sparse = (line) => line.curve.x.length < 60;
    const options = {
      width: Math.max(this.plot.clientWidth, 200), height: 230, legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "loopwright" }, points: { size: 7 } },
      scales: { x: { time: false }, y: { range: (u, low, high) => pad(low, high) } },
      axes: [{ ...axis, size: 34, incrs: WHOLE }, { ...axis, size: 62, values: (u, ticks) => labels(ticks) }],
      series: [{ label: "step" }, ...this.lines.map((line) => ({
        label: line.label, stroke: css(line.color), width: 2, dash: line.dash, points: { show: sparse(line), size: 5, fill: css(line.color) },
      }))],
      hooks: {
        draw: [(u) => this.drawMarks(u)],
        setCursor: [(u) => this.hover(u)],
        setSelect: [(u) => { if (u.select.width > 4) this.zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")); u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); }],
        ready: [(u) => u.over.addEventListener("dblclick", () => this.zoom(null))],
      },
    };
    this.plot.textContent = "";
    this.uplot = new uPlot(options, this.data, this.plot);
    this.plot.append(this.tip);
    this.range(range);
  }

  whole() {
    const xs = this.data[0];
    return xs.length ? [xs[0], xs[xs.length - 1] > xs[0] ? xs[xs.length - 1] : xs[0] + 1] : [0, 1];
  }

  range(range) {
    const [min, max] = range || this.whole();
    this.uplot.setScale("x", { min, max });
  }

  resize() {
    if (this.uplot && this.plot.clientWidth) this.uplot.setSize({ width: this.plot.clientWidth, height: 230 });
  }

  drawMarks(u) {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css("--bad");
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.font = `bold ${11 * ratio}px system-ui, sans-serif`;
    for (const mark of this.marks) {
      const x = Math.round(u.valToPos(mark.step, "x", true));
      if (x < left || x > left + width) continue;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.fillText(LETTERS[mark.kind] || "*", x + 2 * ratio, top + 11 * ratio);
    }
    ctx.restore();
  }

  words(place) {
    const step = this.data[0][place];
    const values = this.lines.map((line, index) => [line.label, this.data[index + 1][place]]).filter(([, value]) => value !== undefined && value !== null);
    const marks = this.marks.filter((mark) => mark.step === step).map((mark) => mark.text);
    return [`step ${number(step)}`, ...values.map(([label, value]) => `${label}: ${number(value)}`), ...marks];
  }

  hover(u) {
    const place = u.cursor.idx;
    const outside = place === null || place === undefined || u.cursor.left < 0;
    this.tip.style.display = outside ? "none" : "block";
    if (outside) return;
    this.tip.textContent = this.words(place).join("\n");
    const offset = u.over.offsetLeft + u.cursor.left;
    const right = offset > this.plot.clientWidth / 2;
    this.tip.style.left = right ? "auto" : `${offset + 12}px`;
    this.tip.style.right = right ? `${this.plot.clientWidth - offset + 12}px` : "auto";
    this.tip.style.top = "8px";
  }

  key(event) {
    const last = this.data[0].length - 1;
    if (last < 0) return;
    const { min, max } = this.uplot.scales.x;
    const far = event.shiftKey ? 10 : 1;
    const middle = this.place === null ? (min + max) / 2 : this.data[0][this.place];
    const span = (max - min) / 2;
    const moves = { ArrowLeft: -far, ArrowRight: far };
    if (event.key in moves) this.move(Math.min(Math.max((this.place ?? (far > 0 && event.key === "ArrowLeft" ? last + 1 : -1)) + moves[event.key], 0), last));
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(last);
    else if (event.key === "+" || event.key === "=") this.zoom(middle - span / 2, middle + span / 2);
    else if (event.key === "-") this.zoom(middle - span * 2, middle + span * 2);
    else if (event.key === "0" || event.key === "Escape") this.zoom(null);
    else return;
    event.preventDefault();
  }

  move(place) {
    this.place = place;
    const x = this.data[0][place];
    const { min, max } = this.uplot.scales.x;
    if (x < min || x > max) this.zoom(x - (max - min) / 2, x + (max - min) / 2);
    const y = this.lines.map((line, index) => this.data[index + 1][place]).find((value) => value !== undefined && value !== null);
    this.uplot.setCursor({ left: this.uplot.valToPos(x, "x"), top: y === undefined ? 10 : this.uplot.valToPos(y, "y") });
    announce(this.words(place).join(", "));
  }

  describe() {
    this.legend.replaceChildren(...this.lines.map((line) => {
      const sample = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      sample.setAttribute("width", "34"); sample.setAttribute("height", "8"); sample.setAttribute("aria-hidden", "true");
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of Object.entries({ x1: 0, x2: 34, y1: 4, y2: 4, "stroke-width": 3, stroke: `var(${line.color})`, "stroke-dasharray": line.dash.join(" ") })) stroke.setAttribute(name, value);
      sample.append(stroke);
      const { y } = line.curve;
      const last = y.length && y[y.length - 1] === null ? "not finite" : y[y.length - 1];
      return make("li", {}, sample, `${line.label}: ${number(last)}`);
    }));
  }

  fill() {
    if (!this.details.open) return;
    const head = make("tr", {}, make("th", { scope: "col" }, "step"), ...this.lines.map((line) => make("th", { scope: "col", class: "number" }, line.label)));
    const rows = this.data[0].map((step, place) => make("tr", {}, make("th", { scope: "row" }, number(step)),
      ...this.lines.map((line, index) => make("td", { class: "number" }, number(this.data[index + 1][place])))));
    this.table.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  }
}

const pad = (low, high) => {
  if (low === null || high === null || low === undefined || high === undefined) return [0, 1];
  const space = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - space < 0 ? 0 : low - space, high + space];
};
