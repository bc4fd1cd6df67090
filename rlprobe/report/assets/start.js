// Start: everything is brought together once the page is there.

function wire() {
  wireSwitches();
  for (const button of $$("button.copy")) {
    button.addEventListener("click", () => copy($("code, pre", button.parentElement).textContent, button));
  }
  // on paper everything is open
  addEventListener("beforeprint", () => $$("details").forEach((d) => (d.open = true)));
  addEventListener("hashchange", fromHash);
}

async function start() {
  wire();
  root.classList.add("scripted");
  const wanted = kept("lang") ?? (/^zh/i.test(navigator.language) ? "zh" : "en");
  data = await unpack();
  records = new Records(data.records);
  setLanguage(wanted);
  if (records.count) {
    fillFilters();
    for (const [id, name] of [["#f-stage", "stage"], ["#f-step", "step"], ["#f-rank", "rank"],
      ["#f-update", "update"], ["#f-result", "result"]]) $(id).addEventListener("change", (e) => show({ [name]: e.target.value, module: null }));
    $("#f-text").addEventListener("input", (e) => show({ text: e.target.value, module: null }));
    $("#f-reset").addEventListener("click", () =>
      show({ stage: "", step: "", rank: "", update: "", result: "", text: "", module: null }));
    $("#f-csv").addEventListener("click", () => table.download("csv", "records.csv"));
    for (const button of $$("[data-stage]")) {
      button.addEventListener("click", () =>
        show({ stage: view.stage === button.dataset.stage ? "" : button.dataset.stage,
          step: button.dataset.step ?? view.step, rank: button.dataset.rank ?? view.rank,
          update: button.dataset.update ?? "" }));
    }
    table = makeTable();
    const tree = new Tree($("#tree"));
    tree.draw();
    if (!tree.order.length) {
      $("#no-modules").hidden = false;
      $("#tree").hidden = true;
    }
    $("#tree-search").addEventListener("input", (e) => {
      tree.query = e.target.value;
      tree.draw();
    });
    $("#tree-beyond").addEventListener("click", () => tree.next((one) => one.rows.some((r) => r.beyond)));
    $("#tree-alone").addEventListener("click", () =>
      tree.next((one) => one.rows.some((r) => r.status === "benchmark_only" || r.status === "target_only")));
    repaint.push(fillFilters, () => table.setColumns(columns()), refresh, () => tree.draw());
    if (data.first) {
      const row = records.rows.find((r) => r.stage === data.first.stage && r.name === data.first.record &&
        r.step === data.first.step && (r.rank === null || r.rank === data.first.rank));
      const jump = $("#to-record");
      if (row && jump) {
        jump.hidden = false;
        jump.addEventListener("click", () => choose(row));
      }
    }
  }
  drawCurves();
  repaint.push(drawCurves);
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { drawChart(); drawCurves(); }, 150);
  });
  if (!records.count) root.dataset.ready = "true";
}

start();
