// The stack as a whole: figures, lanes, latencies, workers, pages, tenants.

import { byId, count, el, rate, sparkline, Table } from "./dom.js";

const KEPT = 120;
const LATENCIES = {
  time_to_first_token: "first token", inter_token: "between tokens", time_per_output_token: "per token",
  queue: "in the queue", end_to_end: "whole request",
};
const number = (name, cell) => ({ name, cell, number: true });
const word = (name, cell) => ({ name, cell });

function meter(parts, total, label) {
  const fills = parts.map(([className, num]) => {
    const fill = el("i", { className });
    fill.style.width = `${(100 * num) / Math.max(1, total)}%`;
    return fill;
  });
  return el("span", { className: "meter", role: "img", "aria-label": label }, fills);
}

const pagesMeter = (one) => meter(
  [["leased-fill", one.num_leased], ["shared-fill", one.num_shared], ["cached-fill", one.num_cached], ["orphaned-fill", one.num_orphaned]],
  one.num_pages, `${one.num_pages - one.num_free} of ${one.num_pages} pages used`,
);

export class StackView {
  constructor() {
    this.history = [];
    this.lanes = new Table(byId("lanes"), {
      label: "Lanes", none: "No scheduler leads, or it does not answer.", keyOf: (lane) => lane.lane,
      columns: [word("lane", (one) => one.lane), number("queued", (one) => count(one.num_queued)),
        number("running", (one) => count(one.num_in_flight)), number("oldest wait", (one) => `${rate(one.oldest_wait_s)} s`),
        number("grants/s", (one) => rate(one.grants_per_s)), number("tokens/s", (one) => rate(one.output_tokens_per_s))],
    });
    this.latencies = new Table(byId("latencies"), {
      label: "Latencies", none: "No request has ended.", keyOf: (one) => `${one.name} ${one.model} ${one.lane}`,
      columns: [word("latency", (one) => LATENCIES[one.name] ?? one.name), word("lane", (one) => one.lane),
        word("model", (one) => one.model), number("values", (one) => count(one.num)),
        number("p50 ms", (one) => rate(one.p50_ms)), number("p90 ms", (one) => rate(one.p90_ms)),
        number("p99 ms", (one) => rate(one.p99_ms))],
    });
    this.workers = new Table(byId("workers"), {
      label: "Workers", none: "No worker is registered.", keyOf: (one) => one.worker_id,
      columns: [word("worker", (one) => one.worker_id), word("role", (one) => one.role), word("model", (one) => one.model),
        word("duty", (one) => el("span", { text: one.duty, className: `duty-${one.duty}` })),
        word("batch", (one) => meter([["leased-fill", one.num_running]], one.max_num_seqs, `${one.num_running} of ${one.max_num_seqs}`)),
        number("running", (one) => `${count(one.num_running)} / ${count(one.max_num_seqs)}`),
        number("waiting", (one) => count(one.num_waiting)), number("steps/s", (one) => rate(one.steps_per_s)),
        number("prompt tokens/s", (one) => rate(one.prompt_tokens_per_s)),
        number("answer tokens/s", (one) => rate(one.output_tokens_per_s)),
        number("pages", (one) => count(one.num_used_pages)), number("gave way", (one) => count(one.num_preemptions))],
    });
    this.arenas = new Table(byId("arenas"), {
      label: "Arenas", none: "No arena can be reached from this gateway.", keyOf: (one) => one.process_id,
      columns: [word("arena", (one) => one.process_id), word("use", pagesMeter), number("free", (one) => count(one.num_free)),
        number("held", (one) => count(one.num_leased)), number("prefix", (one) => count(one.num_shared + one.num_cached)),
        number("orphaned", (one) => count(one.num_orphaned)),
        number("found", (one) => (one.prefix_hit_ratio === null ? "-" : `${count(100 * one.prefix_hit_ratio)} %`))],
    });
    this.tenants = new Table(byId("tenants"), {
      label: "Tenants", none: "Nobody has asked for anything.", keyOf: (one) => one.tenant,
      columns: [word("tenant", (one) => one.tenant), number("accepted", (one) => count(one.num_accepted)),
        number("finished", (one) => count(one.num_finished)), number("refused", (one) => count(one.num_refused)),
        number("prompt tokens", (one) => count(one.num_prompt_tokens)),
        number("answer tokens", (one) => count(one.num_output_tokens)), number("tokens/s", (one) => rate(one.output_tokens_per_s))],
    });
  }

  show(snapshot) {
    const { gateway, scheduler } = snapshot;
    this.history.push([gateway.output_tokens_per_s ?? 0, gateway.requests_per_s ?? 0]);
    if (this.history.length > KEPT) this.history.shift();
    const line = (place) => sparkline(this.history.map((one) => one[place]));
    const figures = [
      ["answer tokens/s", rate(gateway.output_tokens_per_s), line(0)], ["requests/s", rate(gateway.requests_per_s), line(1)],
      ["open requests", count(gateway.num_open)], ["queued", count(scheduler?.num_queued)],
      ["granted", count(scheduler?.num_granted)], ["finished", count(gateway.num_finished)],
      ["failed", count(gateway.num_failed)], ["refused", count(gateway.num_refused)],
    ];
    byId("figures").replaceChildren(...figures.map(([name, value, chart]) =>
      el("div", {}, [el("dt", { text: name }), el("dd", { text: value }), ...(chart ? [chart] : [])])));
    const window = snapshot.latency_window_s;
    byId("window").textContent = window === null ? "since the gateway's start" : `of the last ${count(window)} s`;
    this.lanes.show(snapshot.lanes);
    this.latencies.show(snapshot.latencies.filter((one) => one.num > 0));
    this.workers.show(snapshot.workers);
    this.arenas.show(snapshot.arenas);
    this.tenants.show(snapshot.tenants);
  }
}
