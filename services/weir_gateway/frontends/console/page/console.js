// The page: which view is shown, what keeps it up to date, themes, keys and shortcuts.

import { keys, Refused, snapshots } from "./api.js";
import { byId } from "./dom.js";
import { MemoryView } from "./memory.js";
import { Playground } from "./playground.js";
import { RequestsView } from "./requests.js";
import { StackView } from "./stack.js";

const RETRY_MS = 2000;
const REFRESH_MS = 1000;
const THEME = "weir-theme";
const VIEWS = ["stack", "memory", "requests", "playground"];

const openRequest = (id) => { location.hash = `requests/${encodeURIComponent(id)}`; };
const stack = new StackView();
const views = { memory: new MemoryView(openRequest), requests: new RequestsView(openRequest), playground: new Playground(openRequest) };
const now = { view: "stack", isPaused: false, watching: new AbortController() };

const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

function say(problem) {
  byId("problem").textContent = problem;
  byId("problem").hidden = !problem;
}

function setState(state, text) {
  byId("state").dataset.state = state;
  byId("state").textContent = text;
}

function complain(error) {
  if (error.name === "AbortError") return;
  const isKey = error instanceof Refused && (error.status === 401 || error.status === 403);
  say(isKey ? `${error.message}. Keys are entered under “Keys”.` : error.message);
  if (error.status === 401 && !keys.operator && !byId("key-dialog").open) openKeys();
}

/** As long as the page is there. What is refused for want of a key is not asked again before there is another. */
async function watch() {
  for (;;) {
    const { signal } = (now.watching = new AbortController());
    try {
      for await (const snapshot of snapshots(signal)) {
        setState(now.isPaused ? "waiting" : "live", now.isPaused ? "paused" : "live");
        say("");
        if (!now.isPaused) stack.show(snapshot);
      }
      setState("lost", "ended");
    } catch (error) {
      setState("lost", "not connected");
      complain(error);
      if (error instanceof Refused && error.status === 401) await new Promise((resolve) => { now.goOn = resolve; });
    }
    await pause(RETRY_MS);
  }
}

async function refreshView() {
  for (;;) {
    const isLive = now.view === "memory" || now.view === "requests";
    if (isLive && !now.isPaused && !document.hidden) await views[now.view].refresh().catch(complain);
    await pause(REFRESH_MS);
  }
}

function route() {
  const [view, id = ""] = location.hash.slice(1).split("/");
  now.view = VIEWS.includes(view) ? view : "stack";
  for (const name of VIEWS) byId(name).hidden = name !== now.view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === now.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (now.view === "requests") views.requests.showRequest(decodeURIComponent(id)).catch(complain);
  views[now.view]?.refresh().catch(complain);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  setTheme(theme);
}

function switchPause() {
  now.isPaused = !now.isPaused;
  byId("pause").setAttribute("aria-pressed", String(now.isPaused));
  setState("waiting", now.isPaused ? "paused" : "going on");
}

function openKeys() {
  byId("operator-key").value = keys.operator;
  byId("api-key").value = keys.api;
  byId("key-dialog").showModal();
}

const SHORTCUTS = {
  "/": () => byId("find-id").focus(), "?": () => byId("shortcuts").showModal(), p: switchPause, t: switchTheme, k: openKeys,
  ...Object.fromEntries(VIEWS.map((view, place) => [String(place + 1), () => { location.hash = view; byId("main").focus(); }])),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = SHORTCUTS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("find-id").value.trim();
  if (id) openRequest(id);
});
byId("pause").addEventListener("click", switchPause);
byId("theme").addEventListener("click", switchTheme);
byId("help").addEventListener("click", () => byId("shortcuts").showModal());
byId("keys").addEventListener("click", openKeys);
byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "save") return;
  keys.set({ operator: byId("operator-key").value.trim(), api: byId("api-key").value.trim() });
  say("");
  now.watching.abort();
  now.goOn?.();
  route();
});
const preference = matchMedia("(prefers-color-scheme: dark)");
const followPreference = () => setTheme(localStorage.getItem(THEME) ?? (preference.matches ? "dark" : "light"));
preference.addEventListener("change", followPreference);
window.addEventListener("hashchange", route);
followPreference();
route();
watch();
refreshView();
