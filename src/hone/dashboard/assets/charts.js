// A chart of one or more series, with linked cursor and zoom, smoothing and a choice of x axis.
import { html, useEffect, useMemo, useRef, useState } from "/assets/vendor/preact-htm.js";
import { COLORS, cssValue, formatMetric, formatNumber, formatTick } from "/assets/format.js";

const HEIGHT = 190;
const FEW_POINTS = 30; // up to so many points are drawn as dots too
if (window.uPlot) uPlot.sync("steps"); // one cursor and one zoom for all charts

export const X_AXES = { step: "steps", time: "seconds", tokens: "tokens" };

// Return a function step → x for an axis; steps without a value are left out (null).
export function xOfStep(axis, series) {
  const source = { time: "time/step", tokens: "progress/tokens" }[axis];
  if (!source || !series[source]) return (step) => step;
  const [steps, values] = series[source];
  let sum = 0;
  const sums = new Map(steps.map((step, i) => [step, (sum += values[i] || 0)]));
  return (step) => sums.get(step) ?? null;
}

// Exponential moving average: 0 leaves the values as they are, 0.9 averages about ten steps.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

// Columns for uPlot: the x values, then the values of each line at them.
function makeTable(lines, isLog, smoothing, toX) {
  const known = lines.map(({ data: [steps, values], band }) => {
    const shown = band ? values : smooth(values, smoothing);
    return steps.map((step, i) => [toX(step), shown[i], step]).filter(([x]) => x !== null);
  });
  const xs = [...new Set(known.flatMap((points) => points.map(([x]) => x)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const stepAt = Array(xs.length).fill(null);
  const columns = known.map((points) => {
    const column = Array(xs.length).fill(null);
    for (const [x, value, step] of points) {
      const i = place.get(x);
      stepAt[i] = step;
      column[i] = isLog && !(value > 0) ? null : value;
    }
    return column;
  });
  return { table: [xs, ...columns], stepAt };
}

const isZero = (line) => line.data[1].every((value) => !value);

// True if a chart has nothing to show but zeros.
export const isAlwaysZero = (lines) => {
  const drawn = lines.filter((line) => line.data && line.data[0].length);
  return drawn.length > 0 && drawn.every(isZero);
};

/**
 * lines: [{ label, data: [steps, values], color, band: "low" | "high", isBaseline }]
 * mark: step with a dashed line, such as the one from which a run was forked
 * onPick: called with a step when its point is clicked
 * legend: show the label of a single line too
 * toX: step → x of the axis; with isConverted the data has x values in place of steps
 */
export function Chart(props) {
  const { title, lines, log, percent, zeroBelow, theme, mark, onPick } = props;
  const { axis = "step", smoothing = 0, toX = (step) => step, isConverted, legend } = props;
  const place = useRef(null);
  const plot = useRef(null);
  const pick = useRef(null);
  const [cursor, setCursor] = useState(null);
  const drawn = lines.filter((line) => line.data && line.data[0].length);
  const { table, stepAt } = useMemo(
    () => makeTable(drawn, log, smoothing, toX),
    [lines, smoothing, axis, toX],
  );
  pick.current = (index) => onPick && stepAt[index] && onPick(stepAt[index]);
  const names = drawn.map((line) => [line.label, line.color, line.band, line.isBaseline]);
  const shape = JSON.stringify([title, log, percent, theme, mark, axis, names]);
  useEffect(() => {
    if (!place.current || !drawn.length) return;
    const options = chartOptions({ drawn, log, percent, axis, mark: mark ?? null, toX });
    options.width = place.current.clientWidth || 320;
    options.hooks.setCursor = [(u) => setCursor(u.cursor.idx)];
    plot.current = new uPlot(options, table, place.current);
    plot.current.over.addEventListener("click", () => {
      const { idx } = plot.current.cursor;
      if (idx !== null && idx !== undefined) pick.current(idx);
    });
    const resize = () => {
      if (plot.current && place.current) {
        plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT });
      }
    };
    const observer = new ResizeObserver(resize);
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    if (plot.current) setDataKeepingZoom(plot.current, table);
  }, [table]);
  if (!drawn.length) return null;
  const format = (value) => formatMetric(value, { percent, zeroBelow });
  const index = cursor ?? table[0].length - 1;
  const valueOf = (i) =>
    cursor === null ? table[i + 1].findLast((value) => value !== null) : table[i + 1][index];
  const shown = drawn.map((line, i) => [line, i]).filter(([line]) => !line.band);
  const hasOnlyOne = shown.length === 1 && !legend;
  const x = `${formatNumber(table[0][index])} ${X_AXES[axis]}`;
  const at =
    axis === "step" ? `step ${stepAt[index]}` : isConverted ? x : `step ${stepAt[index]}, ${x}`;
  return html`<section class="card chart" aria-label=${title}>
    <h2>${title}${hasOnlyOne && html`<span class="now">${format(valueOf(shown[0][1]))}</span>`}</h2>
    <div ref=${place} class=${onPick ? "pickable" : ""}></div>
    <div class="legend">
      <span>${at}</span>
      ${
        !hasOnlyOne &&
        shown.map(
          ([line, i]) =>
            html`<span
              ><i style=${{ background: `var(${line.color || COLORS[i % 6]})` }}></i
              >${line.label}${" "} <b>${format(valueOf(i))}</b></span
            >`,
        )
      }
      ${log && drawn.every(isZero) && html`<span>0 at every step</span>`}
    </div>
  </section>`;
}

function setDataKeepingZoom(u, table) {
  const { min, max } = u.scales.x;
  const isZoomed = max !== null && (min > u.data[0][0] || max < u.data[0].at(-1));
  u.setData(table);
  if (isZoomed) u.setScale("x", { min, max });
}

function chartOptions({ drawn, log, percent, axis, mark, toX }) {
  const axisStyle = {
    stroke: cssValue("--soft"),
    grid: { stroke: cssValue("--line"), width: 1 },
    ticks: { stroke: cssValue("--line") },
    font: "11px system-ui",
  };
  const label = (value) => (percent ? `${Math.round(100 * value)} %` : formatTick(value));
  const formatTicks = (_, ticks) => ticks.map((value) => (value === null ? "" : label(value)));
  const xTicks = (_, ticks) => ticks.map((value) => formatTick(value));
  const bandEnds = (end) => drawn.flatMap((line, i) => (line.band === end ? [i + 1] : []));
  const lows = bandEnds("low");
  return {
    height: HEIGHT,
    legend: { show: false },
    cursor: {
      sync: { key: "steps", scales: ["x", null] },
      points: { size: 6 },
      drag: { x: true, y: false },
    },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: yRange } },
    axes: [
      axis === "step" ? { ...axisStyle, size: 28 } : { ...axisStyle, size: 28, values: xTicks },
      { ...axisStyle, size: 56, values: formatTicks },
    ],
    series: [
      {},
      ...drawn.map((line, i) => ({
        label: line.label,
        stroke: line.band ? "transparent" : cssValue(line.color || COLORS[i % 6]),
        width: line.band ? 0 : 1.7,
        dash: line.isBaseline ? [4, 4] : undefined,
        points: { show: (u) => u.data[0].length < FEW_POINTS && !line.band && !line.isBaseline },
        spanGaps: true,
      })),
    ],
    bands: bandEnds("high").map((high, i) => ({
      series: [high, lows[i]],
      fill: cssValue(drawn[high - 1].color || "--c1") + "2e",
    })),
    hooks: { draw: [(u) => drawMark(u, mark === null ? null : toX(mark))] },
  };
}

