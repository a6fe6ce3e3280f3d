// The charts of a run: their titles, and the metrics that they show.

const DERIVED = ["reward/low", "reward/high", "signal"]; // made from others by `addDerived`

export const RL_CHARTS = [
  {
    title: "Reward",
    lines: [
      { name: "reward/mean", label: "mean" },
      { name: "reward/low", label: "spread", band: "low" },
      { name: "reward/high", label: "spread", band: "high" },
    ],
  },
  { title: "Loss", lines: [{ name: "loss/mean", label: "loss" }] },
  { title: "Entropy", lines: [{ name: "entropy/mean", label: "nats a token" }] },
  {
    title: "Mismatch KL",
    lines: [{ name: "mismatch_kl/mean", label: "KL" }],
    log: true,
    zeroBelow: 1e-9,
  },
  {
    title: "Staleness in steps",
    lines: [
      { name: "batch/off_policy_level/mean", label: "mean" },
      { name: "batch/off_policy_level/max", label: "max" },
    ],
  },
  {
    title: "Completion length in tokens",
    lines: [
      { name: "completion_len/mean", label: "mean" },
      { name: "completion_len/max", label: "max" },
    ],
  },
  {
    title: "Groups with a signal",
    lines: [
      { name: "signal", label: "with signal" },
      { name: "batch/solve_all", label: "solved by all" },
      { name: "batch/solve_none", label: "solved by none" },
    ],
    percent: true,
  },
  {
    title: "Truncated and masked",
    lines: [
      { name: "is_truncated/mean", label: "truncated completions" },
      { name: "is_masked/mean", label: "masked tokens" },
    ],
    percent: true,
  },
  {
    title: "Throughput in tokens per second",
    lines: [
      { name: "perf/generate_throughput", label: "sampled" },
      { name: "perf/train_throughput", label: "trained" },
    ],
  },
  { title: "Peak memory in GiB", lines: [{ name: "perf/peak_memory", label: "trainer" }] },
  { title: "MFU", lines: [{ name: "perf/mfu", label: "training" }], percent: true },
  { title: "Gradient norm", lines: [{ name: "optim/grad_norm", label: "norm" }] },
  { title: "Learning rate", lines: [{ name: "optim/lr", label: "rate" }] },
];

export const SFT_CHARTS = [
  {
    title: "Loss",
    lines: [
      { name: "loss/mean", label: "training" },
      { name: "val/loss", label: "held out" },
    ],
  },
  {
    title: "Pairs with the chosen answer ahead",
    lines: [
      { name: "rewards/accuracies", label: "training" },
      { name: "val/rewards/accuracies", label: "held out" },
    ],
    percent: true,
  },
  {
    title: "Margin of the chosen answer",
    lines: [
      { name: "rewards/margins", label: "training" },
      { name: "val/rewards/margins", label: "held out" },
    ],
  },
  {
    title: "Rewards of the answers",
    lines: [
      { name: "rewards/chosen", label: "chosen" },
      { name: "rewards/rejected", label: "rejected" },
    ],
  },
  { title: "Learning rate", lines: [{ name: "optim/lr", label: "rate" }] },
  { title: "Gradient norm", lines: [{ name: "optim/grad_norm", label: "norm" }] },
  {
    title: "Throughput in tokens per second",
    lines: [{ name: "perf/throughput", label: "trained" }],
  },
  { title: "Peak memory in GiB", lines: [{ name: "perf/peak_memory", label: "trainer" }] },
  { title: "MFU", lines: [{ name: "perf/mfu", label: "training" }], percent: true },
];

// Charts of the page that compares runs.
export const COMPARED = [
  { title: "Reward", name: "reward/mean" },
  { title: "Loss", name: "loss/mean" },
  { title: "Held-out loss", name: "val/loss" },
  { title: "Entropy", name: "entropy/mean" },
  { title: "Mismatch KL", name: "mismatch_kl/mean", log: true, zeroBelow: 1e-9 },
  { title: "Completion length in tokens", name: "completion_len/mean" },
  { title: "Gradient norm", name: "optim/grad_norm" },
  { title: "Staleness in steps", name: "batch/off_policy_level/mean" },
  { title: "Seconds per step", name: "time/step" },
  { title: "Throughput in tokens per second", name: "perf/train_throughput" },
];

export const X_METRICS = ["time/step", "progress/tokens"]; // of the other x axes
const BAND_METRICS = ["reward/std", "reward/min", "reward/max", "batch/without_signal"];

// Names of all metrics that the charts need and the run has.
export function chartMetrics(charts, names) {
  const shown = charts.flatMap((chart) => chart.lines.map((line) => line.name));
  return [...shown, ...BAND_METRICS, ...X_METRICS].filter(
    (name) => names.includes(name) && !DERIVED.includes(name),
  );
}

// Add the band of the rewards (mean ± standard deviation, within the rewards that occurred) and the
// share of groups with a signal.
export function addDerived(series) {
  const all = { ...series };
  const mean = series["reward/mean"];
  const std = series["reward/std"];
  const idle = series["batch/without_signal"];
  if (mean && std && mean[0].length === std[0].length) {
    const [low, high] = [series["reward/min"], series["reward/max"]].map((end) => end && end[1]);
    const above = (value, i) => (low ? Math.max(value, low[i]) : value);
    const below = (value, i) => (high ? Math.min(value, high[i]) : value);
    all["reward/low"] = [mean[0], mean[1].map((value, i) => above(value - std[1][i], i))];
    all["reward/high"] = [mean[0], mean[1].map((value, i) => below(value + std[1][i], i))];
  }
  if (idle) all.signal = [idle[0], idle[1].map((value) => 1 - value)];
  return all;
}

const SUMMARY = /^reward\/(mean|median|std|min|max|length_correlation)$/;

// Rewards by environment (if there are several) and single reward functions.
export function rewardParts(names, hasSeveralEnvironments) {
  return names.filter(
    (name) =>
      /^(reward|metrics)\/[^/]+(\/[^/]+)?$/.test(name) &&
      !SUMMARY.test(name) &&
      (hasSeveralEnvironments || !name.startsWith("reward/")),
  );
}

export const evaluationRewards = (names) => names.filter((name) => /^eval\/.*\/reward$/.test(name));
