// Start runs: a configuration that is checked while it is typed, and the jobs started here.
import { html, useEffect, useState } from "/assets/vendor/preact-htm.js";
import { api, query, token, usePolled } from "/assets/api.js";
import { ErrorText } from "/assets/format.js";
import { runPath } from "/assets/routes.js";

const TYPING_MS = 400;

export function LabPage({ asked }) {
  const { data: lab, error } = usePolled(() => api("/api/lab"), [], 2);
  const [toml, setToml] = useState("");
  const [command, setCommand] = useState("rl");
  const [directory, setDirectory] = useState("");
  const [where, setWhere] = useState("here");
  const [more, setMore] = useState("");
  const [checked, setChecked] = useState(null);
  const [failure, setFailure] = useState(null);
  const [started, setStarted] = useState(null);
  const fill = (found) => {
    setToml(found.toml);
    setCommand(found.command);
  };
  const loadRecipe = (name) =>
    name && api(`/api/lab/recipe?${query({ name })}`).then(fill, setFailure);
  useEffect(() => {
    if (asked.from) api(`/api/lab/config?${query({ run: asked.from })}`).then(fill, setFailure);
  }, [asked.from]);
  useEffect(() => {
    if (!toml.trim()) {
      setChecked(null);
      return;
    }
    const check = () =>
      api("/api/lab/check", { command, toml }).then((found) => {
        setChecked(found);
        setFailure(null);
      }, setFailure);
    const timer = setTimeout(check, TYPING_MS);
    return () => clearTimeout(timer);
  }, [toml, command]);
  const start = () =>
    api("/api/lab/start", { command, toml, output_dir: directory, where, more }).then((job) => {
      setStarted(job);
      setFailure(null);
      setDirectory("");
    }, setFailure);
  if (!lab) return html`<${ErrorText} error=${error} />`;
  return html`<h1>Lab</h1>
    <p class="soft">
      Start a run from a configuration. The command runs in <span class="mono">${lab.home}</span>.
      ${
        !token() &&
        html`${" "}<b
            >To start runs, open the address with the token that the dashboard printed.</b
          >`
      }
    </p>
    <div class="split">
      <section class="card">
        <div class="filters">
          <label
            >recipe<select aria-label="recipe" onChange=${(e) => loadRecipe(e.target.value)}>
              <option value="">choose …</option>
              ${lab.recipes.map((name) => html`<option value=${name}>${name}</option>`)}
            </select></label
          >
          <label
            >command<select
              aria-label="command"
              value=${command}
              onChange=${(e) => setCommand(e.target.value)}
            >
              ${lab.commands.map((name) => html`<option value=${name}>${name}</option>`)}
            </select></label
          >
          <label
            >output directory<input
              aria-label="output directory"
              placeholder="outputs/NAME"
              value=${directory}
              onInput=${(e) => setDirectory(e.target.value)}
          /></label>
          ${
            lab.slurm &&
            html`<label
              >where<select
                aria-label="where"
                value=${where}
                onChange=${(e) => setWhere(e.target.value)}
              >
                <option value="here">this machine</option>
                <option value="slurm">Slurm</option>
              </select></label
            >`
          }
          ${
            where === "slurm" &&
            html`<label
              >options of hone slurm<input
                aria-label="options of hone slurm"
                placeholder="--train-gpus 1 --infer-gpus 1"
                value=${more}
                onInput=${(e) => setMore(e.target.value)}
            /></label>`
          }
        </div>
        <textarea
          class="toml"
          aria-label="configuration"
          spellcheck="false"
          value=${toml}
          onInput=${(e) => setToml(e.target.value)}
          placeholder="the configuration, in TOML"
        ></textarea>
        <div class="row" style=${{ marginTop: ".5rem" }}>
          <button class="main" disabled=${!checked || !checked.ok} onClick=${start}>Start</button>
          <${CheckResult} checked=${checked} />
        </div>
        <${ErrorText} error=${failure} />
        ${
          started &&
          html`<p>
            ${started.name} is ${started.state}. It writes to${" "}
            <a href=${"#" + runPath(started.run)}>${started.output_dir}</a>.
          </p>`
        }
      </section>
      <section class="card">
        <h2>Jobs</h2>
        ${!lab.jobs.length && html`<p class="soft">None yet.</p>`}
        ${lab.jobs.map((job) => html`<${JobLine} key=${job.name} job=${job} />`)}
      </section>
    </div>`;
}

function CheckResult({ checked }) {
  if (!checked) return null;
  if (!checked.ok) return html`<span class="error" role="alert">${checked.error}</span>`;
  const steps = checked.max_steps ? `, ${checked.max_steps} steps` : "";
  return html`<span class="chip good">valid</span>
    <span class="small soft">${checked.model}${steps}</span>`;
}

function JobLine({ job }) {
  const [isOpen, setOpen] = useState(false);
  const { data } = usePolled(
    () => (isOpen ? api(`/api/job?${query({ name: job.name })}`) : Promise.resolve(null)),
    [isOpen, job.name, job.state],
    isOpen ? 2 : 0,
  );
  return html`<div class="job">
    <div class="row">
      <b>${job.name}</b><span class="status ${job.state}">${job.state}</span>
      <a href=${"#" + runPath(job.run)}>${job.output_dir}</a>
      <span class="grow"></span>
      <${JobButtons} job=${job} />
      <button aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>Output</button>
      ${
        job.state !== "running" &&
        html`<button onClick=${() => api(`/api/jobs/${job.name}/remove`, {})}>
          Remove from list
        </button>`
      }
    </div>
    ${isOpen && data && html`<pre class="log small">${data.text || "no output yet"}</pre>`}
  </div>`;
}

export function JobButtons({ job }) {
  const [error, setError] = useState(null);
  const act = (what) =>
    api(`/api/jobs/${job.name}/${what}`, {}).then(() => setError(null), setError);
  const kill = () =>
    confirm("End the run now? Its work since the last checkpoint is lost.") && act("kill");
  const canResume = ["stopped", "failed"].includes(job.state) && job.command !== "vf-eval";
  return html`<span class="row">
    ${
      job.state === "running" &&
      html`<button onClick=${() => act("stop")} title="ends after this step, with a checkpoint">
          Stop
        </button>
        <button class="bad" onClick=${kill}>Kill</button>`
    }
    ${job.state === "queued" && html`<button onClick=${() => act("stop")}>Remove from queue</button>`}
    ${
      canResume &&
      html`<button class="main" onClick=${() => act("resume")}>
        ${job.state === "failed" ? "Try again" : "Resume"}
      </button>`
    }
    <${ErrorText} error=${error} />
  </span>`;
}
