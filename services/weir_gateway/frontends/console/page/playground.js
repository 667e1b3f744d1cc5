// A conversation with a model over the public API, as any client would have it.

import { answer, models } from "./api.js";
import { byId, count, el, milliseconds, rate } from "./dom.js";

export class Playground {
  /** `open(id)` shows a request. */
  constructor(open) {
    this.open = open;
    this.messages = [];
    this.running = null;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      byId("conversation").replaceChildren();
    });
  }

  async refresh() {
    const found = (await models()).map((model) => model.id);
    const chosen = byId("model").value;
    byId("model").replaceChildren(...found.map((name) => el("option", { text: name, value: name })));
    if (found.includes(chosen)) byId("model").value = chosen;
  }

  async send() {
    const prompt = byId("prompt").value;
    if (this.running || !prompt.trim()) return;
    byId("prompt").value = "";
    this.messages.push({ role: "user", content: prompt });
    const messages = this.messages;
    this.add("user").text.textContent = prompt;
    const line = this.add("assistant");
    const running = new AbortController();
    this.setRunning(running);
    try {
      const content = await this.stream(line, running.signal);
      if (content) messages.push({ role: "assistant", content });
    } catch (error) {
      const stopped = error.name === "AbortError";
      line.meta.textContent = stopped ? "stopped" : error.message;
      line.meta.classList.toggle("failed", !stopped);
    } finally {
      this.setRunning(null);
    }
  }

  /** Returns the whole text. */
  async stream(line, signal) {
    const began = performance.now();
    let first = null, content = "", thoughts = "", usage = null, id = "";
    const body = {
      model: byId("model").value, messages: this.messages, stream: true, stream_options: { include_usage: true },
      max_tokens: byId("max-tokens").valueAsNumber || 128, temperature: byId("temperature").valueAsNumber || 0,
    };
    for await (const chunk of answer(body, signal)) {
      id = chunk.id ?? id;
      usage = chunk.usage ?? usage;
      const delta = chunk.choices[0]?.delta ?? {};
      if (!delta.content && !delta.reasoning_content) continue;
      first ??= performance.now() - began;
      thoughts += delta.reasoning_content ?? "";
      content += delta.content ?? "";
      line.text.textContent = content || `thinking: ${thoughts}`;
    }
    const whole = performance.now() - began;
    const perSecond = usage && first !== null ? (usage.completion_tokens - 1) / Math.max(1e-3, (whole - first) / 1000) : null;
    const figures = `first token ${milliseconds(first)}, whole ${milliseconds(whole)}, ${count(usage?.completion_tokens)} tokens, ${rate(perSecond)} tokens/s `;
    const button = el("button", { type: "button", className: "link", text: "where the time went" });
    button.addEventListener("click", () => this.open(id));
    line.meta.replaceChildren(figures, button);
    return content;
  }

  add(role) {
    const text = el("div", { className: "text" }), meta = el("div", { className: "meta" });
    const line = el("li", { className: role, "aria-label": role }, [text, meta]);
    byId("conversation").append(line);
    line.scrollIntoView({ block: "nearest" });
    return { text, meta };
  }

  setRunning(running) {
    this.running = running;
    byId("send").disabled = running !== null;
    byId("stop").disabled = running === null;
  }
}
