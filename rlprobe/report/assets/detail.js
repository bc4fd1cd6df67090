// One record: all that is known of it, and what ran before and after it.

const DETAIL = [
  ["stage", "stage"], ["step", "step"], ["rank", "rank"], ["record", "name"], ["module", "module"],
  ["slot", "slot"], ["micro_batch", "micro_batch"], ["order", "at"],
];

function choose(row, { scroll = true } = {}) {
  chosen.row = row;
  const panel = $("#detail");
  panel.hidden = false;
  const list = node("dl", { class: "pairs" });
  const pair = (label, value) => {
    if (value === null || value === undefined || value === "") return;
    list.append(node("dt", { text: label }), node("dd", { text: String(value), class: "mono" }));
  };
  for (const [key, field] of DETAIL) pair(say(key), row[field]);
  pair(say("result"), resultText(row));
  pair(say("error"), `${errorText(row)} (${row.error_kind ?? "–"})`);
  if (row.name_target && row.name_target !== row.name) pair(say("target"), row.name_target);
  pair(say("floor"), number(row.floor));
  pair(say("ratio"), number(row.excess));
  if (row.R !== null) pair("R", number(row.R));
  const sides = node("table", {}, node("thead", {}, node("tr", {},
    node("th", { scope: "col", text: say("side") }),
    ...["dtype", "shape", "norm"].map((key) => node("th", { scope: "col", text: say(key) })))));
  for (const side of ["benchmark", "target"]) {
    sides.append(node("tr", {}, node("th", { scope: "row", text: say(side) }),
      node("td", { class: "mono", text: row[`dtype_${side}`] ?? "–" }),
      node("td", { class: "mono", text: row[`shape_${side}`] ?? "–" }),
      node("td", { class: "mono", text: number(row[`norm_${side}`]) })));
  }
  const around = records.around(row);
  const place = around.indexOf(row);
  const step = (key, other) => node("button", { type: "button", "data-say": key, text: say(key),
    ...(other ? { onclick: () => choose(other) } : { disabled: "" }) });
  const link = node("button", { type: "button", "data-say": "link", text: say("link") });
  link.addEventListener("click", () => copy(location.href.split("#")[0] + hashOf(row), link));
  const name = node("button", { type: "button", "data-say": "copy", text: say("copy") });
  name.addEventListener("click", () => copy(row.name, name));
  const bar = node("p", { class: "buttons" }, step("earlier", around[place - 1]),
    step("later", around[place + 1]), name, link);
  const near = node("ol", { class: "near mono" });
  for (const other of around.slice(Math.max(0, place - 3), place + 4)) {
    const item = node("li", { value: String(other.at) }, node("button", { type: "button", class: "plain",
      text: `${other.name} (${number(other.excess)})`, onclick: () => choose(other) }));
    if (other === row) item.setAttribute("aria-current", "true");
    near.append(item);
  }
  panel.replaceChildren(node("h3", { text: row.name, class: "mono" }), bar, list,
    node("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": say("both_sides") }, sides),
    node("h4", { text: say("neighbours") }), near, ...stackOf(row));
  if (built) {
    table.deselectRow();
    if (matches(row)) {
      table.selectRow(row.id);
      table.scrollToRow(row.id, "center", false).catch(() => {});
    }
  }
  history.replaceState(null, "", hashOf(row));
  if (scroll) panel.scrollIntoView({ block: "nearest" });
}

function stackOf(row) {
  const found = data.stacks?.[`${row.stage}|${row.name}`];
  if (!found) return [];
  return ["benchmark", "target"].filter((side) => found[side]).map((side) =>
    node("details", {}, node("summary", { text: `${say("stacks")} (${say(side)})` }),
      node("pre", { text: found[side] })));
}

function hashOf(row) {
  return `#record=${encodeURIComponent(row.key)}`;
}

function fromHash() {
  const found = /^#record=(.*)$/.exec(location.hash);
  if (!found) return;
  let key;
  try {
    key = decodeURIComponent(found[1]);
  } catch {
    return; // no address of ours
  }
  const row = records.byKey.get(key);
  if (!row) return;
  Object.assign(view, { stage: row.stage, step: String(row.step), rank: "", update: "", result: "",
    text: "", module: null });
  refresh();
  choose(row);
}
