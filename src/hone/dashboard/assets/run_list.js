// The list of runs and evaluations: searched, sorted, tagged, and chosen for comparison.
import { html, useState } from "/assets/vendor/preact-htm.js";
import { api, usePolled } from "/assets/api.js";
import {
  ErrorText,
  FindingBadge,
  Sparkline,
  formatAge,
  formatNumber,
  nameOf,
} from "/assets/format.js";
import { changeParameters, go, runPath } from "/assets/routes.js";

const COLUMNS = [
  { key: "name", label: "Run", value: (run) => nameOf(run).toLowerCase() },
  { key: "status", label: "Status", value: (run) => run.status },
  { key: "", label: "Curve" },
  { key: "last", label: "First → last", value: (run) => run.last ?? -Infinity, isNumber: true },
  { key: "step", label: "Step", value: (run) => run.step, isNumber: true },
  { key: "model", label: "Model, environment", value: (run) => `${run.model} ${run.env}` },
  { key: "device", label: "Device", value: (run) => run.device },
  { key: "age", label: "Last change", value: (run) => run.age, isNumber: true },
];
const KINDS = { train: "Training", eval: "Evaluations", all: "All" };

const searchText = (run) =>
  [run.id, run.label, run.note, run.status, run.model, run.env, run.device, ...run.tags]
    .concat(run.finding ? [run.finding.kind, run.finding.title] : [])
    .join(" ")
    .toLowerCase();

export function RunList({ asked }) {
  const { data, error } = usePolled(() => api("/api/runs"), [], 3);
  const [chosen, choose] = useState([]);
  if (!data) {
    return html`<${ErrorText} error=${error} />${
        !error && html`<p class="soft">Looking for runs …</p>`
      }`;
  }
  const kind = asked.kind || "train";
  const terms = (asked.search || "").toLowerCase().split(/\s+/).filter(Boolean);
  const isShown = (run) =>
    (kind === "all" || (run.kind === "eval") === (kind === "eval")) &&
    (asked.archived === "1" || !run.is_archived) &&
    (!asked.tag || run.tags.includes(asked.tag)) &&
    terms.every((term) => searchText(run).includes(term));
  const found = sortRuns(data.runs.filter(isShown), asked.sort || "age", asked.down === "1");
  const tags = [...new Set(data.runs.flatMap((run) => run.tags))].sort();
  const archived = data.runs.filter((run) => run.is_archived).length;
  const count = (name) =>
    data.runs.filter((run) => name === "all" || (run.kind === "eval") === (name === "eval")).length;
  const toggle = (id) =>
    choose((old) => (old.includes(id) ? old.filter((one) => one !== id) : [...old, id]));
  const compare = () => go("/compare", { runs: chosen.join("|") });
  return html`<div class="row">
      <h1>Runs</h1>
      <span class="soft small mono">${data.root}</span><span class="grow"></span>
      <input
        type="search"
        placeholder="name, tag, model, environment, status"
        aria-label="search runs"
        size="34"
        value=${asked.search || ""}
        onInput=${(e) => changeParameters({ search: e.target.value })}
      />
      <button class="main" disabled=${chosen.length < 2} onClick=${compare}>
        Compare ${chosen.length || ""}
      </button>
    </div>
    <div class="row filters" style=${{ marginTop: ".6rem" }}>
      ${Object.entries(KINDS).map(
        ([name, label]) =>
          html`<button
            aria-pressed=${kind === name}
            onClick=${() => changeParameters({ kind: name === "train" ? "" : name })}
          >
            ${label} ${count(name)}
          </button>`,
      )}
      ${tags.map(
        (tag) =>
          html`<button
            class="chip"
            aria-pressed=${asked.tag === tag}
            onClick=${() => changeParameters({ tag: asked.tag === tag ? "" : tag })}
          >
            ${tag}
          </button>`,
      )}
      ${
        archived > 0 &&
        html`<label class="inline"
          ><input
            type="checkbox"
            checked=${asked.archived === "1"}
            onChange=${(e) => changeParameters({ archived: e.target.checked ? "1" : "" })}
          />
          archived (${archived})</label
        >`
      }
    </div>
    <${ErrorText} error=${error} />
    ${!data.runs.length && html`<${EmptyList} root=${data.root} />`}
    ${
      found.length > 0 &&
      html`<div class="scroll">
        <table class="cards">
          <thead>
            <tr>
              <th></th>
              ${COLUMNS.map((column) => html`<${HeaderCell} column=${column} asked=${asked} />`)}
            </tr>
          </thead>
          <tbody>
            ${found.map(
              (run) =>
                html`<${RunRow}
                  key=${run.id}
                  run=${run}
                  isChosen=${chosen.includes(run.id)}
                  toggle=${() => toggle(run.id)}
                />`,
            )}
          </tbody>
        </table>
      </div>`
    }
    ${data.runs.length > 0 && !found.length && html`<p class="soft">No run matches.</p>`}`;
}

