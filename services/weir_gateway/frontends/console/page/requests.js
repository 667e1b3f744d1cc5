// The last requests of this gateway, and one of them phase by phase.

import { ask, Refused } from "./api.js";
import { byId, count, el, milliseconds, shortId, Table } from "./dom.js";

const PHASES = {
  tokenize: "tokenize", queue: "queue", start: "start", prefill: "prefill", hand_off: "hand-off", decode: "decode",
};
const number = (name, cell) => ({ name, cell, number: true });
const word = (name, cell, className = "") => ({ name, cell, className });
const phaseName = (name) => PHASES[name] ?? name;

export class RequestsView {
  /** `open(id)` shows a request. */
  constructor(open) {
    this.shown = "";
    const link = (one) => {
      const button = el("button", { type: "button", className: "link", text: shortId(one.request_id), title: one.request_id, "data-id": one.request_id });
      return button;
    };
    this.table = new Table(byId("request-list"), {
      label: "Requests", none: "None that fits is remembered here.", keyOf: (one) => one.request_id,
      columns: [word("request", link), word("state", (one) => one.error_type || one.finish_reason || one.life),
        word("tenant", (one) => one.tenant), word("lane", (one) => one.lane), word("model", (one) => one.model),
        number("whole", (one) => milliseconds(one.duration_ms)), number("first token", (one) => milliseconds(one.time_to_first_token_ms)),
        number("prompt", (one) => count(one.num_prompt_tokens)), number("answer", (one) => count(one.num_output_tokens)),
        word("longest", (one) => `${phaseName(one.longest_phase)}, ${milliseconds(one.longest_phase_ms)}`),
        word("cause", (one) => one.cause)],
    });
    byId("request-list").addEventListener("click", (event) => {
      const id = event.target.closest("button[data-id]")?.dataset.id;
      if (id) open(id);
    });
    byId("filters").addEventListener("input", () => this.refresh().catch(() => {}));
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
  }

  async refresh() {
    const wanted = [...new FormData(byId("filters"))].filter(([, value]) => value);
    const query = new URLSearchParams([...wanted, ["limit", "50"]]);
    this.table.show((await ask(`/debug/requests?${query}`)).requests);
    if (this.shown) await this.showRequest(this.shown);
  }

  /** Empty: none. */
  async showRequest(id) {
    this.shown = id;
    const panel = byId("waterfall");
    panel.hidden = !id;
    if (!id) return;
    try {
      const record = await ask(`/debug/requests/${encodeURIComponent(id)}`);
      if (this.shown === id) panel.replaceChildren(...waterfall(record));
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) throw error;
      panel.replaceChildren(el("h2", { text: "Not found" }), el("p", { text: error.message }));
    }
  }
}

function waterfall({ summary, phases, events, error }) {
  const longest = el("p", { className: "longest", id: "longest" }, [
    "Longest: ", el("strong", { text: phaseName(summary.longest_phase) }),
    `, ${milliseconds(summary.longest_phase_ms)} of ${milliseconds(summary.duration_ms)}: ${summary.cause}`,
  ]);
  const facts = [
    summary.model, `lane ${summary.lane}`, `tenant ${summary.tenant}`, summary.error_type || summary.finish_reason || summary.life,
    `${count(summary.num_prompt_tokens)} prompt tokens, ${count(summary.num_cached_tokens)} of them cached`,
    `${count(summary.num_output_tokens)} answer tokens`, `${count(summary.num_preemptions)} times gave way`,
    ...(summary.trace_id ? [`trace ${summary.trace_id}`] : []), ...(error ? [error] : []),
  ];
  const lines = phases.map((phase) => phaseLine(phase, summary));
  const happened = events.map((one) => el("li", {
    text: `${milliseconds(one.at_ms)}: ${one.name} after ${one.num_output_tokens} tokens${one.detail ? `: ${one.detail}` : ""}`,
  }));
  return [
    el("h2", { text: `Request ${summary.request_id}` }), longest, el("p", { className: "facts", text: facts.join(" · ") }),
    el("ol", { className: "phases", "aria-label": "Phases" }, lines),
    ...(happened.length ? [el("ul", { className: "events", "aria-label": "Events" }, happened)] : []),
  ];
}

function phaseLine(phase, summary) {
  const whole = Math.max(summary.duration_ms, 1e-6);
  const bar = el("i");
  bar.style.left = `${Math.min(99.5, (100 * phase.start_ms) / whole)}%`;
  bar.style.width = `${Math.min(100, (100 * phase.duration_ms) / whole)}%`;
  const isLongest = phase.name === summary.longest_phase && phase.duration_ms === summary.longest_phase_ms;
  const shares = phase.shares.map((share) => `${share.name.replaceAll("_", " ")} ${milliseconds(share.duration_ms)}`);
  const cause = [phase.cause, ...shares, ...(phase.worker_id ? [phase.worker_id] : [])].join(" · ");
  const name = phaseName(phase.name) + (phase.dispatch > 1 ? ` ${phase.dispatch}` : "");
  return el("li", { className: isLongest ? "is-longest" : "" }, [
    el("span", { text: name }), el("span", { className: "ms", text: milliseconds(phase.duration_ms) }),
    el("span", { className: "track", "aria-hidden": "true" }, [bar]), el("span", { className: "cause", text: cause }),
  ]);
}