function yRange(_, low, high) {
  if (low === null) return [0, 1];
  if (high - low < 1e-12) return [low - (Math.abs(low) / 2 || 0), high + (Math.abs(high) / 2 || 1)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function drawMark(u, at) {
  if (at === null) return;
  const x = Math.round(u.valToPos(at, "x", true));
  const { top, height, left, width } = u.bbox;
  if (x < left || x > left + width) return;
  u.ctx.save();
  u.ctx.strokeStyle = cssValue("--soft");
  u.ctx.setLineDash([6, 5]);
  u.ctx.beginPath();
  u.ctx.moveTo(x, top);
  u.ctx.lineTo(x, top + height);
  u.ctx.stroke();
  u.ctx.restore();
}

// Controls of all charts of a page; their values are in the address.
export function ChartControls({ asked, change, hasTokens }) {
  const smoothing = +(asked.smooth || 0);
  const axes = Object.keys(X_AXES).filter((name) => name !== "tokens" || hasTokens);
  return html`<label class="small"
      >x axis${" "}<select
        aria-label="x axis"
        value=${asked.x || "step"}
        onChange=${(e) => change({ x: e.target.value === "step" ? "" : e.target.value })}
      >
        ${axes.map((name) => html`<option value=${name}>${X_AXES[name]}</option>`)}
      </select></label
    >
    <label class="small row"
      >smoothing
      <input
        type="range"
        min="0"
        max="0.98"
        step="0.02"
        aria-label="smoothing"
        value=${smoothing}
        onInput=${(e) => change({ smooth: +e.target.value || "" })}
      />
      ${smoothing.toFixed(2)}</label
    >`;
}

// The distribution of rewards by step, darker where more rollouts are.
export function RewardHistogram({ data, onPick }) {
  if (!data || data.steps.length < 2) return null;
  const bins = data.counts[0].length;
  const width = 600;
  const height = 150;
  const w = width / data.steps.length;
  const h = height / bins;
  const cells = data.counts.flatMap((column, x) => {
    const total = column.reduce((sum, count) => sum + count, 0) || 1;
    return column.map((count, y) =>
      count
        ? html`<rect
            x=${x * w}
            y=${height - (y + 1) * h}
            width=${w}
            height=${h}
            fill="var(--c1)"
            opacity=${Math.max(0.06, Math.sqrt(count / total))}
          />`
        : null,
    );
  });
  const select = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * data.steps.length);
    if (data.steps[column] !== undefined) onPick(data.steps[column], data.width);
  };
  return html`<section class="card chart" aria-label="Rewards of the rollouts">
    <h2>Rewards of the rollouts</h2>
    <svg
      class="histogram pickable"
      viewBox=${`0 0 ${width} ${height}`}
      preserveAspectRatio="none"
      role="img"
      aria-label="share of rollouts by step and reward"
      onClick=${select}
    >
      ${cells}
    </svg>
    <div class="legend">
      <span>step ${data.steps[0]} to ${data.last}</span>
      <span>reward ${formatNumber(data.low)} (bottom) to ${formatNumber(data.high)} (top)</span>
    </div>
  </section>`;
}