function EmptyList({ root }) {
  return html`<div class="card" style=${{ marginTop: "1rem" }}>
    <h2>No run is here yet</h2>
    <p>
      Start one on the page <a href="#/lab">Lab</a>, or in a terminal, and it appears here by
      itself: <code> make demo</code>, or <code>rl @ FILE --output-dir DIR</code> with DIR below
      ${root}.
    </p>
  </div>`;
}

function sortRuns(runs, key, isDescending) {
  const column = COLUMNS.find((one) => one.key === key && one.value) || COLUMNS.at(-1);
  const order = isDescending ? -1 : 1;
  return [...runs].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    return order * (x < y ? -1 : x > y ? 1 : 0);
  });
}

function HeaderCell({ column, asked }) {
  const style = column.isNumber ? "num" : "";
  if (!column.value) return html`<th class=${style}>${column.label}</th>`;
  const isSorted = (asked.sort || "age") === column.key;
  const isDescending = asked.down === "1";
  const sort = () =>
    changeParameters({ sort: column.key, down: isSorted && !isDescending ? "1" : "" });
  const direction = isDescending ? "descending" : "ascending";
  return html`<th class=${style} aria-sort=${isSorted ? direction : null}>
    <button class="link" onClick=${sort}>
      ${column.label}${isSorted ? (isDescending ? " ↓" : " ↑") : ""}
    </button>
  </th>`;
}

function RunRow({ run, isChosen, toggle }) {
  const isEvaluation = run.kind === "eval";
  const model = run.model.split("/").slice(-2).join("/");
  const name = isEvaluation && !run.label ? `${run.env} · ${model}` : nameOf(run);
  const first = run.first === null || isEvaluation ? "" : `${formatNumber(run.first)} → `;
  return html`<tr>
    <td>
      ${
        !isEvaluation &&
        html`<input
          type="checkbox"
          aria-label=${`choose ${run.id}`}
          checked=${isChosen}
          onChange=${toggle}
        />`
      }
    </td>
    <td>
      <a href=${"#" + runPath(run.id, isEvaluation ? "rollouts" : "overview")} title=${run.place}
        ><b>${name}</b></a
      >${" "}<span class="chip">${run.kind}</span>
      ${run.tags.map((tag) => html`${" "}<span class="chip tag">${tag}</span>`)}
      ${
        run.fork &&
        html`${" "}<span class="chip">fork of ${run.fork.run}, step ${run.fork.step}</span>`
      }
      ${run.label && html`<div class="soft small">${run.place}</div>`}
    </td>
    <td>
      <span class="status ${run.status}">${run.status}</span>${" "}
      <${FindingBadge} finding=${run.finding} />
    </td>
    <td class="wide"><${Sparkline} values=${run.spark} /></td>
    <td class="num wide">
      ${run.last === null ? "–" : `${first}${formatNumber(run.last)}`}${" "}
      <span class="soft small">${run.metric.split("/")[0]}</span>
    </td>
    <td class="num hide">
      ${isEvaluation ? "" : run.step}${run.max_steps ? ` / ${run.max_steps}` : ""}
    </td>
    <td class="hide small">${model}<br /><span class="soft">${run.env}</span></td>
    <td class="hide small">${run.device || "–"}</td>
    <td class="num small wide">${formatAge(run.age)} ago</td>
  </tr>`;
}
