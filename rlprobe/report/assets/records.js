// The records: their columns unpacked, filtered and shown in a grid.

async function unpack() {
  const bytes = Uint8Array.from(atob($("#payload").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Records {
  constructor({ count, total, columns }) {
    this.count = count;
    this.total = total;
    this.columns = columns;
    this.rows = Array.from({ length: count }, (_, id) => this.row(id));
    this.byKey = new Map(this.rows.map((row) => [row.key, row]));
  }

  row(id) {
    const c = this.columns;
    const text = (name) => c[name].of[c[name].at[id]] ?? null;
    const row = { id };
    for (const name of Object.keys(c)) row[name] = Array.isArray(c[name]) ? c[name][id] : text(name);
    row.key = [row.stage, row.step, row.rank ?? "", row.name, row.slot ?? "", row.index ?? ""].join("|");
    row.result = row.beyond ? "beyond" : row.unjudged_because ? "unjudged"
      : row.excused_by ? "excused" : row.judged ? "within" : "unjudged";
    row.ratio = size(row.excess);
    row.distance = size(row.error);
    row.at = row.sequence ?? row.order ?? id;
    return row;
  }

  // Execution order within a stage, step and rank.
  around(row) {
    return this.rows
      .filter((r) => r.stage === row.stage && r.step === row.step && r.rank === row.rank)
      .sort((a, b) => a.at - b.at || a.id - b.id);
  }
}

const view = { stage: "", step: "", rank: "", update: "", result: "", text: "", module: null };
let data, records, table, chart;
const chosen = { row: null };

function matches(row) {
  if (view.stage && row.stage !== view.stage) return false;
  if (view.step !== "" && String(row.step) !== view.step) return false;
  if (view.rank !== "" && String(row.rank ?? "") !== view.rank) return false;
  if (view.update !== "" && String(row.update ?? "") !== view.update) return false;
  if (view.result && row.result !== view.result) return false;
  if (view.module !== null && row.module !== view.module) return false;
  if (!view.text) return true;
  return view.text.toLowerCase().split(/\s+/).every(
    (word) => `${row.name} ${row.module ?? ""} ${row.op ?? ""}`.toLowerCase().includes(word));
}

function resultText(row) {
  const reason = row.unjudged_because ?? row.excused_by;
  return reason ? `${say(row.result)}: ${reason.replaceAll("_", " ")}` : say(row.result);
}

function cellText(read, css) {
  return (cell) => {
    const text = read(cell.getRow().getData());
    const element = node("span", { text, title: text });
    if (css) element.className = css(cell.getRow().getData());
    return element;
  };
}

// Below what a sketch resolves it has seen no difference, and its number is that limit.
function errorText(row) {
  const unseen = row.error_kind === "sketch" && row.excess === 0 && row.error > 0;
  return unseen ? `< ${number(row.error)}` : number(row.error);
}

function sides(left, right) {
  if (left === right) return left ?? "–";
  return `${left ?? "–"} / ${right ?? "–"}`;
}

// What has no number comes last in either direction.
function byNumber(a, b, _rowA, _rowB, _column, direction) {
  if (a === null || b === null) return ((a === null) - (b === null)) * (direction === "asc" ? 1 : -1);
  return a < b ? -1 : Number(a > b);
}

function columns() {
  const numeric = (field, key, read) => ({
    title: say(key), field, hozAlign: "right", headerHozAlign: "right", sorter: byNumber,
    formatter: cellText((row) => number(read(row))), width: 86,
  });
  const plain = (field, key, width, read = (row) => row[field] ?? "–") => ({
    title: say(key), field, width, formatter: cellText((row) => String(read(row))),
  });
  const result = { title: say("result"), field: "result", width: 122,
    formatter: cellText(resultText, (row) => `tag ${row.result}`) };
  const name = plain("name", "record", 364);
  // on a phone three columns, of which none is cut; a row that is touched shows all of it
  if (isNarrow()) {
    return [{ ...name, width: undefined, widthGrow: 1, minWidth: 120 },
      { ...numeric("ratio", "ratio", (row) => row.excess), width: 72 }, { ...result, width: 88 }];
  }
  return [
    name,
    result,
    numeric("ratio", "ratio", (row) => row.excess),
    { ...numeric("distance", "error", (row) => row.error), formatter: cellText(errorText) },
    numeric("floor", "floor", (row) => row.floor),
    plain("stage", "stage", 212),
    plain("step", "step", 74),
    plain("rank", "rank", 78),
    numeric("at", "order", (row) => row.at),
    plain("dtype_benchmark", "dtype", 150, (row) => sides(row.dtype_benchmark, row.dtype_target)),
    plain("shape_benchmark", "shape", 120, (row) => sides(row.shape_benchmark, row.shape_target)),
    numeric("norm_benchmark", "norm", (row) => row.norm_benchmark),
  ];
}

function isNarrow() {
  return matchMedia("(max-width: 640px)").matches;
}

function makeTable() {
  const narrow = isNarrow();
  $("#grid").classList.toggle("narrow", narrow);
  const grid = new Tabulator("#grid", {
    data: records.rows, index: "id", height: 460, layout: narrow ? "fitColumns" : "fitDataFill",
    rowHeight: narrow ? 62 : null, columnDefaults: { minWidth: 60 },
    columns: columns(), selectableRows: 1, placeholder: "–", renderVertical: "virtual",
    renderHorizontal: "basic", initialFilter: [],
  });
  grid.on("rowClick", (_, row) => choose(row.getData(), { scroll: false }));
  grid.on("tableBuilt", () => {
    // the keyboard must reach the scroll area, and a screen reader take it for the grid's rows
    const holder = $(".tabulator-tableholder", $("#grid"));
    holder.setAttribute("tabindex", "0");
    holder.setAttribute("role", "rowgroup");
    $(".tabulator-table", holder).setAttribute("role", "presentation");
    refresh();
    fromHash();
    root.dataset.ready = "true";
  });
  return grid;
}

let built = false;

function refresh() {
  if (!built && table && $(".tabulator-tableholder")) built = true;
  if (built) {
    table.setFilter(matches);
    const shown = table.getDataCount("active");
    $("#count").textContent = say("shown", { n: grouped(shown), m: grouped(records.count) });
  }
  for (const [name, id] of [["stage", "#f-stage"], ["step", "#f-step"], ["rank", "#f-rank"],
    ["update", "#f-update"], ["result", "#f-result"]]) $(id).value = view[name];
  $("#f-text").value = view.text;
  for (const button of $$("[data-stage]")) {
    button.setAttribute("aria-pressed", String(button.dataset.stage === view.stage));
  }
  drawChart();
}

function show(changes) {
  Object.assign(view, changes);
  refresh();
}

function fillFilters() {
  const fill = (id, values, text = String) => {
    const select = $(id);
    select.replaceChildren(node("option", { value: "", text: say("all") }),
      ...values.map((value) => node("option", { value: String(value), text: text(value) })));
  };
  const distinct = (field) => [...new Set(records.rows.map((row) => row[field]))].filter((v) => v !== null);
  fill("#f-stage", distinct("stage"));
  fill("#f-step", distinct("step").sort((a, b) => a - b));
  fill("#f-rank", distinct("rank").sort((a, b) => a - b));
  const updates = distinct("update").sort((a, b) => a - b);
  fill("#f-update", updates);
  $("#of-update").hidden = updates.length < 2;
  fill("#f-result", ["beyond", "within", "excused", "unjudged"], (value) => say(value));
}
