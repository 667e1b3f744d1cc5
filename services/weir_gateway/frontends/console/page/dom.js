// Elements, tables and figures. Whatever comes from elsewhere goes in as text: nothing here reads HTML.

const NONE = "-";
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const byId = (id) => document.getElementById(id);

export function el(tag, { text, className, title, ...attributes } = {}, children = []) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  if (title) made.title = title;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function svg(tag, attributes, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));
export const rate = (value) => (value === null || value === undefined ? NONE : oneDigit.format(value));

export function milliseconds(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 10000 ? `${oneDigit.format(value / 1000)} s` : `${oneDigit.format(value)} ms`;
}

export const shortId = (id) => (id.length > 12 ? `${id.slice(0, 10)}…` : id);

/** A table whose rows stay the same elements while their keys stay, so that a focus in one is not lost. */
export class Table {
  /** `columns`: {name, number, cell(row) -> string or Node}. */
  constructor(parent, { columns, keyOf, label, none }) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.rows = new Map();
    const heads = columns.map((one) => el("th", { text: one.name, scope: "col", className: one.number ? "number" : "" }));
    this.body = el("tbody");
    this.table = el("table", { "aria-label": label }, [el("thead", {}, [el("tr", {}, heads)]), this.body]);
    this.none = el("p", { text: none, className: "none" });
    parent.append(this.table, this.none);
  }

  show(rows) {
    const before = this.rows;
    this.rows = new Map();
    rows.forEach((row, index) => {
      const key = this.keyOf(row);
      const line = before.get(key) ?? el("tr", {}, this.columns.map((one) => el("td", { className: one.number ? "number" : one.className ?? "" })));
      before.delete(key);
      this.rows.set(key, line);
      this.columns.forEach((column, place) => setCell(line.children[place], column.cell(row)));
      if (this.body.children[index] !== line) this.body.insertBefore(line, this.body.children[index] ?? null);
    });
    for (const line of before.values()) line.remove();
    this.table.hidden = rows.length === 0;
    this.none.hidden = rows.length > 0;
  }
}

function setCell(cell, content) {
  if (content instanceof Node) {
    if (cell.firstChild && content.isEqualNode(cell.firstChild)) return; // a button that has the focus keeps it
    cell.replaceChildren(content);
  } else if (cell.textContent !== content) {
    cell.textContent = content;
  }
}

/** A line through the values, from the oldest to the newest; none where there is nothing to draw. */
export function sparkline(values) {
  const highest = Math.max(...values, 1e-9);
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((value, index) => `${(index * step).toFixed(1)} ${(21 - (19 * value) / highest).toFixed(1)}`);
  const path = svg("path", { d: values.length > 1 ? `M${points.join("L")}` : "" });
  return svg("svg", { viewBox: "0 0 100 22", preserveAspectRatio: "none", "aria-hidden": "true" }, [path]);
}
