"use strict";
(() => {
  const PRINTED_FOLDS = 30;
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

  const specification = (figure) => resolve(JSON.parse(figure.querySelector("script[type='application/json']").textContent));

  const draw = async (figure) => {
    const spec = specification(figure);
    const plot = figure.querySelector(".plot");
    const options = { actions: false, ast: true, renderer: figure.dataset.renderer, config: theme(), tooltip: { theme: "custom" } };
    // An aria label per mark repeats every number of the chart to a screen reader; the caption and the tables serve better.
    options.config.aria = false;
    figure.finalize?.();
    try {
      const result = await window.vegaEmbed(plot, spec, options);
      figure.finalize = result.finalize;
      figure.view = result.view;
      result.view.addEventListener("mouseover", (_, item) => trace(figure, item && item.datum));
      result.view.addEventListener("click", (_, item) => trace(figure, item && item.datum));
      // The name of the chart's box stands for its marks; a box with a slider or a menu is no picture but a group.
      for (const svg of plot.querySelectorAll("svg")) svg.setAttribute("aria-hidden", "true");
      if (plot.querySelector(".vega-bindings :is(input, select)")) plot.closest(".chart").setAttribute("role", "group");
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

  const save = (name, content, type) => {
    const link = document.createElement("a");
    link.download = name;
    link.href = content.startsWith("data:") ? content : URL.createObjectURL(new Blob([content], { type }));
    link.click();
    if (link.href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  const saveFigure = async (figure, kind) => {
    const name = `${figure.dataset.name}.${kind}`;
    if (kind === "svg") save(name, await figure.view.toSVG(), "image/svg+xml");
    else save(name, (await figure.view.toCanvas(2)).toDataURL("image/png"), "image/png");
  };

  const texts = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => {
    const button = cell.querySelector("button");
    return (button ?? cell).innerText.replace(/\s+/g, " ").trim() + (button && cell.querySelector("small") ? ` (${cell.querySelector("small").textContent})` : "");
  }));
  // Raw numbers where a cell has one: a table is saved to be computed with.
  const raw = (table) => texts(table).map((cells, at) => cells.map((text, column) => (at && table.rows[at].cells[column].dataset.value) || text));
  const tex = (text) => text.replace(/[\\&%$#_{}~^]/g, (found) => ({ "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}" })[found] ?? `\\${found}`)
    .replace(/[−±▲▼↑↓–]/g, (found) => ({ "−": "$-$", "±": "$\\pm$", "–": "--" })[found] ?? "");
  const saveTable = (table, kind) => {
    const name = `${(table.caption?.textContent ?? "table").toLowerCase().replace(/[^a-z0-9]+/g, "-")}.${kind}`;
    if (kind === "csv") return save(name, raw(table).map((row) => row.map((text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)).join(",")).join("\n") + "\n", "text/csv");
    const [head, ...rows] = texts(table).map((row) => row.map(tex).join(" & ") + " \\\\");
    return save(name, `\\begin{tabular}{l${"r".repeat(table.rows[0].cells.length - 1)}}\n\\toprule\n${head}\n\\midrule\n${rows.join("\n")}\n\\bottomrule\n\\end{tabular}\n`, "text/x-tex");
  };

  for (const button of document.querySelectorAll("button[data-save]")) {
    button.addEventListener("click", () => {
      const figure = button.closest("figure"), kind = button.dataset.save;
      return figure ? saveFigure(figure, kind) : saveTable(button.closest("p").previousElementSibling.querySelector("table"), kind);
    });
  }

  // A printer does not wait for a chart to be drawn, but a drawn one can be given another width at once. A fold that was never opened
  // has no charts yet: where it holds a chart it stays closed.
  const PALETTE = ["--paper", "--panel", "--ink", "--muted", "--line", "--rule", "--blue", "--orange", "--sky", "--green", "--vermillion", "--purple", "--grey", "--faint"];
  const palette = () => Object.fromEntries(PALETTE.map((name) => [colour(name).toLowerCase(), name]));
  const onPaper = async (figure, before) => {
    const plot = figure.querySelector(".plot");
    // promises alone: they are kept before the printer takes the page
    await figure.view.width(plot.clientWidth).runAsync();
    for (const mark of plot.querySelectorAll("svg [fill], svg [stroke]")) {
      for (const side of ["fill", "stroke"]) {
        const name = before[mark.getAttribute(side)?.toLowerCase()];
        if (name) mark.setAttribute(side, colour(name));
      }
    }
  };
  addEventListener("beforeprint", () => {
    const before = palette();
    document.documentElement.classList.add("paper");
    // paper shows what is folded, unless that is dozens of pages
    const folds = [...document.querySelectorAll("details")].filter((fold) => !fold.open && !fold.querySelector("figure:not([data-drawn])"));
    if (folds.length <= PRINTED_FOLDS) folds.forEach((fold) => { fold.open = true; });
    document.querySelectorAll("figure[data-drawn=yes]").forEach((figure) => hidden(figure) || onPaper(figure, before));
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("paper");
    drawAll(true);
  });

  const follow = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let fold = target.querySelector(":scope > details") ?? target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", follow);

  for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sort(button));
  for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", () => fold.open && drawAll(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(true));
  follow();
  drawAll(false);
})();
