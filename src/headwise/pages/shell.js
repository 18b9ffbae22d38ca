"use strict";
(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Colours in a chart are written as CSS variables, var(--blue), so that one chart serves light and dark.
  const resolve = (node, key) => {
    if (key === "datasets" || key === "values") return node;
    if (Array.isArray(node)) return node.map((item) => resolve(item));
    if (node && typeof node === "object") return Object.fromEntries(Object.entries(node).map(([k, v]) => [k, resolve(v, k)]));
    const match = typeof node === "string" && /^var\((--[a-z]+)\)$/.exec(node);
    return match ? colour(match[1]) : node;
  };

  const theme = () => {
    const [ink, muted, line, rule] = ["--ink", "--muted", "--line", "--rule"].map(colour);
    const font = getComputedStyle(document.body).fontFamily;
    const axis = {
      labelColor: muted, titleColor: muted, gridColor: line, domainColor: rule, tickColor: rule, labelFont: font, titleFont: font,
      titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 11.5, tickSize: 4, labelPadding: 4, titlePadding: 7,
    };
    return {
      background: null, font, axis, view: { stroke: null }, title: { color: ink, font },
      legend: { labelColor: muted, titleColor: muted, labelFont: font, titleFont: font, titleFontWeight: "normal", symbolSize: 70 },
      text: { color: ink, font }, range: { category: ["--blue", "--orange", "--green", "--purple", "--sky", "--vermillion", "--grey"].map(colour) },
    };
  };

  const trace = (figure, datum) => {
    const box = figure.querySelector(".trace");
    if (!box || !datum || !Array.isArray(datum.spectrum) || !datum.spectrum.length) return;
    const values = datum.spectrum, top = Math.max(...values) || 1, last = Math.max(values.length - 1, 1);
    const points = values.map((v, i) => `${(300 * i / last).toFixed(1)},${(42 - 40 * v / top).toFixed(1)}`).join(" ");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 300 44");
    svg.setAttribute("preserveAspectRatio", "none");
    const polyline = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    for (const [name, value] of Object.entries({ points, fill: "none", stroke: colour("--blue"), "stroke-width": "1.6", "vector-effect": "non-scaling-stroke" })) {
      polyline.setAttribute(name, value);
    }
    svg.append(polyline);
    const words = document.createElement("span");
    words.textContent = `${datum.name ?? ""} ${box.dataset.label} (${values.length}), largest ${top.toPrecision(3)}`;
    box.replaceChildren(words, svg);
  };

  const draw = async (figure) => {
    const spec = resolve(JSON.parse(figure.querySelector("script[type='application/json']").textContent));
    const plot = figure.querySelector(".plot");
    const options = { actions: false, ast: true, renderer: figure.dataset.renderer, config: theme(), tooltip: { theme: "custom" } };
    // An aria label per mark repeats every number of the chart to a screen reader; the caption and the tables serve better.
    options.config.aria = false;
    figure.finalize?.();
    try {
      const result = await window.vegaEmbed(plot, spec, options);
      figure.finalize = result.finalize;
      result.view.addEventListener("mouseover", (_, item) => trace(figure, item && item.datum));
      result.view.addEventListener("click", (_, item) => trace(figure, item && item.datum));
      figure.dataset.drawn = "yes";
    } catch (error) {
      figure.dataset.drawn = "failed";
      plot.textContent = `This chart could not be drawn: ${error.message}`;
      console.error(error);
    }
  };

  const hidden = (figure) => figure.closest("details:not([open])");
  const drawAll = async (again) => {
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      if (!hidden(figure) && (again || !figure.dataset.drawn)) await draw(figure);
    }
    document.documentElement.dataset.charts = "ready";
  };

  const key = (row, column) => {
    const cell = row.cells[column];
    if (!("value" in cell.dataset)) return cell.textContent.trim().toLowerCase();
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));

  const sort = (button) => {
    const header = button.closest("th"), table = header.closest("table"), body = table.tBodies[0];
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    const rows = [...body.rows].map((row) => ({ row, value: key(row, header.cellIndex) }));
    // Missing values stay last in both directions.
    rows.sort((a, b) => (a.value === null) - (b.value === null) || (a.value === null ? 0 : direction * order(a.value, b.value)));
    body.append(...rows.map(({ row }) => row));
  };

  for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sort(button));
  for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", () => fold.open && drawAll(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(true));
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((fold) => { fold.open = true; }));
  drawAll(false);
})();
