// Several runs side by side: their curves, single or grouped over seeds, and what differs.
import { html, useMemo, useState } from "/assets/vendor/preact-htm.js";
import { api, query, savePlot, usePolled } from "/assets/api.js";
import { Chart, ChartControls, isAlwaysZero, xOfStep } from "/assets/charts.js";
import { COLORS, ErrorText, FindingBadge, colorOf, nameOf } from "/assets/format.js";
import { COMPARED, X_METRICS } from "/assets/metrics.js";
import { changeParameters, runPath } from "/assets/routes.js";

const IGNORED = /(^|\.)(output_dir|seed|run_name|name_suffix)$|^wandb\./; // of runs that differ by seed

// Keys and values of TOML as {"section.key": text}.
export function flattenToml(text) {
  const found = {};
  let section = "";
  for (const line of text.split("\n")) {
    const head = line.match(/^\s*\[+([^\]]+)\]+/);
    const pair = line.match(/^\s*([\w."-]+)\s*=\s*(.*)$/);
    if (head) section = head[1] + ".";
    else if (pair) found[section + pair[1]] = pair[2];
  }
  return found;
}

export function ComparePage({ asked, theme }) {
  const ids = (asked.runs || "").split("|").filter(Boolean);
  if (ids.length < 2) return html`<${Picker} ids=${ids} />`;
  return html`<${Comparison} key=${asked.runs} ids=${ids} asked=${asked} theme=${theme} />`;
}

function Picker({ ids }) {
  const { data, error } = usePolled(() => api("/api/runs"), [], 0);
  const [chosen, choose] = useState(ids);
  if (!data) return html`<${ErrorText} error=${error} />`;
  const runs = data.runs.filter((run) => run.kind !== "eval" && !run.is_archived);
  const toggle = (id) =>
    choose((old) => (old.includes(id) ? old.filter((one) => one !== id) : [...old, id]));
  return html`<h1>Compare</h1>
    <p>Choose two runs or more${runs.length < 2 ? "; there are fewer here yet" : ""}.</p>
    ${runs.map(
      (run) =>
        html`<p>
          <label
            ><input
              type="checkbox"
              checked=${chosen.includes(run.id)}
              onChange=${() => toggle(run.id)}
            />
            ${" "}${nameOf(run)} <span class="chip">${run.kind}</span></label
          >
        </p>`,
    )}
    <button
      class="main"
      disabled=${chosen.length < 2}
      onClick=${() => changeParameters({ runs: chosen.join("|") })}
    >
      Compare ${chosen.length || ""}
    </button>`;
}

function Comparison({ ids, asked, theme }) {
  const readRun = (id) => api(`/api/run?${query({ run: id })}`);
  const names = [...COMPARED.map((chart) => chart.name), ...X_METRICS].join(",");
  const readSeries = (id) => api(`/api/series?${query({ run: id, names })}`);
  const runs = usePolled(() => Promise.all(ids.map(readRun)), [ids.join()], 4);
  const series = usePolled(() => Promise.all(ids.map(readSeries)), [ids.join()], 4);
  const axis = asked.x || "step";
  const configs = useMemo(
    () =>
      (runs.data || []).map((run) =>
        Object.assign({}, ...Object.values(run.configs).map(flattenToml)),
      ),
    [runs.data],
  );
  const error = runs.error || series.error;
  if (!runs.data || !series.data) {
    return html`<${ErrorText} error=${error} />${!error && html`<p class="soft">Reading …</p>`}`;
  }
  const groups = groupBySettings(runs.data, configs);
  const hasSeeds = groups.some((group) => group.members.length > 1);
  const isGrouped = hasSeeds && asked.seeds !== "single";
  const toXs = series.data.map((found) => xOfStep(axis, found));
  const linesOf = (name) => {
    const data = (i) => convertX(series.data[i][name], toXs[i]);
    return isGrouped ? groupLines(groups, data) : singleLines(runs.data, data);
  };
  const charts = COMPARED.map((chart) => ({ ...chart, lines: linesOf(chart.name) }));
  const shown = charts.filter((chart) => chart.log || !isAlwaysZero(chart.lines));
  return html`<div class="row">
      <h1>Compare</h1>
      ${runs.data.map(
        (run, i) =>
          html`<a href=${"#" + runPath(run.id)}
              ><span class="chip" style=${{ borderColor: isGrouped ? "" : colorOf(i) }}
                >${nameOf(run)} (${run.kind}, ${run.status})</span
              ></a
            >
            <${FindingBadge} finding=${run.finding} />`,
      )}
      <span class="grow"></span>
      ${
        hasSeeds &&
        html`<label class="small inline"
          ><input
            type="checkbox"
            checked=${isGrouped}
            onChange=${(e) => changeParameters({ seeds: e.target.checked ? "" : "single" })}
          />
          average over seeds</label
        >`
      }
      <${ChartControls} asked=${asked} change=${changeParameters} hasTokens=${true} />
      <button class="link" onClick=${() => savePlot(ids.join("|"), "png", "compare")}>PNG</button>
    </div>
    <div class="grid" style=${{ margin: "1rem 0" }}>
      ${shown.map(
        (chart) =>
          html`<${Chart}
            key=${chart.title}
            ...${chart}
            theme=${theme}
            axis=${axis}
            isConverted=${true}
            legend=${true}
            smoothing=${+(asked.smooth || 0)}
          />`,
      )}
    </div>
    <${Differences} runs=${runs.data} configs=${configs} />`;
}

// The chart's points are already on its x axis: runs reach a step at different times.
function convertX(data, toX) {
  if (!data) return null;
  const points = data[0].map((step, i) => [toX(step), data[1][i]]).filter(([x]) => x !== null);
  return [points.map(([x]) => x), points.map(([, value]) => value)];
}

// Runs whose settings are equal but for the seed, in groups.
export function groupBySettings(runs, configs) {
  const groups = new Map();
  configs.forEach((config, i) => {
    const kept = Object.entries(config).filter(([key]) => !IGNORED.test(key));
    const key = JSON.stringify([runs[i].kind, kept.sort()]);
    if (!groups.has(key)) groups.set(key, { label: nameOf(runs[i]), members: [] });
    groups.get(key).members.push(i);
  });
  return [...groups.values()];
}

const singleLines = (runs, data) =>
  runs.map((run, i) => ({ label: nameOf(run), color: COLORS[i % 6], data: data(i) }));

// For each group the mean, and a band from the lowest to the highest run.
function groupLines(groups, data) {
  return groups.flatMap((group, g) => {
    const color = COLORS[g % 6];
    const known = group.members.map(data).filter(Boolean);
    if (known.length < 2) return [{ label: group.label, color, data: known[0] || null }];
    const maps = known.map(([xs, values]) => new Map(xs.map((x, i) => [x, values[i]])));
    const xs = known[0][0].filter((x) => maps.every((map) => map.has(x)));
    const valuesAt = (x) => maps.map((map) => map.get(x));
    const line = (reduce) => [xs, xs.map((x) => reduce(valuesAt(x)))];
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const label = `${group.label}, ${known.length} seeds`;
    return [
      { label, color, data: line(mean) },
      { label, color, band: "low", data: line((values) => Math.min(...values)) },
      { label, color, band: "high", data: line((values) => Math.max(...values)) },
    ];
  });
}

function Differences({ runs, configs }) {
  const keys = [...new Set(configs.flatMap(Object.keys))]
    .filter((key) => new Set(configs.map((config) => config[key])).size > 1)
    .filter((key) => !/output_dir/.test(key))
    .sort();
  return html`<section class="card scroll">
    <h2>Differences between the configurations</h2>
    ${
      keys.length
        ? html`<table>
            <thead>
              <tr>
                <th>Key</th>
                ${runs.map((run) => html`<th>${nameOf(run)}</th>`)}
              </tr>
            </thead>
            <tbody>
              ${keys.map(
                (key) =>
                  html`<tr>
                    <td class="mono">${key}</td>
                    ${configs.map((config) => html`<td class="mono">${config[key] ?? "–"}</td>`)}
                  </tr>`,
              )}
            </tbody>
          </table>`
        : html`<p class="soft">None but their directories.</p>`
    }
  </section>`;
}
