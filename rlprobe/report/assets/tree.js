// The modules of both sides, side by side.

class Tree {
  constructor(place) {
    this.place = place;
    this.nodes = new Map();
    this.top = this.make("");
    for (const row of records.rows) {
      if (row.module === null || row.step !== data.step) continue;
      this.add(row);
    }
    this.open = new Set([""]);
    this.order = [];
    this.current = "";
    this.query = "";
    place.addEventListener("keydown", (event) => this.key(event));
  }

  make(path) {
    const found = { path, children: new Map(), rows: [], worst: null, beyond: 0, alone: 0,
      sides: { benchmark: false, target: false } };
    this.nodes.set(path, found);
    return found;
  }

  add(row) {
    let at = this.top;
    const parts = row.module ? row.module.split(".") : [];
    const way = [at];
    for (let i = 0; i < parts.length; i += 1) {
      const path = parts.slice(0, i + 1).join(".");
      if (!at.children.has(path)) at.children.set(path, this.make(path));
      at = at.children.get(path);
      way.push(at);
    }
    at.rows.push(row);
    const alone = row.status === "benchmark_only" || row.status === "target_only";
    for (const one of way) {
      if (row.status !== "target_only") one.sides.benchmark = true;
      if (row.status !== "benchmark_only") one.sides.target = true;
      if (row.ratio !== null && row.judged && (one.worst === null || row.ratio > one.worst)) one.worst = row.ratio;
      one.beyond += row.result === "beyond" ? 1 : 0;
      one.alone += alone ? 1 : 0;
    }
  }

  visible() {
    const query = this.query.toLowerCase();
    const kept = new Set();
    if (query) {
      for (const path of this.nodes.keys()) {
        if (!path.toLowerCase().includes(query)) continue;
        for (let p = path; ; p = p.slice(0, p.lastIndexOf("."))) {
          kept.add(p);
          if (!p.includes(".")) break;
        }
      }
    }
    const found = [];
    const walk = (one, depth) => {
      for (const child of one.children.values()) {
        if (query && !kept.has(child.path)) continue;
        found.push({ one: child, depth });
        if (query || this.open.has(child.path)) walk(child, depth + 1);
      }
    };
    walk(this.top, 0);
    return found;
  }

  draw() {
    this.order = this.visible();
    if (!this.order.some(({ one }) => one.path === this.current)) this.current = this.order[0]?.one.path ?? "";
    this.place.replaceChildren(...this.order.map(({ one, depth }) => this.line(one, depth)));
  }

  line(one, depth) {
    const last = one.path.slice(one.path.lastIndexOf(".") + 1);
    const item = node("div", { role: "treeitem", "aria-level": String(depth + 1), id: `m-${one.path}`,
      tabindex: one.path === this.current ? "0" : "-1", class: one.beyond ? "beyond" : "",
      "aria-selected": String(one.path === this.current),
      ...(one.children.size ? { "aria-expanded": String(Boolean(this.query) || this.open.has(one.path)) } : {}) });
    item.style.paddingInlineStart = `${depth * 1.1 + 0.3}em`;
    const mark = one.children.size ? (this.open.has(one.path) || this.query ? "▾" : "▸") : "·";
    const side = (name) => node("span", { class: "half mono", text: one.sides[name] ? last : "—" });
    item.append(node("span", { class: "mark", "aria-hidden": "true", text: mark }), side("benchmark"),
      side("target"), node("span", { class: one.beyond ? "ratio tag beyond" : "ratio",
        text: one.worst === null ? "–" : number(one.worst) }),
      node("span", { class: "lone", text: one.alone ? `${one.alone} ${say("unmatched")}` : "" }));
    item.addEventListener("click", () => {
      this.current = one.path;
      if (one.children.size && !this.query) {
        if (this.open.has(one.path)) this.open.delete(one.path);
        else this.open.add(one.path);
      }
      this.draw();
      this.select(one);
    });
    return item;
  }

  key(event) {
    const at = this.order.findIndex(({ one }) => one.path === this.current);
    const one = this.order[at]?.one;
    const move = (to) => {
      if (this.order[to]) this.current = this.order[to].one.path;
    };
    if (event.key === "ArrowDown") move(at + 1);
    else if (event.key === "ArrowUp") move(at - 1);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(this.order.length - 1);
    else if (event.key === "ArrowRight" && one?.children.size) this.open.add(one.path);
    else if (event.key === "ArrowLeft" && one) {
      if (this.open.has(one.path)) this.open.delete(one.path);
      else if (one.path.includes(".")) this.current = one.path.slice(0, one.path.lastIndexOf("."));
    } else if ((event.key === "Enter" || event.key === " ") && one) this.select(one);
    else return;
    event.preventDefault();
    this.draw();
    $(`[aria-selected="true"]`, this.place)?.focus();
  }

  // The next module, in the order of the tree, whose own records have what is looked for.
  next(has) {
    const every = [...this.walk(this.top)];
    const from = every.findIndex((one) => one.path === this.current);
    const found = [...every.slice(from + 1), ...every.slice(0, from + 1)].find(has);
    if (!found) return;
    this.query = "";
    $("#tree-search").value = "";
    for (let p = found.path; p.includes("."); ) {
      p = p.slice(0, p.lastIndexOf("."));
      this.open.add(p);
    }
    this.current = found.path;
    this.draw();
    this.select(found);
    $(`[aria-selected="true"]`, this.place)?.scrollIntoView({ block: "nearest" });
  }

  *walk(one) {
    for (const child of one.children.values()) {
      yield child;
      yield* this.walk(child);
    }
  }

  select(one) {
    const panel = $("#module");
    const rows = one.rows.filter((row) => !view.stage || row.stage === view.stage);
    const half = (slot) => rows.filter((row) => row.slot === slot).slice(0, 60);
    const list = (title, own) => node("div", { class: "half" }, node("h4", { text: title }),
      ...own.map((row) => node("button", { type: "button", class: row.beyond ? "plain beyond mono" : "plain mono",
        text: `${row.stage} ${row.step}/${row.rank ?? "–"} ${row.direction ?? ""} ${row.index ?? ""}: ${number(row.error)} / ${number(row.floor)}`,
        onclick: () => choose(row) })));
    const others = rows.filter((row) => row.slot !== "input" && row.slot !== "output");
    panel.replaceChildren(node("h3", { class: "mono", text: one.path }),
      node("div", { class: "halves" }, list("input", half("input")), list("output", half("output"))),
      ...(others.length ? [list(say("records"), others.slice(0, 60))] : []),
      ...stackOf(rows.find((row) => data.stacks?.[`${row.stage}|${row.name}`]) ?? { stage: "", name: "" }));
    panel.hidden = false;
  }
}
