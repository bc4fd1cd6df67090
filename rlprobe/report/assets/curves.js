// The trainer's curves of both sides.

// Both sides' values decide how high a curve is drawn, and its band as far as it is near them: of
// one that stands still the band is a line, and would otherwise fill the picture.
function heightOf(curve) {
  const known = [...curve.benchmark, ...curve.target].filter((v) => typeof v === "number");
  if (!known.length) return [0, 1];
  let [low, high] = [Math.min(...known), Math.max(...known)];
  for (const side of ["low", "high"]) {
    for (const v of curve[side] ?? []) {
      if (typeof v !== "number") continue;
      const room = 2 * Math.max(high - low, Math.abs(high) * 1e-3);
      low = Math.min(low, Math.max(v, low - room));
      high = Math.max(high, Math.min(v, high + room));
    }
  }
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.5 || 1;
  return high - low < Math.abs(high) * 1e-6 ? [low - Math.abs(low) * 0.5, high + Math.abs(high) * 0.5]
    : [low - margin, high + margin];
}

function drawCurves() {
  const place = $("#curve-plots");
  if (!place) return;
  place.replaceChildren();
  const css = getComputedStyle(root);
  const colour = (name) => css.getPropertyValue(name).trim();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
  const drawn = (data.curves ?? []).filter((curve) => curve.steps.length > 2); // two points are no curve
  // all are placed before any is drawn: how wide one is depends on how many there are
  const holders = drawn.map((curve) => {
    const title = curve.verdict ? `${curve.name}: ${say("curve_" + curve.verdict)}` : curve.name;
    const holder = node("div");
    const values = node("p", { class: "values mono" });
    place.append(node("figure", {}, node("figcaption", { class: "mono", text: title }), holder, values));
    return [holder, values];
  });
  drawn.forEach((curve, at) => {
    const [holder, values] = holders[at];
    const line = (side, key, dash) => ({ label: say(side), stroke: colour(key), width: 2, dash,
      points: { size: 4 } });
    const edge = { stroke: "transparent", points: { show: false } };
    const banded = curve.low && curve.high;
    // the band first: it lies below the lines
    const series = [{}, ...(banded ? [edge, edge] : []), line("benchmark", "--blue"), line("target", "--bad", [6, 3])];
    const lines = [curve.steps, ...(banded ? [curve.low, curve.high] : []), curve.benchmark, curve.target];
    const bands = banded ? [{ series: [2, 1], fill: colour("--band") }] : [];
    const said = (u) => {
      const i = u.cursor.idx;
      values.textContent = i === null || i === undefined ? ""
        : `${say("step_n", { n: curve.steps[i] })}: ${say("benchmark")} ${number(curve.benchmark[i])}, ${say("target")} ${number(curve.target[i])}`;
    };
    new uPlot({ width: Math.max(240, holder.clientWidth || 320), height: 190, bands,
      scales: { x: { time: false }, y: { range: () => heightOf(curve) } },
      axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000] }, { ...axis, size: 74,
        values: (_, ticks) => ticks.map(number) }], series, legend: { show: false },
      hooks: { setCursor: [said] } }, lines, holder);
  });
}
