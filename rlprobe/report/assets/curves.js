// The trainer's curves of both sides.

function drawCurves() {
  const place = $("#curve-plots");
  if (!place) return;
  place.replaceChildren();
  const css = getComputedStyle(root);
  const colour = (name) => css.getPropertyValue(name).trim();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
  for (const curve of data.curves ?? []) {
    if (curve.steps.length < 3) continue; // two points are no curve: the table has them
    const figure = node("figure", {}, node("figcaption", { class: "mono", text: curve.verdict ? `${curve.name}: ${say("curve_" + curve.verdict)}` : curve.name }));
    const holder = node("div");
    figure.append(holder);
    place.append(figure);
    const line = (side, key, dash) => ({ label: say(side), stroke: colour(key), width: 2, dash,
      points: { size: 4 } });
    const series = [{ label: say("step") }, line("benchmark", "--blue"), line("target", "--bad", [6, 3])];
    const lines = [curve.steps, curve.benchmark, curve.target];
    const bands = [];
    if (curve.low && curve.high) {
      series.push({ label: "–", stroke: "transparent", points: { show: false } },
        { label: "+", stroke: "transparent", points: { show: false } });
      lines.push(curve.low, curve.high);
      bands.push({ series: [4, 3], fill: colour("--band") });
    }
    new uPlot({ width: Math.max(260, holder.clientWidth || 320), height: 190, bands,
      scales: { x: { time: false } }, axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000] }, { ...axis, size: 74,
        values: (_, ticks) => ticks.map(number) }], series, legend: { live: true } }, lines, holder);
  }
}
