// Filters of the table of claims, by source, method and verdict, and short rows: claim, source, verdict, figures, study.
// Without this script the table stands whole.
document.addEventListener("DOMContentLoaded", () => {
  const names = ["source", "method", "verdict"];
  const table = [...document.querySelectorAll("article table")].find((one) => {
    const heads = [...one.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    return heads[0] === "claim" && names.every((name) => heads.includes(name));
  });
  if (!table) return;
  const heads = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  const rows = [...table.querySelectorAll("tbody tr")];
  // seeds that would do, and margins, are details of one verdict; a claim may be about several methods
  const values = (row, name) => {
    const text = row.cells[heads.indexOf(name)].textContent.trim();
    if (name === "verdict") return [text.split("; before: ")[0].replace(/(: change the setting|: ±?[\d.].*| \(.*| within .*)$/, "")];
    return name === "method" ? text.split(", ") : [text];
  };
  const bar = document.createElement("p");
  bar.className = "claim-filters";
  const count = document.createElement("span");
  count.setAttribute("role", "status");
  const selects = names.map((name) => {
    const label = document.createElement("label");
    const select = document.createElement("select");
    select.name = name;
    select.add(new Option("all", ""));
    const found = new Set(rows.flatMap((row) => values(row, name)));
    for (const value of [...found].filter((one) => one !== "–").sort()) select.add(new Option(value, value));
    label.append(`${name} `, select);
    bar.append(label);
    select.addEventListener("change", show);
    return select;
  });
  function show() {
    let shown = 0;
    for (const row of rows) {
      row.hidden = !selects.every((one) => !one.value || values(row, one.name).includes(one.value));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${rows.length} claims`;
  }
  const whole = document.createElement("input");
  whole.type = "checkbox";
  const all = document.createElement("label");
  all.append(whole, " all columns");
  bar.append(all);
  const folded = ["method", "setting", "published"].map((name) => heads.indexOf(name)).filter((at) => at >= 0);
  function fold() {
    for (const row of table.rows) for (const at of folded) row.cells[at].hidden = !whole.checked;
  }
  whole.addEventListener("change", fold);
  fold();
  bar.append(count);
  (table.closest(".table-wrapper") || table).before(bar);
  show();
});
