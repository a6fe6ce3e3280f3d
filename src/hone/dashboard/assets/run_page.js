// A run: its header, with name, tags and note, and the tabs below.
import { html, useState } from "/assets/vendor/preact-htm.js";
import { api, query, token, usePolled } from "/assets/api.js";
import { Checkpoints } from "/assets/checkpoints.js";
import { ConfigTab, LogsTab } from "/assets/config_and_logs.js";
import { DoctorTab } from "/assets/doctor.js";
import { ErrorText, formatNumber, formatPercent, nameOf } from "/assets/format.js";
import { JobButtons } from "/assets/lab.js";
import { Overview } from "/assets/overview.js";
import { Rollouts } from "/assets/rollouts.js";
import { PlaygroundTab } from "/assets/playground.js";
import { runPath } from "/assets/routes.js";
import { Timeline } from "/assets/timeline.js";

const TABS = {
  overview: { title: "Overview", kinds: ["rl", "sft"], component: Overview },
  timeline: { title: "Timeline", kinds: ["rl"], component: Timeline },
  rollouts: { title: "Rollouts", kinds: ["rl", "eval"], component: Rollouts },
  checkpoints: { title: "Checkpoints", kinds: ["rl", "sft"], component: Checkpoints },
  playground: { title: "Playground", kinds: ["rl", "sft"], component: PlaygroundTab },
  doctor: { title: "Doctor", kinds: ["rl", "sft"], component: DoctorTab },
  config: { title: "Config", kinds: ["rl", "sft", "eval"], component: ConfigTab },
  logs: { title: "Logs", kinds: ["rl", "sft"], component: LogsTab },
};

export function RunPage({ id, tab, asked, theme }) {
  const { data: run, error } = usePolled(() => api(`/api/run?${query({ run: id })}`), [id], 2);
  const [isEditing, setEditing] = useState(false);
  if (!run) return html`<${MissingRun} id=${id} error=${error} />`;
  const tabs = Object.keys(TABS).filter((name) => TABS[name].kinds.includes(run.kind));
  const shown = tabs.includes(tab) ? tab : tabs[0];
  const Shown = TABS[shown].component;
  return html`<${RunHeader} run=${run} edit=${() => setEditing(!isEditing)} />
    ${isEditing && html`<${NoteForm} run=${run} close=${() => setEditing(false)} />`}
    <${ErrorText} error=${error} />
    <div class="tabs" role="navigation" aria-label="parts of the run">
      ${tabs.map(
        (name) =>
          html`<a href=${"#" + runPath(id, name)} aria-current=${name === shown ? "page" : null}
            >${TABS[name].title}</a
          >`,
      )}
    </div>
    <${Shown} run=${run} asked=${asked} theme=${theme} />`;
}

function MissingRun({ id, error }) {
  if (error && error.message.startsWith("not there")) {
    return html`<h1>${id.replace(/:\w+$/, "")}</h1>
      <p class="soft">
        There is no such run. A run that was just started appears when it has loaded its model;
        until then the page <a href="#/lab">Lab</a> shows its output.
      </p>`;
  }
  return html`<${ErrorText} error=${error} />${
      !error && html`<p class="soft">Reading the run …</p>`
    }`;
}

function RunHeader({ run, edit }) {
  const isEvaluation = run.kind === "eval";
  const job = run.jobs.find((one) => one.command !== "vf-eval");
  const facts = [run.model, run.env, run.device];
  if (run.about.commit) facts.push(`commit ${run.about.commit}`);
  const share = run.max_steps ? Math.min(100, (100 * run.step) / run.max_steps) : 0;
  return html`<div class="row">
      <h1>${nameOf(run)}</h1>
      <span class="chip">${run.kind}</span>
      <span class="status ${run.status}">${run.status}</span>
      ${run.tags.map((tag) => html`<span class="chip tag">${tag}</span>`)}
      ${
        isEvaluation
          ? html`<${EvaluationResult} about=${run.about} />`
          : html`<span class="soft"
              >step ${run.step}${run.max_steps ? ` of ${run.max_steps}` : ""}</span
            >`
      }
      ${
        run.max_steps &&
        html`<div
          class="meter"
          role="progressbar"
          aria-label="progress"
          aria-valuenow=${run.step}
          aria-valuemax=${run.max_steps}
        >
          <i style=${{ width: `${share}%` }}></i>
        </div>`
      }
      <span class="grow"></span>
      ${job && html`<${JobButtons} job=${job} />`}
      ${token() && html`<button onClick=${edit}>Name, tags, note</button>`}
      ${!isEvaluation && html`<a href=${`#/lab?${query({ from: run.id })}`}>New run from this</a>`}
    </div>
    <p class="soft small run-facts">
      ${run.label ? `${run.place} · ` : ""}${facts.filter(Boolean).join(" · ")}${
        run.fork &&
        ` · forked from ${run.fork.run} at step ${run.fork.step} (dashed line)${describeChanges(run.fork.changed)}`
      }
    </p>
    ${run.status === "running" && html`<${GpuUse} />`}
    ${run.note && html`<p class="note">${run.note}</p>`}`;
}

const describeChanges = (changed) =>
  Object.entries(changed || {})
    .map(([key, [was, now]]) => `, ${key} ${JSON.stringify(was)} → ${JSON.stringify(now)}`)
    .join("");

function EvaluationResult({ about }) {
  const margin = formatNumber(1.96 * about.reward_error);
  return html`<span
    >reward <b>${formatNumber(about.reward)}</b> ± ${margin} (95 %), ${about.rollouts} rollouts,
    ${about.failed} failed</span
  >`;
}

function GpuUse() {
  const { data } = usePolled(() => api("/api/machine"), [], 5);
  if (!data || !data.gpus.length) return null;
  const memory = (gpu) =>
    gpu.total ? `, ${(gpu.used / 1024).toFixed(1)} of ${(gpu.total / 1024).toFixed(0)} GiB` : "";
  return html`<p class="small row">
    ${data.gpus.map(
      (gpu) =>
        html`<span class="chip" title=${gpu.name}
          >GPU ${gpu.index}: ${formatPercent(gpu.busy)} busy${memory(gpu)}</span
        >`,
    )}
  </p>`;
}

function NoteForm({ run, close }) {
  const [label, setLabel] = useState(run.label);
  const [tags, setTags] = useState(run.tags.join(", "));
  const [note, setNote] = useState(run.note);
  const [isArchived, setArchived] = useState(run.is_archived);
  const [error, setError] = useState(null);
  const save = (event) => {
    event.preventDefault();
    const words = tags.split(",").map((word) => word.trim());
    const body = { run: run.id, label, tags: words, note, is_archived: isArchived };
    api("/api/note", body).then(close, setError);
  };
  return html`<form class="card filters" onSubmit=${save} aria-label="name, tags, note">
    <label
      >name<input
        value=${label}
        placeholder=${run.place}
        onInput=${(e) => setLabel(e.target.value)}
    /></label>
    <label
      >tags, separated by commas<input value=${tags} onInput=${(e) => setTags(e.target.value)}
    /></label>
    <label class="grow"
      >note<textarea rows="2" value=${note} onInput=${(e) => setNote(e.target.value)}></textarea>
    </label>
    <label class="inline"
      ><input
        type="checkbox"
        checked=${isArchived}
        onChange=${(e) => setArchived(e.target.checked)}
      />
      archived</label
    >
    <button class="main">Save</button>
    <button type="button" onClick=${close}>Cancel</button>
    <${ErrorText} error=${error} />
  </form>`;
}
