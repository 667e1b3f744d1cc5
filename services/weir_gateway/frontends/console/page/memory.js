// Each arena's pages by range, and each worker's last steps with who was in them.

import { ask } from "./api.js";
import { byId, count, el, milliseconds, shortId, svg } from "./dom.js";

const MAX_COLUMNS = 78;
const MIN_COLUMNS = 30;
const COLUMN_PX = 12;
const CELL = 10;
const GAP = 1.5;
const STATES = [ // class, field, word
  ["leased", "num_leased", "held by workers"], ["shared", "num_shared", "sealed prefix in use"],
  ["cached", "num_cached", "sealed prefix"], ["orphaned", "num_orphaned", "orphaned"], ["free", "num_free", "free"],
];
const MAX_ROWS = 24;
const STEP = 12;
const ROW = 16;
const TOP = 32;

const box = (x, y, width, height) => `M${x} ${y}h${width}v${height.toFixed(2)}h${-width}z`;

const numColumns = () => Math.min(MAX_COLUMNS, Math.max(MIN_COLUMNS, Math.floor(innerWidth / COLUMN_PX)));

function pageMap({ address, worker_ids: workerIds, pages }) {
  const columns = numColumns();
  const paths = Object.fromEntries(STATES.map(([state]) => [state, []]));
  pages.ranges.forEach((range, index) => {
    const x = (index % columns) * CELL;
    let y = Math.floor(index / columns) * CELL;
    const total = STATES.reduce((sum, [, field]) => sum + range[field], 0);
    for (const [state, field] of STATES) {
      const height = ((CELL - GAP) * range[field]) / Math.max(1, total);
      if (height > 0) paths[state].push(box(x, y, CELL - GAP, height));
      y += height;
    }
  });
  const sums = STATES.map(([, field, word]) => [word, pages.ranges.reduce((sum, range) => sum + range[field], 0)]);
  const label = `${count(pages.num_pages)} pages: ${sums.map(([word, num]) => `${count(num)} ${word}`).join(", ")}`;
  const height = Math.ceil(pages.ranges.length / columns) * CELL;
  const drawn = STATES.map(([state]) => svg("path", { class: state, d: paths[state].join("") }));
  return el("section", { className: "panel page-map" }, [
    el("h2", { text: `Arena of ${workerIds.join(", ")}`, title: address }),
    svg("svg", { class: "map", viewBox: `0 0 ${columns * CELL} ${height}`, role: "img", "aria-label": label }, drawn),
    el("p", { className: "none", text: `${label}. A cell is ${count(pages.pages_per_range)} pages.` }),
  ]);
}

/** Who was in the steps; who came last stands last, and the first of too many are left out. */
function rowsOf(steps) {
  const ids = [...new Set(steps.flatMap((step) => step.sequences.map((one) => one.request_id)))];
  return new Map(ids.slice(-MAX_ROWS).map((id, place) => [id, place]));
}

function drawnSteps(steps, rows) {
  const longest = Math.max(...steps.map((step) => step.duration_ms), 1e-6);
  const durations = [], prompts = [], decoded = [];
  steps.forEach((step, column) => {
    const height = (TOP - 6) * (step.duration_ms / longest);
    durations.push(box(column * STEP, TOP - 4 - height, STEP - 1, height));
    for (const one of step.sequences) {
      const row = rows.get(one.request_id);
      if (row === undefined) continue;
      (one.num_prompt_tokens ? prompts : decoded).push(box(column * STEP, TOP + row * ROW + 2, STEP - 1, ROW - 4));
    }
  });
  return { longest, paths: [["durations", durations], ["prompt", prompts], ["decoded", decoded]] };
}

function timeline(worker, open) {
  const heading = el("h2", { text: `Steps of ${worker.worker_id}` });
  const { steps } = worker;
  if (steps.length === 0) {
    const text = "No step since somebody looks at them.";
    return el("section", { className: "panel steps" }, [heading, el("p", { className: "none", text })]);
  }
  const rows = rowsOf(steps);
  const { longest, paths } = drawnSteps(steps, rows);
  const names = [...rows.keys()].map((id) => {
    const button = el("button", { type: "button", className: "link", text: shortId(id), title: id });
    button.addEventListener("click", () => open(id));
    return button;
  });
  const top = el("span", { className: "none", text: `up to ${milliseconds(longest)}` });
  top.style.height = `${TOP}px`;
  const height = TOP + rows.size * ROW;
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const label = `Steps ${first.step} to ${last.step}, of ${rows.size} requests`;
  const drawn = paths.map(([state, boxes]) => svg("path", { class: state, d: boxes.join("") }));
  const chart = svg("svg", { viewBox: `0 0 ${steps.length * STEP} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, drawn);
  chart.style.height = `${height}px`;
  return el("section", { className: "panel steps" }, [
    heading,
    el("div", { className: "timeline" }, [el("div", { className: "names" }, [top, ...names]), chart]),
    el("p", { className: "none", text: `${label}; the last one had ${last.num_sequences} sequences and ${last.num_tokens} tokens.` }),
  ]);
}

export class MemoryView {
  /** `open(id)` shows a request. */
  constructor(open) {
    this.open = open;
  }

  async refresh() {
    const [pages, steps] = await Promise.all([ask("/debug/pages"), ask("/debug/steps")]);
    const none = el("p", { className: "none", text: "No arena can be reached from this gateway." });
    byId("page-maps").replaceChildren(...(pages.arenas.length ? pages.arenas.map(pageMap) : [none]));
    if (byId("timelines").contains(document.activeElement)) return; // who is about to press a button keeps it
    byId("timelines").replaceChildren(...steps.workers.map((worker) => timeline(worker, this.open)));
  }
}
