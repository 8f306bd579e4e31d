// The little of Markdown that models write, with formulas, as nodes; text never becomes markup.

import { math } from "./math.js";

const FENCE = /^ {0,3}```/m;
// No opening within a formula: else a text of nothing but openings would take a second look at all behind each.
const DISPLAY = /\$\$((?:[^$\\]|\\[^])+)\$\$|\\\[((?:(?!\\\[)[^])+?)\\\]/g;
// Code, \(formula\), $formula$ as pandoc reads it, **strong**, *emphasized*.
const INLINE = /`([^`\n]+)`|\\\(((?:(?!\\\().)+?)\\\)|\$(?!\s)([^$`\n]+?)(?<!\s)\$(?!\d)|\*\*((?:(?!\*\*).)+)\*\*|\*([^*\s][^*\n]*)\*/g;
const HEADING = /^#{1,6} /;
const ORDERED = /^\s*(\d+)[.)] /, ITEM = /^\s*(?:\d+[.)]|[-*+]) /;
const RULE = /^\|?(?:\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?$/; // below a table's head

/** Nodes for a text, which may be cut anywhere. */
export function render(text) {
  const nodes = [];
  for (const [index, part] of text.split(FENCE).entries()) {
    if (index % 2) nodes.push(code(part));
    else for (const node of prose(part)) nodes.push(node);
  }
  return nodes;
}

/** children: nodes, texts, or arrays of them, however long: a call has room for so many arguments alone. */
function element(name, ...children) {
  const node = document.createElement(name);
  for (const child of children.flat()) node.append(child);
  return node;
}

function code(part) {
  const cut = part.indexOf("\n") + 1;
  const language = cut ? part.slice(0, cut).trim() : "";
  const body = part.slice(cut).replace(/\n$/, "");
  const block = element("pre", element("code", body));
  block.tabIndex = 0; // so that who has no mouse can scroll it
  block.ariaLabel = language ? `Code, ${language}` : "Code";
  block.role = "group";
  const copy = Object.assign(element("button", "copy code"), { type: "button", className: "act" });
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(body);
    copy.textContent = "copied";
  });
  const head = element("div", element("span", language), copy);
  head.className = "code-head";
  const node = element("div", head, block);
  node.className = "code";
  return node;
}

/** Text between code blocks. */
function prose(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(DISPLAY)) {
    const formula = math(match[1] ?? match[2], true);
    if (formula === null) continue; // it is shown as it is written
    for (const node of blocks(text.slice(end, match.index))) nodes.push(node);
    nodes.push(formula);
    end = match.index + match[0].length;
  }
  return [...nodes, ...blocks(text.slice(end))];
}

function blocks(text) {
  return text.split(/\n{2,}/).flatMap((part) => runs(part.replace(/^\n+/, "").trimEnd().split("\n"))).filter(Boolean);
}

/** Headings, tables, lists and paragraphs, which may follow each other line by line. */
function runs(lines) {
  const nodes = [];
  let at = 0;
  const take = (belongs, from = at) => {
    const start = at;
    for (at = from; at < lines.length && belongs(lines[at]); ) at++;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    if (HEADING.test(lines[at])) nodes.push(element("h3", inline(lines[at++].replace(/^#+ /, ""))));
    else if (lines[at].includes("|") && RULE.test(lines[at + 1]?.trim() ?? "")) nodes.push(table(take((line) => line.includes("|"))));
    else if (ITEM.test(lines[at])) nodes.push(list(take((line) => ITEM.test(line) || /^\s+\S/.test(line))));
    else nodes.push(paragraph(take((line) => !HEADING.test(line) && !/^\s*(?:1[.)]|[-*+]) /.test(line), at + 1)));
  }
  return nodes;
}

function list(lines) {
  const ordered = ORDERED.exec(lines[0]);
  const texts = [];
  for (const line of lines) {
    if (ITEM.test(line)) texts.push([line.replace(ITEM, "")]);
    else texts.at(-1).push(line.trim());
  }
  const node = element(ordered ? "ol" : "ul", texts.map((each) => element("li", broken(each))));
  if (ordered) node.start = Number(ordered[1]);
  return node;
}

function paragraph(lines) {
  return lines.some((line) => line.trim()) ? element("p", broken(lines)) : null;
}

/** Lines, each on its own. */
function broken(lines) {
  return lines.flatMap((line, index) => (index ? [element("br"), ...inline(line)] : inline(line)));
}

function table([head, , ...rows]) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const row = (line, name) => element("tr", cells(line).map((cell) => element(name, inline(cell))));
  const node = element("div", element("table", element("thead", row(head, "th")), element("tbody", rows.map((line) => row(line, "td")))));
  node.className = "table";
  return node;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index), span(match));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function span([whole, code, round, dollars, strong, emphasized]) {
  if (code !== undefined) return element("code", code);
  if (strong !== undefined) return element("strong", inline(strong));
  if (emphasized !== undefined) return element("em", ...inline(emphasized));
  return math(round ?? dollars, false) ?? whole;
}
