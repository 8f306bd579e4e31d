// The frame of the page: its two views, light and dark, the model's name.

import { call } from "./api.js";
import { startChat } from "./chat.js";
import { XRay } from "./xray.js";

const views = ["chat", "xray"];
const xray = new XRay();

function show(name) {
  for (const view of views) {
    document.getElementById(view).hidden = view !== name;
    document.getElementById(`tab-${view}`).setAttribute("aria-selected", String(view === name));
  }
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
  xray.setWatched(name === "xray" && !document.hidden);
}

function shown() {
  return views.find((view) => !document.getElementById(view).hidden);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  xray.repaint();
}

function preferredTheme() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  return localStorage.getItem("theme") ?? (isDark ? "dark" : "light");
}

async function nameModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    document.getElementById("model").textContent = data[0].id;
    document.title = `Pellucid · ${data[0].id}`;
  } catch {
    document.getElementById("model").textContent = ""; // the chat will say what is wrong
  }
}

setTheme(preferredTheme());
startChat();
nameModel();
document.getElementById("key").addEventListener("change", nameModel);
for (const view of views) {
  document.getElementById(`tab-${view}`).addEventListener("click", () => show(view));
}
document.getElementById("theme").addEventListener("click", () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
});
document.addEventListener("visibilitychange", () => xray.setWatched(shown() === "xray" && !document.hidden));
show(location.hash === "#xray" ? "xray" : "chat");
