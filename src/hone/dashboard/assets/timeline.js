// Where the time of each step goes: sampling above, training below.
import { html, useMemo, useState } from "/assets/vendor/preact-htm.js";
import { useSeries } from "/assets/api.js";
import { formatNumber } from "/assets/format.js";

const MOST_STEPS = 120; // bars that are shown
const WIDTH = 960;
const HALF = 120; // height of each side
const ROLLOUT_PARTS = ["model", "environment", "scoring"];
const LANES = [
  {
    title: "Sampling",
    parts: [
      { name: "time/wait_for_weights", label: "wait for weights", color: "--line" },
      { name: "time/generate", label: "generate", color: "--c1" },
      { name: "part/environment", label: "environment", color: "--c5" },
      { name: "part/scoring", label: "scoring", color: "--c6" },
      { name: "time/update_weights", label: "load weights", color: "--c3" },
    ],
  },
  {
    title: "Training",
    parts: [
      { name: "time/wait_for_batch", label: "wait for rollouts", color: "--line" },
      { name: "time/train", label: "train", color: "--c2" },
      { name: "time/publish_weights", label: "send weights", color: "--c4" },
      { name: "time/save", label: "save", color: "--soft" },
    ],
  },
];
const NAMES = [
  "time/step",
  ...LANES.flatMap((lane) => lane.parts.map((part) => part.name)),
  ...ROLLOUT_PARTS.map((name) => `time/rollout/${name}`),
];

// Divide the seconds of sampling by what its rollouts spent theirs on; rollouts run in parallel.
function divideSampling(series) {
  const whole = series["time/generate"];
  const parts = ROLLOUT_PARTS.map((name) => series[`time/rollout/${name}`]);
  if (!whole || parts.some((part) => !part || part[0].length !== whole[0].length)) return series;
  const share = (k, i) => parts[k][1][i] / (parts.reduce((sum, part) => sum + part[1][i], 0) || 1);
  const partOf = (k) => [whole[0], whole[1].map((seconds, i) => seconds * share(k, i))];
  return {
    ...series,
    "time/generate": partOf(0),
    "part/environment": partOf(1),
    "part/scoring": partOf(2),
  };
}

function secondsByStep(data) {
  const values = new Map(data[0].map((step, i) => [step, data[1][i]]));
  return (step) => values.get(step) || 0;
}

const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

export function Timeline({ run }) {
  const names = NAMES.filter((name) => run.names.includes(name));
  const [found] = useSeries(run.id, names, run.status === "running");
  const [chosen, choose] = useState(null);
  const series = useMemo(() => divideSampling(found), [found]);
  const steps = (series["time/step"] || [[]])[0].slice(-MOST_STEPS);
  if (!steps.length) return html`<p class="soft">No step is complete yet.</p>`;
  const lanes = LANES.map((lane) => ({
    title: lane.title,
    parts: lane.parts
      .filter((part) => series[part.name])
      .map((part) => ({ ...part, secondsOf: secondsByStep(series[part.name]) })),
  }));
  const rows = lanes.flatMap((lane) =>
    lane.parts.map((part) => {
      const secondsIn = (one) =>
        chosen === null
          ? sumOf(steps.map(one.secondsOf)) / steps.length
          : one.secondsOf(steps[chosen]);
      const seconds = secondsIn(part);
      const whole = sumOf(lane.parts.map(secondsIn)) || 1;
      return { lane: lane.title, part, seconds, share: seconds / whole };
    }),
  );
  const which = chosen === null ? "mean" : `step ${steps[chosen]}`;
  return html`<div class="card">
    <div class="row">
      <h2>Where the seconds of a step go</h2>
      <span class="grow"></span><b>${adviseOn(steps, lanes)}</b>
    </div>
    <${Bars} steps=${steps} lanes=${lanes} chosen=${chosen} choose=${choose} />
    <table>
      <thead>
        <tr>
          <th>Side</th>
          <th>Part</th>
          <th class="num">Seconds, ${which}</th>
          <th class="num">Share</th>
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) =>
            html`<tr>
              <td>${row.lane}</td>
              <td>
                <i class="swatch" style=${{ background: `var(${row.part.color})` }}></i>
                ${row.part.label}
              </td>
              <td class="num">${formatNumber(row.seconds)}</td>
              <td class="num">${(100 * row.share).toFixed(0)} %</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function Bars({ steps, lanes, chosen, choose }) {
  const totals = steps.flatMap((step) =>
    lanes.map((lane) => sumOf(lane.parts.map((part) => part.secondsOf(step)))),
  );
  const sorted = totals.sort((a, b) => a - b);
  const highest = 1.15 * sorted[Math.floor(0.98 * (sorted.length - 1))] || 1;
  const width = WIDTH / Math.max(steps.length, 20);
  const bars = steps.flatMap((step, i) =>
    lanes.flatMap((lane, side) => {
      let filled = 0;
      return lane.parts.map((part) => {
        const height = Math.max(
          0,
          Math.min(HALF - filled, (part.secondsOf(step) / highest) * HALF),
        );
        const y = side ? HALF + 2 + filled : HALF - filled - height;
        filled += height;
        return html`<rect
          x=${i * width}
          y=${y}
          width=${Math.max(1, width - 1)}
          height=${height}
          fill=${`var(${part.color})`}
          opacity=${chosen === null || chosen === i ? 1 : 0.55}
        />`;
      });
    }),
  );
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const i = Math.floor((((event.clientX - box.left) / box.width) * WIDTH) / width);
    choose(i >= 0 && i < steps.length ? i : null);
  };
  return html`<div class="scroll">
      <svg
        class="timeline"
        viewBox=${`0 0 ${WIDTH} ${2 * HALF + 4}`}
        width="100%"
        role="img"
        aria-label="seconds of the last steps by part"
        onMouseLeave=${() => choose(null)}
        onMouseMove=${point}
      >
        ${bars}
      </svg>
    </div>
    <p class="soft small">
      Sampling above, training below, one bar a step; the last ${steps.length} steps up to
      ${" "}${steps.at(-1)}. Each half is ${formatNumber(highest)} s high.
    </p>`;
}

function adviseOn(steps, lanes) {
  const [sampling, training] = lanes.map((lane) =>
    Object.fromEntries(lane.parts.map((part) => [part.name, sumOf(steps.map(part.secondsOf))])),
  );
  const share = (lane, name) => (lane[name] || 0) / (sumOf(Object.values(lane)) || 1);
  const around = (sampling["part/scoring"] || 0) + (sampling["part/environment"] || 0);
  const generate = sampling["time/generate"] || 0;
  const train = training["time/train"] || 0;
  if (share(training, "time/wait_for_batch") > 0.25) {
    return "The trainer waits for rollouts: more or faster sampling helps.";
  }
  if (share(sampling, "time/wait_for_weights") > 0.25) {
    return "The sampler waits for weights: faster training or a higher max_async_level helps.";
  }
  if (around > 0.4 * generate) {
    return "Environment and rewards take much of the sampling: orchestrator.env.workers or faster reward functions help.";
  }
  if (generate > 2 * train) return "Most of a step is generation.";
  if (train > 2 * generate) return "Most of a step is training.";
  return "Neither side waits much for the other.";
}
