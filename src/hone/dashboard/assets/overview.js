// The curves of a run, and its worst finding above them.
import { html, useEffect, useMemo } from "/assets/vendor/preact-htm.js";
import { api, query, savePlot, usePolled, useSeries } from "/assets/api.js";
import { Chart, ChartControls, RewardHistogram, isAlwaysZero, xOfStep } from "/assets/charts.js";
import { COLORS, formatAge } from "/assets/format.js";
import {
  RL_CHARTS,
  SFT_CHARTS,
  addDerived,
  chartMetrics,
  evaluationRewards,
  rewardParts,
} from "/assets/metrics.js";
import { changeParameters, go, runPath } from "/assets/routes.js";

const MOST_PARTS = 6; // reward functions in one chart
const SILENT_SECONDS = 6; // without a heartbeat after which a process counts as silent

export function Overview({ run, asked, theme }) {
  const isRL = run.kind === "rl";
  const added = (asked.plot || "").split(",").filter((name) => run.names.includes(name));
  const evaluations = evaluationRewards(run.names);
  const charts = useMemo(
    () => listCharts(run, evaluations, added),
    [run.kind, run.names.join(), added.join()],
  );
  const names = [...new Set([...chartMetrics(charts, run.names), ...evaluations])];
  const [found, last, restart] = useSeries(run.id, names, run.status === "running");
  useEffect(() => {
    if (run.step < last.current) restart();
  }, [run.step]);
  const series = useMemo(() => addDerived(found), [found]);
  const axis = asked.x || "step";
  const toX = useMemo(() => xOfStep(axis, found), [axis, found]);
  const openStep = isRL ? (step) => showRollouts(run.id, step, 1) : null;
  const shown = charts.map((chart) => ({ ...chart, lines: linesOf(chart, series) }));
  const zero = shown.filter((chart) => !chart.log && isAlwaysZero(chart.lines));
  return html`<div class="row" style=${{ marginBottom: ".8rem" }}>
      <${Processes} components=${run.components} />
      <span class="grow"></span>
      <${ChartControls}
        asked=${asked}
        change=${changeParameters}
        hasTokens=${run.names.includes("progress/tokens")}
      />
      <${AddMetric} names=${run.names} added=${added} />
      <button class="link" onClick=${() => savePlot(run.id, "png", run.name)}>PNG</button>
      <button class="link" onClick=${() => savePlot(run.id, "svg", run.name)}>SVG</button>
    </div>
    <${Verdict} run=${run} />
    ${!run.names.length && html`<p class="soft">No step is complete yet.</p>`}
    <div class="grid">
      ${shown
        .filter((chart) => !zero.includes(chart))
        .map(
          (chart, i) =>
            html`<${Chart}
                key=${chart.title}
                ...${chart}
                theme=${theme}
                mark=${run.fork && run.fork.step}
                axis=${axis}
                toX=${toX}
                smoothing=${+(asked.smooth || 0)}
                onPick=${openStep}
              />${isRL && i === 0 && html`<${Histogram} run=${run} />`}`,
        )}
    </div>
    ${
      zero.length > 0 &&
      html`<p class="soft small">
        0 at every step: ${zero.map((chart) => chart.title).join(", ")}.
      </p>`
    }
    ${
      isRL &&
      html`<p class="soft small">
        Drag to zoom all charts, double-click to zoom out, click a point to read the rollouts of its
        step.
      </p>`
    }`;
}

const showRollouts = (id, step, width) =>
  go(runPath(id, "rollouts"), { step_from: step, step_to: step + width - 1 });

function listCharts(run, evaluations, added) {
  if (run.kind === "sft")
    return [...SFT_CHARTS, ...evaluationCharts(evaluations), ...added.map(metricChart)];
  const [reward, ...others] = RL_CHARTS;
  const parts = rewardParts(run.names, run.env.includes(", "));
  const partCharts = parts.length > 1 ? [partsChart(parts.slice(0, MOST_PARTS))] : [];
  return [
    { ...reward, lines: [...reward.lines, ...evaluations.flatMap(evaluationLines)] },
    ...partCharts,
    ...others,
    ...added.map(metricChart),
  ];
}

const environmentOf = (name) => name.split("/").slice(1, -1).join("/");

// Held-out rewards, and a dashed line at the reward before training.
const evaluationLines = (name, i) => [
  { name, label: `held out: ${environmentOf(name)}`, color: COLORS[(i + 1) % 6] },
  { name, label: "before training", color: COLORS[(i + 1) % 6], isBaseline: true },
];

const evaluationCharts = (evaluations) =>
  evaluations.length
    ? [
        {
          title: "Evaluation",
          lines: evaluations.map((name) => ({ name, label: environmentOf(name) })),
        },
      ]
    : [];

const partsChart = (parts) => ({
  title: "Parts of the reward",
  lines: parts.map((name) => ({ name, label: name.split("/").slice(1).join("/") })),
});

const metricChart = (name) => ({ title: name, lines: [{ name, label: name }] });

function linesOf(chart, series) {
  return chart.lines.flatMap((line) => {
    const data = series[line.name];
    if (!line.isBaseline) return [{ ...line, data }];
    if (!data || data[0][0] !== 0) return [];
    const steps = (series["reward/mean"] || [[]])[0];
    return [{ ...line, data: [steps, steps.map(() => data[1][0])] }];
  });
}

function Processes({ components }) {
  const entries = Object.entries(components);
  if (!entries.length) return html`<span class="soft small">Not running</span>`;
  return entries.map(([name, age]) => {
    const isAlive = age < SILENT_SECONDS;
    const state = isAlive ? "running" : `no sign of life for ${formatAge(age)}`;
    return html`<span class="chip ${isAlive ? "good" : "bad"}">${name}: ${state}</span>`;
  });
}

function AddMetric({ names, added }) {
  const choose = (name) => {
    const next = added.includes(name) ? added.filter((one) => one !== name) : [...added, name];
    changeParameters({ plot: next.join(",") });
  };
  return html`<select aria-label="add a chart" value="" onChange=${(e) => choose(e.target.value)}>
    <option value="">add a chart …</option>
    ${names.map(
      (name) => html`<option value=${name}>${added.includes(name) ? "✓ " : ""}${name}</option>`,
    )}
  </select>`;
}

// Read again each time the number of steps has grown by a fifth: it reads all rollouts.
const readingOf = (run) => [run.id, Math.floor(4 * Math.log2(run.step + 1)), run.status];

function Verdict({ run }) {
  const path = `/api/doctor?${query({ run: run.id })}`;
  const { data } = usePolled(() => api(path), readingOf(run), 0);
  const worst = data && data.findings[0];
  if (!worst) return null;
  return html`<div class=${`card finding ${worst.is_problem ? "" : "none"}`}>
    <b>${worst.title}</b> (since step ${worst.first_step}). ${worst.evidence}${" "}
    <a href=${"#" + runPath(run.id, "doctor")}>What to do</a>
  </div>`;
}

function Histogram({ run }) {
  const path = `/api/histogram?${query({ run: run.id })}`;
  const { data } = usePolled(() => api(path), readingOf(run), 0);
  const open = (step, width) => showRollouts(run.id, step, width);
  return html`<${RewardHistogram} data=${data} onPick=${open} />`;
}
