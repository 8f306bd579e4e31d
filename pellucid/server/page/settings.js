// The fields beside the chat.  All but the key are kept in this browser.

import { KEY_CHANGED, getKey, setKey } from "./api.js";

const ENTRY = "settings";
const DEFAULTS = {
  system: "", own_model: "", temperature: 0.6, compares: false, other_model: "", other_temperature: 1, top_p: 0.95, max_tokens: 1024,
};
const MODELS = ["own_model", "other_model"];

const $ = (id) => document.getElementById(id);

let kept = {}; // as the fields stand, by name; a model's as it was chosen, also while the server has none of that name

/** {system, sides, sampling}; sides: of one answer, or of two beside each other, {model, temperature}. */
export function settings() {
  const sides = [{ model: $("own_model").value, temperature: Number($("temperature").value) }];
  if ($("compares").checked) sides.push({ model: $("other_model").value, temperature: Number($("other_temperature").value) });
  const max_tokens = $("max_tokens").value === "" ? null : Number($("max_tokens").value);
  return { system: $("system").value, sides, sampling: { top_p: Number($("top_p").value), max_tokens } };
}

export function startSettings() {
  kept = { ...DEFAULTS, ...JSON.parse(localStorage.getItem(ENTRY) ?? "{}") };
  for (const name of Object.keys(DEFAULTS)) {
    const input = $(name);
    if (input.type === "checkbox") input.checked = kept[name];
    else input.value = kept[name] ?? "";
    input.addEventListener("input", () => {
      kept[name] = input.type === "checkbox" ? input.checked : input.value;
      localStorage.setItem(ENTRY, JSON.stringify(kept));
      tell(name);
    });
    tell(name);
  }
  const showKey = () => ($("key").value = getKey());
  $("key").addEventListener("change", () => setKey($("key").value.trim()));
  document.addEventListener(KEY_CHANGED, showKey);
  showKey();
  $("settings-toggle").addEventListener("click", () => showSettings(!areShown()));
}

/** The server's models, adapters among them: one is chosen where there are several. */
export function offerModels(names) {
  for (const name of MODELS) {
    $(name).replaceChildren(...names.map((each) => new Option(each, each)));
    $(name).value = names.includes(kept[name]) ? kept[name] : names[0];
    $(name).parentElement.hidden = names.length < 2;
  }
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

/** A slider's value, beside its name; the fields of an answer on the right, where there is one. */
function tell(name) {
  if (name === "compares") $("other-side").hidden = !$("compares").checked;
  const output = document.querySelector(`label[for="${name}"] output`);
  if (output) output.textContent = Number($(name).value).toFixed(2);
}
