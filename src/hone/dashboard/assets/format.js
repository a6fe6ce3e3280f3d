// Numbers, times and small elements that all pages use.
import { html } from "/assets/vendor/preact-htm.js";

export const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
export const colorOf = (i) => `var(${COLORS[i % COLORS.length]})`;
export const cssValue = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const isMissing = (x) => x === null || x === undefined || Number.isNaN(x);

// A number with about four digits: 0.7643, 1.000, 152, 3.0e-6.
export function formatNumber(x) {
  if (isMissing(x)) return "–";
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return x.toExponential(1);
  if (size >= 1000) return x.toFixed(0);
  return x.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

export function formatTick(x) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e4 || size < 1e-3) return x.toExponential(1).replace(".0", "").replace("+", "");
  return String(+x.toPrecision(3));
}

export const formatPercent = (x) => (isMissing(x) ? "–" : `${(100 * x).toFixed(1)} %`);

// Values of a metric as its chart shows them.
export function formatMetric(x, { percent, zeroBelow } = {}) {
  if (percent) return formatPercent(x);
  if (zeroBelow && !isMissing(x) && Math.abs(x) < zeroBelow)
    return `below ${formatTick(zeroBelow)}`;
  return formatNumber(x);
}

export function formatAge(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function formatBytes(bytes) {
  if (bytes > 1e9) return `${(bytes / 1e9).toFixed(2)} GB`;
  if (bytes > 1e6) return `${(bytes / 1e6).toFixed(1)} MB`;
  return `${(bytes / 1e3).toFixed(0)} kB`;
}

export function ErrorText({ error }) {
  return error && html`<p class="error" role="alert">${error.message}</p>`;
}

export function Sparkline({ values, width = 120, height = 28 }) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return html`<span class="soft">–</span>`;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const x = (i) => ((i * width) / (known.length - 1)).toFixed(1);
  const y = (value) => (height - 3 - ((value - low) / span) * (height - 6)).toFixed(1);
  const path = known.map((value, i) => `${i ? "L" : "M"}${x(i)} ${y(value)}`).join("");
  const label = `from ${formatNumber(known[0])} to ${formatNumber(known.at(-1))}`;
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label=${label}>
    <path d=${path} />
  </svg>`;
}

// The worst finding of a run as a badge.
export function FindingBadge({ finding }) {
  if (!finding) return null;
  const words = { no_variance: "no variance", no_signal: "no signal", template: "wrong template" };
  const title = `${finding.title}, since step ${finding.first_step}`;
  return html`<span class=${`chip ${finding.is_problem ? "bad" : "good"}`} title=${title}>
    ${words[finding.kind] || finding.kind}
  </span>`;
}

export const nameOf = (run) => run.label || (run.place === "." ? run.name : run.place);
