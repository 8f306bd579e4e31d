// The routes as openapi.json describes them, each with the fields of its request.

function make(tag, text = "", children = []) {
  const element = document.createElement(tag);
  element.textContent = text;
  element.append(...children);
  return element;
}

const nameOf = (reference) => reference.split("/").pop();

/** A schema in words: "text or array of integers". */
function kind(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.filter((each) => each.type !== "null").map(kind).join(" or ");
  if (schema.type === "array") return `array of ${kind(schema.items ?? {})}`;
  if (schema.type === "string") return "text";
  return schema.type ?? "anything";
}

/** The names of the schemas that a schema speaks of, in order. */
function mentioned(value) {
  if (value === null || typeof value !== "object") return [];
  if (typeof value.$ref === "string") return [nameOf(value.$ref)];
  return Object.values(value).flatMap(mentioned);
}

function fields(name, schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([field, each]) => {
    const remark = required.has(field) ? "required" : each.default == null ? "" : `default ${JSON.stringify(each.default)}`;
    return make("tr", "", [make("td", "", [make("code", field)]), make("td", kind(each)), make("td", remark)]);
  });
  const about = schema.description ? `: ${schema.description}` : "";
  return [make("p", name + about), make("table", "", rows)];
}

/** The tables of a request's schema, and of all that it mentions. */
function tables(root, schemas) {
  const names = [root];
  for (const name of names) {
    names.push(...mentioned(schemas[name]).filter((each) => !names.includes(each)));
  }
  return names.filter((name) => schemas[name]?.properties).flatMap((name) => fields(name, schemas[name]));
}

function route(method, path, operation, schemas) {
  const head = [make("b", method.toUpperCase()), make("code", path), make("span", operation.summary ?? "")];
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const shown = body ? tables(nameOf(body.$ref), schemas) : [make("p", "No body.")];
  const inside = make("div", "", shown);
  inside.className = "fields";
  return make("details", "", [make("summary", "", head), inside]);
}

function show(api) {
  routes.querySelector("h1").textContent = `${api.info.title} ${api.info.version}`;
  routes.querySelector("p").textContent = api.info.description ?? "";
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      routes.append(route(method, path, operation, api.components?.schemas ?? {}));
    }
  }
}

const routes = document.getElementById("routes");
try {
  const reply = await fetch("openapi.json");
  if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
  show(await reply.json());
} catch (error) { // also of who leaves before it has come
  routes.querySelector("p").textContent = `openapi.json has not come: ${error.message}. Reload to try again.`;
}
