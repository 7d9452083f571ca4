const data = JSON.parse(document.getElementById("data").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plots = new Map(); // the element of a chart that was drawn, and its plot

// With four digits, or as many as tell it from its neighbour a `step` away.
function short(value, step) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("-", "−").replace("e-", "e−");
  const digits = step ? Math.max(4, Math.ceil(Math.log10(size / step)) + 1) : 4;
  const options = { maximumSignificantDigits: digits, notation: size >= 1e6 ? "compact" : "standard" };
  return new Intl.NumberFormat("en", options).format(value).replace("-", "−");
}

function axis(more) {
  const stroke = colour("--line");
  const font = "12px system-ui, sans-serif";
  return { stroke: colour("--soft"), font, grid: { stroke, width: 1 }, ticks: { stroke, width: 1 }, ...more };
}

// uPlot's own range, which for zeros alone would be 0 to 100.
function range(plot, min, max) {
  if (min == null) return [null, null];
  return min === 0 && max === 0 ? [0, 1] : uPlot.rangeNum(min, max, 0.1, true);
}

function curve(box, { axis: name, x, series }) {
  const lines = series.map(([label], index) => ({
    label,
    stroke: colour(`--c${index % 8}`),
    width: 1.5,
    dash: index < 8 ? undefined : [5, 4],
    spanGaps: true,
    value: (plot, value) => short(value),
    points: { show: x.length < 40, size: 5 },
  }));
  const settings = {
    width: box.clientWidth,
    height: 200,
    scales: { x: { time: false }, y: { range } },
    cursor: { sync: { key: name }, y: false },
    axes: [
      axis({ size: 34 }),
      axis({ size: 66, values: (plot, ticks, _, space, step) => ticks.map((tick) => short(tick, step)) }),
    ],
    series: [{ label: name }, ...lines],
  };
  return new uPlot(settings, [x, ...series.map(([, values]) => values)], box);
}

// One row per rank. uPlot has the axis, the zoom and the cursor; the spans are drawn between.
function timeline(box, { ranks, rows }) {
  const colours = data.colours.map((name) => colour(`--p-${name}`));
  const ended = rows.reduce((one, other) => (other.end.at(-1) > one.end.at(-1) ? other : one)); // last
  const last = ended.end.at(-1);
  const at = box.nextElementSibling;

  function draw(plot) {
    const { ctx, bbox } = plot;
    const height = bbox.height / ranks.length;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    rows.forEach((row, index) => {
      for (let i = 0; i < row.begin.length; i++) {
        const left = plot.valToPos(row.begin[i] / 1000, "x", true);
        const right = plot.valToPos(row.end[i] / 1000, "x", true);
        if (right < bbox.left || left > bbox.left + bbox.width) continue;
        ctx.fillStyle = colours[row.what[i]];
        ctx.fillRect(left, bbox.top + height * (index + 0.12), Math.max(right - left, 0.5), height * 0.76);
      }
    });
    ctx.restore();
  }

  function tell(plot) {
    const { left, top } = plot.cursor;
    if (left == null || left < 0) return;
    const index = Math.min(ranks.length - 1, Math.floor((top / plot.over.clientHeight) * ranks.length));
    const moment = plot.posToVal(left, "x") * 1000;
    const row = rows[index];
    const span = row.begin.findLastIndex((begin) => begin <= moment);
    if (span < 0) return;
    const step = row.step[span];
    const when = step < 0 ? `step ${-1 - step}, evaluation` : `step ${step}`;
    const seconds = short((row.end[span] - row.begin[span]) / 1000);
    at.textContent = `rank ${ranks[index]} · ${data.colours[row.what[span]]} · ${when} · ${seconds} s`;
  }

  const few = ranks.length <= 32;
  const labels = axis({
    size: 64,
    space: 4,
    incrs: [1],
    splits: () => ranks.map((rank, index) => index + 0.5),
    values: () => ranks.map((rank, index) => (few || index % 8 === 0 ? `rank ${rank}` : "")),
    grid: { show: false },
    ticks: { show: false },
  });
  const settings = {
    width: box.clientWidth,
    height: 50 + Math.max(44, ranks.length * (few ? 26 : 6)),
    legend: { show: false },
    scales: { x: { time: false }, y: { range: [0, ranks.length], dir: -1 } },
    cursor: { y: false, points: { show: false } },
    axes: [axis({ size: 34, values: (plot, ticks) => ticks.map((tick) => `${short(tick)} s`) }), labels],
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks: { draw: [draw], setCursor: [tell] },
  };
  const plot = new uPlot(settings, [[0, last / 1000], [0, ranks.length]], box);
  const look = (min, max) => plot.setScale("x", { min, max });
  const move = (part) => {
    const { min, max } = plot.scales.x;
    look(min + part * (max - min), max + part * (max - min));
  };
  const views = {
    "last steps": () => look((ended.begin.at(-60) ?? 0) / 1000, last / 1000),
    earlier: () => move(-0.5),
    later: () => move(0.5),
    all: () => look(0, last / 1000),
  };
  views["last steps"]();
  for (const button of box.parentElement.querySelectorAll("button")) button.onclick = views[button.textContent];
  return plot;
}

function show(box) {
  if (plots.has(box)) return;
  plots.set(box, box.id === "spans" ? timeline(box, data.timeline) : curve(box, data.charts[box.dataset.chart]));
}

// Hundreds of charts would keep a page from opening: each is drawn when it is about to be seen.
const seen = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => show(entry.target)),
  { rootMargin: "600px" },
);
const boxes = document.querySelectorAll(".plot");
boxes.forEach((box) => seen.observe(box));
addEventListener("beforeprint", () => boxes.forEach(show));
addEventListener("resize", () => {
  plots.forEach((plot, box) => plot.setSize({ width: box.clientWidth, height: plot.height }));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [box, plot] of [...plots]) {
    plot.destroy();
    plots.delete(box);
    show(box);
  }
});
