// What is asked of the gateway. Keys are in this tab's session alone, and go into one header.

const OPERATOR = "weir-operator-key";
const API = "weir-api-key";

export const keys = {
  get operator() { return sessionStorage.getItem(OPERATOR) ?? ""; },
  get api() { return sessionStorage.getItem(API) ?? ""; },
  set({ operator, api }) {
    for (const [name, value] of [[OPERATOR, operator], [API, api]]) {
      if (value) sessionStorage.setItem(name, value);
      else sessionStorage.removeItem(name);
    }
  },
};

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const withKey = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function checked(response) {
  if (response.ok) return response;
  let message = `the gateway answers with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* it is not the gateway that answers */ }
  throw new Refused(message, response.status);
}

export async function ask(path, { signal } = {}) {
  const response = await fetch(path, { headers: withKey(keys.operator), signal, cache: "no-store" });
  return (await checked(response)).json();
}

export async function models() {
  const response = await fetch("/v1/models", { headers: withKey(keys.api) });
  return (await (await checked(response)).json()).data;
}

/** The data of each server-sent event. An EventSource could not carry a key. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}

export async function* snapshots(signal) {
  const response = await fetch("/debug/stack/events", { headers: withKey(keys.operator), signal, cache: "no-store" });
  for await (const data of events(await checked(response))) yield JSON.parse(data);
}

/** Chunks of an answer, in OpenAI's form. An error within the stream is thrown. */
export async function* answer(body, signal) {
  const headers = { "Content-Type": "application/json", ...withKey(keys.api) };
  const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of events(await checked(response))) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, 0);
    yield chunk;
  }
}
