// The little of Markdown that models write, as nodes; text never becomes markup.

const INLINE = /`([^`\n]+)`|\*\*(.+?)\*\*|\*([^*\s][^*\n]*)\*/g;

/** Nodes for a text, which may be cut anywhere. */
export function render(text) {
  const nodes = [];
  for (const [index, part] of text.split(/^```/m).entries()) {
    if (index % 2) nodes.push(code(part));
    else nodes.push(...part.split(/\n{2,}/).filter((block) => block.trim()).map(block));
  }
  return nodes;
}

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function code(part) {
  const body = part.includes("\n") ? part.slice(part.indexOf("\n") + 1) : part;
  return element("pre", element("code", body.replace(/\n$/, "")));
}

function block(text) {
  const lines = text.replace(/^\n+|\n+$/g, "").split("\n");
  if (/^#{1,6} /.test(lines[0]) && lines.length === 1) {
    return element("h3", ...inline(lines[0].replace(/^#+ /, "")));
  }
  const ordered = lines.every((line) => /^\s*\d+[.)] /.test(line));
  if (ordered || lines.every((line) => /^\s*[-*+] /.test(line))) {
    const items = lines.map((line) => element("li", ...inline(line.replace(/^\s*(\d+[.)]|[-*+]) /, ""))));
    const list = element(ordered ? "ol" : "ul", ...items);
    if (ordered) list.start = parseInt(lines[0], 10);
    return list;
  }
  const paragraph = element("p");
  for (const [index, line] of lines.entries()) {
    if (index) paragraph.append(element("br"));
    paragraph.append(...inline(line));
  }
  return paragraph;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index));
    if (match[1] !== undefined) nodes.push(element("code", match[1]));
    else if (match[2] !== undefined) nodes.push(element("strong", match[2]));
    else nodes.push(element("em", match[3]));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
