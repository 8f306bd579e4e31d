// The fields beside the chat.  All but the key are kept in this browser.

import { KEY_CHANGED, getKey, setKey } from "./api.js";

const ENTRY = "settings";
const DEFAULTS = { system: "", temperature: 0.6, top_p: 0.95, max_tokens: 1024 };

const $ = (id) => document.getElementById(id);

export function settings() {
  return {
    system: $("system").value,
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    max_tokens: $("max_tokens").value === "" ? null : Number($("max_tokens").value),
  };
}

export function startSettings() {
  const kept = JSON.parse(localStorage.getItem(ENTRY) ?? "{}");
  for (const name of Object.keys(DEFAULTS)) {
    const input = $(name);
    input.value = kept[name] ?? (name in kept ? "" : DEFAULTS[name]);
    input.addEventListener("input", () => {
      tell(name);
      localStorage.setItem(ENTRY, JSON.stringify(settings()));
    });
    tell(name);
  }
  const showKey = () => ($("key").value = getKey());
  $("key").addEventListener("change", () => setKey($("key").value.trim()));
  document.addEventListener(KEY_CHANGED, showKey);
  showKey();
  $("settings-toggle").addEventListener("click", () => showSettings(!areShown()));
}

/** On a narrow page the settings lie over the chat; elsewhere they are always there. */
export function showSettings(areWanted) {
  $("chat").classList.toggle("with-settings", areWanted);
  $("settings-toggle").setAttribute("aria-expanded", String(areWanted));
}

function areShown() {
  return $("chat").classList.contains("with-settings");
}

export function goToKey() {
  showSettings(true);
  $("key").focus();
}

/** A slider's value, beside its name. */
function tell(name) {
  const output = document.querySelector(`label[for="${name}"] output`);
  if (output) output.textContent = Number($(name).value).toFixed(2);
}
