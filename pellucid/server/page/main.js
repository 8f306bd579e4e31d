// The frame of the page: its two views, light and dark, the model's name.

import { KEY_CHANGED, call } from "./api.js";
import { startChat } from "./chat.js";
import { offerModels } from "./settings.js";
import { XRay } from "./xray.js";

const $ = (id) => document.getElementById(id);
const views = ["chat", "xray"];
const xray = new XRay();

function show(name) {
  for (const view of views) {
    $(view).hidden = view !== name;
    $(`tab-${view}`).setAttribute("aria-selected", String(view === name));
    $(`tab-${view}`).tabIndex = view === name ? 0 : -1;
  }
  $("settings-toggle").hidden = name !== "chat";
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
  xray.setWatched(name === "xray" && !document.hidden);
}

function shown() {
  return views.find((view) => !$(view).hidden);
}

/** The arrow keys go from tab to tab, as ARIA has it. */
function turnTabs(event) {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  const other = views.find((view) => view !== shown());
  show(other);
  $(`tab-${other}`).focus();
}

function turnTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", theme);
  document.documentElement.dataset.theme = theme;
}

async function nameModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    $("model").textContent = data[0].id;
    offerModels(data.map(({ id }) => id));
    document.title = `Pellucid · ${data[0].id}`;
  } catch {
    $("model").textContent = ""; // the views say what is wrong
  }
}

startChat();
nameModel();
document.addEventListener(KEY_CHANGED, nameModel);
for (const view of views) $(`tab-${view}`).addEventListener("click", () => show(view));
$("tabs").addEventListener("keydown", turnTabs);
$("theme").addEventListener("click", turnTheme);
new MutationObserver(() => xray.repaint()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
document.addEventListener("visibilitychange", () => xray.setWatched(shown() === "xray" && !document.hidden));
const showHash = () => show(location.hash === "#xray" ? "xray" : "chat");
window.addEventListener("hashchange", showHash); // by hand, or from a link
showHash();
