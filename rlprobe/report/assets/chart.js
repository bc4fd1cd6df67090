// Error against execution order, of one stage, step and rank.

const FLOATS = /float|bfloat/;

function chartRows() {
  // what parts first may be no stage: a number that the trainer reports
  const first = data.stages.includes(data.first?.stage) ? data.first.stage : data.stages[0];
  const stage = view.stage || first;
  const step = view.step !== "" ? Number(view.step) : data.step;
  const own = records.rows.filter((row) => row.stage === stage && row.step === step &&
    row.distance !== null && row.slot !== "parameters" && row.slot !== "key_data" &&
    FLOATS.test(row.dtype_benchmark ?? "") &&
    (view.update === "" || String(row.update ?? "") === view.update));
  // of many ranks the page has the worst of each record: no rank has them all
  if (view.rank === "" && records.total > records.rows.length) return { stage, step, rank: null, rows: own };
  const rank = view.rank !== "" ? Number(view.rank) : own[0]?.rank;
  return { stage, step, rank, rows: own.filter((row) => row.rank === rank).sort((a, b) => a.at - b.at) };
}

function decades(_, ticks) {
  return ticks.map((v) => (v && Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9 ? v : null));
}

const LEAST = 1e-9; // what is equal stands on the axis

function drawChart() {
  const place = $("#plot");
  if (!place || !records) return;
  const { stage, step, rank, rows } = chartRows();
  const which = rank === null ? say("worst_of_ranks") : `rank ${rank ?? "–"}`;
  const update = view.update === "" ? "" : `, ${say("update_number")} ${view.update}`;
  $("#plot-title").textContent = `${stage}, ${say("step")} ${step}${update}, ${which}`;
  chart?.destroy();
  chart = null;
  if (!rows.length) return;
  const css = getComputedStyle(root);
  const colour = (name) => css.getPropertyValue(name).trim();
  const up = (value) => Math.max(Math.min(value, 1e3), LEAST);
  const x = rows.map((_, i) => i);
  const floor = rows.map((row) => (size(row.floor) ? up(row.floor) : null));
  const within = rows.map((row) => (row.result === "beyond" ? null : up(row.distance)));
  const beyond = rows.map((row) => (row.result === "beyond" ? up(row.distance) : null));
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
  const dots = (label, key) => ({ label, stroke: colour(key), fill: colour(key), paths: () => null,
    points: { show: true, size: key === "--bad" ? 6 : 4, fill: colour(key) } });
  const hint = $("#hint");
  chart = new uPlot({
    width: Math.max(280, place.clientWidth), height: 300, legend: { show: false },
    cursor: { drag: { x: true, y: false }, focus: { prox: 24 } }, focus: { alpha: 1 },
    scales: { x: { time: false }, y: { distr: 3, log: 10 } },
    // whole powers of ten alone: the lines between them say nothing
    axes: [axis, { ...axis, size: 62, filter: decades, grid: { ...axis.grid, filter: decades },
      ticks: { ...axis.ticks, filter: decades },
      values: (_, ticks) => ticks.map((v) => (v ? v.toExponential(0) : "")) }],
    series: [{}, { label: say("floor"), stroke: colour("--blue"), dash: [4, 3], points: { show: false } },
      dots(say("within"), "--ink"), dots(say("beyond"), "--bad")],
    hooks: { setCursor: [(u) => {
      const i = u.cursor.idx;
      const row = i === null || i === undefined ? null : rows[i];
      hint.textContent = row
        ? `${row.name}: ${say("error")} ${number(row.error)}, ${say("floor")} ${number(row.floor)}, ${say("ratio")} ${number(row.excess)}`
        : "";
    }] },
  }, [x, floor, within, beyond], place);
  let began = null;
  chart.over.addEventListener("mousedown", (event) => (began = event.clientX));
  chart.over.addEventListener("click", (event) => {
    const dragged = began !== null && Math.abs(event.clientX - began) > 3;
    if (!dragged && chart.cursor.idx !== null) choose(rows[chart.cursor.idx]);
  });
}
